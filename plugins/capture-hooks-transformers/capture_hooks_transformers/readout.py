"""From the un-normed end of the stream to the logits: which norm, which projection, which scaling.

The norm and the projection are found by following the tensor.  What the model does to the projection's
output is measured: its own ``forward`` is run with the decoder and the projection replaced by known numbers, so
a scale that a config mentions but the code ignores does not count, and one written in code does.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass
from typing import Any

import torch
from capture_hooks.errors import BindError
from torch import Tensor, nn

from .skeleton import BATCH, LENGTH, Skeleton, forward_replaced, same, short
from .trace import Call, Trace

_GRID = (1.0, -1.0, 0.0, 1e-6, -1e-6, 0.25, -0.5, 3.0, -7.0, 40.0, -60.0, 1e30, -1e30)


@dataclass(frozen=True, slots=True)
class Readout:
    """``logits = softcap(scale * lm_head(norm(x)))``, or why it is not so (``gap``)."""

    final_norm: str | None
    lm_head: str
    vocab_size: int
    scale: float = 1.0
    softcap: float | None = None
    gap: str | None = None


def follow_readout(skeleton: Skeleton, trace: Trace, last: Call) -> Readout:
    """Follow the last layer's output to the logits.

    Raises:
        BindError: when no projection to the vocabulary is found.
    """
    head = _projection(skeleton, trace)
    norm, end, gap = _walk(trace, last, head)
    final_norm = norm.name if norm else None
    vocab_size = int(head.value.shape[-1])
    if gap is None:
        try:
            scale, softcap = _measure(skeleton, trace, end, head)
            return Readout(final_norm, head.name, vocab_size, scale, softcap)
        except _Unreadable as error:
            gap = str(error)
    return Readout(final_norm, head.name, vocab_size, gap=gap)


class _Unreadable(Exception):
    """Logits are not a scaled, capped projection of the state."""


def _projection(skeleton: Skeleton, trace: Trace) -> Call:
    module = skeleton.model.get_output_embeddings()
    if module is None:
        raise BindError(
            f"{type(skeleton.model).__name__} has no output embeddings (get_output_embeddings() is None): "
            "load the model with its language-model head, for example by AutoModelForCausalLM"
        )
    calls = trace.of(module)
    if len(calls) != 1 or not isinstance(calls[0].value, Tensor):
        raise BindError(
            f"{type(skeleton.model).__name__}'s output embeddings are called {len(calls)} times, not once"
        )
    return calls[0]


def _walk(trace: Trace, last: Call, head: Call) -> tuple[Call | None, Tensor, str | None]:
    """The final norm, the state the head is fed up to scaling, and what else lies between."""
    value, version = last.value, last.version_out
    norm: Call | None = None
    later = trace.calls[trace.calls.index(last) + 1 :]
    while True:
        step = next((c for c in later if c.module is not head.module and c.fed(value, version)), None)
        if step is None:
            break
        later = later[later.index(step) + 1 :]
        if isinstance(step.value, Tensor) and same(step.value, value):
            continue  # dropout in eval mode, identity, or a container that hands it through
        if (
            norm is None
            and "norm"
            in f"{type(step.module).__name__} {step.name.rpartition('.')[2]}".lower().replace("ln", "norm")
        ):
            norm, value, version = step, step.value, step.version_out
            continue
        others = [
            t for t in step.inputs if t.ndim >= 3 and t.shape[-1] == value.shape[-1] and not same(t, value)
        ]
        if others:
            raise BindError(
                f"after its last layer the model feeds {step.name} ({type(step.module).__name__}) the stream together "
                f"with a second tensor of its width (shape {list(others[0].shape)}): it carries several streams"
            )
        where = "the final norm" if norm else "the last layer"
        return (
            norm,
            value,
            f"between {where} and lm_head the model applies {step.name} ({type(step.module).__name__})",
        )
    return norm, value, None


def _measure(skeleton: Skeleton, trace: Trace, end: Tensor, head: Call) -> tuple[float, float | None]:
    """Scale and soft-cap between ``end`` and the logits, by running on known numbers."""
    body = _body(skeleton, trace, end, head)
    generator = torch.Generator().manual_seed(0)
    # Eighths, which every floating-point type holds exactly: some models cast before the projection.
    state = torch.randint(1, 64, tuple(end.shape), generator=generator) / 8
    width = int(head.value.shape[-1])
    count = BATCH * LENGTH * width
    values = torch.tensor(_GRID).repeat(count // len(_GRID) + 1)[:count].view(BATCH, LENGTH, width)
    fed: list[Tensor] = []

    def project(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        fed.append(x)
        return values.clone()

    answer = _substitute(body.output, end, state)
    with contextlib.ExitStack() as stack:
        stack.enter_context(forward_replaced(body.module, lambda *a, **k: copy.copy(answer)))
        stack.enter_context(forward_replaced(head.module, project))
        stack.enter_context(torch.no_grad())
        try:
            out = skeleton.model(
                input_ids=torch.zeros(BATCH, LENGTH, dtype=torch.long), use_cache=False, return_dict=True
            )
        except Exception as error:  # any model's own forward
            raise _Unreadable(f"what it does around lm_head cannot be measured ({short(error)})") from error
    logits = out.logits
    if logits.shape != values.shape or len(fed) != 1 or fed[0].shape != state.shape:
        raise _Unreadable(
            f"lm_head is fed {[list(x.shape) for x in fed]} and logits are {list(logits.shape)}"
        )
    before = _ratio(fed[0].double(), state.double())
    if before is None:
        raise _Unreadable(
            "the model changes the state between its final norm and lm_head by more than a factor"
        )
    if before != 1.0 and getattr(head.module, "bias", None) is not None:
        raise _Unreadable(f"the model multiplies the state by {before} before an lm_head with a bias")
    scale, cap = _fit(values.double(), logits.double())
    return before * scale, cap


def _body(skeleton: Skeleton, trace: Trace, end: Tensor, head: Call) -> Call:
    """The outermost call that gives ``end`` without having run the head."""
    head_modules = {name for name, _ in _parents(head.name)}
    for call in trace.calls:
        if call.name in head_modules or call.module is head.module:
            continue
        if any(same(t, end) for t in _tensors(call.output)):
            return call
    raise _Unreadable("no module hands on the state that lm_head is fed")


def _parents(name: str) -> list[tuple[str, str]]:
    parts = name.split(".")
    return [(".".join(parts[:i]), parts[i]) for i in range(len(parts))]


def _tensors(output: Any) -> list[Any]:
    if isinstance(output, Tensor):
        return [output]
    return list(output.values()) if hasattr(output, "values") else list(output or ())


def _substitute(output: Any, old: Tensor, new: Tensor) -> Any:
    if isinstance(output, Tensor):
        return new
    if isinstance(output, tuple):
        return tuple(new if same(t, old) else t for t in output)
    changed = copy.copy(output)
    for key, value in output.items():
        if same(value, old):
            changed[key] = new
    return changed


def _ratio(a: Tensor, b: Tensor) -> float | None:
    factor = float((a / b).flatten()[0])
    return _tidy(factor) if torch.allclose(a, b * factor, rtol=1e-5, atol=0.0) else None


def _fit(x: Tensor, y: Tensor) -> tuple[float, float | None]:
    """``y == scale * x`` or ``y == cap * tanh(scale * x / cap)`` for every entry, else unreadable."""
    at = x.flatten().tolist()
    one, small, huge = (float(y.flatten()[at.index(v)]) for v in (x.max() * 0 + 1.0, x[x > 0].min(), x.max()))
    if torch.allclose(y, x * one, rtol=1e-5, atol=0.0):
        return _tidy(one), None
    scale, cap = small / float(x[x > 0].min()), huge
    if cap > 0 and torch.allclose(y, cap * torch.tanh(scale * x / cap), rtol=1e-4, atol=1e-9):
        return _tidy(scale), _tidy(cap)
    raise _Unreadable("the model changes logits after lm_head by more than a factor and a soft cap")


def _tidy(value: float) -> float:
    """The number a config holds, free of float32 rounding: a short decimal or the inverse of one."""
    for candidate in (float(f"{value:.6g}"), 1.0 / float(f"{1.0 / value:.6g}") if value else value):
        if abs(candidate - value) <= 2e-7 * abs(value):
            return candidate
    return value
