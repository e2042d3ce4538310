"""The PTX of the Python kernel, from Numba and NVIDIA's compilers, without a GPU.

No compiler may change a kernel's numbers. The tests read PTX, which the driver or nvJitLink compiles to machine code.
PTX's rules let that step fuse a product with the sum that uses it, so no sum may use a plain product.
"""

from __future__ import annotations

import importlib.resources
import itertools
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba_ptx
import pytest
from cuda_cpp import nvrtc_compile
from numba_ptx import HOPPER, Capability, Compiled
from ptx_reader import Kernel, unexpected_operations
from tables import QUICK, STORE_KINDS, Variant

from multisample.backends import nvrtc
from multisample.backends.kernels.cuda import geometry, group, kernel_choice
from multisample.backends.kernels.cuda.keys import KernelKey
from multisample.backends.launch import PACKED_LAUNCH, SIZES, Launch, pack

pytestmark = pytest.mark.slow  # Compiling a kernel takes seconds.
OTHERS: list[Capability] = [(7, 5), (8, 0), (10, 0)]
Build = Callable[..., Path]


def compile_all(build_once: Build, name: str, jobs: list[tuple[Any, Capability]], origin: bool) -> list[Compiled]:
    """Compile these kernels in a separate process, once for all workers."""
    sources = [Path(str(importlib.resources.files("multisample.backends"))).resolve(), Path(numba_ptx.__file__)]

    def make(folder: Path) -> None:
        try:
            numba_ptx.compile_all([Compiled(*job, folder / f"{k}.ptx") for k, job in enumerate(jobs)], origin)
        except numba_ptx.CannotCompileError as error:
            pytest.skip(str(error))

    folder = build_once(name, (jobs, origin, numba_ptx.versions()), sources, make)
    return [Compiled(*job, folder / f"{k}.ptx") for k, job in enumerate(jobs)]


@pytest.fixture(scope="session")
def compiled(build_once: Build) -> list[Compiled]:
    """Kernels for compute capability 9.0, and some for other capabilities."""
    jobs = [(variant, HOPPER) for variant in QUICK]
    jobs += zip(QUICK[:3], OTHERS, strict=True)
    jobs.append((("bfloat16", False, False, False, 0), (7, 5)))
    # One process per dtype: kernels of a dtype share most functions, which a process compiles once.
    return [
        result
        for dtype in SIZES
        for result in compile_all(build_once, f"numba_ptx_{dtype}", [job for job in jobs if job[0][0] == dtype], False)
    ]


# --- Linking --------------------------------------------------------------------------------------


def test_nvjitlink_links_every_kernel_without_a_warning(compiled: list[Compiled]) -> None:
    for result in compiled:
        assert result.file.with_suffix(".cubin").read_bytes().startswith(b"\x7fELF"), str(result)
        assert re.search(rf"^\.target {result.architecture}\b", result.ptx, re.M), str(result)
        log = result.file.with_suffix(".log").read_text()
        warnings = [line for line in log.splitlines() if re.search("warning|error", line, re.I)]
        assert not warnings, (str(result), warnings)


def test_staged_kernels_take_less_shared_memory_where_there_is_little(build_once: Build) -> None:
    staged: Variant = ("float32", False, False, False, STORE_KINDS.index("staged"))
    sizes = {(7, 5): 18560, (8, 9): 18560, (9, 0): 34304}
    for result in compile_all(build_once, "numba_ptx_staged", [(staged, capability) for capability in sizes], False):
        name = nvrtc.kernel_name(KernelKey(*staged, False, False, 0))
        architecture = result.architecture.replace("sm", "compute")
        in_cpp = nvrtc_compile(nvrtc.source(), [name], architecture, nvrtc.ALL_OPTIONS).code.decode()
        of_arrays = [re.findall(r"^\s*\.shared .*\[(\d+)\]", ptx, re.M) for ptx in (result.ptx, in_cpp)]
        assert [sum(map(int, arrays)) for arrays in of_arrays] == 2 * [sizes[result.capability]], str(result)


def test_kernels_have_the_launch_bounds_of_the_geometry(compiled: list[Compiled]) -> None:
    for result in compiled:
        threads, blocks = result.kernel.bounds["maxntid"], result.kernel.bounds["minnctapersm"]
        most = {
            "shifted": geometry.SHIFTED_THREADS, "staged": geometry.SHORT_ROW_THREADS,
            "transposed": geometry.TRANSPOSED_THREADS,
            "transposed_staged": geometry.staged_threads(result.variant[1]), "few_columns": geometry.FEW_THREADS,
            "small_matrices": kernel_choice.SMALL_THREADS, "plain": geometry.PLAIN_THREADS,
            "plain_transposed": geometry.PLAIN_TRANSPOSED_THREADS,
        }  # fmt: skip
        assert threads == most.get(result.store_kind, geometry.MOST_THREADS), str(result)
        # ptxas ignores a bound that exceeds the threads of a multiprocessor.
        assert 2 * threads <= threads * blocks <= {(7, 5): 1024}.get(result.capability, 2048), str(result)


