"""The job: which answers there are to write, what they cost, and the finished file."""

from __future__ import annotations

import gzip
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from datetime import date
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...errors import DataError, StoreError
from ...io import check_regular, digest_of, refused, replacing
from ...store.data import BadRowPolicy, Row, RowEncoder, RowError, TemplateSettings, read_rows
from ...store.data.forms import form_of
from ...store.data.summary import BadRowCounter, BadRows
from ..contract import Dialogue, Generated, GeneratingEngine, PromptRequest, Sampling
from .dialogues import Answering, AnsweringConversation, AnsweringIds, Asking, Left, Unfinished, answering
from .journal import Journal, Record, check_same, journal, partial
from .messages import FITS, Answers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Ending of the file that says how the answers came to be.
MANIFEST: Final = ".manifest.json"
ENDINGS: Final = (".jsonl", ".jsonl.gz")
#: Rows from which the length of an answer is estimated.
_SAMPLE: Final = 256
#: Tokens of a trial's answers.
_TRIAL: Final = 24


@dataclass(slots=True)
class Survey:
    """What a data set holds.

    Attributes:
        rows: all of them.
        answers: to be written in all; ``left`` of them still are.
        as_is: rows without an answer to write.
        stay: turns that stay as they are.
        bad: rows that cannot be used.
        digest: of all rows, in order.
    """

    rows: int = 0
    answers: int = 0
    left: int = 0
    as_is: int = 0
    stay: Left = field(default_factory=Left)
    bad: BadRowCounter = field(default_factory=BadRowCounter)
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Regenerated:
    """A finished file.

    Attributes:
        rows: written; ``read`` were there.
        answers, tokens: that the target wrote into them.
        fits: answers by how what is learnt from them compares with what the target wrote.
        cut: answers without a place, by why; ``emptied`` rows were left out because of them.
        stay: turns that stayed as they were.
        as_is: rows that stayed as they were.
        dropped: columns that JSON cannot hold.
        bad: rows left out because they cannot be used.
    """

    read: int
    rows: int
    answers: int
    tokens: int
    fits: dict[str, int]
    cut: dict[str, int]
    emptied: int
    stay: Left
    as_is: int
    dropped: tuple[str, ...]
    bad: tuple[BadRows, ...]


