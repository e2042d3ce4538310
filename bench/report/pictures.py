"""The pictures of the report. Each answers one question, and every number in it comes from the results.

The light and the dark variant of a picture differ in Matplotlib's settings only: the colours of contenders can be read
on both backgrounds. Text stays text, so that the files are small.
"""

from __future__ import annotations

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

from bench.report.entries import CPU_REFERENCE, Entry, Group, Run

STYLE: dict[str, Any] = {
    "font.sans-serif": ["DejaVu Sans"],  # Comes with Matplotlib, and is wide: other fonts of the reader fit too.
    "font.size": 11, "legend.fontsize": 10.5, "legend.handlelength": 3,
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "legend.frameon": False,
    "svg.fonttype": "none", "svg.hashsalt": "multisample", "text.parse_math": False,
}  # fmt: skip


def _theme(paper: str, ink: str, faint: str) -> dict[str, Any]:
    colours = {"savefig.facecolor": paper, "axes.facecolor": paper, "axes.edgecolor": faint, "grid.color": faint}
    return colours | dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), ink)


THEMES = {"light": _theme("#ffffff", "#1f2328", "#c8d1da"), "dark": _theme("#0d1117", "#f0f6fc", "#3d444d")}


class Look(NamedTuple):
    """How a contender appears in pictures."""

    name: str
    colour: str = "#7d8590"
    marker: str = "o"
    compared: bool = False
    """Whether pictures show it: few enough contenders to tell apart."""


OURS = "multisample for "
LOOKS = {
    "torch_ext": Look(OURS + "PyTorch", "#1f83d6", "o", True),
    "cupy": Look(OURS + "CuPy", "#1f83d6", "s"),
    "numba": Look(OURS + "Numba", "#1f83d6", "D"),
    "cpu": Look(OURS + "NumPy", "#8c6be0", "s", True),
    "original_kernel": Look("hand-written cuRAND kernel", "#7d8590", "*", True),
    "torch_compile": Look("PyTorch: torch.compile of mu + sigma * randn", "#d55e00", "v", True),
    "torch_eager": Look("PyTorch: mu + sigma * randn", "#b07d00", "^", True),
    "normal_rsample": Look("PyTorch: Normal(mu, sigma).rsample"),
    "torch_randn": Look("PyTorch: randn", "#7d8590", "p", True),
    "cupy_random": Look("CuPy: RandomState.normal"),
    "cupy_generator": Look("CuPy: mu + sigma * standard_normal", "#c2569a", "P", True),
    "curand_host": Look("cuRAND, default order"),
    "curand_host_dynamic": Look("cuRAND", "#7d8590", "d", True),
    "curanddx": Look("cuRANDDx: a fused kernel", "#7b5bd6", "<", True),
    "curanddx_fast_math": Look("cuRANDDx: a fused kernel, --use_fast_math", "#7b5bd6", ">", True),
    "raft_table": Look("RAFT: normalTable", "#4d5bce", "H", True),
    "raft_table_philox": Look("RAFT: normalTable, Philox"),
    "jax": Look("JAX: jit of mu + sigma * normal", "#009e73", "h", True),
    "jax_rbg": Look("JAX, rbg generator: jit of mu + sigma * normal"),
    "triton_randn": Look("Triton: a kernel with tl.randn", "#e0a100", "8", True),
    "numba_xoroshiro": Look("numba-cuda: a kernel with xoroshiro128p", "#9aa03c", "X"),
    "torch_func_random": Look("PyTorch: torch.func._random"),
    "mkl": Look("oneMKL: vsRngGaussian", "#4d9221", "P", True),
    "numpy": Look("NumPy: mu + sigma * standard_normal", "#d55e00", "X", True),
    "numpy_bare": Look("NumPy: standard_normal"),
}
SUITES = "throughput", "original", "cpu"  # Suites whose shapes are compared by size.
HOST_BYTES = 32_000_000  # Larger matrices may keep the host waiting for the GPU.
MODES = {"portable": "portable numbers", "fast_math": "fast_math"}


def _look(entry: Entry) -> Look:
    return LOOKS.get(entry.contender, Look(entry.contender, compared=entry.ours))


def _label(entry: Entry) -> str:
    """What computes, and what it computes, in words."""
    name = _look(entry).name
    if entry.ours:
        return f"{name}, {MODES.get(entry.mode, entry.mode)}"
    return f"{name.partition(':')[0]}: only z (no mu, no sigma)" if entry.lacks else name


KINDS = {"independent": "each element has its own noise", "shared": "all dimensions share one row of noise"}


