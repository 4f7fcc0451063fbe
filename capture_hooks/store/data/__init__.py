"""Reading data sets: conversations, plain text or token ids, as token sequences with a loss mask."""

from .encoding import RowEncoder, Turns
from .examples import BadRowPolicy, Example, Examples, TooLong, read_examples
from .images import Media, Vision
from .records import Row, RowError, read_rows
from .template import TemplateSettings, read_template

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
