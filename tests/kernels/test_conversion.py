"""The conversion of mu, sigma and weights that kernels cannot read: equal in Python and C++, and launched first."""

import contextlib
import ctypes
import random
import struct
from typing import Any

import pytest
from launches import Vector, a_launch, head_of
from tables import DTYPES

from multisample.backends.driver import CONFIGURATION_SIZE, DriverBackend
from multisample.backends.kernels.cuda import conversion
from multisample.backends.kernels.cuda.keys import ConversionKey, KernelKey
from multisample.backends.launch import INPUTS, ElementType, Launch, Operation, pack
from multisample.backends.system import cuda_driver

SCRATCH, STRUCT = 2**40, struct.Struct(3 * conversion._CONVERSION.format + "Q")


def random_launch(draw: random.Random) -> Launch:
    vectors: Any = {}
    for name in INPUTS:
        kind = draw.choice(list(ElementType))
        step = draw.choice([0, 8, 800])
        vectors |= {name: Vector(2**30 + draw.randrange(99), draw.choice([0, 8, -8, 24]), kind)}
        vectors |= {} if kind == ElementType.number else {f"{name}_step": step}
    operation = draw.choice([Operation.sample, Operation.moments, Operation.perturb])
    return a_launch(
        draw.choice([0, draw.randint(1, 5000)]), draw.randint(1, 5000), draw.choice(list(DTYPES)), **vectors, device=0,
        scratch=SCRATCH, batch=draw.choice([0, 1, 7]), operation=operation,
    )  # fmt: skip


def test_python_and_cpp_convert_the_same_vectors(geometries: ctypes.CDLL) -> None:
    draw, counts = random.Random(1), set()
    for _ in range(2000):
        launch = random_launch(draw)
        buffer, out = ctypes.create_string_buffer(pack(launch)), ctypes.create_string_buffer(STRUCT.size)
        geometries.conversions(buffer, out)
        readable, conversions, taken = conversion.convert_vectors(launch)
        places = {INPUTS[x.input]: SCRATCH + x.place for x in conversions}
        readable = readable._replace(**places, scratch=SCRATCH + 8 * taken)
        assert buffer.raw[:-1] == pack(readable), launch
        addresses = [getattr(launch, name) for name in INPUTS]
        packed = STRUCT.unpack(conversion.pack_conversions(conversions, addresses, SCRATCH))
        *fields, count = STRUCT.unpack(out.raw[: STRUCT.size])
        assert packed == (*fields[: 7 * count], *[0] * (21 - 7 * count), count), launch
        are_readable = [conversion.is_readable(getattr(readable, f"{name}_type"), readable) for name in INPUTS]
        assert all(are_readable) or not launch.rows, launch
        counts.add(count)
    assert counts == {0, 1, 2, 3}


class Backend(DriverBackend):
    """Its kernels are numbers, in the order of their first use."""

    name = "numbers"

    def compile(self, key: Any) -> tuple[int, Any]:
        return len(self.compiled) + 1, None


@pytest.mark.parametrize("with_launcher", [False, True])
def test_a_launch_converts_first(monkeypatch: pytest.MonkeyPatch, with_launcher: bool) -> None:
    launched = []

    def launch_kernel(memory: Any, kernel: int, addresses: None, extra: Any) -> int:
        configuration = ctypes.string_at(memory, CONFIGURATION_SIZE)
        *blocks, _, threads = struct.unpack_from("4I", configuration)
        size = ctypes.c_size_t.from_address(extra[3]).value
        launched.append((kernel, tuple(blocks), threads, ctypes.string_at(extra[1], size)))
        return 0

    monkeypatch.setattr(cuda_driver, "launch_function", lambda: launch_kernel)
    monkeypatch.setattr(cuda_driver, "device_function", lambda: lambda ordinal: 0)
    monkeypatch.setattr(cuda_driver, "relaxed_capture", contextlib.nullcontext)
    monkeypatch.setattr(cuda_driver, "on_device", contextlib.nullcontext)
    backend = Backend()
    mu, sigma = Vector(2**30, 4, ElementType.int32), Vector(2**31, 8, ElementType.float64)
    launch = a_launch(1000, 8, mu=mu, sigma=sigma, matrix=2**35, device=0, scratch=SCRATCH)
    if with_launcher:
        launcher = backend.launcher(launch._replace(mu=0, sigma=0, matrix=0, scratch=0))
        assert launcher.geometry is not None and launcher.scratch_size is not None
        assert launcher.scratch_size(0) == launcher.scratch_size(5) == 1000
        geometry = launcher.geometry(launch.matrix, 0)
        assert len(backend.compiled) == 2  # Compilation precedes the launch.
        launcher.run(geometry, *head_of(launch))
    else:
        backend.launch(launch)
    _, conversions, _ = conversion.convert_vectors(launch)
    first, (kernel, *_, parameters) = launched
    packed = conversion.pack_conversions(conversions, (2**30, 2**31), SCRATCH)
    assert first == (1, (4, 2), conversion.CONVERSION_THREADS, packed)
    mu, sigma = Vector(SCRATCH, 4, ElementType.float32), Vector(SCRATCH + 4000, 4, ElementType.float32)
    backend.launch(a_launch(1000, 8, mu=mu, sigma=sigma, matrix=2**35, device=0, scratch=SCRATCH + 8000))
    assert launched[2][0] == kernel == 2 and launched[2][3] == parameters
    assert list(map(type, backend.compiled)) == [ConversionKey, KernelKey]
