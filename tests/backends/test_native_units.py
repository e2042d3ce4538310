"""Units of kernels: every call on CUDA has one, C++ finds it, and PyTorch's operators find the kernels of the CPU."""

import collections
import ctypes
import itertools
import os
import re
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_cpp import compile_cpp, requires_gxx
from launches import a_launch, address_of
from processes import run_python

import multisample
from multisample import BackendUnavailableError
from multisample.backends import registry
from multisample.backends.element_types import MATRIX_TYPES, SIZES, DTypeName, ElementType
from multisample.backends.kernels.cpu import calls
from multisample.backends.launch import HOST, Launch, Operation, computing_name, pack, unpack
from multisample.backends.native import csrc_files, library_cache, toolchain, units
from multisample.backends.native.compiler_flags import LIBRARIES, estimate

pytest.importorskip("torch")

LAUNCHES = [
    a_launch(operation=operation, type=element, shared_noise=shared, antithetic=antithetic, fast_math=fast, device=0)
    for operation, element in itertools.product(Operation, list(ElementType)[1:5])
    for shared, antithetic, fast in itertools.product((0, 1), repeat=3)
]
ONE_COLUMN = [launch._replace(results=1) for launch in LAUNCHES if launch.operation == Operation.gradient]
"""Gradients with one result."""
ON_HOST = [
    launch._replace(device=HOST, rows=9, columns=7, row_stride=stride, column_stride=72)
    for launch in LAUNCHES + ONE_COLUMN
    for stride in (2, 4, 8, 64)
    if launch.operation == Operation.sample or launch.results == 1
]


def test_every_call_on_cuda_has_one_unit() -> None:
    every = units.all_units()
    assert len(every) == 55  # fast_math has no effect on float64.
    served = collections.Counter(kind for unit in every for kind in unit.kinds)
    assert served == dict.fromkeys(map(units.kind_of, LAUNCHES), 1)
    assert len({unit.name for unit in every}) == len({unit.function for unit in every}) == len(every)
    for launch in LAUNCHES:
        unit = units.unit_of(units.kind_of(launch))
        assert unit.name.startswith(Operation(launch.operation).name)
        # The name has each option that is a template parameter and true.
        assert unit.function.count("true") == sum(option in unit.name for option in units._OPTIONS)


@requires_gxx
def test_cpp_numbers_calls_as_python_does(tmp_path: Path) -> None:
    source = tmp_path / "kinds.cpp"
    source.write_text("""#include <cstdio>
#include "torch/unit.h"
int main() {
  multisample::Launch call;
  while (std::fread(&call, sizeof call, 1, stdin) == 1) std::printf("%u ", multisample::kind_of(call));
}
""")
    compile_cpp(source, "-o", tmp_path / "kinds")
    launches = LAUNCHES + ONE_COLUMN + ON_HOST
    packed = b"".join(bytes(pack(launch)) for launch in launches)
    printed = subprocess.run([tmp_path / "kinds"], input=packed, capture_output=True, check=True).stdout
    assert list(map(int, printed.split())) == [units.kind_of(launch) for launch in launches]


def test_the_unit_of_samples_serves_gradients_with_one_result() -> None:
    for launch in ONE_COLUMN:
        sample = launch._replace(operation=Operation.sample, type=ElementType[computing_name(launch)])
        assert units.kind_of(launch) == units.kind_of(sample)


@requires_gxx
def test_a_gradient_with_one_result_is_a_product_with_noise(tmp_path: Path) -> None:
    """The cpu backend runs the samples that C++ makes of gradients."""
    source = tmp_path / "launches.cpp"
    source.write_text("""#include <cstdio>
#include "torch/unit.h"
int main() {
  multisample::Launch call;
  while (std::fread(&call, sizeof call, 1, stdin) == 1) {
    const multisample::Launch other = multisample::sample_of_product(call);
    std::fwrite(&other, sizeof other, 1, stdout);
  }
}
""")
    compile_cpp(source, "-o", tmp_path / "launches")
    d, backend = 70, registry.find("cpu")
    every_stride = (1, 1), (3, 1), (1, 99), (0, 0)
    for dtype, antithetic, strides in itertools.product(("float16", "float32", "float64"), (False, True), every_stride):
        real = "float64" if dtype == "float64" else "float32"
        z = multisample.sample(np.zeros(d), 1.0, 1, dtype=real, seed=7, antithetic=antithetic, sample_offset=5)[:, 0]
        memory, product = np.linspace(-2, 2, 3 * d).astype(dtype), np.full(d, np.nan, real)
        grad = np.ndarray((d, 1), dtype, memory, 0, [stride * memory.itemsize for stride in strides])
        options = {"antithetic": antithetic, "operation": Operation.gradient, "results": 1}
        launch = a_launch(d, 1, dtype, matrix=grad, first=address_of(product), seed=7, first_column=5, **options)
        done = subprocess.run([tmp_path / "launches"], input=bytes(pack(launch)), capture_output=True, check=True)
        backend.launch(unpack(done.stdout))
        assert product.tobytes() == (grad[:, 0].astype(real) * z).tobytes()


