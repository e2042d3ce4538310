"""The marked places of pages, written from the committed results.

A place is ``<!-- figure: NAME -->...<!-- end -->``, with a table or a picture of `bench.report.figures` in it, or
``<!-- figure: FILE | CASE | CALL | FIELD -->...<!-- end -->`` in a line: one number, or the range of several, by a
query of `bench.report.results`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from bench.report.results import Results, text_of

ROOT = Path(__file__).parents[2]
PLACE = re.compile(r"<!-- figure: (.+?) -->(.*?)<!-- end -->", re.DOTALL)

Figures = Mapping[str, Callable[[Results, str], str]]


def written(text: str, results: Results, figures: Figures, prefix: str) -> str:
    """The page `text` with every marked place written anew; `prefix` is the path from the page to the results."""

    def place(found: re.Match[str]) -> str:
        name = found[1]
        query = [part.strip() for part in name.split(" | ")]
        if len(query) != 4 and name not in figures:
            raise ValueError(
                f"figure: expected FILE | CASE | CALL | FIELD or one of {', '.join(figures)}, got {name!r}"
            )
        made = figures[name](results, prefix) if name in figures else text_of(results.numbers(*query), query[3])
        content = f"\n\n{made}\n\n" if "\n" in made else made
        return f"<!-- figure: {name} -->{content}<!-- end -->"

    # Markdown reads a comment at the beginning of a line as a block, whose text stays as it is.
    for line in text.splitlines():
        if re.match(r" *<!-- figure: .+? -->.*\S", line) and not line.endswith(" --><!-- end -->"):
            raise ValueError(f"figure: expected a word before the marker in its line, got {line!r}")
    return PLACE.sub(place, text)


def marked_pages(root: Path = ROOT) -> Iterator[Path]:
    """The pages of the repository with marked places."""
    folders = ("multisample", "backends", "csrc", "bench", ".github")
    pages = [root / "README.md", *(page for folder in folders for page in sorted((root / folder).rglob("*.md")))]
    # The package of a clone has links to backends and csrc.
    for page in dict.fromkeys(page.resolve() for page in pages):
        if PLACE.search(page.read_text(encoding="utf-8")):
            yield page
