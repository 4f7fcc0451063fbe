"""Rows of requests that are not complete, until they are: then a file holds all of one, or says why not."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError

from .spooled import Rows, SpoolId, write_failure

#: Files that may wait for the disk before a forward waits for them.
WAITING: Final = 8


class Assembly:
    """Puts requests together from their chunks; files are written behind the forward that completes them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._held: dict[SpoolId, list[Rows]] = {}
        self._disk = ThreadPoolExecutor(1, "capture-hooks-spool")
        self._writing: list[Future[None]] = []

    @property
    def unfinished(self) -> tuple[SpoolId, ...]:
        """Requests that have some rows and lack others."""
        return tuple(self._held)

    def add(self, key: SpoolId, start: int, rows: Rows) -> None:
        """Take rows ``start``, ``start + 1``, … of a request; one that starts again at 0 was retracted.

        Raises:
            OSError: an earlier file could be written neither as states nor as a failure.
        """
        held = self._held.setdefault(key, [])
        if start == 0:
            held.clear()
        there, end = sum(map(len, held)), start + len(rows)
        if start != there or end > key.tokens:
            del self._held[key]
            self._submit(
                write_failure,
                key.failure_file(self._directory),
                f"{there} of its {key.tokens} tokens had been run when tokens {start} to {end - 1} were: "
                "the rest came from a prefix cache, or belongs to another request of this id",
            )
            return
        held.append(rows)
        if end == key.tokens:
            self._submit(_write_joined, key.states_file(self._directory), self._held.pop(key))

    def forget(self, request: str) -> None:
        """Drop the rows of requests whose ids begin with ``request``."""
        for key in [key for key in self._held if str(key).startswith(request)]:
            del self._held[key]

    def wait(self) -> None:
        """Until every file is written."""
        while self._writing:
            self._writing.pop(0).result()

    def _submit(self, write: Callable[..., None], *what: Any) -> None:
        while len(self._writing) >= WAITING or (self._writing and self._writing[0].done()):
            self._writing.pop(0).result()
        self._writing.append(self._disk.submit(write, *what))


def _write_joined(path: Path, parts: list[Rows]) -> None:
    joined = (torch.cat([getattr(part, name) for part in parts]) for name in Rows.__slots__)
    try:
        Rows(*joined).write(path)
    except (OSError, SafetensorError) as error:  # most likely a full disk, where a few words may still fit
        write_failure(path.with_suffix(".failed"), f"they could not be written: {error}")
