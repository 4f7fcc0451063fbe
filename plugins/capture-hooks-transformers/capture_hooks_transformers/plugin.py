"""What this distribution adds to capture-hooks: the anatomy of Hugging Face models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import capture_hooks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from capture_hooks.capture.anatomy import AnatomyProvider


@capture_hooks.hookimpl
def capture_hooks_anatomies() -> Sequence[AnatomyProvider]:
    """The anatomy of every decoder-only `transformers.PreTrainedModel`."""
    from .provider import TransformersAnatomy

    return [TransformersAnatomy()]
