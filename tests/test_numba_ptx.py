"""What Numba and NVIDIA's compilers make of the Python kernel, read where there is no GPU.

That the kernel is right is seen elsewhere; here it is seen that nothing on the way to the GPU changes its numbers, and
that it is made of the instructions that make it fast. What is read is PTX, which the driver or nvJitLink turns into
machine code: by PTX's rules that may only fuse a product with the sum it goes into, so none may go into one.

A row loop, below, is the innermost loop around a store to global memory, if it draws and loads nothing from there: the
loop down the rows of a chunk, or where dimensions lie side by side, along the columns. A loop that copies is one around
such a store that does not draw, be it within a row loop; its instructions are not counted there. Where noise is shared,
libNVVM takes what is left of the rows out of the row loop; that is not looked at for itself.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib.resources
import importlib.util
import itertools
import json
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numba_ptx
import pytest

from multisample.backends import draw
from multisample.backends.kernels.cuda import geometry
from multisample.backends.native import csrc_files

DTYPES = ("float16", "bfloat16", "float32", "float64")
STORES = ("aligned", "shifted", "staged", "strided", "transposed", "transposed_staged")
SECONDS = 300

Variant = tuple[str, bool, bool, bool, int]
Capability = tuple[int, int]

# Element type, whether noise is shared, antithetic, fast_math, stores.
VARIANTS: list[Variant] = [
    (dtype, shared, antithetic, fast, stores)
    for dtype, shared, antithetic, fast, stores in itertools.product(
        DTYPES, (False, True), (False, True), (False, True), range(len(STORES))
    )
    if not (fast and dtype == "float64")
]
HOPPER: Capability = (9, 0)
OTHERS: list[Capability] = [(7, 5), (8, 0), (10, 0)]
SOME: list[Variant] = [
    ("float32", False, False, False, 0),
    ("float16", False, True, True, 1),
    ("bfloat16", True, False, False, 2),
    ("float64", False, False, False, 3),
    ("float32", False, True, False, 4),
    ("float32", False, False, False, 5),
]

REGISTERS = 65536
"""Of a multiprocessor of any of these."""
MOST_THREADS = {(7, 5): 1024}
"""That a multiprocessor holds, where it is not 2048; ptxas takes no notice of a bound that is beyond it."""

# A value or two that are needed before and after the loops, but not in them (`test_machine_code_...` sees that), may
# wait in memory. In which kernels is up to the version of the compiler; in most of them it has to be none, and in none
# where threads go along the columns.
STACK, MOST_WITH_STACK, MOST_OF_PAIRS = 24, 6, 14
# Elsewhere than on 9.0, which the bounds were chosen for.
STACK_OF_OTHERS = 64


@dataclasses.dataclass
class Compiled:
    variant: Variant
    capability: Capability
    file: Path
    """PTX; beside it, with other suffixes, the machine code and what was said of it."""

    @property
    def architecture(self) -> str:
        return "sm_{}{}".format(*self.capability)

    @functools.cached_property
    def ptx(self) -> str:
        return self.file.read_text()

    @functools.cached_property
    def kernel(self) -> Kernel:
        return Kernel(self.ptx, self.loads_per_row)

    @property
    def transform(self) -> str:
        """What makes normals in a row."""
        dtype, shared, _, fast, _ = self.variant
        return "none" if shared else "float64" if dtype == "float64" else "fast" if fast else "float32"

    @property
    def width(self) -> int:
        """Elements of a group."""
        return 8 if self.variant[2] else 4

    @property
    def way(self) -> str:
        return STORES[self.variant[4]]

    @property
    def slots(self) -> int:
        """Dimensions that a thread keeps, and draws in the same turn of a loop."""
        dtype, _, antithetic, _, _ = self.variant
        size = draw.SIZES[dtype]
        if self.way == "transposed":
            return geometry.slots_of(size)
        return geometry.staged_slots_of(size, antithetic) if self.is_transposed else 1

    @property
    def is_transposed(self) -> bool:
        """Whether threads go along the columns, through a stage or not."""
        return self.way in ("transposed", "transposed_staged")

    @property
    def loads_per_row(self) -> float:
        """Of 16 bytes from shared memory: mu and sigma, and in what is left the words that a row has made.

        Where a thread keeps these, what columns have made: words, or with shared noise normals; for all its dimensions
        at once, which are in the same columns, or through a stage for each.
        """
        wide = self.transform == "float64" or (self.is_transposed and self.variant[0] == "float64")
        return (2 if wide else 1) / (self.slots if self.way == "transposed" else 1)

    def __str__(self) -> str:
        dtype, shared, antithetic, fast, stores = self.variant
        noise, transform = "shared" if shared else "independent", "fast_math" if fast else "portable"
        noise += " antithetic" if antithetic else ""
        return f"{dtype} {noise} {transform} {STORES[stores]} {self.architecture}"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[Compiled]:
    """All variants for compute capability 9.0, and some for others."""
    if importlib.util.find_spec("numba_cuda") is None:
        pytest.skip("numba-cuda is not installed")
    folder = tmp_path_factory.mktemp("numba_ptx")
    jobs = [(variant, HOPPER) for variant in VARIANTS] + list(itertools.product(SOME, OTHERS))
    results = [Compiled(*job, folder / f"{k}.ptx") for k, job in enumerate(jobs)]

    with ThreadPoolExecutor(2) as pool:
        # By dtype, because that is where kernels have most in common, and a process compiles once what they have.
        halves = results[: len(results) // 2], results[len(results) // 2 :]
        for _ in pool.map(compile_all, halves, (folder, folder), (True, False)):
            pass
    return results


def compile_all(
    results: list[Compiled], folder: Path, advance: bool = False, *, origin_in_memory: bool = False
) -> None:
    """Compile these kernels in a process of their own; with `advance`, the one that counts up an offset too."""
    lines = [
        json.dumps([result.file.stem, [*result.variant, origin_in_memory], result.capability]) for result in results
    ]
    lines += [json.dumps(["advance", None, HOPPER])] if advance else []
    done = subprocess.run(
        [sys.executable, str(Path(numba_ptx.__file__)), str(folder)], input="\n".join(lines), capture_output=True,
        text=True, timeout=3 * SECONDS,
    )  # fmt: skip
    if done.returncode == numba_ptx.CANNOT:
        pytest.skip(done.stdout.strip())
    if done.returncode:
        pytest.fail(f"{done.stdout[-2000:]}\n{done.stderr[-5000:]}", pytrace=False)


@pytest.fixture(scope="module")
def hopper(compiled: list[Compiled]) -> list[Compiled]:
    """All variants for compute capability 9.0."""
    found = [result for result in compiled if result.capability == HOPPER]
    assert len(found) == len(VARIANTS) == 168
    return found


# --- PTX ------------------------------------------------------------------------------------------

_NO_RESULT = re.compile(r"(st|bra|brx|ret|exit|bar|barrier|membar|fence|trap|call|red)\b")
_STATEMENT = re.compile(r"(?:@!?(%\w+)\s+)?([a-z][\w.:]*)(?:\s+(.*))?", re.S)
_COPIES = re.compile(r"(mov|neg|abs|selp|shfl)\.")


@dataclasses.dataclass(eq=False)
class Instruction:
    guard: str | None
    opcode: str
    operands: list[str]

    @functools.cached_property
    def results(self) -> list[str]:
        return [] if _NO_RESULT.match(self.opcode) else _registers(self.operands[0])

    @functools.cached_property
    def sources(self) -> list[str]:
        return _registers(" ".join(self.operands[bool(self.results) :]))


def _registers(text: str) -> list[str]:
    return re.findall(r"%[a-z]+\d+\b", text)


@dataclasses.dataclass
class Loop:
    instructions: list[Instruction]
    loads_per_row: float

    @functools.cached_property
    def count(self) -> collections.Counter[str]:
        return collections.Counter(instruction.opcode for instruction in self.instructions)

    def matching(self, pattern: str) -> int:
        return sum(count for opcode, count in self.count.items() if re.fullmatch(pattern, opcode))

    @property
    def copies(self) -> bool:
        """Whether it takes to global memory what has been drawn elsewhere."""
        return not self.matching(r"(fma|mul|add)\.(rn\.)?f(32|64)")

    @property
    def hands_over(self) -> bool:
        return self.matching(r"shfl\..*") > 0

    @property
    def rows(self) -> float:
        """By what they load, other than what is stored as it was loaded."""
        stored = {r for i in self.instructions if i.opcode.startswith("st.global") for r in i.sources}
        quads = [i for i in self.instructions if re.fullmatch(r"ld\.shared\.(v4\.[bfu]32|v2\.[bfu]64)", i.opcode)]
        return sum(not stored.issuperset(i.results) for i in quads) / self.loads_per_row


class Kernel:
    """The one kernel of a PTX program, with the loops in it and where its registers come from."""

    def __init__(self, ptx: str, loads_per_row: float) -> None:
        program = re.sub(r"//.*", "", ptx)
        assert len(re.findall(r"\.entry\b", program)) == 1 and not re.search(r"\.func\b", program)
        head, self.body = program.split(".entry")[1].split("{", 1)
        self.parameters: list[str] = re.findall(r"\.param\s+\.(\w+)\s+\w+_param_\d+\b", head)
        assert len(self.parameters) == head.count(".param")
        self.bounds = {name: int(number) for name, number in re.findall(r"\.(maxntid|minnctapersm)\s+(\d+)", head)}
        self._loads_per_row = loads_per_row
        self.blocks = list(self._cut())
        self.instructions = [instruction for _, block in self.blocks for instruction in block]
        self.count = collections.Counter(instruction.opcode for instruction in self.instructions)
        self.makers: dict[str, list[Instruction]] = collections.defaultdict(list)
        self.users: dict[str, list[Instruction]] = collections.defaultdict(list)
        for instruction in self.instructions:
            for register in instruction.results:
                self.makers[register].append(instruction)
            for register in set(instruction.sources):
                self.users[register].append(instruction)

    def _cut(self) -> Iterator[tuple[str, list[Instruction]]]:
        """Labels, if they have one, and instructions of the basic blocks."""
        label, block = "", list[Instruction]()
        for line in re.split(r"[;\n]", self.body):
            # Braces around a few statements, with a register of their own; those of vectors stand within statements.
            statement = line.strip().removeprefix("{").lstrip()
            if statement in ("", "}") or statement.startswith("."):
                continue
            if found := re.fullmatch(r"(\$?\w+):", statement):
                if label or block:  # Else a jump was just before, and nothing leads here.
                    yield label, block
                label, block = found[1], []
                continue
            found = _STATEMENT.fullmatch(statement)
            assert found, statement
            operands = [text.strip() for text in re.split(r",(?![^{\[]*[}\]])", found[3] or "")]
            block.append(Instruction(found[1], found[2], operands))
            if re.match(r"bra|ret|exit", found[2]):
                yield label, block
                label, block = "", []
        assert not block

    def _following(self) -> list[list[int]]:
        index = {label: k for k, (label, _) in enumerate(self.blocks) if label}
        following = []
        for k, (_, block) in enumerate(self.blocks):
            last = block[-1] if block else Instruction(None, "nop", [])
            assert not last.opcode.startswith("brx"), "a table of jumps, which nothing here knows"
            jumps = [index[last.operands[0]]] if last.opcode.startswith("bra") else []
            ends = re.match(r"bra|ret|exit", last.opcode) and last.guard is None
            following.append(jumps if ends else [*jumps, k + 1])
        return following

    @functools.cached_property
    def row_loops(self) -> list[Loop]:
        return [loop for loop in self.store_loops if not loop.copies]

    @functools.cached_property
    def store_loops(self) -> list[Loop]:
        """Both, those that draw and those that copy."""
        following = self._following()
        before: list[list[int]] = [[] for _ in self.blocks]
        for k, after in enumerate(following):
            for j in after:
                before[j].append(k)
        # Blocks that every way to a block leads through.
        everything = set(range(len(self.blocks)))
        dominators = [everything if before[k] else {k} for k in everything]
        dominators[0] = {0}
        changed = True
        while changed:
            changed = False
            for k in sorted(everything - {0}):
                if before[k]:
                    new = {k} | set.intersection(*(dominators[j] for j in before[k]))
                    changed |= new != dominators[k]
                    dominators[k] = new
        loops: dict[int, set[int]] = {}
        for k, after in enumerate(following):
            for head in dominators[k] & set(after):
                body, found = loops.setdefault(head, {head}), [k]
                while found:
                    j = found.pop()
                    if j not in body:
                        body.add(j)
                        found += before[j]
        innermost: dict[int, set[int]] = {}
        for k, (_, block) in enumerate(self.blocks):
            around = [head for head in loops if k in loops[head]]
            if around and any(instruction.opcode.startswith("st.global") for instruction in block):
                head = min(around, key=lambda head: len(loops[head]))
                innermost[head] = loops[head]
        found_loops = []
        for body in innermost.values():
            within = set[int]().union(*(other for other in innermost.values() if other < body))
            if not any(i.opcode.startswith("ld.global") for k in body for i in self.blocks[k][1]):
                instructions = [i for k in sorted(body - within) for i in self.blocks[k][1]]
                found_loops.append(Loop(instructions, self._loads_per_row))
        return found_loops

    def maker(self, register: str) -> Instruction | None:
        """What makes it, if that is one instruction."""
        made = self.makers.get(register, [])
        return made[0] if len(made) == 1 else None

    def constant(self, operand: str) -> str | None:
        """Of an operand that is one, its digits in PTX: bits of floating-point numbers, decimal ones of integers."""
        if re.fullmatch(r"0[fd][0-9A-Fa-f]+|-?\d+", operand):
            return operand[:2] + operand[2:].upper()
        made = self.maker(operand)
        return self.constant(made.operands[1]) if made and made.opcode.startswith("mov.") else None

    def origins(self, register: str, seen: set[str]) -> Iterator[Instruction]:
        """What may have made its value, however often it was copied or its sign changed."""
        if register in seen:
            return
        seen.add(register)
        for made in self.makers.get(register, []):
            if _COPIES.match(made.opcode):
                for source in made.sources:
                    yield from self.origins(source, seen)
            else:
                yield made


def test_ptx_is_read_as_it_is_written() -> None:
    """The reader above, on a little program: what it cannot see, no test below can."""
    kernel = Kernel(
        """
        .visible .entry f(.param .u64 f_param_0, .param .u32 f_param_1)
        .maxntid 288, 1, 1
        .minnctapersm 3
        {
            .reg .f32 %f<9>;
            mov.f32 %f1, 0f3f800000; // one
        $L__1:
            ld.global.f32 %f2, [%rd1+4];
        $L__2:
            ld.shared.v4.u32 {%r1, %r2, %r3, %r4}, [%rd3];
            mul.f32 %f3, %f2, %f2;
            neg.f32 %f4, %f3;
            @%p2 bra $L__3;
            bra $L__5;
        $L__5:
            add.f32 %f5, %f4, %f1;
            st.global.v4.f32 [%rd1], {%f5, %f5, %f5, %f5};
            ld.shared.v4.u32 {%r5, %r6, %r7, %r8}, [%rd4];
            st.global.v4.u32 [%rd5], {%r5, %r6, %r7, %r8};
        $L__4:
            ld.shared.u16 %rs1, [%rd6];
            st.global.u16 [%rd7], %rs1;
            @%p4 bra $L__4;
        $L__3:
            @!%p1 bra $L__2;
            @%p3 bra $L__1;
            ret;
        }
        """,
        1,
    )
    assert kernel.parameters == ["u64", "u32"] and kernel.bounds == {"maxntid": 288, "minnctapersm": 3}
    (loop,) = kernel.row_loops
    assert loop.rows == 1 and loop.count["bra"] == 3 and sum(loop.count.values()) == 10
    (copy,) = (loop for loop in kernel.store_loops if loop.copies)
    assert copy.rows == 0 and [i.opcode for i in copy.instructions] == ["ld.shared.u16", "st.global.u16", "bra"]
    (add,) = kernel.users["%f4"]
    assert add.results == ["%f5"] and add.sources == ["%f4", "%f1"]
    assert [i.opcode for source in add.sources for i in kernel.origins(source, set())] == ["mul.f32"]
    assert kernel.constant("%f1") == "0f3F800000" and kernel.constant("%f3") is None
    assert kernel.maker("%r3") is kernel.maker("%r1")


# --- Accepted, in as many registers as there are --------------------------------------------------


def check_log(result: Compiled, log: str) -> int:
    """What ptxas says, alone or within nvJitLink; the bytes of stack that it takes."""
    threads, blocks = result.kernel.bounds["maxntid"], result.kernel.bounds["minnctapersm"]
    dtype, shared = result.variant[:2]
    if result.is_transposed:
        most = geometry.TRANSPOSED_THREADS if result.way == "transposed" else geometry.staged_threads(shared)
        at_once = 512 if dtype == "float64" and not shared else 768
        if result.way == "transposed" and result.capability < HOPPER:
            at_once = 384
        assert (threads, threads * blocks) == (most, at_once), str(result)
    else:
        assert threads == geometry.MOST_THREADS and blocks >= 2, str(result)
    assert threads * blocks <= MOST_THREADS.get(result.capability, 2048), str(result)
    warnings = [line for line in log.splitlines() if re.search("warning|error", line, re.I)]
    assert not warnings, (str(result), warnings)
    (registers,) = map(int, re.findall(r"Used (\d+) registers", log))
    assert registers <= REGISTERS // (threads * blocks) // 8 * 8, (str(result), registers)
    (stack,) = map(int, re.findall(r"(\d+) bytes stack frame", log))
    return stack


def check_stacks(stacks: dict[str, int]) -> None:
    """Of all kernels for 9.0, and of others."""
    hopper = {name: stack for name, stack in stacks.items() if stack and name.endswith("sm_90")}
    others = {name: stack for name, stack in stacks.items() if stack and name not in hopper}
    pairs = [name for name in hopper if "antithetic" in name]
    assert max(hopper.values(), default=0) <= STACK, hopper
    assert len(pairs) <= MOST_OF_PAIRS and len(hopper) - len(pairs) <= MOST_WITH_STACK, hopper
    assert not [name for name in hopper if "transposed" in name], hopper
    assert max(others.values(), default=0) <= STACK_OF_OTHERS, others


def test_nvjitlink_takes_every_kernel_and_keeps_it_in_registers(compiled: list[Compiled]) -> None:
    stacks = {}
    for result in compiled:
        assert result.file.with_suffix(".cubin").read_bytes().startswith(b"\x7fELF"), str(result)
        assert re.search(rf"^\.target {result.architecture}\b", result.ptx, re.M), str(result)
        stacks[str(result)] = check_log(result, result.file.with_suffix(".log").read_text())
    check_stacks(stacks)


def programs(name: str) -> Iterator[str]:
    """Where that program of NVIDIA's is: in packages beside the compilers, and on the PATH."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or ():
        yield from map(str, sorted(Path(folder).glob(f"*/bin/{name}")))
    found = shutil.which(name)
    if found:
        yield found


