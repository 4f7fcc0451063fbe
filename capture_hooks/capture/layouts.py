"""Where the residual stream is found at a layer's edge: three ways to hand it on.

* *plain*: a layer takes the stream and gives it (a tensor, or the first of a tuple): Hugging Face.
* *pair*: a layer takes ``(hidden, residual)`` and gives ``(hidden, residual)``; the stream is their sum, and
  ``residual`` is None on entering layer 0.  The next fused add-norm updates ``residual`` in place, so the
  sum must be formed inside the hook: vLLM, and SGLang's models that have not moved to the next layout.
* *stream*: a layer gives a handle that is not the stream; the batch's ``residual_stream`` can tell the
  stream at any layer's entrance without disturbing it.  SGLang moved to it model by model (0.5.21: qwen3 has,
  llama has not; 0.5.23: gemma3 has not).  Telling it may complete a sum over tensor-parallel ranks, so every
  rank captures the same points.

A reader gets a hook's ``(args, kwargs, output)`` (output None before the forward) and returns the stream.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from ..errors import CaptureError
from .anatomy import Anatomy

Reader = Callable[[tuple[Any, ...], dict[str, Any], Any], Tensor]
When = Literal["before", "after"]

_HIDDEN = ("hidden_states", "hidden", "x")
_RESIDUAL = ("residual",)


@dataclass(frozen=True, slots=True)
class Place:
    """A module, the side of its forward at which to look, and how to read the state there.

    ``plain``: an output that is a tensor is the state.  ``call``: of a module that is called several times in
    one forward, the call at which to look, counted from 0; None where one call is all there is.
    """

    module: nn.Module
    name: str
    when: When
    read: Reader
    plain: bool = False
    call: int | None = None


def entering(anatomy: Anatomy, k: int) -> Place:
    """Where the stream entering layer ``k`` is read."""
    layer, name = anatomy.layers[k], anatomy.layer_names[k]
    return Place(layer, name, "before", _ENTERING[anatomy.layout](layer, name))


def leaving(anatomy: Anatomy, k: int) -> Place:
    """Where the stream leaving layer ``k`` is read."""
    layer, name = anatomy.layers[k], anatomy.layer_names[k]
    if anatomy.layout == "plain":
        return Place(layer, name, "after", output_of(name), plain=True)
    if anatomy.layout == "pair":
        return Place(layer, name, "after", _sum_of_pair(name))
    # A handle leaves the layer: the stream can be read only where the next one (or the norm) receives it.
    if k + 1 < anatomy.n_layers:
        return entering(anatomy, k + 1)
    if anatomy.final_norm is None or anatomy.final_norm_name is None:
        raise CaptureError(
            f"post.{k} of a 'stream' layout is read at the final norm, and this model has none"
        )
    name = anatomy.final_norm_name
    return Place(anatomy.final_norm, name, "before", _entering_norm(name), call=anatomy.final_norm_call)


def normed(norm: nn.Module, name: str, call: int | None = None) -> Place:
    """Where the final norm's output is read (fused norms give ``(normed, sum)``)."""
    return Place(norm, name, "after", output_of(name), plain=True, call=call)


def input_of(name: str) -> Reader:
    """The first tensor argument of a module."""

    def read(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Tensor:
        if args and isinstance(args[0], Tensor):
            return args[0]
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                return value
        raise CaptureError(f"{name} was called without any tensor argument")

    return read


def output_of(name: str) -> Reader:
    """A module's output, or the first element when it returns several."""

    def read(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Tensor:
        if isinstance(output, Tensor):
            return output
        first = output[0] if isinstance(output, (tuple, list)) and output else None
        if isinstance(first, Tensor):
            return first
        raise CaptureError(f"{name} returned {type(output).__name__}, which holds no tensor in first place")

    return read


def _stream_argument(layer: nn.Module, name: str) -> Reader:
    return _Argument(layer, name, _HIDDEN).tensor


def _hidden_plus_residual(layer: nn.Module, name: str) -> Reader:
    hidden, residual = _Argument(layer, name, _HIDDEN), _Argument(layer, name, _RESIDUAL)

    def read(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Tensor:
        rest = residual.get(args, kwargs)
        stream = hidden.tensor(args, kwargs)
        return stream if rest is None else stream + rest

    return read


def _entering_norm(name: str) -> Reader:
    """A norm's first argument, and the residual it adds to it where it is given one.

    By position, as norms that choose a kernel when they are called take ``*args``.
    """
    first = input_of(name)

    def read(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Tensor:
        rest = args[1] if len(args) > 1 else kwargs.get("residual")
        stream = first(args, kwargs, output)
        if rest is None:
            return stream
        if isinstance(rest, Tensor) and rest.shape == stream.shape:
            return stream + rest
        raise CaptureError(f"{name} was called with {type(rest).__name__} where a residual was expected")

    return read


def _sum_of_pair(name: str) -> Reader:
    def read(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Tensor:
        match output:
            case (Tensor() as hidden, Tensor() as residual, *_):
                return hidden + residual
            case (Tensor() as hidden, None, *_):
                return hidden  # nothing is left to be added (MiniCPM)
            case _:
                raise CaptureError(
                    f"{name} returned {type(output).__name__}, not the pair (hidden, residual) of its layout"
                )

    return read


def _snapshot(layer: nn.Module, name: str) -> Reader:
    hidden = _Argument(layer, name, _HIDDEN)

    def read(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Tensor:
        for value in (*args, *kwargs.values()):
            stream = getattr(value, "residual_stream", None)
            if stream is not None:
                # Not always a tensor: a sum over tensor-parallel ranks that is still owed is a handle.
                handle = hidden.get(args, kwargs)
                if handle is None:
                    handle = hidden.tensor(args, kwargs)
                try:
                    state: Tensor = stream.snapshot(handle)
                except NotImplementedError as error:
                    raise CaptureError(f"the stream entering {name} cannot be told: {error}") from error
                return state
        raise CaptureError(f"{name} was called without a batch that carries a residual_stream")

    return read


_ENTERING: dict[str, Callable[[nn.Module, str], Reader]] = {
    "plain": _stream_argument,
    "pair": _hidden_plus_residual,
    "stream": _snapshot,
}


class _Argument:
    """One parameter of a module's forward, by any of its names, passed by position or by keyword."""

    def __init__(self, module: nn.Module, name: str, names: tuple[str, ...]) -> None:
        self._names = names
        self._owner = name
        positions = positional_names(module)
        self._index = next((positions.index(n) for n in names if n in positions), None)

    def get(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._index is not None and self._index < len(args):
            return args[self._index]
        return next((kwargs[name] for name in self._names if name in kwargs), None)

    def tensor(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None) -> Tensor:
        value = self.get(args, kwargs)
        if isinstance(value, Tensor):
            return value
        if value is None and self._index is None and args and isinstance(args[0], Tensor):
            return args[0]  # its forward names no hidden states: those of layers and norms come first
        raise CaptureError(
            f"{self._owner} was called without its hidden states: looked for {' or '.join(self._names)} "
            f"among {len(args)} positional arguments and {sorted(kwargs)}"
        )


def positional_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the parameters that ``module.forward`` takes by position."""
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    return tuple(p.name for p in parameters if p.kind in by_position)
