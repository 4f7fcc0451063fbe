"""Linear layers whose cost hardly grows with a few more rows, for verification on a CPU.

A verification pass multiplies every weight with 2 to 16 rows.  For that, a CPU's stock float32 kernels take
up to twice the time of one row, although the memory traffic is the same.  A second copy of the weight
in another layout is often nearly as fast as one row: stored transposed, or packed by oneDNN.  Which
one, and for how many rows, depends on the machine and the weight's shape, so it is measured on the
model's own weights.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import DecodingError

_Forward = Callable[[Tensor], Tensor]
_Shape = tuple[int, int]

#: Row counts at which kernels are compared; a pass goes by the next one that is not smaller.
MEASURED_ROWS = (2, 3, 4, 6, 8, 12, 16)
_SAMPLE_BYTES = 48 << 20  # weights timed in turn: more than a cache holds of them, as in the real loop
_REPEATS = 3
_SAMPLED = 16  # rows, and columns of each, that tell whether a weight has changed
_GAIN = 0.95  # of the stock time: what must be beaten, so that noise alone never switches kernels


@dataclass(frozen=True, slots=True)
class Layout:
    """Another way to hold a weight."""

    name: str
    pack: Callable[[Tensor], Tensor]
    bound: Callable[[Tensor, Tensor | None], _Forward]


def _transposed(weight: Tensor, bias: Tensor | None) -> _Forward:
    return lambda x: F.linear(x, weight.t(), bias)


def _onednn(weight: Tensor, bias: Tensor | None) -> _Forward:
    linear = torch.ops.mkldnn._linear_pointwise
    return lambda x: linear(x, weight, bias, "none", [], "")


def layouts() -> tuple[Layout, ...]:
    """The layouts that this build of torch offers."""
    found = [Layout("transposed", lambda w: w.t().contiguous(), _transposed)]
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch gives no types
    if available and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        # 16 is the row count oneDNN lays out for; measured best or equal for 2 to 8 rows.
        found.append(Layout("oneDNN", lambda w: torch.ops.mkldnn._reorder_linear_weight(w, 16), _onednn))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """For one weight shape: the layout kept, and the measured row counts where it beats the stock kernel."""

    layout: Layout
    rows: frozenset[int]


class PackedLinears:
    """Second copies of a model's float32 CPU weights, used only inside `verifying`.

    Outside it the model runs exactly as found.  Measuring and packing happen on first use; weights changed in
    place afterwards are packed anew once the next prompt has been read (`refresh`).
    """

    def __init__(self, model: nn.Module) -> None:
        """Find the linears.

        Raises:
            DecodingError: where the model has none of the kind.
        """
        self._linears = [m for m in model.modules() if isinstance(m, nn.Linear) and _packable(m)]
        if not self._linears:
            raise DecodingError(
                "kernels='packed' serves float32 nn.Linear modules on the CPU, and this target has none; "
                "use kernels='stock'"
            )
        self._stamp: tuple[tuple[int, int], ...] = ()
        self._values = torch.empty(0)
        self._choices: dict[_Shape, KernelChoice] | None = None
        self._packed: dict[int, Tensor] = {}
        self._plans: dict[int, list[tuple[nn.Linear, _Forward]]] = {}

    @property
    def extra_bytes(self) -> int:
        """Memory the copies take, as far as they have been made."""
        return sum(packed.numel() * packed.element_size() for packed in self._packed.values())

    def refresh(self) -> None:
        """Measure on first use; pack what is not packed or has changed since."""
        # Values too: written through ``.data``, as by PEFT on merging, they leave the version as it was.
        values = torch.cat([_sample(m.weight.detach()) for m in self._linears])
        stamp = tuple((m.weight.data_ptr(), m.weight._version) for m in self._linears)
        if stamp == self._stamp and torch.equal(values, self._values):
            return
        with torch.inference_mode():
            if self._choices is None:
                self._choices = {
                    shape: verdict
                    for shape, weights in _by_shape(self._linears).items()
                    if (verdict := _judge(weights, layouts())) is not None
                }
            self._pack(self._choices)
        self._stamp, self._values = stamp, values

    def choices(self) -> dict[_Shape, tuple[str, list[int]]]:
        """The layout kept for each weight shape and the row counts it serves, for reports."""
        choices = self._choices or {}
        return {shape: (v.layout.name, sorted(v.rows)) for shape, v in choices.items()}

    @contextlib.contextmanager
    def verifying(self, rows: int) -> Iterator[None]:
        """Inside the block, run linears through their copies where that is faster for ``rows`` rows."""
        plan = self._plans.get(next((m for m in MEASURED_ROWS if m >= rows), 0), ()) if rows > 1 else ()
        try:
            for linear, forward in plan:
                # Straight into __dict__: nn.Module.__setattr__ costs ten times as much, 200 times a round.
                linear.__dict__["forward"] = forward
            yield
        finally:
            for linear, _ in plan:
                linear.__dict__.pop("forward", None)

    def _pack(self, choices: dict[_Shape, KernelChoice]) -> None:
        self._packed, self._plans = {}, {rows: [] for rows in MEASURED_ROWS}
        for linear in self._linears:
            verdict = choices.get((linear.out_features, linear.in_features))
            if verdict is None:
                continue
            key = id(linear.weight)  # tied weights share a copy
            if key not in self._packed:
                self._packed[key] = verdict.layout.pack(linear.weight.detach())
            forward = verdict.layout.bound(self._packed[key], linear.bias)
            for rows in verdict.rows:
                self._plans[rows].append((linear, forward))


def _sample(weight: Tensor) -> Tensor:
    """Some hundred values spread over a weight."""
    rows, columns = (max(1, size // _SAMPLED) for size in weight.shape)
    return weight[::rows, ::columns].reshape(-1)


def _packable(module: nn.Linear) -> bool:
    return (
        type(module) is nn.Linear
        and "forward"
        not in module.__dict__  # someone else's wrapper (offloading, quantisation) stays in charge
        and module.weight.device.type == "cpu"
        and module.weight.dtype == torch.float32
    )


def _by_shape(linears: Sequence[nn.Linear]) -> dict[_Shape, list[Tensor]]:
    found: dict[_Shape, dict[int, Tensor]] = defaultdict(dict)
    for linear in linears:
        found[linear.out_features, linear.in_features][id(linear.weight)] = linear.weight.detach()
    return {shape: list(weights.values()) for shape, weights in found.items()}


def _judge(weights: list[Tensor], candidates: Sequence[Layout]) -> KernelChoice | None:
    """The layout that saves most over passes of 2 to 8 rows, if any does."""
    size = weights[0].numel() * weights[0].element_size()
    sample = weights[: max(1, _SAMPLE_BYTES // size)]
    kernels: dict[str, list[_Forward]] = {"stock": [_stock(weight) for weight in sample]}
    for layout in candidates:
        kernels[layout.name] = [layout.bound(layout.pack(weight), None) for weight in sample]
    times = {rows: _times(kernels, torch.ones(rows, sample[0].shape[1])) for rows in MEASURED_ROWS}
    best: tuple[float, KernelChoice] | None = None
    for layout in candidates:
        faster = {rows for rows, t in times.items() if t[layout.name] < _GAIN * t["stock"]}
        saved = sum(times[rows]["stock"] - times[rows][layout.name] for rows in faster if rows <= 8)
        if faster and (best is None or saved > best[0]):
            best = saved, KernelChoice(layout, frozenset(faster))
    return None if best is None else best[1]


def _times(kernels: dict[str, list[_Forward]], x: Tensor) -> dict[str, float]:
    """Seconds each kernel takes over all weights: the best of a few, interleaved, as load only adds time."""
    # On one thread its own CPU time, which is blind to other processes.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best = dict.fromkeys(kernels, float("inf"))
    for _ in range(_REPEATS):
        for name, functions in kernels.items():
            start = clock()
            for function in functions:
                function(x)
            best[name] = min(best[name], clock() - start)
    return best


def _stock(weight: Tensor) -> _Forward:
    return lambda x: F.linear(x, weight)
