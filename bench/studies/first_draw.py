"""The first draw on a new machine, and the first draws of further kinds: fresh processes, each with a new cache.

python -m bench.studies.first_draw results.json [cpu] [cuda] [wheel-cuda] [whole]

"cpu" and "cuda": seconds of `sample` in a process whose library is imported and whose device is ready, for each
backend: the first draw, then draws of other kinds, then the first draw of another process with the same cache. "whole":
seconds of `python -m multisample build torch_ext`. Each on all processors and on two.

"wheel-cuda": compiles the libraries of a wheel into a copy of the package, then measures three processes, each with an
empty cache. The clock starts before `import torch`.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import multisample
from bench.studies.rows import Rows, main

# Later kinds by what differs from the first draw, which is float32.
KINDS: Mapping[str, Mapping[str, object]] = {
    "first draw": {},
    "float16": {"dtype": "float16"},
    "antithetic": {"antithetic": True},
    "shared": {"noise": "shared"},
}
ARRAYS = {
    "cpu": {"cpu": "numpy", "torch_ext": "torch", "jax": "jax.numpy"},
    "cuda": {"torch_ext": "torch", "cupy": "cupy", "numba": "torch"},
}
# Arrays of a library, which make the device ready, then the import of multisample, and draws.
PROGRAM = """
import importlib, json, sys, time
library, device, backend, kinds, is_wheel = json.loads(sys.argv[1])
seconds, start = {}, time.perf_counter()
def end(name, x):
    global start
    float(x.ravel()[0])  # Waits for the device.
    now = time.perf_counter()
    seconds[f"{name} s"], start = now - start, now
module, place = importlib.import_module(library), {"device": device} if library == "torch" else {}
end(f"import {library}", module.zeros(1, **place))
mu, sigma = (make(1000, dtype=module.float32, **place) for make in (module.zeros, module.ones))
end("tensors", mu + sigma)
import multisample
end("import multisample", mu)
for name, options in kinds.items():
    end(name, multisample.sample(mu, sigma, 1000, seed=7, backend=backend, **options))
if is_wheel:
    with open("/proc/self/maps") as maps:
        libraries = {line.split()[-1] for line in maps if "multisample_torch_" in line}
    assert libraries and all("/prebuilt/" in library for library in libraries), libraries
print(json.dumps(seconds))
"""
BUILD_WHEEL = """
import sys
from multisample.backends.native import prebuilt, wheels
wheels.build_all(sys.argv[1:], prebuilt.root())
"""
CORES = sorted({2, len(os.sched_getaffinity(0))})


def run(cache: str, cores: int, *arguments: str, folder: Path | None = None) -> str:
    """The output of Python on some processors in a folder, with its caches in the folder `cache`."""
    folders = dict.fromkeys(("MULTISAMPLE_CACHE_DIR", "NUMBA_CACHE_DIR", "CUDA_CACHE_PATH"), cache)
    command = ["taskset", "-c", ",".join(map(str, sorted(os.sched_getaffinity(0))[:cores])), sys.executable, *arguments]
    return subprocess.run(
        command, env=os.environ | folders, cwd=folder, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def seconds(cache: str, cores: int, *arguments: object, folder: Path | None = None) -> dict[str, float]:
    found: dict[str, float] = json.loads(run(cache, cores, "-c", PROGRAM, json.dumps(arguments), folder=folder))
    return found


def draws(device: str) -> Rows:
    for cores in CORES:
        for backend, library in ARRAYS[device].items():
            with tempfile.TemporaryDirectory() as cache:
                call = library, device, "auto" if backend == "jax" else backend
                cold = seconds(cache, cores, *call, KINDS, False)
                cached = seconds(cache, cores, *call, {"cached": {}}, False)["cached s"]
            kinds = {f"{name} s": cold[f"{name} s"] for name in KINDS}
            yield {"case": f"{device}, {cores} cores", "call": backend, **kinds, "cached s": cached}


def wheel(device: str = "cuda") -> Rows:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(Path(multisample.__file__).parent, folder / "multisample")
        run(name, CORES[-1], "-c", BUILD_WHEEL, *sorted({"cpu", device}), folder=folder)
        run(name, CORES[-1], "-m", "compileall", "-q", "multisample", folder=folder)  # As pip does.
        for k in range(3):
            with tempfile.TemporaryDirectory() as cache:
                found = seconds(cache, CORES[-1], "torch", device, "torch_ext", KINDS, True, folder=folder)
            yield {"case": f"{device}, a wheel", "call": f"process {k}", **found}


def whole() -> Rows:
    for cores in CORES:
        with tempfile.TemporaryDirectory() as cache:
            start = time.perf_counter()
            run(cache, cores, "-m", "multisample", "build", "torch_ext")
            yield {"case": f"whole, {cores} cores", "call": "build torch_ext", "s": time.perf_counter() - start}


if __name__ == "__main__":
    parts = {device: lambda device=device: draws(device) for device in ARRAYS}
    main(__doc__ or "", {**parts, "wheel-cuda": wheel, "whole": whole})
