"""The numbers of pages, such as "3.9 times as long": queries of the committed results, in marked places.

A place is ``<!-- figure: FILE | CASE | CALL | FIELD -->...<!-- end -->`` in a line. It has one number, or the range of
several. The place ``<!-- figure: NAME -->...<!-- end -->`` has a text, a table or a picture of
`bench.report.page_figures`.

FILE is a file of bench/results, or a name of FILES. CASE and CALL select its rows, with ``*`` for any text and ``;``
between several patterns. FIELD is a number of a row. ``FIELD over OTHER`` divides FIELD by the lowest FIELD
of the calls that match OTHER in the same case. ``best FIELD`` is the lowest FIELD of the matching calls. Fields that
end in "us" get a unit of time.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from bench.report.results import Results

ROOT = Path(__file__).parents[2]
ADDRESS = re.search(r'^Source = "(.+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
PLACE = re.compile(r"<!-- figure: (.+?) -->(.*?)<!-- end -->", re.DOTALL)


def numbers(results: Results, file: str, case: str, call: str, field: str) -> list[float]:
    """The numbers and ratios of a query. Raises ValueError if there is none."""
    field, _, other = field.partition(" over ")
    best, field = field.startswith("best "), field.removeprefix("best ")
    cases: dict[str, tuple[list[float], list[float]]] = {}
    for row in results.run(file).rows:
        if _matches(row["case"], case) and row.get(field) is not None:
            above, below = cases.setdefault(row["case"], ([], []))
            above += [row[field]] if _matches(row["call"], call) else []
            below += [row[field]] if other and _matches(row["call"], other) else []
    found = []
    for above, below in cases.values():
        if above and (below or not other):
            chosen = [min(above)] if best else above
            found += [value / min(below) if other else value for value in chosen]
    if not found:
        raise ValueError(f"figure: expected rows for {file} | {case} | {call} | {field}, got none")
    return found


def _matches(text: str, patterns: str) -> bool:
    return any(fnmatchcase(text, pattern.strip()) for pattern in patterns.split(";"))


def number_text(value: float) -> str:
    """`value` with two decimals below 2, one below 10, and none above."""
    digits = 2 if value < 1.995 else 1 if value < 9.95 else 0
    return f"{value:,.{digits}f}" if value else "0"


def time_text(us: float) -> str:
    """A time and its unit: whole from 100 on, below that with three digits."""
    value, unit = (us, "us") if us < 1e4 else (us / 1e3, "ms") if us < 1e7 else (us / 1e6, "s")
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def query_text(results: Results, file: str, case: str, call: str, field: str) -> str:
    """One number of a query, or the range of several."""
    show = time_text if field.endswith("us") and not {"over", "per"} & {*field.split()} else number_text
    low, *_, high = [show(value) for value in sorted(numbers(results, file, case, call, field))] * 2
    unit = f" {high.rpartition(' ')[2]}"
    return low if low == high else f"{low.removesuffix(unit)} to {high}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def written(text: str, results: Results, figures: Mapping[str, Callable[[Results, str], str]], prefix: str) -> str:
    """The page `text` with marked places and the address written anew; `prefix` is the path to the results."""

    def place(found: re.Match[str]) -> str:
        name = found[1]
        query = [part.strip() for part in name.split(" | ")]
        if len(query) != 4 and name not in figures:
            names = ", ".join(figures)
            raise ValueError(f"figure: expected FILE | CASE | CALL | FIELD or one of {names}, got {name!r}")
        made = figures[name](results, prefix) if name in figures else query_text(results, *query)
        content = f"\n\n{made}\n\n" if "\n" in made else made
        return f"<!-- figure: {name} -->{content}<!-- end -->"

    # Markdown reads a comment at the beginning of a line as a block, whose text stays as it is.
    for line in text.splitlines():
        if re.match(r" *<!-- figure: .+? -->.*\S", line) and not line.endswith(" --><!-- end -->"):
            raise ValueError(f"figure: expected a word before the marker in its line, got {line!r}")
    clone = f"git clone {ADDRESS[1] if ADDRESS else 'ADDRESS'}"
    return re.sub(r"^git clone \S+", clone, PLACE.sub(place, text), flags=re.MULTILINE)


def marked_pages() -> Iterator[Path]:
    """The pages of the repository with marked places."""
    folders = ("multisample", "backends", "csrc", "bench", ".github")
    pages = [ROOT / "README.md", *(page for folder in folders for page in sorted((ROOT / folder).rglob("*.md")))]
    # The package of a clone has links to backends and csrc.
    for page in dict.fromkeys(page.resolve() for page in pages):
        if PLACE.search(page.read_text(encoding="utf-8")):
            yield page
