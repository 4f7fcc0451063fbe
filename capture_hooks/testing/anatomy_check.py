"""An independent check of an `Anatomy`: walk the stream by hand and compare with the model's own run.

The check knows nothing of how the anatomy was found.  It records with which arguments the model calls each
layer, then runs the stack itself: layer after layer, a norm written here, the head.  That must give
the model's logits, also after the stream was disturbed half-way, which a second, unnoticed
stream beside the first would betray.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor, nn

    from ..capture.anatomy import Anatomy

TOLERANCE = 1e-5  # of the largest entry: float32 models, whose norms round once more than the one here


@dataclass(frozen=True, slots=True)
class Stream:
    """What the model's own run gave: boundaries 0 … n, what ``lm_head`` was fed, logits."""

    boundaries: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    head_input: Tensor
    logits: Tensor


def check_anatomy(
    anatomy: Anatomy, run: Callable[[], Any], first_hidden_state: int = 0, complete: bool = True
) -> Stream:
    """Assert that every part of ``anatomy`` is what it claims.

    Args:
        anatomy: of a model in eval mode and float32.
        run: calls the model once, deterministically, without a cache, and returns its output object with
            ``logits`` (and ``hidden_states`` to be compared too, where it has them).
        first_hidden_state: the boundary that ``hidden_states[0]`` is: 0, except in transformers' Mamba and
            RWKV models, which leave out the embedding.
        complete: whether the stream is all that one layer hands to the next.  False leaves the disturbed runs
            out, for models whose layers hand on something else beside it (ZAYA: the router's own state).

    Returns:
        The states of the undisturbed run, each [batch, tokens, width].

    Raises:
        AssertionError: naming the first part that differs and by how much.
    """
    import torch

    middle = anatomy.n_layers // 2
    with torch.no_grad():
        calls = _Calls(anatomy)
        with calls.recording():
            out = run()
        stream = calls.stream(out.logits)
        for k, (given, entering) in enumerate(zip(stream.outputs, stream.boundaries[1:], strict=True)):
            _equal(f"post.{k} and what follows it", given, entering)
        _compare_hidden_states(anatomy, stream, out, first_hidden_state)
        _by_hand(anatomy, calls, stream, 0, stream.boundaries[0])
        for start in sorted({0, middle, anatomy.n_layers - 1} if complete else ()):
            shift = 0.1 * torch.randn(
                stream.boundaries[start].shape, generator=torch.Generator().manual_seed(start)
            )
            moved = stream.boundaries[start] + shift.to(stream.boundaries[start])
            disturbed = _Calls(anatomy)
            with disturbed.recording(), _entering(anatomy.layers[start], moved):
                logits = run().logits
            assert not torch.allclose(logits, stream.logits, atol=1e-6), (
                f"changing what enters layer {start} does not change the logits"
            )
            _by_hand(anatomy, calls, disturbed.stream(logits), start, moved)
    return stream


def _by_hand(anatomy: Anatomy, calls: _Calls, expected: Stream, start: int, x: Tensor) -> None:
    import torch

    for k in range(start, anatomy.n_layers):
        x = calls.replay(k, x)
        _equal(f"boundary {k + 1}, run by hand from boundary {start}", x, expected.boundaries[k + 1])
    if anatomy.final_norm is not None:
        x = reference_norm(anatomy.final_norm, x)
    if anatomy.readout_gap is not None:
        return
    # A model may scale before the projection (MiniCPM) or after it: the same readout.
    scaled = bool((expected.head_input.double() - x).abs().max() > TOLERANCE * x.abs().max())
    fed = x * anatomy.logit_scale if scaled else x
    _equal("final_norm (or it times logit_scale) and what lm_head is fed", fed, expected.head_input)
    logits = anatomy.lm_head(x.to(expected.head_input.dtype)).double() * anatomy.logit_scale
    if anatomy.logit_softcap is not None:
        logits = anatomy.logit_softcap * torch.tanh(logits / anatomy.logit_softcap)
    _equal(f"logits, run by hand from boundary {start}", logits, expected.logits)