PROGRAM = """
import os, sys, torch
import multisample
from multisample.backends.system import cache

def built():
    return sorted(path.name.rpartition("-")[0] for path in (cache.root() / "torch_ext").glob("torch_*"))

mu = torch.zeros(3)
multisample.sample(mu, 1.0, 5, seed=7)
assert built() == ["torch_cpu"], built()
os.environ["CXX"] = "no-compiler"
wide = mu.double()
x = torch.ops.multisample.sample(wide, wide + 1, 5, seed=7)  # C++ asks Python for the kernel.
assert built() == ["torch_cpu"], built()
assert torch.equal(x, multisample.sample(wide, 1.0, 5, seed=7, backend="cpu"))
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(toolchain.missing_tools()), reason="; ".join(toolchain.missing_tools()))
def test_a_program_builds_the_operators_once(tmp_path: Path) -> None:
    environment = os.environ | {"MULTISAMPLE_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "building" in line]
    (line,) = lines
    assert line.startswith("multisample: building torch_ext for the CPU (the operators), once for this machine")


def test_a_kernel_that_cannot_be_compiled_reports_the_reason_to_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Any = registry.find("torch_ext")
    backend.prepare("cpu")

    def fail(launch: Launch) -> int:
        raise BackendUnavailableError("the compiler is on fire " * 99)

    monkeypatch.setattr(calls, "function_address", fail)
    reason = ctypes.create_string_buffer(b"!" * 50, 50)
    # No other test of this process draws such a kind: fast_math has no effect on the CPU.
    rare = {"shared_noise": 1, "antithetic": 1, "fast_math": 1}
    never = np.frombuffer(pack(a_launch(dtype="float16", operation=Operation.gradient, **rare)), np.uint8)
    assert backend._cpu.unit_loader(address_of(never), ctypes.addressof(reason), 40) == 1
    assert reason.raw == b"the compiler is on fire the compiler is" + b"\0" + b"!" * 10


ALONE = """
import sys, torch
torch.ops.load_library(sys.argv[1])
try:
    torch.ops.multisample.sample(torch.zeros(3), torch.ones(3), 5, seed=7)
except RuntimeError as error:
    assert "multisample: the kernels of this call are not loaded: kernels for the CPU need Python" in str(error), error
else:
    raise AssertionError("drawn without a kernel")
"""


def test_operators_without_the_package_raise() -> None:
    """As in a process without Python."""
    registry.find("torch_ext").prepare("cpu")
    run_python("-c", ALONE, str(library_cache.libraries(["cpu"])["cpu"]))


def test_the_estimate_follows_the_processors_and_the_work() -> None:
    cpu, cuda = LIBRARIES["cpu"], LIBRARIES["cuda"]
    assert estimate([], 2) == 0
    for processors in (1, 2, 16):
        most = estimate([cuda], 1) + estimate([cpu], 1)
        assert estimate([cpu], processors) < estimate([cpu, cuda], processors) <= most
    assert estimate([cuda.with_all_units()], 2) > 4 * estimate([cuda.with_all_units()], 16)
    assert estimate([cpu, cuda], 2) < 45
    assert estimate([cpu, cuda], 16) < 20


HEADER = (csrc_files.folder() / "element_types.h").read_text()
ROWS = re.findall(r'(?:ROW|LAST)\((\w+), (\w+), (\d), "(\w+)", (\w+)\)', HEADER)


def test_the_tables_of_element_types_in_cpp_and_in_python_have_equal_rows() -> None:
    assert [numpy for *_, numpy, _ in ROWS] == [element.name for element in ElementType][1:]
    assert [*range(len(ROWS) + 1)] == [*ElementType]
    matrix_rows = ROWS[: len(MATRIX_TYPES)]
    assert {numpy: int(size) for _, _, size, numpy, _ in matrix_rows} == SIZES
    assert [cpp for _, cpp, *_ in matrix_rows] == [row.cpp.rpartition(":")[2] for row in MATRIX_TYPES.values()]
    assert list(typing.get_args(DTypeName)) == list(MATRIX_TYPES)  # For type checkers.
