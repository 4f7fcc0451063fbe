"""The target model's side of a round: passes over one cached sequence, fed as its own class feeds itself."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation.utils import GenerationMixin

from ..capture import CaptureSession
from ..errors import CaptureHooksError, DecodingError
from ..heads.drafting import Proposal
from . import caches
from .packed import PackedLinears

#: A sibling's logits must be this much nearer to its own branch than to the line with both siblings.
_MARGIN = 0.1


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
        # Models with M-RoPE keep how far the last prompt's images moved positions, also for the next prompt.
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


def require_tree(target: Target) -> None:
    """Make sure that the target honours a tree mask: siblings do not see each other and share a position.

    Asked of the model itself, not of a list of class names.
    Runs a prompt of a few tokens, then two siblings in one pass, and compares the second one's logits
    with those of its own branch and with those of the line in which it follows the first.

    Raises:
        DecodingError: with the reason; a chain still works.
    """
    vocabulary = target.anatomy.vocab_size
    prompt = [token % vocabulary for token in (11, 5, 7)]
    root, first, second = (token % vocabulary for token in (13, 17, 19))
    with torch.inference_mode():
        _start(target, prompt)
        if obstacle := caches.tree_obstacle(target.cache):
            raise DecodingError(
                f"a draft tree cannot be verified with this target: {obstacle}; use a chain (tree=None)"
            )
        line, _ = target.verify(root, Proposal.chain([first, second]))
        _start(target, prompt)
        branch, _ = target.verify(root, Proposal.chain([second]))
        _start(target, prompt)
        try:
            tree, _ = target.verify(root, Proposal((first, second), (0, 0)))
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            raise DecodingError(
                f"this target does not take a 4-D attention mask ({type(error).__name__}: {error}); "
                "use a chain (tree=None)"
            ) from error
        wrong = (line[2] - branch[1]).abs().max()
        off = (tree[2] - branch[1]).abs().max()
    if not off < _MARGIN * wrong:
        raise DecodingError(
            f"this target does not honour a 4-D attention mask: sibling tokens change each other's "
            f"logits by {off:.3g} (a full line of them: {wrong:.3g}); use a chain (tree=None)"
        )


def _start(target: Target, prompt: list[int]) -> None:
    target.start(len(prompt) + 3)
    target.prefill(torch.tensor([prompt], device=target.device))


class Feed:
    """Arguments of a model's forward over one growing sequence, asked of its class as `generate` asks.

    ``prepare_inputs_for_generation`` may do more than slice: Phi-3 drops its cache where LongRoPE changes its
    frequencies, RoBERTa counts positions otherwise when it is given none.  Every pass follows it, or is
    refused.

    Raises:
        DecodingError: for a model without a key/value cache argument.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        parameters = inspect.signature(model.forward).parameters
        # transformers 5.24 renamed `past_key_values` to `cache` and keeps the old name as deprecated.
        names = [name for name in ("cache", "past_key_values") if name in parameters]
        if not names:
            raise DecodingError(
                f"{type(model).__name__}.forward takes neither cache= nor past_key_values=: "
                "without a key/value cache there is nothing to speculate with"
            )
        self.cache_argument = names[0]
        self._keeps_logits = "logits_to_keep" in parameters
        self._takes_positions = "position_ids" in parameters
        stock = GenerationMixin.prepare_inputs_for_generation
        self._own = type(model).prepare_inputs_for_generation is not stock

    def arguments(
        self, tokens: Tensor, past: int, cache: Any, given: Mapping[str, Any], *, logits: int
    ) -> dict[str, Any]:
        """Arguments of the pass over tokens past..T-1 of tokens [1, T].

        Args:
            tokens: the whole sequence, on the model's device.
            past: how many of them the cache holds.
            cache: it.  Where the class goes on without it, the result holds the whole sequence and no cache.
            given: what `generate` hands to every pass (`Request.inputs`), for the prompt's tokens or more.
            logits: rows of logits wanted, from the end.

        Raises:
            DecodingError: for a class that feeds other tokens than these.
        """
        fed = self._prepared(tokens, past, cache, given)
        kept = fed.get(self.cache_argument) is cache
        expected = tokens.shape[1] - (past if kept else 0)
        if fed["input_ids"] is None or fed["input_ids"].shape[1] != expected:
            raise DecodingError(
                f"{type(self._model).__name__}.prepare_inputs_for_generation feeds other tokens than the "
                f"{expected} that follow its cache: speculative decoding cannot follow it; use model.generate"
            )
        if self._keeps_logits:
            fed["logits_to_keep"] = logits
        return fed

    def restarts(self, length: int, past: int, given: Mapping[str, Any]) -> bool:
        """Whether a pass up to ``length`` tokens begins anew instead of behind the ``past`` cached ones."""
        return self._fed_anew(length, past, given) is not None

    def require_continuation(self, length: int, past: int) -> None:
        """Make sure that the class keeps what it has read on the way from ``past`` to ``length`` tokens.

        Raises:
            DecodingError: where it begins anew without the tokens that were cached.
        """
        fed = self._fed_anew(length, past, {})
        if fed is not None and fed < length:
            raise DecodingError(
                f"{type(self._model).__name__} drops its cache between {past} and {length} tokens and goes "
                "on with the newest token alone (its prepare_inputs_for_generation), so model.generate would "
                "write on without context; ask for fewer new tokens"
            )

    def _fed_anew(self, length: int, past: int, given: Mapping[str, Any]) -> int | None:
        """How many tokens a pass up to ``length`` is fed that begins anew; None for one that does not."""
        if not self._own or length <= past:
            return None
        cache = SimpleNamespace(get_seq_length=lambda *args: past, is_compileable=False)
        fed = self._prepared(torch.zeros(1, length, dtype=torch.long), past, cache, given)
        anew = fed.get(self.cache_argument) is not cache
        return int(fed["input_ids"].shape[1]) if anew else None

    def _prepared(self, tokens: Tensor, past: int, cache: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        length = tokens.shape[1]
        extended = {name: _extended(name, value, length) for name, value in given.items()}
        if self._takes_positions and "position_ids" not in extended:
            extended["position_ids"] = torch.arange(length, device=tokens.device)[None]
        fed: dict[str, Any] = self._model.prepare_inputs_for_generation(
            tokens,
            next_sequence_length=length - past,
            is_first_iteration=past == 0,
            use_cache=True,
            **{self.cache_argument: cache},
            **extended,
        )
        return fed


def _extended(name: str, value: Any, length: int) -> Any:
    """What `generate` makes of an argument of the prompt once the sequence is longer (only text follows)."""
    if not isinstance(value, Tensor) or value.shape[-1] >= length:
        return value
    more = length - value.shape[-1]
    if name == "position_ids":
        return torch.cat([value, value[..., -1:] + torch.arange(1, more + 1, device=value.device)], -1)
    if name == "attention_mask":
        return torch.nn.functional.pad(value, (0, more), value=1)
    if name == "token_type_ids":
        return torch.cat([value, value[:, -1:].expand(-1, more)], -1)
    if name == "mm_token_type_ids":
        return torch.nn.functional.pad(value, (0, more))
    return value
