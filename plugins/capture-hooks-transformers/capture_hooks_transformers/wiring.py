"""What one config of one class does with its residual stream: the result of following it."""

from __future__ import annotations

import functools
import inspect
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from capture_hooks.errors import BindError

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
    return _remembered(_Key(model_class, config))


class _Key:
    """A class and a config, hashed and compared by the config's contents."""

    def __init__(self, model_class: type[PreTrainedModel], config: PretrainedConfig) -> None:
        self.model_class = model_class
        self.config = config
        self._content = (
            model_class.__module__,
            model_class.__qualname__,
            config.to_json_string(use_diff=False),
        )

    def __hash__(self) -> int:
        return hash(self._content)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Key)
            and self.model_class is other.model_class
            and self._content == other._content
        )


@functools.lru_cache(maxsize=64)
def _remembered(key: _Key) -> Wiring:
    model_class = key.model_class
    failures: list[str] = []
    # float32 first: there a cast to float32 hands on the same tensor.  Some fused kernels want bfloat16.
    for dtype in (torch.float32, torch.bfloat16):
        skeleton = Skeleton(model_class, key.config, dtype)
        decoder_name, lists = _lists(skeleton.model)
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
    replaced = "; ".join(dict.fromkeys(failures[2:]))
    raise BindError(
        f"cannot follow how {model_class.__name__} runs its layers: its forward does not run without values "
        f"({failures[0]}), nor with its layers replaced ({replaced})"
    )


def _lists(model: PreTrainedModel) -> tuple[str, list[tuple[str, nn.ModuleList]]]:
    """The decoder's name and its outermost module lists: those of the config's length, else all of them.

    ``get_decoder()`` is asked first, so that a vision tower's list never counts; it guesses by attribute
    names, so the base model and the model itself are looked at next.
    """
    n = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    fallback: tuple[str, list[tuple[str, nn.ModuleList]]] | None = None
    guess = model.get_decoder()  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
    for decoder in (guess, model.base_model, model):
        name = next((name for name, module in model.named_modules() if module is decoder), None)
        lists = _candidates(name, decoder) if name is not None else []
        if name is None or not lists:
            continue
        fitting = [(list_name, items) for list_name, items in lists if len(items) == n]
        if fitting:
            return name, fitting
        fallback = fallback or (name, lists)
    if fallback is not None:
        return fallback
    raise BindError(f"{type(model).__name__} has no torch.nn.ModuleList of decoder layers")


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
    name, calls = _the_layers(skeleton.model, trace, lists)
    width = _check_streams(name, calls, skeleton.model.config.get_text_config(decoder=True))
    _check_chain(name, calls)
    _check_single_stream(name, calls, width)
    return Wiring(
        decoder=decoder_name,
        layers=tuple(f"{name}.{k}" for k in range(len(calls))),
        embedding=_name_of(skeleton.model, skeleton.model.get_input_embeddings(), "get_input_embeddings()"),
        hidden_size=width,
        split=frozenset(
            _deepstack_boundaries(
                skeleton.model.config, skeleton.model.get_submodule(decoder_name), len(calls)
            )
        ),
        readout=follow_readout(skeleton, trace, calls[-1]),
    )


def _the_layers(
    model: PreTrainedModel, trace: Trace, lists: list[tuple[str, nn.ModuleList]]
) -> tuple[str, list[Call]]:
    """The one list whose elements run once each and in order, with those calls."""
    found: list[tuple[str, list[Call]]] = []
    orders: list[str] = []
    for name, layers in lists:
        calls = [call for call in trace.calls if call.name.rpartition(".")[0] == name]
        order = [int(call.name.rpartition(".")[2]) for call in calls]
        if order == list(range(len(layers))):
            found.append((name, calls))
        shown = f"{order[:12]}{' …' if len(order) > 12 else ''}" if order else "none through __call__"
        orders.append(f"{name} ({len(layers)} layers; calls: {shown})")
    if len(found) == 1:
        return found[0]
    raise BindError(
        f"{type(model).__name__}: expected one list whose layers are each called once and in order for a "
        f"text, found {len(found)} among {', '.join(orders)}; 'leaving layer k' has no single meaning here"
    )


