"""Calls of perturb in one block of memory, and what they must write there."""

import dataclasses
import itertools
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
from launches import Window, a_launch, extent, stored_words, word_fields
from numba import njit
from tables import DTYPES

import multisample
from multisample.backends.element_types import MATRIX_TYPES, ElementType
from multisample.backends.kernels.stream.arithmetic import fma
from multisample.backends.launch import PACKED_LAUNCH, SIZES, SPAN, UNIT_FACTOR, Launch, Operation, Span, pack

Array = np.ndarray[Any, Any]
_CASE = struct.Struct(f"{PACKED_LAUNCH}s8Q")
# Bytes between the parts in memory.
_GUARD = 64


@njit
def _add(weights: Array, z: Array, x: Array) -> None:
    for k in range(len(weights)):
        for e in range(len(x)):
            x[e] = fma(weights[k], z[k, e], x[e])


@dataclasses.dataclass
class Part:
    """A span, with its layout in memory."""

    width: int
    rows: int = 1
    first: int = 0
    jump: int | None = None
    """Elements of the parameter from one row to the next; by default the width."""
    id: int = 0
    source: tuple[int, int] | None = None
    """Strides of a row and of an element, in elements; contiguous by default."""
    target: tuple[int, int] | None = None
    in_place: bool = False
    source_shift: int = 0
    """Elements from an aligned address to the first element in memory."""
    target_shift: int = 0

    def strides(self, of_target: bool) -> tuple[int, int]:
        return (self.source if self.in_place or not of_target else self.target) or (self.width, 1)

    def layout(self, of_target: bool) -> tuple[int, int, int, int]:
        """The index of the first element, the number of elements that the layout spans, and both strides."""
        row, column = self.strides(of_target)
        below, above = extent((self.rows, self.width), (row, column))
        return below, below + above + 1, row, column

    def elements(self) -> Array:
        """The index of each element in its parameter, shape (rows, width)."""
        jump = self.width if self.jump is None else self.jump
        return self.first + np.arange(self.rows)[:, None] * jump + np.arange(self.width)


