"""The pictures of the report. Each answers one question, and every number in it comes from the results.

The light and the dark variant of a picture differ in Matplotlib's settings only: the colours of contenders can be read
on both backgrounds. Text stays text, so that the files are small.
"""

import io
import math
import statistics
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, Formatter, FuncFormatter, LogLocator, NullLocator, PercentFormatter

from bench.report.results import Row, Run

STYLE: dict[str, Any] = {
    "font.sans-serif": ["DejaVu Sans"],  # Matplotlib ships it. A reader's fallback font is narrower, so texts fit.
    "font.size": 11, "legend.fontsize": 10.5, "legend.handlelength": 3,
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "legend.frameon": False,
    "svg.fonttype": "none", "svg.hashsalt": "multisample", "text.parse_math": False,
}  # fmt: skip
THEMES: dict[str, dict[str, Any]] = {
    # The background of the page shows through. Sites differ in it.
    name: {"savefig.facecolor": "none", "axes.facecolor": "none", "axes.edgecolor": faint, "grid.color": faint}
    | dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), ink)
    for name, ink, faint in (("light", "#1f2328", "#c8d1da"), ("dark", "#f0f6fc", "#4a525c"))
}


class Look(NamedTuple):
    name: str
    colour: str = "#7d8590"
    marker: str = ""  # Contenders without a marker are in no picture.


OURS = "multisample for "
LOOKS = {
    "torch_ext": Look(OURS + "PyTorch", "#1f83d6", "o"),
    "cpu": Look(OURS + "NumPy", "#a44fd0", "s"),
    "curanddx": Look("cuRANDDx: a fused kernel", "#8a8f98", "<"),
    "original_kernel": Look("the original kernel", "#b07d4f", "*"),
    "mkl": Look("oneMKL: vsRngGaussian", "#8a8f98", "D"),
    "torch_compile": Look("PyTorch: torch.compile of mu + sigma * randn", "#d55e00", "v"),
    "numpy": Look("NumPy: mu + sigma * standard_normal", "#d55e00", "X"),
    "jax": Look("JAX: jit of mu + sigma * normal", "#009e73", "h"),
    "cupy_generator": Look("CuPy: mu + sigma * standard_normal", "#d86ab0", "P"),
    "torch_eager": Look("PyTorch: mu + sigma * randn", "#c9a000", "^"),
    "cupy": Look(OURS + "CuPy"),
    "numba": Look(OURS + "Numba"),
}
"""Those that pictures show, the most important first. A picture has the first `MOST_SERIES` of its results."""
MOST_SERIES = 6
SUITES = "throughput", "original", "cpu"  # Suites whose shapes are compared by size.
HOST_BYTES = 32_000_000  # Larger matrices may keep the host waiting for the GPU.
MODES = {"portable": "portable numbers", "fast_math": "fast_math"}


def _look(row: Row) -> Look:
    return LOOKS.get(row["call"], Look(row["call"], marker="o" if row["ours"] else ""))


def _label(row: Row) -> str:
    """The label of a row: the contender's name, and its mode or what it draws."""
    name = _look(row).name
    if row["ours"]:
        return f"{name}, {MODES.get(row['mode'], row['mode'])}"
    return f"{name.partition(':')[0]}: only z (no mu, no sigma)" if row["lacks"] else name


KINDS = {"independent": "each element has its own noise", "shared": "all dimensions share one row of noise"}


def _compared(run: Run, noise: str) -> list[Row]:
    """The rows of float32 that pictures compare. They may differ in shape and mode."""
    rows = (row for row in run.rows if row.get("suite") in SUITES)
    return _shown(row for row in rows if (row["dtype"], row["noise"]) == ("float32", noise))


def _shown(rows: Iterable[Row]) -> list[Row]:
    ranks, shown = list(LOOKS), [row for row in rows if _look(row).marker]
    labels = {_label(row): ranks.index(row["call"]) if row["call"] in ranks else -1 for row in shown}
    most = sorted(labels, key=labels.__getitem__)[:MOST_SERIES]
    return [row for row in shown if _label(row) in most]


class Picture(NamedTuple):
    """A picture, and what it shows for readers who do not see it."""

    name: str
    title: str
    subtitle: str
    alt: str
    height: float
    draw: Callable[[Figure, Axes], None]


def pictures(run: Run) -> list[Picture]:
    """Every picture that the results of `run` suffice for. The first three show the most."""
    found: list[Picture] = []
    for noise in KINDS:
        rows = _compared(run, noise)
        found += [*_largest(run, noise, rows), *_by_size(run, noise, rows)]
    return [*found[:3], *_host(run), *found[3:]]


