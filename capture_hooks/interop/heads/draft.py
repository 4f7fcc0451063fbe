"""The neutral form between two layouts: a draft head with everything settled that its file left open."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import torch
from torch import Tensor

from ..._version import __version__
from ...capture.anatomy import Anatomy
from ...capture.fingerprint import TargetFingerprint
from ...conventions import Conventions
from ...errors import HeadError
from ...heads.config import depth_order, model_type
from ...heads.engines import EngineStatement, statements
from ...heads.schema import HeadSchema
from ...spec import CaptureSpec, Point

#: Where a converted head says what it was made of: ``{from, by, losses, carried}``.
CONVERSION: Final = "capture_hooks_conversion"


@dataclass(frozen=True, slots=True)
class TargetShape:
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


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A head that any layout can be written from.

    Attributes:
        kind: name of the head provider whose head it is.
        schema: what that provider says of its files.
        spec: the states it eats, layers absolute; input i is block i of ``fc``'s columns.
        target: the model it drafts for.
        computes: its flags, every one answered.
        fields: sizes, RoPE (``rope_parameters`` alone), activation, biases and special tokens of the draft.
        extras: keys of its config that mean nothing to us, as they stand.
        eagle_extras: the same of ``eagle_config``.
        carried: by layout, keys that only that layout has; written again when it is the destination.
        tensors: by canonical name; ``d2t`` holds offsets, there is no ``t2d``.
        normed_twice: its trainer norms layer 0's states twice, as ModelOpt does; ``notes`` says what follows.
        losses: what earlier conversions and this reading could not keep, a sentence each.
        notes: what a reader should know, a sentence each.
        left_out: keys and tensors that no reader of a head uses, each with the reason.
    """

    kind: str
    schema: HeadSchema
    spec: CaptureSpec
    target: TargetShape
    computes: Mapping[str, bool]
    fields: Mapping[str, Any]
    extras: Mapping[str, Any]
    eagle_extras: Mapping[str, Any]
    carried: Mapping[str, Mapping[str, Any]]
    tensors: Mapping[str, Tensor]
    normed_twice: bool
    losses: tuple[str, ...]
    notes: tuple[str, ...]
    left_out: Mapping[str, str]

    @property
    def points(self) -> tuple[Point, ...]:
        """The inputs in the order of ``fc``'s columns."""
        return self.spec.inputs

    @property
    def flags(self) -> dict[str, bool]:
        """The flags under the keys that every library but SpecForge gives them."""
        return {name: self.computes[name] for name in self.schema.flag_keys}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical name and shape of every tensor that it may have."""
        return self.schema.shapes({**self.fields, **self.computes}, len(self.points))

    @property
    def unknown_tensors(self) -> list[str]:
        """Tensors that no head of its kind has: another kind's, or a quantised one's scales."""
        known = {*self.shapes, "norm.weight"}
        return sorted(name for name in self.tensors if name not in known)

    def without(self, names: Collection[str]) -> Draft:
        """The same head without some tensors."""
        tensors = {name: tensor for name, tensor in self.tensors.items() if name not in names}
        return dataclasses.replace(self, tensors=tensors)

    def named(self, prefix: str, masks: bool, both_norms: bool) -> dict[str, Tensor]:
        """The tensors as a layout calls them.

        Args:
            prefix: what layer 0's are called.
            masks: whether ``t2d`` is written beside ``d2t``.
            both_norms: whether a further layer's input norm stands under both of its names, of which SGLang
                and TensorRT-LLM read one, vLLM and speculators the other.
        """
        ours, other = self.schema.later_norms
        found: dict[str, Tensor] = {}
        for name, tensor in self.tensors.items():
            first = name.startswith("midlayer.")
            found[f"{prefix}.{name.removeprefix('midlayer.')}" if first else name] = tensor
            if both_norms and not first and name.endswith(f".{ours}.weight"):
                found[name.replace(ours, other)] = tensor
        if masks and "d2t" in found:
            marked = torch.zeros(self.fields["vocab_size"], dtype=torch.bool)
            marked[found["d2t"] + torch.arange(len(found["d2t"]))] = True
            found["t2d"] = marked
        return found

    @property
    def rope_spellings(self) -> dict[str, Any]:
        """Its RoPE in all its keys."""
        return self.schema.rope_spellings(self.fields["rope_parameters"])

    @property
    def dtypes(self) -> dict[str, str]:
        """Both names: transformers reads ``dtype`` since 4.56, and ``torch_dtype`` before."""
        kind = next(tensor.dtype for tensor in self.tensors.values() if tensor.is_floating_point())
        return dict.fromkeys(("dtype", "torch_dtype"), str(kind).removeprefix("torch."))

    @property
    def window(self) -> int | None:
        """Tokens that the draft's attention reaches back, where that is fewer than its positions.

        speculators 0.9 trains with 2048 unless told otherwise (``layer_types``, ``sliding_window``).
        """
        kinds, window = self.extras.get("layer_types"), self.extras.get("sliding_window")
        limited = isinstance(kinds, list) and "sliding_attention" in kinds
        if not limited or not isinstance(window, int) or window >= self.fields["max_position_embeddings"]:
            return None
        return window

    def engine_statements(self, conventions: Conventions) -> tuple[EngineStatement, ...]:
        """What each engine would make of the head, from its points and norms."""
        fields, target = {**self.fields, **self.flags}, self.target
        named = self.named("midlayer", masks=False, both_norms=True)
        about = (self.points, target.n_layers, target.family, False, fields, named, __version__)
        return statements(*about, conventions)

    def conversion(self, layout: str) -> dict[str, Any]:
        """What the file says of its making, and other layouts' keys, kept where no reader meets them."""
        carried = {name: dict(kept) for name, kept in self.carried.items() if name != layout}
        return {"by": f"capture-hooks {__version__}"} | ({"carried": carried} if carried else {})

    def no_place(self, name: str) -> str:
        """Why a tensor is lost."""
        layers, number = self.fields["num_hidden_layers"], name.removeprefix("layers.").partition(".")[0]
        if name.startswith("layers.") and number.isdigit() and int(number) >= layers:
            return f"the tensor {name} is of layer {number}, and its config has {layers} (num_hidden_layers)"
        return f"the tensor {name} has no place in it"


