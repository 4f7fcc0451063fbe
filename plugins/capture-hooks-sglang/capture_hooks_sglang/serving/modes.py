"""SGLang's forward modes, and how many rows of states each must hand to the draft head.

``ForwardMode`` and ``CaptureHiddenMode`` of ``sglang/srt/model_executor/forward_batch_info.py`` (0.5.23),
by name: a mode that is not listed here is refused, so that a new one cannot deliver too few rows in silence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from capture_hooks.errors import EngineError

#: Modes in which the target runs, and every row stands for one token of the batch.
COVERED: Final = frozenset({"EXTEND", "MIXED", "DECODE", "TARGET_VERIFY", "IDLE"})
#: Modes in which states cannot be delivered, with the reason.
REFUSED: Final = {
    "DRAFT_EXTEND_V2": "it is the draft model's own pass, and does not belong in the target",
    "PREBUILT": "its KV cache came from another server, so there are no states of its tokens",
    "SPLIT_PREFILL": "its layers run in separate calls, which this plugin does not follow",
    "DLLM_EXTEND": "it is a diffusion model's pass, whose rows are not a sequence's tokens in order",
}


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
    if mode in ("EXTEND", "MIXED"):
        return Expected(mode, capture, int(metadata.extend_seq_lens.shape[0]))
    return Expected(mode, capture, tokens)
