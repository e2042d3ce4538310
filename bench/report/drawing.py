"""How the pictures of the report look, so that they can be read in print, in light and in dark, by everybody.

Lines differ by more than their colour. Our backends are thick, solid and coloured (with the colours of Okabe and Ito,
which colour-blind readers can distinguish); peers are thin, dashed and grey with hollow markers. Names stand at the
lines' ends, in place of a legend.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import Formatter, FuncFormatter, LogLocator, NullLocator

from bench.report.entries import Entry, Group, Quartiles

__all__ = [
    "LABELS", "MICROSECONDS", "PLAIN", "STYLE", "THEMES", "Line", "Theme", "canvas", "colour_of", "draw_lines",
    "footnote", "heading", "label", "linear_x", "lines_of", "log_x", "log_y", "reference",
]  # fmt: skip

FONT_SIZE = 9.5
SMALL = 8.5
SAME_SIZE = 1.05  # Outputs whose sizes differ by less are one point of a line.

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # Comes with Matplotlib, so that the pictures are the same everywhere.
    "font.size": FONT_SIZE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "multisample",
}


@dataclass(frozen=True)
class Theme:
    """Colours on one background."""

    name: str
    paper: str
    ink: str
    faint: str
    peer: str
    plain: str
    """Of a backend that has no colour of its own here."""
    ours: dict[str, str]


THEMES = (
    Theme(
        "light", paper="#ffffff", ink="#1f2328", faint="#d1d9e0", peer="#656d76", plain="#8a6d00",
        ours={"torch_ext": "#0072b2", "cupy": "#c85000", "numba": "#008560", "cpu": "#aa3377"},
    ),
    Theme(
        "dark", paper="#0d1117", ink="#f0f6fc", faint="#30363d", peer="#8b949e", plain="#f0e442",
        ours={"torch_ext": "#56b4e9", "cupy": "#f28e2b", "numba": "#2bc99b", "cpu": "#ee8fc4"},
    ),
)  # fmt: skip

LABELS = {
    "original_kernel": "original kernel",
    "torch_eager": "torch eager",
    "torch_compile": "torch.compile",
    "torch_normal": "torch.normal",
    "normal_rsample": "Normal.rsample",
    "cupy_random": "CuPy random",
    "cupy_generator": "CuPy Generator",
    "curand_host": "cuRAND host API",
    "curand_host_dynamic": "cuRAND dynamic",
    "jax": "JAX",
    "jax_rbg": "JAX rbg",
    "numpy": "NumPy",
    "numpy_bare": "NumPy z",
    "torch_randn": "torch.randn",
}
MARKERS = {
    "torch_ext": "o", "cupy": "s", "numba": "D", "cpu": "P",
    "original_kernel": "*", "torch_eager": "^", "torch_compile": "v", "torch_normal": "<", "normal_rsample": ">",
    "cupy_random": "s", "cupy_generator": "P", "curand_host": "D", "curand_host_dynamic": "d", "jax": "h",
    "jax_rbg": "H", "numpy": "X", "numpy_bare": "x", "torch_randn": "p",
}  # fmt: skip
EMPHASISED = ("original_kernel", "torch_compile", "numpy")  # The peers that our speed is most often held against.


def label(entry: Entry) -> str:
    """The name that a reader knows a contender by, with a star where it does less than the others."""
    return LABELS.get(entry.contender, entry.contender) + ("*" if entry.lacks else "")


def colour_of(entry: Entry, theme: Theme) -> str:
    """Ours each its own, and two tones for peers."""
    if entry.ours:
        return theme.ours.get(entry.contender, theme.plain)
    return theme.ink if entry.contender in EMPHASISED else theme.peer


# --- Lines --------------------------------------------------------------------------------------------------------


class Point(NamedTuple):
    """A measured value; a line joins those of the same part."""

    x: float
    y: Quartiles
    part: int


@dataclass(frozen=True)
class Line:
    """The measurements of one contender."""

    entry: Entry
    points: tuple[Point, ...]

    @property
    def medians(self) -> list[tuple[float, float]]:
        return [(point.x, point.y.median) for point in self.points]

    @property
    def parts(self) -> list[list[tuple[float, float]]]:
        """What to join, through the median where a size was measured in several shapes; the longest part last."""
        parts: dict[int, list[list[Point]]] = {}
        for point in self.points:
            sizes = parts.setdefault(point.part, [])
            if sizes and point.x < SAME_SIZE * sizes[-1][0].x:
                sizes[-1].append(point)
            else:
                sizes.append([point])
        joined = [
            [(size[0].x, statistics.median(point.y.median for point in size)) for size in sizes]
            for sizes in parts.values()
        ]
        return sorted(joined, key=lambda part: (len(part), part[-1][0]))

    @property
    def end(self) -> tuple[float, float]:
        """Where the longest part ends: the place that the name belongs to."""
        return self.parts[-1][-1]


def lines_of(
    groups: Iterable[Group],
    x: Callable[[Entry], float],
    y: Callable[[Entry, Group], Quartiles | None],
    part: Callable[[Entry], int] = lambda _: 0,
) -> list[Line]:
    """A line for each contender over the groups in which it has a value; peers first, so that ours lie above them."""
    points: dict[str, list[Point]] = {}
    first: dict[str, Entry] = {}
    for group in groups:
        for entry in group.entries:
            value = y(entry, group)
            if value is not None:
                first.setdefault(entry.contender, entry)
                points.setdefault(entry.contender, []).append(Point(x(entry), value, part(entry)))
    lines = [Line(first[name], tuple(sorted(points[name]))) for name in points]
    return sorted(lines, key=lambda line: line.entry.ours)


def draw_lines(
    axes: Axes, lines: Sequence[Line], theme: Theme, text: Callable[[Line], str], *, band: bool = False
) -> None:
    """Draw `lines`, `text` at their ends, when the axes' scales and limits are set; with quartiles if `band`."""
    for line in lines:
        ours, colour = line.entry.ours, colour_of(line.entry, theme)
        for part in line.parts:
            axes.plot(
                *zip(*part, strict=True), color=colour, zorder=4 if ours else 3, linewidth=2.2 if ours else 1.1,
                linestyle="-" if ours else (0, (4, 2)),
            )  # fmt: skip
        axes.plot(
            *zip(*line.medians, strict=True), color=colour, zorder=4 if ours else 3, linestyle="none",
            marker=MARKERS.get(line.entry.contender, "o"), markersize=5 if ours else 4.5, markeredgewidth=1,
            markerfacecolor=colour if ours else theme.paper, clip_on=False,
        )  # fmt: skip
        if band:
            x = [point.x for point in line.points]
            low, high = [point.y.low for point in line.points], [point.y.high for point in line.points]
            axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0, zorder=2)
    _name_ends(axes, lines, theme, text)


