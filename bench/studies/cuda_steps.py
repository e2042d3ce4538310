"""From the original kernel to ours, step by step, and our kernels beside memset: the figures of csrc/README.md.

python bench/studies/cuda_steps.py results.json

Each figure is the time of a `cudaMemsetAsync` over the output's bytes, the practical limit of writing, divided by the
time of the kernel in the same run: medians of interleaved repetitions, by device events, with outputs rotated past the
cache. Predictions come from earlier figures, from counted instructions (of the loop for four normals, in the machine
code for compute capability 9.0), or are the target. For "unrolled eight times" and "columns shuffled between lanes", a
first measurement of the same idea was known.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy
import numpy as np

import multisample
from multisample.backends.cupy import OPTIONS
from multisample.backends.kernels.cuda.geometry import KERNEL_STORES
from multisample.backends.launch import KernelKey
from multisample.backends.native import csrc_files

REPEATS = 15
ROTATED = 2**31  # Bytes of outputs in rotation: far more than a cache.
BUSY = 2**28  # Bytes whose fill takes longer, 60 us, than a call on the host.
D, N = 262_144, 1024
UNALIGNED = (4096, 65_537)

# Name; kernel with template arguments; shape; predicted fraction of memset; reason.
STEPS: list[tuple[str, str, tuple[int, int], float | None, str]] = [
    ("the original kernel: shared noise from memory", "original", (D, N), None, "scalar stores of cached noise"),
    ("noise made in the kernel", "noise_in_the_kernel", (D, N), 0.10, "four times the words, and slow functions"),
    ("four columns a thread, one store", "along_the_row<multisample::kLibrary>", (D, N), 0.40, "fewer words"),
    ("portable transform", "along_the_row<multisample::kPortable>", (D, N), 0.61, "131 instructions"),
    ("down the dimensions", "down_the_rows<multisample::kPortable, 1>", (D, N), 0.65, "3 products and 3 xors fewer"),
    ("unrolled eight times", "down_the_rows<multisample::kPortable, 8>", (D, N), 0.67, "120 instructions"),
    ("long bands, prefetched", "portable", (D, N), 0.69, "the start of a block costs two of its turns"),
    ("fast: four columns a thread", "along_the_row<multisample::kFast>", (D, N), 0.91, "memory-bound"),
    ("fast: down the dimensions", "down_the_rows<multisample::kFast, 8>", (D, N), 0.95, "memory-bound"),
    ("fast: prefetched", "fast_math", (D, N), 0.95, "memory-bound"),
    ("odd rows: four stores", "four_stores<multisample::kPortable>", UNALIGNED, 0.56, "as far as was known"),
    ("odd rows, fast: four stores", "four_stores<multisample::kFast>", UNALIGNED, 0.62, "as far as was known"),
    ("odd rows, fast: through shared memory", "through_shared_memory<multisample::kFast>", UNALIGNED, 0.80,
     "8 instructions more, whole lines"),
    ("odd rows, fast: columns shuffled between lanes", "fast_math", UNALIGNED, 0.80, "at most 8 instructions more"),
    ("odd rows: columns shuffled between lanes", "portable", UNALIGNED, 0.62, "at most 8 instructions more"),
]  # fmt: skip

SHAPES = [
    (4096, 65_536), (262_144, 1024), (1_048_576, 128), (4_194_304, 32), (4096, 65_537), (262_144, 1025),
    (1_048_576, 127), (4_194_304, 33), (10, 1_000_000), (2500, 1024), (500, 1024),
]  # fmt: skip
MODES: dict[str, dict[str, Any]] = {
    "portable": {},
    "fast_math": {"fast_math": True},
    "shared": {"noise": "shared"},
    "shared, fast_math": {"noise": "shared", "fast_math": True},
}


class Timer:
    """Medians of several calls on the device. The calls alternate, so that a disturbance slows all."""

    def __init__(self, shape: tuple[int, int]) -> None:
        d, n = shape
        self.bytes = 4 * d * n
        pitch = -(-self.bytes // 256) * 256
        count = max(2, min(256, ROTATED // pitch))
        memory = cupy.empty(count * pitch, np.uint8)
        self.size = memory.size
        self.busy = memory.data.ptr, min(BUSY, self.size)
        self.outs = [memory[k * pitch :][: self.bytes].view(np.float32).reshape(d, n) for k in range(count)]
        self.turn = 0

    def medians(self, calls: dict[str, Callable[[Any], object]]) -> dict[str, float]:
        """Seconds of each call of an output, and of memset under the name "memset"."""
        stream = cupy.cuda.get_current_stream()

        def memset(out: Any) -> None:
            cupy.cuda.runtime.memsetAsync(out.data.ptr, 1, self.bytes, stream.ptr)

        times: dict[str, list[float]] = {name: [] for name in ("memset", *calls)}
        for repeat in range(-3, REPEATS):
            for name, call in (("memset", memset), *calls.items()):
                out = self.outs[self.turn % len(self.outs)]
                self.turn += 1
                start, stop = cupy.cuda.Event(), cupy.cuda.Event()
                # The device is busy until the call has been made, so that host time does not add to the figure.
                cupy.cuda.runtime.memsetAsync(self.busy[0], 1, self.busy[1], stream.ptr)
                start.record()
                call(out)
                stop.record()
                stop.synchronize()
                if repeat >= 0:
                    times[name].append(cupy.cuda.get_elapsed_time(start, stop) / 1e3)
        return {name: statistics.median(values) for name, values in times.items()}


def vectors(d: int) -> tuple[Any, Any]:
    return cupy.linspace(-1, 1, d, dtype=np.float32), cupy.linspace(0.5, 2, d, dtype=np.float32)


def drawing(mu: Any, sigma: Any, n: int, **options: Any) -> Callable[[Any], object]:
    return lambda out: multisample.sample(mu, sigma, n, seed=7, out=out, **options)


def step_calls() -> tuple[dict[tuple[int, int], dict[str, Callable[[Any], object]]], dict[str, Any]]:
    """The steps of each shape, and the resources of their kernels."""
    names = [kernel for _, kernel, _, _, _ in STEPS if "<" in kernel]
    program = f'// {csrc_files.digest()}\n#include "cuda_steps.cuh"\n'
    options = (*OPTIONS, f"-I{Path(__file__).parent}")
    expressions = [f"multisample::{name}" for name in names]
    # The original kernel was compiled with --use_fast_math; ours never are.
    module = cupy.RawModule(code=program, options=options, name_expressions=expressions)
    original = cupy.RawModule(code=program, options=(*options, "--use_fast_math"))
    calls: dict[tuple[int, int], dict[str, Callable[[Any], object]]] = {}
    resources: dict[str, Any] = {}
    z = cupy.random.standard_normal(N, dtype=np.float32)
    for name, kernel, (d, n), _, _ in STEPS:
        mu, sigma = vectors(d)
        arguments = (np.uint32(d), np.uint32(n), np.uint64(7))
        if kernel in MODES:
            call = drawing(mu, sigma, n, backend="cupy", **MODES[kernel])
        else:
            function = (
                original.get_function("original") if kernel == "original"
                else module.get_function(kernel if "<" not in kernel else f"multisample::{kernel}")
            )  # fmt: skip
            if kernel == "original":

                def call(out: Any, f: Any = function, mu: Any = mu, sigma: Any = sigma) -> None:
                    f((D,), (N,), (mu, sigma, z, out, np.int32(N)))
            else:
                groups = -(-n // 4)
                blocks = {
                    "noise_in_the_kernel": d,
                    "along_the_row": d * -(-groups // 4096),
                }.get(kernel.partition("<")[0], -(-groups // 256) * -(-d // 32))
                threads = 1024 if kernel == "noise_in_the_kernel" else 256

                def call(
                    out: Any, f: Any = function, b: int = blocks, t: int = threads, mu: Any = mu, sigma: Any = sigma,
                    arguments: Any = arguments,
                ) -> None:  # fmt: skip
                    f((b,), (t,), (mu, sigma, out, *arguments))

            resources[name] = {"registers": function.num_regs, "local_bytes": function.local_size_bytes}
        calls.setdefault((d, n), {})[name] = call
    return calls, resources


def measure_steps() -> list[dict[str, Any]]:
    calls, resources = step_calls()
    rows = []
    for shape, named in calls.items():
        timer = Timer(shape)
        seconds = timer.medians(named)
        for name, kernel, of_shape, predicted, why in STEPS:
            if of_shape == shape:
                ratio = seconds["memset"] / seconds[name]
                rows.append({
                    "step": name, "kernel": kernel, "shape": shape, "predicted": predicted, "why": why,
                    "measured": round(ratio, 3), "us": round(seconds[name] * 1e6, 1), **resources.get(name, {}),
                })  # fmt: skip
        del timer
        cupy.get_default_memory_pool().free_all_blocks()
    return rows


def measure_shapes(backends: list[str]) -> list[dict[str, Any]]:
    rows = []
    for d, n in SHAPES:
        timer = Timer((d, n))
        mu, sigma = vectors(d)
        calls: dict[str, Callable[[Any], object]] = {
            f"{backend}: {mode}": drawing(mu, sigma, n, backend=backend, **options)
            for backend in backends
            for mode, options in MODES.items()
        }
        seconds = timer.medians(calls)
        terabytes = timer.bytes / seconds["memset"] / 1e12
        row: dict[str, Any] = {
            "shape": (d, n),
            "memset_us": round(seconds["memset"] * 1e6, 2),
            "TB/s": round(terabytes, 2),
        }
        row.update({name: round(seconds["memset"] / seconds[name], 3) for name in calls})
        rows.append(row)
        del timer
        cupy.get_default_memory_pool().free_all_blocks()
    return rows


def host_costs(backends: list[str]) -> dict[str, float]:
    """Microseconds of a call at (2500, 1024) on the host, without waiting for the device."""
    d, n = 2500, 1024
    costs = {}

    def cost(call: Callable[[], object]) -> float:
        best = float("inf")
        for _ in range(12):
            start = time.perf_counter()
            for _ in range(200):
                call()
            best = min(best, (time.perf_counter() - start) / 200)
            cupy.cuda.Device().synchronize()
        return round(best * 1e6, 2)

    arrays: dict[str, tuple[Any, Any, Any]] = {"cupy": (*vectors(d), cupy.empty((d, n), np.float32))}
    if "torch_ext" in backends:
        import torch

        arrays["torch_ext"] = (*(torch.as_tensor(x) for x in vectors(d)), torch.empty((d, n), device="cuda"))
    if "numba" in backends:
        from numba import cuda

        arrays["numba"] = (*(cuda.as_cuda_array(x) for x in vectors(d)), cuda.device_array((d, n), np.float32))
        arrays["numba, CuPy arrays"] = arrays["cupy"]
    for name, (mu, sigma, out) in arrays.items():
        backend = name.partition(",")[0]
        with_seed: Any = functools.partial(multisample.sample, mu, sigma, n, seed=7, backend=backend)
        costs[f"{name}, out="] = cost(functools.partial(with_seed, out=out))
        costs[f"{name}, new"] = cost(with_seed)
        costs[f"{name}, no seed, out="] = cost(
            functools.partial(multisample.sample, mu, sigma, n, backend=backend, out=out)
        )
    if "numba" in backends:
        costs["numba.cuda.device_array"] = cost(lambda: cuda.device_array((d, n), np.float32))
    if "torch_ext" in backends:
        column, scale = (x[:, None] for x in arrays["torch_ext"][:2])
        costs["torch eager, mu + sigma * randn"] = cost(lambda: column + scale * torch.randn((d, n), device="cuda"))
    return costs


def compiled_resources() -> dict[str, dict[str, int]]:
    """Registers, spilled bytes and shared memory of every kernel as compiled by nvcc; empty without nvcc."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return {}
    from multisample.backends.cupy import kernel_name

    kernels = [
        kernel_name(KernelKey(dtype, shared, antithetic, fast, stores, False, 0))
        for dtype in ("float32", "float16", "bfloat16", "float64")
        for shared in (False, True)
        for antithetic in (False, True)
        for fast in ((False,) if dtype == "float64" else (False, True))
        for stores in range(len(KERNEL_STORES))
    ]
    source = '#include "cuda/kernel.cuh"\n' + "".join(
        "template __global__ void " + name
        + "(const __grid_constant__ multisample::Draw, const __grid_constant__ multisample::Geometry);\n"
        for name in kernels
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "all.cu")
        path.write_text(source)
        command = [nvcc, "-std=c++17", "-arch=sm_90", "-Xptxas", "-v", f"-I{csrc_files.folder()}", "-cubin"]
        done = subprocess.run(
            [*command, "-o", str(path) + "bin", str(path)], capture_output=True, text=True, check=True
        )
    pattern = re.compile(
        r"Compiling entry function '(\S+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers.*?(\d+) bytes smem",
        re.S,
    )
    tool = shutil.which("cu++filt") or shutil.which("c++filt")
    found = {}
    for mangled, stores, loads, registers, shared in pattern.findall(done.stderr):
        name = mangled
        if tool:
            name = subprocess.run([tool, mangled], capture_output=True, text=True).stdout.strip() or mangled
        match = re.search(r"sample_kernel<(.*?)>\(", name)
        found[match.group(1) if match else name] = {
            "registers": int(registers), "spill_stores": int(stores), "spill_loads": int(loads), "shared": int(shared),
        }  # fmt: skip
    return found


