"""The anatomy provider for SGLang's causal language models.

Asked in every process where the plugin is installed, so what a model of SGLang's takes is imported when there
is one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch import nn

from capture_hooks.capture.anatomy import Anatomy
from capture_hooks.errors import BindError


class SGLangAnatomy:
    """Finds the parts of any causal language model that SGLang has built in this process."""

    name = "sglang"

    def match(self, model: nn.Module) -> int:
        """2 for a model with SGLang's ``LogitsProcessor``: some (Gemma 3) are Hugging Face models too."""
        return 2 * _holds_logits_processor(model)

    def unwrap(self, model: nn.Module) -> Sequence[nn.Module]:
        """Nothing: SGLang itself wraps no model."""
        return ()

    def describe(self, model: nn.Module) -> Anatomy:
        """Find the parts.

        Raises:
            BindError: naming what was looked for and what was found instead.
        """
        if not _holds_logits_processor(model):
            raise BindError(f"{type(model).__name__} holds no LogitsProcessor of SGLang's")
        from .wiring import describe

        return describe(model)


def _holds_logits_processor(model: nn.Module) -> bool:
    """Whether ``model`` is a language model of SGLang's, told without importing SGLang."""
    # A model of SGLang's cannot exist before this module was imported.
    module = sys.modules.get("sglang.srt.layers.logits_processor")
    kind = getattr(module, "LogitsProcessor", None)
    return kind is not None and any(isinstance(part, kind) for part in model.modules())
