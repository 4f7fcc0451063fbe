"""A spec bound to a model: hooks while the session is entered, one row of states per token afterwards."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..errors import BindError, CaptureError, SpecError
from ..spec import CaptureSpec
from .anatomy import Anatomy
from .pack import Allocator, Pack
from .plan import ALREADY_COMPILED, Compilation, Plan, Tap, lay_out
from .rows import CACHE_NAMES, Forward, Requests, allow_reordering, is_cache, refuse_reordering
from .states import States
from .unwrap import find_anatomy

_Hook = Callable[..., None]


def bind(
    model: nn.Module,
    spec: CaptureSpec | str,
    *,
    target: bool = False,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    target_out: Tensor | None = None,
    anatomy: Anatomy | None = None,
) -> CaptureSession:
    """Bind ``spec`` to ``model``; enter the result to capture.

    >>> with bind(model, "post.2, post.15, post.26") as capture:  # doctest: +SKIP
    ...     model(**inputs)
    >>> capture.states["post.2"].shape  # doctest: +SKIP
    torch.Size([tokens, hidden])

    Args:
        model: a language model, wrapped or not.  Compiled models are bound before their first call.
        spec: the points, or their text.
        target: capture the spec's target point too (`States.target`).
        dtype: of the captured states; None keeps the model's own.
        out: a static buffer ``[rows, K*hidden]`` to write into: nothing is allocated and no value is looked
            at during a forward, so that it can be recorded in a CUDA graph.  Padding is then dropped only on
            reading `CaptureSession.states`.
        target_out: the same for the target, ``[rows, hidden]``.
        anatomy: the model's parts; None finds them through the installed plugins.

    Raises:
        SpecError: text that is no spec, or a layer out of range.
        BindError: a model nobody knows, a point it does not have, or a buffer that does not fit.
    """
    if isinstance(spec, str):
        spec = CaptureSpec.parse(spec)
    elif not isinstance(spec, CaptureSpec):
        raise SpecError(f"a spec is a CaptureSpec or text such as 'post.2, post.15', not {spec!r}")
    if dtype is not None and not dtype.is_floating_point:
        raise BindError(f"captured states are floating-point numbers; they cannot be kept as {dtype}")
    if anatomy is None:
        anatomy = find_anatomy(model)
    plan = lay_out(anatomy, spec, target=target)
    allocator = Allocator(plan, dtype, out, target_out)
    _check_static(plan, allocator, dtype, out, target_out)
    return CaptureSession(model, plan, allocator, static=out is not None)


_NONE: dict[str, Any] = {}


class StopForward(Exception):  # noqa: N818  # a signal, not an error
    """Ends a forward once its last point is captured; only the session that raised it catches it."""

    def __init__(self, session: CaptureSession) -> None:
        super().__init__("the last requested point was captured")
        self.session = session


class _Running:
    """The forward that is running, as its hooks see it.  Slots: they are read at every point."""

    __slots__ = ("calls", "dtype", "forward", "open", "shape", "stop", "views")

    def __init__(self) -> None:
        self.open = False
        self.stop = False
        self.calls: dict[int, int] = {}  # by tap: calls so far, of modules that run several times
        self.views: list[Tensor | None] | None = None  # where each state goes; None once it is there
        self.forward: Forward | None = None
        # States on the stream of this shape and type are copied without a second look.
        self.shape: tuple[int, ...] | None = None
        self.dtype: torch.dtype | None = None


class CaptureSession:
    """Made by `bind`.  Can be entered again and again; entering forgets what was captured before."""

    def __init__(self, model: nn.Module, plan: Plan, allocator: Allocator, *, static: bool) -> None:
        self._model = model
        self._plan = plan
        self._allocator = allocator
        self._compilation = Compilation.of(model, plan)
        self._root = self._compilation.root
        self._requests = Requests(self._root, static=static, reader=plan.anatomy.rows)
        self._pack = Pack(plan, allocator)
        self._run = _Running()
        self._handles: list[RemovableHandle] = []
        self._began = False
        self._static = static
        self._hidden = plan.anatomy.hidden_size
        self._begin_hook, self._end_hook = map(self._compilation.opaque, (self._begin, self._end))
        self._tap_hooks = [
            self._compilation.opaque(self._tap_hook(i, tap)) for i, tap in enumerate(plan.taps)
        ]

    @property
    def spec(self) -> CaptureSpec:
        """What is captured, layers non-negative."""
        return self._plan.spec

    @property
    def anatomy(self) -> Anatomy:
        """The parts of the model."""
        return self._plan.anatomy

    @property
    def active(self) -> bool:
        """Whether the session is entered."""
        return bool(self._handles)

    @property
    def states(self) -> States:
        """Everything captured since the session was entered (or cleared).

        Raises:
            CaptureError: when no forward was captured.
        """
        if self._pack.empty:
            points = ", ".join(f"{tap.point} ({tap.place.name})" for tap in self._plan.taps)
            raise CaptureError(
                f"nothing was captured: no forward of {type(self._root).__name__} completed while the "
                f"session was entered, so these points never fired: {points}"
            )
        return self._pack.states()

    def clear(self) -> None:
        """Forget what was captured, and count requests from 0 again; hooks stay."""
        self._pack.clear()
        self._allocator.reset()
        self._release_caches()
        self._requests.forget()

    @property
    def model(self) -> nn.Module:
        """The model as it was given, wrappers included."""
        return self._model

    def run(self, *args: Any, stop: bool = False, **kwargs: Any) -> Any:
        """Call the model; with ``stop`` end its forward once the last requested point is captured.

        A stopped forward returns None.  It would leave a KV cache filled in some layers only, so none may be
        passed, and ``use_cache=False`` is set.

        Raises:
            CaptureError: outside the session, or ``stop`` together with a cache.
        """
        if not self.active:
            raise CaptureError("run() captures only while the session is entered: with bind(...) as capture")
        if not stop:
            return self._model(*args, **kwargs)
        kwargs = self._without_cache(args, kwargs)
        self._run.stop = True
        try:
            return self._model(*args, **kwargs)
        except StopForward as stopped:
            if stopped.session is not self:
                raise
            self._finish(None)
            return None
        finally:
            self._run.stop = False
            self._abort()

    def __enter__(self) -> Self:
        if self.active:
            raise BindError("this session is already entered; bind another one to nest captures")
        self.clear()
        self._allocator.renew()
        try:
            self._attach()
        except BaseException:
            self._detach()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._detach()
        self._abort()
        self._release_caches()

    def _attach(self) -> None:
        keep, root = self._handles.append, self._root
        keep(root.register_forward_pre_hook(self._begin_hook, with_kwargs=True))
        for tap, hook in zip(self._plan.taps, self._tap_hooks, strict=True):
            place = tap.place
            if place.when == "before":
                keep(place.module.register_forward_pre_hook(hook, with_kwargs=True))
            else:
                keep(place.module.register_forward_hook(hook))
        keep(root.register_forward_hook(self._end_hook))
        if (gate := self._compilation.gate) is not None:
            keep(gate.register_forward_pre_hook(self._close_gate))
            keep(gate.register_forward_hook(self._check_gate))

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        run, requests = self._run, self._requests
        run.views = None
        run.calls.clear()
        requests.begin(args, kwargs)
        if requests.cache is not None:
            refuse_reordering(requests.cache, self)
        run.open = self._began = True

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._run.open:
            self._finish(output)

    def _finish(self, output: Any) -> None:
        run = self._run
        run.open = False  # what fires from here on is a recomputation in a backward
        forward = run.forward
        if forward is None or run.views is None or run.views.count(None) < len(run.views):
            message = self._never_fired(run.views)
            self._abort()
            raise CaptureError(message)
        run.forward = run.views = None
        self._requests.finish(forward, output)
        if self._static:
            self._allocator.commit(forward)
        self._pack.add(forward)

    def _abort(self) -> None:
        """Drop a forward that did not complete."""
        run = self._run
        run.open = False
        run.forward = run.views = None
        self._requests.abandon()

    def _tap_hook(self, index: int, tap: Tap) -> _Hook:
        """The hook of one point.  Everything it needs is at hand: it runs in every forward of its module."""
        run, start, write, session = self._run, self._start, self._write, self
        read = tap.place.read
        on_stream = tap.width == self.anatomy.hidden_size
        plain = tap.place.plain

        def take(state: Tensor) -> None:
            views = run.views
            if views is None:
                views = start(state)
            view = views[index]
            if on_stream and view is not None and state.shape == run.shape and state.dtype is run.dtype:
                view.copy_(state.detach() if state.requires_grad else state)
            else:
                write(index, state, view)
            views[index] = None
            if run.stop and not any(view is not None for view in views):
                raise StopForward(session)

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if run.open:
                take(output if type(output) is Tensor and plain else read(args, _NONE, output))

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if run.open:
                take(read(args, kwargs, None))

        hook = before if tap.place.when == "before" else after
        return hook if tap.place.call is None else self._at_call(index, tap.place.call, hook)

    def _at_call(self, index: int, wanted: int, hook: _Hook) -> _Hook:
        """A hook of a module that runs several times in one forward, for the one call that is the point."""
        run = self._run

        def counted(*fired: Any) -> None:
            if run.open:
                call = run.calls.get(index, 0)
                run.calls[index] = call + 1
                if call == wanted:
                    hook(*fired)

        return counted

    def _start(self, state: Tensor) -> list[Tensor | None]:
        """The first state of a forward is here: now its rows are known, and it gets its memory."""
        run = self._run
        run.forward = forward = self._requests.forward(state)
        run.views = views = self._allocator.allot(forward, state)
        plain = forward.kept is None and forward.packed is not None and not self._compilation.spread
        run.shape = (*forward.lead, self._hidden) if plain else None
        run.dtype = state.dtype
        return views

    def _write(self, index: int, state: Tensor, view: Tensor | None) -> None:
        """A state that is not simply copied: padding, another shape, type or device, an unknown width."""
        forward = self._run.forward
        assert forward is not None
        if view is None:
            tap = self._plan.taps[index]
            raise CaptureError(
                f"{tap.point} ({tap.place.name}) fired twice in one forward, so it has no single meaning; "
                "capture at a module that runs once per forward"
            )
        self._allocator.write(forward, index, state.detach(), view)

    def _never_fired(self, views: list[Tensor | None] | None) -> str:
        missing = [tap for i, tap in enumerate(self._plan.taps) if views is None or views[i] is not None]
        named = ", ".join(f"{tap.point} ({tap.place.name})" for tap in missing)
        message = f"never fired in a forward of {type(self._root).__name__} that completed: {named}"
        if any(self._compilation.compiled_around(tap.place.module) for tap in missing):
            return f"{message}; {ALREADY_COMPILED}"
        return f"{message}; the model skipped these modules, or calls their forward() directly"

    def _close_gate(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._began = False

    def _check_gate(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """After a compiled module's forward: code compiled without our hooks does not run them."""
        if not self._began:
            points = ", ".join(str(tap.point) for tap in self._plan.taps)
            raise CaptureError(
                f"none of {points} fired in a forward of {type(module).__name__}: {ALREADY_COMPILED}"
            )

    def _without_cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        passed = [name for name in CACHE_NAMES if kwargs.get(name) is not None]
        passed += [f"argument {i}" for i, value in enumerate(args) if is_cache(value)]
        passed += ["use_cache=True"] if kwargs.get("use_cache") else []
        if passed:
            raise CaptureError(
                f"stop=True with {', '.join(passed)}: a stopped forward would leave the KV cache filled in "
                "some layers only; stop only forwards without a cache"
            )
        if takes_use_cache(self.anatomy.model) or takes_use_cache(self._root):
            return {**kwargs, "use_cache": False}
        return kwargs

    def _release_caches(self) -> None:
        for cache in self._requests.caches():
            allow_reordering(cache, self)


