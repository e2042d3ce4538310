"""A row of the table of machines, bench/results/machines.md, from the results of one machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from bench.report.entries import Entry, Group, Run, read_run

SHAPES = (4096, 65_536), (4_194_304, 32), (1000, 1024)
"""Shapes on a GPU: rows that are long, short, and few."""
CPU_SHAPE = 10, 1_000_000
BACKENDS = "torch_ext", "cupy", "numba"
MODES = "portable", "fast_math"
VERSIONS = "python", "numpy", "numba", "torch", "cupy", "numba_cuda"
NOTHING = "-"

COLUMNS = (
    "Date", "GPU", "Driver, CUDA", *map(str, SHAPES), "CPU", "Threads", f"{CPU_SHAPE} on the CPU", "Versions",
)  # fmt: skip

_NAMES = [f"{d}x{n}-float32-independent-{mode}" for d, n in (*SHAPES, CPU_SHAPE) for mode in MODES]
SELECTION = f"(throughput or test_cpu) and ({' or '.join(_NAMES)})"
"""The benchmarks that a row needs, for `pytest -k`."""


def measured(path: Path) -> Run:
    """Run the benchmarks of a row on this machine; their results go to the file `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    command = ["pytest", "bench", "--benchmark-only", "-k", SELECTION, f"--benchmark-json={path.absolute()}"]
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-m", *command], cwd=root, stdout=sys.stderr)
    if done.returncode:
        raise SystemExit(f"row: expected every benchmark to pass, got status {done.returncode} from pytest")
    return read_run(path)


def row(run: Run) -> str:
    """The row of `run` in Markdown, with the cells of `COLUMNS`."""
    machine = run.machine
    versions = dict(machine["versions"])
    runtime = int(versions.get("cuda_runtime", 0))
    driver = f"{machine['driver'] or NOTHING}, {runtime // 1000}.{runtime % 1000 // 10}" if machine["gpu"] else NOTHING
    names = [f"{name} {versions[name]}" for name in VERSIONS if name in versions]
    cells = [
        machine["date"],
        machine["gpu"] or NOTHING,
        driver,
        *(_gpu_cell(run, shape) for shape in SHAPES),
        machine["cpu"],
        str(machine["threads"]),
        _cpu_cell(run),
        ", ".join([f"{versions['multisample']} ({versions['sources']})", *names]),
    ]
    return f"| {' | '.join(cells)} |"


def _group(run: Run, suite: str, shape: tuple[int, int], mode: str) -> Group | None:
    for group in run.groups:
        one = group.entries[0]
        found = one.suite, (one.d, one.n), one.mode, one.dtype, one.noise, one.layout, one.antithetic
        if found == (suite, shape, mode, "float32", "independent", "dn", False):
            return group
    return None


def _gpu_cell(run: Run, shape: tuple[int, int]) -> str:
    groups = [group for mode in MODES if (group := _group(run, "throughput", shape, mode))]
    if len(groups) < len(MODES):
        return NOTHING
    speeds = " / ".join(", ".join(_fraction(group.find(name)) for name in BACKENDS) for group in groups)
    return f"{speeds}<br>{_peers(groups)}"


def _fraction(entry: Entry | None) -> str:
    return f"{entry.fraction.median:.2f}" if entry and entry.fraction else NOTHING


def _cpu_cell(run: Run) -> str:
    new, in_place = (_group(run, suite, CPU_SHAPE, "portable") for suite in ("cpu", "cpu_out"))
    if new is None or in_place is None:
        return NOTHING
    rates = [_rate(group.find("cpu")) for group in (new, in_place)]
    return f"{rates[0]}, in place {rates[1]}<br>{_peers([new])}"


def _rate(entry: Entry | None) -> str:
    return f"{entry.d * entry.n / entry.seconds / 1e9:.1f} G/s" if entry else NOTHING


def _peers(groups: Iterable[Group]) -> str:
    """Of each group, the fastest contender that computes what ours do, and its time over that of our fastest."""
    found = []
    for group in groups:
        ours = [entry.seconds for entry in group.entries if entry.ours]
        peers = {entry.contender: entry.seconds for entry in group.entries if not entry.ours and not entry.lacks}
        name = min(peers, key=peers.__getitem__, default=NOTHING)
        found.append(f"{name} {peers[name] / min(ours):.1f}" if ours and peers else NOTHING)
    return " / ".join(found)