class Regeneration:
    """Answers of a data set, written again by the target.

    Args:
        source: see `read_rows`.
        out: the file to make: JSON lines, gzipped where it is named so.
        tokenizer: the target's; None where all rows hold token ids.
        sampling: how the target answers.
        max_new_tokens: most tokens of an answer.
        seed: of the sampling.
        unfinished: a conversation ends before an answer that reached the limit, or holds it as it is.
        template: settings of the chat template, its clock among them.
        limit: only the first so many rows.
        split: of the source.
        bad_rows: stop at a row that cannot be used, or leave it out.
        vocab_size: the target's.
        identity: what else must be the same when the work is taken up again, by name.

    Raises:
        StoreError: ``out`` cannot be what is made.
        DataError: the data cannot be used; names file and line.
    """

    def __init__(
        self,
        source: str,
        out: Path,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        sampling: Sampling,
        max_new_tokens: int,
        seed: int = 0,
        unfinished: Unfinished = "drop",
        template: TemplateSettings,
        limit: int | None = None,
        split: str | None = None,
        bad_rows: BadRowPolicy = "error",
        vocab_size: int | None = None,
        identity: Mapping[str, Any],
    ) -> None:
        self.out = out
        self._source, self._limit, self._split = source, limit, split
        self._tokenizer, self._template, self._bad_rows = tokenizer, template, bad_rows
        self._seed, self._max_new, self._unfinished = seed, max_new_tokens, unfinished
        self._vocab_size = vocab_size
        self._check_out()
        self.survey = self._look()
        if not self.survey.answers:
            raise DataError(f"{source}: {self._why_nothing()}")
        self.settings: dict[str, Any] = {
            **identity,
            "data": self.survey.digest,
            **asdict(sampling),
            "ends": list(sampling.ends),
            "max_new_tokens": max_new_tokens,
            "seed": seed,
            "unfinished": unfinished,
            "chat_template": template.chat_template,
            "template_arguments": dict(template.arguments),
            "clock": template.clock,
        }

    @property
    def is_finished(self) -> bool:
        """Whether ``out`` is what would be made.

        Raises:
            StoreError: something else is there.
        """
        if partial(self.out).exists() or not self.out.exists():
            return False
        manifest = self._manifest
        there = f"{self.out} is there already"
        if not manifest.is_file():
            raise StoreError(f"{there}, and was not made here; give another --out, or move it away")
        try:
            found = json.loads(manifest.read_text(encoding="utf-8"))
            begun, digest = dict(found["settings"]), found["digest"]
        except (OSError, ValueError, KeyError, TypeError):
            raise StoreError(f"{manifest} is damaged; move it and {self.out} away") from None
        check_same(self.out, begun, self.settings | {"clock": begun.get("clock")})
        if digest_of(self.out) != digest:
            raise StoreError(f"{there}, and was changed since it was made; give another --out")
        return True

    @property
    def left(self) -> int:
        """Answers that are not known.

        Raises:
            StoreError: those that are were written with other settings.
        """
        if partial(self.out).exists():
            with journal(self.out, self.settings) as answers:
                self.survey.left = sum(row.remaining for row in self._answerings(answers))
        return self.survey.left

    def cost(self, engine: GeneratingEngine) -> Cost:
        """Answer a few prompts for a moment; nothing is kept of it.

        Raises:
            EngineError: the engine does not answer.
        """
        sample = list(islice((row for row in self._answerings(None) if row.asked), _SAMPLE))
        asking = self._asking(engine.context, lambda record, settled: None)
        asked = []
        for row in sample[:: max(1, len(sample) // engine.at_once)][: engine.at_once]:
            if (first := row.begin(asking).asks()) is not None:
                asked.append(first)
        lengths = [length for row in sample for length in self._old_lengths(row)]
        mean = min(self._max_new, sum(lengths) / len(lengths)) if lengths else None
        return measured(engine, asked, self.survey.left, mean, self._max_new)

    def run(
        self, engine: GeneratingEngine, on_progress: Callable[[int, int], None] | None = None
    ) -> Regenerated:
        """Write the answers that are left, then the file; killed at any moment, it can be run again.

        Args:
            engine: on the target.
            on_progress: called with how many answers are known or no longer wanted, and the new tokens.

        Raises:
            DataError: a row that cannot be used, unless those are left out.
            EngineError: the engine refused a prompt, or is gone; what was answered stays.
            StoreError: the system refused, or the answers were begun with other settings.
        """
        report = on_progress or (lambda answers, tokens: None)
        with journal(self.out, self.settings) as answers:
            answers.written_by({"name": engine.name, "version": engine.version, **engine.settings})
            done = self.survey.answers - self.survey.left
            tokens = 0
            report(done, tokens)

            def record(new: Record, settled: int) -> None:
                nonlocal done
                answers.append(new)
                done += settled

            asking = self._asking(engine.context, record)
            rows = (row.begin(asking) for row in self._answerings(answers) if row.asked)
            for group in engine.answers(rows):
                for dialogue, answer in group:
                    assert isinstance(dialogue, Answering)
                    tokens += dialogue.takes(answer)
                report(done, tokens)
            return self._finish(answers)

    def finish(self) -> Regenerated:
        """Write the file of answers that are all known."""
        with journal(self.out, self.settings) as answers:
            return self._finish(answers)

    def _finish(self, answers: Journal) -> Regenerated:
        counts, fits, cut = Counter[str](), Counter[str](), Counter[str]()
        stay, bad, dropped = Left(), BadRowCounter(), Counter[str]()
        try:
            with (
                replacing(self.out) as raw,
                Gzipped(raw) if self.out.suffix == ".gz" else nullcontext(raw) as file,
            ):
                for row in self._answerings(answers, bad):
                    records = row.replay()
                    if (last := records[-1] if records else None) is not None and last.left_out:
                        error = RowError(last.place, last.left_out)
                        if self._bad_rows == "error":  # an earlier run was to leave it out
                            raise error
                        bad.add(error)
                        continue
                    cut.update(record.cut for record in records if record.cut)
                    if (fields := row.fields()) is None:
                        counts["emptied"] += 1
                        continue
                    kept = [record for record in records if not record.ends_row]
                    fits.update(record.fit for record in kept)
                    counts["answers"] += len(kept)
                    counts["tokens"] += sum(record.tokens for record in kept)
                    counts["rows"] += 1
                    counts["as_is"] += not row.asked
                    _add(stay, row.left)
                    file.write(line_of(fields, dropped))
                if not counts["rows"]:
                    why = [f"{count} answers {reason}" for reason, count in cut.items()]
                    why += [f"{one.count} rows with {one.reason}" for one in bad.found()]
                    partial(self.out).unlink(missing_ok=True)  # the same settings would end here again
                    raise DataError(f"{self.out}: no row is left: {', '.join(why)}")
            made = Regenerated(
                self.survey.rows,
                counts["rows"],
                counts["answers"],
                counts["tokens"],
                {name: fits[name] for name in FITS if fits[name]},
                dict(cut),
                counts["emptied"],
                stay,
                counts["as_is"],
                tuple(dropped),
                bad.found(),
            )
            self._write_manifest(made, answers.engines)
            partial(self.out).unlink(missing_ok=True)
        except OSError as error:
            raise refused(error, self.out) from error
        return made

    def _write_manifest(self, made: Regenerated, engines: Sequence[Mapping[str, str]]) -> None:
        told = {
            "settings": self.settings,
            "digest": digest_of(self.out),
            "engines": [dict(engine) for engine in engines],
            "counts": asdict(made),
        }
        with replacing(self._manifest) as file:
            file.write(json.dumps(told, indent=2, ensure_ascii=False).encode() + b"\n")

    @property
    def _manifest(self) -> Path:
        return self.out.with_name(self.out.name + MANIFEST)

    def _check_out(self) -> None:
        if not self.out.name.endswith(ENDINGS):
            raise StoreError(f"{self.out}: the answers are JSON lines; end its name in .jsonl or .jsonl.gz")
        if not self.out.parent.is_dir():
            raise StoreError(f"{self.out.parent} is not a directory; make it, or give another --out")
        if self.out.exists():
            check_regular(self.out)
            if Path(self._source).exists() and self.out.samefile(self._source):
                raise StoreError(f"{self.out} is the data itself; give another --out")

    def _look(self) -> Survey:
        found = Survey()
        digest = hashlib.sha256()
        for found.rows, (_, row) in enumerate(self._rows(), 1):
            if isinstance(row, Row):
                digest.update(json.dumps(row.fields, sort_keys=True, default=repr).encode())
            try:
                one = self._answering(0, row, None)
            except RowError as error:
                if self._bad_rows == "error":
                    raise
                found.bad.add(error)
                continue
            found.answers += one.asked
            found.as_is += not one.asked
            _add(found.stay, one.left)
        found.left, found.digest = found.answers, digest.hexdigest()
        return found

    def _why_nothing(self) -> str:
        if self.survey.bad.first is not None:
            return f"no row can be answered; the first that cannot be used: {self.survey.bad.first}"
        return "it holds no answer that could be written again" if self.survey.rows else "it holds no record"

    def _rows(self) -> Iterator[tuple[int, Row | RowError]]:
        return enumerate(islice(read_rows(self._source, self._split), self._limit))

    def _answerings(self, answers: Journal | None, bad: BadRowCounter | None = None) -> Iterator[Answering]:
        """All rows that can be used, with their answers so far."""
        for number, row in self._rows():
            try:
                yield self._answering(number, row, answers)
            except RowError as error:
                if self._bad_rows == "error":
                    raise
                if bad is not None:
                    bad.add(error)

    def _answering(self, number: int, row: Row | RowError, answers: Journal | None) -> Answering:
        if isinstance(row, RowError):
            raise row
        records = answers.records(number) if answers is not None else ()
        return answering(number, row, form_of(row), records, self._template.arguments)

    def _asking(self, context: int | None, record: Callable[[Record, int], None]) -> Asking:
        encoder = RowEncoder(self._tokenizer, self._template, "last", self._vocab_size)
        return Asking(
            seed=self._seed,
            max_new_tokens=self._max_new,
            context=context,
            unfinished=self._unfinished,
            answers=Answers(encoder, self._tokenizer),
            record=record,
            bad=self._bad,
        )

    def _bad(self, error: RowError) -> str:
        if self._bad_rows == "error":
            raise error
        return error.reason

    def _old_lengths(self, row: Answering) -> list[int]:
        if isinstance(row, AnsweringIds):
            return row.old_lengths()
        assert isinstance(row, AnsweringConversation)
        if self._tokenizer is None:
            return []
        return [
            len(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) + 1
            for text in row.old_answers()
        ]


def _add(total: Left, more: Left) -> None:
    for name, count in asdict(more).items():
        setattr(total, name, getattr(total, name) + count)


@dataclass(frozen=True, slots=True)
class Cost:
    """What the answers that are left will take.

    Attributes:
        answers: to write.
        seconds: where they are as long as those in the data; None where it has none.
        tokens: which are so many tokens on average.
        most_seconds: where each has as many as it may.
        tokens_per_second: new ones.
    """

    answers: int
    seconds: float | None
    tokens: float | None
    most_seconds: float
    tokens_per_second: float


def measured(
    engine: GeneratingEngine, asked: Sequence[PromptRequest], answers: int, tokens: float | None, most: int
) -> Cost:
    """Answer a few prompts for a moment.

    Args:
        engine: on the target.
        asked: as many prompts as it answers at a time, or all there are.
        answers: to write.
        tokens: of an answer in the data, None where it has none.
        most: tokens of an answer.

    Raises:
        EngineError: the engine does not answer.
    """
    if not asked:  # no prompt leaves room for an answer
        return Cost(answers, 0.0, tokens, 0.0, 0.0)
    _trial(engine, asked, 2)  # first calls allocate and compile
    first, _ = _trial(engine, asked, 1)
    seconds, came = _trial(engine, asked, _TRIAL)
    # Where some end early, the others decide how long it takes.
    step = max(seconds - first, 1e-9) / max(1, -(-came // len(asked)) - 1)
    rounds = max(1.0, answers / len(asked))

    def seconds_of(length: float) -> float:
        return rounds * (first + (length - 1) * step)

    return Cost(
        answers=answers,
        seconds=None if tokens is None else seconds_of(tokens),
        tokens=tokens,
        most_seconds=seconds_of(most),
        tokens_per_second=rounds * len(asked) * most / seconds_of(most),
    )


class _Once:
    """One prompt that is asked and not followed by another."""

    finished = False

    def __init__(self, asked: PromptRequest) -> None:
        self._asked: PromptRequest | None = asked

    def asks(self) -> PromptRequest | None:
        asked, self._asked = self._asked, None
        return asked


def _trial(engine: GeneratingEngine, asked: Sequence[PromptRequest], tokens: int) -> tuple[float, int]:
    """Seconds for so many new tokens of each prompt, and how many came of all."""
    once: list[Dialogue] = [
        _Once(PromptRequest(one.prompt, min(tokens, one.max_new_tokens), one.seed)) for one in asked
    ]
    came = 0
    started = time.perf_counter()
    for group in engine.answers(once):
        came += sum(len(answer.token_ids) for _, answer in group if isinstance(answer, Generated))
    return time.perf_counter() - started, came


class Gzipped(gzip.GzipFile):
    """A gzip file without a time stamp in its header: the same lines give the same bytes."""

    def __init__(self, file: Any) -> None:
        super().__init__(fileobj=file, mode="wb", mtime=0, filename="")


def line_of(fields: Mapping[str, Any], dropped: Counter[str]) -> bytes:
    """One row as JSON; columns that JSON cannot hold are counted and left out."""
    kept = {}
    for name, value in fields.items():
        try:
            json.dumps(value, default=_dated)
        except (TypeError, ValueError):
            dropped[str(name)] += 1
            continue
        kept[name] = value
    try:
        return json.dumps(kept, ensure_ascii=False, default=_dated).encode() + b"\n"
    except UnicodeEncodeError:  # half of a surrogate pair in a column of its own
        return json.dumps(kept, default=_dated).encode() + b"\n"


def _dated(value: Any) -> str:
    if isinstance(value, date):
        return value.isoformat()
    raise TypeError
