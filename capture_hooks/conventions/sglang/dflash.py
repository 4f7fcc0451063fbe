"""SGLang's DFlash and DSpark ids: ``dflash_config.target_layer_ids``, or the same list at the top level.

They name outputs of layers, in all families but one.  They are checked against the target's depth before any
model sees them, so that what EAGLE-3's ids do by accident (the embedding by -1) cannot happen here; what
happens at the last layer is the model's own affair all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

from ...errors import ConventionError
from ..contract import Captured
from .eagle3 import Never
from .model import SglangModel

KEY: Final = "dflash_config.target_layer_ids"


def default_layers(n_layers: int, draft_layers: int) -> list[int]:
    """Ids that a draft of ``draft_layers`` layers takes without a list, ``build_target_layer_ids``.

    Raises:
        ConventionError: the target is too shallow.
    """
    if draft_layers == 1:
        return [n_layers // 2]
    if n_layers < 4:
        raise ConventionError(
            f"sglang, {KEY}: DFlash layer selection requires num_target_layers >= 4, not {n_layers}"
        )
    span = n_layers - 4
    return [round(1 + i * span / (draft_layers - 1)) for i in range(draft_layers)]


class Dflash(SglangModel):
    """Id k is ``post.k``, for k from 0; an id that is no layer is refused."""

    primary: ClassVar[bool] = False
    key: ClassVar[str] = KEY
    #: Whether ids must ascend, each once.
    ascending: ClassVar[bool] = False

    def captured(self, ids: Sequence[int], n_layers: int) -> Captured:
        """As `Convention.captured`, after ``parse_dflash_draft_config`` and ``resolve_target_layer_ids``."""
        for number in self._parsed(ids, n_layers):
            if not 0 <= number < n_layers:
                self._refuse(ids, n_layers, f"{number} is no layer, a ValueError")
        return self.unchecked(ids, n_layers)

    def unchecked(self, ids: Sequence[int], n_layers: int) -> Captured:
        """As `captured`, for ids that nobody compares with the target's depth."""
        numbers = self._parsed(ids, n_layers)
        if self.ascending and numbers != sorted(set(numbers)):
            self._refuse(ids, n_layers, "target_layer_ids must ascend, each once, a ValueError")
        found = super().captured(numbers, n_layers)
        odd = [
            f"id {given!r} is no integer, and counts as {number}"
            for given, number in zip(ids, numbers, strict=True)
            if type(given) is not int
        ]
        return Captured(found.points, (*odd, *found.quirks))

    def _parsed(self, ids: Sequence[int], n_layers: int) -> list[int]:
        try:
            numbers = [int(number) for number in ids]
        except (TypeError, ValueError, OverflowError) as error:
            self._refuse(ids, n_layers, f"its reader fails, {type(error).__name__}: {error}")
        if not numbers:
            self._refuse(ids, n_layers, "target_layer_ids must be non-empty, a ValueError")
        return numbers

    def default(self, n_layers: int) -> Captured:
        """Depends on the draft: see `default_layers`."""
        self._refuse([], n_layers, "its default spreads over the target as many layers as the draft has")


class DflashInputs(Dflash):
    """Id k is ``pre.k``: the loop captures before a layer, and the setter does not add one."""

    entering = True

    def lowest(self, n_layers: int) -> int:
        return 0

    def boundaries(self, ids: Sequence[int], n_layers: int) -> list[int]:
        return list(ids)

    def ids(self, boundaries: Sequence[int], n_layers: int) -> list[int]:
        return list(boundaries)


class DflashBeforeLast(Dflash):
    """As `Dflash`, but the last layer too is refused."""

    ascending = True

    def unchecked(self, ids: Sequence[int], n_layers: int) -> Captured:
        """As `Dflash.unchecked`; the setter compares with the depth itself."""
        for number in self._parsed(ids, n_layers):
            if not 0 <= number < n_layers - 1:
                self._refuse(
                    ids, n_layers, f"{number} is not in [0, {n_layers - 1}), as it must be: a ValueError"
                )
        return super().unchecked(ids, n_layers)


class DflashNever(Never):
    """Families in whose models no DFlash ids capture anything that has a name."""

    primary = False
    key = KEY
