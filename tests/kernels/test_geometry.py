"""Launch geometries are equal in Python and C++, and cover every element."""

import ctypes
import itertools
import random
import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
from cuda_cpp import requires_gxx
from launches import Vector, a_launch
from tables import COLUMNS, ROWS

from multisample.backends.kernels.cuda import geometry as cuts
from multisample.backends.kernels.cuda.geometry import PACKED_GEOMETRY, Geometry, StoreKind, geometry
from multisample.backends.launch import PACKED_LAUNCH, SIZES, ElementType, Launch, pack

pytestmark = requires_gxx

MOST_BYTES = 2**44
"""The largest output in bytes for which the number of blocks must stay within CUDA's limit. No GPU can address more."""

# The format of the C++ struct. Only `row_step` and `column_step` are signed.
FORMAT = struct.Struct("17IiIi6I")


class Call(NamedTuple):
    rows: int
    columns: int
    dtype: str
    strides: tuple[int, int]
    address: int
    sample_offset: int
    shared: bool
    antithetic: bool
    fast_math: bool
    in_memory: bool = False
    """Whether the sample offset is in device memory, so that the geometry must support every offset."""
    may_be_plain: bool = False
    """Whether the seed is an argument: a small call then has a plain kernel."""
    contiguous: bool = False
    """Whether mu and sigma are contiguous vectors."""

    @property
    def width(self) -> int:
        """Number of columns of a group."""
        return 8 if self.antithetic else 4

    @property
    def skip(self) -> int:
        """Columns of the first group before the window. If the offset is in memory: the most possible."""
        return self.width - 1 if self.in_memory else self.sample_offset % self.width


def launch_of(call: Call) -> Launch:
    vector = Vector(64, SIZES[call.dtype], ElementType[call.dtype])
    return a_launch(
        call.rows, call.columns, call.dtype, matrix=call.address, strides=call.strides,
        first_column=12345 if call.in_memory else call.sample_offset, first_column_at=8 if call.in_memory else 0,
        origin_in_memory=not call.may_be_plain, shared_noise=call.shared, antithetic=call.antithetic,
        fast_math=call.fast_math, sigma=vector,
        mu=vector if call.contiguous else 0.0,
    )  # fmt: skip


def in_python(call: Call) -> Geometry:
    """The geometry from Python, as a backend computes it."""
    # The driver gives these remainders.
    launch = launch_of(call)
    launch = launch._replace(matrix=launch.matrix % 32, first_column=launch.first_column % 8)
    cut = geometry(launch)
    assert cut.packed() == FORMAT.pack(*cut)
    return cut


