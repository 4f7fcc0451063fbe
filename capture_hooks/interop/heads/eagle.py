"""The plain ``config.json`` that SGLang, vLLM and SpecForge read; SafeAILab's EAGLE and SpecForge write it.

It carries the nested ids and the top-level ones that vLLM reads, each by its own convention, so that one
file is right for every engine that can be told.  Where one cannot, its key holds the reason in a form at
which it stops while starting; left out, it would take its default layers without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...conventions import Convention, Conventions
from ...errors import ConventionError
from ...heads.engines import VLLM_KEY, EngineStatement, sglang_ids, vllm_ids
from .draft import CONVERSION, Draft, HeadFiles, no_norm
from .inputs import chosen_convention
from .keys import reader_notes


def write_eagle(draft: Draft, unverified: bool, conventions: Conventions) -> HeadFiles:
    """``midlayer.*`` and ``t2d``; nested ids are SGLang's, top-level ones vLLM's."""
    nested = chosen_convention("sglang", draft.target.family, unverified, conventions)
    return write_plain(draft, "eagle", "midlayer", nested, conventions, masks=True, own={})


def write_plain(
    draft: Draft,
    layout: str,
    prefix: str,
    nested: Convention,
    conventions: Conventions,
    masks: bool,
    own: Mapping[str, Any],
) -> HeadFiles:
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
    homeless = [name for name in draft.unknown_tensors if not _of_another_kind(name, draft)]
    losses = [f"{draft.no_place(name)}; vLLM refuses a file that holds it" for name in homeless]
    draft = draft.without(homeless)
    found = draft.engine_statements(conventions)
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
        "architectures": [draft.schema.architecture],
        **{name: value for name, value in draft.fields.items() if name != "rope_parameters"},
        **draft.rope_spellings,
        "draft_vocab_size": draft.fields["draft_vocab_size"],
        "target_hidden_size": draft.fields["target_hidden_size"],
        "num_aux_hidden_states": len(draft.points),
        "tie_word_embeddings": False,
        **{name: computes[name] for name in ("norm_before_residual", "norm_before_fc", "fc_norm")},
        VLLM_KEY: vllm_ids(by_engine["vllm"]),
        **draft.dtypes,
        "use_cache": True,
    }
    eagle |= {
        **draft.eagle_extras,
        "use_aux_hidden_state": True,
        VLLM_KEY: ids,
        "norm_before_fc": computes["norm_before_fc"],
    }
    if computes["norm_before_lm_head"]:
        # A top-level `false` would read "no norm at all" to SpecForge 0.2.0; see `heads.config.compose`.
        eagle["norm_output"] = computes["norm_output"]
        if computes["norm_output"]:
            config["norm_output"] = True
    elif layout == "eagle":
        config["norm_output"] = False
    else:
        losses.append(no_norm(layout))
    config["eagle_config"] = eagle
    config[CONVERSION] = draft.conversion(layout)
    return HeadFiles(draft.named(prefix, masks, both_norms=True), config, tuple(losses), tuple(notes))


def _of_another_kind(name: str, draft: Draft) -> bool:
    """Whether a server has a place for a tensor that a plain head lacks.

    Those are P-EAGLE's mask, what a quantised weight needs, and fc's bias (SGLang's alone).  vLLM's
    ``AutoWeightsLoader`` refuses any other ("There is no module or parameter named"), and SGLang passes over
    it (vLLM 0.32.0 and SGLang 0.5.23, ``llama_eagle3.py``, ``load_weights``).
    """
    quantised = "quantization_config" in draft.extras and name.rpartition(".")[0] + ".weight" in draft.shapes
    return quantised or name in ("mask_hidden", "fc.bias")


def _wrong(draft: Draft, found: tuple[EngineStatement, ...]) -> list[str]:
    """The engines that read this layout and would compute something else."""
    notes = [str(statement) for statement in found if not statement.right and statement.engine != "embedded"]
    notes += reader_notes(draft)
    if (window := draft.window) is not None:
        notes.append(
            f"it attends to the last {window} tokens: vLLM does so, SGLang only with "
            "--speculative-draft-window-size; SpecForge and ModelOpt attend to all"
        )
    return notes
