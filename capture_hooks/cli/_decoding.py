"""What ``generate`` and ``eval`` share: loading, and the options of a draft."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

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
    """The decoder, and the tokenizer where the model has one.

    Raises:
        ModelError: when there is no such model.
        HeadError: when the head is damaged or another target's.
    """
    from ..decoding import SpeculativeDecoder
    from ..heads import load_head
    from ..interop.heads import FORMATS
    from ..plugins import registry
    from ..target import load_target, load_tokenizer

    shape = parse_tree(tree)
    target: Any = load_target(model, dtype, device)
    draft = load_head(head, target, formats=FORMATS, conventions=registry().conventions)
    draft = draft.to(next(target.parameters()).device).eval()
    decoder = SpeculativeDecoder(
        target, draft, draft_tokens, shape, min_confidence=min_confidence, kernels=kernels
    )
    return decoder, load_tokenizer(model)


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