def takes_use_cache(module: nn.Module) -> bool:
    """Whether ``module.forward`` has a ``use_cache`` switch."""
    return "use_cache" in inspect.signature(module.forward).parameters


def _check_static(
    plan: Plan, allocator: Allocator, dtype: torch.dtype | None, out: Tensor | None, target_out: Tensor | None
) -> None:
    """Make sure that static buffers fit what will be written into them."""
    apart = len(plan.taps) > plan.n_inputs
    if out is None:
        if target_out is not None:
            raise BindError("target_out is given without out: pass both static buffers, or none")
        return
    if apart != (target_out is not None):
        what = (
            f"the target {plan.spec.target} needs target_out too"
            if apart
            else "there is no target for target_out"
        )
        raise BindError(f"with a static buffer out, {what}")
    widths = allocator.widths.inputs
    if not allocator.widths.complete:
        unknown = ", ".join(str(tap.point) for tap in plan.taps if tap.width is None)
        raise BindError(
            f"a static buffer needs every width beforehand, and that of {unknown} shows only on running"
        )
    for name, buffer, width in (
        ("out", out, sum(widths)),
        ("target_out", target_out, allocator.widths.target),
    ):
        if buffer is not None and (buffer.dim() != 2 or buffer.shape[1] != width):
            raise BindError(f"{name} has shape {list(buffer.shape)}; {plan.spec} needs [rows, {width}]")
        if buffer is not None and dtype not in (None, buffer.dtype):
            raise BindError(f"dtype={dtype} disagrees with {name}, which is {buffer.dtype}")
        if buffer is not None and buffer.requires_grad:
            raise BindError(
                f"{name} requires grad; captured states are detached, so pass a buffer that does not"
            )
