"""What a model is fed in one pass: asked of its class, as `model.generate` asks.

``prepare_inputs_for_generation`` may do more than slice: Phi-3 drops its cache where LongRoPE changes its
frequencies, RoBERTa counts positions otherwise when it is given none.  Every pass follows it, or is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.generation.utils import GenerationMixin

from ..errors import DecodingError


class Feed:
    """Arguments of a model's forward over one growing sequence.

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
