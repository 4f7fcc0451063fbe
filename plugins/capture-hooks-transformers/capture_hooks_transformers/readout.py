"""From the un-normed end of the stream to the logits: which norm, which projection, which scaling.

The norm and the projection are found by following the tensor.  What the model does to the projection's
output is measured: its own ``forward`` runs with the decoder and the projection replaced by known
numbers.  A scale that a config mentions but the code ignores does not count, and one written in code does.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from capture_hooks.errors import BindError

from .skeleton import BATCH, LENGTH, Skeleton, forward_replaced, same, short
from .trace import Call, Trace

# Projection outputs to measure with: 1 shows a scale, the smallest a scale under a soft cap, the
# largest the cap; the others show whether that is all.
_ONE, _SMALL, _HUGE = 1.0, 1e-6, 1e30
_GRID = (_ONE, -_ONE, 0.0, _SMALL, -_SMALL, 0.25, -0.5, 3.0, -7.0, 40.0, -60.0, _HUGE, -_HUGE)


@dataclass(frozen=True, slots=True)
class Readout:
    """``logits = softcap(scale * lm_head(final_norm(x)))``, or why it is not so (``gap``).

    ``norm_call``: which call of the norm's module it is, where that is called several times.
    """

    final_norm: str | None
    lm_head: str
    vocab_size: int
    scale: float = 1.0
    softcap: float | None = None
    gap: str | None = None
    norm_call: int | None = None


def follow_readout(skeleton: Skeleton, trace: Trace, last: Call) -> Readout:
    """Follow the last layer's output to the logits.

    Raises:
        BindError: no projection to the vocabulary, or several streams that are joined after the last layer.
    """
    head = _projection(skeleton, trace)
    norm, end, gap = _walk(trace, last, head)
    scale, softcap = 1.0, None
    if gap is None:
        try:
            scale, softcap = _measure(skeleton, trace, end, head)
        except _UnreadableError as error:
            gap = str(error)
    calls = trace.of(norm.module) if norm else []
    return Readout(
        norm.name if norm else None,
        head.name,
        int(head.value.shape[-1]),
        scale,
        softcap,
        gap,
        next(at for at, call in enumerate(calls) if call is norm) if len(calls) > 1 else None,
    )


class _UnreadableError(Exception):
    """Logits are not a scaled, capped projection of the state."""


def _projection(skeleton: Skeleton, trace: Trace) -> Call:
    model: Any = skeleton.model  # transformers leaves get_output_embeddings unannotated
    name = type(model).__name__
    module = model.get_output_embeddings()
    if module is None:
        raise BindError(
            f"{name} has no output embeddings (get_output_embeddings() is None): "
            "load the model with its language-model head, for example by AutoModelForCausalLM"
        )
    calls = trace.of(module)
    if len(calls) != 1 or not isinstance(calls[0].value, Tensor):
        raise BindError(f"{name}'s output embeddings are called {len(calls)} times in one forward, not once")
    return calls[0]


def _walk(trace: Trace, last: Call, head: Call) -> tuple[Call | None, Tensor, str | None]:
    """The final norm, the state it or the last layer hands to the head, and what else lies between."""
    value, version = last.value, last.version_out
    norm: Call | None = None
    for step in trace.calls[trace.calls.index(last) + 1 :]:
        if step.module is head.module or not step.fed(value, version):
            continue
        if same(step.value, value):  # dropout in eval mode, or a container that hands it through
            continue
        if norm is None and "norm" in type(step.module).__name__.lower():
            norm, value, version = step, step.value, step.version_out
            continue
        what = f"{step.name} ({type(step.module).__name__})"
        for other in step.inputs:
            if other.ndim >= 3 and other.shape[-1] == value.shape[-1] and not same(other, value):
                raise BindError(
                    f"after its last layer the model feeds {what} the stream and a second tensor of "
                    f"its width (shape {list(other.shape)}): it carries several streams"
                )
        where = "the final norm" if norm else "the last layer"
        return norm, value, f"between {where} and lm_head the model applies {what}"
    return norm, value, None


def _measure(skeleton: Skeleton, trace: Trace, end: Tensor, head: Call) -> tuple[float, float | None]:
    """Scale and soft cap between ``end`` and the logits, by running on known numbers."""
    body = _body(trace, end, head)
    # Eighths, which every floating-point type holds exactly: some models cast before the projection.
    state = torch.randint(1, 64, tuple(end.shape), generator=torch.Generator().manual_seed(0)) / 8
    shape = (BATCH, LENGTH, int(head.value.shape[-1]))
    count = shape[0] * shape[1] * shape[2]
    values = torch.tensor(_GRID).repeat(count // len(_GRID) + 1)[:count].view(shape)
    fed: list[Tensor] = []

    def project(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        fed.append(x)
        return values.clone()

    answer = _substitute(body.output, end, state)
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    with (
        forward_replaced(body.module, lambda *args, **kwargs: copy.copy(answer)),
        forward_replaced(head.module, project),
        torch.no_grad(),
    ):
        try:
            logits = skeleton.model(input_ids=ids, use_cache=False, return_dict=True).logits
        except Exception as error:  # any model's own forward: its error becomes the reason
            raise _UnreadableError(
                f"what the model does around lm_head cannot be measured ({short(error)})"
            ) from error
    if logits.shape != values.shape or len(fed) != 1 or fed[0].shape != state.shape:
        raise _UnreadableError(
            f"lm_head is fed {[list(x.shape) for x in fed]} for a state of {list(state.shape)} and gives "
            f"{list(values.shape)}, and logits are {list(logits.shape)}"
        )
    if isinstance(fed[0], FakeTensor) or isinstance(logits, FakeTensor):
        raise _UnreadableError("what lm_head is fed is not what the last layer or the final norm gives")
    before = _ratio(fed[0].double(), state.double())
    if before is None:
        raise _UnreadableError("the model changes the state before lm_head by more than a factor")
    if before != 1.0 and getattr(head.module, "bias", None) is not None:
        raise _UnreadableError(f"the model multiplies the state by {before} before an lm_head with a bias")
    scale, cap = _fit(values.double().flatten(), logits.double().flatten())
    return before * scale, cap


def _body(trace: Trace, end: Tensor, head: Call) -> Call:
    """The outermost call that gives ``end`` and does not contain the head."""
    for call in trace.calls:
        contains_head = call.name == "" or f"{head.name}.".startswith(f"{call.name}.")
        if not contains_head and any(same(value, end) for value in _parts(call.output)):
            return call
    raise _UnreadableError("no module apart from lm_head's own parents hands on the state that it is fed")


def _parts(output: Any) -> list[Any]:
    if isinstance(output, Tensor):
        return [output]
    return list(output.values()) if hasattr(output, "values") else list(output or ())


def _substitute(output: Any, old: Tensor, new: Tensor) -> Any:
    """A copy of a module's output in which ``new`` stands for ``old``."""
    if isinstance(output, Tensor):
        return new
    if isinstance(output, tuple):
        return tuple(new if same(value, old) else value for value in output)
    changed = copy.copy(output)
    for key, value in output.items():
        if same(value, old):
            changed[key] = new
    return changed


