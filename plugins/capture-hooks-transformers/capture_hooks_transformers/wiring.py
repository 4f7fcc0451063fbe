"""What one config of one class does with its residual stream: the result of following it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from capture_hooks.errors import BindError
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from .readout import Readout, follow_readout
from .skeleton import BATCH, LENGTH, Skeleton, short
from .trace import Call, Trace, record, stubbed


@dataclass(frozen=True, slots=True)
class Wiring:
    """Qualified names inside the model, and what was found about them."""

    decoder: str
    layers: tuple[str, ...]
    embedding: str
    hidden_size: int
    split: frozenset[int]
    readout: Readout


def wiring_of(model_class: type[PreTrainedModel], config: PretrainedConfig) -> Wiring:
    """Follow the stream of this class and config; remembered per process.

    Raises:
        BindError: saying what stands in the way.
    """
    return _remembered(model_class, _Key(config))


class _Key:
    """A config that hashes and compares by its contents."""

    def __init__(self, config: PretrainedConfig) -> None:
        self.config = config
        self.text = config.to_json_string(use_diff=False)

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.text == other.text


@functools.lru_cache(maxsize=64)
def _remembered(model_class: type[PreTrainedModel], key: _Key) -> Wiring:
    failures: list[str] = []
    for dtype in (torch.float32, torch.bfloat16):  # some fused kernels exist in one of them only
        skeleton = Skeleton(model_class, key.config, dtype)
        decoder_name, decoder = _decoder(skeleton.model)
        lists = _candidates(decoder_name, decoder)
        try:
            trace = record(skeleton, lists)
        except Exception as error:  # any model's own forward; without values some cannot run
            failures.append(short(error))
            continue
        return _understand(skeleton, trace, decoder_name, lists)
    # The layers themselves need values (data-dependent routing): replace them and follow the rest.
    for extra in (None, 0, 1, 2):
        with stubbed([layer for _, items in lists for layer in items], extra):
            try:
                trace = record(skeleton, lists)
                return _understand(skeleton, trace, decoder_name, lists)
            except Exception as error:
                failures.append(short(error))
    raise BindError(
        f"cannot follow how {model_class.__name__} runs its layers: its forward does not run without values "
        f"({failures[0]}), nor with its layers replaced ({failures[2]})"
    )


def _decoder(model: PreTrainedModel) -> tuple[str, nn.Module]:
    decoder = model.get_decoder()
    for name, module in model.named_modules():
        if module is decoder:
            return name, module
    raise BindError(
        f"{type(model).__name__}.get_decoder() returns {type(decoder).__name__}, which is no part of it"
    )


def _candidates(decoder_name: str, decoder: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    """Outermost module lists of the decoder."""
    found: list[tuple[str, nn.ModuleList]] = []
    for name, module in decoder.named_modules(prefix=decoder_name):
        if isinstance(module, nn.ModuleList) and not any(name.startswith(outer + ".") for outer, _ in found):
            found.append((name, module))
    return found


def _understand(
    skeleton: Skeleton, trace: Trace, decoder_name: str, lists: list[tuple[str, nn.ModuleList]]
) -> Wiring:
    name, layers = _the_layers(skeleton.model, lists)
    calls = _called_in_order(name, layers, trace)
    width = _check_streams(name, calls)
    _check_chain(name, calls)
    return Wiring(
        decoder=decoder_name,
        layers=tuple(f"{name}.{k}" for k in range(len(layers))),
        embedding=_name_of(skeleton.model, skeleton.model.get_input_embeddings(), "get_input_embeddings()"),
        hidden_size=width,
        split=frozenset(_deepstack_boundaries(skeleton.model.config)),
        readout=follow_readout(skeleton, trace, calls[-1]),
    )


def _the_layers(model: PreTrainedModel, lists: list[tuple[str, nn.ModuleList]]) -> tuple[str, nn.ModuleList]:
    text = model.config.get_text_config(decoder=True)
    n = getattr(text, "num_hidden_layers", None)
    fitting = [(name, items) for name, items in lists if len(items) == n]
    if len(fitting) == 1:
        return fitting[0]
    seen = ", ".join(f"{name} ({len(items)})" for name, items in lists) or "none"
    raise BindError(
        f"{type(model).__name__}: expected one list of {n} decoder layers (num_hidden_layers of its "
        f"text config), found {len(fitting)}; module lists in its decoder: {seen}"
    )


def _called_in_order(name: str, layers: nn.ModuleList, trace: Trace) -> list[Call]:
    calls = [call for call in trace.calls if call.name.rpartition(".")[0] == name]
    order = [int(call.name.rpartition(".")[2]) for call in calls]
    if order == list(range(len(layers))):
        return calls
    raise BindError(
        f"the layers {name}.0 … {name}.{len(layers) - 1} are not each called once and in order "
        f"(calls seen: {order[:12]}{' …' if len(order) > 12 else ''}), so 'leaving layer k' has no single meaning"
    )


def _check_streams(name: str, calls: list[Call]) -> int:
    """Every layer takes and gives one [batch, tokens, width] tensor; returns the width."""
    width: int | None = None
    for k, call in enumerate(calls):
        for what, value in (("takes", call.stream), ("gives", call.value)):
            if not isinstance(value, Tensor):
                raise BindError(f"{name}.{k} {what} no tensor as its first value but {type(value).__name__}")
            width = value.shape[-1] if width is None else width
            if tuple(value.shape) != (BATCH, LENGTH, width):
                raise BindError(
                    f"{name}.{k} {what} a tensor of shape {list(value.shape)} for {BATCH} sequences of {LENGTH} tokens, "
                    f"not [{BATCH}, {LENGTH}, {width}]: this model does not carry one residual stream"
                )
    assert width is not None
    return width


def _check_chain(name: str, calls: list[Call]) -> None:
    for k, (before, after) in enumerate(zip(calls, calls[1:], strict=False)):
        handed = Call("", after.module, [after.stream], [_version(after)])  # type: ignore[list-item]  # checked above
        if not handed.fed(before.value, before.version_out):
            raise BindError(
                f"the model changes the stream between {name}.{k} and {name}.{k + 1} in a way this plugin does not know, "
                f"so the output of a layer is not the stream that enters the next"
            )


def _version(call: Call) -> int:
    return next(v for t, v in zip(call.inputs, call.versions_in, strict=True) if t is call.stream)


def _deepstack_boundaries(config: PretrainedConfig) -> range:
    """Boundaries 1 … m: visual features are added to what layers 0 … m-1 give (Qwen3-VL's DeepStack)."""
    vision: Any = getattr(config, "vision_config", None)
    levels = getattr(vision, "deepstack_visual_indexes", None) or ()
    return range(1, len(levels) + 1)


def _name_of(model: nn.Module, module: nn.Module | None, what: str) -> str:
    for name, candidate in model.named_modules():
        if candidate is module:
            return name
    raise BindError(
        f"{type(model).__name__}.{what} returns {type(module).__name__}, which is no part of the model"
    )
