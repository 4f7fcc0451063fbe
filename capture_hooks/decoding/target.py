"""The target model's side of a round: prompt and verification passes over one cached sequence."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..capture import CaptureSession
from ..errors import DecodingError
from . import caches
from .drafts import Draft
from .packed import PackedLinears


class Target:
    """A target model with one growing sequence."""

    def __init__(
        self, model: nn.Module, capture: CaptureSession, kernels: PackedLinears | None = None
    ) -> None:
        """Check the model's interface.

        Args:
            model: the target as the caller has it, wrappers included.
            capture: the head's spec bound to it.
            kernels: packed linears for verification passes.

        Raises:
            DecodingError: for a model without a key/value cache argument.
        """
        anatomy = capture.anatomy
        self.model = model
        self.anatomy = anatomy
        self.kernels = kernels
        self._capture = capture
        parameters = inspect.signature(anatomy.model.forward).parameters
        # transformers 5.24 renamed `past_key_values` to `cache` and keeps the old name as deprecated.
        names = [name for name in ("cache", "past_key_values") if name in parameters]
        if not names:
            raise DecodingError(
                f"{type(anatomy.model).__name__}.forward takes neither cache= nor past_key_values=: "
                "without a key/value cache there is nothing to speculate with"
            )
        self._cache_argument = names[0]
        self._keeps_logits = "logits_to_keep" in parameters
        self._takes_positions = "position_ids" in parameters
        # Models with M-RoPE remember how far the last prompt's images moved positions, whoever asks next.
        self._shifted: list[Any] = [module for module in model.modules() if hasattr(module, "rope_deltas")]
        self._shift = 0
        self.cache: Any = None
        self.device: torch.device = anatomy.embedding.weight.device  # type: ignore[assignment]  # nn.Module.__getattr__

    def state_width(self) -> int:
        """Values in one captured row: runs the target on one token."""
        self.start(1)
        with torch.inference_mode():
            _, states = self.prefill(torch.zeros(1, 1, dtype=torch.long, device=self.device))
        return states.shape[-1]

    def start(self, longest: int, shift: int = 0) -> None:
        """Begin an empty sequence of up to ``longest`` tokens, whose prompt moves positions by ``shift``."""
        self._shift = shift
        for module in self._shifted:
            module.rope_deltas = None
        self.cache = caches.new_cache(self.anatomy.model.config)  # type: ignore[arg-type]  # nn.Module.__getattr__
        self._longest = longest

    def prefill(self, ids: Tensor, images: Mapping[str, Any] | None = None) -> tuple[Tensor, Tensor]:
        """Run the prompt ids [1, N], with its images; logits [1, V] after its last token, and captured
        states [N, K*H]."""
        keep = {"logits_to_keep": 1} if self._keeps_logits else {}
        logits, states = self._forward(ids, **keep, **(images or {}))
        if self.kernels is not None:
            # After the forward, in which PEFT takes a disabled adapter out of the weights it was merged into.
            self.kernels.refresh()
        caches.prepare_rollback(self.cache, self._longest)
        return logits[0, -1:], states

    def verify(self, root: int, draft: Draft) -> tuple[Tensor, Tensor]:
        """Run the root and the drafted tokens in one pass; logits [M+1, V] and states [M+1, K*H].

        Raises:
            DecodingError: for a tree where the cache holds one line of tokens only.
        """
        ids = torch.tensor([[root, *draft.tokens]], device=self.device)
        kernels = contextlib.nullcontext() if self.kernels is None else self.kernels.verifying(ids.shape[1])
        with kernels:
            extra = {} if draft.is_chain else self._tree_arguments(draft)
            if draft.is_chain and self._shift:
                extra["position_ids"] = self._positions(draft)
            logits, states = self._forward(ids, **extra)
        return logits[0], states

    def commit(self, draft: Draft, accepted: Sequence[int]) -> None:
        """After `verify`: keep the root and the ``accepted`` nodes, forget the other rows."""
        rows = len(draft.tokens) + 1
        caches.keep_path(self.cache, caches.length(self.cache) - rows, [0, *accepted])

    def _forward(self, ids: Tensor, **extra: Any) -> tuple[Tensor, Tensor]:
        arguments = {self._cache_argument: self.cache, "use_cache": True, **extra}
        with self._capture:
            output = self.model(input_ids=ids, **arguments)
        return output.logits, self._capture.states.packed

    def _tree_arguments(self, draft: Draft) -> dict[str, Any]:
        if obstacle := caches.tree_obstacle(self.cache):
            raise DecodingError(f"a draft tree cannot be verified: {obstacle}; use a chain (tree=None)")
        past = caches.length(self.cache)
        seen = draft.visibility()
        mask = torch.ones(1, 1, len(seen), past + len(seen), dtype=torch.bool)
        mask[0, 0, :, past:] = seen
        # Additive, in the model's dtype: the one form that every attention implementation adds as it is.
        dtype = self.anatomy.embedding.weight.dtype
        bias = torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)  # type: ignore[arg-type]
        return {"attention_mask": bias.to(self.device), "position_ids": self._positions(draft)}

    def _positions(self, draft: Draft) -> Tensor:
        """[1, M+1] positions of the root and the drafted tokens."""
        past = caches.length(self.cache) + self._shift
        return torch.tensor([draft.depths()], device=self.device) + past
