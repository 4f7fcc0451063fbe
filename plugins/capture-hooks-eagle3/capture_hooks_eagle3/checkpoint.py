"""The head's tensors and settings in the field's names, and back.

Layer 0 is ``midlayer`` and further layers ``layers.N``, which SGLang 0.5.23 and vLLM 0.33 both read.
Those engines norm the input of a further layer under different names (SGLang ``hidden_norm``, vLLM
``input_layernorm``), so it is written under both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from capture_hooks.errors import HeadError

from .config import Eagle3Config

if TYPE_CHECKING:
    from .head import Eagle3Head

#: Where the settings of the objective and the start are kept in ``config.json``.
SECTION: Final = "eagle3_training"
_FLAGS: Final = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_SIZES: Final = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
}
_TRAINING: Final = (
    "steps",
    "step_decay",
    "outside",
    "feature_noise",
    "scale_inputs",
    "lm_head_init",
    "train_lm_head",
    "norm_init",
    "train_embedding",
    "init_layer",
)


@torch.no_grad()
def export_tensors(head: Eagle3Head, order: Sequence[int]) -> dict[str, Tensor]:
    """The tensors of ``head`` with input ``order[i]`` of its spec as input i.

    Raises:
        HeadError: when ``order`` is no permutation of the inputs.
    """
    if sorted(order) != list(range(head.inputs)):
        raise HeadError(f"eagle3: order {list(order)} is no permutation of the head's {head.inputs} inputs")
    out: dict[str, Tensor] = {}
    for name, parameter in head.named_parameters():
        if name.startswith("layers.0."):
            out["midlayer." + name.removeprefix("layers.0.")] = parameter
        elif name.startswith(("layers.", "norm.", "lm_head.")):
            out[name] = parameter
    for index in range(1, head.config.layers):
        out[f"layers.{index}.hidden_norm.weight"] = out[f"layers.{index}.input_layernorm.weight"]
    like, width = head.norm.weight, head.hidden_size
    columns = torch.cat([torch.arange(width) + i * width for i in order]).to(like.device)
    if head.inputs == 1:
        out["fc.weight"] = torch.eye(width, dtype=like.dtype, device=like.device)
    else:
        out["fc.weight"] = (head.fc.weight * head.input_scale)[:, columns]
    if head.config.norm_before_fc:
        out["input_norm.weight"] = head.input_norm.weight[columns]
    if head.config.fc_norm:
        for place, index in enumerate(order):
            out[f"fc_norm.{place}.weight"] = head.get_parameter(f"fc_norm.{index}.weight")
    if head.config.train_embedding:
        out["embed_tokens.weight"] = head.embedding
    ids = head.draft_token_ids
    out["d2t"] = ids - torch.arange(ids.shape[0], device=ids.device)
    out["t2d"] = torch.zeros(head.vocab_size, dtype=torch.bool, device=ids.device).index_fill_(0, ids, True)
    return {name: tensor.detach().clone().contiguous() for name, tensor in out.items()}


def export_config(head: Eagle3Head) -> dict[str, Any]:
    """The head's fields of ``config.json``."""
    config = head.config
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_size": head.hidden_size,
        "vocab_size": head.vocab_size,
        "draft_vocab_size": head.draft_token_ids.shape[0],
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": dict(config.rope or {}),
        "tie_word_embeddings": False,
        **{field: getattr(config, name) for name, field in _SIZES.items()},
        **{name: getattr(config, name) for name in _FLAGS},
        SECTION: {name: getattr(config, name) for name in _TRAINING},
    }


def read_config(fields_: Mapping[str, Any]) -> Eagle3Config:
    """The settings of a head from its ``config.json``.

    A head of another library has no section of training settings and gets the defaults.

    Raises:
        HeadError: naming a field that is missing or cannot be.
    """
    for name, wanted in {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}.items():
        if fields_.get(name, wanted) != wanted:
            raise HeadError(
                f"eagle3: config.json has {name} = {fields_[name]!r}; only {wanted!r} is supported"
            )
    training = fields_.get(SECTION, {})
    unknown = set(training) - set(_TRAINING)
    if unknown:
        raise HeadError(
            f"eagle3: {SECTION} has unknown settings {sorted(unknown)}; it takes {', '.join(_TRAINING)}"
        )
    settings: dict[str, Any] = {
        "rope": _rope(fields_),
        "rms_norm_eps": _needed(fields_, "rms_norm_eps"),
        **{name: _needed(fields_, field) for name, field in _SIZES.items()},
        **{name: bool(fields_.get(name, False)) for name in _FLAGS},
        **training,
    }
    return Eagle3Config(**settings)


def _needed(fields_: Mapping[str, Any], name: str) -> Any:
    value = fields_.get(name)
    if name == "head_dim" and value is None:
        value = _needed(fields_, "hidden_size") // _needed(fields_, "num_attention_heads")
    if name == "num_key_value_heads" and value is None:
        value = _needed(fields_, "num_attention_heads")
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise HeadError(f"eagle3: config.json has {name} = {value!r}; a number is needed")
    return value


