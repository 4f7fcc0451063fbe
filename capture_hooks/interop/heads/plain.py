"""The plain ``config.json`` that SGLang, vLLM and SpecForge read: layouts *eagle* and *modelopt*.

Both carry the nested ids and the top-level ones that vLLM reads, each by its own convention, so that one
file is right for every engine that can be told.  Where one cannot, its key holds the reason in a form at
which it stops while starting; left out, it would take its default layers without a word.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from ..._version import __version__
from ...conventions import Convention, Conventions
from ...errors import ConventionError
from ...heads.config import rope_spellings
from ...heads.engines import VLLM_KEY, EngineStatement, sglang_ids, statements, vllm_ids
from .arithmetic import reader_notes
from .draft import CONVERSION, Draft, Written
from .shapes import shapes

_ARCHITECTURE: Final = "LlamaForCausalLMEagle3"


def write_plain(
    draft: Draft,
    layout: str,
    prefix: str,
    nested: Convention,
    conventions: Conventions,
    masks: bool,
    own: Mapping[str, Any],
) -> Written:
    """A head with a plain config.

    Args:
        draft: with its inputs in ascending depth.
        layout: the destination's name.
        prefix: what layer 0's tensors are called, ``midlayer`` or ``layers.0``.
        nested: the convention of ``eagle_config``'s ids.
        conventions: what layer ids mean to each engine.
        masks: whether ``t2d`` is written beside ``d2t``.
        own: keys of ``eagle_config`` that the layout alone has.
    """
    homeless = [name for name in unknown_tensors(draft) if not _of_another_kind(name, draft)]
    losses = [f"{no_place(name, draft)}; vLLM refuses a file that holds it" for name in homeless]
    draft = without(draft, homeless)
    found = engine_statements(draft, conventions)
    by_engine = {statement.engine: statement for statement in found}
    try:
        ids: Any = nested.from_points(draft.points, draft.target.n_layers)
    except ConventionError as error:
        losses.append(f"{nested.key} cannot be written: {error}")
        ids = sglang_ids(by_engine["sglang"])
    notes = _wrong(draft, found)
    sglang = by_engine["sglang"]
    if nested.library != sglang.engine and sglang.right and ids != sglang.ids:
        notes.append(
            f"sglang reads other states in {nested.key} = {ids}, and would have to find {sglang.ids}"
        )
    computes, eagle = draft.computes, dict(own)
    config: dict[str, Any] = {
        **draft.extras,
        "architectures": [_ARCHITECTURE],
        **_fields(draft),
        "draft_vocab_size": draft.fields["draft_vocab_size"],
        "target_hidden_size": draft.fields["target_hidden_size"],
        "num_aux_hidden_states": len(draft.points),
        "tie_word_embeddings": False,
        "norm_before_residual": computes.norm_before_residual,
        "norm_before_fc": computes.norm_before_fc,
        "fc_norm": computes.fc_norm,
        VLLM_KEY: vllm_ids(by_engine["vllm"]),
        **dtypes(draft.tensors),
        "use_cache": True,
    }
    eagle |= {
        **draft.eagle_extras,
        "use_aux_hidden_state": True,
        VLLM_KEY: ids,
        "norm_before_fc": computes.norm_before_fc,
    }
    if computes.norm_before_lm_head:
        # A top-level `false` would read "no norm at all" to SpecForge 0.2.0; see `heads.config.compose`.
        eagle["norm_output"] = computes.norm_output
        if computes.norm_output:
            config["norm_output"] = True
    elif layout == "eagle":
        config["norm_output"] = False
    else:
        losses.append(no_norm(layout))
    config["eagle_config"] = eagle
    config[CONVERSION] = conversion(draft, layout)
    return Written(named(draft, prefix, masks, both_norms=True), config, tuple(losses), tuple(notes))


def named(draft: Draft, prefix: str, masks: bool, both_norms: bool) -> dict[str, Tensor]:
    """The tensors with layer 0 under ``prefix``, and the further layers' norm under one name or both.

    SGLang and TensorRT-LLM call that norm ``hidden_norm``, vLLM and speculators ``input_layernorm``.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in draft.tensors.items():
        first = name.startswith("midlayer.")
        found[f"{prefix}.{name.removeprefix('midlayer.')}" if first else name] = tensor
        if both_norms and not first and name.endswith(".input_layernorm.weight"):
            found[name.replace("input_layernorm", "hidden_norm")] = tensor
    if masks and "d2t" in found:
        marked = torch.zeros(draft.fields["vocab_size"], dtype=torch.bool)
        marked[found["d2t"] + torch.arange(len(found["d2t"]))] = True
        found["t2d"] = marked
    return found


