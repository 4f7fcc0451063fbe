"""What engines do with the rest of a head's directory: the rows of ``facts.toml``, and how they are read.

What the layer ids mean is not here but in `lookup`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final, Literal

from .contract import Rank

#: The norm flags of EAGLE-3 and 3.1 heads, and whether the head takes concatenated states at all.
FLAGS: Final = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "use_aux_hidden_state")
#: Engines that serve heads; the others train them.
SERVERS: Final = ("sglang", "vllm")
#: *honours* it; *ignores* it, taking ``absent`` whatever the file says; *other*: reads it as something else.
Treatment = Literal["honours", "ignores", "other"]
#: Draft classes: *llama*, *qwen3*, and *mla* (DeepSeek's attention).
Draft = Literal["llama", "qwen3", "mla"]

_TABLE: Final[Mapping[str, Any]] = tomllib.loads(
    resources.files(__package__).joinpath("facts.toml").read_text(encoding="utf-8")
)


def cite(engine: str, place: str) -> str:
    """A source as findings show it: library, version, file and line."""
    for name, file in _TABLE["files"].items():
        place = place.replace(f"{{{name}}}", file)
    return f"{engine} {_TABLE['engine'][engine]['cited']}: {place}"


@dataclass(frozen=True, slots=True)
class FlagRule:
    """How one draft class of one library treats one flag.

    Attributes:
        keys: where it looks, in its order; a key elsewhere in the file is not seen.
        absent: what it takes where it finds none (or always, where it ignores the flag).
        rank: whether our tests run the class, or the claim was taken from its source.
    """

    engine: str
    draft: Draft
    flag: str
    does: Treatment
    absent: bool
    keys: tuple[str, ...]
    source: str
    rank: Rank

    def value(self, config: Mapping[str, Any]) -> bool:
        """What it takes from a config: the first key that is there counts, and null is false then.

        Of ``fc_norm``'s two keys each is enough (``getattr(...) or getattr(...)``).
        """
        if self.does == "ignores":
            return self.absent
        there = [bool(value_at(config, key)) for key in self.keys if _is_there(config, key)]
        if self.flag == "fc_norm":
            return any(there)
        return there[0] if there else self.absent


@dataclass(frozen=True, slots=True)
class Limit:
    """Something that an engine's draft classes do not compute, whatever a head's file says.

    Attributes:
        rule: when a head needs it, a name that `heads.engines` knows.
        name: the flag, or the norm, that it is about; empty where the rule says it all.
        sources: by draft class.
        excluded: why a head that needs it excludes the engine, in one sentence.
        check, severity, what, why, do: what `explain` says of a head that needs it; empty where it tells by
            the flag's own row, or by the number of inputs.
    """

    engine: str
    rule: str
    name: str
    sources: Mapping[str, str]
    excluded: str
    check: str
    severity: Literal["wrong", "warning"]
    what: str
    why: str
    do: str


@dataclass(frozen=True, slots=True)
class Key:
    """A further key of a Llama-type draft's config that some engine acts on, and a head of our own does not.

    Attributes:
        within: where it stands: ``""`` for the top, or ``"rope_parameters"``.
        harmless: the value that changes nothing, beside null.
        does: what another value makes engines do.
        sources: by engine.
    """

    name: str
    within: tuple[str, ...]
    harmless: Any
    does: str
    sources: Mapping[str, str]


def _flag_rules() -> Iterator[FlagRule]:
    for row in _TABLE["draft"]:
        for flag, said in row["flags"].items():
            rank: Rank = said.get("rank", "verified")
            source = cite(row["engine"], said["source"])
            yield FlagRule(
                row["engine"],
                row["kind"],
                flag,
                said.get("does", "honours"),
                said.get("absent", False),
                tuple(said.get("keys", ())),
                source if rank == "verified" else f"{source} (read {_TABLE['read_on']}, not run)",
                rank,
            )


def _limits() -> Iterator[Limit]:
    for row in _TABLE["limit"]:
        sources = {
            draft: "; ".join(cite(row["engine"], place) for place in places)
            for draft, places in row.get("source", {}).items()
        }
        said = {field: row.get(field, "") for field in ("name", "check", "what", "why", "do")}
        severity = row.get("severity", "wrong")
        yield Limit(
            row["engine"], row["rule"], sources=sources, excluded=row["excluded"], severity=severity, **said
        )


def _keys() -> Iterator[Key]:
    for row in _TABLE["key"]:
        sources = {engine: cite(engine, place) for engine, place in row["source"].items()}
        within = tuple(row.get("within", ("",)))
        yield Key(row["name"], within, row.get("harmless"), row["does"], sources)


RULES: Final = tuple(_flag_rules())
LIMITS: Final = tuple(_limits())
KEYS: Final = tuple(_keys())
#: For which versions of an engine a saved head says whether it is right.
SPOKEN_FOR: Final[Mapping[str, str]] = {
    name: said["spoken_for"] for name, said in _TABLE["engine"].items() if "spoken_for" in said
}
#: Architecture names that an engine serves as an EAGLE-3 head, and the draft class each gets.
ARCHITECTURES: Final[Mapping[str, Mapping[str, Draft]]] = {
    engine: {
        name: row["kind"]
        for row in _TABLE["draft"]
        if row["engine"] == engine
        for name in row["architectures"]
    }
    for engine in dict.fromkeys(row["engine"] for row in _TABLE["draft"])
}
#: Where each engine looks architectures up.
ARCHITECTURES_FROM: Final[Mapping[str, str]] = {
    engine: cite(engine, _TABLE["engine"][engine]["architectures_from"]) for engine in ARCHITECTURES
}
_VLLM: Final = _TABLE["engine"]["vllm"]
#: ``model_type`` of raw heads that vLLM takes for DeepSeek's own MTP layer.
MTP_TYPES: Final[tuple[str, ...]] = tuple(_VLLM["mtp_types"])
MTP_FROM: Final = cite("vllm", _VLLM["mtp_from"])
#: ``transformer_layer_config.model_type`` of a speculators head that vLLM serves.
SPECULATORS_TYPES: Final[Mapping[str, Draft]] = {kind: kind for kind in _VLLM["speculators_types"]}
SPECULATORS_FROM: Final = cite("vllm", _VLLM["speculators_from"])


def value_at(config: Mapping[str, Any], key: str) -> Any:
    """The value under a dotted key; None where there is none."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def flag_rule(engine: str, draft: Draft, flag: str) -> FlagRule | None:
    """How an engine's draft class treats a flag; None where that engine has no such class."""
    found = (rule for rule in RULES if (rule.engine, rule.draft, rule.flag) == (engine, draft, flag))
    return next(found, None)