# --- Parameters -----------------------------------------------------------------------------------

_SIZES = {"u32": 4, "s32": 4, "b32": 4, "u64": 8, "s64": 8, "b64": 8}


def placed(kernel: Kernel) -> list[tuple[int, str]]:
    """Offset and type of each parameter, with natural alignment."""
    places, end = [], 0
    for kind in kernel.parameters:
        size = _SIZES[kind]
        offset = -(-end // size) * size
        places.append((offset, kind))
        end = offset + size
    return places


def test_parameters_match_the_packed_bytes(compiled: list[Compiled]) -> None:
    """Every field has a different value, which the kernel's parameters read at the expected offset."""
    numbers = itertools.count(1)
    expected = [next(numbers) for _ in (*Launch._fields, *geometry.Geometry._fields)]
    count = len(Launch._fields)
    packed = pack(Launch(*expected[:count])) + geometry._STRUCT.pack(*expected[count:])
    assert len(packed) == PACKED_LAUNCH + geometry.PACKED_GEOMETRY
    for result in compiled:
        places = placed(result.kernel)
        formats = {kind: f"<{'_I_Q'[size // 2 - 1]}" for kind, size in _SIZES.items()}
        found = [struct.unpack_from(formats[kind], packed, offset)[0] for offset, kind in places]
        assert found == expected, str(result)
        assert places[-1][0] + _SIZES[places[-1][1]] == len(packed), str(result)


def fields_read(kernel: Kernel) -> set[str]:
    """Names of the fields of the launch that the kernel reads."""
    loads = (instruction for instruction in kernel.instructions if instruction.opcode.startswith("ld.param"))
    indices = {int(instruction.operands[1].rpartition("_param_")[2].removesuffix("]")) for instruction in loads}
    return {name for index, name in enumerate(Launch._fields) if index in indices}


def test_kernels_with_words_in_memory_have_the_same_parameters(compiled: list[Compiled], build_once: Build) -> None:
    """nvJitLink links these kernels. Their speed does not matter."""
    results = compile_all(build_once, "numba_ptx_origin", [(variant, HOPPER) for variant in QUICK[::2]], True)
    for result in results:
        by_value = next(other for other in compiled if (other.variant, other.capability) == (result.variant, HOPPER))
        assert placed(result.kernel) == placed(by_value.kernel), str(result)
        assert result.kernel.bounds == by_value.kernel.bounds, str(result)
        assert result.file.with_suffix(".cubin").read_bytes().startswith(b"\x7fELF"), str(result)
        origin = {"seed_at", "first_column_at"} | (set() if result.variant[1] else {"first_row_at"})
        assert fields_read(result.kernel) >= origin, str(result)
        assert not fields_read(by_value.kernel) & origin, str(result)


# --- Arithmetic -----------------------------------------------------------------------------------


def test_kernels_have_no_other_floating_point_operations(compiled: list[Compiled]) -> None:
    for result in compiled:
        dtype, _, _, fast, _ = result.variant
        found = result.kernel.count
        assert found["ret"] > 0 and sum(found.values()) > 300, str(result)
        assert not unexpected_operations(found, dtype, fast), str(result)
        # Devices before 8.0 round to bfloat16 without an instruction.
        assert result.capability >= (8, 0) or "cvt.rn.bf16.f32" not in found, str(result)
        assert not re.search(r"\.local\b|__local_depot|\.extern\b", result.ptx), str(result)


def test_no_sum_uses_a_plain_product(compiled: list[Compiled]) -> None:
    wrong = ".entry f() {\n mul.f32 %f3, %f2, %f2;\n neg.f32 %f4, %f3;\n add.f32 %f5, %f4, %f1;\n}"
    assert [instruction.results for instruction in Kernel(wrong).sums_of_products()] == [["%f5"]]
    for result in compiled:
        assert not result.kernel.sums_of_products(), str(result)


def test_fast_math_has_the_constants_of_the_stream() -> None:
    text = (importlib.resources.files("multisample") / "STREAM.md").read_text()
    section = re.split(r"^### fast_math.*$", text, flags=re.M)[1].split("\n## ")[0].split("\n### ")[0]
    numbers = [float.fromhex(number) for number in re.findall(r"-?0x[01]\.[0-9a-f]+p[+-]\d+", section)]
    assert numbers == [group._MINUS_2_LN_2, group._TO_ANGLE]
    assert (group._TO_UNIT, group._TO_UNIT_HALF) == (2.0**-32, 2.0**-33)
