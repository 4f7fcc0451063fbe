"""States of whole prompts, left in a directory by each replica's first rank for ``capture-hooks dump``.

The points are captured by the core's session, read after every forward where the logits processor begins.
All tensor-parallel ranks do the same work, for a snapshot of the stream and the logits may be sums over all
of them; one writes.  A request's rows are held until they are complete, so an aborted or retracted one leaves
no file.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from capture_hooks.capture import bind, find_anatomy
from capture_hooks.errors import EngineError
from capture_hooks.spec import CaptureSpec

from ..rows import rows_of
from .assembly import Assembly
from .delivery import logits_processor_of
from .spooled import Rows, SpoolId

#: Rows whose logits over the full vocabulary exist at one time.
LOGIT_ROWS: Final = 512


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
        """Of each input; None for a point on none."""
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
                rows = Rows(states.packed.cpu(), states.target.cpu(), argmax.cpu())
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
    asked: list[SpoolId | None], starts: Any, lengths: tuple[int, ...], rows: Rows
) -> Iterator[tuple[SpoolId, int, Rows]]:
    """Each asked-for request's rows of one forward, with the position of the first."""
    firsts = starts.tolist() if isinstance(starts, Tensor) else starts
    at = 0
    for key, start, length in zip(asked, firsts, lengths, strict=True):
        if key is not None and start < key.tokens:  # behind its prompt it is decoding
            part = slice(at, at + length)
            yield key, start, Rows(rows.inputs[part], rows.target[part], rows.argmax[part])
        at += length