def svg(picture: Picture, theme: str) -> bytes:
    """The picture as an SVG file, the same bytes each time."""
    buffer = io.BytesIO()
    with mpl.rc_context({**STYLE, **THEMES[theme]}):
        figure = Figure(figsize=(6.6, picture.height), layout="constrained")
        lines = textwrap.wrap(picture.subtitle, 76)
        # Constrained layout reserves room for the title only. So empty lines of the title make room for the subtitle.
        figure.suptitle(picture.title + "\n" * len(lines), x=0.01, ha="left", fontsize=14, fontweight="bold")
        figure.text(0.01, 1 - 0.36 / picture.height, "\n".join(lines), va="top")
        picture.draw(figure, figure.subplots())
        metadata = {**dict.fromkeys(("Creator", "Date", "Format", "Type")), "Title": picture.title}
        figure.savefig(buffer, format="svg", metadata=metadata)
    return buffer.getvalue()


SECONDS = EngFormatter("s")


def _time_text(seconds: float) -> str:
    return SECONDS(float(f"{seconds:.3g}"))


def _bars(bars: Sequence[tuple[Row, float]], base: float, memset: float | None, figure: Figure, axes: Axes) -> None:
    """Seconds by contender, with ratios to `base` where longer; a vertical line at the time of cudaMemsetAsync."""
    names = [textwrap.fill(_label(row), 30) for row, _ in bars]
    drawn = axes.barh(names, [seconds for _, seconds in bars], color=[_look(row).colour for row, _ in bars])
    for bar, (row, _) in zip(drawn, bars, strict=True):
        bar.set_alpha(1 if row["ours"] else 0.7)
    texts = [_time_text(s) + f", {s / base:.1f} times as long" * (s > base) for _, s in bars]
    axes.bar_label(drawn, texts, padding=5)
    axes.grid(axis="x", linewidth=0.6)
    axes.invert_yaxis()
    axes.margins(x=1.2)
    axes.locator_params(axis="x", nbins=5)
    axes.xaxis.set_major_formatter(SECONDS)
    axes.tick_params(axis="y", length=0)
    if memset is not None:
        axes.axvline(memset, color=mpl.rcParams["text.color"], linestyle=":")
        text = f"Dotted line: cudaMemsetAsync writes zeros to the same memory in {_time_text(memset)}."
        figure.supxlabel(text, x=0.01, ha="left", fontsize=10.5)


def _bar_picture(
    name: str, title: str, subtitle: str, alt: str, bars: Sequence[tuple[Row, float]], memset: float | None = None
) -> Iterator[Picture]:
    """A bar chart with ratios to our first portable bar; nothing without such a bar."""
    ours = [seconds for row, seconds in bars if row["ours"] and row["mode"] == "portable"]
    if ours:
        texts = "; ".join(f"{_label(row)} {_time_text(seconds)}" for row, seconds in bars)
        height = 1.6 + 0.44 * len(bars)
        yield Picture(name, title, subtitle, f"{alt}: {texts}", height, partial(_bars, bars, ours[0], memset))


def _largest(run: Run, noise: str, rows: Sequence[Row]) -> Iterator[Picture]:
    shapes: dict[tuple[int, int], dict[str, Row]] = {}
    for row in rows:  # Peers are in the cases of both modes: their first row counts.
        shapes.setdefault((row["d"], row["n"]), {}).setdefault(_label(row), row)
    # Take the squarest of the largest shapes, and among equals the one with the most dimensions.
    shape = max(shapes, key=lambda s: (_octave(s[0] * s[1]), -max(s) / min(s), s[0]), default=(0, 0))
    shown = sorted(shapes.get(shape, {}).values(), key=lambda row: float(row["seconds"]))
    base = next((row for row in shown if row["ours"] and row["mode"] == "portable"), None)
    if len(shapes) > 1 and base is not None and not all(row["ours"] for row in shown):
        title = f"Time to draw a matrix of {shape[0]:,} x {shape[1]:,}"
        what = "a call" if base["device_s"] is None else "the kernels"
        yield from _bar_picture(
            f"largest-float32-{noise}",
            title,
            f"{run.device}, time of {what}; float32, {KINDS[noise]}; {base['bytes'] / 1e6:,.0f} MB",
            f"{title} on {run.device}",
            [(row, row["seconds"]) for row in shown],
            base["memset_s"],
        )


