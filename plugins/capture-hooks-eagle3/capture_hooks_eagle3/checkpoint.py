"""The head's tensors and settings in the field's names, and back.

Layer 0 is ``midlayer`` and further layers ``layers.N``, which SGLang 0.5.23 and vLLM 0.33 both read.
Those engines norm the input of a further layer under different names (SGLang ``hidden_norm``, vLLM
``input_layernorm``), so it is written under both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from capture_hooks.errors import HeadError

from .config import Eagle3Config
from .network import Network
from .schema import SCHEMA, attention_shape

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
def export_tensors(head: Network, order: Sequence[int]) -> dict[str, Tensor]:
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
    ids = head.draft_ids
    out["d2t"] = ids - torch.arange(ids.shape[0], device=ids.device)
    out["t2d"] = torch.zeros(head.vocab_size, dtype=torch.bool, device=ids.device).index_fill_(0, ids, True)
    return {name: tensor.detach().clone().contiguous() for name, tensor in out.items()}


def export_config(head: Network) -> dict[str, Any]:
    """The head's fields of ``config.json``."""
    config = head.config
    return {
        "architectures": [SCHEMA.architecture],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_size": head.hidden_size,
        "vocab_size": head.vocab_size,
        "draft_vocab_size": head.draft_ids.shape[0],
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": dict(config.rope or {}),
        "tie_word_embeddings": False,
        **{field: getattr(config, name) for name, field in _SIZES.items()},
        **{name: getattr(config, name) for name in SCHEMA.flag_keys},
        SCHEMA.settings_key: {name: getattr(config, name) for name in _TRAINING},
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
    training = fields_.get(SCHEMA.settings_key, {})
    if unknown := sorted(set(training) - set(_TRAINING)):
        key, known = SCHEMA.settings_key, ", ".join(_TRAINING)
        raise HeadError(f"eagle3: {key} has unknown settings {unknown}; it takes {known}")
    for name in ("hidden_size", "num_attention_heads"):
        _number(fields_, name)
    sizes = {**fields_, **attention_shape(fields_)}
    settings: dict[str, Any] = {
        "rope": _rope(fields_),
        "rms_norm_eps": _number(fields_, "rms_norm_eps"),
        **{name: _number(sizes, field) for name, field in _SIZES.items()},
        **{name: bool(fields_.get(name, False)) for name in SCHEMA.flag_keys},
        **training,
    }
    return Eagle3Config(**settings)


def _number(fields: Mapping[str, Any], name: str) -> Any:
    value = fields.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise HeadError(f"eagle3: config.json has {name} = {value!r}; a number is needed")
    return value


def _rope(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The file's RoPE, in the order of its own keys where these say all of it."""
    said = fields.get("rope_parameters")
    if not isinstance(said, Mapping) and fields.get("rope_theta") is None:
        raise HeadError(
            "eagle3: config.json has neither rope_parameters nor rope_theta; which RoPE is unknown"
        )
    settled = SCHEMA.rope(fields, "eagle3: config.json")
    return dict(said) if isinstance(said, Mapping) and dict(said) == settled else settled


@torch.no_grad()
def load_tensors(head: Network, tensors: Mapping[str, Tensor], order: Sequence[int]) -> None:
    """Put exported tensors into ``head``, undoing ``order``; inputs come out unscaled.

    Raises:
        HeadError: naming a tensor that is missing, unknown or of the wrong shape.
    """
    if sorted(order) != list(range(head.inputs)):
        raise HeadError(f"eagle3: order {list(order)} is no permutation of the head's {head.inputs} inputs")
    renamed = {SCHEMA.canonical(name): tensor for name, tensor in tensors.items()}
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
    names = [f"layers.{index}.{norm}.weight" for norm in SCHEMA.later_norms]
    found = [tensors[name] for name in names if name in tensors]
    if len(found) == 2 and not torch.equal(*found):
        raise HeadError(
            f"eagle3: {names[0]} and {names[1]} differ; they are one norm under two libraries' names"
        )
    for name in names:
        if found:
            tensors[name] = found[0]
