"""The witness shown to a worker before it serves: through every kind of pass that feeds the draft head."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from capture_hooks.conventions import convention_for
from capture_hooks.conventions.rules import Boundaries
from capture_hooks.engines.reports import Proof
from capture_hooks.errors import ConventionError, EngineError
from capture_hooks.heads import Witness
from capture_hooks.heads.engines import VLLM_KEY
from capture_hooks.heads.fit import fit_wiring
from capture_hooks.plugins import registry
from capture_hooks.spec import Point

from .passes import Passes, every_boundary


def prove(worker: Any, points: Sequence[Point], witness: Witness) -> Proof:
    """Show the witness to ``worker`` and judge what reached the drafter.

    Args:
        worker: vLLM's, complete; drafting with the head.
        points: the head's input, in its file's order.
        witness: the head's.

    Raises:
        EngineError: a path that hands over nothing, too little or too much.
    """
    states = _states(worker, points, witness)
    drafted = worker.model_runner.num_spec_tokens + 1
    paths: dict[str, _Path] = {
        "prefill": lambda passes, length: iter([passes.extend(0, length)]),
        "chunked prefill": _chunked,
        "verification": lambda passes, length: _verified(passes, length, drafted),
    }
    found = {name: _through(worker, witness, path) for name, path in paths.items()}
    return Proof(
        {
            name: fit_wiring(witness, points, delivered, states, rows)
            for name, (delivered, rows) in found.items()
        }
    )


#: The passes of one path over a sequence of some length.
_Path = Callable[[Passes, int], Iterator[tuple[Tensor, Tensor]]]


def _chunked(passes: Passes, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    middle = length // 2
    yield passes.extend(0, middle)
    yield passes.extend(middle, length)


def _verified(passes: Passes, length: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Everything into the cache first; then all but the first token again, a chain of drafts at a time."""
    passes.extend(0, length)
    for start in range(1, length - count + 1, count):
        yield passes.verify(start, count)


def _through(worker: Any, witness: Witness, path: _Path) -> tuple[Tensor, Tensor]:
    """Delivered states [R, width] and the witness rows [R] they are of."""
    delivered: list[Tensor] = []
    rows: list[Tensor] = []
    for start, end in itertools.pairwise(witness.starts.tolist()):
        passes = Passes(worker, witness.token_ids[start:end].tolist())
        for states, positions in path(passes, end - start):
            delivered.append(states)
            rows.append(positions + start)
    if not rows:
        raise EngineError("the witness's sequences are too short for a chain of drafts")
    return torch.cat(delivered), torch.cat(rows)


def _meaning(model_type: str) -> Boundaries:
    """The convention of this vLLM, or of the newest that was established: which boundaries there are.

    Raises:
        EngineError: what it captures of this family is no boundary of one stream.
    """
    import vllm

    known = registry().conventions
    try:
        meaning = convention_for("vllm", model_type, VLLM_KEY, vllm.__version__, known)
    except ConventionError:
        meaning = convention_for("vllm", model_type, VLLM_KEY, known=known)
    if not isinstance(meaning, Boundaries):
        raise EngineError(f"vLLM's states of {model_type} cannot be compared: {meaning.limits}")
    return meaning


def _states(worker: Any, points: Sequence[Point], witness: Witness) -> dict[str, Tensor]:
    """The states [T, H] of this target at every boundary that vLLM captures, by point."""
    config = worker.vllm_config.model_config
    layers = config.get_total_num_hidden_layers()
    meaning = _meaning(config.hf_text_config.model_type)
    boundaries = list(range(meaning.lowest(layers), meaning.highest(layers) + 1))
    own = {point.resolve(layers).boundary: str(point) for point in points}
    names = [own.get(k) or ("embed" if k == 0 else f"post.{k - 1}") for k in boundaries]
    with every_boundary(worker, boundaries):
        every, rows = _through(worker, witness, lambda passes, length: iter([passes.extend(0, length)]))
    if every.shape != (len(witness.token_ids), len(names) * config.get_hidden_size()):
        raise EngineError(
            f"asked for {len(names)} states of {config.get_hidden_size()} values, the target gave "
            f"{every.shape[-1]} values a token"
        )
    assert rows.tolist() == list(range(len(rows)))
    return dict(zip(names, torch.split(every, config.get_hidden_size(), dim=1), strict=True))
