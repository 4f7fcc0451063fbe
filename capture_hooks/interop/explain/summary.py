"""A report in one sentence, and the few rows and findings that the sentence is about."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final, Literal

from ...conventions.facts import SERVERS
from .report import Finding, Report, Row, State
from .rows import requested

#: Names as their projects write them.
_NAMES: Final = {
    "sglang": "SGLang",
    "vllm": "vLLM",
    "specforge": "SpecForge",
    "modelopt": "ModelOpt",
    "tensorrt_llm": "TensorRT-LLM",
    "llama_cpp": "llama.cpp",
}
#: What ends the names of an engine's readers, and of conventions, for versions before the newest.
EARLIER: Final = re.compile(r"-\d+(?:\.\d+)*$")
#: Characters of one reason in short forms.
_LONGEST: Final = 160
#: States named in a sentence; of longer lists the first ones.
_STATES: Final = 6
Judgement = Literal["right", "wrong", "unknown"]


@dataclass(frozen=True, slots=True)
class Line:
    """One engine in one version, its runners together where the same happens in all of them.

    Attributes:
        engine: the engine's name without its version.
        version: the version that is asked for, else the newest that is known.
        runners: those of its runners that this is about, where another one does something else; else empty.
        rows: its rows in the report.
        faults: what is wrong with the head or the ids there, beside the states.
    """

    engine: str
    version: str
    runners: str
    rows: tuple[Row, ...]
    faults: tuple[Finding, ...]

    @property
    def row(self) -> Row:
        """The first of the rows, which are alike but for names and sources."""
        return self.rows[0]

    @property
    def name(self) -> str:
        """Engine, version and runners."""
        return f"{self.engine} {self.version}{self.runners}"

    @property
    def judgement(self) -> Judgement:
        """*right*: fed what was trained on, and nothing is wrong beside it."""
        if self.faults or self.row.verdict.outcome in ("differs", "fails"):
            return "wrong"
        return "right" if self.row.verdict.outcome == "same" else "unknown"


@dataclass(frozen=True, slots=True)
class Summary:
    """What a report says of a few engines.

    Attributes:
        sentence: all of it, beginning with the judgement.
        right: whether every line is, and the file itself has no fault.
        lines: the engines.
        faults: everything *wrong* in the file itself or for these engines; alike ones are one.
        warnings: the same of *warning*.
    """

    sentence: str
    right: bool
    lines: tuple[Line, ...]
    faults: tuple[Finding, ...]
    warnings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Slot:
    """One of the states that ``fc`` is fed: its point, and whether it was trained on it; None if unknown."""

    text: str
    right: bool | None


def summary(report: Report, engines: Sequence[str] = ()) -> Summary:
    """The report in short.

    Args:
        report: the report.
        engines: those asked for, as in `agrees`; none: the newest SGLang and vLLM, or whatever rows there
            are where there is neither.

    Raises:
        ConventionError: what one of ``engines`` captures was not established.
    """
    lines = tuple(_lines(report, engines))
    names = {name for line in lines for row in line.rows for name in (row.library, row.engine)}
    faults, warnings = (_about(report, severity, names) for severity in ("wrong", "warning"))
    right = bool(lines) and all(line.judgement == "right" for line in lines)
    return Summary(_sentence(report, lines, faults), right, lines, faults, warnings)


def other_lines(report: Report, lines: Sequence[Line]) -> tuple[Line, ...]:
    """The newest versions of the libraries that a summary's lines are not about."""
    shown = {line.row.library for line in lines}
    others = dict.fromkeys(row.library for row in report.rows if row.library not in shown)
    return tuple(_lines(report, list(others))) if others else ()


def slots(row: Row, trained: Sequence[State] | None) -> tuple[Slot, ...]:
    """A row's states in order, and *nothing* for each that is missing; empty where the engine stops."""
    if row.captured is None:
        return ()
    fed = [state.point for state in row.captured]
    if row.verdict.outcome != "differs" or trained is None:
        right = True if row.verdict.outcome == "same" else None
        return tuple(Slot(point, right) for point in fed)
    missing = ["nothing"] * (len(trained) - len(fed))
    found = tuple(
        Slot(point, index < len(trained) and point == trained[index].point)
        for index, point in enumerate(fed + missing)
    )
    # Two sides of a boundary at which the target adds something are written alike in what was trained on.
    return tuple(replace(slot, right=False) for slot in found) if all(s.right for s in found) else found


def not_run(rows: Sequence[Row]) -> str:
    """Which of the rows are claims that were only read in a library's source, and when; empty for none."""
    read = [row for row in rows if row.rank != "verified"]
    if not read:
        return ""
    which = "" if len(read) == len(rows) else f"{', '.join(row.engine for row in read)}: "
    return f"{which}read {read[0].read_on}, not run"


def meanings(report: Report) -> dict[str, list[str]]:
    """Where the meaning of the ids is not known: their states by each of the newest verified conventions."""
    found: dict[str, list[str]] = {}
    for candidate in report.trained.candidates:
        newest = candidate.rank == "verified" and not EARLIER.search(candidate.convention)
        if candidate.inputs is not None and newest:
            found.setdefault(states_text(candidate.inputs), []).append(candidate.convention)
    return found


def states_text(states: Sequence[State]) -> str:
    """Points in order, of a long list the first ones."""
    shown = [state.point for state in states]
    more = f" and {len(shown) - _STATES} more" if len(shown) > _STATES + 1 else ""
    return (", ".join(shown[:_STATES] if more else shown) or "nothing") + more


