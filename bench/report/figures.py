"""The tables, ranges and pictures of the pages, by name: data, from which `bench.report.pages` makes the text."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from bench.report.pages import Results, number_text, table, text_of
from bench.report.pictures import pictures

__all__ = ["FIGURES", "pictures_of_pages"]

GPU, ORIGINAL, CPU = "gpu", "original", "cpu"

SHAPES = ("4096x65536", "262144x1024", "1048576x128", "4194304x32", "4096x65537", "100x100000", "1000x1024", "10x10")
SHORT = ("4096x65536", "262144x1024", "4194304x32", "1000x1024")
CPU_SHAPES = (
    "10x10", "100x100", "1000x100", "1000x1000", "1000x10000", "10000x1000", "100000x100", "10x1000000", "1x10000000",
)  # fmt: skip
KERNEL_SHAPES = (
    "4096x65536", "262144x1024", "1048576x128", "4194304x32", "4096x65537", "262144x1025", "1048576x127", "4194304x33",
    "32x8388608", "257x1000000", "1001x262144", "2500x1024", "10x1000000",
)  # fmt: skip


Figure = Callable[[Results, str], str]


class Column(NamedTuple):
    """A column of a table. In `case` and `call`, ``{}`` is what the row names."""

    title: str
    case: str
    call: str
    field: str
    file: str = ""
    """Another file than that of the table."""


def shapes(*names: str) -> dict[str, str]:
    """The rows of a table by shape."""
    return {f"({name.replace('x', ', ')})": name for name in names}


def grid(file: str, rows: Mapping[str, str], columns: Sequence[Column], corner: str, results: Results, _: str) -> str:
    """A table of queries. The key of a row is its title; its text stands in the queries of the columns.

    A cell without rows in the file is empty; a row or column of such cells is left out.
    """

    def cell(row: str, column: Column) -> str:
        case, call = column.case.format(row), column.call.format(row)
        try:
            return text_of(results.numbers(column.file or file, case, call, column.field), column.field)
        except ValueError:
            return ""

    cells = {title: [cell(row, column) for column in columns] for title, row in rows.items()}
    shown = [k for k in range(len(columns)) if any(line[k] for line in cells.values())]
    body = [[title, *(line[k] for k in shown)] for title, line in cells.items() if any(line)]
    if not body:
        raise ValueError(f"figure: expected rows of the table's cases in {file}, got none")
    return table([corner, *(columns[k].title for k in shown)], body)


# --- On a GPU -----------------------------------------------------------------------------------------------------

PORTABLE, FAST = "throughput {} portable", "throughput {} fast_math"
OURS = (Column("multisample", PORTABLE, "torch_ext", "us"), Column("multisample, `fast_math`", FAST, "torch_ext", "us"))
FUSED = (
    Column("cuRANDDx, fused", PORTABLE, "curanddx*", "best us over torch_ext"),
    Column("the same with fast math, over `fast_math`", FAST, "curanddx*fast*", "best us over torch_ext"),
)
PEERS = (
    Column("cuRAND: z only", PORTABLE, "curand_host*", "best us over torch_ext"),
    Column("Triton: `tl.randn`", PORTABLE, "triton*", "best us over torch_ext"),
    Column("`torch.compile` of `mu + sigma * randn`", PORTABLE, "torch_compile*", "best us over torch_ext"),
    Column("JAX: `jit`", PORTABLE, "jax*", "best us over torch_ext"),
    Column("PyTorch: `mu + sigma * randn`", PORTABLE, "torch_eager", "us over torch_ext"),
    Column("CuPy", PORTABLE, "cupy_*", "best us over torch_ext"),
)
MORE_PEERS = (
    Column("numba-cuda", PORTABLE, "numba_*", "best us over torch_ext"),
    Column("`torch.func`", PORTABLE, "torch_func*", "best us over torch_ext"),
    Column("`Normal.rsample`", PORTABLE, "normal_rsample", "us over torch_ext"),
    Column('RAFT, layout "nd"', "throughput {} nd portable", "raft_table*", "best us over torch_ext"),
)
KERNELS = tuple(
    Column(title, "{}", call, "of memset")
    for title, call in (
        ("portable", "*, portable, dn"),
        ("`fast_math`", "*, fast_math, dn"),
        ("shared noise", "*, shared, dn"),
        ('layout "nd", portable', "torch_ext, portable, nd"),
        ('"nd", `fast_math`', "torch_ext, fast_math, nd"),
        ("antithetic, portable", "torch_ext, portable, dn, antithetic"),
        ('antithetic, "nd"', "torch_ext, portable, nd, antithetic"),
    )
)
FEW = {
    f'layout "{layout}", {"portable" if mode == "portable" else "`fast_math`"}': f"torch_ext, {mode}, {layout}"
    for layout in ("dn", "nd") for mode in ("portable", "fast_math")
}  # fmt: skip
FEW |= {"`torch.randn`": "torch.randn", "memset": "memset"}
GRADIENTS = tuple(
    Column(title, "{}", call, field)
    for title, call, field in (
        ("forward", "multisample", "forward us"),
        ("backward", "multisample", "backward us"),
        ("forward, `fast_math`", "multisample, fast_math", "forward us"),
        ("backward, `fast_math`", "multisample, fast_math", "backward us"),
        ("`Normal.rsample`: forward", "Normal.rsample", "forward us"),
        ("backward", "Normal.rsample", "backward us"),
    )
)
HOST = {
    "PyTorch tensors, `seed=`": "seed=",
    "with `dtype=`, `layout=`, `antithetic=`, a window, a number, strides": (
        "dtype=;layout=*;antithetic=;noise=*;window;a number*;float16*;strided mu;every option"
    ),
    "PyTorch's default generator": "PyTorch's default generator",
    "a `torch.Generator`": "generator=torch.Generator",
    "a `multisample.Generator`": "generator=Generator",
    "a graph-safe `Generator`: two launches": "graph-safe generator",
    "`out=`, beside `torch.randn(out=)`": "out=*;strided out=",
    "mu requires grad, forward and backward": "requires grad, forward and backward",
    "`Normal(mu, sigma).rsample((n,))`, beside PyTorch's": "Normal.rsample",
}
NUMPY = {
    "`seed=`, `layout=`, `antithetic=`, `noise=`, a window, strides": (
        "seed=;layout=*;antithetic=;noise=*;window;strided mu"
    ),
    "a generator, a number for sigma, `out=`, other types": "*generator*;a number*;out=;dtype=*;float64 arrays",
}
PERTURB = {
    f"{title}, {what}": f"cuda {model}, {members}"
    for title, model in (
        ("2^28 float32", "2^28 float32"),
        ("2^28 bfloat16", "2^28 bfloat16"),
        ("OPT-1.3B, bfloat16, 388 tensors", "OPT-1.3B bfloat16"),
        ("Llama 2 7B, bfloat16, 291 tensors", "Llama 7B bfloat16"),
    )
    for what, members in (("one member", "1 members"), ("an update by 30 members", "30 members"))
}
PERTURBED = tuple(
    Column(title, "{}", call, "us")
    for title, call in (
        ("portable", "perturb_"),
        ("`fast_math`", "perturb_, fast_math"),
        ("the loop", "loop"),
        ("with a generator", "loop with a generator"),
        ("`mul_` of each tensor", "mul_"),
    )
)


def batches(kinds: str) -> dict[str, str]:
    """The rows of a table by number of matrices and shape."""
    found = {}
    for kind in kinds.split(";"):
        for b, d, n in ((1000, 10, 10), (64, 7, 512), (256, 8, 64), (4096, 12, 32), (100_000, 1, 4), (8, 4096, 1024)):
            found[f"{b:,} x ({d}, {n}), {NAMES[kind]}"] = f"{kind} {b}x{d}x{n}"
    return found


NAMES = {"numpy": "NumPy", "torch cpu": "PyTorch", "torch cuda": "PyTorch"}
BATCHES = (
    Column("seeds in an array", "{}", "seeds in an array", "us over flattened"),
    Column("in a list", "{}", "seeds in a list", "us over flattened"),
    Column("loop of calls", "{}", "loop", "us over flattened"),
    Column("`mu + sigma * randn`", "{}", "expression", "us over flattened"),
    Column("PyTorch's `Normal`", "{}", "PyTorch's Normal", "us over flattened"),
    Column("our `Normal`", "{}", "Normal", "us over flattened"),
)
JAX = (
    Column("two CPU cores", "cpu {}", "normal", "ratio", "jax-2-cores"),
    Column("H200", "cuda {}", "normal", "ratio"),
    Column("H200, many calls in a row", "cuda {}", "normal", "queued ratio"),
    Column("the same, JAX's `rbg`", "cuda {}", "rbg", "queued ratio"),
)
# File, case, call and field; `{}` is nothing in the column of portable numbers, and ", fast_math" in the next.
NEVER_STORED = {
    "`weighted_moments` at (4096, 65536), over `sample` alone: `order=1`": (
        "moments-h200", "cuda 4096x65536", "order 1, torch_ext{}", "us over sample{}",
    ),
    "the same, `order=2`": ("moments-h200", "cuda 4096x65536", "order 2, torch_ext{}", "us over sample{}"),
    "the same with 10 % elites": ("moments-h200", "cuda 4096x65536", "elites, torch_ext{}", "us over sample{}"),
    "at (100, 100000), `order=2`": ("moments-h200", "cuda 100x100000", "order 2, torch_ext{}", "us over sample{}"),
    "an evolution strategy of 10^8 parameters and 64 perturbations: PyTorch's `randn` over `order=1`": (
        "moments-h200", "cuda 100000000x64", "torch, accumulated, order 1", "us over order 1, torch_ext{}",
    ),
    "MPPI, 10^5 rollouts of 100 steps: a matrix of `sample` over controls drawn in the kernel": (
        "in-kernels-h200", "MPPI", "sample, matrix{}", "iteration us over in the kernel{}",
    ),
    "the same: a matrix of PyTorch's `randn`": (
        "in-kernels-h200", "MPPI", "randn, matrix", "iteration us over in the kernel{}",
    ),
    "Asian option, 252 days: cuRAND's `curand_normal4` over `multisample::Stream`": (
        "in-kernels-h200", "Asian option", "cuRAND", "ns over multisample{}",
    ),
}  # fmt: skip


def by_mode(rows: Mapping[str, tuple[str, str, str, str]], results: Results, _: str) -> str:
    """A table of queries with a column for each mode."""
    body = []
    for title, query in rows.items():
        queries = [[part.format(mode) for part in query] for mode in ("", ", fast_math")]
        body.append([title, *(text_of(results.numbers(*each), each[3]) for each in queries)])
    return table(["", "portable", "`fast_math`"], body)


# --- On a CPU -----------------------------------------------------------------------------------------------------

ON_CPU, IN_PLACE = "cpu {} portable", "cpu_out {} portable"
CPU_COLUMNS = (
    Column("multisample", ON_CPU, "cpu", "us"),
    Column("NumPy", ON_CPU, "numpy", "us over cpu"),
    Column("z of NumPy", ON_CPU, "numpy_bare", "us over cpu"),
    Column("PyTorch", ON_CPU, "torch_eager", "us over cpu"),
    Column("z of oneMKL", ON_CPU, "*mkl*", "best us over cpu"),
    Column("JAX", ON_CPU, "jax*", "best us over cpu"),
    Column("in place: multisample", IN_PLACE, "cpu", "us"),
    Column("in place: z of NumPy", IN_PLACE, "numpy", "us over cpu"),
    Column("in place: z of PyTorch", IN_PLACE, "torch_randn", "us over cpu"),
    Column("in place: z of oneMKL", IN_PLACE, "*mkl*", "best us over cpu"),
)
LOG2 = {
    "2^16": "threads 256x256", "2^17": "threads 512x256;threads 100x1311", "2^18": "threads 512x512",
    "2^19": "threads 1024x512", "2^20": "threads 1000x1000",
}  # fmt: skip
THREADS = tuple(
    Column(f"`{backend}`, {title}", "{}", backend, field)
    for backend in ("cpu", "torch_ext")
    for title, field in (("calls in a loop", "speed-up"), ("2 ms between calls", "after 2 ms"))
)

# --- Dask ---------------------------------------------------------------------------------------------------------

DASK = "dask-2-cores"
DASK_COSTS = {
    "a block of 100 elements on Dask's threaded scheduler": (
        "block", "threaded scheduler", "*normal, threaded scheduler",
    ),
    "the same block on `distributed`, two worker processes": (
        "block", "distributed, 2 processes", "*normal, distributed",
    ),
    "a block of 10^7 float32 elements on one of two threads": (
        "throughput", "multisample.dask", "dask.array.random.normal",
    ),
    "a task of the cross-entropy method on threads": ("task", "threads", ""),
    "on processes": ("task", "processes;loky", ""),
    "on `distributed`": ("task", "distributed", ""),
    "to draw 1000 elites of 10,000 again and refit, 100 dimensions": ("refit 100x10000", "tell_scores", ""),
}  # fmt: skip


def dask_costs(results: Results, _: str) -> str:
    body = []
    for title, (case, *calls) in DASK_COSTS.items():
        body.append(
            [title, *(text_of(results.numbers(DASK, case, call, "us"), "us") if call else "" for call in calls)]
        )
    return table(["Cost", "Time", "With `dask.array.random.normal`"], body)


def dask_pool(results: Results, _: str) -> str:
    return text_of(results.numbers(DASK, "processes", "pool of 1", "us over pool of 2"), "us over pool of 2")


def _seconds(results: Results, case: str, call: str) -> float:
    return min(results.numbers(DASK, case, call, "us")) * 1e-6


def dask_blocks(results: Results, _: str) -> str:
    """The share of the time that threads work, if the scheduler starts blocks one after the other."""
    start = _seconds(results, "block", "distributed, 2 processes")
    block = _seconds(results, "throughput", "multisample.dask")
    blocks = {
        "blocks of 10^7 (40 MB)": block,
        "blocks of 10^8 (400 MB)": 10 * block,
        "10 s of work on each block": 10.0,
    }
    body = [
        [f"{threads:,}", *(f"{min(1, seconds / start / threads):.2g}" for seconds in blocks.values())]
        for threads in (1, 10, 100, 1000, 10_000)
    ]
    return table(["Threads", *blocks], body)


def dask_workers(results: Results, _: str) -> str:
    """The speed-up of a generation by its workers."""
    task, refit = _seconds(results, "task", "distributed"), _seconds(results, "refit 100x10000", "tell_scores")
    scorings = (100, 10_000)
    body = [
        [f"{w:,}", *(number_text((s + task + refit) / (s / w + w * task + refit)) for s in scorings)]
        for w in (1, 10, 100, 1000, 10_000)
    ]
    return table(["Workers", *(f"S = {s:,} s" for s in scorings)], body)


def dask_limit(executor: str, results: Results, _: str) -> str:
    return f"{math.sqrt(100 / _seconds(results, 'task', executor)):.0f}"


# --- TestU01 ------------------------------------------------------------------------------------------------------

ORDERS = {
    "words along rows": "rows",
    "words down columns": "columns",
    "words over the calls of a generator": "offsets",
    "Phi of float64 normals along rows": "normals",
    "Phi of float32 normals along rows, 20 bits of each": "normals_f32",
}


def testu01(results: Results, _: str) -> str:
    """The p-values outside of TestU01's interval: of the seeds that ran all tests, of all p-values."""
    batteries = ("SmallCrush", "Crush", "BigCrush")

    def runs(battery: str) -> list[Any]:
        content = results.content(f"testu01-{battery.lower()}")["runs"]
        return [run for run in content if "incomplete" not in run["summary"]["verdict"]]

    def cell(battery: str, order: str) -> str:
        found = [run["summary"] for run in runs(battery) if run["order"] == order]
        return f"{sum(len(one['outside']) for one in found)} of {sum(one['statistics'] for one in found)}"

    body = [[title, *(cell(battery, order) for battery in batteries)] for title, order in ORDERS.items()]
    expected = [sum(run["summary"]["expected_outside"] for run in runs(battery)) / len(ORDERS) for battery in batteries]
    return table(["", *batteries], [*body, ["expected", *map(number_text, expected)]])