def _ratio(a: Tensor, b: Tensor) -> float | None:
    factor = float(a.flatten()[0] / b.flatten()[0])
    return _tidy(factor) if torch.allclose(a, b * factor, rtol=1e-5, atol=0.0) else None


def _fit(x: Tensor, y: Tensor) -> tuple[float, float | None]:
    """``y == scale * x`` or ``y == cap * tanh(scale * x / cap)`` for every entry, else unreadable."""
    one, small, huge = (_GRID.index(value) for value in (_ONE, _SMALL, _HUGE))
    scale = float(y[one])
    if torch.allclose(y, x * scale, rtol=1e-5, atol=0.0):
        return _tidy(scale), None
    scale, cap = float(y[small] / x[small]), float(y[huge])
    if cap > 0 and torch.allclose(y, cap * torch.tanh(scale * x / cap), rtol=1e-4, atol=1e-9):
        return _tidy(scale), _tidy(cap)
    raise _UnreadableError("the model changes logits after lm_head by more than a factor and a soft cap")


def _tidy(value: float) -> float:
    """The number a config holds, free of float32 rounding: a short decimal or the inverse of one."""
    candidates = [float(f"{value:.6g}"), *([1.0 / float(f"{1.0 / value:.6g}")] if value else [])]
    return next((c for c in candidates if abs(c - value) <= 2e-7 * abs(value)), value)
