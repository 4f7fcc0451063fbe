"""Pages that commands write: one file, without scripts or anything from elsewhere."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Final

from ..errors import CaptureHooksError
from ..store.data.pieces import printable

_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --soft: #59636e; --line: #d8dee4;
  --panel: #f6f8fa; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #0d1117; --soft: #9198a1;
  --line: #30363d; --panel: #161b22; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 72rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; margin: 0 0 .25rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .25rem 0; }
.soft { color: var(--soft); }
"""


def document(title: str, style: str, body: str) -> str:
    """A whole page.

    Args:
        title: plain text.
        style: CSS beside what all pages share.
        body: HTML, in which everything that was read somewhere has been through `as_html`.
    """
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{as_html(title)}</title><style>{_STYLE}{style}</style></head><body>\n{body}</body></html>\n"
    )


def as_html(text: str) -> str:
    """Text for an element or an attribute; what cannot be shown stands there by its number."""
    return escape(printable(text))


def check_page(page: Path, subject: str | None, error: type[CaptureHooksError]) -> None:
    """Whether a page can be written, before what it is about is read.

    Args:
        page: where it goes; a page that is there is replaced.
        subject: what it is about: a file, a folder, or neither.
        error: what is raised.

    Raises:
        CaptureHooksError: no file can be put there, or one of the subject's own files would be lost.
    """
    if page.exists() and not page.is_file():
        raise error(f"--html {page} is a directory or a device; give the name of a file")
    if not page.parent.is_dir():
        raise error(f"--html {page}: {page.parent} is no directory")
    if subject is None or not page.exists() or not Path(subject).exists():
        return
    if page.samefile(subject):
        raise error(f"--html {page} is the data itself; give another name")
    inside = Path(subject).resolve() in page.resolve().parents
    if inside and page.suffix.lower() not in (".html", ".htm"):
        raise error(f"--html {page} is a file of {subject} itself; give another name")