def limits(rule: str) -> tuple[Limit, ...]:
    """Every engine's limit by that rule."""
    return tuple(limit for limit in LIMITS if limit.rule == rule)


def draft_of(engine: str, architectures: Any) -> Draft | None:
    """The draft class that an engine makes of ``config["architectures"]``; None where it makes none.

    A name outside a list is none: both servers look its letters up one by one (vLLM 0.32.0
    ``transformers_utils/configs/eagle.py:60-69``, SGLang 0.5.23 ``srt/model_loader/utils.py:224-231``).
    """
    names = architectures if isinstance(architectures, list) else []
    known = ARCHITECTURES[engine]
    return next((known[name] for name in names if isinstance(name, str) and name in known), None)


def fc_inputs(engine: str, draft: Draft, config: Mapping[str, Any]) -> tuple[int, str]:
    """For how many states an engine's draft class builds ``fc``, and where that is in its source.

    It does not ask the capture side: a file whose keys disagree gives ``fc`` another width than it is fed.
    """
    row = _draft(engine, draft)
    counted = (_count(key, value_at(config, key)) for key in row["counts"])
    return next((count for count in counted if count), 3), cite(engine, row["counts_from"])


def counted_by(engine: str, draft: Draft) -> tuple[str, ...]:
    """The keys by which a draft class takes that number."""
    return tuple(_draft(engine, draft)["counts"])


def _draft(engine: str, draft: Draft) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(
        row for row in _TABLE["draft"] if (row["engine"], row["kind"]) == (engine, draft)
    )
    return found


def _count(key: str, value: Any) -> int | None:
    """A number of states, of ids that of the list; None where the value says none."""
    if key.endswith("_ids"):
        return len(value) or None if isinstance(value, list) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _is_there(config: Mapping[str, Any], key: str) -> bool:
    """Whether a dotted key is in the file, null included."""
    holder, _, name = key.rpartition(".")
    held = value_at(config, holder) if holder else config
    return isinstance(held, Mapping) and name in held