# --- Pictures -----------------------------------------------------------------------------------------------------

PICTURES = {
    "picture-largest": (GPU, "largest-float32-independent"),
    "picture-memory": (GPU, "memory-float32-independent"),
    "picture-host": (GPU, "host"),
    "picture-calls": (ORIGINAL, "calls-float32-shared"),
    "picture-cpu": (CPU, "cpu-float32-independent"),
}


def pictures_of_pages(results: Results) -> list[Any]:
    """The runs and the pictures that pages show."""
    return [(results.run(file), _picture(results, file, name)) for file, name in PICTURES.values()]


def _picture(results: Results, file: str, name: str) -> Any:
    return next(picture for picture in pictures(results.run(file)) if picture.name == name)


def picture(file: str, name: str, results: Results, prefix: str) -> str:
    alt = _picture(results, file, name).alt.replace('"', "'").replace("µ", "u")
    path = f"{prefix}/{results.run(file).name}-{name}"
    return (
        f'<picture>\n  <source media="(prefers-color-scheme: dark)" srcset="{path}-dark.svg">\n'
        f'  <img alt="{alt}" src="{path}-light.svg">\n</picture>'
    )


def machine(name: str, results: Results, _: str) -> str:
    """A machine and its versions."""
    found = results.run(name).machine
    titles = {"torch": "PyTorch", "cupy": "CuPy", "jax": "JAX", "numpy": "NumPy", "numba": "Numba"}
    versions = {titles[key]: ".".join(text.split(".")[:2]) for key, text in found["versions"].items() if key in titles}
    return f"{results.run(name).device}; {found['date']}; " + ", ".join(f"{k} {v}" for k, v in sorted(versions.items()))