def shortened(text: str) -> str:
    """A text of at most `_LONGEST` characters: of a longer one its beginning and its end."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2 - 3]} ... {text[2 - _LONGEST // 2 :]}"


def concerns(finding: Finding, names: Collection[str]) -> bool:
    """Whether a finding is about the file itself or one of these libraries and rows."""
    return not finding.engines or not set(finding.engines).isdisjoint(names)


def _lines(report: Report, engines: Sequence[str]) -> Iterable[Line]:
    wanted = list(engines) or [name for name in SERVERS if any(row.library == name for row in report.rows)]
    wanted = wanted or list(dict.fromkeys(row.library for row in report.rows))
    wrong = [finding for finding in report.findings if finding.severity == "wrong"]
    told: set[tuple[str, str]] = set()
    for name in wanted:
        rows = [row for row in requested(report.rows, name) if (row.engine, row.versions) not in told]
        told |= {(row.engine, row.versions) for row in rows}
        groups = [list(group) for _, group in groupby(rows, lambda row: (row.captured, row.verdict))]
        asked, _, version = name.partition("==")
        for group in groups:
            row = group[0]
            names = {row.library, *(row.engine for row in group)}
            runners = ", ".join(EARLIER.sub("", row.engine).removeprefix(f"{asked}.") for row in group)
            yield Line(
                _NAMES.get(asked, asked),
                version or row.versions.rpartition("to ")[2] or row.versions,
                f" ({runners})" if len(groups) > 1 else "",
                tuple(group),
                tuple(finding for finding in wrong if concerns(finding, names)),
            )


def _about(report: Report, severity: str, names: Collection[str]) -> tuple[Finding, ...]:
    """Findings of one severity that concern the names; those that differ in engines alone are one."""
    found: dict[tuple[str, str, str], Finding] = {}
    for finding in report.findings:
        if finding.severity != severity or not concerns(finding, names):
            continue
        key = (finding.check, finding.what, finding.do)
        before = found[key].engines if key in found else ()
        here = [name for name in finding.engines if name in names and name not in before]
        found[key] = finding.model_copy(update={"engines": (*before, *here)})
    return tuple(found.values())


def _sentence(report: Report, lines: Sequence[Line], faults: Sequence[Finding]) -> str:
    if not lines:
        text = "what engines feed cannot be known without the target; give --target, or --family and --layers"
        if report.kind == "dump" and report.trained.inputs is None:
            text = f"what engines must be told {shortened(report.trained.by)}"
        return f"{'Wrong' if faults else 'Unknown'}: {text}{_and_faults(faults)}."
    told = {"ids": "given these ids, ", "told": "told the ids below, ", "file": ""}[lines[0].row.asked]
    return f"{_judgements(lines)}: {told}{'; '.join(_clauses(report, lines))}{_but(lines, faults)}."


def _judgements(lines: Sequence[Line]) -> str:
    """One word where it is the same for all, else one for each."""
    by: dict[Judgement, list[str]] = {}
    for line in lines:
        short = line.engine + line.runners
        unique = sum(other.engine + other.runners == short for other in lines) == 1
        by.setdefault(line.judgement, []).append(short if unique else line.name)
    if len(by) == 1:
        return next(iter(by)).capitalize()
    text = ", ".join(f"{word} for {_and(names)}" for word, names in by.items())
    return text[0].upper() + text[1:]


def _clauses(report: Report, lines: Sequence[Line]) -> Iterable[str]:
    """What is fed, once for all the engines that feed it, and what the head was trained on."""
    trained, holds = report.trained.inputs, "what the head was trained on"
    if report.kind == "dump":
        holds = "what the dump holds"
    groups: dict[tuple[object, ...], list[Line]] = {}
    for line in lines:
        groups.setdefault((line.row.verdict.outcome, line.row.captured), []).append(line)
    some_are_right = any(line.row.verdict.outcome == "same" for line in lines)
    feeds, differ = [], []
    for (outcome, _), group in groups.items():
        row, names = group[0].row, _and([line.name for line in group])
        if outcome == "fails" and row.asked == "told":
            feeds.append(f"nothing makes {names} feed {holds}")
        elif outcome == "fails":
            feeds.append(f"{names} will stop before anything is fed")
        elif row.captured is None:
            feeds.append(f"what {names} will feed {shortened(row.verdict.how[0])}")
        elif outcome == "same":
            feeds.append(f"{names} will feed {states_text(row.captured)}, which is {holds}")
        elif outcome == "differs" and some_are_right:
            feeds.append(f"{names} will feed {states_text(row.captured)}, which is not")
        elif outcome == "differs":
            differ.append(f"{names} will feed {states_text(row.captured)}")
        elif trained is None:
            feeds.append(f"{names} will feed {states_text(row.captured)}")
        else:
            feeds.append(
                f"{names} will feed {states_text(row.captured)}, and whether that is right "
                f"{shortened(row.verdict.how[0])}"
            )
    if differ:
        assert trained is not None, "a row differs from nothing"
        subject = "the dump holds" if report.kind == "dump" else "the head was trained on"
        feeds.append(f"{', '.join(differ)}, but {subject} {states_text(trained)}")
    if trained is None and any(line.row.captured is not None for line in lines):
        feeds.append(f"{holds} {shortened(report.trained.by)}")
    return feeds


def _but(lines: Sequence[Line], faults: Sequence[Finding]) -> str:
    """Faults beside the states that nothing before has named."""
    right = [line.name for line in lines if line.faults and line.row.verdict.outcome == "same"]
    if right:
        which = "the fault below keeps" if len(faults) == 1 else f"{len(faults)} faults below keep"
        return f"; and {which} {_and(right)} from serving the head as it was trained"
    return _and_faults(faults)


def _and_faults(faults: Sequence[Finding]) -> str:
    if not faults:
        return ""
    return (
        "; and there is the fault below"
        if len(faults) == 1
        else f"; and there are {len(faults)} faults below"
    )


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