def _of_kind(run: Run, noise: str) -> list[Group]:
    """The groups of float32 in layout "dn" that the pictures compare. They may differ in shape and mode."""
    kind = "float32", noise, "dn"
    return [
        group for group in run.groups
        if group.suite in SUITES and (group.entries[0].dtype, group.entries[0].noise, group.entries[0].layout) == kind
    ]  # fmt: skip


def _compared(groups: Iterable[Group]) -> list[Entry]:
    return [entry for group in groups for entry in group.entries if _look(entry).compared]


def _by_shape(groups: Iterable[Group]) -> dict[tuple[int, int], dict[str, Entry]]:
    """The compared contenders by (d, n) and `_label`. Peers are in both modes' groups: their first entry counts."""
    shapes: dict[tuple[int, int], dict[str, Entry]] = {}
    for entry in _compared(groups):
        shapes.setdefault((entry.d, entry.n), {}).setdefault(_label(entry), entry)
    return shapes


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
        for picture in (_largest, _memory, _calls, _over_numpy):
            found += picture(run, noise, _of_kind(run, noise))
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
    """A time of three digits and its unit."""
    return SECONDS(float(f"{seconds:.3g}"))


def _bars(rows: Sequence[tuple[Entry, float]], base: float, memset: float | None, figure: Figure, axes: Axes) -> None:
    """Seconds by contender, each beside its ratio to `base`; a vertical line at the time of cudaMemsetAsync."""
    names = [textwrap.fill(_label(entry), 30) for entry, _ in rows]
    bars = axes.barh(names, [seconds for _, seconds in rows], color=[_look(entry).colour for entry, _ in rows])
    for bar, (entry, _) in zip(bars, rows, strict=True):
        bar.set_alpha(1 if entry.ours else 0.7)
    texts = [_time_text(seconds) + ("" if seconds == base else f" ({seconds / base:.1f}x)") for _, seconds in rows]
    axes.bar_label(bars, texts, padding=5)
    axes.grid(axis="x", linewidth=0.6)
    axes.invert_yaxis()
    axes.margins(x=0.4)
    axes.locator_params(axis="x", nbins=5)
    axes.xaxis.set_major_formatter(SECONDS)
    axes.tick_params(axis="y", length=0)
    if memset is not None:
        axes.axvline(memset, color=mpl.rcParams["text.color"], linestyle=":")
        text = f"Dotted line: cudaMemsetAsync writes zeros to the same memory in {_time_text(memset)}."
        figure.supxlabel(text, x=0.01, ha="left", fontsize=10.5)


def _row_texts(rows: Sequence[tuple[Entry, float]]) -> str:
    return "; ".join(f"{_label(entry)} {_time_text(seconds)}" for entry, seconds in rows)


def _largest(run: Run, noise: str, groups: Sequence[Group]) -> Iterator[Picture]:
    shapes = _by_shape(groups)
    # Of the largest shapes the squarest, and of equally square ones that with more dimensions.
    shape = max(shapes, key=lambda s: (_octave(s[0] * s[1]), -max(s) / min(s), s[0]), default=(0, 0))
    rows = sorted(((entry, entry.seconds) for entry in shapes.get(shape, {}).values()), key=lambda row: row[1])
    base = next((entry for entry, _ in rows if entry.ours and entry.mode == "portable"), None)
    if len(shapes) > 1 and base is not None and not all(entry.ours for entry, _ in rows):
        matrix = f"a matrix of {shape[0]:,} x {shape[1]:,}"
        what = "a call" if base.device is None else "the kernels"
        yield Picture(
            f"largest-float32-{noise}",
            f"Time to draw {matrix}",
            f"{run.device}, time of {what}; float32, {KINDS[noise]}; {base.bytes / 1e6:,.0f} MB; x: times as long as "
            f"{_time_text(base.seconds)}",
            f"Time to draw {matrix} on {run.device}: {_row_texts(rows)}",
            1.6 + 0.44 * len(rows),
            partial(_bars, rows, base.seconds, base.memset_s),
        )


def _host(run: Run) -> Iterator[Picture]:
    curves = _curves(
        (entry, 0, entry.host_s) for group in run.groups if group.suite in SUITES for entry in group.entries
        if entry.mode == "portable" and entry.bytes <= HOST_BYTES
    )  # fmt: skip
    rows = [(curve.entry, curve.y[0]) for curve in reversed(curves)]
    ours = [seconds for entry, seconds in rows if entry.ours]
    if ours:
        limit = EngFormatter("B")(HOST_BYTES)
        yield Picture(
            "host",
            "Time that a call keeps the host busy",
            f"{run.machine.get('cpu')}; median of matrices up to {limit}; x: times as long as {_time_text(ours[0])}",
            f"Time that a call keeps the host busy: {_row_texts(rows)}",
            1.6 + 0.44 * len(rows),
            partial(_bars, rows, ours[0], None),
        )


