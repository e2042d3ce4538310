"""The PTX of the plain kernels in Python, from Numba and NVIDIA's compilers, without a GPU.

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

import numba_ptx
import pytest
from numba_ptx import HOPPER, Capability, Compiled
from ptx_reader import Kernel, unexpected_operations
from tables import STORE_KINDS, VARIANTS, Variant

from multisample.backends.kernels.cuda import geometry, group
from multisample.backends.launch import PACKED_LAUNCH, Launch, pack

pytestmark = pytest.mark.slow  # Compiling a kernel takes up to a second.
OTHERS: list[Capability] = [(7, 5), (8, 0), (10, 0)]
PLAIN = [variant for variant in VARIANTS if STORE_KINDS[variant[-1]].startswith("plain")]
Build = Callable[..., Path]


@pytest.fixture(scope="session")
def compiled(build_once: Build) -> list[Compiled]:
    """All kernels for compute capability 9.0, and some for other capabilities; compiled once for all workers."""
    jobs: list[tuple[Variant, Capability]] = [(variant, HOPPER) for variant in PLAIN]
    jobs += [(variant, capability) for variant in PLAIN if not any(variant[1:4]) for capability in OTHERS]
    sources = [Path(str(importlib.resources.files("multisample.backends"))).resolve(), Path(numba_ptx.__file__)]

    def make(folder: Path) -> None:
        try:
            numba_ptx.compile_all([Compiled(*job, folder / f"{k}.ptx") for k, job in enumerate(jobs)])
        except numba_ptx.CannotCompileError as error:
            pytest.skip(str(error))

    folder = build_once("numba_ptx", (jobs, numba_ptx.versions()), sources, make)
    return [Compiled(*job, folder / f"{k}.ptx") for k, job in enumerate(jobs)]


# --- Linking --------------------------------------------------------------------------------------


def test_nvjitlink_links_every_kernel_without_a_warning(compiled: list[Compiled]) -> None:
    for result in compiled:
        assert result.file.with_suffix(".cubin").read_bytes().startswith(b"\x7fELF"), str(result)
        assert re.search(rf"^\.target {result.architecture}\b", result.ptx, re.M), str(result)
        log = result.file.with_suffix(".log").read_text()
        warnings = [line for line in log.splitlines() if re.search("warning|error", line, re.I)]
        assert not warnings, (str(result), warnings)


def test_kernels_have_the_launch_bounds_of_the_geometry(compiled: list[Compiled]) -> None:
    for result in compiled:
        threads, blocks = result.kernel.bounds["maxntid"], result.kernel.bounds["minnctapersm"]
        most = {"plain": geometry.PLAIN_THREADS, "plain_transposed": geometry.PLAIN_TRANSPOSED_THREADS}
        assert threads == most[result.store_kind], str(result)
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


# --- Arithmetic -----------------------------------------------------------------------------------


def test_local_arrays_are_registers(compiled: list[Compiled]) -> None:
    """The compiler has unrolled the loops over rows and columns, and nvJitLink spills nothing."""
    for result in compiled:
        assert not re.search(r"\.local\b|__local_depot|\.extern\b", result.ptx), str(result)
        log = result.file.with_suffix(".log").read_text()
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log, (str(result), log)


def test_kernels_have_no_other_floating_point_operations(compiled: list[Compiled]) -> None:
    for result in compiled:
        dtype, _, _, fast, _ = result.variant
        found = result.kernel.count
        assert found["ret"] > 0 and sum(found.values()) > 300, str(result)
        assert not unexpected_operations(found, dtype, fast), str(result)
        # Devices before 8.0 round to bfloat16 without an instruction.
        assert result.capability >= (8, 0) or "cvt.rn.bf16.f32" not in found, str(result)


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
