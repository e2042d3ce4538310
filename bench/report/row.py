"""A row of the table of machines, bench/results/machines.md, from the results of one machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from bench.report.results import Row, Run, read_run

SHAPES = (4096, 65_536), (4_194_304, 32), (1000, 1024)
"""Three shapes on a GPU: with long rows, short rows, and few rows."""
CPU_SHAPE = 10, 1_000_000
BACKENDS = "torch_ext", "cupy", "numba"
MODES = "portable", "fast_math"
VERSIONS = "python", "numpy", "numba", "torch", "cupy", "numba_cuda"
NOTHING = "-"

COLUMNS = (
    "Date", "GPU", "Driver, CUDA", *map(str, SHAPES), "CPU", "Threads", f"{CPU_SHAPE} on the CPU", "Versions",
)  # fmt: skip

_NAMES = [f"{d}x{n}-{mode}" for d, n in (*SHAPES, CPU_SHAPE) for mode in MODES]
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


def _by_contender(run: Run, suite: str, shape: tuple[int, int], mode: str) -> dict[str, Row]:
    case = f"{suite} {shape[0]}x{shape[1]} {mode}"
    return {row["call"]: row for row in run.rows if row["case"] == case}


def _gpu_cell(run: Run, shape: tuple[int, int]) -> str:
    groups = [_by_contender(run, "throughput", shape, mode) for mode in MODES]
    if not all(groups):
        return NOTHING
    speeds = (", ".join(f"{g[name]['of memset']:.2f}" if name in g else NOTHING for name in BACKENDS) for g in groups)
    return f"{' / '.join(speeds)}<br>{_peers(groups)}"


def _cpu_cell(run: Run) -> str:
    groups = [_by_contender(run, suite, CPU_SHAPE, "portable") for suite in ("cpu", "cpu_out")]
    if not all(groups):
        return NOTHING
    gigas = CPU_SHAPE[0] * CPU_SHAPE[1] / 1e9
    rates = [f"{gigas / group['cpu']['seconds']:.1f} G/s" if "cpu" in group else NOTHING for group in groups]
    return f"{rates[0]}, in place {rates[1]}<br>{_peers(groups[:1])}"


def _peers(groups: Iterable[dict[str, Row]]) -> str:
    """Of each group, the fastest contender that computes what ours do, and its time over that of our fastest."""
    found = []
    for group in groups:
        ours = [row["seconds"] for row in group.values() if row["ours"]]
        peers = {name: row["seconds"] for name, row in group.items() if not row["ours"] and not row["lacks"]}
        name = min(peers, key=peers.__getitem__, default=NOTHING)
        found.append(f"{name} {peers[name] / min(ours):.1f}" if ours and peers else NOTHING)
    return " / ".join(found)