class Curve(NamedTuple):
    """The values of one contender, by x."""

    entry: Entry
    x: list[float]
    y: list[float]


def _curves(points: Iterable[tuple[Entry, float, float | None]]) -> list[Curve]:
    """A curve for each contender through the median at each x; the one with the highest right end first."""
    found: dict[str, tuple[Entry, dict[float, list[float]]]] = {}
    for entry, x, y in points:
        if y is not None:
            found.setdefault(_label(entry), (entry, {}))[1].setdefault(x, []).append(y)
    curves = [
        Curve(entry, sorted(values), [statistics.median(values[x]) for x in sorted(values)])
        for entry, values in found.values()
    ]
    return sorted(curves, key=lambda curve: -curve.y[-1])


def _octave(value: float) -> float:
    """`value` rounded to a power of two, so that shapes of about one size are one point."""
    return float(2 ** round(math.log2(value)))


Scale = tuple[str, Formatter, tuple[int, ...]]  # The axis's name, its numbers, and the ticks' multiples of 10, 100, ...
COUNT = FuncFormatter(lambda value, _: f"{value:,g}" if value < 1e6 else f"{value / 1e6:,g} million")


def _lines(x: Scale, y: Scale, curves: Sequence[Curve], figure: Figure, axes: Axes) -> None:
    """`curves`, with a legend below that lists them in order. An axis without multiples for its ticks is linear."""
    for curve in curves:
        look, ours = _look(curve.entry), curve.entry.ours
        style: dict[str, Any] = {"color": look.colour, "marker": look.marker, "lw": 2.6 if ours else 1.3}
        if ours and curve.entry.mode == "fast_math":
            style |= {"linestyle": "--", "markerfacecolor": "none"}
        axes.plot(curve.x, curve.y, label=_label(curve.entry), zorder=3 if ours else 2, **style)
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


def _line_picture(
    name: str, title: str, subtitle: str, curves: Sequence[Curve], scales: tuple[Scale, Scale], text: Callable[..., str]
) -> Iterator[Picture]:
    if any(curve.entry.ours and curve.entry.mode == "portable" and len(curve.x) > 1 for curve in curves):
        ends = "; ".join(f"{_label(curve.entry)} {text(curve.y[0])} to {text(curve.y[-1])}" for curve in curves)
        alt = f"{title} ({scales[1][0]}), by {scales[0][0]}: {ends}"
        yield Picture(name, title, subtitle, alt, 4.5 + 0.23 * len(curves), partial(_lines, *scales, curves))


def _memory(run: Run, noise: str, groups: Sequence[Group]) -> Iterator[Picture]:
    curves = _curves(
        (entry, _octave(entry.bytes), entry.fraction and entry.fraction.median) for entry in _compared(groups)
    )
    yield from _line_picture(
        f"memory-float32-{noise}",
        "How close to the speed of the GPU's memory",
        f"{run.device}; float32, {KINDS[noise]}; median of the shapes of about one size; higher is better",
        curves,
        (("size of the matrix", EngFormatter("B"), (1,)), ("speed, 100 % is cudaMemsetAsync", PercentFormatter(1), ())),
        lambda y: f"{y:.0%}",
    )


def _calls(run: Run, noise: str, groups: Sequence[Group]) -> Iterator[Picture]:
    entries = _compared(group for group in groups if group.suite == "original")
    yield from _line_picture(
        f"calls-float32-{noise}",
        f"Time of a call that draws {entries[0].n:,} samples of d dimensions" if entries else "",
        f"{run.device}; float32, {KINDS[noise]}; many calls in a row, the time of all / their number; lower is better",
        _curves((entry, entry.d, entry.pipelined_s) for entry in entries),
        (("dimensions d", COUNT, (1, 2, 5)), ("time of a call", SECONDS, (1, 2, 5))),
        _time_text,
    )


def _over_numpy(run: Run, noise: str, groups: Sequence[Group]) -> Iterator[Picture]:
    curves = _curves(
        (entry, _octave(entry.d * entry.n), base.call.median / entry.call.median)
        for group in groups if (base := group.find(*CPU_REFERENCE)) for entry in _compared([group])
    )  # fmt: skip
    yield from _line_picture(
        f"cpu-float32-{noise}",
        "How many times as fast as NumPy",
        f"{run.machine.get('threads')} threads of {run.device}; float32, {KINDS[noise]}; median of the shapes of "
        "about one size; higher is better",
        curves,
        (("numbers in the matrix", COUNT, (1,)), ("times as fast as NumPy", COUNT, (1, 2, 5))),
        lambda y: f"{y:.1f}",
    )
