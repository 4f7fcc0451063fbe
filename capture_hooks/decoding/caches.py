"""The target's KV cache: what can be rolled back, what can verify a tree, and how.

Decided by the cache's own classes once a first forward pass has filled it, since only then a layer knows
whether it keeps a recurrent state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.configuration_utils import PreTrainedConfig

from ..errors import DecodingError

#: Rows added to a full buffer at once.
_GROWTH = 256


class BufferLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # its __init_subclass__ has no types
    """A `DynamicLayer` that writes into a buffer with room to spare instead of concatenating.

    ``keys`` and ``values`` are views of the buffer, so dropping rows costs nothing.
    """

    keys: Tensor
    values: Tensor

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self._storage = tuple(
            x.new_empty((*x.shape[:-2], 0, x.shape[-1])) for x in (key_states, value_states)
        )
        self.keys, self.values = self._storage

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.keys.shape[-2]
        end = start + key_states.shape[-2]
        if end > self._storage[0].shape[-2]:
            self._storage = tuple(_grown(x, end + _GROWTH) for x in (self.keys, self.values))
        for buffer, new in zip(self._storage, (key_states, value_states), strict=True):
            buffer[..., start:end, :] = new
        self.keys, self.values = (buffer[..., :end, :] for buffer in self._storage)
        return self.keys, self.values

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes the number of tokens to remove as a negative count, not {tokens_to_remove}"
            )
        if tokens_to_remove and self.is_initialized:
            self.keys, self.values = (
                self.keys[..., :tokens_to_remove, :],
                self.values[..., :tokens_to_remove, :],
            )


def new_cache(config: PreTrainedConfig) -> Any:
    """An empty cache for ``config``'s layers, plain full-attention layers replaced by `BufferLayer`."""
    cache: Any = DynamicCache(config=config.get_text_config(decoder=True))
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = BufferLayer
    for at, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[at] = BufferLayer()  # type: ignore[no-untyped-call]  # transformers gives no types
    return cache


def length(cache: Any) -> int:
    """Tokens the cache has seen and not dropped."""
    return int(cache.get_seq_length())


def prepare_rollback(cache: Any, longest: int) -> None:
    """Make a freshly filled cache able to drop its newest rows.

    Args:
        cache: after the prompt's forward pass.
        longest: the most tokens it will ever hold.

    Raises:
        DecodingError: naming the layer and why it cannot be rolled back.
    """
    # Recording must start after the prompt: before it, a sliding layer would keep the whole prompt.
    if hasattr(cache, "activate_past_recording"):  # transformers newer than 5.5
        cache.activate_past_recording()
    for at, layer in enumerate(cache.layers):
        if getattr(layer, "is_sliding", False) and not hasattr(layer, "activate_past_recording"):
            window = layer.get_max_cache_shape()
            if longest >= window:
                raise DecodingError(
                    f"cache layer {at} ({type(layer).__name__}) slides over {window} tokens and this "
                    f"version of transformers cannot roll it back past that, but prompt and answer "
                    f"need {longest}: "
                    "ask for fewer new tokens, or upgrade transformers"
                )
        elif not getattr(
            layer, "is_croppable", isinstance(layer, DynamicLayer) and not hasattr(layer, "conv_states")
        ):
            raise DecodingError(
                f"cache layer {at} ({type(layer).__name__}) cannot be rolled back after rejected tokens "
                "(a recurrent state keeps no history): speculative decoding is impossible with this target; "
                "use model.generate"
            )


def tree_obstacle(cache: Any) -> str | None:
    """Why a filled cache cannot hold sibling tokens, or None where it can."""
    for at, layer in enumerate(cache.layers):
        if type(layer) is not BufferLayer:
            return f"cache layer {at} is a {type(layer).__name__}, which keeps one line of tokens only"
    return None


def drop(cache: Any, count: int) -> None:
    """Forget the newest ``count`` rows.

    Called after every verification pass, also with 0: a layer that records its past is trimmed then.
    """
    # Without recording (transformers 5.5), 0 would mean "crop to length 0".
    if count or hasattr(cache, "activate_past_recording"):
        cache.crop(-count)


def keep_path(cache: Any, start: int, rows: Sequence[int]) -> None:
    """From row ``start`` on keep only ``rows`` (counted from ``start``), in that order."""
    total = length(cache)
    if list(rows) != list(range(len(rows))):
        index: Tensor | None = None
        for layer in cache.layers:
            if not layer.is_initialized:  # a layer that shares another's keys and values
                continue
            if index is None or index.device != layer.keys.device:
                index = torch.tensor(rows, device=layer.keys.device) + start
            for states in (layer.keys, layer.values):
                # index_select copies, so overlapping source and destination rows are safe.
                states[..., start : start + len(rows), :] = states.index_select(-2, index)
    drop(cache, total - start - len(rows))


def _grown(view: Tensor, rows: int) -> Tensor:
    buffer = view.new_empty((*view.shape[:-2], rows, view.shape[-1]))
    buffer[..., : view.shape[-2], :] = view
    return buffer