def reference_norm(norm: nn.Module, x: Tensor) -> Tensor:
    """The norm of ``x`` in float64, written from the definitions; which one, from what the module gives.

    RMSNorm (Zhang & Sennrich 2019) with weight ``w`` or Gemma's ``1 + w``, LayerNorm (Ba et al. 2016),
    each with or without weight and bias.

    Raises:
        AssertionError: when the module is none of them.
    """
    import torch

    y = x.detach().double()
    weight, bias = (getattr(norm, name, None) for name in ("weight", "bias"))
    named = [float(getattr(norm, a)) for a in ("eps", "variance_epsilon", "norm_eps") if hasattr(norm, a)]
    options: list[Tensor] = []
    for epsilon in named[:1] or [1e-5, 1e-6]:  # some norms (OLMo's) hold theirs in code only
        rms = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + epsilon)
        centred = y - y.mean(-1, keepdim=True)
        layer = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + epsilon)
        if weight is None:
            options += [rms, layer]
        else:
            w = weight.detach().double()
            options += [rms * w, rms * (1 + w), layer * w, layer * (1 + w)]
    if bias is not None:
        options = [option + bias.detach().double() for option in options]
    actual = norm(x.detach()).detach().double()
    distances = [float((option - actual).abs().max()) for option in options]
    best = min(range(len(options)), key=distances.__getitem__)
    assert distances[best] <= TOLERANCE * float(actual.abs().max()), (
        f"{type(norm).__name__} is neither RMSNorm nor LayerNorm "
        f"(the nearest of {len(options)} differs by {distances[best]:.3g})"
    )
    return options[best]


def _compare_hidden_states(anatomy: Anatomy, stream: Stream, out: Any, first: int) -> None:
    states = getattr(out, "hidden_states", None)
    if states is None or len(states) != anatomy.n_layers + 1:
        return
    for k, state in enumerate(states[:-1]):  # the last one is normed in most families
        _equal(f"boundary {k + first} and hidden_states[{k}]", stream.boundaries[k + first], state)


def _equal(what: str, a: Tensor, b: Tensor) -> None:
    assert a.shape == b.shape, f"{what}: shapes {list(a.shape)} and {list(b.shape)}"
    difference = float((a.double() - b.double()).abs().max())
    size = float(b.double().abs().max())
    assert difference <= TOLERANCE * size, f"{what} differ by {difference:.3g} (largest entry {size:.3g})"


class _Calls:
    """How the model called each layer and the head."""

    def __init__(self, anatomy: Anatomy) -> None:
        self.anatomy = anatomy
        self.arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.entering: list[Tensor] = []
        self.leaving: list[Tensor] = []
        self.head_input: list[Tensor] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.arguments.append((args, kwargs))
            self.entering.append(_hidden(args, kwargs).clone())

        def after(_: nn.Module, __: Any, output: Any) -> None:
            self.leaving.append((output if hasattr(output, "shape") else output[0]).clone())

        def head(_: nn.Module, args: tuple[Any, ...]) -> None:
            self.head_input.append(args[0].clone())

        handles = [self.anatomy.lm_head.register_forward_pre_hook(head)]
        for layer in self.anatomy.layers:
            handles.append(layer.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(layer.register_forward_hook(after))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def stream(self, logits: Tensor) -> Stream:
        n = self.anatomy.n_layers
        assert len(self.entering) == len(self.leaving) == n, (
            f"{len(self.entering)} layer calls for {n} layers"
        )
        assert len(self.head_input) == 1, f"lm_head was called {len(self.head_input)} times"
        boundaries = (*self.entering, self.leaving[-1])
        return Stream(boundaries, tuple(self.leaving), self.head_input[0], logits)

    def replay(self, k: int, x: Tensor) -> Tensor:
        args, kwargs = _with_hidden(*self.arguments[k], x.clone())
        output = self.anatomy.layers[k](*args, **kwargs)
        value: Tensor = output if hasattr(output, "shape") else output[0]
        return value


@contextlib.contextmanager
def _entering(layer: nn.Module, x: Tensor) -> Iterator[None]:
    """Make ``x`` enter the layer, whatever the model hands it."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _with_hidden(args, kwargs, x.clone())

    handle = layer.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    value: Tensor = args[0] if args else kwargs["hidden_states"]
    return value


def _with_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})
