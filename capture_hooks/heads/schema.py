"""What a plugin tells of its head's file, so that the core can save, load, convert and explain it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol


class HeadSchema(Protocol):
    """``config.json`` and the tensors of one kind of head, as every library's files are reduced to them.

    *Fields* are values under the names that stock readers look for, at one level.  Tensors go by one
    *canonical* name each; input i of the head is block i of ``fc``'s columns.
    """

    @property
    def architecture(self) -> str:
        """What ``architectures`` holds."""
        ...

    @property
    def layer_keys(self) -> Sequence[str]:
        """Fields of the draft's layers and special tokens, which have these names in every library's file."""
        ...

    @property
    def rope_keys(self) -> Sequence[str]:
        """The keys in which a file may say its RoPE."""
        ...

    @property
    def flag_keys(self) -> Sequence[str]:
        """Flags that decide what the head computes, by the names that stock readers look for."""
        ...

    @property
    def required(self) -> Sequence[str]:
        """Keys that stock readers need and only the head can fill, in the order of the file."""
        ...

    @property
    def settings_key(self) -> str:
        """Where a file of ours keeps the settings of the objective, which no other library has."""
        ...

    @property
    def places(self) -> Mapping[str, Sequence[str]]:
        """By flag the dotted keys under which libraries write it; the first that is there counts."""
        ...

    @property
    def later_norms(self) -> tuple[str, str]:
        """Two names for the norm at the input of a layer after the first; the first is the canonical one."""
        ...

    def refusal(self, names: Collection[str]) -> str | None:
        """What a file with tensors of these canonical names lacks to be of this kind; None if nothing."""
        ...

    def canonical(self, name: str) -> str:
        """The one name of a tensor, whoever wrote it."""
        ...

    def problems(self, fields: Mapping[str, Any]) -> list[str]:
        """Fields whose values are of the wrong type, a sentence each."""
        ...

    def filled(self, fields: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Fields of the layers, RoPE and vocabulary with what is left out filled in as all readers do.

        Raises:
            HeadError: one is missing or of the wrong type, or two spellings of RoPE disagree.
        """
        ...

    def rope(self, fields: Mapping[str, Any], where: str) -> dict[str, Any]:
        """``rope_parameters`` (transformers 5) from any spelling.

        Raises:
            HeadError: two spellings disagree.
        """
        ...

    def rope_spellings(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """One RoPE in all its keys, for readers of either spelling."""
        ...

    def shapes(self, fields: Mapping[str, Any], inputs: int) -> dict[str, tuple[int, ...]]:
        """Canonical name and shape of every tensor of a head with these fields and flags.

        Those that it may do without are among them.
        """
        ...

    def check_shapes(
        self, shapes: Mapping[str, tuple[int, ...]], fields: Mapping[str, Any], inputs: int, where: str
    ) -> None:
        """Check that each tensor is there, in the shape that the fields ask for.

        Raises:
            HeadError: naming the tensor and both shapes, or the flag that it contradicts.
        """
        ...
