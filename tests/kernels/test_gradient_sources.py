"""The gradient's C++ and CUDA C++ sources without a GPU.

Whole grids of the CUDA kernels run on the CPU, and sanitizers check every memory access: see test_cuda_sources.py.
"""

import collections
import dataclasses
import itertools
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_cpp import requires_gxx, run_cases
from launches import WORDS, Window, a_launch, extent, stored_words, word_fields
from tables import DTYPES, NOISES

import multisample
from multisample.backends.launch import PACKED_LAUNCH, Operation, pack

Array = np.ndarray[Any, Any]


Geometry: Any = collections.namedtuple(
    "Geometry",
    "blocks threads run_of_blocks tiles slots lanes lanes_log2 partials pitch has_partials parts_log2 across one_by_run"
    " rows sweeps turns last_turns segments skip loads groups row_step turn_step sweep_step",
)
"""The fields of the C++ struct, in their order."""

# float16 and bfloat16 differ only in their conversions, which test_normals.py tests.
pytestmark = [pytest.mark.slow, requires_gxx]

TYPES = ("float32", "float64", "bfloat16")
_CASE = struct.Struct(f"{PACKED_LAUNCH}sQ4Q6I")
_GEOMETRY = struct.Struct("20IQqqq")


@dataclasses.dataclass
class Case(Window):
    """A gradient, its memory layout, and an optional change to the geometry of the sums."""

    d: int
    n: int
    dtype: str = "float32"
    noise: str = "independent"
    antithetic: bool = False
    strides: tuple[int, int] | None = None
    """Strides in elements; contiguous rows by default."""
    misalignment: int = 0
    """Distance of the lowest element from an aligned address, in elements."""
    many_rows: bool = False
    """Whether threads have several rows, as in large calls; float64 has such a kernel only with shared noise."""
    tiles: int = 0
    slots: int = 0
    turns: int = 0
    sweeps: int = 0

    @property
    def size(self) -> int:
        return np.dtype(DTYPES[self.dtype]).itemsize

    @property
    def rows(self) -> int:
        """Rows per thread."""
        if not self.many_rows:
            return 1
        return 1 if self.dtype == "float64" and self.noise != "shared" else 2 if self.antithetic else 4

    def memory(self) -> tuple[Array, Array, int]:
        """Memory that is NaN outside the gradient, a view of the gradient, and the byte offset of its first element."""
        strides = [stride * self.size for stride in self.strides or (self.n, 1)]
        below, above = extent((self.d, self.n), strides)
        first = self.misalignment * self.size + below
        memory = np.full(first + above + self.size, 0xFF, np.uint8)
        grad: Array = np.ndarray((self.d, self.n), DTYPES[self.dtype], memory, first, strides)
        draw = np.random.default_rng(self.d * 10007 + self.n)
        # If elements share memory, the last written value remains.
        grad[...] = draw.normal(size=grad.shape).astype(np.float32).astype(grad.dtype)
        return memory, grad, first

    def packed(self) -> bytes:
        memory, grad, first = self.memory()
        draw = a_launch(
            self.d, self.n, self.dtype, matrix=first, strides=grad.strides, operation=Operation.gradient,
            shared_noise=self.noise == "shared", antithetic=self.antithetic, device=0,
            **word_fields(self.words(), self.in_memory),
        )  # fmt: skip
        most = self.d // self.rows
        tiles = min(self.tiles, most) if self.tiles else self.tiles
        head = _CASE.pack(
            pack(draw), len(memory), *stored_words(self.words()),
            self.rows if self.many_rows else 0, tiles, self.slots, self.turns, self.sweeps, self.backwards,
        )  # fmt: skip
        return head + memory.tobytes()

    def check(self, mu: Array, sigma: Array) -> None:
        real = "float64" if self.dtype == "float64" else "float32"
        z = multisample.sample(
            np.zeros(self.d), np.ones(self.d), self.n, dtype=real, noise=self.noise, antithetic=self.antithetic,
            **self.on_cpu(),
        )  # fmt: skip
        _, grad, _ = self.memory()
        g = grad.astype(np.longdouble)
        for got, terms in ((mu, g), (sigma, g * np.asarray(z))):
            # Fewer than 16 roundings, including that of the result; float64 has more in long sums.
            bound = np.abs(terms).sum(1) * (64 * 2.0**-53 if real == "float64" else 16 * 2.0**-24)
            wrong = np.argwhere(~(np.abs(got - terms.sum(1)) <= bound))
            assert len(wrong) == 0, (self, wrong[:5].tolist())


PROGRAM = "run_gradient"


def run(runner: Callable[[str], Path], cases: Iterable[Case]) -> list[tuple[Geometry, Array, Array]]:
    """Run and check all cases, which have one element type."""
    cases, taken = list(cases), []
    (dtype,) = {case.dtype for case in cases}
    real = np.dtype(np.float64 if dtype == "float64" else np.float32)
    for case, result in run_cases(
        runner(dtype), cases, Case.packed, lambda case: _GEOMETRY.size + 2 * case.d * real.itemsize
    ):
        mu, sigma = np.split(np.frombuffer(result, real, offset=_GEOMETRY.size), 2)
        case.check(mu, sigma)
        taken.append((Geometry(*_GEOMETRY.unpack_from(result)), mu, sigma))
    return taken


