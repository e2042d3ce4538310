"""C++ reads launches and spans that Python packs."""

import ctypes
import random
import struct
import subprocess
from pathlib import Path

from cuda_cpp import requires_gxx

from multisample.backends import launch as fields
from multisample.backends.kernels.cuda import geometry, plain
from multisample.backends.launch import FORMATS, HEAD, INPUTS, PACKED_LAUNCH, ElementType, Launch, Operation, pack
from multisample.backends.native import csrc_files


@requires_gxx
def test_cpp_has_the_fields_of_launches_and_spans_at_the_places_that_python_packs(tmp_path: Path) -> None:
    lines = "".join(f"print(offsetof(Launch, {name}), sizeof(Launch::{name}));\n" for name in Launch._fields)
    lines += "".join(f"print(offsetof(Span, {name}), sizeof(Span::{name}));\n" for name in fields.Span._fields)
    source = tmp_path / "fields.cpp"
    source.write_text(
        '#include <cstddef>\n#include <cstdio>\n#include "launch.h"\nusing namespace multisample;\n'
        'void print(std::size_t offset, std::size_t size) { std::printf("%zu %zu\\n", offset, size); }\n'
        f"int main() {{\n{lines}print(sizeof(Launch), sizeof(Span));\n}}\n"
    )
    program = tmp_path / "fields"
    subprocess.run(["g++", "-std=c++17", f"-I{csrc_files.folder()}", "-o", str(program), str(source)], check=True)
    printed = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    *places, (size, span_size) = [tuple(map(int, line.split())) for line in printed.splitlines()]
    places, of_span = places[: len(Launch._fields)], places[len(Launch._fields) :]
    assert of_span == [(8 * k, 8) for k in range(len(fields.Span._fields))] and span_size == fields.SPAN.size
    assert places == [(fields.FIELD_AT[name], struct.calcsize(FORMATS[name])) for name in Launch._fields]
    # The fields have no gaps: C++ has no further fields, and Numba's kernels read the fields one after another.
    assert size == PACKED_LAUNCH == sum(size for _, size in places)


@requires_gxx
def test_operations_have_equal_numbers_in_cpp(geometries: ctypes.CDLL) -> None:
    assert list((ctypes.c_uint32 * 4).in_dll(geometries, "operations")) == [*Operation]


def random_launch(draw: random.Random) -> Launch:
    """A launch with random values in all fields."""

    def number(name: str) -> int:
        bits = 8 * struct.calcsize(FORMATS[name])
        signed = FORMATS[name] in "qi"
        value = draw.choice([0, 1, draw.getrandbits(bits), (1 << bits) - 1])
        return value - (1 << bits) if signed and value >> bits - 1 else value

    launch = Launch(*map(number, Launch._fields))._replace(operation=draw.choice([*Operation]))
    kinds = {f"{name}_type": draw.choice([*ElementType, *[ElementType.number] * 9]) for name in INPUTS}
    floats = [0.0, -0.0, 1.5, -1e300, 5e-324, float("inf"), draw.gauss(0, 1)]
    numbers = {name: draw.choice(floats) for name in INPUTS if kinds[f"{name}_type"] == ElementType.number}
    return launch._replace(**kinds, **numbers)


def test_every_field_is_packed_at_its_place() -> None:
    random_source = random.Random(3)
    for _ in range(2000):
        launch = random_launch(random_source)
        packed = pack(launch)
        assert len(packed) == PACKED_LAUNCH
        for name, value in launch._asdict().items():
            is_number = isinstance(value, float)
            (found,) = struct.unpack_from("d" if is_number else FORMATS[name], packed, fields.FIELD_AT[name])
            assert repr(found) == repr(value if is_number else int(value)), (name, launch)


def test_a_packer_gives_the_bytes_of_pack() -> None:
    random_source = random.Random(5)
    for _ in range(1000):
        launch = random_launch(random_source)
        pack_head, tail = fields.packer(launch._replace(**dict.fromkeys(HEAD, 0)))
        assert pack_head(*launch[: len(HEAD)]) + tail == pack(launch)


def test_numba_reads_every_field_of_a_launch_and_a_geometry_at_its_place() -> None:
    """Every field has a different value, and Numba places parameters one after another, each at its alignment."""
    values = [*range(1, 1 + len(Launch._fields))]
    cut = [*range(1000, 1000 + len(geometry.Geometry._fields))]
    launch = Launch(*values)
    packed = pack(launch)[fields.SAMPLE_CALL] + geometry.Geometry(*cut).packed()
    expected = [*(getattr(launch, name) for name in plain.CALL.fields), *cut]
    assert plain.CALL.fields[0] == "offset_at" and plain.CALL.fields[-1] == "sigma_type"
    found, end = [], 0
    for kind in (*plain.CALL.types, *plain.GEOMETRY.types):
        size = kind.bitwidth // 8
        begin = -(-end // size) * size
        end = begin + size
        found.append(int.from_bytes(packed[begin:end], "little"))
    assert found == expected and end == len(packed)
