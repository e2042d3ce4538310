"""Batches: one launch draws several matrices, each with the bits of a launch of its own."""

import enum
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from cuda_memory import memory_of
from launches import a_launch, a_vector, stored_word
from skip_rules import device_count, require
from tables import QUICK_KERNELS, slow_but

import multisample
from multisample.backends import registry
from multisample.backends.contract import Backend
from multisample.backends.driver import _moved, _parts
from multisample.backends.element_types import MATRIX_TYPES
from multisample.backends.launch import HOST, STEPS, Launch, WordFormat, matrix_of_batch

Array = np.ndarray[Any, Any]


class Batched(enum.IntFlag):
    """The operands that differ from matrix to matrix. The matrices share the others."""

    mu = 1
    sigma = 2
    seed = 4
    offsets = 8


B = 3
ALL = Batched.mu | Batched.sigma | Batched.seed | Batched.offsets
# Matrices that follow each other at aligned and at odd addresses; short rows, long rows and many rows.
SHAPES = [(4, 8), (5, 7), (3, 1029), (40, 1024), (300, 9)]


class Memory(NamedTuple):
    """The memory of a device, or of the host."""

    device: int
    put: Callable[[Array], Any]
    pointer: Callable[[Any], int]
    get: Callable[[Any], Array]


def pointer(array: Array) -> int:
    return int(array.ctypes.data)


@pytest.fixture(params=["cpu", "torch_ext", "torch_ext, CUDA", "cupy, CUDA", "numba, CUDA"])
def backend_and_memory(request: pytest.FixtureRequest) -> Iterator[tuple[Backend, Memory]]:
    name, _, kind = request.param.partition(", ")
    backend = registry.find(name)
    if not kind:
        if not backend.status().available:
            pytest.skip(f"{name} cannot run here")
        backend.prepare("cpu")
        yield backend, Memory(HOST, np.array, pointer, lambda array: array)
        return
    require(name)
    backend.prepare("cuda")
    memory = memory_of({"torch_ext": "torch"}.get(name, name))
    to_host: Any = {"torch": lambda x: x.cpu().numpy(), "cupy": lambda x: x.get(), "numba": lambda x: x.copy_to_host()}
    yield backend, Memory(0, memory.put, memory.pointer, to_host[memory.name])


def a_batch(
    memory: Memory, d: int, n: int, dtype: str, flags: Batched, layout: str, **changes: Any
) -> tuple[Launch, Array, tuple[Any, ...]]:
    """A draw, the words of each matrix, and its arrays: mu, sigma, the matrices, seeds and offsets."""
    real, element = (np.dtype(name) for name in (MATRIX_TYPES[dtype].computing, MATRIX_TYPES[dtype].stored))
    count = {flag: B if flags & flag else 1 for flag in Batched}
    mu = np.linspace(-3, 3, count[Batched.mu] * d).astype(real)
    sigma = np.linspace(0.5, 2, count[Batched.sigma] * d).astype(real)
    seeds = [2**40 + 7 + k for k in range(count[Batched.seed])]
    offsets = [(2**63 + k, 100 + k, 12 + 5 * k) for k in range(count[Batched.offsets])]
    words = np.array([(seeds[b % len(seeds)], *offsets[b % len(offsets)]) for b in range(B)], np.uint64)
    matrices = np.full(B * d * n, -1, f"i{element.itemsize}")
    stored = [stored_word("seed", seed) for seed in seeds]
    numbers = (np.array(x, np.uint64).view(np.int64).reshape(-1) for x in (stored, offsets))
    arrays = tuple(map(memory.put, (mu, sigma, matrices, *numbers)))
    at = memory.pointer(arrays[4])
    strides = (n * element.itemsize, element.itemsize) if layout == "dn" else (element.itemsize, d * element.itemsize)
    vectors = (a_vector(x)._replace(value=memory.pointer(y)) for x, y in zip((mu, sigma), arrays, strict=False))
    draw = a_launch(
        d, n, dtype, **dict(zip(("mu", "sigma"), vectors, strict=True)), matrix=memory.pointer(arrays[2]),
        strides=strides, seed_at=memory.pointer(arrays[3]), offset_at=at, first_row_at=at + 8,
        first_column_at=at + 16, device=memory.device, batch=B, origin_in_memory=1, word_formats=WordFormat.high_first,
        **steps_of(d, n, real.itemsize, element.itemsize, flags), **changes,
    )  # fmt: skip
    return draw, words, arrays


def steps_of(d: int, n: int, real: int, element: int, flags: Batched) -> dict[str, int]:
    offsets = 24 if flags & Batched.offsets else 0
    return {
        "mu_step": d * real if flags & Batched.mu else 0, "sigma_step": d * real if flags & Batched.sigma else 0,
        "matrix_step": d * n * element, "result_step": d * real, "seed_step": 8 if flags & Batched.seed else 0,
        "offset_step": offsets, "origin_step": offsets,
    }  # fmt: skip


