"""The target model's side of a round: prompt and verification passes over one cached sequence."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..capture import CaptureSession
from ..errors import CaptureHooksError, DecodingError
from ..heads.drafting import Proposal
from . import caches
from .feed import Feed
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
        self._feed = Feed(anatomy.model)
        # Models with M-RoPE remember how far the last prompt's images moved positions, whoever asks next.
        self._shifted: list[Any] = [module for module in model.modules() if hasattr(module, "rope_deltas")]
        self.cache: Any = None
        self.device: torch.device = anatomy.embedding.weight.device  # type: ignore[assignment]  # nn.Module.__getattr__

    def state_width(self) -> int:
        """Values in one captured row: runs the target on one token.

        Raises:
            DecodingError: for a target that does not run on an ordinary cache.
        """
        self.start(1)
        try:
            with torch.inference_mode():
                _, states = self.prefill(torch.zeros(1, 1, dtype=torch.long, device=self.device))
        except CaptureHooksError:
            raise
        except Exception as error:  # any model's own forward: its error becomes the reason
            raise DecodingError(
                f"{type(self.anatomy.model).__name__} does not run on a key/value cache that can be rolled "
                f"back ({type(error).__name__}: {error}): speculative decoding is impossible with this "
                "target; use model.generate"
            ) from error
        return states.shape[-1]

    def start(self, longest: int, inputs: Mapping[str, Any] | None = None) -> None:
        """Begin an empty sequence of up to ``longest`` tokens; ``inputs`` are those of the request."""
        self._renew()
        self._ids: list[int] = []
        self._longest = longest
        self._inputs = {} if inputs is None else inputs
        self.anatomy.lengths.forget()
        for module in self._shifted:
            module.rope_deltas = None

    @property
    def length(self) -> int:
        """Tokens of the sequence so far."""
        return len(self._ids)

    def require_continuation(self, prompt: int, longest: int) -> None:
        """Make sure that the model's class can be followed from ``prompt`` to ``longest`` tokens.

        Raises:
            DecodingError: where it drops what it has read.
        """
        self._feed.require_continuation(longest - 1, prompt)

    def room(self, wanted: int, size: int | None) -> int:
        """How far, up to ``wanted`` tokens, the next pass may be drafted ahead.

        Every row of a pass must be what it is in a pass of its own.

        Args:
            wanted: the longest path of a proposal.
            size: the most tokens of a tree; None for a chain.
        """
        past = len(self._ids)
        most = self.anatomy.lengths.most_rows(past)
        if most is not None:
            wanted = min(wanted, most - 1)
        if wanted > 0 and self._feed.restarts(past + 1 + max(wanted, size or 0), past, self._inputs):
            return 0
        return wanted

    def prefill(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Run the prompt ids [1, N]; logits [1, V] after its last token, and captured states [N, K*H]."""
        logits, states = self._forward(ids[0].tolist(), logits=1)
        if self.kernels is not None:
            # After the forward, in which PEFT takes a disabled adapter out of the weights it was merged into.
            self.kernels.refresh()
        return logits[0, -1:], states

    def verify(self, root: int, proposal: Proposal) -> tuple[Tensor, Tensor]:
        """Run the root and the drafted tokens in one pass; logits [M+1, V] and states [M+1, K*H].

        Raises:
            DecodingError: for a tree where the cache holds one line of tokens only.
        """
        ids = [root, *proposal.tokens]
        kernels = contextlib.nullcontext() if self.kernels is None else self.kernels.verifying(len(ids))
        with kernels:
            logits, states = self._forward(ids, logits=len(ids), tree=None if proposal.is_chain else proposal)
        return logits[0], states

    def commit(self, proposal: Proposal, accepted: Sequence[int]) -> None:
        """After `verify`: keep the root and the ``accepted`` nodes, forget the other rows."""
        rows = len(proposal.tokens) + 1
        kept = [0, *accepted]
        start = len(self._ids) - rows
        caches.keep_path(self.cache, start, kept)
        self._ids[start:] = [self._ids[start + row] for row in kept]

    def _renew(self) -> None:
        self.cache = caches.new_cache(self.anatomy.model.config)  # type: ignore[arg-type]  # nn.Module.__getattr__

    def _forward(self, ids: list[int], *, logits: int, tree: Proposal | None = None) -> tuple[Tensor, Tensor]:
        """Run ids behind the cached ones; the last ``logits`` rows of logits [1, *, V], the ids' states."""
        past = len(self._ids)
        self._ids += ids
        tokens = torch.tensor([self._ids], device=self.device)
        fed = self._feed.arguments(tokens, past, self.cache, self._inputs, logits=logits)
        if restarted := fed.get(self._feed.cache_argument) is not self.cache:
            self._renew()
            fed[self._feed.cache_argument] = self.cache
        if tree is not None:
            fed |= self._tree_arguments(tree, past, fed.get("position_ids"))
        with self._capture:
            output = self.model(**fed)
        if restarted or not past:
            caches.prepare_rollback(self.cache, self._longest)
        return output.logits[:, -logits:], self._capture.states.packed[-len(ids) :]

    def _tree_arguments(self, tree: Proposal, past: int, positions: Tensor | None) -> dict[str, Any]:
        """``positions`` are those of a chain of as many tokens."""
        if obstacle := caches.tree_obstacle(self.cache):
            raise DecodingError(f"a draft tree cannot be verified: {obstacle}; use a chain (tree=None)")
        seen = tree.visibility()
        mask = torch.ones(1, 1, len(seen), past + len(seen), dtype=torch.bool)
        mask[0, 0, :, past:] = seen
        depths = torch.tensor([tree.depths()], device=self.device)
        first = past if positions is None else positions[..., :1]
        # Additive, in the model's dtype: the one form that every attention implementation adds as it is.
        dtype = self.anatomy.embedding.weight.dtype
        bias = torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)  # type: ignore[arg-type]
        return {"attention_mask": bias.to(self.device), "position_ids": first + depths}
