"""Reading data sets: conversations, plain text or token ids, as token sequences with a loss mask."""

from .examples import Example, Examples, TooLong, read_examples
from .vision import Media, Vision

__all__ = ["Example", "Examples", "Media", "TooLong", "Vision", "read_examples"]
