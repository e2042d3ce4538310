"""The gradient's C++ and CUDA C++ sources, proved where there is no GPU.

Whole grids of the CUDA kernels run on the CPU (see test_cuda_sources.py), and so does the CPU's own, as compiled for
other machines, with every access to memory watched by sanitizers. What compilers for the GPU make of them is looked at.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
import platform
import re
import shutil
import signal
import struct
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import multisample
from multisample.backends import csrc_files, sample_call, torch_ext_build

Array = np.ndarray[Any, Any]

SHIM = Path(__file__).parent / "shim"
DTYPES: dict[str, Any] = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}
NOISES = ("independent", "shared")
SECONDS = 300
SANITIZED = ("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")

requires_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


class Geometry(NamedTuple):
    """The fields of the C++ struct, in their order."""

    blocks: int
    threads: int
    tiles: int
    slots: int
    across: int
    one_by_run: int
    rows: int
    turns: int
    segments: int
    skip: int
    loads: int
    parts_log2: int
    groups: int
    row_step: int
    turn_step: int


_CALL = struct.Struct("PqqPPQQQQPQQPIIII")
_CASE = struct.Struct(f"{_CALL.size}sQQIIIIII")
_GEOMETRY = struct.Struct("12IQqq")
LOADS = ("at once", "side by side", "apart")


@dataclasses.dataclass
class Case:
    """A gradient, how it lies in memory, and how the sums are to be cut if not as they are for a GPU."""

    d: int
    n: int
    dtype: str = "float32"
    noise: str = "independent"
    antithetic: bool = False
    seed: int = 1
    offset: int = 0
    counter: bool = False
    """Whether the kernel finds the offset in memory, and another one in the call."""
    dim_offset: int = 0
    sample_offset: int = 0
    strides: tuple[int, int] | None = None
    """In elements; contiguous rows by default."""
    misalignment: int = 0
    """How many elements behind an aligned address the lowest one is."""
    many_rows: bool = False
    """Whether threads have several rows, as in large calls; there is no kernel for float64 without shared noise."""
    tiles: int = 0
    slots: int = 0
    turns: int = 0
    backwards: bool = False

    @property
    def size(self) -> int:
        return np.dtype(DTYPES[self.dtype]).itemsize

    @property
    def rows(self) -> int:
        """Of a thread."""
        if not self.many_rows:
            return 1
        return 1 if self.dtype == "float64" and self.noise != "shared" else 2 if self.antithetic else 4

    def memory(self) -> tuple[Array, Array, int]:
        """As long as it needs to be, NaN wherever it is not the gradient's; the gradient in it, and where it begins."""
        strides = [stride * self.size for stride in self.strides or (self.n, 1)]
        reach = [stride * (length - 1) for stride, length in zip(strides, (self.d, self.n), strict=True)]
        first = self.misalignment * self.size - sum(r for r in reach if r < 0)
        memory = np.full(first + sum(r for r in reach if r > 0) + self.size, 0xFF, np.uint8)
        grad: Array = np.ndarray((self.d, self.n), DTYPES[self.dtype], memory, first, strides)
        draw = np.random.default_rng(self.d * 10007 + self.n)
        # Where elements share memory, the last one stays.
        grad[...] = draw.normal(size=grad.shape).astype(np.float32).astype(grad.dtype)
        return memory, grad, first

    def packed(self) -> bytes:
        memory, grad, first = self.memory()
        call = _CALL.pack(
            first, *grad.strides, 0, 0, self.d, self.n, self.dim_offset, self.sample_offset, 0, self.seed,
            self.offset ^ 0x100000005 if self.counter else self.offset, self.counter,
            sample_call.ELEMENT_TYPES[self.dtype], self.noise == "shared", self.antithetic, False,
        )  # fmt: skip
        most = self.d // self.rows
        tiles = min(self.tiles, most) if self.tiles else self.tiles
        head = _CASE.pack(
            call, len(memory), self.offset, self.rows if self.many_rows else 0, tiles, self.slots, self.turns,
            self.backwards, 0,
        )  # fmt: skip
        return head + memory.tobytes()

    def check(self, mu: Array, sigma: Array) -> None:
        real = "float64" if self.dtype == "float64" else "float32"
        generator = multisample.Generator(self.seed)
        generator.state = {**generator.state, "offset": self.offset}
        z = multisample.sample(
            np.zeros(self.d), np.ones(self.d), self.n, backend="cpu", dtype=real, generator=generator, noise=self.noise,
            dim_offset=self.dim_offset, sample_offset=self.sample_offset, antithetic=self.antithetic,
        )  # fmt: skip
        _, grad, _ = self.memory()
        g = grad.astype(np.longdouble)
        for got, terms in ((mu, g), (sigma, g * np.asarray(z))):
            # Fewer than 16 roundings, that of the result among them; of float64, a few more in long sums.
            bound = np.abs(terms).sum(1) * (64 * 2.0**-53 if real == "float64" else 16 * 2.0**-24)
            wrong = np.argwhere(~(np.abs(got - terms.sum(1)) <= bound))
            assert len(wrong) == 0, (self, wrong[:5].tolist())


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program that runs the kernels."""
    folder = tmp_path_factory.mktemp("gradient")
    # Shared memory is one for all threads, and filled with garbage before each block.
    ids = itertools.count()
    source = (csrc_files.folder() / "gradient_kernel.cuh").read_text()
    source = re.sub(
        r"__shared__ ([^;]+?) (\w+)((?:\[[^;]+?\])+);",
        lambda match: f"auto& {match[2]} = cuda_shim::shared<{match[1]}{match[3]}, {next(ids)}>();",
        source,
    )
    assert "__shared__" not in source
    assert next(ids) == 3
    (folder / "gradient_kernel.cuh").write_text(source)
    program = folder / "run_gradient"
    command = [
        "g++", "-std=c++17", "-ffp-contract=off", *SANITIZED, *WARNINGS, f"-I{folder}",
        f"-I{csrc_files.folder()}", f"-I{SHIM}", "-o", str(program), str(SHIM / "run_gradient.cpp"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-5000:]
    return program


def run(runner: Path, cases: Iterable[Case]) -> list[tuple[Geometry, Array, Array]]:
    """Run and check them all."""
    cases = list(cases)
    done = subprocess.run(
        [str(runner)], input=b"".join(case.packed() for case in cases), capture_output=True, timeout=SECONDS,
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"},
    )  # fmt: skip
    results, at, taken = done.stdout, 0, []
    for case in cases:
        real = np.float64 if case.dtype == "float64" else np.float32
        size = case.d * np.dtype(real).itemsize
        if len(results) < at + _GEOMETRY.size + 2 * size:  # Here it ended.
            pytest.fail(f"{case}\n{done.stderr.decode()[:4000]}", pytrace=False)
        geometry = Geometry(*_GEOMETRY.unpack_from(results, at))
        at += _GEOMETRY.size
        mu, sigma = (np.frombuffer(results, real, case.d, at + k * size) for k in (0, 1))
        at += 2 * size
        case.check(mu, sigma)
        taken.append((geometry, mu, sigma))
    assert len(results) == at
    assert done.returncode == 0, done.stderr.decode()[:4000]
    return taken
