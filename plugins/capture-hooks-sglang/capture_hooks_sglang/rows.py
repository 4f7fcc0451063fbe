"""Which token of which request each row of a forward is, from SGLang's ``ForwardBatch``.

SGLang flattens the requests of a batch into one axis.  Only what the batch keeps on the host is read (request
ids, lengths of prefixes and extensions, sequence lengths), so that nothing waits for an accelerator.
Field names: ``sglang/srt/model_executor/forward_batch_info.py`` (0.5.21 and 0.5.23).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from capture_hooks.capture.anatomy import BatchRows

#: Modes in which each request gives the rows of its extension.
_EXTENDING = ("EXTEND", "MIXED")


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
