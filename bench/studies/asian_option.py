"""A path-dependent option on a GPU: the kernel of `multisample.examples.asian_option` with our and cuRAND's normals.

python -m bench.studies.asian_option results.json

The kernel is the same but for the two lines that make the generator and draw four normals: cuRAND's Philox state with
`curand_normal4`. nvcc compiles all variants, with and without --use_fast_math, which also replaces cuRAND's logarithm
and square root. Launches alternate; the results have the minimum of each. Two more ways store the normals: PyTorch's
randn and `multisample.sample`, both followed by PyTorch's cumsum, exp2 and mean, on fewer paths, in time per path.

Predicted before the first run, on an H200, from the instructions of a day of four paths (133 portable, 79 fast_math;
with cuRAND 189, and 113 with --use_fast_math): portable 1.35 times cuRAND, fast_math 1.35 times cuRAND with
--use_fast_math and 2.2 times cuRAND without. PyTorch reads and writes a matrix ten times: 20 times slower than the
portable kernel.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import torch

import multisample
from bench.suites.header_peers import CURAND_KERNEL, header_folder
from multisample.backends.native import csrc_files, toolchain
from multisample.examples import asian_option

PATHS, FEWER_PATHS, SEED, REPEATS = 2**22, 2**20, 7, 15
DAYS, THREADS = asian_option.DAYS, asian_option.THREADS
DAILY = np.float32(asian_option.VOLATILITY * DAYS**-0.5 / math.log(2))
DRIFT = np.float32((asian_option.RATE - asian_option.VOLATILITY**2 / 2) / DAYS / math.log(2))
DISCOUNT = math.exp(-asian_option.RATE)

OURS = "const multisample::Stream stream(seed);", "stream.normals4(day, g)"
CURAND = "curandStatePhilox4_32_10_t state;\n  curand_init(seed, g, 0, &state);", "curand_normal4(&state)"


def source(generator: str) -> str:
    text = asian_option.KERNEL
    assert all(text.count(line) == 1 for line in OURS)
    if generator == "fast_math":
        return text.replace(OURS[1], "stream.fast_normals4(day, g)")
    if generator == "cuRAND":
        for ours, theirs in zip(OURS, CURAND, strict=True):
            text = text.replace(ours, theirs)
        return text.replace("#include <multisample/normal.h>", "#include <curand_kernel.h>")
    return text


def compiled(generator: str, *options: str) -> Any:
    home, curand = toolchain.cuda_home(), header_folder(CURAND_KERNEL)
    assert home is not None, "nvcc is neither on the PATH nor in CUDA_HOME"
    assert curand is not None, f"no {CURAND_KERNEL.name}: pip install {CURAND_KERNEL.package}"
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "kernel.cu")
        program.write_text(source(generator))
        includes = [f"-I{curand}"] if generator == "cuRAND" else []
        architecture = f"-arch=sm_{cupy.cuda.Device().compute_capability}"
        command = [home / "bin/nvcc", *asian_option.OPTIONS, *includes, *options, architecture, "-cubin", "kernel.cu"]
        subprocess.run(list(map(str, command)), cwd=folder, check=True)
        return cupy.RawModule(path=str(program.with_suffix(".cubin"))).get_function("simulate")


def in_kernel(kernel: Any) -> Callable[[], tuple[float, float]]:
    blocks = PATHS // (4 * THREADS)
    sums = cupy.empty((blocks, 2))
    arguments = np.uint64(SEED), np.uint32(DAYS), DRIFT, DAILY, np.float32(100), np.float32(100), sums

    def run() -> tuple[float, float]:
        kernel((blocks,), (THREADS,), arguments)
        return sums

    return run


def stored(draw: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        mean = torch.exp2(torch.cumsum(draw(), 0)).mean(0)
        payoff = (100 * mean - 100).clamp_min_(0).double()
        return torch.stack([payoff.sum(), (payoff * payoff).sum()])[None]

    return run


def seconds(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """The least time of each call. They alternate, so that a disturbance slows all."""
    best = dict.fromkeys(calls, math.inf)
    for repeat in range(-3, REPEATS):
        for name, call in calls.items():
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record()
            call()
            end.record()
            end.synchronize()
            if repeat >= 0:
                best[name] = min(best[name], cupy.cuda.get_elapsed_time(start, end) / 1e3)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    arguments = parser.parse_args()
    fast = "--use_fast_math"
    drift, daily = torch.full((DAYS,), float(DRIFT), device="cuda"), torch.full((DAYS,), float(DAILY), device="cuda")
    kernels = {
        "multisample": in_kernel(compiled("portable")),
        "multisample, fast_math": in_kernel(compiled("fast_math")),
        "cuRAND": in_kernel(compiled("cuRAND")),
        f"cuRAND, {fast}": in_kernel(compiled("cuRAND", fast)),
    }
    matrices = {
        "sample, then PyTorch": stored(lambda: multisample.sample(drift, daily, FEWER_PATHS, seed=SEED)),
        "PyTorch": stored(lambda: drift[:, None] + daily[:, None] * torch.randn(DAYS, FEWER_PATHS, device="cuda")),
    }
    result: dict[str, Any] = {
        "environment": {
            "device": torch.cuda.get_device_name(), "torch": torch.__version__, "cupy": cupy.__version__,
            "sources": csrc_files.digest()[:12],
        },
        "days": DAYS,
        "ways": {},
    }  # fmt: skip
    for calls, paths in ((kernels, PATHS), (matrices, FEWER_PATHS)):
        for name, time in seconds(calls).items():
            total, squares = (float(x) for x in calls[name]().sum(0))
            mean, square = DISCOUNT * total / paths, DISCOUNT**2 * squares / paths
            result["ways"][name] = {
                "paths": paths, "seconds": time, "normals per second": DAYS * paths / time,
                "price": mean, "error": math.sqrt((square - mean**2) / paths),
            }  # fmt: skip
    arguments.results.write_text(json.dumps(result, indent=1) + "\n")
    base = result["ways"]["cuRAND"]["normals per second"]
    print(f"{'Asian option':26}{'G normals/s':>12}{'over cuRAND':>13}{'price':>9}  error")
    for name, way in result["ways"].items():
        speed = way["normals per second"]
        print(f"{name:26}{speed / 1e9:12.1f}{speed / base:13.2f}{way['price']:9.4f}  {way['error']:.4f}")


if __name__ == "__main__":
    main()
