"""Reading data sets: conversations, plain text or token ids, as token sequences with a loss mask."""

from .encoding import RowEncoder, Turns
from .examples import BadRowPolicy, Example, Examples, TooLong, read_examples
from .records import read_rows
from .rows import Row, RowError
from .template import TemplateSettings, read_template
from .vision import Media, Vision

__all__ = [
    "BadRowPolicy",
    "Example",
    "Examples",
    "Media",
    "Row",
    "RowEncoder",
    "RowError",
    "TemplateSettings",
    "TooLong",
    "Turns",
    "Vision",
    "read_examples",
    "read_rows",
    "read_template",
]