# Lengths with partial first and last groups, in one block and in several.
LENGTHS = [*range(1, 20), 31, 32, 33, 35, 127, 129, 130, 257, 1021, 1024, 1100]


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("dtype", TYPES)
def test_kernel_sums_every_shape(runner: Callable[[str], Path], dtype: str, noise: str) -> None:
    cases: list[Case] = []
    for n in LENGTHS:
        for d in (1, 2, 7, 40 if n > 40 else 90):
            for many_rows in (False, True):
                k = len(cases)
                if d >= 4 or not many_rows:
                    cases.append(
                        Case(
                            d, n, dtype, noise, (k + n) % 3 == 1, seed=k, offset=k * 2**40,
                            in_memory=("offset",) if k % 4 == 1 else (), dim_offset=k % 5 if k % 3 else 2**32 - d,
                            sample_offset=2**34 - n - k % 7 if k % 5 == 4 else k // 2 % 9,
                            many_rows=many_rows, backwards=k % 2 == 1,
                        )
                    )  # fmt: skip
    taken = [geometry for geometry, _, _ in run(runner, cases)]
    assert {geometry.rows for geometry in taken} == {
        1,
        max(case.rows for case in cases),
        *(case.rows for case in cases),
    }
    assert {geometry.loads for geometry in taken} == {0, 1}


def layouts(d: int, n: int) -> dict[str, tuple[int, int]]:
    """Strides in elements, as from broadcasting, transposing, slicing and flipping."""
    return {
        "padded": (n + 3, 1),
        "odd": (n | 1, 1),
        "transposed": (1, d),
        "transposed, padded": (1, d + 5),
        "every other": (2 * n, 2),
        "every other row": (1, 2 * d),
        "from the end": (n, -1),
        "rows from the end": (-n, 1),
        "one number": (0, 0),
        "one row": (0, 1),
        "one column": (1, 0),
        "overlapping": (1, 1),
    }


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("dtype", TYPES)
def test_kernel_reads_any_strides_and_addresses(runner: Callable[[str], Path], dtype: str, noise: str) -> None:
    cases: list[Case] = []
    for d, n in [(5, 23), (13, 70), (41, 9), (150, 130), (300, 3), (9, 1300)]:
        for strides in layouts(d, n).values():
            for many_rows in (False, True):
                k = len(cases)
                cases.append(
                    Case(
                        d, n, dtype, noise, k % 3 == 1, seed=k, sample_offset=k // 3 % 8, strides=strides,
                        misalignment=k // 2 % 3, many_rows=many_rows, backwards=k % 2 == 1,
                    )
                )  # fmt: skip
    taken = [geometry for geometry, _, _ in run(runner, cases)]
    assert {geometry.loads for geometry in taken} == {0, 1, 2}
    assert {geometry.across for geometry in taken} == {0, 1}


