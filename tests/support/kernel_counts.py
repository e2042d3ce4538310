"""Report registers, stack and PTX instruction counts of the compiled CUDA kernels.

python tests/support/kernel_counts.py            # a table, next to the committed counts of the same compilers
python tests/support/kernel_counts.py --all      # more kernels, which takes minutes
python tests/support/kernel_counts.py --update   # commit these counts for these compilers

The counts indicate speed, not correctness, and depend on the compilers, so they are no tests. Instructions are counted
in NVRTC's PTX for the kernel in C++, and in libNVVM's PTX for the kernel in Python. nvJitLink reports registers and
stack, for compute capability 9.0. Each kernel takes about two seconds.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import numba_ptx
from cuda_cpp import CUPY_OPTIONS, nvrtc_compile
from numba_ptx import HOPPER, Compiled, versions
from places import DATA
from ptx_reader import opcodes_of
from tables import COVERING, QUICK, STORE_KINDS, Variant

from multisample.backends import cupy as cupy_backend
from multisample.backends.kernels.cuda.keys import KernelKey

BASELINE = DATA / "kernel_counts.json"

Counts = dict[str, int]
# Patterns of the instructions that are counted.
INSTRUCTIONS = {
    "wide products": r"mul\.wide\.u32",
    "high products": r"mul\.hi\..*",
    "fused": r"fma\..*",
    "roots": r"(rsqrt|sqrt)\..*",
    "divisions": r"div\..*",
    "vector stores": r"st\.global\.(v\d\..*|b64)",
    "single stores": r"st\.global\.[bfu]\d+",
    "shuffles": r"shfl\..*",
    "barriers": r"bar(rier)?\.sync.*",
}


def counts_of(opcodes: collections.Counter[str], log: str) -> Counts:
    (registers,) = map(int, re.findall(r"Used (\d+) registers", log))
    (stack,) = map(int, re.findall(r"(\d+) bytes stack frame", log))
    found = {
        name: sum(count for opcode, count in opcodes.items() if re.fullmatch(pattern, opcode))
        for name, pattern in INSTRUCTIONS.items()
    }
    return {"registers": registers, "stack": stack, "instructions": sum(opcodes.values()), **found}


def python_kernels(variants: list[Variant], folder: Path) -> dict[str, Counts]:
    results = [Compiled(variant, HOPPER, folder / f"{k}.ptx") for k, variant in enumerate(variants)]
    numba_ptx.compile_all(results)
    return {
        f"Python {result}": counts_of(result.kernel.count, result.file.with_suffix(".log").read_text())
        for result in results
    }


def cpp_kernels(variants: list[Variant]) -> dict[str, Counts]:
    names = [cupy_backend.kernel_name(KernelKey(*variant, False, False, 0)) for variant in variants]
    compiled = nvrtc_compile(cupy_backend.source(), names, "compute_90", CUPY_OPTIONS)
    head, *entries = re.split(r"(?=^\.\w+ \.entry)", compiled.code.decode().rstrip("\0"), flags=re.M)
    found = {}
    for variant, name in zip(variants, compiled.names, strict=True):
        (entry,) = (text for text in entries if re.match(rf"\.\w+ \.entry {name}\b", text))
        result = Compiled(variant, HOPPER, Path())
        _, log = numba_ptx.link((head + entry).encode(), result.architecture)
        found[f"C++ {result}"] = counts_of(opcodes_of(entry), log)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help=f"write {BASELINE.name}")
    parser.add_argument(
        "--all", action="store_true", help="all pairs of choices, not one kernel for each store variant"
    )
    options = parser.parse_args()
    variants = COVERING if options.all else QUICK
    from cupy.cuda import nvrtc

    compilers = ", ".join(f"{name} {version}" for name, version in versions().items())
    compilers += ", NVRTC {}.{}".format(*nvrtc.getVersion())
    with tempfile.TemporaryDirectory() as folder:
        found = {**cpp_kernels(variants), **python_kernels(variants, Path(folder))}
    baselines: dict[str, dict[str, Any]] = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    before = baselines.get(compilers, {})
    columns = list(next(iter(found.values())))
    width = max(map(len, found))
    print(f"{compilers}; store kinds: {', '.join(STORE_KINDS)}")
    print(" " * width, *columns, sep="  ")
    for name, counts in found.items():
        old = before.get(name, counts)
        cells = [str(counts[c]) + (f" ({old[c]})" if old[c] != counts[c] else "") for c in columns]
        print(name.ljust(width), *(cell.rjust(len(c)) for cell, c in zip(cells, columns, strict=True)), sep="  ")
    changed = [name for name in found if before.get(name, found[name]) != found[name]]
    print(f"{len(changed)} of {len(found)} kernels differ from the committed counts (in parentheses)")
    if not before:
        print("there are no committed counts of these compilers")
    if options.update:
        baselines[compilers] = {**before, **found}
        BASELINE.write_text(json.dumps(baselines, indent=1) + "\n")


if __name__ == "__main__":
    main()
