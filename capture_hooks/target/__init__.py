"""Opening a target: its configuration, its weights, its tokenizer and processor, or its shape alone."""

from .checkpoint import checkpoint_fingerprint, final_norm_of, hollow_anatomy
from .opening import (
    context_length,
    load_config,
    load_generation_config,
    load_processor,
    load_target,
    load_tokenizer,
    load_whole_config,
    locate,
    skeleton,
)

__all__ = [
    "checkpoint_fingerprint",
    "context_length",
    "final_norm_of",
    "hollow_anatomy",
    "load_config",
    "load_generation_config",
    "load_processor",
    "load_target",
    "load_tokenizer",
    "load_whole_config",
    "locate",
    "skeleton",
]