SOME_WORDS = [words for count in range(1, 5) for words in itertools.combinations(WORDS, count)]


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("dtype", TYPES)
def test_kernel_takes_seed_and_window_from_memory(runner: Callable[[str], Path], dtype: str, noise: str) -> None:
    """Each combination of words in memory, and windows that begin at each position in a group."""
    cases: list[Case] = []
    for (d, n), antithetic, first in itertools.product(
        [(1, 1), (2, 3), (7, 4), (41, 9), (5, 130), (90, 31), (1, 8190), (1, 8191), (2, 16382)], (False, True), range(8)
    ):
        k = len(cases)
        cases.append(
            Case(
                d, n, dtype, noise, antithetic, seed=2**64 - 1 - k, offset=2**33 + k,
                in_memory=(("first_column",), WORDS, SOME_WORDS[k // 3 % 15])[k % 3], dim_offset=(0, 2**32 - d)[k % 2],
                sample_offset=first + 8 * (k % 5), strides=((n, 1), (1, d), (n + 1, 1), (2 * n, 2))[k // 8 % 4],
                misalignment=k % 3, backwards=k // 2 % 2 == 1,
            )
        )  # fmt: skip
        # The last segment of a row has one group, which may have no columns.
        if n > 4000:
            cases.append(dataclasses.replace(cases[-1], tiles=1, slots=256, turns=4, strides=None))
    taken = [geometry for geometry, _, _ in run(runner, cases)]
    assert {geometry.rows for geometry in taken} == {1}
    assert {geometry.loads for geometry in taken} >= {1, 2}
    assert any((geometry.groups - 1) % (geometry.turns * geometry.slots) == 0 < geometry.segments - 1
               for geometry in taken)  # fmt: skip


# Tiles, slots and turns.
SEGMENTED = [
    (1, 32, 4), (2, 8, 20), (1, 3, 12), (4, 33, 8), (3, 1, 28), (1, 256, 4), (5, 22, 8), (3, 36, 4), (2, 40, 4),
    (6, 10, 8), (7, 28, 4),
]  # fmt: skip


@pytest.mark.parametrize("dtype", TYPES)
def test_sums_of_row_segments_are_added(runner: Callable[[str], Path], dtype: str) -> None:
    """A small version of large calls: threads have several chains of groups, and rows several segments."""
    cases: list[Case] = []
    layouts = itertools.product([(1, 3000), (6, 1300), (40, 450), (3, 7000)], [None, (0, 0), "across"])
    for k, (((d, n), strides), (tiles, slots, turns)) in enumerate(itertools.product(layouts, SEGMENTED)):
        cases.append(
            Case(
                d, n, dtype, NOISES[k % 2], k // 2 % 3 == 1, seed=k, sample_offset=k // 2 % 9,
                strides=(1, d) if strides == "across" else strides, many_rows=d >= 4 and k % 3 > 0, tiles=tiles,
                slots=slots, turns=turns, backwards=k % 2 == 1,
            )
        )  # fmt: skip
    taken = [geometry for geometry, _, _ in run(runner, cases)]
    assert max(geometry.segments for geometry in taken) > 30
    assert sum(geometry.segments > 1 for geometry in taken) > len(taken) // 2
    assert {geometry.lanes for geometry in taken if geometry.partials > 1 and geometry.rows == 4} >= {1, 2, 4, 8}


@pytest.mark.parametrize("dtype", TYPES)
def test_blocks_sum_short_rows_one_after_the_other(runner: Callable[[str], Path], dtype: str) -> None:
    """A small version of large calls with short rows: each number of lanes, with idle threads and without."""
    cases: list[Case] = []
    for n, slots in [(3, 1), (8, 2), (21, 2), (16, 4), (150, 4), (32, 8), (700, 8), (61, 16), (127, 32), (1500, 32)]:
        for many_rows in (False, True):
            for tiles, sweeps in [(256 // slots, slots), (5, 2), (3, 1)]:
                k, turns = len(cases), -(-(n + 7) // (4 * slots))
                d = 90 if tiles <= 5 else 1100 if n < 100 else 300
                case = Case(
                    d, n, dtype, NOISES[k // 2 % 2], k // 3 % 2 == 1, seed=k, sample_offset=k % 7,
                    strides=(n + k % 2, 1), many_rows=many_rows, tiles=tiles, slots=slots, turns=turns,
                    backwards=k % 2 == 1,
                )  # fmt: skip
                sweeps = min(sweeps, slots, case.d // (case.rows * tiles))
                cases.append(dataclasses.replace(case, sweeps=sweeps))
    cases = cases if dtype == "float32" else cases[sorted(DTYPES).index(dtype) % 3 :: 3]
    taken = [geometry for geometry, _, _ in run(runner, cases)]
    assert {geometry.lanes for geometry in taken} == {1, 2, 4, 8, 16, 32}
    assert all(geometry.segments == geometry.partials == 1 for geometry in taken)
    assert sum(geometry.sweeps > 1 for geometry in taken) > len(taken) // 3


def test_the_geometry_follows_from_the_shape_and_fills_blocks(runner: Callable[[str], Path]) -> None:
    """Shapes with several threads or blocks per row, in which most threads have work."""
    small = [Case(d, n) for d, n in [(1, 1), (3, 5), (47, 100), (10, 4000), (1, 16_384), (1, 16_385), (64, 8000)]]
    for (geometry, _, _), case in zip(run(runner, small), small, strict=True):
        assert geometry.rows == 1, case
        assert geometry.tiles * geometry.slots <= 256, case
        assert geometry.blocks == -(-case.d // geometry.tiles) * geometry.segments, case
        assert geometry.segments * geometry.turns * geometry.slots >= geometry.groups, case
        if case.n > 500:
            busy = geometry.groups * geometry.tiles / (geometry.threads * geometry.turns * geometry.segments)
            assert busy > 0.75, (case, geometry)


@pytest.mark.parametrize("dtype", TYPES)
def test_sums_do_not_depend_on_the_order_of_blocks_and_threads(runner: Callable[[str], Path], dtype: str) -> None:
    cases = [
        Case(d, n, dtype, antithetic=n % 2 == 1, many_rows=many_rows, turns=turns, tiles=1 if turns else 0)
        for d, n in [(9, 4001), (70, 130)]
        for many_rows, turns in itertools.product((False, True), (0, 4))
    ]
    forwards, backwards = (
        run(runner, [dataclasses.replace(case, backwards=flag) for case in cases]) for flag in (False, True)
    )
    for (_, mu, sigma), (_, other_mu, other_sigma) in zip(forwards, backwards, strict=True):
        assert mu.tobytes() == other_mu.tobytes()
        assert sigma.tobytes() == other_sigma.tobytes()
