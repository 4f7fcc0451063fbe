"""The head's KV cache, and one pass of new rows through it.

Rows are appended; going back (drafted rows that the target refused) is setting ``length`` and
overwriting, never a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from capture_hooks.errors import DecodingError

from .network import StepWeights

#: Rows times keys of one attention call; longer prompts are read in parts.
SCORES = 2**24


@dataclass(slots=True)
class DraftCache:
    """Keys and values of one sequence.

    Attributes:
        keys, values: per layer [kv_heads, max_length, head_dim].
        weights: the layers' fused matrices.
        length: rows that are valid.
    """

    keys: list[Tensor]
    values: list[Tensor]
    weights: Sequence[StepWeights]
    length: int = 0

    @property
    def max_length(self) -> int:
        return self.keys[0].shape[1]

    def reserve(self, start: int, rows: int) -> None:
        """Drop everything at or after ``start`` and check that ``rows`` more fit.

        Raises:
            DecodingError: for a gap before ``start``, or too many rows.
        """
        if start > self.length:
            raise DecodingError(
                f"eagle3: rows must be appended without a gap: the cache holds {self.length}, not {start}"
            )
        if start + rows > self.max_length:
            raise DecodingError(
                f"eagle3: {start + rows} rows do not fit a cache made for {self.max_length}; "
                "make it with a larger max_length"
            )
        self.length = start

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Store keys and values [M, kv_heads, d] after ``length`` and attend with q [M, heads, d].

        ``mask`` [M, length + M]; None means causal.  Gives [M, heads * d].  ``length`` is not advanced:
        every layer writes the same rows.
        """
        start, rows = self.length, q.shape[0]
        end = start + rows
        self.keys[layer][:, start:end] = k.transpose(0, 1)
        self.values[layer][:, start:end] = v.transpose(0, 1)
        part = max(1, SCORES // end)
        if rows <= part:
            return self._attend(layer, q, end, mask, start)
        return torch.cat(
            [
                self._attend(
                    layer,
                    q[at : at + part],
                    min(end, start + at + part) if mask is None else end,
                    None if mask is None else mask[at : at + part],
                    start + at,
                )
                for at in range(0, rows, part)
            ]
        )

    def _attend(self, layer: int, q: Tensor, end: int, mask: Tensor | None, start: int) -> Tensor:
        rows = q.shape[0]
        causal = mask is None and start == 0 and rows > 1
        if mask is None and rows > 1 and not causal:
            seen = torch.arange(start, end, device=q.device).unsqueeze(1)
            mask = torch.arange(end, device=q.device) <= seen
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            self.keys[layer][:, :end].unsqueeze(0),
            self.values[layer][:, :end].unsqueeze(0),
            attn_mask=mask,
            is_causal=causal,
            enable_gqa=True,
        )
        return out.squeeze(0).transpose(0, 1).reshape(rows, -1)
