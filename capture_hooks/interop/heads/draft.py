"""The neutral form between two layouts: a draft head with everything settled that its file left open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from torch import Tensor

from ...capture.anatomy import Anatomy
from ...capture.fingerprint import TargetFingerprint
from ...errors import HeadError
from ...heads.config import model_type
from ...spec import CaptureSpec, Point

#: Where a converted head says what it was made of: ``{from, by, losses, carried}``.
CONVERSION: Final = "capture_hooks_conversion"


@dataclass(frozen=True, slots=True)
class Target:
    """The model that a head drafts for, as far as ids and vocabularies depend on it.

    Attributes:
        name: a hub id or path; None where nobody said.
        architectures: as its ``config.json`` has them.
        family: its ``model_type``.
        n_layers, hidden_size, vocab_size: of its text decoder.
    """

    name: str | None
    architectures: tuple[str, ...]
    family: str
    n_layers: int
    hidden_size: int
    vocab_size: int

    @classmethod
    def of_config(cls, config: Any, name: str | None) -> Self:
        """From a transformers configuration.

        Raises:
            HeadError: it does not say how many layers, channels or tokens there are.
        """
        text = config.get_text_config(decoder=True)
        sizes = {key: getattr(text, key, None) for key in ("num_hidden_layers", "hidden_size", "vocab_size")}
        layers, hidden, vocabulary = sizes.values()
        if not (isinstance(layers, int) and isinstance(hidden, int) and isinstance(vocabulary, int)):
            raise HeadError(f"the config of the target {name or ''} has {sizes}; whole numbers are needed")
        architectures = tuple(getattr(config, "architectures", None) or ())
        return cls(name, architectures, str(config.model_type), layers, hidden, vocabulary)

    @classmethod
    def of_fingerprint(cls, target: TargetFingerprint) -> Self:
        """From a head's capture section."""
        return cls(
            None,
            (target.architecture,),
            target.model_type,
            target.n_layers,
            target.hidden_size,
            target.vocab_size,
        )

    @classmethod
    def of_anatomy(cls, anatomy: Anatomy) -> Self:
        """From the model itself."""
        return cls(
            None,
            (type(anatomy.model).__name__,),
            model_type(anatomy),
            anatomy.n_layers,
            anatomy.hidden_size,
            anatomy.vocab_size,
        )


@dataclass(frozen=True, slots=True)
class Computes:
    """What a head computes, every question answered; see `contract.Flags` for each."""

    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    norm_before_lm_head: bool


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A head that any layout can be written from.

    Attributes:
        spec: the states it eats, layers absolute; input i is block i of ``fc``'s columns.
        target: the model it drafts for.
        computes: its norms.
        fields: sizes, RoPE (``rope_parameters`` alone), activation, biases and special tokens of the draft.
        extras: keys of its config that mean nothing to us, as they stand.
        eagle_extras: the same of ``eagle_config``.
        carried: by layout, keys that only that layout has; written again when it is the destination.
        tensors: by canonical name; ``d2t`` holds offsets, there is no ``t2d``, a further layer's input norm
            is ``layers.N.input_layernorm.weight``.
        losses: what earlier conversions and this reading could not keep, a sentence each.
        notes: what a reader should know, a sentence each.
        left_out: keys and tensors that no reader of a head uses, each with the reason.
    """

    spec: CaptureSpec
    target: Target
    computes: Computes
    fields: Mapping[str, Any]
    extras: Mapping[str, Any]
    eagle_extras: Mapping[str, Any]
    carried: Mapping[str, Mapping[str, Any]]
    tensors: Mapping[str, Tensor]
    losses: tuple[str, ...]
    notes: tuple[str, ...]
    left_out: Mapping[str, str]

    @property
    def points(self) -> tuple[Point, ...]:
        """The inputs in the order of ``fc``'s columns."""
        return self.spec.inputs


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """A head in one layout's names, not yet on disk.

    Attributes:
        tensors: by the layout's names.
        config: the whole ``config.json``.
        losses: what the layout cannot say, a sentence each.
        notes: which of the layout's readers would compute something else, a sentence each.
    """

    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]
    losses: tuple[str, ...]
    notes: tuple[str, ...]
