"""z-lab/dflash: ``dflash_config.target_layer_ids``, outputs of layers, in the order of the list.

With transformers it indexes ``hidden_states`` by id + 1, so the last layer is the final norm; with MLX it
wraps the layers themselves, so the last layer is the un-normed end.  One head, two tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ...errors import ConventionError
from ...spec import Point
from ..contract import Captured, Convention, Rank, Reader, Reading
from .table import SPREAD, TableConvention, hidden_states_entry, output_list_entry, outputs, spread

_KEY = "dflash_config.target_layer_ids"


class Dflash(TableConvention):
    """With transformers: id k is ``post.k``, and n-1 is ``final_norm``."""

    name: ClassVar[str] = "dflash"
    library = "dflash"
    versions = "2026.4.26"
    key: ClassVar[str] = _KEY
    source: ClassVar[str] = "z-lab/dflash 44947fb: dflash/model.py:27-45,99,312-314"
    limits: ClassVar[str] = "Neither the embedding nor the un-normed end can be captured."
    outside: ClassVar[str] = "is beyond the last layer or counted from the end"

    def states(self, n_layers: int) -> Mapping[int, Point]:
        """Every layer's output, but the final norm for the last."""
        return outputs(n_layers, last=Point("final_norm"))

    def stray(self, number: int, n_layers: int) -> Point | None:
        """An entry of ``hidden_states``."""
        return hidden_states_entry(number, n_layers)

    def default(self, n_layers: int) -> Captured:
        """It depends on the draft: as many layers as the draft has, evenly from 1 to n-3."""
        self._refuse((), n_layers, SPREAD)


class DflashMlx(Dflash):
    """With MLX: id k is ``post.k``, the last one un-normed."""

    name = "dflash.mlx"
    key = f"{_KEY}, MLX"
    primary = False
    source = "z-lab/dflash 44947fb: dflash/model_mlx.py:184,196-225"
    limits = "Neither the embedding nor final_norm can be captured."

    def states(self, n_layers: int) -> Mapping[int, Point]:
        """Every layer's output."""
        return outputs(n_layers)

    def stray(self, number: int, n_layers: int) -> Point | None:
        """An entry of the list of layers."""
        return output_list_entry(number, n_layers)

    def default(self, n_layers: int) -> Captured:
        """None: the key is looked up and must be there."""
        self._refuse((), n_layers, "it stops with a KeyError")


class DflashReader(Reader):
    """The list of the draft's config, or one spread over the layers that the config says the target has."""

    name: ClassVar[str] = "dflash"
    library = Dflash.library
    versions = Dflash.versions
    source = Dflash.source
    rank: ClassVar[Rank] = "read"
    read_on = Dflash.read_on
    _convention: ClassVar[TableConvention] = Dflash()

    def read(self, config: Mapping[str, Any], family: str, n_layers: int) -> Reading:
        """See `Reader.read`."""
        name = self._convention.name
        nested = config.get("dflash_config")
        if not isinstance(nested, Mapping):
            return Reading(name, None, None, None, f"dflash_config is {nested!r}, no object")
        if "target_layer_ids" not in nested:
            try:
                return Reading(name, None, None, self._without(config, n_layers))
            except ConventionError as error:
                return Reading(name, None, None, None, str(error))
        ids = nested["target_layer_ids"]
        if not isinstance(ids, list | tuple):
            return Reading(name, _KEY, None, None, f"{_KEY} is {ids!r}, no list")
        try:
            return Reading(name, _KEY, tuple(ids), self._convention.captured(ids, n_layers))
        except ConventionError as error:
            return Reading(name, _KEY, tuple(ids), None, str(error))

    def _without(self, config: Mapping[str, Any], n_layers: int) -> Captured:
        depth, of_draft = config.get("num_target_layers"), config.get("num_hidden_layers")
        if type(depth) is not int or type(of_draft) is not int or depth < 1 or of_draft < 1:
            raise ConventionError(
                f"{self.name}: without {_KEY} it needs num_target_layers and num_hidden_layers, "
                f"which are {depth!r} and {of_draft!r}"
            )
        return self._convention.taken(spread(depth, of_draft), n_layers)


class DflashMlxReader(DflashReader):
    """The list of the draft's config, which must be there."""

    name = "dflash.mlx"
    source = DflashMlx.source
    _convention = DflashMlx()

    def _without(self, config: Mapping[str, Any], n_layers: int) -> Captured:
        return self._convention.default(n_layers)


CONVENTIONS: tuple[Convention, ...] = (Dflash(), DflashMlx())
READERS: tuple[Reader, ...] = (DflashReader(), DflashMlxReader())