# --- All ----------------------------------------------------------------------------------------------------------


def span(file: str, cases: Sequence[str], call: str, field: str, results: Results, _: str) -> str:
    """The range of a number over some cases."""
    return text_of(results.numbers(file, ";".join(cases), call, field), field)


def ratio_of_backends(above: str, below: str, names: Sequence[str], results: Results, _: str) -> str:
    """The range of a kernel's time over that of another backend, portable and fast_math."""
    found: list[float] = []
    for mode in ("portable", "fast_math"):
        query = ("kernels-h200", ";".join(names), f"{above}, {mode}, dn", f"us over {below}, {mode}, dn")
        found += results.numbers(*query)
    return text_of(found, "us over")


def tetris(threads: int, field: str, unit: float, results: Results, _: str) -> str:
    """A number of the program that plays Tetris with Dellacherie's features."""
    benchmarks = results.content("tetris-speed")["benchmarks"]
    (found,) = [
        benchmark["extra_info"][field] for benchmark in benchmarks
        if benchmark["extra_info"]["features"] == "dellacherie" and benchmark["extra_info"]["threads"] == threads
    ]  # fmt: skip
    return number_text(found * unit)


# About a million elements or more.
LARGE = [PORTABLE.format(name) for name in SHAPES if name != "10x10"]
LARGE_FAST = [FAST.format(name) for name in SHAPES if name != "10x10"]
LARGEST_SHARED = [PORTABLE.format(f"{name} shared") for name in SHAPES[:4]]
LARGE_ON_CPU = [ON_CPU.format(name) for name in CPU_SHAPES[3:]]