@dataclasses.dataclass
class Call(Window):
    """A call of perturb; its members begin at `dim_offset`."""

    parts: list[Part]
    dtype: str = "float32"
    weights: Array | float = 0.5
    members: int = 1
    """The number of members, if `weights` is a number."""
    turns: int = 1
    keys: tuple[tuple[int, int, int], ...] = ()
    """Seed, offset and first member of each matrix of a batch, or of each coefficient, in memory."""
    has_own_keys: bool = False
    """Whether `keys` are those of the coefficients."""
    factors: tuple[float, ...] = ()
    """The factor of each part; all are 1 without them."""
    has_factors_in_memory: bool = False

    def __post_init__(self) -> None:
        size = SIZES[self.dtype]
        self.spans: list[Span] = []
        end = _GUARD
        for k, part in enumerate(self.parts):
            places = []
            for of_target in (False, True):
                below, length, row, column = part.layout(of_target)
                if of_target and part.in_place:
                    at = places[0][0]
                else:
                    at = -(-end // 16) * 16 + size * (part.target_shift if of_target else part.source_shift)
                    # Targets of a batch are at different alignments.
                    step = size * (length + 3) if of_target and self.batch > 1 else 0
                    end, at = at + size * length + (self.batch - 1) * step + _GUARD, at + size * below
                places.append((at, row * size, column * size))
            (source, *of_source), (target, *of_target_) = places
            jump = part.width if part.jump is None else part.jump
            place = source, target, part.first, part.rows, part.width, jump, *of_source, *of_target_
            self.spans.append(Span(*place, part.id, 0, step, self.factor_word(k)))
        self.size = -(-end // 16) * 16

    @property
    def batch(self) -> int:
        return 1 if self.has_own_keys else max(len(self.keys), 1)

    def factor_word(self, k: int) -> int:
        """The field `factor` of part `k`."""
        if not self.factors:
            return UNIT_FACTOR
        return k if self.has_factors_in_memory else int(np.float64(self.factors[k]).view(np.uint64))

    @property
    def rows(self) -> int:
        return len(self.weights) if isinstance(self.weights, np.ndarray) else self.members

    @property
    def real(self) -> str:
        return MATRIX_TYPES[self.dtype].computing

    def view(self, memory: Array, span: Span, of_target: bool, b: int = 0) -> Array:
        """The elements of a source, or of a target of matrix `b`, in the memory."""
        address, strides = (span.target, span[8:10]) if of_target else (span.source, span[6:8])
        address += b * span.target_step if of_target else 0
        return np.ndarray((span.rows, span.width), DTYPES[self.dtype], memory, address, strides)

    def memory(self) -> Array:
        """The memory before the call, without NaN."""
        draw = np.random.default_rng(len(self.parts) + self.size)
        values = draw.normal(size=self.size // SIZES[self.dtype])
        values[draw.random(len(values)) < 0.05] = -0.0
        return values.astype(DTYPES[self.dtype]).view(np.uint8)

    def expected(self) -> Array:
        """The memory after the call."""
        before = self.memory()
        after, real = before.copy(), np.dtype(self.real)
        weights = np.broadcast_to(np.asarray(self.weights).astype(real), self.rows).copy()
        words = (self.seed, self.offset, self.dim_offset)
        keys = self.keys if self.keys and not self.has_own_keys else [words]
        parts = enumerate(zip(self.parts, self.spans, strict=True))
        for (k, (part, span)), (b, own) in itertools.product(parts, enumerate(keys)):
            x = self.view(before, span, False).astype(real)
            if self.factors:
                x *= real.type(self.factors[k])
            for row, elements in zip(x, part.elements(), strict=True):
                # A call for each key.
                of_keys = self.keys if self.has_own_keys else [own]
                draws = [
                    multisample.sample(
                        np.full(1 if self.has_own_keys else self.rows, -0.0), 1.0, part.width,
                        seed=multisample.Key(seed, offset + (part.id << 32)), dtype=real.name, backend="cpu",
                        dim_offset=self.dim_offset if self.has_own_keys else first, sample_offset=int(elements[0]),
                    )
                    for seed, offset, first in of_keys
                ]  # fmt: skip
                _add(weights, np.concatenate(draws), row)
            with np.errstate(over="ignore"):
                self.view(after, span, True, b)[...] = x.astype(DTYPES[self.dtype])
        return after

    def inputs(self) -> Array:
        """The bytes of weights, factors and keys, each at a multiple of 16, as the kernel reads them."""
        weights = self.weights.tobytes() if isinstance(self.weights, np.ndarray) else b""
        factors = np.array(self.factors, self.real).tobytes() if self.has_factors_in_memory else b""
        table = np.array([(*key, 0) for key in self.keys], np.uint64).tobytes()
        parts = [b"".ljust(16) if self.keys or factors else b"", weights, factors, table]
        return np.frombuffer(b"".join(part.ljust(-(-len(part) // 16) * 16) for part in parts), np.uint8)

    def launch_with_inputs(self, launch: Launch, address: int) -> Launch:
        """The launch with the address of `inputs`; one of 0 gives displacements."""
        if not (self.keys or self.has_factors_in_memory):
            return launch._replace(weights=address) if isinstance(self.weights, np.ndarray) else launch
        at, fields = address + 16, {}
        if isinstance(self.weights, np.ndarray):
            fields["weights"], at = at, at + -(-self.weights.nbytes // 16) * 16
        real = np.dtype(self.real)
        if self.has_factors_in_memory:
            fields |= {"sigma": at, "sigma_type": ElementType[real.name], "sigma_stride": real.itemsize}
            at += -(-len(self.factors) * real.itemsize // 16) * 16
        if self.keys:
            fields |= {"seed_at": at, "offset_at": at + 8, "seed_step": 32, "offset_step": 32, "origin_in_memory": True}
            fields |= {"word_formats": 0, "shared_noise": self.has_own_keys}
            if not self.has_own_keys:
                fields |= {"first_row_at": at + 16, "first_column_at": at + 24, "origin_step": 32}
                fields["batch"] = len(self.keys)
        return launch._replace(**fields)

    def launch(self, word_address: int = 8, **changes: Any) -> Launch:
        weights = self.weights if isinstance(self.weights, np.ndarray) else float(self.weights)
        launch = a_launch(
            self.rows, sum(span.rows * span.width for span in self.spans), self.dtype, weights=weights,
            operation=Operation.perturb, spans=len(self.spans), device=0,
            **word_fields(self.words(), self.in_memory, word_address),
        )  # fmt: skip
        return launch._replace(**changes)

    def spans_at(self, memory: int) -> bytes:
        """The packed spans, for the address of the memory."""
        moved = (span._replace(source=memory + span.source, target=memory + span.target) for span in self.spans)
        return b"".join(SPAN.pack(*span) for span in moved)

    def packed(self) -> bytes:
        """The input of ``shim/run_perturb.cpp``."""
        inputs = self.inputs().tobytes()
        packed, words = pack(self.launch_with_inputs(self.launch(), 0)), stored_words(self.words())
        head = _CASE.pack(packed, len(inputs), self.size, *words, self.turns, self.backwards)
        return head + self.spans_at(0) + inputs + self.memory().tobytes()


def _parts_of_every_kind() -> Iterator[list[Part]]:
    # Runs at every phase and alignment, in and out of place.
    for phase in range(4):
        for width in (1, 2, 3, 4, 5, 7, 8, 130, 517):
            yield [
                Part(width, first=phase, id=k, source_shift=s, target_shift=t, in_place=s == t)
                for k, (s, t) in enumerate(((0, 0), (phase, 0), (0, 1), (2, 3), (3, 3), (4 - phase, 2)))
            ]
    # Runs so long that each thread loops.
    yield [Part(9001, first=2, id=5, in_place=True), Part(6144, id=2**32 - 1, source_shift=1, target_shift=3)]
    yield [Part(4099, first=1, source_shift=1, target_shift=1), Part(8192, id=1)]
    # Elements far from the first.
    yield [Part(700, first=2**34 - 700, id=9), Part(33, first=2**32 - 5, id=8, in_place=True)]
    # Rows without gaps; rows with gaps between their element indices, their addresses, or both.
    yield [Part(7, 40, first=3), Part(7, 40, first=3, jump=8), Part(8, 40, jump=8, source=(9, 1), target=(11, 1))]
    yield [
        Part(width, rows, first=first, jump=width + gap, id=width, source=(width + skip, 1), in_place=skip % 2 == 0)
        for width, rows, first, gap, skip in (
            (1, 700, 0, 1, 0), (2, 300, 1, 2, 3), (16, 33, 4, 16, 4), (16, 33, 4, 48, 0), (130, 9, 3, 3, 2),
            (512, 3, 2**33, 512, 4), (1030, 3, 1, 4, 6), (33, 20, 2**33 + 1, 2**20 + 1, 1),
        )
    ]  # fmt: skip
    # Elements with strides, transposed or reversed.
    yield [
        Part(40, source=(0, 2), id=3), Part(40, source_shift=1, target=(0, 3)), Part(50, 7, jump=60, source=(1, 7)),
        Part(50, 7, jump=60, source=(1, 7), target=(50, 1)), Part(9, 5, first=2, jump=-9 + 10, source=(-9, 1)),
        Part(30, 4, source=(30, -1), target=(-30, 1)), Part(1, 5, jump=3, source=(4, 9), target=(2, 1)),
    ]  # fmt: skip


def calls_of_every_kind(dtype: str) -> Iterator[Call]:
    """Every layout, each with other weights, words and orders of blocks."""
    draw = np.random.default_rng(7)
    weights = [0.25, np.array([1.5, -0.3, 2.25], np.float32), draw.normal(size=2)]
    weights += [draw.normal(size=30).astype(np.float32), draw.normal(size=30)]
    words: list[tuple[str, ...]] = [(), ("offset",), ("seed",), (), ("seed", "offset", "first_row")]
    for k, parts in enumerate(_parts_of_every_kind()):
        w = weights[k % len(weights)]
        place = {"offset": (0, 2**32 - 1, 77)[k % 3], "dim_offset": (0, 5, 2**32 - 30)[k // 2 % 3]}
        order = {"in_memory": words[k // 3 % len(words)], "turns": 1 + k % 3, "backwards": k % 2 == 1}
        yield Call(parts, dtype, w, seed=2**64 - 1 - k, **place, **order)
    # More members than threads, more spans than one kernel takes, no member, and a number for several members.
    yield Call([Part(90), Part(2100, first=1, id=1)], dtype, draw.normal(size=300).astype(np.float32), turns=2)
    yield Call([Part(1 + k % 9, first=k % 5, id=k) for k in range(200)], dtype)
    yield Call([Part(90)], dtype, np.zeros(0, np.float32))
    yield Call([Part(3, 4, first=k % 5, jump=4, id=k) for k in range(90)], dtype, 0.1, 3, backwards=True)
    yield from calls_of_wide_spans(dtype)


def calls_of_wide_spans(dtype: str) -> Iterator[Call]:
    """Batches, keys of coefficients, and factors."""
    draw = np.random.default_rng(8)
    keys = (3, 1, 5), (2**64 - 1, 2**32 - 1, 2**32 - 40), (2**63 + 7, 0, 0)
    parts = [
        [Part(130, first=2, id=5, source_shift=1), Part(517, id=2**32 - 1), Part(3, id=1, target_shift=3)],
        [Part(9001, first=1, id=7, source_shift=2, target_shift=1), Part(6144, id=3)],
        [
            Part(7, 40, first=3, jump=8, id=4), Part(130, 9, first=3, jump=133, source=(132, 1)),
            Part(40, source=(0, 2), id=3), Part(50, 7, jump=60, source=(1, 7), id=9), Part(33, id=6),
        ],
        [Part(1 + k % 9, 1 + k % 2, first=k % 5, jump=11, id=k) for k in range(150)],
    ]  # fmt: skip
    for k, some in enumerate(parts):
        factors = tuple(draw.random(len(some)).astype(np.float32).tolist())
        own = np.array([1.5, -0.3, 2.25], np.float32)
        options: dict[str, Any] = {"turns": 1 + k % 3, "backwards": k % 2 == 1}
        yield Call(some, dtype, 0.25, keys=keys, **options)
        yield Call(some, dtype, own, keys=keys[:2], factors=factors, **options)
        yield Call(some, dtype, 0.25, factors=factors, has_factors_in_memory=k % 2 == 0, seed=9, offset=2, **options)
        yield Call(some, dtype, own.astype(np.float64), keys=keys, has_own_keys=True, dim_offset=6, **options)
        yield Call(some, dtype, own, keys=keys, has_own_keys=True, factors=factors, **options)
    many = tuple((int(x), k, 0) for k, x in enumerate(draw.integers(0, 2**63, 300)))
    weights = draw.normal(size=300).astype(np.float32)
    yield Call([Part(90), Part(2100, first=1, id=1)], dtype, weights, keys=many, has_own_keys=True, turns=2)
    in_place = [Part(130, first=2, id=5, in_place=True), Part(9, 5, first=2, id=1, in_place=True)]
    yield Call(in_place, dtype, weights[:4], factors=(0.5, 0.25), seed=9, offset=2)
