"""The PTX of the Python kernel, from Numba and NVIDIA's compilers, without a GPU.

No compiler may change a kernel's numbers. The tests read PTX, which the driver or nvJitLink compiles to machine code.
PTX's rules let that step fuse a product with the sum that uses it, so no sum may use a plain product. kernel_counts.py
counts instructions, registers and stack.
"""

from __future__ import annotations

import collections
import functools
import importlib.resources
import itertools
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba_ptx
import pytest
from cuda_cpp import CUPY_OPTIONS, nvrtc_compile
from numba_ptx import HOPPER, Capability, Compiled
from ptx_reader import FAST, Instruction, Kernel
from tables import COVERING, QUICK, STORE_KINDS, Variant

from multisample.backends import cupy as cupy_backend
from multisample.backends.kernels.cuda import geometry
from multisample.backends.kernels.cuda.keys import KernelKey
from multisample.backends.kernels.cuda.moments_geometry import PACKED_MOMENT_GEOMETRY
from multisample.backends.kernels.cuda.perturb_geometry import (
    HEAD_WORDS,
    MOST_SPANS_OF_NUMBA,
    RUN_FIELDS,
    STRIDED_FIELDS,
)
from multisample.backends.launch import PACKED_LAUNCH, SIZES, Launch, pack

# Compiling a kernel takes seconds. test_numba_functions.py has the transform of float64.
SOME: list[Variant] = [("float32", False, False, False, 0)]
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


@pytest.fixture(scope="session", params=["some", pytest.param("covering", marks=pytest.mark.slow)])
def compiled(request: pytest.FixtureRequest, build_once: Build) -> list[Compiled]:
    """Kernels for compute capability 9.0, and some for other capabilities."""
    if request.param == "some":
        return compile_all(build_once, "numba_ptx", [(variant, HOPPER) for variant in SOME], False)
    jobs = [(variant, HOPPER) for variant in dict.fromkeys([*QUICK, *COVERING[9:14]])]
    jobs += zip(QUICK[:3], OTHERS, strict=True)
    jobs.append((("bfloat16", False, False, False, 0), (7, 5)))
    # One process per dtype: kernels of a dtype share most functions, which a process compiles once.
    return [
        result
        for dtype in SIZES
        for result in compile_all(build_once, f"numba_ptx_{dtype}", [job for job in jobs if job[0][0] == dtype], False)
    ]


@pytest.fixture(scope="session")
def hopper(compiled: list[Compiled]) -> list[Compiled]:
    """The kernels for compute capability 9.0."""
    return [result for result in compiled if result.capability == HOPPER]


def test_the_ptx_reader_parses_a_small_program() -> None:
    kernel = Kernel(
        """
        .visible .entry f(.param .u64 f_param_0, .param .u32 f_param_1)
        .maxntid 288, 1, 1
        .minnctapersm 3
        {
            .reg .f32 %f<9>;
            mov.f32 %f1, 0f3f800000; // one
        $L__1:
            ld.shared.v4.u32 {%r1, %r2, %r3, %r4}, [%rd3];
            mul.f32 %f3, %f2, %f2;
            neg.f32 %f4, %f3;
            @%p2 bra $L__1;
            add.f32 %f5, %f4, %f1;
            st.global.v4.f32 [%rd1], {%f5, %f5, %f5, %f5};
            ret;
        }
        """
    )
    assert kernel.parameters == ["u64", "u32"] and kernel.bounds == {"maxntid": 288, "minnctapersm": 3}
    assert kernel.count["bra"] == 1 and sum(kernel.count.values()) == 8
    (add,) = kernel.users["%f4"]
    assert add.results == ["%f5"] and add.sources == ["%f4", "%f1"]
    assert [i.opcode for source in add.sources for i in kernel.origins(source, set())] == ["mul.f32"]
    assert kernel.constant("%f1") == "0f3F800000" and kernel.constant("%f3") is None
    assert kernel.maker("%r3") is kernel.maker("%r1")


# --- Linking --------------------------------------------------------------------------------------


def test_nvjitlink_links_every_kernel_without_a_warning(compiled: list[Compiled]) -> None:
    for result in compiled:
        assert result.file.with_suffix(".cubin").read_bytes().startswith(b"\x7fELF"), str(result)
        assert re.search(rf"^\.target {result.architecture}\b", result.ptx, re.M), str(result)
        log = result.file.with_suffix(".log").read_text()
        warnings = [line for line in log.splitlines() if re.search("warning|error", line, re.I)]
        assert not warnings, (str(result), warnings)


