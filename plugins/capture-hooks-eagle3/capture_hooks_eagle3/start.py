"""How a fresh head starts: from random weights, from the target's output rows, from a target layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from capture_hooks.capture.anatomy import Anatomy
from capture_hooks.capture.weights import gain, projection
from capture_hooks.errors import BindError, HeadError
from capture_hooks.heads.contract import TargetReadout

from .config import Eagle3Config
from .head import Eagle3Head
from .network import Layer


def start_from_target(
    head: Eagle3Head, config: Eagle3Config, anatomy: Anatomy, readout: TargetReadout
) -> None:
    """Give ``head`` the start ``config`` describes.

    Raises:
        HeadError: when ``init_layer`` names a layer whose weights do not fit the head.
    """
    with torch.no_grad():
        if config.lm_head_init == "target":
            head.lm_head.weight.copy_(head.target_rows)
            head.norm.weight.copy_(norm_gain(anatomy) * config.norm_init)
    if config.init_layer is not None:
        copy_layer(head, anatomy, config.init_layer)


@torch.no_grad()
def norm_gain(anatomy: Anatomy) -> Tensor:
    """[H] the effective gain of the target's final norm (Gemma stores gain - 1); ones without one."""
    if anatomy.final_norm is None:
        return torch.ones(anatomy.hidden_size)
    return gain(anatomy.final_norm, anatomy.hidden_size)


@torch.no_grad()
def copy_layer(head: Eagle3Head, anatomy: Anatomy, index: int) -> None:
    """Start layer 0 as target layer ``index``, fed the last captured state through ``fc``.

    The embedding's columns of q, k and v keep their random start.

    Raises:
        HeadError: for an index out of range, or a layer that is not of Llama's shape.
    """
    if not -anatomy.n_layers <= index < anatomy.n_layers:
        raise HeadError(f"eagle3: init_layer = {index} is outside a target of {anatomy.n_layers} layers")
    source, layer, hidden = anatomy.layers[index], head.layers[0], head.hidden_size
    assert isinstance(layer, Layer)
    for part, names in {
        "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
        "mlp": ("gate_proj", "up_proj", "down_proj"),
    }.items():
        for name in names:
            target = getattr(getattr(layer, part), name).weight
            if part == "self_attn" and name != "o_proj":
                target = target[:, hidden:]
            target.copy_(_found(source, f"{part}.{name}", target.shape, index))
    for name, norm in (
        ("input_layernorm", layer.hidden_norm),
        ("post_attention_layernorm", layer.post_attention_layernorm),
    ):
        norm.weight.copy_(gain(_part(source, name, index), hidden))
    if head.inputs > 1:
        head.fc.weight[:, -hidden:].copy_(torch.eye(hidden))
        head.fc_learnt = (head.inputs - 1) * hidden


def _found(layer: nn.Module, name: str, shape: torch.Size, index: int) -> Tensor:
    try:
        weight, _ = projection(_part(layer, name, index), shape[1])
    except BindError as error:
        raise HeadError(f"eagle3: init_layer = {index}: {name} of the target: {error}") from None
    if weight.shape != shape:
        raise HeadError(
            f"eagle3: init_layer = {index}: {name}.weight of the target is {list(weight.shape)}, the head "
            f"needs {list(shape)}; give the head the target's heads, kv_heads, head_dim and intermediate_size"
        )
    return weight


def _part(layer: nn.Module, name: str, index: int) -> nn.Module:
    try:
        return layer.get_submodule(name)
    except AttributeError:
        raise HeadError(
            f"eagle3: init_layer = {index}: target layer {type(layer).__name__} has no {name}; "
            "only Llama-type layers can start a head (leave init_layer unset)"
        ) from None
