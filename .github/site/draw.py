"""Draws the two pictures of the front page, and the icon of the site: `python .github/site/draw.py`.

The pictures have no background, so that a page shows through. Light and dark differ in the colour of lines and texts.
"""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent / "pictures"
INK = {"light": "#1f2328", "dark": "#f0f6fc"}
BLUE, GREEN, RED, PURPLE, YELLOW, PINK = "#1f83d6", "#009e73", "#d55e00", "#a44fd0", "#c9a000", "#d86ab0"
CELL = 20


def rectangle(x: float, y: float, width: float, height: float, colour: str = "none", line: float = 0) -> str:
    """A rectangle with a translucent filling. `line` is the width of its outline."""
    place = f'x="{x}" y="{y}" width="{width}" height="{height}"'
    return f'<rect {place} fill="{colour}" fill-opacity="0.5" stroke="INK" stroke-width="{line}"/>'


def lines(x: float, y: float, *texts: str, anchor: str = "start", weight: str = "normal") -> str:
    """Lines of text. The first has its base line at `y`."""
    return "".join(
        f'<text x="{x}" y="{y + 21 * k}" text-anchor="{anchor}" font-weight="{weight}">{text}</text>'
        for k, text in enumerate(texts)
    )


def arrow(x: float, y: float, right: float, down: float) -> str:
    """An arrow from (x, y)."""
    return f'<path d="M{x} {y}l{right} {down}" stroke="INK" stroke-width="2" marker-end="url(#head)"/>'


def matrix(x: float, y: float, *parts: tuple[int, int, int, int, str]) -> str:
    """A matrix of 6 x 24 cells. A part has its first row and column, its rows and columns, and its colour."""
    across = "".join(f"M{x} {y + CELL * i}h480" for i in range(7))
    down = "".join(f"M{x + CELL * j} {y}v120" for j in range(25))
    filled = [
        rectangle(x + CELL * j, y + CELL * i, CELL * columns, CELL * rows, colour)
        for i, j, rows, columns, colour in parts
    ]
    names = f'<text transform="translate({x - 10} {y + 104}) rotate(-90)">dimensions</text>'
    grid = f'<path d="{across}{down}" stroke="INK" stroke-width="0.5"/>'
    return "".join((*filled, grid, lines(x, y - 8, "samples"), names))


def picture(title: str, width: int, height: int, *parts: str) -> str:
    """An SVG file."""
    head = '<marker id="head" markerWidth="9" markerHeight="8" refX="7" refY="4" orient="auto">'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' font-family="sans-serif" font-size="17" fill="INK"><title>{title}</title>'
        f'<defs>{head}<path d="M0 0L9 4L0 8z"/></marker></defs>\n{chr(10).join(parts)}\n</svg>\n'
    )


def sample_picture() -> str:
    """What a block and a thread draw: in the kernel that the project began with, and now."""
    x, first, second = 40, 70, 292
    colours = BLUE, GREEN, RED, PURPLE, YELLOW, PINK
    return picture(
        "What sample does",
        720,
        450,
        lines(0, 24, "The original kernel: a block writes one row, and a thread one element", weight="bold"),
        matrix(x, first, *((k, 0, 1, 24, colour) for k, colour in enumerate(colours))),
        rectangle(x + 4 * CELL, first, CELL, CELL, line=3.5),
        *(lines(x + 490, first + 16 + CELL * k, f"block {k}") for k in range(6)),
        lines(x + 574, first + 16, "A thread:", "reads a normal,", "one store", "of 4 bytes"),
        lines(0, second - 46, "Now: a block draws many rows; a thread draws four of their columns", weight="bold"),
        matrix(x, second, *((3 * (k // 2), 12 * (k % 2), 3, 12, colour) for k, colour in enumerate(colours[:4]))),
        *(rectangle(x + 240 * j, second + 60 * i, 240, 60, line=2) for i in (0, 1) for j in (0, 1)),
        rectangle(x + 4 * CELL, second, 4 * CELL, 60, line=3.5),
        arrow(x + 6 * CELL, second + 8, 0, 46),
        *(lines(x + 180 + 240 * (k % 2), second - 8 + 146 * (k // 2), f"block {k}") for k in range(4)),
        lines(x + 490, second + 16, "A thread:", "four normals from one", "Philox counter, one", "store of 16 bytes,",
              "then the next row"),
    )  # fmt: skip


def seed_picture() -> str:
    """How devices share a matrix."""
    x, y, middle = 40, 140, 280
    owners = ("CPU", BLUE), ("GPU 0", GREEN), ("GPU 1", RED), ("a 2nd machine", PURPLE)
    parts = []
    for k, (name, _) in enumerate(owners):
        left = x + 120 * k
        parts += [
            arrow(middle, 36, left + 60 - middle, 52),
            lines(left + 60, y - 32, name, anchor="middle"),
            rectangle(left, y, 120, 120, line=2),
            lines(left + 60, y + 142, f"{250 * k} to {250 * k + 249}", anchor="middle"),
        ]
    text = "Each draws its samples alone. Together they are", "the matrix of one call, to the last bit."
    return picture(
        "How one seed splits",
        560,
        340,
        lines(middle, 24, "seed = 7", anchor="middle", weight="bold"),
        matrix(x, y, *((0, 6 * k, 6, 6, colour) for k, (_, colour) in enumerate(owners))),
        *parts,
        lines(middle, y + 174, *text, anchor="middle"),
    )


def drawings() -> dict[str, str]:
    """The files of the folder, by name."""
    made = {"sample": sample_picture(), "seed": seed_picture()}
    files = {
        f"{name}-{theme}.svg": text.replace("INK", ink) for name, text in made.items() for theme, ink in INK.items()
    }
    icon = "".join(
        f'<rect x="{16 * (k % 4)}" y="{16 * (k // 4)}" width="15" height="15" rx="3" fill="{colour}"/>'
        for k, colour in enumerate(4 * [BLUE] + 4 * [GREEN] + 4 * [RED] + 4 * [PURPLE])
    )
    return {**files, "icon.svg": f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 63 63">{icon}</svg>\n'}


if __name__ == "__main__":
    for name, text in drawings().items():
        (HERE / name).write_text(text, encoding="utf-8")
