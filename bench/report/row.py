"""A section of bench/results/machines.md: the machine, and a row for each shape that was measured on it."""

import subprocess
import sys
from pathlib import Path

from bench.report.page_markers import ROOT, table
from bench.report.results import Run, read_run

SHAPES = (4096, 65_536), (4_194_304, 32), (1000, 1024)  # Long rows, short rows, and few rows.
CPU_SHAPE = 10, 1_000_000
BACKENDS, MODES = ("torch_ext", "cupy", "numba"), ("portable", "fast_math")
VERSIONS = "python", "numpy", "numba", "torch", "cupy", "numba_cuda"
MOST_SPREAD = 0.1  # The spread of a row that may be published.

CASES = {shape: [("throughput", mode) for mode in MODES] for shape in SHAPES}
CASES[CPU_SHAPE] = [("cpu", "portable"), ("cpu_out", "portable")]
"""The suites and modes of each shape."""
GPU_HEAD = "(d, n)", *(f"{mode}: {', '.join(BACKENDS)}" for mode in MODES), "fastest other library", "spread"
CPU_HEAD = "(d, n)", "normals per second", "in place", "fastest other library", "spread"

_NAMES = [f"{d}x{n}-{mode}" for d, n in (*SHAPES, CPU_SHAPE) for mode in MODES]
SELECTION = f"(throughput or test_cpu) and ({' or '.join(_NAMES)})"
"""The expression for `pytest -k` that selects the benchmarks of a machine's section."""


def measured(path: Path) -> Run:
    """Run the benchmarks of a section on this machine; their results go to the file `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    command = ["pytest", "bench", "--benchmark-only", "-k", SELECTION, f"--benchmark-json={path.absolute()}"]
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, stdout=sys.stderr)
    if done.returncode:
        raise SystemExit(f"row: expected every benchmark to pass, got status {done.returncode} from pytest")
    return read_run(path)


def shapes(run: Run) -> list[tuple[bool, list[str], float | None]]:
    """For each measured shape: whether it is a GPU's, its cells, and the largest spread of its times if recorded."""
    found = []
    for shape, kinds in CASES.items():
        cases = [f"{suite} {shape[0]}x{shape[1]} {mode}" for suite, mode in kinds]
        groups = [{row["call"]: row for row in run.rows if row["case"] == case} for case in cases]
        if not all(groups):
            continue
        if on_gpu := shape != CPU_SHAPE:
            cells = [", ".join(f"{g[n]['of memset']:.2f}" if n in g else "-" for n in BACKENDS) for g in groups]
        else:
            cells = [f"{shape[0] * shape[1] / group['cpu']['seconds'] / 1e9:.1f} billion" for group in groups]
        used = [row for group in groups for row in group.values() if row["ours"]]
        others = []
        for group in groups if on_gpu else groups[:1]:
            # Contenders that compute what ours do.
            peers = [row for row in group.values() if not row["ours"] and not row["lacks"]]
            if peers:
                used.append(peer := min(peers, key=lambda row: float(row["seconds"])))
                ratio = peer["seconds"] / min(row["seconds"] for row in group.values() if row["ours"])
                others.append(f"{peer['call']}: {ratio:.1f} times as long")
        spread = max((row["spread"] for row in used if row["spread"] is not None), default=None)
        percent = "not recorded" if spread is None else f"{100 * spread:.0f} %"
        found.append((on_gpu, [str(shape), *cells, "; ".join(others), percent], spread))
    return found


def section(run: Run) -> str:
    machine, versions = run.machine, run.machine["versions"]
    gpu, cpu = ([cells for on_gpu, cells, _ in shapes(run) if on_gpu == kind] for kind in (True, False))
    runtime = int(versions.get("cuda_runtime", 0))
    about = [f"{machine['date']}, multisample {versions['multisample']} ({versions['sources']})"]
    about += [f"{machine['threads']} threads"] if cpu else []
    about += [f"driver {machine['driver']}, CUDA {runtime // 1000}.{runtime % 1000 // 10}"] if gpu else []
    about += [f"{name} {versions[name]}" for name in VERSIONS if name in versions]
    title = " and ".join(name for name, rows in ((machine["gpu"], gpu), (machine["cpu"], cpu)) if rows)
    tables = [table(head, rows) for head, rows in ((GPU_HEAD, gpu), (CPU_HEAD, cpu)) if rows]
    return "\n\n".join([f"## {title}", f"{', '.join(about)}.", *tables]) + "\n"
