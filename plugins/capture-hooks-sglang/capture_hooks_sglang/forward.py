"""SGLang's forwards: which token each row is, and how many rows each must hand to the draft head.

SGLang flattens the requests of a batch into one axis.  Of ``ForwardBatch`` only what it keeps on the host is
read (request ids, lengths of prefixes and extensions, sequence lengths), so that nothing waits for an
accelerator.  ``sglang/srt/model_executor/forward_batch_info.py`` (0.5.21 to 0.5.23): modes are known by name,
and one that is not listed here is refused, so that a new one cannot deliver too few rows in silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from capture_hooks.capture.anatomy import BatchRows
from capture_hooks.errors import EngineError

#: Modes in which each request gives the rows of its extension.
_EXTENDING: Final = ("EXTEND", "MIXED")
#: Modes in which the target runs, and every row stands for one token of the batch.
COVERED: Final = frozenset({"EXTEND", "MIXED", "DECODE", "TARGET_VERIFY", "IDLE"})
#: Modes in which states cannot be delivered, with the reason.
REFUSED: Final = {
    "DRAFT_EXTEND_V2": "it is the draft model's own pass, and does not belong in the target",
    "PREBUILT": "its KV cache came from another server, so there are no states of its tokens",
    "SPLIT_PREFILL": "its layers run in separate calls, which this plugin does not follow",
    "DLLM_EXTEND": "it is a diffusion model's pass, whose rows are not a sequence's tokens in order",
}


def rows_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> BatchRows:
    """The rows of one forward of the decoder; see `capture_hooks.capture.Anatomy.rows`."""
    batch = next((value for value in (*args, *kwargs.values()) if hasattr(value, "forward_mode")), None)
    if batch is None:
        return BatchRows.untold("the decoder was called without a ForwardBatch")
    mode = batch.forward_mode.name
    if mode == "IDLE":
        return BatchRows((), (), ())
    requests = batch.rids
    if requests is None:
        return BatchRows.untold(f"the ForwardBatch of mode {mode} carries no request ids (rids)")
    count = len(requests)
    if mode in _EXTENDING:
        lengths, starts = batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu
        if lengths is None or starts is None:
            return BatchRows.untold(f"a {mode} batch without extend_seq_lens_cpu or extend_prefix_lens_cpu")
        return BatchRows(tuple(requests), tuple(lengths[:count]), tuple(starts[:count]))
    if mode == "DECODE":
        return BatchRows(tuple(requests), (1,) * count, _ends(batch, count, 1))
    if mode == "TARGET_VERIFY":
        spec = batch.spec_info
        tokens, branches = getattr(spec, "draft_token_num", None), getattr(spec, "topk", None)
        if tokens is None or branches != 1:
            return BatchRows.untold("the target verifies a tree of drafts, whose rows share positions")
        return BatchRows(tuple(requests), (int(tokens),) * count, _ends(batch, count, 0))
    return BatchRows.untold(f"this plugin does not know the rows of SGLang's forward mode {mode}")


def _ends(batch: Any, count: int, before: int) -> Sequence[int] | Tensor:
    """Sequence lengths less ``before``: numbers where the host has them, else a tensor on the device."""
    if batch.seq_lens_cpu is not None:
        return tuple(int(length) - before for length in batch.seq_lens_cpu[:count].tolist())
    lengths: Tensor = batch.seq_lens[:count]
    return lengths - before


@dataclass(frozen=True, slots=True)
class Expected:
    """What the logits processor must store for the draft head: rows, or None for nothing."""

    mode: str
    capture: str
    rows: int | None


def check_mode(mode: str) -> None:
    """Refuse a forward mode by name.

    Raises:
        EngineError: for a mode in which states are not, or not known to be, delivered.
    """
    if mode in COVERED:
        return
    why = REFUSED.get(mode, "this version of capture-hooks-sglang does not know it")
    raise EngineError(f"SGLang runs the target in forward mode {mode}, which is not captured: {why}")


def expected_rows(metadata: Any, tokens: int) -> Expected:
    """The rows that must be stored for ``metadata``, a ForwardBatch or LogitsMetadata.

    Args:
        metadata: what the logits processor was given.
        tokens: rows that entered it.

    Raises:
        EngineError: for a mode that is not covered.
    """
    mode, capture = metadata.forward_mode.name, metadata.capture_hidden_mode.name
    check_mode(mode)
    if capture == "NULL":
        return Expected(mode, capture, None)
    if capture == "FULL":
        return Expected(mode, capture, tokens)
    if capture != "LAST":
        raise EngineError(f"SGLang stores hidden states in mode {capture}; FULL, LAST and NULL are known")
    # One row for each request where a pass has several tokens of it; the rows themselves elsewhere.
    if mode in _EXTENDING:
        return Expected(mode, capture, int(metadata.extend_seq_lens.shape[0]))
    return Expected(mode, capture, tokens)
