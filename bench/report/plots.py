"""The pictures of the report: each answers one question, and is drawn from the results alone."""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from bench.report.drawing import (
    LABELS,
    MICROSECONDS,
    PLAIN,
    STYLE,
    Line,
    Theme,
    canvas,
    colour_of,
    draw_lines,
    footnote,
    heading,
    label,
    linear_x,
    lines_of,
    log_x,
    log_y,
    reference,
)
from bench.report.entries import CPU_REFERENCE, Entry, Group, Quartiles, Run

__all__ = ["PUBLISHED", "Plot", "baseline_of", "kinds", "measures", "plots", "speedups", "svg"]


class Published(NamedTuple):
    """A figure that somebody else published, to compare ours with."""

    speedup: float
    gpu: str
    source: str


# How many times as fast as torch.compile the original kernel was, on average over d, with n = 1024 and shared noise.
PUBLISHED = Published(3.79, "RTX 3070", "the blog post in which the original kernel's author presented it")

HOST_BYTES = 32 * 10**6  # Of outputs that a device fills in the time of a call: larger ones may keep the host waiting.

BASELINES = ("torch_compile", "torch_eager")  # What speedups are over: the first of these that was measured.


@dataclass(frozen=True)
class Plot:
    """A picture that can be drawn in any theme."""

    name: str
    title: str
    caption: str
    """What is to be seen in it, in words and figures, for those too who cannot see it."""
    draw: Callable[[Theme], Figure]


def plots(run: Run) -> list[Plot]:
    """Every picture that the results of `run` are enough for."""
    return [*_originals(run), *_rooflines(run), *_host_costs(run), *_cpu_ratios(run)]


def svg(plot: Plot, theme: Theme) -> bytes:
    """The picture as an SVG file, the same bytes each time."""
    buffer = io.BytesIO()
    with mpl.rc_context(STYLE):
        metadata = {**dict.fromkeys(("Creator", "Date", "Format", "Type")), "Title": plot.title}
        plot.draw(theme).savefig(buffer, format="svg", metadata=metadata)
    return buffer.getvalue()


class Kind(NamedTuple):
    """What groups have in common that differ in their shapes only."""

    dtype: str
    noise: str
    mode: str
    layout: str
    antithetic: bool

    def __str__(self) -> str:
        layout = "" if self.layout == "dn" else f', layout "{self.layout}"'
        return f"{self.dtype}, {self.noise} noise, {self.mode}{layout}{', antithetic' if self.antithetic else ''}"

    def file_name(self, plot: str) -> str:
        unusual = [*([self.layout] if self.layout != "dn" else []), *(["antithetic"] if self.antithetic else [])]
        return "-".join([plot, self.dtype, self.noise, self.mode, *unusual])


def kinds(groups: Iterable[Group]) -> dict[Kind, list[Group]]:
    """`groups` by their kinds, in the order in which they come."""
    found: dict[Kind, list[Group]] = {}
    for group in groups:
        entry = group.entries[0]
        kind = Kind(entry.dtype, entry.noise, entry.mode, entry.layout, entry.antithetic)
        found.setdefault(kind, []).append(group)
    return found


def _values(lines: Sequence[Line], value: Callable[[Line], str]) -> str:
    """The lines' names and values in words, ours first."""
    return ", ".join(f"{label(line.entry)} {value(line)}" for line in reversed(lines))


def _times(value: float) -> str:
    return f"{value:.2f}" if value < 1 else f"{value:.1f}"


# --- The original experiment --------------------------------------------------------------------------------------


def baseline_of(groups: Iterable[Group]) -> str | None:
    """The contender that speedups are over."""
    measured = {entry.contender for group in groups for entry in group.entries}
    return next((name for name in BASELINES if name in measured), None)


class Measure(NamedTuple):
    """A way to time a call."""

    text: str
    time: Callable[[Entry], Quartiles | None]


def _pipelined(entry: Entry) -> Quartiles | None:
    return None if entry.pipelined_s is None else Quartiles(*[entry.pipelined_s] * 3)


IN_A_ROW = Measure("one of many calls in a row", _pipelined)
BY_ITSELF = Measure("a call with its synchronisation", lambda entry: entry.call)


def measures(groups: Iterable[Group]) -> list[Measure]:
    """How calls of the original experiment were timed; the way that its author timed them comes first."""
    in_a_row = all(entry.pipelined_s is not None for group in groups for entry in group.entries)
    return [IN_A_ROW, BY_ITSELF] if in_a_row else [BY_ITSELF]


