"""The EAGLE-3 / EAGLE-3.1 draft head."""

from .config import Eagle3Config
from .head import Eagle3Head
from .vocabulary import DraftVocabulary, choose_draft_vocabulary

__all__ = ["DraftVocabulary", "Eagle3Config", "Eagle3Head", "choose_draft_vocabulary"]
