"""How to shrink each family's config to a few thousand parameters.  Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from transformers import PretrainedConfig

VOCAB: Final = 272  # 256 bytes, 3 special tokens, and some that the tokenizer never gives
HIDDEN: Final = 32
LAYERS: Final = 6  # the fewest for which the EAGLE-3 default layers exist

_COMMON: Final[Mapping[str, Any]] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED: Final[Mapping[str, Any]] = {"num_key_value_heads": 2}


@dataclass(frozen=True, slots=True)
class Family:
    """One row of the table: a ``model_type`` and the config fields that make it tiny."""

    model_type: str
    settings: Mapping[str, Any]
    outer: Mapping[str, Any] = field(default_factory=dict)  # multimodal: fields of the outer config
    multimodal: bool = False

    def config(self, **overrides: Any) -> PretrainedConfig:
        from transformers import AutoConfig

        text = {**self.settings, **overrides}
        if not self.multimodal:
            return AutoConfig.for_model(self.model_type, **text)
        return AutoConfig.for_model(self.model_type, text_config=text, **self.outer)


def _row(model_type: str, **settings: Any) -> Family:
    return Family(model_type, {**_COMMON, **settings})


FAMILIES: Final[dict[str, Family]] = {
    "llama": _row("llama", **_GROUPED),
    "gpt2": _row("gpt2"),
    "qwen3": _row("qwen3", **_GROUPED, head_dim=8),
    "gemma2": _row("gemma2", **_GROUPED, head_dim=8, sliding_window=8),
}