def release(text: str) -> tuple[int, int]:
    major, minor = re.findall(r"release (\d+)\.(\d+)", text)[0]
    return int(major), int(minor)


@pytest.fixture(scope="module")
def ptxas(compiled: list[Compiled]) -> str:
    needed = release(compiled[0].ptx)
    for program in programs("ptxas"):
        if release(subprocess.run([program, "--version"], capture_output=True, text=True).stdout) >= needed:
            return program
    pytest.skip(
        f"a ptxas of CUDA {needed[0]}.{needed[1]} or later is neither in package nvidia-cuda-nvcc nor on the PATH"
    )


def test_ptxas_takes_kernels_and_keeps_them_in_registers(compiled: list[Compiled], ptxas: str) -> None:
    def run(result: Compiled) -> subprocess.CompletedProcess[str]:
        command = [ptxas, "-v", f"-arch={result.architecture}", "-o", str(result.file.with_suffix(".ptxas"))]
        return subprocess.run([*command, str(result.file)], capture_output=True, text=True, timeout=SECONDS)

    # One of every way, dtype and noise, now with pairs and now without; nvJitLink has taken them all.
    alike = collections.defaultdict[tuple[object, ...], list[Compiled]](list)
    for result in compiled:
        dtype, shared = result.variant[:2]
        alike[result.capability, result.way, dtype, shared].append(result)
    stacks, some = {}, [results[k % len(results)] for k, results in enumerate(alike.values())]
    with ThreadPoolExecutor(2) as pool:
        for result, done in zip(some, pool.map(run, some), strict=True):
            assert done.returncode == 0, (str(result), done.stderr[-5000:])
            stacks[str(result)] = check_log(result, done.stderr)
    check_stacks(stacks)


