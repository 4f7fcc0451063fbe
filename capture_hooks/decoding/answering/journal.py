"""Answers as they come, in a file beside the finished one: an interrupted run continues from it.

The first line says with which settings it was begun; then there is one for each engine that was started, and
one for each answer.  A line is written at once; a last one that is torn is dropped.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from ...errors import StoreError
from ...io import check_regular, lock, refused

#: Ending of the file of answers.
PARTIAL: Final = ".partial"
#: Seconds between two moments at which answers are made to survive a power cut.
_SYNC: Final = 1.0


@dataclass(frozen=True, slots=True)
class Record:
    """One answer, or why there is none.

    Attributes:
        row: number of the row.
        turn: number of the answer in its row, from 0.
        tokens: how many the target wrote.
        message: the answer in a conversation.
        ids: the answer in a row of token ids.
        fit: how what is learnt from it compares with what the target wrote; one of `FITS`.
        cut: why the row ends before this answer: "unfinished", "too long", "unreadable".
        left_out: why the whole row is left out, with ``place``.
        place: where it stands.
    """

    row: int
    turn: int
    tokens: int = 0
    message: dict[str, Any] | None = None
    ids: list[int] | None = None
    fit: str = ""
    cut: str = ""
    left_out: str = ""
    place: str = ""

    @property
    def ends_row(self) -> bool:
        """Whether no answer follows this one in its row."""
        return bool(self.cut or self.left_out)


class Journal:
    """The answers so far; `journal` opens it.

    Attributes:
        engines: what wrote them; one for each that was different.
    """

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path
        self.engines: list[dict[str, str]] = []
        self._places: dict[int, list[int]] = {}
        self._synced = time.monotonic()

    def records(self, row: int) -> list[Record]:
        """What was answered in a row, in order; once each, wherever a run was interrupted."""
        found: dict[int, Record] = {}
        for place in self._places.get(row, ()):
            self._file.seek(place)
            record = Record(**json.loads(self._file.readline()))
            found.setdefault(record.turn, record)
        return [found[turn] for turn in sorted(found)]

    def append(self, record: Record) -> None:
        """Add one.

        Raises:
            StoreError: the system refused, in one line.
        """
        fields = {name: value for name, value in asdict(record).items() if value not in (None, "")}
        self._places.setdefault(record.row, []).append(self._write(fields))

    def written_by(self, engine: Mapping[str, str]) -> None:
        """What writes the answers that follow.

        Raises:
            StoreError: the system refused, in one line.
        """
        if engine not in self.engines:
            self.engines.append(dict(engine))
            self._write({"engine": dict(engine)})

    def _write(self, fields: Mapping[str, Any]) -> int:
        """Add a line; where it begins."""
        try:
            place = self._file.seek(0, os.SEEK_END)
            self._file.write(json.dumps(fields).encode() + b"\n")
            self._file.flush()
            if time.monotonic() - self._synced > _SYNC:
                self.sync()
        except OSError as error:
            raise refused(error, self._path) from error
        return place

    def sync(self) -> None:
        """Make everything survive a power cut."""
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def read(self, settings: Mapping[str, Any]) -> None:
        """Take what is there, begun with the same settings; begin the file where it is new.

        Raises:
            StoreError: it was begun with others.
        """
        self._file.seek(0)
        end = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                break  # torn
            try:
                fields = json.loads(line)
                if "engine" in fields:
                    self.engines.append(dict(fields["engine"]))
                elif end:
                    self._places.setdefault(fields["row"], []).append(end)
                else:
                    check_same(self._path, fields["settings"], settings)
            except (ValueError, KeyError, TypeError):
                raise StoreError(
                    f"{self._path} is damaged at byte {end}: it is no file of answers; move it away"
                ) from None
            end += len(line)
        self._file.truncate(end)
        if not end:
            self._write({"settings": settings})
            self.sync()


@contextmanager
def journal(out: Path, settings: Mapping[str, Any]) -> Iterator[Journal]:
    """The journal of the file ``out``, held for this process alone.

    Raises:
        StoreError: another process holds it, it cannot be written, or it was begun with other settings.
    """
    path = partial(out)
    check_regular(path)
    try:
        file = open(path, "r+b" if path.exists() else "x+b")  # noqa: SIM115  # held open below
    except OSError as error:
        raise refused(error, path) from error
    except ValueError as error:
        raise StoreError(f"cannot write {str(path)!r}: {error}") from None
    with file:
        if not lock(file):
            raise StoreError(f"{path}: another process is writing it; wait for it or stop it")
        made = Journal(file, path)
        made.read(settings)
        yield made
        if path.exists():
            made.sync()


def begun_at(out: Path) -> str | None:
    """The time given to the templates when the answers of ``out`` were begun; None where none were begun."""
    try:
        with partial(out).open("rb") as file:
            clock: str = json.loads(file.readline())["settings"]["clock"]
            return clock
    except (OSError, ValueError, KeyError, TypeError):
        return None


def partial(out: Path) -> Path:
    """Where the answers of ``out`` are collected."""
    return out.with_name(out.name + PARTIAL)


def check_same(path: Path, begun: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """The settings are those it was begun with.

    Raises:
        StoreError: naming the first that is not.
    """
    for name in (*asked, *(name for name in begun if name not in asked)):
        if begun.get(name) != asked.get(name):
            was, now = (json.dumps(found.get(name), ensure_ascii=False) for found in (begun, asked))
            values = f" ({was[:60]}, not {now[:60]})" if max(len(was), len(now)) < 64 else ""
            raise StoreError(
                f"{path} was begun with another {name}{values}; give the same to continue, or another --out"
            )
