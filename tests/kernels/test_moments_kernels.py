"""The CUDA kernels of weighted moments without a GPU: grids run on the CPU, in any order of blocks and threads."""

import ctypes
import dataclasses
import itertools
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_cpp import CHECKED_IN_CALLS, requires_gxx, run_cases
from kernel_cases import ceil_div
from launches import WORDS, Window, a_launch, stored_words, word_fields
from moments import exact_moments
from tables import DTYPES

from multisample.backends.element_types import MATRIX_TYPES
from multisample.backends.kernels.cuda.moments_geometry import (
    FILL,
    PACKED_MOMENT_GEOMETRY,
    MomentGeometry,
    moment_geometry,
)
from multisample.backends.kernels.cuda.round_keys import round_keys_of
from multisample.backends.launch import PACKED_LAUNCH, SIZES, Launch, Operation, pack

Array = np.ndarray[Any, Any]
_CASE = struct.Struct(f"{PACKED_LAUNCH}s6Q{PACKED_MOMENT_GEOMETRY}sQ")


@dataclasses.dataclass
class Case(Window):
    """A call, and optional changes to its geometry."""

    d: int
    n: int
    dtype: str = "float32"
    shared_noise: bool = False
    antithetic: bool = False
    order: int = 2
    zeros: float = 0.0
    """The share of weights that are zero, in runs of random lengths."""
    weights: Array | None = None
    weight_dtype: str = "float32"
    recut: dict[str, int] = dataclasses.field(default_factory=dict)
    """Fields of the geometry to change: rows, team, turns, sweeps."""

    @property
    def real(self) -> str:
        return MATRIX_TYPES[self.dtype].computing

    def vectors(self) -> tuple[Array, Array, Array]:
        """Weights, mu and sigma."""
        draw = np.random.default_rng(self.d * 10007 + self.n)
        w = draw.normal(size=self.n).astype(self.weight_dtype)
        if self.zeros > 0:
            w[np.repeat(draw.random(self.n) < self.zeros, draw.integers(1, 12, self.n))[: self.n]] = 0
        w, draw = w if self.weights is None else self.weights, np.random.default_rng(self.d)
        return w, draw.normal(size=self.d).astype(self.real), np.abs(draw.normal(size=self.d)).astype(self.real)

    def usual_geometry(self) -> MomentGeometry:
        return moment_geometry(
            a_launch(
                self.d, self.n, self.dtype, shared_noise=self.shared_noise, antithetic=self.antithetic,
                first_column=self.sample_offset, first_column_at="first_column" in self.in_memory,
                origin_in_memory=self.has_origin_in_memory,
            )
        )  # fmt: skip

    def geometry(self) -> MomentGeometry:
        g = self.usual_geometry()
        if not self.recut:
            return g
        rows, noise_rows = self.recut.get("rows", g.rows), 1 if self.shared_noise else self.d
        team = min(self.recut.get("team", g.team), noise_rows)
        slots = min(256 // team, g.groups)
        turns = self.recut.get("turns", ceil_div(g.groups, slots))
        segments = ceil_div(ceil_div(g.groups, slots), turns)
        sweeps = self.recut.get("sweeps", 1) if segments == 1 and g.groups <= FILL[self.real] else 1
        blocks = ceil_div(ceil_div(noise_rows, rows * team), sweeps) * segments
        width = 1 if self.shared_noise else min(32, 1 << self.d.bit_length() - 1)
        finishing = 0
        if segments > 1 or self.shared_noise:
            finishing = ceil_div(self.d, 256 if self.shared_noise else width)
        return g._replace(
            blocks=blocks, rows=rows, team=team, slots=slots, sweeps=sweeps, segments=segments,
            finishing_blocks=finishing, width=width, turns=turns,
        )  # fmt: skip

    def call(self, word_address: int = 8, **changes: Any) -> Launch:
        w, mu, sigma = self.vectors()
        launch = a_launch(
            self.d, self.n, self.dtype, mu=mu, sigma=sigma, weights=w, shared_noise=self.shared_noise,
            antithetic=self.antithetic, device=0, operation=Operation.moments, results=self.order,
            **word_fields(self.words(), self.in_memory, word_address),
        )  # fmt: skip
        return launch._replace(**changes)

    def check(self, first: Array, second: Array) -> None:
        w, mu, sigma = self.vectors()
        exact = exact_moments(
            w, mu, sigma, self.dtype, noise="shared" if self.shared_noise else "independent",
            antithetic=self.antithetic, **self.on_cpu(),
        )  # fmt: skip
        exact.check(*(first, second)[: self.order])


PROGRAM = "run_moments"


def on_the_cpu(test: Any) -> Any:
    """Decorator of a test that runs kernels in C++."""
    return pytest.mark.slow(requires_gxx(test))


def run_in_cpp(runner: Callable[..., Path], cases: list[Case]) -> Iterator[tuple[Array, Array]]:
    """Run the cases, of one computing type."""
    (real,) = {case.real for case in cases}

    def packed(case: Case) -> bytes:
        w, mu, sigma = case.vectors()
        geometry = case.geometry().packed() if case.recut else bytes(PACKED_MOMENT_GEOMETRY)
        words = stored_words(case.words())
        head = _CASE.pack(pack(case.call()), w.nbytes, mu.nbytes, *words, geometry, case.backwards)
        return head + w.tobytes() + mu.tobytes() + sigma.tobytes()

    def size(case: Case) -> int:
        return PACKED_MOMENT_GEOMETRY + 2 * case.d * SIZES[case.dtype]

    for case, result in run_cases(runner(real, CHECKED_IN_CALLS), cases, packed, size):
        usual = result[:PACKED_MOMENT_GEOMETRY]
        assert usual == case.usual_geometry().packed(), (case, struct.unpack("10I2Q", usual), case.usual_geometry())
        first, second = np.split(np.frombuffer(result, DTYPES[case.dtype], offset=PACKED_MOMENT_GEOMETRY), 2)
        yield first, second


def run(runner: Callable[..., Path], cases: Iterable[Case]) -> list[tuple[Array, Array]]:
    """Run all cases, and check the results against exact sums."""
    cases = list(cases)
    results = list(run_in_cpp(runner, cases))
    for case, (first, second) in zip(cases, results, strict=True):
        case.check(first, second)
    return results


LENGTHS = [1, 2, 3, 4, 5, 8, 9, 31, 33, 129, 1021, 1100, 2100]


@on_the_cpu
@pytest.mark.parametrize("antithetic", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_kernels_sum_every_shape(runner: Any, dtype: str, antithetic: bool) -> None:
    def cases() -> Iterator[Case]:
        for k, (n, d) in enumerate(itertools.product(LENGTHS, (1, 3, 40))):
            yield Case(
                d, n, dtype, shared_noise=k % 5 == 0, antithetic=antithetic, order=1 + k % 2, zeros=0.3 * (k % 3),
                seed=k << 33 | 5, offset=(k % 2) << 40, dim_offset=2**32 - d if k % 3 else 0,
                sample_offset=(2**34 - n if k % 4 == 1 else k % 9), backwards=k % 2 == 1,
            )  # fmt: skip

    run(runner, cases())


@on_the_cpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_results_are_rounded_to_narrow_types(runner: Any, dtype: str) -> None:
    run(runner, [Case(20, 30, dtype), Case(5, 300, dtype, shared_noise=True), Case(3, 3000, dtype)])


@on_the_cpu
def test_weights_of_any_type_are_read_with_any_stride(runner: Any) -> None:
    run(runner, [Case(5, 50, weights=np.arange(50).astype(t) % 7) for t in ("int8", "uint64", "float64")])


RECUTS = [
    {"rows": 4, "team": 32, "turns": 3},
    {"rows": 4, "team": 7, "turns": 2},
    {"rows": 4, "team": 256, "sweeps": 1},
    {"rows": 1, "team": 5, "sweeps": 4},
    {"rows": 4, "team": 3, "sweeps": 3},
    {"rows": 1, "team": 250, "turns": 40},
]


@on_the_cpu
@pytest.mark.parametrize("antithetic", [False, True])
def test_every_cut_sums_all_groups(runner: Any, antithetic: bool) -> None:
    cases = [
        Case(60, n, antithetic=antithetic, order=order, zeros=0.5, sample_offset=3, recut=recut, backwards=n % 2 == 1)
        for recut in RECUTS for n, order in ((301, 2), (2500, 1))
    ]  # fmt: skip
    run(runner, cases)


@on_the_cpu
def test_bits_do_not_depend_on_rows_per_thread_or_order_of_blocks(runner: Any) -> None:
    def of(rows: int, backwards: bool) -> Case:
        recut = {"rows": rows, "team": 16, "turns": 5}
        return Case(60, 1700, zeros=0.4, recut=recut, backwards=backwards)

    cases = [of(1, False), of(4, False), of(1, True), of(4, True)]
    results = run(runner, cases)
    assert len({(first.tobytes(), second.tobytes()) for first, second in results}) == 1


@on_the_cpu
def test_groups_without_weight_change_no_bits(runner: Any) -> None:
    # A kernel lists only groups with weight: one group in either call.
    one = np.zeros(900, np.float32)
    one[517] = 2.5
    window = Case(7, 4, weights=one[516:520], sample_offset=516)
    whole, alone = run(runner, [Case(7, 900, weights=one), window])
    assert whole[0].tobytes() == alone[0].tobytes() and whole[1].tobytes() == alone[1].tobytes()


@on_the_cpu
@pytest.mark.parametrize("names", [("offset",), ("seed",), WORDS])
def test_words_are_read_from_memory(runner: Any, names: tuple[str, ...]) -> None:
    words = {"seed": 77, "offset": 9, "dim_offset": 3, "sample_offset": 14}
    antithetic = names != ("offset",)
    run(
        runner,
        [Case(d, n, shared_noise=shared, antithetic=antithetic, in_memory=names, **words)
         for d, n, shared in ((6, 100, False), (5, 40, True))],
    )  # fmt: skip


def in_stages(n: int, dtype: str, powers: tuple[int, ...]) -> Array:
    """Weights that have another power of two from one part to the next."""
    w = np.random.default_rng(n).normal(size=n).astype(dtype)
    return np.ldexp(w, np.repeat(powers, ceil_div(n, len(powers)))[:n])


@on_the_cpu
@pytest.mark.parametrize("antithetic", [False, True])
@pytest.mark.parametrize(
    ("dtype", "stages"),
    [("float32", [(-140, -120, 0, 110), (-130, -115), (105, -140, 112, 0)]),
     ("float64", [(-1060, -980, 0, 1000), (-1050, -1000), (980, -1060, 1005, 0)])],
)  # fmt: skip
def test_weights_of_any_size_are_summed(
    runner: Any, dtype: str, stages: list[tuple[int, ...]], antithetic: bool
) -> None:
    cases = [
        Case(9, n, dtype, shared, antithetic, weights=in_stages(n, dtype, powers), weight_dtype=dtype, recut=recut)
        for powers in stages for n, shared, recut in (
            (40, False, {}), (7000, False, {"team": 9, "turns": 400}), (7000, False, {"team": 9, "turns": 11}),
            (7000, True, {}), (200, False, {"team": 3, "sweeps": 3}),
        )
    ]  # fmt: skip
    for case, moments in zip(cases, run_in_cpp(runner, cases), strict=True):
        case.check(*moments)


@on_the_cpu
def test_nan_weights_reach_every_sum(runner: Any) -> None:
    w = np.zeros(40, np.float32)
    w[13] = np.nan
    ((first, second),) = run_in_cpp(runner, [Case(3, 40, weights=w)])
    assert np.isnan(first).all() and np.isnan(second).all()


@requires_gxx
def test_geometry_is_equal_in_both_languages(geometries: ctypes.CDLL) -> None:
    sizes = [1, 2, 3, 7, 10, 31, 64, 100, 255, 1000, 4096, 65536, 10**6, 10**8, 2**32]
    for d, n in itertools.product(sizes, [*sizes, 2**34]):
        for dtype, shared, antithetic, memory in itertools.product(("float32", "float64"), *((False, True),) * 3):
            case = Case(
                d, n, dtype, shared, antithetic, in_memory=("first_column",) if memory else (),
                sample_offset=0 if n > 2**33 else d % 9,
            )  # fmt: skip
            launch = a_launch(
                d, n, dtype, shared_noise=shared, antithetic=antithetic, first_column=case.sample_offset,
                first_column_at=8 if memory else 0, origin_in_memory=memory,
            )  # fmt: skip
            out = ctypes.create_string_buffer(PACKED_MOMENT_GEOMETRY)
            geometries.moments_cut(pack(launch), out)
            g = case.usual_geometry()
            assert out.raw == g.packed(), (case, g)
            rows = 1 if shared else d
            assert g.team * g.slots <= 256
            assert g.blocks < 2**31 and g.finishing_blocks < 2**31
            assert g.segments * g.turns * g.slots >= g.groups
            assert g.blocks // g.segments * g.sweeps * g.rows * g.team >= rows
            # Little memory, whatever the shape.
            assert g.scratch_size(launch._replace(results=2)) <= 2**20


@requires_gxx
def test_round_keys_are_equal_in_both_languages(geometries: ctypes.CDLL) -> None:
    for seed in (0, 1, 7 << 32, 0x123456789ABCDEF, 2**64 - 1):
        out = ctypes.create_string_buffer(160)
        geometries.keys(ctypes.c_uint64(seed), out)
        assert round_keys_of("float64")(seed) == out.raw
        assert round_keys_of("float32")(seed) == out.raw[:80]