# --- Parameters -----------------------------------------------------------------------------------

_PARTS = dict.fromkeys(("mu", "sigma"), draw.Vector._fields)
_PARTS |= dict.fromkeys(("seed", "offset", "first_row", "first_column"), draw.Word._fields)
_DRAW = [f"{name}.{part}" if part else name for name in draw.Draw._fields for part in _PARTS.get(name, ("",))]
_SIZES = {"u32": 4, "s32": 4, "b32": 4, "u64": 8, "s64": 8, "b64": 8, "f64": 8}


def placed(kernel: Kernel) -> list[tuple[int, str]]:
    """Offset and type of each parameter: each at the next address that its size divides."""
    places, end = [], 0
    for kind in kernel.parameters:
        size = _SIZES[kind]
        offset = -(-end // size) * size
        places.append((offset, kind))
        end = offset + size
    return places


def test_parameters_are_the_bytes_that_are_packed(compiled: list[Compiled]) -> None:
    """Every field has a value of its own, and is found where the kernel looks for it."""
    numbers = itertools.count(1)
    expected = [0 if name.endswith("unused") else next(numbers) for name in _DRAW]
    call = draw._STRUCT.pack(*(number for number in expected if number))
    expected += [next(numbers) for _ in geometry.Geometry._fields]
    packed = call + geometry._STRUCT.pack(*expected[len(_DRAW) :])
    assert len(packed) == draw.PACKED_DRAW + geometry.PACKED_GEOMETRY
    for result in compiled:
        places = placed(result.kernel)
        formats = {kind: "<d" if kind == "f64" else f"<{'_I_Q'[size // 2 - 1]}" for kind, size in _SIZES.items()}
        found = [struct.unpack_from(formats[kind], packed, offset)[0] for offset, kind in places]
        assert found == expected, str(result)
        assert places[-1][0] + _SIZES[places[-1][1]] == len(packed), str(result)
        floats = [name for name, (_, kind) in zip(_DRAW, places, strict=False) if kind == "f64"]
        assert floats == ["mu.number", "sigma.number"], str(result)


def test_kernels_that_read_their_window_from_memory_take_the_same_parameters(
    compiled: list[Compiled], tmp_path: Path
) -> None:
    """And nvJitLink takes them; they need not be as fast."""
    results = [Compiled(variant, HOPPER, tmp_path / f"{k}.ptx") for k, variant in enumerate(SOME)]
    compile_all(results, tmp_path, origin_in_memory=True)
    for result in results:
        by_value = next(other for other in compiled if (other.variant, other.capability) == (result.variant, HOPPER))
        assert placed(result.kernel) == placed(by_value.kernel), str(result)
        assert result.kernel.bounds == by_value.kernel.bounds, str(result)
        assert result.file.with_suffix(".cubin").read_bytes().startswith(b"\x7fELF"), str(result)
        # Of the seed, the first row and the first column, wherever they are; by value none of these is read.
        words = result.kernel.count["ld.global.u64"] - by_value.kernel.count["ld.global.u64"]
        assert words >= 3, (str(result), words)


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_parameters_are_where_the_fields_of_the_cpp_structs_are(hopper: list[Compiled], tmp_path: Path) -> None:
    fields = [("Draw", name) for name in _DRAW] + [("Geometry", name) for name in geometry.Geometry._fields]
    lines = [
        f'  std::printf("%zu %zu\\n", offsetof({kind}, {name}), sizeof({kind}{{}}.{name}));' for kind, name in fields
    ]
    source = "\n".join(
        [
            "#include <cstddef>", "#include <cstdio>", '#include "cuda/geometry.h"', "int main() {",
            "  using namespace multisample;", *lines, "}", "",
        ]
    )  # fmt: skip
    (tmp_path / "fields.cpp").write_text(source)
    command = ["g++", "-std=c++17", f"-I{csrc_files.folder()}", "fields.cpp", "-o", "fields"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-5000:]
    output = subprocess.run([tmp_path / "fields"], capture_output=True, text=True, check=True).stdout
    expected = [tuple(map(int, line.split())) for line in output.splitlines()]
    expected[len(_DRAW) :] = [(offset + draw.PACKED_DRAW, size) for offset, size in expected[len(_DRAW) :]]
    assert [(offset, _SIZES[kind]) for offset, kind in placed(hopper[0].kernel)] == expected


# --- Arithmetic -----------------------------------------------------------------------------------

FAST = {f"{name}.approx.ftz.f32" for name in ("lg2", "sqrt", "cos", "sin")}
FLOAT = re.compile(r".*\.(b?f16|f32|f64)\b.*")
# Not arithmetic: numbers on their way, and a sign.
MOVES = re.compile(r"(mov|selp|neg|ld\.\w+|st\.\w+)(\.v[24])?\.(f32|f64)")
# An element of mu or sigma, or a word, becomes a number.
CONVERSIONS = {
    "float32": re.compile(r"cvt\.rn\.f32\.([us](16|32|64)|f64)|cvt\.f32\.f16"),
    "float64": re.compile(r"cvt\.rn\.f64\.[us](16|32|64)|cvt\.f64\.f32|cvt\.f32\.f16"),
}
# What makes four elements of a row, beside moves, by what makes normals.
ROW: dict[str, dict[str, int]] = {
    "none": {},
    "float32": {
        "mul.wide.u32": 15, "fma.rn.f32": 40, "mul.f32": 18, "add.f32": 2, "rsqrt.approx.ftz.f32": 2,
        "cvt.rn.f32.u32": 2, "cvt.rn.f32.s32": 4,
    },
    "fast": {
        "mul.wide.u32": 15, "fma.rn.f32": 2, "mul.f32": 8, **dict.fromkeys(FAST, 2),
        "cvt.rn.f32.u32": 2, "cvt.rn.f32.s32": 2,
    },
    "float64": {
        "mul.wide.u32": 30, "fma.rn.f64": 76, "mul.f64": 14, "add.f64": 2, "sqrt.rn.f64": 2,
        "cvt.rn.f64.u64": 2, "cvt.rn.f64.s64": 4,
    },
}  # fmt: skip
MULTIPLIERS = {0xD2511F53: 7, 0xCD9E8D57: 8}
"""How often each is multiplied with in a row, of which some has been done before."""


def real(result: Compiled) -> str:
    return "float64" if result.variant[0] == "float64" else "float32"


def test_kernels_know_no_other_floating_point_operations(compiled: list[Compiled]) -> None:
    for result in compiled:
        dtype, _, _, fast, _ = result.variant
        found = result.kernel.count
        assert found["ret"] > 0 and sum(found.values()) > 300, str(result)
        width = {"float32": "f32", "float64": "f64"}[real(result)]
        allowed = {f"fma.rn.{width}", f"mul.{width}", f"add.{width}", f"sub.{width}"}
        if dtype == "float64":
            approximate, allowed = set(), allowed | {"sqrt.rn.f64"}
        else:
            approximate = FAST if fast else {"rsqrt.approx.ftz.f32"}
        if dtype == "float16":
            allowed.add("cvt.rn.f16.f32")
        assert {name for name in found if ".approx" in name or ".ftz" in name} == approximate, str(result)
        others = {name for name in found if FLOAT.fullmatch(name)} - allowed - approximate
        others = {
            name for name in others if not MOVES.fullmatch(name) and not CONVERSIONS[real(result)].fullmatch(name)
        }
        assert not others, (str(result), others)
        if dtype != "float64":
            wide = {name for name in found if ".f64" in name}
            assert wide <= {"ld.param.f64", "ld.global.f64", "mov.f64", "cvt.rn.f32.f64"}, (str(result), wide)
        # Which band a block has, and which part of a pass a thread; through a stage that for each of its dimensions.
        divisions = {"transposed": 2, "transposed_staged": result.slots}.get(result.way, 1)
        assert 1 <= found["div.u32"] <= divisions, (str(result), found["div.u32"])
        in_loops = [loop.count["div.u32"] for loop in result.kernel.store_loops]
        assert in_loops and not any(in_loops), (str(result), in_loops)
        odd = {name for name in found if re.match(r"call|div\.(?!u32$)|rem\.|.*\.(local|r[zmp]i?)\b", name)}
        assert not odd, (str(result), odd)
        assert not re.search(r"\.local\b|__local_depot|\.extern\b", result.ptx), str(result)


def test_rows_are_made_of_these_operations_and_no_others(hopper: list[Compiled]) -> None:
    for result in hopper:
        dtype, loops = result.variant[0], result.kernel.row_loops
        assert loops, str(result)
        fused = "fma.rn.f64" if dtype == "float64" else "fma.rn.f32"
        for loop in loops:
            assert loop.rows >= 1, str(result)
            elements = result.width
            expected = collections.Counter(ROW[result.transform])
            expected[fused] += elements  # x = mu + sigma z
            if dtype == "float16":
                expected["cvt.rn.f16.f32"] += elements
            arithmetic = {
                name: count / loop.rows
                for name, count in loop.count.items()
                if name in expected or (FLOAT.fullmatch(name) and not MOVES.fullmatch(name))
            }
            more = arithmetic[fused] - expected[fused]
            if result.transform == "none" and result.way == "shifted" and result.width == 8 and 0 < more <= 2:
                # What the first thread of a warp writes one by one, and what the last does, is made apart.
                arithmetic[fused] = expected[fused]
            if result.transform == "none" and result.way == "transposed" and 0 < more <= elements:
                # Made where it is written, all at once or one by one.
                arithmetic[fused] = expected[fused]
            assert arithmetic == expected, str(result)
            # float64 in none of the others' loops, not even on its way.
            assert dtype == "float64" or not any(".f64" in name for name in loop.count), str(result)


def test_words_are_products_of_32_bits(hopper: list[Compiled]) -> None:
    for result in hopper:
        if result.transform == "none":
            continue
        kernel, blocks = result.kernel, 2 if result.transform == "float64" else 1
        for loop in kernel.row_loops:
            products, others, masks = collections.Counter[int](), [], []
            for instruction in loop.instructions:
                constants = [
                    int(c) for c in map(kernel.constant, instruction.operands[1:]) if c and c[:2] not in ("0f", "0d")
                ]
                known = [c & 0xFFFFFFFF for c in constants if c & 0xFFFFFFFF in MULTIPLIERS]
                if instruction.opcode == "mul.wide.u32":
                    products.update(known)
                elif known and (result.transform, instruction.opcode) != ("float64", "mul.lo.s32"):
                    others.append(instruction)
                if instruction.opcode == "and.b64" and 0xFFFFFFFF in constants:
                    masks.append(instruction)
            expected = {multiplier: count * blocks * loop.rows for multiplier, count in MULTIPLIERS.items()}
            assert products == expected, str(result)
            assert not others and not masks, (str(result), others, masks)


def test_no_product_goes_into_a_sum(compiled: list[Compiled]) -> None:
    """ptxas would make one operation of both, with one rounding instead of two."""
    for result in compiled:
        for instruction in result.kernel.instructions:
            if re.match(r"(add|sub)\.(f32|f64)", instruction.opcode):
                made = {o.opcode for source in instruction.sources for o in result.kernel.origins(source, set())}
                assert not any(opcode.startswith("mul.") for opcode in made), (str(result), instruction)


@functools.cache
def stream_numbers(section: str) -> dict[str, list[str]]:
    """The numbers of a section of STREAM.md, as PTX writes them: L, LE, S and C, or those in its formulas."""
    text = (importlib.resources.files("multisample") / "STREAM.md").read_text()
    text = re.split(r"^#+ ", re.split(rf"^### {section}.*$", text, flags=re.M)[1], flags=re.M)[0]
    literal = r"-?0x[01]\.[0-9a-f]+p[+-]\d+"
    lists = re.findall(rf"^    (\w+)\s+= ({literal}(?:,\s+{literal})*)", text, re.M)
    named = {name: re.findall(literal, numbers) for name, numbers in lists} or {"": re.findall(literal, text)}
    return {name: [number_bits(float.fromhex(n), section == "float64") for n in ns] for name, ns in named.items()}


def number_bits(number: float, wide: bool = False) -> str:
    return f"0d{struct.pack('>d', number).hex().upper()}" if wide else f"0f{struct.pack('>f', number).hex().upper()}"


def polynomials(kernel: Kernel) -> collections.Counter[tuple[str, ...]]:
    """Coefficients of all that is evaluated as Horner did, from the highest on, in fused multiply-adds."""
    fused = [i for i in kernel.instructions if i.opcode.startswith("fma.") and kernel.constant(i.operands[3])]
    before: dict[Instruction, Instruction] = {}
    for instruction in fused:
        for made in map(kernel.maker, instruction.operands[1:3]):
            if made in fused:
                assert made is not None and instruction not in before
                before[instruction] = made
                # The same x in both.
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


def test_coefficients_are_those_of_the_stream(hopper: list[Compiled]) -> None:
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
            # cos t = 1 - 2 s^2, halved.
            expected = {unit: radii, (bits(0.5),): radii}
            expected |= {tuple(numbers[name]): radii for name in "LSC"}
            factors = collections.Counter({bits(2.0 ** -(word - 1)): radii})
            if not wide:
                factors[bits(0.5)] += radii  # Of the square root.
        assert radii >= 2 and polynomials(kernel) == expected, str(result)
        multiplied = collections.Counter(
            constant
            for instruction in kernel.instructions
            if instruction.opcode == f"mul.{width}"
            for constant in map(kernel.constant, instruction.operands[1:])
            if constant
        )
        assert multiplied == factors, str(result)
        added = collections.Counter(
            (instruction.opcode, constant)
            for instruction in kernel.instructions
            if instruction.opcode in (f"add.{width}", f"sub.{width}")
            for constant in map(kernel.constant, instruction.operands[1:])
        )
        expected_sums = {} if fast else {(f"add.{width}", bits(-1.0)): radii, (f"add.{width}", None): radii}
        assert added == expected_sums, str(result)
        # What multiplies without being a coefficient's x: the exponent's logarithm alone.
        logarithms = collections.Counter(
            constant
            for instruction in kernel.instructions
            if instruction.opcode.startswith("fma.") and not kernel.constant(instruction.operands[3])
            for constant in map(kernel.constant, instruction.operands[1:3])
            if constant
        )
        assert logarithms == ({} if fast else {numbers["LE"][0]: radii}), str(result)


def test_square_roots_are_corrected(hopper: list[Compiled]) -> None:
    """g + h (x - g g), with g = x y and h = y / 2 of y, about 1 / sqrt(x): rounded as a square root is."""

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


# --- Memory ---------------------------------------------------------------------------------------

QUAD = {
    "float16": r"st\.global\.(v4\.[bfu]16|v2\.[bfu]32|[bfu]64)",
    "bfloat16": r"st\.global\.(v4\.[bfu]16|v2\.[bfu]32|[bfu]64)",
    "float32": r"st\.global\.v4\.[bfu]32",
    "float64": r"st\.global\.v2\.[bfu]64",
}
PIECES = {16: r"(v4\.[bfu]32|v2\.[bfu]64)", 8: r"(v4\.[bfu]16|v2\.[bfu]32|[bfu]64)"}
"""By the bytes stored or loaded at once."""
SINGLE = {"float16": "16", "bfloat16": "16", "float32": "32", "float64": "64"}
TURNS = {"aligned": 8, "shifted": 6, "staged": 4, "strided": 1}
"""Rows in one turn of the loop, or more; fewer for float64 and where noise is shared, half of antithetic pairs."""


def test_rows_go_to_memory_in_the_widest_stores(hopper: list[Compiled]) -> None:
    for result in hopper:
        dtype, shared, antithetic = result.variant[:3]
        if result.is_transposed:
            (check_transposed_stores if result.way == "transposed" else check_staged_runs)(result)
            continue
        assert not any(loop.copies for loop in result.kernel.store_loops), str(result)
        columns = result.width
        quads, quad = (2 if dtype == "float64" else 1) * columns / 4, QUAD[dtype]
        if result.way == "aligned" and antithetic and SINGLE[dtype] == "16":
            quads, quad = 1, QUAD["float32"]  # All eight at once.
        rows_of_ways: dict[tuple[float, float, float], list[float]] = collections.defaultdict(list)
        for loop in result.kernel.row_loops:
            assert loop.rows >= 1, str(result)
            wide, narrow = loop.matching(quad), loop.matching(rf"st\.global\.[bfu]{SINGLE[dtype]}")
            assert loop.matching(r"st\.global.*") == wide + narrow, str(result)
            staged = loop.matching(rf"ld\.shared\.[bfu]{SINGLE[dtype]}")
            way = (wide / loop.rows / quads, narrow / loop.rows, staged / loop.rows)
            rows_of_ways[way].append(loop.rows)
        longest = {way: max(rows) for way, rows in rows_of_ways.items()}
        most = 1 if dtype == "float64" else 2 if shared else 8
        turns = {name: max(min(most, count) // (2 if antithetic else 1), 1) for name, count in TURNS.items()}
        one_by_one, at_once, staged_way = (0, columns, 0), (1, 0, 0), (0, columns, columns)
        if result.way == "aligned":
            assert set(longest) == {at_once, one_by_one} and longest[at_once] >= turns["aligned"], (
                str(result),
                longest,
            )
        elif result.way == "shifted":
            # What the first and the last thread of a warp are left with, in as many stores as shifts need at most.
            by_one_or_three, by_two, by_one = (1, 3, 0), (1, 2, 0), (1, 1, 0)
            rest = {by_one_or_three, by_two} if dtype != "float64" else {by_one}
            assert set(longest) == {at_once, one_by_one, *rest}, (str(result), longest)
            assert longest[at_once] >= turns["aligned"], str(result)
            long = [rows for way in rest for rows in rows_of_ways[way] if rows >= turns["shifted"]]
            assert len(long) >= (3 if dtype != "float64" else 1), (str(result), rows_of_ways)
        else:
            way = staged_way if result.way == "staged" else one_by_one
            assert set(longest) == {way} and longest[way] >= turns[result.way], (str(result), longest)
        wide = sum(count for name, count in result.kernel.count.items() if re.fullmatch(quad, name))
        assert (wide > 0) == (result.way in ("aligned", "shifted")), str(result)


def handed_over(delta: int, slots: int, width: int) -> list[int]:
    """How many dimensions' normals a thread takes from the thread before, of each normal of a group of columns.

    The piece of each column begins `delta` elements further back than that of the column before.
    """
    columns = [range(k * width // 4, (k + 1) * width // 4) for k in range(4)]
    return [max(c * delta % slots for c in of_normal) for of_normal in columns]


def check_transposed_stores(result: Compiled) -> None:
    """All of a thread's dimensions in one column at once, and each element for itself where some are not inside.

    In a loop for each way in which columns are aligned, with what the thread before has drawn.
    """
    size, slots, width, loops = draw.SIZES[result.variant[0]], result.slots, result.width, result.kernel.row_loops
    single, vector = rf"[bfu]{8 * size}", PIECES[size * slots]
    assert not any(loop.copies for loop in result.kernel.store_loops), str(result)
    handed = []
    for loop in loops:
        groups = loop.rows / slots
        expected = {vector: width * groups, single: width * slots * groups}
        found = {kind: loop.matching(rf"st\.global\.{kind}") for kind in expected}
        assert found == expected and loop.matching(r"st\.global.*") == sum(expected.values()), (str(result), found)
        assert loop.matching(r"st\.shared.*|bar(rier)?\.sync.*") == 0, str(result)
        handed.append(loop.matching(r"shfl\..*") / groups / (2 if size == 8 else 1))
    expected_handed = sorted(sum(handed_over(delta, slots, width)) for delta in range(slots))
    assert sorted(handed) == expected_handed, (str(result), handed)


def check_staged_runs(result: Compiled) -> None:
    """Elements one by one to the stage; from there as large parts as there are, or one by one, in a loop within."""
    size, slots, width = draw.SIZES[result.variant[0]], result.slots, result.width
    part_size = 8 if size == 2 else 16
    single, part = rf"[bfu]{8 * size}", PIECES[part_size]
    assert result.kernel.row_loops, str(result)
    for loop in result.kernel.row_loops:
        turns = loop.rows / slots
        parts = turns * slots * width * size / part_size
        assert loop.matching(r"st\.global.*") == loop.matching(rf"st\.global\.{part}") == parts, str(result)
        words = loop.rows * loop.loads_per_row
        assert loop.matching(r"ld\.shared.*") == parts + words, str(result)
        assert loop.matching(r"st\.shared.*") == loop.matching(rf"st\.shared\.{single}") == loop.rows * width
        # After all have drawn, and after all have copied.
        assert loop.matching(r"bar(rier)?\.sync.*") == 2 * turns, str(result)
    copies = [loop for loop in result.kernel.store_loops if loop.copies]
    assert copies, str(result)
    for loop in copies:
        loads, stores = (loop.matching(rf"{name}\.{single}") for name in (r"ld\.shared", r"st\.global"))
        assert loads == stores == loop.matching(r"[sl][td]\.(global|shared).*") / 2, str(result)


def test_shared_memory_is_read_and_written_in_quads(hopper: list[Compiled]) -> None:
    for result in hopper:
        dtype, stores = result.variant[0], result.way
        single = rf"ld\.shared\.[bfu]{SINGLE[dtype]}" if stores == "staged" else "none"
        if stores == "transposed_staged" and SINGLE[dtype] == "16":
            single = r"ld\.shared\.[bu]64"  # Parts of four elements, on their way.
        for loop in result.kernel.row_loops:
            scattered = {name for name in loop.count if name.startswith("ld.shared") and ".v" not in name}
            assert all(re.fullmatch(single, name) for name in scattered), (str(result), scattered)
        written = {name for name in result.kernel.count if name.startswith("st.shared") and ".v" not in name}
        assert bool(written) == (stores in ("staged", "transposed_staged")), (str(result), written)
        assert result.kernel.count["st.shared.v4.u32"] >= (1 if result.is_transposed else 2), str(result)


# --- Machine code ---------------------------------------------------------------------------------


def machine_code(cubin: Path) -> list[tuple[str, str]]:
    """Instructions and their operands, those of jumps as the number of the instruction jumped to."""
    disassembler = next(programs("nvdisasm"), None)
    if disassembler is None:
        pytest.skip("nvdisasm is neither in package nvidia-cuda-nvdisasm nor on the PATH")
    done = subprocess.run([disassembler, "-c", str(cubin)], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-2000:]
    code, labels = list[tuple[str, str]](), dict[str, int]()
    for line in done.stdout.splitlines():
        if found := re.match(r"\s*(\.L_x_\d+):", line):
            labels[found[1]] = len(code)
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);", line):
            code.append((found[1], found[2]))
    return [
        (name, str(labels[re.findall(r"\.L_x_\d+", operands)[-1]]) if name == "BRA" else operands)
        for name, operands in code
    ]


def code_loops(code: list[tuple[str, str]]) -> Iterator[collections.Counter[str]]:
    """How often each instruction is in the row loops."""
    for last, (name, operand) in enumerate(code):
        if name == "BRA" and int(operand) < last:
            found = collections.Counter(name for name, _ in code[int(operand) : last + 1])
            if any(n.startswith("STG") for n in found) and not any(n.startswith("LDG") for n in found):
                yield found


def test_machine_code_is_what_the_ptx_says(hopper: list[Compiled]) -> None:
    for result in hopper:
        dtype, shared, antithetic, fast, _ = result.variant
        if dtype != "float32" or (antithetic and (shared or fast)):
            continue
        code = machine_code(result.file.with_suffix(".cubin"))
        found = collections.Counter(name for name, _ in code)
        assert len(code) > 500 and not any(re.match(r"D(ADD|MUL|FMA|SETP)|CALL", name) for name in found), str(result)
        loops = list(code_loops(code))
        assert loops, str(result)
        assert not any(re.match("STL|LDL", name) for loop in loops for name in loop), (str(result), "memory in a loop")
        if result.is_transposed:
            loops = [loop for loop in loops if loop["FFMA"]]  # Without those that copy.
        expected = collections.Counter(ROW[result.transform])
        for loop in loops:
            # Two of four words are needed where noise is shared.
            loads = sum(count for name, count in loop.items() if re.match(r"LDS(\.U)?\.(128|64)", name))
            if result.way == "transposed_staged":
                loads -= loop["STG.E.128"]  # What goes through the stage.
            rows = loads / result.loads_per_row
            elements = result.width
            found_fma, expected_fma = loop["FFMA"], (expected["fma.rn.f32"] + elements) * rows
            if result.transform == "none" and result.way == "transposed":
                assert expected_fma <= found_fma <= 2 * expected_fma, (str(result), rows, found_fma)
            else:
                assert found_fma == expected_fma, (str(result), rows, found_fma)
            assert loop["FMUL"] >= expected["mul.f32"] * rows, (str(result), rows, loop["FMUL"])
            assert loop["IMAD.WIDE.U32"] >= expected["mul.wide.u32"] * rows, (str(result), rows)
        if result.is_transposed:
            check_transposed_code(result, loops)
            continue
        quads = max(loop["STG.E.128"] for loop in loops)
        wide = result.way in ("aligned", "shifted")
        assert quads >= (2 if shared else 8) if wide else quads == 0, (str(result), quads)


def check_transposed_code(result: Compiled, loops: list[collections.Counter[str]]) -> None:
    """That a turn stores at once what a thread has in a column, or takes parts of 16 bytes from the stage.

    In the loop with a stage is also the one, however often unrolled, that copies one by one.
    """
    elements = result.width * result.slots
    if result.way == "transposed":
        handed = [handed_over(delta, result.slots, result.width) for delta in range(result.slots)]
        if result.transform == "none":
            # With shared noise, those of all dimensions are one.
            handed = [[min(count, 1) for count in counts] for counts in handed]
        assert sorted(loop["SHFL.UP"] for loop in loops) == sorted(map(sum, handed)), str(result)
        stores = {"STG.E.128": result.width, "STG.E": elements}
        for loop in loops:
            assert {name: count for name, count in loop.items() if re.match("STG|STS|BAR", name)} == stores, str(result)
        return
    (loop,) = loops
    assert loop["STG.E.128"] == elements / 4 and loop["STS"] == elements, str(result)
    assert loop["STG.E"] == loop["LDS"] > 0, str(result)
    assert sum(count for name, count in loop.items() if name.startswith("BAR")) == 2, str(result)


def test_advance_adds_one(compiled: list[Compiled]) -> None:
    kernel = Kernel((compiled[0].file.parent / "advance.ptx").read_text(), 1)
    assert kernel.parameters == ["u64"]
    ((added,), (stored,)) = (
        [i for i in kernel.instructions if i.opcode.startswith(name)] for name in ("add.", "st.global.u64")
    )
    assert added.opcode == "add.s64" and kernel.constant(added.operands[2]) == "1"
    assert stored.sources[-1:] == added.results
    assert [i.opcode for i in kernel.origins(added.sources[0], set())] == ["ld.global.u64"]
