"""States of whole prompts, left in a directory by each replica's first rank for ``capture-hooks dump``.

The points are captured by the core's session, read after every forward where the logits processor begins.
All tensor-parallel ranks do the same work, for a snapshot of the stream and the logits may be sums over all
of them; one writes.  A request's rows are held until they are complete, so an aborted or retracted one leaves
no file.  The request id names the file and says how many tokens the request has, so that the scheduler knows
when its rows are complete.  The side that collects imports this too: nothing of SGLang is imported for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from capture_hooks.capture import bind, find_anatomy
from capture_hooks.errors import EngineError
from capture_hooks.io import hand_over
from capture_hooks.spec import CaptureSpec

from ..forward import rows_of
from .delivery import logits_processor_of

_PREFIX: Final = "capture-hooks-dump"
#: Rows whose logits over the full vocabulary exist at one time.
LOGIT_ROWS: Final = 512
#: Files that may wait for the disk before a forward waits for them.
WAITING: Final = 8


@dataclass(frozen=True, slots=True)
class SpoolId:
    """The id of a request whose states are asked for.

    Attributes:
        number: its own among the requests of one server.
        tokens: of its prompt.
    """

    number: int
    tokens: int

    def __str__(self) -> str:
        return f"{_PREFIX}-{self.number}-{self.tokens}"

    @classmethod
    def parse(cls, request: str) -> Self | None:
        """The id that ``request`` is, or None for a request of someone else's."""
        prefix, _, numbers = request.rpartition(f"{_PREFIX}-")
        number, _, tokens = numbers.partition("-")
        if prefix or not number.isdecimal() or not tokens.isdecimal():
            return None
        return cls(int(number), int(tokens))

    def states_file(self, directory: Path) -> Path:
        """Where the states are, once they are complete."""
        return directory / f"{self}.safetensors"

    def failure_file(self, directory: Path) -> Path:
        """Where it says why there will be none."""
        return directory / f"{self}.failed"


@dataclass(frozen=True, slots=True, eq=False)
class RequestRows:
    """Consecutive rows of one request.

    Attributes:
        inputs: [T, W] the spec's inputs, packed in its order.
        target: [T, H] the spec's target point.
        argmax: [T] int64 the target's greedy next token after each.
    """

    inputs: Tensor
    target: Tensor
    argmax: Tensor

    def __len__(self) -> int:
        return self.inputs.shape[0]

    def write(self, path: Path) -> None:
        """Leave a file with all rows, or none."""
        rows = {name: getattr(self, name).contiguous() for name in self.__slots__}
        hand_over(path, lambda place: save_file(rows, place))

    @classmethod
    def take(cls, path: Path) -> Self:
        """Map the rows of a file into memory and remove it from the directory."""
        with safe_open(path, framework="pt") as file:
            rows = cls(*(file.get_tensor(name) for name in cls.__slots__))
        path.unlink()
        return rows


def write_failure(path: Path, why: str) -> None:
    """Say why a request's states will not come."""
    hand_over(path, lambda place: place.write_text(why))