def _name_ends(axes: Axes, lines: Sequence[Line], theme: Theme, text: Callable[[Line], str]) -> None:
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = [to_axes.transform(line.end) for line in lines]
    gap = 1.3 * FONT_SIZE / 72 * axes.figure.dpi / axes.bbox.height
    for line, (x, y), place in zip(lines, ends, spread([y for _, y in ends], gap), strict=True):
        colour = colour_of(line.entry, theme)
        axes.annotate(
            text(line), xy=(x + 0.008, y), xytext=(1.035, place), xycoords="axes fraction",
            textcoords="axes fraction", va="center", ha="left", color=colour, annotation_clip=False,
            fontweight="bold" if line.entry.ours else "normal",
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 0,
                        "alpha": 0.6, "relpos": (0, 0.5)},
        )  # fmt: skip


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """The positions nearest to those `wanted` that are at least `gap` apart, in the same order."""
    order = sorted(range(len(wanted)), key=lambda k: wanted[k])
    clusters: list[tuple[float, int]] = []  # Centre, and how many stand around it
    for k in order:
        centre, count = wanted[k], 1
        while clusters and centre - clusters[-1][0] < gap * (count + clusters[-1][1]) / 2:
            before, others = clusters.pop()
            centre, count = (before * others + centre * count) / (others + count), others + count
        clusters.append((centre, count))
    places = [centre + gap * (k - (count - 1) / 2) for centre, count in clusters for k in range(count)]
    return [place for _, place in sorted(zip(order, places, strict=True))]