def _check_streams(name: str, calls: list[Call], text_config: PretrainedConfig) -> int:
    """Every layer takes and gives one [batch, tokens, width] tensor; returns the width."""
    width: int | None = None
    for k, call in enumerate(calls):
        for what, value in (("takes", call.stream), ("gives", call.value)):
            if not isinstance(value, Tensor):
                raise BindError(f"{name}.{k} {what} no tensor as its first value but {type(value).__name__}")
            width = value.shape[-1] if width is None else width
            if tuple(value.shape) != (BATCH, LENGTH, width):
                raise BindError(
                    f"{name}.{k} {what} a tensor of shape {list(value.shape)} for {BATCH} sequences of "
                    f"{LENGTH} tokens, not [{BATCH}, {LENGTH}, {width}]: this is not one residual stream "
                    "with a row per token"
                )
    assert width is not None
    hidden_size = getattr(text_config, "hidden_size", width)
    if width != hidden_size:
        raise BindError(
            f"{name}.0 takes a stream {width} wide, but the config's hidden_size is {hidden_size}: this "
            "model carries several streams side by side"
        )
    return width


def _check_chain(name: str, calls: list[Call]) -> None:
    for k, (before, after) in enumerate(itertools.pairwise(calls)):
        handed = Call("", after.module, [after.stream], [_version(after)])  # type: ignore[list-item]  # checked above
        if not handed.fed(before.value, before.version_out):
            raise BindError(
                f"the model changes the stream between {name}.{k} and {name}.{k + 1} in a way this plugin "
                "does not know, so the output of a layer is not the stream that enters the next"
            )


def _check_single_stream(name: str, calls: list[Call], width: int) -> None:
    """Refuse a second tensor of the stream's width that changes from layer to layer."""
    for k, (before, call) in enumerate(itertools.pairwise(calls[1:]), start=2):
        known = {t.untyped_storage()._cdata for t in (*before.inputs, call.stream) if t is not None}
        for other in call.inputs:
            carried = other.is_floating_point() and other.ndim >= 3 and other.shape[-1] == width
            if carried and other.untyped_storage()._cdata not in known:
                raise BindError(
                    f"{name}.{k} takes a second tensor of the stream's width ({list(other.shape)}) that "
                    f"changes from layer to layer: this model carries several streams"
                )


def _version(call: Call) -> int:
    return next(v for t, v in zip(call.inputs, call.versions_in, strict=True) if t is call.stream)


def _deepstack_boundaries(config: PretrainedConfig, decoder: nn.Module, n_layers: int) -> range:
    """Boundaries where the decoder adds visual features between layers (DeepStack, arXiv 2406.04334).

    Qwen3-VL adds one set after each of layers 0, 1, …, as many as ``deepstack_visual_indexes`` names levels
    of the vision tower.  Where a decoder takes such features and its config does not say how many, every
    boundary between layers counts.
    """
    takes = any("deepstack" in name for name in inspect.signature(decoder.forward).parameters)
    vision: Any = getattr(config, "vision_config", None)
    if not takes or vision is None:
        return range(0)
    levels = next(
        (
            c.deepstack_visual_indexes
            for c in (vision, config)
            if getattr(c, "deepstack_visual_indexes", None)
        ),
        None,
    )
    return range(1, min(len(levels), n_layers) + 1 if levels is not None else n_layers)


def _name_of(model: nn.Module, module: nn.Module | None, what: str) -> str:
    for name, candidate in model.named_modules():
        if candidate is module:
            return str(name)
    raise BindError(
        f"{type(model).__name__}.{what} returns {type(module).__name__}, which is no part of the model"
    )
