"""speculators: lists of vLLM's boundaries, and of an older generator's layer outputs.

A config names what vLLM is told, so id k is ``pre.k``.  Whoever launches vLLM for a dump appends n, the
un-normed end: the last slot of a dump is the verifier's last state and no input, so n is no id of an input.
Until 0.4 a generator of speculators' own captured instead, after each layer: its ids mean one layer deeper
than the same ids in the config of the head that is trained on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from ..spec import Point
from .contract import Captured, Convention, Order, Rank
from .dump_lists import ListWithLast
from .read.table import TableConvention, outputs


class Speculators(TableConvention):
    """Id k is ``pre.k`` for k from 0 (the embedding) to n-1, each once."""

    name: ClassVar[str] = "speculators"
    library = "speculators"
    versions = "0.5.0 to 0.9.0"
    key: ClassVar[str] = "eagle_aux_hidden_state_layer_ids"
    rank: ClassVar[Rank] = "verified"
    source: ClassVar[str] = (
        "speculators/models/utils.py:99-140, train/data.py:316-327 and models/eagle3/core.py:70-77 of 0.9.0; "
        "vllm-project/speculators c05b95b: scripts/launch_vllm.py"
    )
    limits: ClassVar[str] = (
        "Neither the un-normed end, whose slot in a dump is the verifier's last state, nor final_norm is an "
        "input. Before 0.9 ids out of range or written twice are not refused; training fails on the width."
    )
    order: ClassVar[Order] = "depth"
    outside = "is no input: ids are distinct and within [0, n], and n is the verifier's last state"
    twice: ClassVar[Literal["kept", "once", "fails"]] = "fails"

    def states(self, n_layers: int) -> Mapping[int, Point]:
        """Every layer's input."""
        return {k: Point.pre(k) if k else Point("embed") for k in range(n_layers)}

    def default(self, n_layers: int) -> Captured:
        """2, n//2 and n-3, refused where two of them coincide or one does not exist."""
        return self.taken([2, n_layers // 2, n_layers - 3], n_layers)


class SpeculatorsDflash(Speculators):
    """The same ids under the key of DFlash, DFlash2 and DSpark."""

    name = "speculators.dflash"
    key = "aux_hidden_state_layer_ids"
    primary = False
    source = "speculators/models/dflash/core.py:167-169,233-265 and models/utils.py:99-140 of 0.9.0"


class SpeculatorsGenerator(ListWithLast):
    """Id k is ``post.k``, captured after each layer; the deepest is the verifier's last state."""

    name = "speculators.generator"
    library = "speculators"
    versions = "0.3.0 to 0.4.0"
    key = "VllmHiddenStatesGenerator(layer_ids=...)"
    primary = False
    source = (
        "speculators/data_generation/custom_worker.py:42-53 and vllm_hidden_states_generator.py:96-110 of "
        "0.3.0; the same in 0.4.0, gone in 0.5.0"
    )
    limits = (
        "Neither the embedding nor final_norm can be captured. The last one is no input; lm_head was put on "
        "it without the norm."
    )
    outside = "is out of bounds, and refused"

    def states(self, n_layers: int) -> Mapping[int, Point]:
        """Every layer's output."""
        return outputs(n_layers)

    def last(self, n_layers: int) -> int:
        """The last layer's output."""
        return n_layers - 1

    def default(self, n_layers: int) -> Captured:
        """EAGLE's numbers, taken for outputs: one layer deeper than a server's default."""
        return self.taken([2, n_layers // 2, n_layers - 3, n_layers - 1], n_layers)


CONVENTIONS: tuple[Convention, ...] = (Speculators(), SpeculatorsDflash(), SpeculatorsGenerator())