def numba_resources() -> dict[str, dict[str, int]]:
    """Registers, local and shared memory of the kernels that the numba backend has compiled so far."""
    from multisample.backends.numba import BACKEND

    noises, pairs, transforms = ("independent", "shared"), ("", ", antithetic"), ("portable", "fast")
    found = {}
    for key, kernel in BACKEND.compiled.items():
        if isinstance(key, KernelKey) and not key.origin_in_memory:
            noise, transform = noises[key.common_noise] + pairs[key.antithetic], transforms[key.fast_math]
            found[f"{key.dtype}, {noise}, {transform}, {KERNEL_STORES[key.stores]}"] = {
                "registers": kernel.regs_per_thread,
                "local": kernel.local_mem_per_thread,
                "shared": kernel.shared_mem_per_block,
            }
    return found


def environment() -> dict[str, str]:
    runtime = cupy.cuda.runtime
    versions = {
        "gpu": runtime.getDeviceProperties(0)["name"].decode(),
        "driver": str(runtime.driverGetVersion()),
        "runtime": str(runtime.runtimeGetVersion()),
        "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
        "python": platform.python_version(),
        "multisample": multisample.__version__,
        "sources": csrc_files.digest()[:12],
    }
    for package in (
        "torch", "cupy-cuda12x", "cupy-cuda13x", "numba", "numba-cuda", "nvidia-nvvm", "nvidia-nvjitlink", "numpy",
    ):  # fmt: skip
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    smi = shutil.which("nvidia-smi")
    if smi:
        query = ["--query-gpu=driver_version,clocks.sm,clocks.max.sm,clocks.mem", "--format=csv,noheader"]
        versions["nvidia-smi"] = subprocess.run([smi, *query], capture_output=True, text=True).stdout.strip()
    nvcc = shutil.which("nvcc")
    if nvcc:
        versions["nvcc"] = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout.split()[-1]
    return versions


def main(path: str) -> None:
    backends = [name for name, status in multisample.backends().items() if status.available and name != "cpu"]
    for backend in backends:
        multisample.sample(*vectors(4), 8, seed=7, backend=backend)
    result = {
        "environment": environment(),
        "steps": measure_steps(),
        "fraction_of_memset": measure_shapes(backends),
        "host_us": host_costs(backends),
        "kernels": compiled_resources(),
        "numba_kernels": numba_resources() if "numba" in backends else {},
    }
    Path(path).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["environment"], indent=1))
    for row in result["steps"]:
        print(f"{row['step']:50} {row['shape']!s:16} predicted {row['predicted']}  measured {row['measured']}")
    for row in result["fraction_of_memset"]:
        print({key: value for key, value in row.items() if not isinstance(value, str)})
    print(result["host_us"])


if __name__ == "__main__":
    main(sys.argv[1])
