"""A head and its target -> tokens: embedded, lossless speculative decoding."""

from importlib.util import find_spec

from ..errors import DecodingError

if find_spec("transformers") is None:
    raise DecodingError("decoding needs transformers: pip install 'capture-hooks[train]'")

from ..heads.drafting import TreeShape
from .decoder import SpeculativeDecoder
from .evaluation import evaluate, offline_acceptance
from .packed import PackedLinears
from .prompts import Prompt, chat_prompt, read_prompts, text_prompt

__all__ = [
    "PackedLinears",
    "Prompt",
    "SpeculativeDecoder",
    "TreeShape",
    "chat_prompt",
    "evaluate",
    "offline_acceptance",
    "read_prompts",
    "text_prompt",
]