class Assembly:
    """Puts requests together from their chunks; files are written behind the forward that completes them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._held: dict[SpoolId, list[RequestRows]] = {}
        self._disk = ThreadPoolExecutor(1, "capture-hooks-spool")
        self._writing: list[Future[None]] = []

    @property
    def unfinished(self) -> tuple[SpoolId, ...]:
        """Requests that have some rows and lack others."""
        return tuple(self._held)

    def add(self, key: SpoolId, start: int, rows: RequestRows) -> None:
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


def _write_joined(path: Path, parts: list[RequestRows]) -> None:
    joined = (torch.cat([getattr(part, name) for part in parts]) for name in RequestRows.__slots__)
    try:
        RequestRows(*joined).write(path)
    except (OSError, SafetensorError) as error:  # most likely a full disk, where a few words may still fit
        write_failure(path.with_suffix(".failed"), f"they could not be written: {error}")


class Spool:
    """The capture of one target in one process; `attach` it once the server has warmed up."""

    def __init__(
        self, model: nn.Module, spec: CaptureSpec, directory: Path, *, ranks: int, rank: int
    ) -> None:
        """Bind the spec; nothing is attached yet.

        Args:
            model: the target.
            spec: what to capture; the target point too.
            directory: where finished requests' states are left.
            ranks: tensor-parallel ranks of this replica.
            rank: this process's; only 0 writes.

        Raises:
            SpecError, BindError: the spec does not fit the model.
            EngineError: no such directory, or a submodule's state where each rank holds a part of it.
        """
        if not directory.is_dir():
            raise EngineError(f"the spool {directory} is not a directory")
        modules = [str(p) for p in (*spec.inputs, spec.target) if p.module is not None]
        if ranks > 1 and modules:
            raise EngineError(
                f"{', '.join(modules)}: of {ranks} tensor-parallel ranks each holds its own part of a "
                "submodule's input and output; capture points of the stream, or with --tp-size 1"
            )
        anatomy = find_anatomy(model)
        _, self._processor = logits_processor_of(anatomy)
        if not hasattr(self._processor, "_get_logits"):
            raise EngineError(
                f"{type(self._processor).__name__} has no _get_logits in this version of SGLang, through "
                "which greedy tokens are computed; capture-hooks-sglang knows 0.5.23"
            )
        self._session = bind(model, spec, target=True, anatomy=anatomy)
        self._signature = inspect.signature(self._processor.forward)
        self._assembly = Assembly(directory) if rank == 0 else None

    @property
    def spec(self) -> CaptureSpec:
        """What is captured, layers absolute."""
        return self._session.spec

    @property
    def boundaries(self) -> list[int | None]:
        """The boundary of each input; None for a point that lies on no boundary."""
        anatomy = self._session.anatomy
        sites = self.spec.resolve(anatomy.n_layers, anatomy.split_boundaries).inputs
        return [None if site.norm else site.boundary for site in sites]

    def attach(self) -> None:
        """Capture from now on, for the life of the process."""
        self._session.__enter__()
        self._processor.register_forward_pre_hook(self._collect, with_kwargs=True)

    def forget(self, request: str) -> None:
        """Drop the rows of aborted requests, whose ids begin with ``request``."""
        if self._assembly is not None:
            self._assembly.forget(request)

    def _collect(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = self._signature.bind(*args, **kwargs).arguments
        told = rows_of((given["logits_metadata"],), {})
        asked = [SpoolId.parse(str(request)) for request in told.requests]
        if any(asked):
            states, count = self._session.states, sum(told.lengths)
            argmax = self._argmax(given, count)
            if self._assembly is not None:
                rows = RequestRows(states.packed.cpu(), states.target.cpu(), argmax.cpu())
                for key, start, part in _parts(asked, told.starts, told.lengths, rows):
                    self._assembly.add(key, start, part)
        if told.requests:
            self._session.clear()

    def _argmax(self, given: dict[str, Any], count: int) -> Tensor:
        """[count] the greedy next token after each row, by the model's own output layer."""
        logits_of: Any = self._processor._get_logits
        rest = given["lm_head"], given["logits_metadata"]
        chunks = torch.split(given["hidden_states"][:count], LOGIT_ROWS)
        return torch.cat([logits_of(chunk, *rest, use_logits_buffer=False).argmax(-1) for chunk in chunks])


def _parts(
    asked: list[SpoolId | None], starts: Any, lengths: tuple[int, ...], rows: RequestRows
) -> Iterator[tuple[SpoolId, int, RequestRows]]:
    """Each asked-for request's rows of one forward, with the position of the first."""
    firsts = starts.tolist() if isinstance(starts, Tensor) else starts
    at = 0
    for key, start, length in zip(asked, firsts, lengths, strict=True):
        if key is not None and start < key.tokens:  # behind its prompt it is decoding
            part = slice(at, at + length)
            yield key, start, RequestRows(rows.inputs[part], rows.target[part], rows.argmax[part])
        at += length
