"""The conversion of vectors that kernels cannot read: equal in Python and C++, and launched first."""

import contextlib
import ctypes
import random
import struct
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from launches import Vector, a_launch, address_of, head_of
from tables import DTYPES

from multisample.backends.driver import CONFIGURATION_SIZE, DriverBackend
from multisample.backends.kernels.cuda import conversion
from multisample.backends.launch import INPUTS, SPAN, ElementType, Launch, Operation, Span, pack
from multisample.backends.system import cuda_driver

SCRATCH, STRUCT = 2**40, struct.Struct(3 * conversion._CONVERSION.format + "Q")


def random_launch(draw: random.Random) -> Launch:
    vectors: Any = {}
    for name in INPUTS:
        kind = draw.choice(list(ElementType))
        vectors |= {name: Vector(2**30 + draw.randrange(99), draw.choice([0, 8, -8, 24]), kind)}
        vectors |= {} if kind == ElementType.number else {f"{name}_step": draw.choice([0, 8, 800])}
    return a_launch(
        draw.choice([0, draw.randint(1, 5000)]), draw.randint(1, 5000), draw.choice(list(DTYPES)), **vectors, device=0,
        scratch=SCRATCH, batch=draw.choice([0, 1, 7]), operation=draw.choice([*Operation]),
    )  # fmt: skip


def at_copies(launch: Launch) -> Launch:
    """The launch of the kernels that read the copies."""
    readable, conversions, taken = conversion.convert_vectors(launch)
    return readable._replace(scratch=SCRATCH + 8 * taken, **{INPUTS[x.input]: SCRATCH + x.place for x in conversions})


def test_python_and_cpp_convert_the_same_vectors(geometries: ctypes.CDLL) -> None:
    draw, counts = random.Random(1), set()
    for _ in range(2000):
        launch = random_launch(draw)
        buffer, out = ctypes.create_string_buffer(pack(launch)), ctypes.create_string_buffer(STRUCT.size)
        geometries.conversions(buffer, out)
        readable, conversions, _ = conversion.convert_vectors(launch)
        assert buffer.raw[:-1] == pack(at_copies(launch)), launch
        packed = STRUCT.unpack(conversion.pack_conversions(conversions, [getattr(launch, x) for x in INPUTS], SCRATCH))
        *fields, count = STRUCT.unpack(out.raw[: STRUCT.size])
        assert packed == (*fields[: 7 * count], *[0] * (21 - 7 * count), count), launch
        assert conversion.convert_vectors(readable)[1] == [], launch
        counts.add(count)
    assert counts == {0, 1, 2, 3}


def test_the_kernel_converts_the_vectors_of_a_batch(geometries: ctypes.CDLL) -> None:
    source, out = np.arange(3000, dtype=np.int16), np.zeros(3000, np.float32)
    vector = Vector(address_of(source), 4, ElementType.int16)  # Every other element.
    launch = a_launch(400, 8, mu=vector, sigma=vector, mu_step=2000, batch=3, scratch=address_of(out), device=0)
    found = conversion.convert_vectors(launch)[1]
    geometries.convert(conversion.pack_conversions(found, (launch.mu, launch.sigma, 0), launch.scratch))
    expected = [source[first : first + 800 : 2] for first in (0, 1000, 2000, 0)]
    assert np.array_equal(out[:1600], np.concatenate(expected)) and not out[1600:].any()


class Backend(DriverBackend):
    """Its kernels are numbers, in the order of their first use."""

    name = "numbers"

    def kernel(self, key: Any) -> int:
        return self._handles.setdefault(key, len(self._handles) + 1)


@pytest.mark.parametrize("operation", [Operation.sample, Operation.moments])
@pytest.mark.parametrize("with_launcher", [False, True])
def test_a_launch_converts_first(monkeypatch: pytest.MonkeyPatch, with_launcher: bool, operation: Operation) -> None:
    launched = []

    def launch_kernel(memory: Any, kernel: int, addresses: None, extra: Any) -> int:
        configuration = ctypes.string_at(memory, CONFIGURATION_SIZE)
        *blocks, _, threads = struct.unpack_from("4I", configuration)
        size = ctypes.c_size_t.from_address(extra[3]).value
        launched.append((kernel, tuple(blocks), threads, ctypes.string_at(extra[1], size)))
        return 0

    monkeypatch.setattr(cuda_driver, "launch_function", lambda: launch_kernel)
    monkeypatch.setattr(cuda_driver, "driver", lambda: SimpleNamespace(cuCtxGetDevice=lambda ordinal: 0))
    monkeypatch.setattr(cuda_driver, "relaxed_capture", contextlib.nullcontext)
    monkeypatch.setattr(cuda_driver, "on_device", contextlib.nullcontext)
    backend = Backend()
    mu, sigma = Vector(2**30, 4, ElementType.int32), Vector(2**31, 8, ElementType.float64)
    launch = a_launch(1000, 8, mu=mu, sigma=sigma, matrix=2**35, device=0, scratch=SCRATCH, operation=operation)
    if with_launcher:
        launcher = backend.launcher(launch._replace(mu=0, sigma=0, matrix=0, scratch=0))
        assert launcher.geometry is not None and launcher.scratch_size is not None
        own = backend.launcher(at_copies(launch)).scratch_size
        assert launcher.scratch_size(5) == 1000 + (0 if own is None else own(5))
        geometry, compiled = launcher.geometry(launch.matrix, 0), [*backend._handles]
        launcher.run(geometry, *head_of(launch))
        assert compiled == [*backend._handles]  # Compilation precedes the launch.
    else:
        backend.launch(launch)
    first, *others = launched
    packed = conversion.pack_conversions(conversion.convert_vectors(launch)[1], (2**30, 2**31), SCRATCH)
    assert first == (1, (4, 2), conversion.CONVERSION_THREADS, packed)
    launched.clear()
    backend.launch(at_copies(launch))
    assert launched == others != []


def test_a_population_of_more_members_than_a_grid_has_is_launched_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "launch_function", lambda: lambda *arguments: 0)
    monkeypatch.setattr(cuda_driver, "driver", lambda: SimpleNamespace(cuCtxGetDevice=lambda ordinal: 0))
    monkeypatch.setattr(cuda_driver, "relaxed_capture", contextlib.nullcontext)
    x = np.zeros(8, np.float32)
    span = Span(address_of(x), address_of(x), 0, 1, 8, 0, 0, 4, 0, 4, 0, 32, 32, 0)
    spans = ctypes.create_string_buffer(SPAN.pack(*span))
    launch = Launch(
        operation=Operation.perturb, type=ElementType.float32, rows=1, columns=8, spans=1, batch=65537,
        matrix=ctypes.addressof(spans), matrix_step=4, weights=0.5, weights_type=0, sigma_type=0,
        seed_at=4096, seed_step=8, origin_in_memory=1, device=0,
    )  # fmt: skip
    assert len(Backend().parameters(launch)) == 2
