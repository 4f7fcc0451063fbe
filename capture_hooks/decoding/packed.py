"""Linear layers whose cost hardly grows with a few more rows, for verification on a CPU.

A verification pass multiplies every weight with 2 to 16 rows.  For that, stock float32 kernels of a CPU take
up to twice the time of one row, although the memory traffic is the same; oneDNN with the weight
packed once ahead takes nearly the same.  The price is a second copy of every weight.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import DecodingError

#: Row counts a verification pass may have and for which kernels are compared.
ROWS = range(2, 17)
_SAMPLE_BYTES = 64 << 20  # weights timed per kernel: more than any cache that would flatter one of them
_REPEATS = 3
_GAIN = 0.95  # of the stock time: what must be beaten, so that noise alone never switches kernels


class PackedLinears:
    """Packed copies of a model's float32 CPU linears, used only inside `verifying`.

    Outside it the model runs exactly as found.  Packing happens on first use; a weight
    changed in place afterwards is packed anew when decoding starts (`refresh`).
    """

    def __init__(self, model: nn.Module) -> None:
        """Find the linears.

        Raises:
            DecodingError: where this build of torch or this model has none that can be packed.
        """
        if not (
            torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch gives no types
            and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        ):
            raise DecodingError(
                "kernels='packed' needs a torch build with oneDNN (mkldnn); use kernels='stock'"
            )
        self._linears = [m for m in model.modules() if isinstance(m, nn.Linear) and _packable(m)]
        if not self._linears:
            raise DecodingError(
                "kernels='packed' serves float32 nn.Linear modules on the CPU, and this target has none; "
                "use kernels='stock'"
            )
        self._packed: dict[int, Tensor] = {}
        self._stamp: tuple[tuple[int, int], ...] = ()
        self._faster: frozenset[int] | None = None

    @property
    def extra_bytes(self) -> int:
        """Memory the packed copies take."""
        return sum(
            w.numel() * w.element_size() for w in {id(m.weight): m.weight for m in self._linears}.values()
        )

    def refresh(self) -> None:
        """Pack what is not packed or has changed since, and measure which row counts gain."""
        stamp = tuple((m.weight.data_ptr(), m.weight._version) for m in self._linears)
        if stamp == self._stamp:
            return
        with torch.inference_mode():
            unique = {id(m.weight): m.weight for m in self._linears}
            self._packed = {
                key: torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 4)
                for key, weight in unique.items()
            }
        self._stamp = stamp
        if self._faster is None:
            self._faster = self._measure()

    def helps(self, rows: int) -> bool:
        """Whether packed kernels were measured to be faster for ``rows`` rows on this machine."""
        return self._faster is not None and rows in self._faster

    @contextlib.contextmanager
    def verifying(self, rows: int) -> Iterator[None]:
        """Run the linears through packed weights inside the block, where that helps for ``rows`` rows."""
        if not self.helps(rows):
            yield
            return
        try:
            for linear in self._linears:
                # Straight into __dict__: nn.Module.__setattr__ costs ten times as much, 200 times a round.
                linear.__dict__["forward"] = _packed_forward(self._packed[id(linear.weight)], linear.bias)
            yield
        finally:
            for linear in self._linears:
                linear.__dict__.pop("forward", None)

    def _measure(self) -> frozenset[int]:
        """Row counts for which packed kernels beat stock ones, timed on this model's own weights."""
        sample: list[nn.Linear] = []
        size = 0
        for linear in self._linears:
            if size >= _SAMPLE_BYTES:
                break
            sample.append(linear)
            size += linear.weight.numel() * linear.weight.element_size()
        faster = set()
        with torch.inference_mode():
            for rows in ROWS:
                inputs = [torch.ones(rows, m.in_features) for m in sample]
                stock = [_stock_forward(m.weight, m.bias) for m in sample]
                packed = [_packed_forward(self._packed[id(m.weight)], m.bias) for m in sample]
                # Interleaved, and the best of a few: other load on the machine only ever adds time.
                pairs = [(_seconds(stock, inputs), _seconds(packed, inputs)) for _ in range(_REPEATS)]
                if min(p for _, p in pairs) < _GAIN * min(s for s, _ in pairs):
                    faster.add(rows)
        return frozenset(faster)


def _packable(module: nn.Linear) -> bool:
    return (
        type(module) is nn.Linear
        and "forward"
        not in module.__dict__  # someone else's wrapper (offloading, quantisation) stays in charge
        and module.weight.device.type == "cpu"
        and module.weight.dtype == torch.float32
    )


def _packed_forward(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    linear = torch.ops.mkldnn._linear_pointwise

    def forward(x: Tensor) -> Tensor:
        out: Tensor = linear(x, weight, bias, "none", [], "")
        return out

    return forward


def _stock_forward(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    return lambda x: F.linear(x, weight, bias)


def _seconds(functions: list[Callable[[Tensor], Tensor]], inputs: list[Tensor]) -> float:
    # On one thread, its own CPU time: blind to whatever else the machine is doing.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    for function, x in zip(functions, inputs, strict=True):
        function(x)
    return clock() - start