def _grid(file: str, rows: Mapping[str, str], columns: Sequence[Column], corner: str = "(d, n)") -> Figure:
    return functools.partial(grid, file, rows, columns, corner)


FIGURES: dict[str, Figure] = {
    **{name: functools.partial(picture, *place) for name, place in PICTURES.items()},
    "machine-gpu": functools.partial(machine, GPU),
    "machine-cpu": functools.partial(machine, CPU),
    "compile-over-ours": functools.partial(span, GPU, LARGE, "torch_compile*", "best us over torch_ext"),
    "compile-over-fast": functools.partial(span, GPU, LARGE_FAST, "torch_compile*", "best us over torch_ext"),
    "curanddx-over-ours": functools.partial(span, GPU, LARGE, "curanddx*", "best us over torch_ext"),
    "compile-shared": functools.partial(span, GPU, LARGEST_SHARED, "torch_compile*", "best us over torch_ext"),
    "cupy-over-ours": functools.partial(span, GPU, LARGE, "cupy_*", "best us over torch_ext"),
    "numba-over-cupy": functools.partial(ratio_of_backends, "numba", "cupy", KERNEL_SHAPES[:4]),
    "numba-over-cupy-odd": functools.partial(ratio_of_backends, "numba", "cupy", KERNEL_SHAPES[4:8]),
    "numpy-over-ours": functools.partial(span, CPU, LARGE_ON_CPU, "numpy", "us over cpu"),
    "speed": _grid(GPU, shapes(*SHORT), (*OURS, *FUSED, *PEERS)),
    "speed-all": _grid(GPU, shapes(*SHAPES), (*OURS, *FUSED, *PEERS, *MORE_PEERS)),
    "kernels": _grid("kernels-h200", shapes(*KERNEL_SHAPES), KERNELS),
    "few-samples": _grid(
        "kernels-h200", FEW, [Column(str(n), f"{2**26 // n}x{n}", "{}", "us") for n in range(1, 9)], "n"
    ),
    "host-gpu": _grid(
        "host-cost-h200",
        HOST,
        [Column("of the time of `torch.randn(10, 10)`", "torch cuda 10x10", "{}", "ratio")],
        "(10, 10)",
    ),
    "host-cpu": _grid(
        "host-cost-2-cores",
        HOST,
        [Column("of the time of `mu + sigma * torch.randn(10, 10)`", "torch cpu 10x10", "{}", "ratio")],
        "(10, 10)",
    ),
    "host-numpy": _grid(
        "host-cost-2-cores",
        NUMPY,
        [Column("of the time of NumPy's expression", "numpy 10x10", "{}", "ratio")],
        "(10, 10)",
    ),
    "batches-cpu": _grid("batches-1-core", batches("numpy;torch cpu"), BATCHES, "matrices x (d, n)"),
    "batches-gpu": _grid("batches-h200", batches("torch cuda"), BATCHES, "matrices x (d, n)"),
    "perturb": _grid("perturb-h200", PERTURB, PERTURBED, ""),
    "gradients": _grid(
        "torch-autograd-h200", shapes("4096x65536", "262144x1024", "1048576x128", "256x1000000"), GRADIENTS
    ),
    "jax": _grid("jax-h200", shapes("10x10", "100x1024", "1000x10000", "4096x65536", "262144x1024"), JAX),
    "never-stored": functools.partial(by_mode, NEVER_STORED),
    "cpu": _grid(CPU, shapes(*CPU_SHAPES), CPU_COLUMNS),
    "threads": _grid("cpu-2-cores", LOG2, THREADS, "normals"),
    "dask-costs": dask_costs,
    "dask-pool": dask_pool,
    "dask-blocks": dask_blocks,
    "dask-workers": dask_workers,
    "dask-limit": functools.partial(dask_limit, "distributed"),
    "dask-limit-processes": functools.partial(dask_limit, "processes"),
    "tetris-one-core": functools.partial(tetris, 1, "placements_per_second", 1e-6),
    "tetris-two-cores": functools.partial(tetris, 2, "placements_per_second", 1e-6),
    "tetris-ns": functools.partial(tetris, 1, "nanoseconds", 1.0),
    "testu01": testu01,
}
"""The figures of marked places. Each gets the results, and the path to their folder from the page."""
