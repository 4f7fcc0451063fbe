"""What `explain` says, as data: one JSON document with a published schema.

A report has one row for each engine and version, and findings for everything else that decides whether the
head computes there what it was trained to compute.
"""

from __future__ import annotations

from typing import Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...conventions.contract import Rank
from ...conventions.facts import Draft, Limit
from ...errors import HeadError

#: Version of the JSON form; a reader refuses versions it does not know.
FORMAT: Final = 1

#: *wrong*: the engine computes something else, or stops.  *warning*: it may.  *note*: it does not.
Severity = Literal["wrong", "warning", "note"]
#: *same* and *differs* compare what is captured with what the head was trained on; *fails*: the engine stops
#: before it captures anything; *unknown*: nothing to compare with.
Outcome = Literal["same", "differs", "fails", "unknown"]
#: *file*: the engine reads this ``config.json``.  *ids*: it is given the same integers under its own key.
#: *told*: it is given the ids that name a dump's states.
IdsFrom = Literal["file", "ids", "told"]
#: *stream*: the residual stream, un-normed.  *embedding*: the same at boundary 0.  *normed*: after the final
#: norm, as ``lm_head`` is fed.  *module*: a submodule's value.
Norm = Literal["stream", "embedding", "normed", "module"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class State(_Frozen):
    """One captured state."""

    point: str = Field(description="capture point; a boundary in one spelling, embed or post.k")
    boundary: int | None = Field(description="0 is the embedding, n the un-normed end; null for other states")
    norm: Norm


class Verdict(_Frozen):
    """What an engine captures, against what the head was trained on."""

    outcome: Outcome
    how: tuple[str, ...] = Field(default=(), description="named differences, or why it cannot be known")


class Row(_Frozen):
    """One engine, in some of its versions."""

    engine: str = Field(description="name of the reader or convention, such as vllm.v1")
    library: str
    versions: str
    rank: Rank = Field(
        description="verified: compared with the library's own code; read: taken from its source"
    )
    read_on: str = Field(description="day (ISO) on which that was done")
    source: str = Field(description="file and line in the library")
    asked: IdsFrom
    newest: bool = Field(description="whether no row speaks for a later version of the same engine")
    convention: str | None = Field(default=None, description="convention by which the ids are read")
    key: str | None = Field(default=None, description="where it finds the ids; null where it finds none")
    ids: tuple[int | str, ...] | None = Field(
        default=None, description="as they stand; what is no integer is shown as text"
    )
    captured: tuple[State, ...] | None = Field(description="in order of concatenation; null where it stops")
    silently: tuple[str, ...] = Field(default=(), description="what it does without a word")
    verdict: Verdict
    instead: str | None = Field(
        default=None, description="what to write so that it captures what the head was trained on"
    )


class Finding(_Frozen):
    """One thing that matters beside the ids."""

    check: str = Field(description="stable name, such as norms.norm_before_residual")
    severity: Severity
    engines: tuple[str, ...] = Field(
        default=(), description="libraries, or rows, concerned; none: the file itself"
    )
    what: str
    why: str = Field(description="empty where the fact is all")
    do: str = Field(description="what helps; empty where nothing is needed")
    source: str | None = Field(default=None, description="library, version, file and line")

    @classmethod
    def of_limit(
        cls, limit: Limit, draft: Draft = "llama", engines: tuple[str, ...] = (), **values: object
    ) -> Self:
        """A head needs what an engine's draft class does not compute.

        Args:
            limit: the row of ``facts.toml``.
            draft: the draft class.
            engines: the rows concerned; none: the library.
            values: what the row's texts leave open.
        """
        return cls(
            check=limit.check,
            severity=limit.severity,
            engines=engines or (limit.engine,),
            what=limit.what.format(**values),
            why=limit.why.format(**values),
            do=limit.do.format(**values),
            source=limit.sources[draft],
        )


class Candidate(_Frozen):
    """What the ids would mean if somebody's convention were the one they were written by."""

    convention: str
    versions: str
    rank: Rank
    read_on: str
    inputs: tuple[State, ...] | None
    refusal: str | None = None


class Trained(_Frozen):
    """What the head was trained on."""

    inputs: tuple[State, ...] | None = Field(description="in the order of fc's columns; null where unknown")
    by: str = Field(description="who says so, or why it cannot be known")
    candidates: tuple[Candidate, ...] = Field(default=(), description="where unknown: what it might be")


class KnownTarget(_Frozen):
    """The target model, as far as it is known."""

    family: str | None = Field(default=None, description="model_type")
    n_layers: int | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    by: str = Field(description="where this comes from")


class Report(_Frozen):
    """The whole explanation."""

    format: Literal[1] = FORMAT
    kind: Literal["head", "ids", "dump"]
    subject: str = Field(description="what was explained: a path, or the ids")
    layout: str | None = Field(default=None, description="whose layout the files have")
    target: KnownTarget
    trained: Trained
    rows: tuple[Row, ...]
    findings: tuple[Finding, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The document as a plain object; `from_json` reads it back."""
        return self.model_dump(mode="json")

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Report:
        """Read a document.

        Raises:
            HeadError: naming the field that is wrong.
        """
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "document"
            raise HeadError(f"explanation JSON: {where}: {first['msg']}") from None

    @staticmethod
    def json_schema() -> dict[str, Any]:
        """The JSON Schema (draft 2020-12) of the document."""
        return Report.model_json_schema()