FLOAT32_CASES = [*itertools.product(SHAPES, ["float32"], [Batched(0), *Batched, ALL], ["dn", "nd"], [False])]
QUICK_CASES = [
    # Several threads for each matrix.
    ((200, 1024), "float32", ALL, "dn", False),
    *FLOAT32_CASES[::5],
    *((shape, dtype, ALL, "dn", antithetic) for shape in SHAPES[1:3] for dtype, antithetic in QUICK_KERNELS),
]
CASES = [
    *((shape, "float32", ALL, "dn", False) for shape in ((200, 1024), (300, 1029))), *FLOAT32_CASES,
    *itertools.product(SHAPES[1:3], ["float64", "float16", "bfloat16"], [ALL], ["dn"], [False, True]),
]  # fmt: skip


@pytest.mark.parametrize("every_case", slow_but([False], [False, True]))
@pytest.mark.parametrize(("shared_noise", "known_phase"), [(False, False), (True, False), (False, True)])
def test_a_batch_has_the_bits_of_its_matrices(
    backend_and_memory: tuple[Backend, Memory], shared_noise: bool, known_phase: bool, every_case: bool
) -> None:
    backend, memory = backend_and_memory
    every_case |= memory.device != HOST
    for (d, n), dtype, flags, layout, antithetic in CASES if every_case else QUICK_CASES:
        phase = {} if flags & Batched.offsets or not known_phase else {"column_phase": 1 + 12 % 8}
        options = {"shared_noise": shared_noise, "antithetic": antithetic, **phase}
        draw, words, arrays = a_batch(memory, d, n, dtype, flags, layout, **options)
        backend.launch(draw)
        drawn = memory.get(arrays[2]).copy()
        expected = memory.put(np.full(len(drawn), -1, drawn.dtype))
        for b in range(B):
            seed, offset, row, column = (int(word) for word in words[b])
            one = matrix_of_batch(draw._replace(matrix=memory.pointer(expected)), b)
            none = dict.fromkeys(("seed_at", "offset_at", "first_row_at", "first_column_at", "origin_in_memory"), 0)
            own = {"seed": seed, "offset": offset, "first_row": row, "first_column": column, "column_phase": 0}
            backend.launch(one._replace(**none, **own))
        assert np.array_equal(drawn, memory.get(expected)), (d, n, dtype, flags, layout, antithetic)
        assert len(np.unique(drawn[: d * n])) > min(d * n, 200) // 8


@pytest.mark.parametrize("layout", ["dn", "nd"])
def test_a_long_batch_of_small_matrices_has_their_bits(backend: str, place: Any, bits: Any, layout: Any) -> None:
    """On a GPU, there are more matrices than `gridDim.y` can be."""
    count, d, n = 70_001 if device_count() > 0 else 5_001, 3, 5
    seeds = np.arange(count, dtype=np.uint64) + np.uint64(2**63 - 5)
    mu, sigma = (np.linspace(low, 2, count * d).astype(np.float32).reshape(count, d) for low in (-3, 0.5))
    drawn = bits(multisample.sample(place(mu), place(sigma), n, seed=seeds, backend=backend, layout=layout))
    for b in {0, 1, 24, *range(65_534, min(65_537, count)), count - 1}:
        one = multisample.sample(mu[b], sigma[b], n, seed=int(seeds[b]), layout=layout)
        assert np.array_equal(drawn[b], bits(one)), b
    assert len(np.unique(drawn)) > 0.99 * drawn.size


def test_long_batches_are_launched_in_parts() -> None:
    steps = steps_of(4, 8, 4, 4, ALL & ~Batched.sigma)
    draw = a_launch(4, 8, **steps, batch=2 * 65535 + 1, mu=np.zeros(32, np.float32), seed_at=1 << 20, device=0)
    moves = {"matrix": 128, "mu": 16, "seed_at": 8, "offset_at": 24, "sigma": 0}
    parts = _parts(draw._replace(rows=1 << 20))  # Too large for the kernel of small matrices.
    assert [length for length, _ in parts] == [65535, 65535, 1]
    for k, (_, moved) in enumerate(parts):
        found = dict(zip(STEPS, moved, strict=True))
        assert {name: found[name] for name in moves} == {name: k * 65535 * step for name, step in moves.items()}
    assert _parts(draw._replace(batch=0)) == [(0, [0] * len(STEPS))]
    assert [str(x) for x in _moved([-0.0, 5, 6], [0, 0, 8])] == ["-0.0", "5", "14"]