def _rope(fields_: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(fields_.get("rope_parameters"), Mapping):
        return dict(fields_["rope_parameters"])
    theta = fields_.get("rope_theta")
    if theta is None:
        raise HeadError(
            "eagle3: config.json has neither rope_parameters nor rope_theta; which RoPE is unknown"
        )
    return {"rope_type": "default", **(fields_.get("rope_scaling") or {}), "rope_theta": theta}


@torch.no_grad()
def load_tensors(head: Eagle3Head, tensors: Mapping[str, Tensor], order: Sequence[int]) -> None:
    """Put exported tensors into ``head``, undoing ``order``; inputs come out unscaled.

    Raises:
        HeadError: naming a tensor that is missing, unknown or of the wrong shape.
    """
    if sorted(order) != list(range(head.inputs)):
        raise HeadError(f"eagle3: order {list(order)} is no permutation of the head's {head.inputs} inputs")
    renamed = {
        "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name: tensor
        for name, tensor in tensors.items()
    }
    head.input_scale.fill_(1.0)
    wanted = export_tensors(head, order)
    optional = {"t2d", "embed_tokens.weight"}
    for index in range(1, head.config.layers):
        _one_norm(renamed, index)
    missing = sorted(set(wanted) - set(renamed) - optional)
    unknown = sorted(set(renamed) - set(wanted) - optional)
    if missing or unknown:
        raise HeadError(
            "eagle3: the head's tensors do not fit its config.json"
            + (f"; missing: {', '.join(missing)}" if missing else "")
            + (f"; unexpected: {', '.join(unknown)}" if unknown else "")
        )
    for name, like in wanted.items():
        found = renamed.get(name)
        if found is not None and found.shape != like.shape:
            raise HeadError(
                f"eagle3: {name} is {list(found.shape)} in the file; config.json asks for {list(like.shape)}"
            )
    width = head.hidden_size
    back = torch.empty(head.inputs, dtype=torch.int64)
    back[torch.tensor(order)] = torch.arange(head.inputs)
    columns = torch.cat([torch.arange(width) + i * width for i in back.tolist()])
    for name, parameter in head.named_parameters():
        if name == "embedding":
            if "embed_tokens.weight" in renamed:
                parameter.copy_(renamed["embed_tokens.weight"])
        elif name == "fc.weight":
            parameter.copy_(renamed["fc.weight"][:, columns])
        elif name == "input_norm.weight":
            parameter.copy_(renamed["input_norm.weight"][columns])
        elif name.startswith("fc_norm."):
            index = int(name.split(".")[1])
            parameter.copy_(renamed[f"fc_norm.{int(back[index])}.weight"])
        elif name.startswith("layers.0."):
            parameter.copy_(renamed["midlayer." + name.removeprefix("layers.0.")])
        else:
            parameter.copy_(renamed[name])
    if head.inputs == 1 and not torch.equal(renamed["fc.weight"], torch.eye(width).to(renamed["fc.weight"])):
        raise HeadError(
            "eagle3: a head of one input has no fc here (SGLang never applies it), "
            "but fc.weight in the file is not the identity"
        )


def _one_norm(tensors: dict[str, Tensor], index: int) -> None:
    """A further layer's input norm stands under one name or both; both must agree."""
    names = [f"layers.{index}.input_layernorm.weight", f"layers.{index}.hidden_norm.weight"]
    found = [tensors[name] for name in names if name in tensors]
    if len(found) == 2 and not torch.equal(*found):
        raise HeadError(
            f"eagle3: {names[0]} and {names[1]} differ; they are one norm under two libraries' names"
        )
    for name in names:
        if found:
            tensors[name] = found[0]


def draft_ids(tensors: Mapping[str, Tensor], size: int, vocabulary: int) -> Tensor:
    """[D] the target ids from ``d2t``, checked against ``t2d`` where there is one.

    Raises:
        HeadError: for a ``d2t`` that is missing, misshapen, not ascending, out of range or unlike ``t2d``.
    """
    offsets = tensors.get("d2t")
    if offsets is None or offsets.shape != (size,) or offsets.is_floating_point():
        found = "missing" if offsets is None else f"{offsets.dtype} {list(offsets.shape)}"
        raise HeadError(f"eagle3: d2t is {found}; draft_vocab_size {size} asks for [{size}] integers")
    ids = offsets.to(torch.int64) + torch.arange(size, device=offsets.device)
    mask = tensors.get("t2d")
    if mask is not None and (
        mask.shape != (vocabulary,) or not torch.equal(mask.bool().nonzero().squeeze(1), ids)
    ):
        raise HeadError("eagle3: t2d and d2t name different draft vocabularies")
    return ids