def unknown_tensors(draft: Draft) -> list[str]:
    """Tensors that no Llama-type EAGLE-3 draft has: another kind's, or a quantised one's scales."""
    known = {name for name, _ in shapes(draft.fields, draft.computes, len(draft.points))}
    return sorted(name for name in draft.tensors if name not in known and name != "norm.weight")


def without(draft: Draft, names: Collection[str]) -> Draft:
    """The same head without some tensors."""
    return dataclasses.replace(draft, tensors={n: t for n, t in draft.tensors.items() if n not in names})


def no_place(name: str, draft: Draft) -> str:
    """Why a tensor is lost."""
    layers, number = draft.fields["num_hidden_layers"], name.removeprefix("layers.").partition(".")[0]
    if name.startswith("layers.") and number.isdigit() and int(number) >= layers:
        return f"the tensor {name} is of layer {number}, and its config has {layers} (num_hidden_layers)"
    return f"the tensor {name} has no place in it"


def _of_another_kind(name: str, draft: Draft) -> bool:
    """Whether a server has a place for a tensor that a plain head lacks.

    Those are P-EAGLE's mask, what a quantised weight needs, and fc's bias (SGLang's alone).  vLLM's
    ``AutoWeightsLoader`` refuses any other ("There is no module or parameter named"), and SGLang passes over
    it (vLLM 0.32.0 and SGLang 0.5.23, ``llama_eagle3.py``, ``load_weights``).
    """
    known = {known for known, _ in shapes(draft.fields, draft.computes, len(draft.points))}
    quantised = "quantization_config" in draft.extras and name.rpartition(".")[0] + ".weight" in known
    return quantised or name in ("mask_hidden", "fc.bias")


def engine_statements(draft: Draft, conventions: Conventions) -> tuple[EngineStatement, ...]:
    """What each engine would make of the head, from its points and norms."""
    fields = {**draft.fields, **flags_of(draft)}
    target = draft.target
    written = named(draft, "midlayer", masks=False, both_norms=True)
    about = (draft.points, target.n_layers, target.family, False, fields, written, __version__)
    return statements(*about, conventions)


def flags_of(draft: Draft) -> dict[str, bool]:
    """The four flags under the keys that every library but SpecForge gives them."""
    return {
        name: getattr(draft.computes, name)
        for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    }


def dtypes(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Both names: transformers reads ``dtype`` since 4.56, and ``torch_dtype`` before."""
    kind = str(next(t.dtype for t in tensors.values() if t.is_floating_point())).removeprefix("torch.")
    return {"dtype": kind, "torch_dtype": kind}


def no_norm(layout: str) -> str:
    """The loss of SpecForge's ``norm_output: false`` anywhere else."""
    return (
        f"lm_head reads the output without norm (SpecForge's norm_output: false), which {layout} cannot say"
    )


def conversion(draft: Draft, layout: str) -> dict[str, Any]:
    """What the file says of its making, and other layouts' keys, kept where no reader meets them."""
    carried = {name: dict(kept) for name, kept in draft.carried.items() if name != layout}
    return {"by": f"capture-hooks {__version__}"} | ({"carried": carried} if carried else {})


def _fields(draft: Draft) -> dict[str, Any]:
    fields = {k: v for k, v in draft.fields.items() if k != "rope_parameters"}
    return fields | rope_spellings(draft.fields["rope_parameters"])


def _wrong(draft: Draft, found: tuple[EngineStatement, ...]) -> list[str]:
    """The engines that read this layout and would compute something else."""
    notes = [str(statement) for statement in found if not statement.right and statement.engine != "embedded"]
    notes += reader_notes(draft)
    window = window_of(draft)
    if window is not None:
        notes.append(
            f"it attends to the last {window} tokens: vLLM does so, SGLang only with "
            "--speculative-draft-window-size; SpecForge and ModelOpt attend to all"
        )
    return notes


def window_of(draft: Draft) -> int | None:
    """Tokens that the draft's attention reaches back, where that is fewer than its positions.

    speculators 0.9 trains with 2048 unless told otherwise (``layer_types``, ``sliding_window``).
    """
    kinds, window = draft.extras.get("layer_types"), draft.extras.get("sliding_window")
    limited = isinstance(kinds, list) and "sliding_attention" in kinds
    if not limited or not isinstance(window, int) or window >= draft.fields["max_position_embeddings"]:
        return None
    return window
