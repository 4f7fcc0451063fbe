"""What ``generate`` and ``eval`` share: loading, and the options of a draft."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from ..errors import DecodingError

if TYPE_CHECKING:
    from ..decoding import SpeculativeDecoder

Kernels = Literal["stock", "packed"]


def load(
    model: str,
    head: Path,
    *,
    draft_tokens: int,
    tree: str | None,
    min_confidence: float,
    kernels: Kernels,
    dtype: str,
    device: str | None,
) -> tuple[SpeculativeDecoder, Any]:
    """The decoder and the tokenizer.

    Raises:
        DecodingError: when there is no such model.
        HeadError: when the head is damaged or another target's.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from ..decoding import SpeculativeDecoder
    from ..heads import load_head

    shape = parse_tree(tree)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers gives no types
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
        target: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    except (OSError, ValueError) as error:
        raise DecodingError(f"cannot load the model {model}: {str(error).splitlines()[0]}") from error
    target = target.to(place).eval()
    draft = load_head(head, target).to(place).eval()
    decoder = SpeculativeDecoder(
        target, draft, draft_tokens, shape, min_confidence=min_confidence, kernels=kernels
    )
    return decoder, tokenizer


def parse_tree(text: str | None) -> Any:
    """``DEPTH,BRANCH,SIZE`` as a `TreeShape`."""
    if text is None:
        return None
    from ..decoding import TreeShape

    try:
        depth, branch, size = (int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not DEPTH,BRANCH,SIZE, for example 5,4,15", param_hint="--tree"
        ) from None
    return TreeShape(depth, branch, size)