def _host(run: Run) -> Iterator[Picture]:
    rows = _shown(row for row in run.rows if row.get("suite") in SUITES and row["mode"] == "portable")
    curves = _curves((row, 0, row["host_s"]) for row in rows if row["bytes"] <= HOST_BYTES)
    yield from _bar_picture(
        "host",
        title := "Time that a call keeps the host busy",
        f"{run.machine.get('cpu')}; median of matrices up to {EngFormatter('B')(HOST_BYTES)}",
        title,
        [(row, y[0]) for row, _, y in reversed(curves)],
    )


Curve = tuple[Row, list[float], list[float]]  # A row of a contender, and its x and y.


def _curves(points: Iterable[tuple[Row, float, float | None]]) -> list[Curve]:
    """A curve for each contender through the median at each x; the one with the highest right end first."""
    found: dict[str, tuple[Row, dict[float, list[float]]]] = {}
    for row, x, y in points:
        if y is not None:
            found.setdefault(_label(row), (row, {}))[1].setdefault(x, []).append(y)
    curves = [(row, xs := sorted(by_x), [statistics.median(by_x[x]) for x in xs]) for row, by_x in found.values()]
    return sorted(curves, key=lambda curve: -curve[2][-1])


def _octave(value: float) -> float:
    """`value` rounded to a power of two, so that shapes of about one size are one point."""
    return float(2 ** round(math.log2(value)))


Scale = tuple[str, Formatter, tuple[int, ...]]  # An axis's label, its number format, and its ticks within a decade.
COUNT = FuncFormatter(lambda value, _: f"{value:,g}" if value < 1e6 else f"{value / 1e6:,g} million")


def _lines(x: Scale, y: Scale, curves: Sequence[Curve], figure: Figure, axes: Axes) -> None:
    """`curves`, with a legend below that lists them in order. An axis without multiples for its ticks is linear."""
    for row, xs, ys in curves:
        look, ours = _look(row), row["ours"]
        style: dict[str, Any] = {"color": look.colour, "marker": look.marker, "lw": 2.6 if ours else 1.3}
        if ours and row["mode"] == "fast_math":
            style |= {"linestyle": "--", "markerfacecolor": "none"}
        axes.plot(xs, ys, label=_label(row), zorder=3 if ours else 2, **style)
    axes.set(xlabel=x[0], ylabel=y[0], xscale="log", yscale="log" if y[2] else "linear")
    for axis, (_, formatter, subs) in ((axes.xaxis, x), (axes.yaxis, y)):
        if subs:
            axis.set_major_locator(LogLocator(subs=subs, numticks=20))
            axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(formatter)
    axes.margins(y=0.1)
    if not y[2]:
        axes.set_ylim(0, 1.04)
    axes.grid(linewidth=0.6)
    figure.legend(loc="outside lower left")


def _by_size(run: Run, noise: str, rows: Sequence[Row]) -> Iterator[Picture]:
    original = [row for row in rows if row["suite"] == "original"]
    kind = f"{run.device}; float32, {KINDS[noise]}"
    of_one_size = "median of the shapes of about one size; higher is better"
    for name, title, subtitle, points, x, y, text in (
        (
            "memory",
            "How close to the speed of the GPU's memory",
            f"{kind}; {of_one_size}",
            [(row, _octave(row["bytes"]), row["of memset"]) for row in rows],
            ("size of the matrix", EngFormatter("B"), (1,)),
            ("speed, 100 % is cudaMemsetAsync", PercentFormatter(1), ()),
            "{:.0%}".format,
        ),
        (
            "calls",
            f"Time of a call that draws {original[0]['n'] if original else 0:,} samples of d dimensions",
            f"{kind}; many calls in a row, the time of all / their number; lower is better",
            [(row, row["d"], row["pipelined_s"]) for row in original],
            ("dimensions d", COUNT, (1, 2, 5)),
            ("time of a call", SECONDS, (1, 2, 5)),
            _time_text,
        ),
        (
            "cpu",
            "How many times as fast as NumPy",
            f"{run.machine.get('threads')} threads of {kind}; {of_one_size}",
            [(row, _octave(row["d"] * row["n"]), row["of NumPy"]) for row in rows],
            ("numbers in the matrix", COUNT, (1,)),
            ("times as fast as NumPy", COUNT, (1, 2, 5)),
            "{:.1f}".format,
        ),
    ):
        curves = _curves(points)
        if any(row["ours"] and row["mode"] == "portable" and len(xs) > 1 for row, xs, _ in curves):
            ends = "; ".join(f"{_label(row)} {text(ys[0])} to {text(ys[-1])}" for row, _, ys in curves)
            alt = f"{title} ({y[0]}), by {x[0]}: {ends}"
            height = 4.5 + 0.23 * len(curves)
            yield Picture(f"{name}-float32-{noise}", title, subtitle, alt, height, partial(_lines, x, y, curves))