# --- What is around them ------------------------------------------------------------------------------------------


PLAIN = FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:g}")
MICROSECONDS = FuncFormatter(lambda value, _: f"{value * 1e6:,.4g} us")


def canvas(theme: Theme, height: float, title: str, subtitle: str, *, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure of `rows` axes over one another that share x, with room for names on the right."""
    figure = Figure(figsize=(8.6, height), facecolor=theme.paper)
    figure.subplots_adjust(left=0.085, right=0.765, top=1 - 0.95 / height, bottom=0.68 / height, hspace=0.2)
    figure.text(0.02, 1 - 0.13 / height, title, color=theme.ink, fontsize=12.5, fontweight="bold", va="top")
    figure.text(0.02, 1 - 0.39 / height, subtitle, color=theme.peer, va="top")
    all_axes = list(figure.subplots(rows, sharex=True, squeeze=False)[:, 0])
    for axes in all_axes:
        axes.set_facecolor(theme.paper)
        axes.tick_params(colors=theme.ink, which="both")
        axes.spines[:].set_color(theme.faint)
        axes.grid(color=theme.faint, linewidth=0.6)
        axes.set_axisbelow(True)
    return figure, all_axes


def heading(axes: Axes, theme: Theme, text: str) -> None:
    """What the vertical axis is, above it, where it can be read without turning the head."""
    axes.set_title(text, loc="left", color=theme.ink, fontsize=FONT_SIZE, pad=6)


def footnote(figure: Figure, theme: Theme, entries: Iterable[Entry]) -> None:
    """What the stars at names mean."""
    lacks = dict.fromkeys(entry.lacks for entry in entries if entry.lacks)
    if lacks:
        figure.text(0.98, 0.012, f"* {'; '.join(lacks)}", color=theme.peer, fontsize=SMALL, ha="right", va="bottom")


def reference(axes: Axes, theme: Theme, y: float, text: str, *, below: bool = False) -> None:
    """A dotted line at `y` that says what it is."""
    axes.axhline(y, color=theme.ink, linewidth=1, linestyle=":", zorder=2)
    axes.annotate(
        text, (0.01, y), (0, -4 if below else 4), xycoords=axes.get_yaxis_transform(), textcoords="offset points",
        va="top" if below else "bottom", color=theme.ink, fontsize=SMALL, zorder=5,
        bbox={"facecolor": theme.paper, "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
    )  # fmt: skip


def linear_x(axes: Axes, theme: Theme, text: str, lines: Sequence[Line], formatter: Formatter) -> None:
    """A horizontal axis from 0 named `text`, for `lines`."""
    axes.set_xlim(0, 1.02 * max(x for line in lines for x, _ in line.medians))
    axes.xaxis.set_major_formatter(formatter)
    axes.set_xlabel(text, color=theme.ink)


def log_x(axes: Axes, theme: Theme, text: str, lines: Sequence[Line], formatter: Formatter, subs: Sequence[float]
          ) -> None:  # fmt: skip
    """A logarithmic horizontal axis named `text`, for `lines`, with ticks at powers of ten times `subs`."""
    values = [x for line in lines for x, _ in line.medians]
    axes.set_xscale("log")
    axes.set_xlim(min(values) / 1.08, max(values) * 1.08)
    axes.xaxis.set_major_locator(LogLocator(subs=subs, numticks=20))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(formatter)
    axes.set_xlabel(text, color=theme.ink)


def log_y(axes: Axes, lines: Sequence[Line], formatter: Formatter, *others: float) -> None:
    """A logarithmic vertical axis for `lines` and whatever values `others` are to be seen."""
    values = [*others, *(y for line in lines for _, y in line.medians)]
    subs = (1, 2, 5) if max(values) > 20 * min(values) else (1, 1.5, 2, 3, 4, 6, 8)
    axes.set_yscale("log")
    axes.set_ylim(min(values) / 1.25, max(values) * 1.25)
    axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=20))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(formatter)