def speedups(
    groups: Iterable[Group], baseline: str, x: Callable[[Entry], float], measure: Measure = BY_ITSELF
) -> list[Line]:
    """How many times as fast as `baseline` in the same group the calls of each contender were, against `x`."""

    def ratio(entry: Entry, group: Group) -> Quartiles | None:
        base = group.find(baseline)
        if base is None or base is entry:
            return None
        theirs, its = measure.time(base), measure.time(entry)
        return None if theirs is None or its is None else theirs.over(its)

    return lines_of(groups, x, ratio)


def _times_of(groups: Iterable[Group], measure: Measure) -> list[Line]:
    return lines_of(groups, lambda entry: entry.d, lambda entry, _: measure.time(entry))


def mean(line: Line) -> float:
    return statistics.fmean(y for _, y in line.medians)


def _originals(run: Run) -> list[Plot]:
    found = []
    for kind, groups in kinds(run.of_suite("original")).items():
        baseline = baseline_of(groups)
        measure = measures(groups)[0]
        times = _times_of(groups, measure)
        ratios = speedups(groups, baseline, lambda entry: entry.d, measure) if baseline else []
        over = LABELS[baseline] if baseline else ""
        caption = f"Time of {measure.text} against d"
        if ratios:
            caption += (
                f"; on average over d, times as fast as {over}: {_values(ratios, lambda line: f'{mean(line):.2f}')}. "
                f"Published for the original kernel over {LABELS['torch_compile']}: {PUBLISHED.speedup:.2f} on an "
                f"{PUBLISHED.gpu} ({PUBLISHED.source})"
            )
        draw = partial(_draw_original, run, kind, measure, times, ratios, over)
        found.append(Plot(kind.file_name("original"), f"The original experiment: {kind}", caption, draw))
    return found


def _draw_original(
    run: Run,
    kind: Kind,
    measure: Measure,
    times: Sequence[Line],
    ratios: Sequence[Line],
    over: str,
    theme: Theme,
) -> Figure:
    subtitle = f"{run.device}, {kind}, n = {times[0].entry.n:,}"
    figure, (upper, *lower) = canvas(
        theme, 7.6 if ratios else 4.4, f"The original experiment, {kind.noise} noise", subtitle,
        rows=2 if ratios else 1,
    )  # fmt: skip
    linear_x((upper, *lower)[-1], theme, "dimensions d", times, PLAIN)
    shaded = "" if measure is IN_A_ROW else ", quartiles are shaded"
    heading(upper, theme, f"Time of {measure.text}; lower is better{shaded}")
    log_y(upper, times, MICROSECONDS)
    draw_lines(upper, times, theme, lambda line: label(line.entry), band=measure is not IN_A_ROW)
    for axes in lower:
        heading(axes, theme, f"Times as fast as {over}; higher is better, the average over d is beside the names")
        axes.set_ylim(0, 1.1 * max(PUBLISHED.speedup, *(y for line in ratios for _, y in line.medians)))
        draw_lines(axes, ratios, theme, lambda line: f"{label(line.entry)}  {mean(line):.2f}")
        published = f"published average: {PUBLISHED.speedup:.2f} (original kernel, shared noise, {PUBLISHED.gpu})"
        reference(axes, theme, PUBLISHED.speedup, published)
    footnote(figure, theme, (line.entry for line in times))
    return figure


# --- Fraction of memset -------------------------------------------------------------------------------------------


def _rooflines(run: Run) -> list[Plot]:
    found = []
    for kind, groups in kinds(run.groups).items():
        lines = lines_of(groups, lambda entry: entry.bytes, lambda entry, _: entry.fraction, lambda entry: entry.n)
        if _has_several_sizes(lines):
            ends = _values(lines, lambda line: f"{line.end[1]:.2f}")
            caption = f"Fraction of the speed of cudaMemsetAsync against the size of the output; at the end: {ends}"
            draw = partial(_draw_roofline, run, kind, lines)
            found.append(Plot(kind.file_name("roofline"), f"Fraction of memset: {kind}", caption, draw))
    return found


def _has_several_sizes(lines: Sequence[Line]) -> bool:
    return len({x for line in lines for x, _ in line.medians}) > 1