@pytest.mark.slow
def test_staged_kernels_take_less_shared_memory_where_there_is_little(build_once: Build) -> None:
    staged: Variant = ("float32", False, False, False, STORE_KINDS.index("staged"))
    sizes = {(7, 5): 18560, (8, 9): 18560, (9, 0): 34304}
    for result in compile_all(build_once, "numba_ptx_staged", [(staged, capability) for capability in sizes], False):
        name = cupy_backend.kernel_name(KernelKey(*staged, False, False, 0))
        architecture = result.architecture.replace("sm", "compute")
        in_cpp = nvrtc_compile(cupy_backend.source(), [name], architecture, CUPY_OPTIONS).code.decode()
        of_arrays = [re.findall(r"^\s*\.shared .*\[(\d+)\]", ptx, re.M) for ptx in (result.ptx, in_cpp)]
        assert [sum(map(int, arrays)) for arrays in of_arrays] == 2 * [sizes[result.capability]], str(result)


def test_kernels_have_the_launch_bounds_of_the_geometry(compiled: list[Compiled]) -> None:
    for result in compiled:
        threads, blocks = result.kernel.bounds["maxntid"], result.kernel.bounds["minnctapersm"]
        most = {
            "shifted": geometry.SHIFTED_THREADS, "staged": geometry.SHORT_ROW_THREADS,
            "transposed": geometry.TRANSPOSED_THREADS,
            "transposed_staged": geometry.staged_threads(result.variant[1]), "few_columns": geometry.FEW_THREADS,
            "small_matrices": geometry.SMALL_THREADS,
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


@pytest.mark.slow
def test_kernels_with_words_in_memory_have_the_same_parameters(compiled: list[Compiled], build_once: Build) -> None:
    """nvJitLink links these kernels. Their speed does not matter."""
    variants = [variant for variant in QUICK[::2] if any(result.variant == variant for result in compiled)]
    results = compile_all(build_once, "numba_ptx_origin", [(variant, HOPPER) for variant in variants], True)
    for result in results:
        by_value = next(other for other in compiled if (other.variant, other.capability) == (result.variant, HOPPER))
        assert placed(result.kernel) == placed(by_value.kernel), str(result)
        assert result.kernel.bounds == by_value.kernel.bounds, str(result)
        assert result.file.with_suffix(".cubin").read_bytes().startswith(b"\x7fELF"), str(result)
        origin = {"seed_at", "first_column_at"} | (set() if result.variant[1] else {"first_row_at"})
        assert fields_read(result.kernel) >= origin, str(result)
        # Small matrices are drawn in batches, whose words are in memory.
        reads = origin if result.store_kind == "small_matrices" else set()
        assert fields_read(by_value.kernel) & origin == reads, str(result)


# --- Arithmetic -----------------------------------------------------------------------------------

FLOAT = re.compile(r".*\.(b?f16|f32|f64)\b.*")
# Instructions that are not arithmetic: moves, loads, stores and changes of sign.
MOVES = re.compile(r"(mov|selp|neg|ld\.\w+|st\.\w+)(\.v[24])?\.(f32|f64)")
# Conversions of elements of mu and sigma, and of words.
CONVERSIONS = {
    "float32": re.compile(r"cvt\.rn\.f32\.([us](16|32|64)|f64)|cvt\.f32\.f16"),
    "float64": re.compile(r"cvt\.rn\.f64\.[us](16|32|64)|cvt\.f64\.f32|cvt\.f32\.f16"),
}


def real(result: Compiled) -> str:
    return "float64" if result.variant[0] == "float64" else "float32"


def test_kernels_have_no_other_floating_point_operations(compiled: list[Compiled]) -> None:
    for result in compiled:
        dtype, _, _, fast, _ = result.variant
        found = result.kernel.count
        assert found["ret"] > 0 and sum(found.values()) > 300, str(result)
        width = {"float32": "f32", "float64": "f64"}[real(result)]
        allowed = {f"fma.rn.{width}", f"mul.{width}", f"mul.rn.{width}", f"add.{width}", f"sub.{width}"}
        if dtype == "float64":
            approximate, allowed = set(), allowed | {"sqrt.rn.f64"}
        else:
            approximate = FAST if fast else {"rsqrt.approx.ftz.f32"}
        if dtype == "float16":
            allowed.add("cvt.rn.f16.f32")
        if dtype == "bfloat16" and result.capability >= (8, 0):
            allowed.add("cvt.rn.bf16.f32")
        assert {name for name in found if ".approx" in name or ".ftz" in name} == approximate, str(result)
        unexpected = {name for name in found if FLOAT.fullmatch(name)} - allowed - approximate
        unexpected = {
            name for name in unexpected if not MOVES.fullmatch(name) and not CONVERSIONS[real(result)].fullmatch(name)
        }
        assert not unexpected, (str(result), unexpected)
        if dtype != "float64":
            wide = {name for name in found if ".f64" in name}
            assert wide <= {"ld.param.f64", "ld.global.f64", "mov.f64", "cvt.rn.f32.f64"}, (str(result), wide)
        odd = {name for name in found if re.match(r"call|div\.(?!u32$)|rem\.|.*\.(local|r[zmp]i?)\b", name)}
        assert not odd, (str(result), odd)
        assert not re.search(r"\.local\b|__local_depot|\.extern\b", result.ptx), str(result)


def test_no_sum_uses_a_plain_product(compiled: list[Compiled]) -> None:
    """ptxas would fuse them into one operation, with one rounding instead of two."""
    for result in compiled:
        for instruction in result.kernel.instructions:
            if re.match(r"(add|sub)\.(f32|f64)", instruction.opcode):
                made = {o.opcode for source in instruction.sources for o in result.kernel.origins(source, set())}
                assert not any(opcode.startswith("mul.") for opcode in made), (str(result), instruction)


@functools.cache
def stream_numbers(section: str) -> dict[str, list[str]]:
    """The numbers of a section of STREAM.md in PTX format: L, LE, S and C, or the numbers in its formulas."""
    text = (importlib.resources.files("multisample") / "STREAM.md").read_text()
    text = re.split(r"^#+ ", re.split(rf"^### {section}.*$", text, flags=re.M)[1], flags=re.M)[0]
    literal = r"-?0x[01]\.[0-9a-f]+p[+-]\d+"
    lists = re.findall(rf"^    (\w+)\s+= ({literal}(?:,\s+{literal})*)", text, re.M)
    named = {name: re.findall(literal, numbers) for name, numbers in lists} or {"": re.findall(literal, text)}
    return {name: [number_bits(float.fromhex(n), section == "float64") for n in ns] for name, ns in named.items()}


def number_bits(number: float, wide: bool = False) -> str:
    return f"0d{struct.pack('>d', number).hex().upper()}" if wide else f"0f{struct.pack('>f', number).hex().upper()}"


def polynomials(kernel: Kernel) -> collections.Counter[tuple[str, ...]]:
    """Coefficients of all Horner evaluations by fused multiply-adds, highest power first."""
    fused = [i for i in kernel.instructions if i.opcode.startswith("fma.") and kernel.constant(i.operands[3])]
    before: dict[Instruction, Instruction] = {}
    for instruction in fused:
        for made in map(kernel.maker, instruction.operands[1:3]):
            if made in fused:
                assert made is not None and instruction not in before
                before[instruction] = made
                # Both fmas use the same x.
                (x,) = {instruction.operands[1], instruction.operands[2]} - set(made.results)
                assert x in made.operands[1:3]
    found = collections.Counter[tuple[str, ...]]()
    for last in set(fused) - set(before.values()):
        constants, at = [kernel.constant(last.operands[3])], last
        while at in before:
            at = before[at]
            constants.insert(0, kernel.constant(at.operands[3]))
        first = [constant for constant in map(kernel.constant, at.operands[1:3]) if constant]
        found[tuple(map(str, first + constants))] += 1
    return found


def test_coefficients_equal_those_of_the_stream(hopper: list[Compiled]) -> None:
    def same(found: collections.Counter[Any], expected: dict[Any, int]) -> bool:
        # The branches of few columns draw one to four normals, and the compiler may share parts of them.
        return found.keys() == expected.keys() if result.store_kind == "few_columns" else found == expected

    for result in hopper:
        kernel, (dtype, _, _, fast, _) = result.kernel, result.variant
        wide = dtype == "float64"
        bits = functools.partial(number_bits, wide=wide)
        width = "f64" if wide else "f32"
        numbers = stream_numbers("fast_math" if fast else dtype if wide else "float32")
        word = 64 if wide else 32
        unit = (bits(2.0**-word), bits(2.0 ** -(word + 1)))
        if fast:
            radii = kernel.count["lg2.approx.ftz.f32"]
            assert len(numbers[""]) == 2
            expected = {unit: radii}
            factors = collections.Counter(dict.fromkeys(numbers[""], radii))
        else:
            radii = kernel.count["sqrt.rn.f64" if wide else "rsqrt.approx.ftz.f32"]
            assert [len(numbers[name]) for name in ("L", "LE", "S", "C")] == ([20, 1, 9, 9] if wide else [8, 1, 5, 5])
            # Half of cos t = 1 - 2 s^2.
            expected = {unit: radii, (bits(0.5),): radii}
            expected |= {tuple(numbers[name]): radii for name in "LSC"}
            factors = collections.Counter({bits(2.0 ** -(word - 1)): radii})
            if not wide:
                factors[bits(0.5)] += radii  # In the square root
        assert radii >= 2 and same(polynomials(kernel), expected), str(result)
        multiplied = collections.Counter(
            constant
            for instruction in kernel.instructions
            if instruction.opcode == f"mul.{width}"
            for constant in map(kernel.constant, instruction.operands[1:])
            if constant
        )
        assert same(multiplied, factors), str(result)
        added = collections.Counter(
            (instruction.opcode, constant)
            for instruction in kernel.instructions
            if instruction.opcode in (f"add.{width}", f"sub.{width}")
            for constant in map(kernel.constant, instruction.operands[1:])
        )
        expected_sums = {} if fast else {(f"add.{width}", bits(-1.0)): radii, (f"add.{width}", None): radii}
        assert same(added, expected_sums), str(result)
        # The only other factor of an fma is the exponent's logarithm.
        logarithms = collections.Counter(
            constant
            for instruction in kernel.instructions
            if instruction.opcode.startswith("fma.") and not kernel.constant(instruction.operands[3])
            for constant in map(kernel.constant, instruction.operands[1:3])
            if constant
        )
        assert same(logarithms, {} if fast else {numbers["LE"][0]: radii}), str(result)


def test_square_roots_are_corrected(hopper: list[Compiled]) -> None:
    """The square root is g + h (x - g g) with y near 1 / sqrt(x), g = x y and h = y / 2, which rounds correctly."""

    def only(found: list[Instruction]) -> Instruction:
        (instruction,) = found
        return instruction

    for result in hopper:
        kernel = result.kernel
        for root in (i for i in kernel.instructions if i.opcode.startswith("rsqrt")):
            y, x = root.operands
            products = kernel.users[y]
            assert [i.opcode for i in products] == ["mul.f32"] * 2, str(result)
            g = only([i for i in products if set(i.operands[1:]) == {x, y}]).operands[0]
            half = only([i for i in products if kernel.constant(i.operands[2]) == number_bits(0.5)])
            assert half.operands[1] == y, str(result)
            minus_g = only([i for i in kernel.users[g] if i.opcode == "neg.f32"]).operands[0]
            error = only(kernel.users[minus_g])
            assert error.opcode == "fma.rn.f32" and error.operands[3] == x, str(result)
            assert set(error.operands[1:3]) == {g, minus_g}, str(result)
            root = only(kernel.users[error.operands[0]])
            assert root.opcode == "fma.rn.f32" and root.operands[3] == g, str(result)
            assert set(root.operands[1:3]) == {half.operands[0], error.operands[0]}, str(result)


# --- Machine code ---------------------------------------------------------------------------------


def test_advance_adds_one(compiled: list[Compiled]) -> None:
    kernel = Kernel((compiled[0].file.parent / "advance.ptx").read_text())
    assert kernel.parameters == ["u64"]
    ((added,), (stored,)) = (
        [i for i in kernel.instructions if i.opcode.startswith(name)] for name in ("add.", "st.global.u64")
    )
    assert added.opcode == "add.s64" and kernel.constant(added.operands[2]) == "1"
    assert stored.sources[-1:] == added.results
    assert [i.opcode for i in kernel.origins(added.sources[0], set())] == ["ld.global.u64"]


# --- Other operations -----------------------------------------------------------------------------

OTHER_KERNELS: dict[str, list[tuple[Any, ...]]] = {
    "moments": [
        ("float32", False, False, 4, True, False, False),
        ("float32", True, True, 4, False, False, False),
        ("float64", True, False, 1, True, False, False),
        ("float32", False, False, 1, True, True, False),
        ("float32", False, False, 1, False, False, True),
    ],
    "perturb": [
        ("float32", False, False, False, False),
        ("float32", False, True, False, False),
        ("bfloat16", True, False, False, True),
        ("bfloat16", True, True, True, True),
        ("float64", False, False, False, False),
        ("float64", False, True, False, True),
        ("float16", False, False, True, True),
    ],
}
"""Fields of a `MomentsKey` and a `PerturbKey`, without the device."""


@pytest.mark.slow
@pytest.mark.parametrize("operation", OTHER_KERNELS)
def test_kernels_of_other_operations_spill_nothing(build_once: Build, operation: str) -> None:
    jobs = [({operation: variant}, HOPPER) for variant in OTHER_KERNELS[operation]]
    for result in compile_all(build_once, f"numba_{operation}", jobs, False):
        variant = OTHER_KERNELS[operation][int(result.file.stem)]
        assert not re.search(r"^\s*call|\.local", result.ptx, re.M), variant
        (stack,) = re.findall(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads",
            result.file.with_suffix(".log").read_text(),
        )
        assert stack == ("0", "0", "0"), (variant, stack)
        parameters = [int(bits) // 8 for bits in re.findall(r"\.param \.[usbf](\d+)", result.ptx)]
        own = PACKED_MOMENT_GEOMETRY
        if operation == "perturb":
            strided = variant[3]
            own = 8 * (HEAD_WORDS + MOST_SPANS_OF_NUMBA[strided] * len(STRIDED_FIELDS if strided else RUN_FIELDS))
        assert sum(parameters) == PACKED_LAUNCH + own, variant
