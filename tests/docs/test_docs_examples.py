"""The pages of the documentation are true: their examples run."""

import doctest
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(
    [*DOCS.glob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("plugins/*/*.md"), *ROOT.glob("examples/*/*.md")]
)


@pytest.mark.parametrize("page", ["spec", "conventions", "explain", "plugins", "testing"])
def test_examples_run(page: str) -> None:
    path = DOCS / f"{page}.md"
    # Fences end the expected output; a blank line does the same for doctest.
    text = re.sub(r"^```.*$", "", path.read_text(), flags=re.MULTILINE)
    example = doctest.DocTestParser().get_doctest(text, {}, page, str(path), 0)
    assert example.examples, f"{page}.md has no example"
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example)
    assert result.failed == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / link).exists(), f"{page.name} links to {link}, which is not there"