def _draw_roofline(run: Run, kind: Kind, lines: Sequence[Line], theme: Theme) -> Figure:
    subtitle = f"{run.device}, {kind}; lines join shapes of the same n"
    figure, (axes,) = canvas(theme, 5.4, "How near to the speed of memory", subtitle)
    log_x(axes, theme, "size of the output", lines, EngFormatter("B"), (1,))
    axes.set_ylim(0, 1.04 * max(1, *(y for line in lines for _, y in line.medians)))
    heading(axes, theme, "Time of cudaMemsetAsync over the same bytes / time of the kernels")
    reference(axes, theme, 1, "cudaMemsetAsync", below=True)
    draw_lines(axes, lines, theme, lambda line: f"{label(line.entry)}  {line.end[1]:.2f}")
    footnote(figure, theme, (line.entry for line in lines))
    return figure


# --- Host cost ----------------------------------------------------------------------------------------------------


class Cost(NamedTuple):
    """Host seconds of a call: the median over shapes."""

    seconds: float
    entry: Entry

    def __str__(self) -> str:
        return f"{self.seconds * 1e6:.1f} us"


def _host_costs(run: Run) -> list[Plot]:
    measured: dict[str, list[Entry]] = {}
    for group in run.groups:
        for entry in group.entries:
            if entry.host_s is not None and entry.bytes <= HOST_BYTES:
                measured.setdefault(entry.contender, []).append(entry)
    if not measured:
        return []
    costs = [
        Cost(statistics.median(entry.host_s for entry in entries if entry.host_s is not None), entries[0])
        for entries in measured.values()
    ]
    costs.sort(key=lambda cost: cost.seconds)
    caption = f"Host time of one pipelined call: {', '.join(f'{label(cost.entry)} {cost}' for cost in costs)}"
    return [Plot("host-cost", "Host cost of a call", caption, partial(_draw_host_costs, run, costs))]


def _draw_host_costs(run: Run, costs: Sequence[Cost], theme: Theme) -> Figure:
    size = EngFormatter("B")(HOST_BYTES)
    subtitle = f"{run.device}, {run.machine.get('cpu')}; calls in a row, the median of outputs up to {size}"
    figure, (axes,) = canvas(theme, 1.6 + 0.31 * len(costs), "What a call costs the host", subtitle)
    figure.subplots_adjust(left=0.19, right=0.95, top=1 - 0.72 / figure.get_figheight())
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    axes.set_yticks(range(len(costs)), [label(cost.entry) for cost in costs])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    for place, (cost, tick) in enumerate(zip(costs, axes.get_yticklabels(), strict=True)):
        colour, weight = colour_of(cost.entry, theme), "bold" if cost.entry.ours else "normal"
        face = colour if cost.entry.ours else theme.paper
        axes.barh(place, cost.seconds, height=0.62, facecolor=face, edgecolor=colour, linewidth=1.2, zorder=3)
        axes.annotate(
            str(cost), (cost.seconds, place), (5, 0), textcoords="offset points", va="center", color=colour,
            fontweight=weight, bbox={"facecolor": theme.paper, "edgecolor": "none", "pad": 0.5},
        )  # fmt: skip
        tick.set(color=colour, fontweight=weight)
    axes.set_xlim(0, 1.12 * costs[-1].seconds)
    axes.xaxis.set_major_formatter(MICROSECONDS)
    footnote(figure, theme, (cost.entry for cost in costs))
    return figure


# --- On the CPU ---------------------------------------------------------------------------------------------------


def _cpu_ratios(run: Run) -> list[Plot]:
    found = []
    for kind, groups in kinds(run.of_suite("cpu")).items():
        lines = speedups(groups, CPU_REFERENCE, lambda entry: entry.d * entry.n)
        if _has_several_sizes(lines):
            ends = _values(lines, lambda line: _times(line.end[1]))
            caption = f"Times as fast as {LABELS[CPU_REFERENCE]} against the number of normals; at the end: {ends}"
            draw = partial(_draw_cpu_ratios, run, kind, lines)
            found.append(Plot(kind.file_name("cpu"), f"On the CPU: {kind}", caption, draw))
    return found


def _draw_cpu_ratios(run: Run, kind: Kind, lines: Sequence[Line], theme: Theme) -> Figure:
    them = LABELS[CPU_REFERENCE]
    subtitle = f"{run.machine.get('cpu')}, {run.machine.get('threads')} threads, {kind}"
    figure, (axes,) = canvas(theme, 5, f"On the CPU, beside {them}", subtitle)
    log_x(axes, theme, "normals in a call", lines, PLAIN, (1,))
    log_y(axes, lines, PLAIN, 1)
    heading(axes, theme, f"Times as fast as {them}; higher is better, through the median where sizes are equal")
    reference(axes, theme, 1, them)
    draw_lines(axes, lines, theme, lambda line: f"{label(line.entry)}  {_times(line.end[1])}")
    footnote(figure, theme, (line.entry for line in lines))
    return figure