def sides(call: Call) -> tuple[int, int]:
    """The extents of a call along lanes and along passes: groups and rows, which are swapped in transposed layouts."""
    rows, columns, dtype, strides = call[:4]
    groups = -(-(call.skip + columns) // call.width)
    size = SIZES[dtype]
    reaches = max(rows, abs(strides[1]) // size) < 2**28 and strides[1] % size == 0
    return (rows, groups) if strides[0] == size != strides[1] and rows > 1 and reaches else (groups, rows)


def in_cpp(geometries: ctypes.CDLL, calls: list[Call], *, strided: bool = False, batch: int = 0) -> list[Geometry]:
    out = ctypes.create_string_buffer(PACKED_GEOMETRY * len(calls))
    packed = b"".join(pack(launch_of(call)._replace(batch=batch)) for call in calls)
    geometries.cut(ctypes.c_uint64(len(calls)), packed, strided, out)
    return [Geometry(*fields) for fields in FORMAT.iter_unpack(out.raw)]


def length(draw: random.Random, limit: int) -> int:
    """A random length up to `limit`, often small, or near a threshold of the geometry."""
    kind = draw.randrange(4)
    if kind == 0:
        return min(draw.randint(1, 1400), limit)
    if kind == 1:
        edge = draw.choice([1, 4, 32, 128, 256, 288, 512, 1024, 1152, 2048, 65536, 262144, 524288, 2**20])
        return min(max(edge * draw.choice([1, 1, 2, 3, 5]) + draw.randint(-5, 5), 1), limit)
    return min(int(2 ** draw.uniform(0, limit.bit_length() - 1)) + (draw.randint(0, 3) if kind == 2 else 0), limit)


def random_call(draw: random.Random) -> Call:
    dtype = draw.choice(list(SIZES))
    size = SIZES[dtype]
    while True:
        rows, columns = length(draw, ROWS), length(draw, COLUMNS)
        if rows * columns * size <= MOST_BYTES:
            break
    pad = draw.choice([0, 0, 0, 0, 1, 2, 3, 4, 8, 5, 100])
    strides = draw.choice([
        *[((columns + pad) * size, size)] * 6,
        (-(columns + pad) * size, size),
        *[(size, (rows + pad) * size)] * 3,
        (size, -(rows + pad) * size),
        ((columns + pad) * size, -size),
        ((2 * columns + pad) * size, 2 * size),
        (-size, (rows + pad) * size),
    ])  # fmt: skip
    address = 2**40 * draw.randint(0, 100) + 16 * draw.randint(1, 1000) + draw.choice([0, 0, draw.randrange(8)]) * size
    sample_offset = draw.choice([0, draw.randrange(8), COLUMNS - columns, draw.randint(0, COLUMNS - columns)])
    sample_offset = min(sample_offset, COLUMNS - columns)
    flags = [draw.random() < chance for chance in (0.3, 0.4, 0.3, 0.2)]
    plain = not flags[-1] and draw.random() < 0.3
    return Call(rows, columns, dtype, strides, address, sample_offset, *flags, plain, plain and draw.random() < 0.5)


def edge_calls() -> Iterator[Call]:
    rows = [1, 2, 255, 256, 257, 513, 131073, 2**20, 2**31, 2**32 - 1, 2**32]
    columns = [1, 2, 3, 4, 5, 511, 512, 513, 516, 1024, 1025, 1149, 1152, 1153, 1157]
    columns += [2**20 + 1, 2**33, 2**34 - 1, 2**34]
    for d in rows:
        for n in columns:
            for dtype, size in SIZES.items():
                if d * n * size > MOST_BYTES:
                    continue
                for number, (pad, shift, skip) in enumerate([(0, 0, 0), (0, 1, 0), (1, 0, 0), (2, 1, 3), (4, 0, 6)]):
                    address = 256 + shift * size
                    sample_offset = skip if n + skip <= COLUMNS else COLUMNS - n
                    for kind, (shared, fast) in enumerate([(False, False), (True, False), (False, True)]):
                        # Exactly one of the two layouts is antithetic.
                        for strides in (((n + pad) * size, size), (size, (d + pad) * size)):
                            pairs = (number + kind + d + (strides[0] == size)) % 2 == 1
                            for inputs in ((False, False), (True, False), (True, True)):
                                yield Call(
                                    d, n, dtype, strides, address, sample_offset, shared, pairs, fast, False, *inputs
                                )
    # These calls have every number of groups in a pass.
    for groups in range(1, 289):
        yield Call(5, 4 * groups, "float32", (16 * groups, 4), 256, 0, False, False, False)


@pytest.fixture(scope="module")
def calls() -> list[Call]:
    draw = random.Random(1)
    return [*edge_calls(), *(random_call(draw) for _ in range(15000))]


def test_limits_are_equal_in_python_and_cpp(geometries: ctypes.CDLL) -> None:
    limits = (ctypes.c_uint32 * 18).in_dll(geometries, "limits")
    numbers = [
        288,
        128,
        128,
        128,
        256,
        cuts.SHIFTED_THREADS,
        cuts.SHORT_ROW_THREADS,
        cuts.STAGED_PASSES,
        cuts.FEW_THREADS,
    ]
    numbers += [cuts.MOST_FEW_COLUMNS, cuts.LEAST_ROWS, cuts.SMALL_THREADS, cuts.WIDTH, cuts.ANTITHETIC_WIDTH]
    numbers += [cuts.PLAIN_THREADS, cuts.PLAIN_TRANSPOSED_THREADS]
    assert list(limits) == [*numbers, PACKED_LAUNCH, PACKED_GEOMETRY]
    assert FORMAT.size == PACKED_GEOMETRY
    assert list((ctypes.c_uint32 * 11).in_dll(geometries, "store_kinds")) == [*StoreKind] == [*range(11)]


def test_python_and_cpp_compute_equal_geometries(geometries: ctypes.CDLL, calls: list[Call]) -> None:
    got = [in_python(call) for call in calls]
    for call, mine, other in zip(calls, got, in_cpp(geometries, calls), strict=True):
        assert mine == other, call
    assert sum(call.in_memory for call in calls) > 2500
    # The calls cover all store kinds except kSmallMatrices, which is for batches.
    for antithetic in (False, True):
        cuts = [cut for call, cut in zip(calls, got, strict=True) if call.antithetic == antithetic]
        assert {cut.store_kind for cut in cuts} == set(StoreKind) - {StoreKind.kSmallMatrices}
        cuts = [cut for cut in cuts if cut.store_kind < 6]
        assert {cut.skip for cut in cuts} == set(range(8 if antithetic else 4))
        assert {cut.interleave_log2 for cut in cuts} >= {0, 1, 2}
        for transposed in (False, True):
            some = [cut for cut in cuts if (cut.store_kind >= 4) == transposed]
            assert any(cut.steps > 1 for cut in some) != transposed
            assert any((cut.band_groups if transposed else cut.band_rows) > cut.chunk for cut in some)
            assert any((cut.column_step if transposed else cut.row_step) == 0 for cut in some)
            assert any(cut.overlap for cut in some) == transposed
            assert len({cut.pieces if transposed else cut.groups_per_pass for cut in some}) > 200
    assert {cut.groups_per_pass for cut in got if cut.store_kind < 4} >= set(range(1, 289))


def test_blocks_cover_every_group_of_a_batch_of_small_matrices_once(geometries: ctypes.CDLL) -> None:
    draw, taken, turns = random.Random(3), set(), set()
    for _ in range(3000):
        rows, columns, batch = draw.randint(1, 260), draw.randint(1, 1030) >> draw.randrange(9), draw.randint(2, 9999)
        rows, columns = max(1, rows >> draw.randrange(9)), max(1, columns)
        call = Call(
            rows, columns, "float32", (4 * columns, 4), 64, draw.randrange(8), False, draw.random() < 0.5, False,
            draw.random() < 0.5,
        )  # fmt: skip
        launch = launch_of(call)._replace(batch=batch)
        cut = geometry(launch)
        (other,) = in_cpp(geometries, [call], batch=batch)
        assert cut == other, call
        assert (cut.matrices > 0) == cuts.is_small(launch), call
        if not cut.matrices:
            continue
        taken.add(cut.matrices)
        groups = -(-(call.skip + columns) // call.width)
        assert (
            cut.threads <= cuts.SMALL_THREADS and (cut.blocks - 1) * cut.matrices < batch <= cut.blocks * cut.matrices
        )
        thread = np.arange(cut.threads)
        row = thread * cut.one_by_groups >> 20
        matrix = row * cut.one_by_rows >> 20
        places = (matrix * cut.rows_per_pass + row % cut.rows_per_pass) * groups + (thread - row * groups)
        assert np.array_equal(places, thread), call
        assert np.count_nonzero(matrix < cut.matrices) == cut.matrices * cut.rows_per_pass * groups, call
        turns.add(-(-rows // cut.rows_per_pass))
    assert len(taken) > 30 and turns == set(range(1, 9))


def test_only_the_last_interleaved_bands_of_a_batch_lack_rows(geometries: ctypes.CDLL) -> None:
    """Interleaved bands need many rows, which one matrix of a large batch may not have."""
    draw, taken = random.Random(4), set()
    for _ in range(3000):
        rows, columns, batch = int(2 ** draw.uniform(0, 12)), draw.randint(1, 2400), int(2 ** draw.uniform(1, 16))
        dtype, pad = draw.choice(list(SIZES)), draw.choice([0, 1])
        size = SIZES[dtype]
        flags = (draw.random() < 0.5 for _ in range(3))
        call = Call(rows, columns, dtype, ((columns + pad) * size, size), 64, 8 * draw.randrange(2), *flags)
        for strided in (False, True):
            cut = geometry(launch_of(call)._replace(batch=batch), strided)
            assert [cut] == in_cpp(geometries, [call], strided=strided, batch=batch), (call, batch)
            kind, shift = StoreKind(cut.store_kind).name, cut.interleave_log2
            if kind not in ("kAligned", "kShifted", "kStaged", "kStrided"):
                continue
            taken.add((kind, shift))
            bands, passes = cut.blocks // cut.blocks_per_band, cut.band_rows // cut.rows_per_pass
            first = np.array([((band >> shift) * passes << shift) + band % (1 << shift) for band in range(bands)])
            drawn = (first[:, None] + (np.arange(passes) << shift)).ravel()
            down = -(-rows // cut.rows_per_pass)
            assert np.array_equal(np.sort(drawn[drawn < down]), np.arange(down)), (call, batch)
            # Only the last of many interleaved bands may lack rows.
            assert (first[: max(1 << shift, bands - (1 << shift) + 1)] < down).all(), (call, batch)
    assert taken == {
        ("kAligned", 0), ("kAligned", 3), ("kStrided", 0), *itertools.product(["kShifted", "kStaged"], range(4)),
    }  # fmt: skip


@pytest.mark.slow
def test_every_geometry_is_within_the_limits_of_the_kernel(calls: list[Call]) -> None:
    """The emulator tests run small calls only; this test checks calls of every size."""
    for call in calls:
        cut, size, own_rows = in_python(call), SIZES[call.dtype], cuts.own_rows_of(SIZES[call.dtype])
        (row_stride, column_stride), (across, down) = call.strides, sides(call)
        kind = StoreKind(cut.store_kind).name
        assert 1 <= cut.blocks < 2**31, call
        assert cut.threads % 32 == 0 and 32 <= cut.threads <= 288, call
        assert cut.skip == call.skip, call
        # Without a known first column, the alignment of a row is unknown.
        assert not call.in_memory or kind not in ("kAligned", "kStaged", "kFewColumns"), call
        if kind.startswith("kPlain") or kind == "kFewRows":
            check_plain(call, cut)
            continue
        if kind == "kFewColumns":
            assert (
                call.columns <= cuts.MOST_FEW_COLUMNS
                and call.rows >= cuts.LEAST_ROWS
                and cut.threads == cuts.FEW_THREADS
            ), call
            assert cut.band_rows % cut.rows_per_pass == 0 and cut.blocks_per_band == 1, call
            assert (cut.blocks - 1) * cut.band_rows < call.rows <= cut.blocks * cut.band_rows, call
            continue
        if kind.startswith("kTransposed"):
            # Each thread draws at most one group of a chunk.
            assert cut.chunk % cut.groups_per_pass == 0 and cut.groups_per_pass <= cut.chunk <= cut.threads, call
            assert cut.groups_per_pass >= 1 and cut.band_groups % cut.groups_per_pass == 0 < cut.band_groups, call
            # Offsets between columns of a pass fit in 32 bits.
            assert abs(cut.column_step) * call.width * cut.groups_per_pass < 2**31, call
            if kind == "kTransposedStaged":
                # The threads have registers for all dimensions of a pass.
                registers = cut.threads * (own_rows // 2 if call.antithetic else own_rows)
                assert cut.pieces * cut.groups_per_pass <= registers and column_stride == call.rows * size, call
            else:
                assert cut.threads <= 128 and cut.overlap == (cut.column_step % own_rows > 0), call
            continue
        assert 1 <= cut.groups_per_pass <= 288 and cut.groups_per_pass * cut.rows_per_pass <= cut.threads, call
        assert 1 <= cut.rows_per_pass <= down, call
        assert cut.chunk % cut.rows_per_pass == 0 and cut.rows_per_pass <= cut.chunk <= cut.threads, call
        # Rows do not overlap in shared memory: `pitch` is at least the number of passes in a chunk.
        assert cut.chunk // cut.rows_per_pass <= cut.pitch and cut.pitch % 2 == 1, call
        assert cut.rows_per_pass * cut.pitch <= 288 + 128, call
        # A row step beyond 31 bits is stored as 0; each thread then draws one row.
        step = row_stride // size * cut.rows_per_pass
        if cut.row_step != step << cut.interleave_log2:
            assert cut.row_step == 0 and cut.band_rows == cut.rows_per_pass and abs(8 * step) >= 2**31, call
        assert cut.band_rows % cut.rows_per_pass == 0 and cut.band_rows >= cut.rows_per_pass, call
        # A thread continues with other columns and the same dimensions, so the dimensions must be one chunk.
        assert cut.steps >= 1 and (cut.steps == 1 or cut.band_rows <= cut.chunk), call
        # A pass that draws several rows draws each one whole.
        assert cut.rows_per_pass == 1 or cut.groups_per_pass >= across, call
        if kind == "kShifted":
            assert cut.rows_per_pass == 1 and cut.threads <= cuts.SHIFTED_THREADS and across > 128, call
            assert cut.rest in (0, across % 32) and (cut.rest <= 8 or 256 < across < 288), call
        elif kind == "kStaged":
            assert cut.threads <= cuts.SHORT_ROW_THREADS and cut.rows_per_pass * call.columns < 2**20, call


def check_plain(call: Call, cut: Geometry) -> None:
    """Threads of a plain kernel or of kFewRows have every group once, and divide exactly."""
    groups = -(-(call.skip + call.columns) // call.width)
    assert cut.store_kind == StoreKind.kFewRows or call.may_be_plain, call
    if cut.store_kind == StoreKind.kFewRows:
        units, threads, of_block = cut.blocks_per_band, cut.blocks, cuts.PLAIN_THREADS * cut.turns
        assert call.rows in (1, 2) and threads == call.rows * units and cut.threads == cuts.PLAIN_THREADS, call
        assert (units - 1) * of_block < groups <= units * of_block, call
    elif cut.store_kind == StoreKind.kPlain:
        units, threads = cut.blocks_per_band, cut.blocks
        assert (units - 1) * cut.groups_per_pass < groups <= units * cut.groups_per_pass, call
        assert cut.groups_per_pass * cut.rows_per_pass <= cut.threads <= cuts.PLAIN_THREADS, call
        of_one_row = cut.turns == cuts.ONE_ROW_TURNS and cut.usual and cut.rows_per_pass == 1
        assert of_one_row or cut.turns in (1, cuts.PLAIN_TURNS), call
        band = cut.rows_per_pass * cut.turns
        assert cut.blocks % units == 0 and call.rows <= cut.blocks // units * band < call.rows + band, call
    else:
        units, threads = cut.pieces, cut.blocks * cut.threads
        assert groups * call.width < 2**31, call
        assert cut.threads == cuts.PLAIN_TRANSPOSED_THREADS, call
        assert units == -(-call.rows // cuts.own_rows_of(SIZES[call.dtype])), call
        assert threads - cut.threads < units * -(-groups // cut.turns) <= threads, call
    for n in (0, units - 1, units, 2 * units - 1, threads // units * units - 1, threads // units * units, threads - 1):
        assert n * cut.one_by_units >> cut.units_shift == n // units, (call, n)
    assert cut.one_by_units < 2**32 and threads <= 2**31, call


@pytest.mark.slow
def test_indices_are_divided_exactly(calls: list[Call]) -> None:
    """The kernel divides by a 32-bit product and a shift."""
    index = np.arange(288 + 128)
    cuts = [cut for cut in map(in_python, calls) if cut.store_kind < 4]
    pairs = {(cut.groups_per_pass, cut.one_by_groups) for cut in cuts} | {
        (cut.rows_per_pass, cut.one_by_rows) for cut in cuts
    }
    assert {divisor for divisor, _ in pairs} == set(range(1, 289))
    for divisor, inverse in pairs:
        products = index * inverse
        assert products.max() < 2**32
        assert np.array_equal(products >> 20, index // divisor), divisor


def test_blocks_cover_every_row_and_every_column_once() -> None:
    """The test counts elements with the kernel's index arithmetic."""
    draw, count = random.Random(2), 0
    while count < 2000:
        call = random_call(draw)
        # `sides` counts groups and rows.
        if max(sides(call)) > 8000:
            continue
        count += 1
        cut, (across, down) = in_python(call), sides(call)
        if StoreKind(cut.store_kind).name in ("kFewColumns", "kPlain", "kPlainTransposed", "kFewRows"):
            continue
        bands, rest = divmod(cut.blocks, cut.blocks_per_band)
        assert rest == 0
        is_row_store = cut.store_kind < 4
        # A band consists of passes with row stores, and of groups with transposed stores.
        side, band_length = (cut.rows_per_pass, cut.band_rows) if is_row_store else (1, cut.band_groups)
        down, band_length = -(-down // side), band_length // side
        drawn, shift = np.zeros(down, np.int64), cut.interleave_log2
        for band in range(bands):
            first = ((band >> shift) * band_length << shift) + (band & (1 << shift) - 1)
            # Every block has work, except with interleaved bands.
            assert first < down or shift, (call, cut)
            drawn[first : first + (band_length << shift) : 1 << shift] += 1
        assert (drawn == 1).all(), (call, cut)
        if cut.store_kind == 4:
            # Blocks divide the pieces of a pass; pieces of adjacent warps overlap.
            new = (32 - cut.overlap) * (cut.threads // 32)
            pieces = cut.pieces * cut.groups_per_pass
            assert (cut.blocks_per_band - 1) * new < pieces <= cut.blocks_per_band * new, (call, cut)
            continue
        # In one pass, a block draws `side` groups of a row, or `side` dimensions of a group.
        steps, side = (cut.steps, cut.groups_per_pass) if is_row_store else (1, cut.pieces)
        drawn = np.zeros(cut.blocks_per_band * steps * side, np.int64)
        for block in range(cut.blocks_per_band):
            for step in range(steps):
                first = (block * steps + step) * side
                drawn[first : first + side] += 1
        assert (drawn == 1).all(), (call, cut)
        # Only the last block may be partly idle. Groups that do not fill a warp do not count.
        assert (cut.blocks_per_band - 1) * steps * side < across - cut.rest <= len(drawn), (call, cut)


@pytest.mark.slow
def test_the_geometry_of_the_strided_kernel_supports_every_draw(geometries: ctypes.CDLL, calls: list[Call]) -> None:
    """torch_ext uses this geometry for draws with seed or window in memory: single elements at any addresses."""
    for call, cut in zip(calls, in_cpp(geometries, calls, strided=True), strict=True):
        if cut.store_kind in (StoreKind.kFewRows, StoreKind.kPlain):
            assert call.rows <= 2 and (cut.store_kind == StoreKind.kFewRows or call.may_be_plain), call
            continue
        groups = -(-(call.skip + call.columns) // call.width)
        assert cut.store_kind == StoreKind.kStrided and cut.skip == call.skip, call
        assert 1 <= cut.blocks < 2**31 and 32 <= cut.threads <= 288 and cut.threads % 32 == 0, call
        assert (
            cut.blocks % cut.blocks_per_band == 0 and cut.blocks_per_band * cut.steps * cut.groups_per_pass >= groups
        ), call
        assert cut.blocks // cut.blocks_per_band * cut.band_rows >= call.rows, call
        assert cut.chunk % cut.rows_per_pass == 0 and cut.groups_per_pass * cut.rows_per_pass <= cut.threads, call
