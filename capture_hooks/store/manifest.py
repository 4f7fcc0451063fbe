"""What a dump says of itself: `manifest.json`, rewritten atomically after each shard.

It holds no time stamps, so that a dump that was killed and resumed equals one that was not, byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    model_validator,
)

from ..capture.fingerprint import TargetFingerprint
from ..errors import StoreError
from ..io import check_regular, replacing
from ..spec import CaptureSpec

MANIFEST: Final = "manifest.json"
KIND: Final = "capture-hooks.dump"
VERSION: Final = 1
ALIGNMENT: Final = (
    "row t holds token x[t], the states captured at it, and loss_mask[t]: whether x[t] is a token the head "
    "should learn to predict; argmax[t] is the target's greedy next token after row t, to compare with x[t+1]"
)

Dtype = Literal["float32", "bfloat16", "float16"]
Spec = Annotated[
    CaptureSpec,
    PlainValidator(lambda value: value if isinstance(value, CaptureSpec) else CaptureSpec.from_json(value)),
    PlainSerializer(lambda spec: spec.to_json(), return_type=dict[str, Any]),
]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Engine(_Frozen):
    """The program that ran the target; another version may round differently, so it counts."""

    name: str = Field(description="library that ran the target, e.g. transformers")
    version: str
    settings: dict[str, str] = Field(
        default={}, description="what else changes the bits: torch, device, attention"
    )


class Provenance(_Frozen):
    """Where the tokens came from; ``digest`` alone decides whether two dumps hold the same data."""

    source: str = Field(description="path as it was given")
    digest: str = Field(description="SHA-256 over token ids and loss masks, in order")
    sequences: int = Field(ge=1)
    tokens: int = Field(ge=1)
    template: str | None = Field(
        default=None, description="SHA-256 of the chat template that was applied, if one was"
    )
    conversations: tuple[int, ...] | None = Field(
        default=None,
        description="sequences that each conversation gave, in order; null where every sequence is one",
    )
    clock: str | None = Field(
        default=None, description="the moment that a chat template which asks for the date was told"
    )

    def first_of_conversation(self) -> tuple[int, ...]:
        """For each sequence, the first one of its conversation."""
        if self.conversations is None:
            return tuple(range(self.sequences))
        starts = accumulate(self.conversations, initial=0)
        return tuple(
            start for start, count in zip(starts, self.conversations, strict=False) for _ in range(count)
        )

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if self.conversations is not None and sum(self.conversations) != self.sequences:
            raise ValueError(f"conversations do not add up to {self.sequences} sequences")
        return self

    def __str__(self) -> str:
        return f"{self.source} ({self.sequences} sequences, {self.tokens} tokens, digest {self.digest[:12]})"


class ShardRecord(_Frozen):
    """One complete shard."""

    file: str = Field(pattern=r"^shard-[0-9]{5,}\.safetensors$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    bytes: int = Field(ge=0)
    sequences: int = Field(ge=1)
    tokens: int = Field(ge=1)
    lengths: tuple[int, ...] = Field(description="tokens of each sequence")

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if len(self.lengths) != self.sequences or sum(self.lengths) != self.tokens:
            raise ValueError(
                f"{self.file}: lengths do not add up to {self.sequences} sequences, {self.tokens} tokens"
            )
        return self


class Manifest(_Frozen):
    """Everything about a dump but its tensors.  All fields except ``shards`` are fixed when it is begun."""

    kind: Literal["capture-hooks.dump"] = KIND
    version: int = Field(default=VERSION, ge=VERSION, le=VERSION)
    alignment: str = ALIGNMENT
    spec: Spec = Field(description="inputs in column order, layers absolute, and the target point")
    split_boundaries: tuple[int, ...] = Field(
        default=(), description="boundaries at which the model adds something"
    )
    widths: tuple[int, ...] = Field(min_length=1, description="columns of each input, in order")
    target_width: int = Field(ge=1)
    target_input: int | None = Field(
        default=None, description="index of the input that is also the target, if one is"
    )
    target_normed: bool = Field(description="whether the target state has passed the final norm")
    fingerprint: TargetFingerprint
    dtype: Dtype
    engine: Engine
    data: Provenance
    shard_tokens: int = Field(
        ge=1, description="a shard is closed before it would hold more tokens than this"
    )
    batch_tokens: int | None = Field(
        default=None,
        ge=1,
        description="most tokens, padding included, in one forward pass; null where that is not known",
    )
    argmax: bool = Field(
        default=True, description="whether the target's greedy next tokens are stored beside its states"
    )
    shards: tuple[ShardRecord, ...] = ()

    @property
    def n_layers(self) -> int:
        return self.fingerprint.n_layers

    @property
    def hidden_size(self) -> int:
        return self.fingerprint.hidden_size

    @property
    def sequences(self) -> int:
        """Sequences stored so far."""
        return sum(shard.sequences for shard in self.shards)

    @property
    def tokens(self) -> int:
        """Tokens stored so far."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each stored sequence, in order."""
        return tuple(length for shard in self.shards for length in shard.lengths)

    @property
    def complete(self) -> bool:
        """Whether every sequence of the data is stored."""
        return self.sequences == self.data.sequences

    @property
    def columns(self) -> tuple[tuple[int, int], ...]:
        """Start and end column of each input in ``states``."""
        ends = tuple(accumulate(self.widths))
        return tuple((end - width, end) for end, width in zip(ends, self.widths, strict=True))

    @property
    def absent(self) -> frozenset[str]:
        """Names of the tensors that its shards do not have."""
        missing = {"target": self.target_input is not None, "argmax": not self.argmax}
        return frozenset(name for name, is_missing in missing.items() if is_missing)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token on disk, without the file's header."""
        stored = sum(self.widths) + (self.target_width if self.target_input is None else 0)
        return stored * (4 if self.dtype == "float32" else 2) + 8 + (8 if self.argmax else 0) + 1

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read ``directory/manifest.json``.

        Raises:
            StoreError: there is none, or it is damaged or of another kind or version.
        """
        path = directory / MANIFEST
        check_regular(path)
        try:
            text = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            what = "has no manifest.json: it is not a dump" if directory.is_dir() else "is not a directory"
            raise StoreError(f"{directory} {what if directory.exists() else 'does not exist'}") from None
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            shown = repr(first["input"])
            raise StoreError(
                f"{path} is damaged or not a dump's manifest: {where + ': ' if where else ''}{first['msg']} "
                f"(got {shown if len(shown) <= 80 else shown[:77] + '...'})"
            ) from None

    def write(self, directory: Path) -> None:
        """Replace ``directory/manifest.json`` atomically.

        Raises:
            StoreError: the system refused; the former manifest is intact.
        """
        with replacing(directory / MANIFEST) as file:
            file.write(self.model_dump_json(indent=1).encode() + b"\n")

    def disagreements(self, other: Manifest) -> list[str]:
        """Sentences on what keeps two manifests from describing the same dump; shards are not compared."""
        return list(self._disagreements(other))

    def _disagreements(self, other: Manifest) -> Iterator[str]:
        if self.n_layers == other.n_layers:
            yield from self.spec_disagreements(other.spec)
        elif self.spec != other.spec:
            yield f"spec: {str(self.spec)!r} here, {str(other.spec)!r} there"
        yield from (f"target model: {text}" for text in self.fingerprint.differences(other.fingerprint))
        if self.data.digest != other.data.digest:
            yield f"data: {self.data} here, {other.data} there"
        for name in ("dtype", "engine", "shard_tokens", "batch_tokens", "widths", "target_width", "argmax"):
            here, there = getattr(self, name), getattr(other, name)
            if here != there:
                yield f"{name}: {here} here, {there} there"

    def spec_disagreements(self, spec: CaptureSpec) -> list[str]:
        """As `disagreements`, for the spec alone; specs that name the same states in the same order agree.

        Raises:
            SpecError: when ``spec`` names a layer that the target does not have.
        """
        ours = self.spec.resolve(self.n_layers, self.split_boundaries)
        theirs = spec.resolve(self.n_layers, self.split_boundaries)
        if ours == theirs:
            return []
        hint = ""
        if set(ours.inputs) == set(theirs.inputs) and ours.target == theirs.target:
            hint = " (the same points in another order: order is part of the meaning)"
        return [f"spec: {str(self.spec)!r} here, {str(spec.absolute(self.n_layers))!r} there{hint}"]