def no_norm(layout: str) -> str:
    """The loss of SpecForge's ``norm_output: false`` anywhere else."""
    return (
        f"lm_head reads the output without norm (SpecForge's norm_output: false), which {layout} cannot say"
    )


def by_depth(draft: Draft) -> Draft:
    """The same head with its inputs in ascending depth, the order in which every server concatenates.

    Raises:
        SpecError: two inputs are one state, which every server captures once.
        HeadError: see `reordered`.
    """
    draft.spec.resolve(draft.target.n_layers)
    return reordered(draft, depth_order(draft.spec, draft.target.n_layers))


def reordered(draft: Draft, order: Sequence[int]) -> Draft:
    """The same head whose input i is the present input ``order[i]``.

    Raises:
        HeadError: ``fc`` is quantised in blocks, whose scales cannot be moved column by column.
    """
    if list(order) == list(range(len(order))):
        return draft
    tensors = dict(draft.tensors)
    if others := [n for n in tensors if n.startswith("fc.") and n not in ("fc.weight", "fc.bias")]:
        raise HeadError(f"the inputs must change places, and fc comes with {', '.join(others)}: not done")
    width = draft.fields["target_hidden_size"]
    columns = torch.cat([torch.arange(width) + index * width for index in order])
    tensors["fc.weight"] = _taken(tensors["fc.weight"], columns)
    if "input_norm.weight" in tensors:
        tensors["input_norm.weight"] = _taken(tensors["input_norm.weight"], columns)
    for place, index in enumerate(order):
        if f"fc_norm.{index}.weight" in draft.tensors:
            tensors[f"fc_norm.{place}.weight"] = draft.tensors[f"fc_norm.{index}.weight"]
    inputs = tuple(draft.spec.inputs[index] for index in order)
    return dataclasses.replace(draft, spec=CaptureSpec(inputs, draft.spec.target), tensors=tensors)


def _taken(tensor: Tensor, columns: Tensor) -> Tensor:
    """Columns of the last dimension, also of one-byte floats, which torch does not index."""
    if tensor.is_floating_point() and tensor.element_size() == 1:
        return tensor.view(torch.uint8)[..., columns].view(tensor.dtype)
    return tensor[..., columns].contiguous()


@dataclass(frozen=True, slots=True, eq=False)
class HeadFiles:
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
