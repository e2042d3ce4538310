"""One launch as plain numbers and addresses: ``Launch`` of ``csrc/launch.h``. Every layer passes it.

C++ and CUDA kernels take its bytes, kernels in Python its fields. A new field is an attribute of `Launch` here, and a
member of the struct there.
"""

from __future__ import annotations

import enum
import itertools
import struct
from collections.abc import Callable, Iterator
from typing import Annotated, NamedTuple, TypeAlias, get_type_hints

from .element_types import MATRIX_TYPES, SIZES, ElementType

__all__ = [
    "FIELD_AT",
    "FORMATS",
    "HEAD",
    "HOST",
    "INPUTS",
    "OFFSETS_BYTES",
    "OPERANDS",
    "PACKED_LAUNCH",
    "SEED_BYTES",
    "SIZES",
    "Batched",
    "ElementType",
    "Launch",
    "Operands",
    "Operation",
    "batch_steps",
    "computing_name",
    "has_origin_in_memory",
    "matrix_of_batch",
    "pack",
    "packer",
    "parts_of_batch",
    "type_name",
    "words_in_memory",
]

HOST = -1
"""The `device` of a launch in host memory."""


class Operation(enum.IntEnum):
    """The operation of a launch: see `OPERANDS`.

    z is the noise, and w are the weights; sums are over all columns c.

    sample : ``matrix[r, c] = mu[r] + sigma[r] * z[r, c]``.
    gradient : ``first[r] = sum(matrix[r, c])`` and ``second[r] = sum(matrix[r, c] * z[r, c])``.
    moments : ``first[r] = sum(w[c] * (mu[r] + sigma[r] * z[r, c]))``, and with two results ``second[r] = sum(w[c] *
        (sigma[r] * z[r, c])**2)``.
    """

    sample = 0
    gradient = 1
    moments = 2


class Operands(NamedTuple):
    """Names of the fields of `Launch` whose memory an operation reads and writes."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]


OPERANDS: dict[int, Operands] = {
    Operation.sample: Operands(("mu", "sigma"), ("matrix",)),
    Operation.gradient: Operands(("matrix",), ("first", "second")),
    Operation.moments: Operands(("weights", "mu", "sigma"), ("first", "second")),
}
"""The operands of each operation."""


class Batched(enum.IntFlag):
    """Operands with an element for each matrix of a batch, one after another in memory.

    The element of `offsets` is three 64-bit numbers: offset, first row and first column.
    """

    mu = 1
    sigma = 2
    seed = 4
    offsets = 8


# Types of fields, with their formats of `struct`. Numba's kernels compute with "P" and "q" as signed numbers.
_Address: TypeAlias = Annotated[int, "P"]
_Input: TypeAlias = Annotated["int | float", "P"]
_U64: TypeAlias = Annotated[int, "Q"]
_I64: TypeAlias = Annotated[int, "q"]
_U32: TypeAlias = Annotated[int, "I"]
_I32: TypeAlias = Annotated[int, "i"]


class Launch(NamedTuple):
    """One launch. An operation ignores the fields that it does not need.

    ``z[r, c]`` is the noise of row ``first_row + r`` (of row 0 with `shared_noise`) and column ``first_column + c``.
    With `antithetic`, columns come in pairs: ``z[r, 2 * k]`` is column k of the noise, and ``z[r, 2 * k + 1]`` is its
    negative.
    """

    # The head: values of a call. See `packer`.
    mu: _Input = 0
    """Address of the first of `rows` elements, or the number that all are if `mu_type` is `ElementType.number`."""
    sigma: _Input = 0
    """The same."""
    weights: _Input = 0
    """The same, of `columns` elements."""
    matrix: _Address = 0
    """Address of the first element, in host memory or in memory of `device`."""
    first: _Address = 0
    """Address of `rows` contiguous results: of type `type` for moments, of its computing type for a gradient."""
    second: _Address = 0
    """The same; 0 if moments have one result."""
    seed: _U64 = 0
    offset: _U64 = 0
    first_row: _I64 = 0
    first_column: _I64 = 0
    """``first_row + rows <= 2**32`` and ``first_column + columns <= 2**34``."""
    seed_at: _Address = 0
    """Address of the seed in memory of `device`, its high half first as in JAX's keys; 0 if the field `seed` counts."""
    offset_at: _Address = 0
    """The same for `offset`, which is one 64-bit number in memory."""
    first_row_at: _Address = 0
    first_column_at: _Address = 0
    scratch: _Address = 0
    """Address of scratch memory on `device`, of `Launcher.scratch_size` float64 numbers."""
    stream: _Address = 0
    """Handle of a stream on `device`."""
    threads: _U64 = 0
    """On the CPU, the most threads for the call; 0 for no limit."""

    # The tail: the same for all calls of a plan.
    mu_stride: _I64 = 0
    sigma_stride: _I64 = 0
    weights_stride: _I64 = 0
    row_stride: _I64 = 0
    """Strides are in bytes."""
    column_stride: _I64 = 0
    """The elements of a sample must not overlap."""
    rows: _I64 = 1
    columns: _I64 = 1
    """At least 1."""
    mu_type: _U32 = ElementType.number
    """Types are of `ElementType`."""
    sigma_type: _U32 = ElementType.number
    weights_type: _U32 = ElementType.number
    type: _U32 = ElementType.float32
    """Of the matrix's elements, or of the moments; one of `MATRIX_TYPES`."""
    operation: _U32 = Operation.sample
    results: _U32 = 0
    """How many moments, 1 or 2."""
    shared_noise: _U32 = 0
    antithetic: _U32 = 0
    fast_math: _U32 = 0
    """No effect on the CPU and on float64."""
    device: _I32 = HOST
    """The ordinal of a CUDA device, or `HOST`."""
    batch: _U32 = 0
    """How many matrices; 0 counts as 1. They are contiguous and lie one after another, and so do the results of a
    gradient. A batch needs its words in memory."""
    batched: _U32 = 0
    """Flags of `Batched`."""
    column_phase: _U32 = 0
    """Where `first_column` is in memory: 1 + first_column % 8, or 0 if that is not known."""
    unused: _U32 = 0
    """Keeps the size a multiple of 8, as C++ does."""


FORMATS: dict[str, str] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(Launch, include_extras=True).items()
}
"""The format of each field, as of `struct`."""

_HEAD_FIELDS = Launch._fields.index("threads") + 1
HEAD = Launch._fields[:_HEAD_FIELDS]
"""Fields of the head, each of 8 bytes."""

INPUTS = ("mu", "sigma", "weights")
"""Fields that are addresses or numbers; the type of `x` is the field `x_type`, and its stride `x_stride`."""

_FORMAT = "".join(FORMATS.values())
_TAIL = struct.Struct(_FORMAT[_HEAD_FIELDS:])
# Packers of a head by which of `INPUTS` are numbers.
_PACK_HEAD = {
    numbers: struct.Struct(
        "".join("d" if number else "P" for number in numbers) + _FORMAT[len(INPUTS) : _HEAD_FIELDS]
    ).pack
    for numbers in itertools.product((False, True), repeat=len(INPUTS))
}

FIELD_AT: dict[str, int] = {
    # Only the last field of a prefix may need padding before it.
    name: struct.calcsize(_FORMAT[: k + 1]) - struct.calcsize(_FORMAT[k])
    for k, name in enumerate(Launch._fields)
}
"""Byte offsets of the fields in a packed launch."""

PACKED_LAUNCH = struct.calcsize(_FORMAT)
"""Bytes of a packed launch."""

SEED_BYTES, OFFSETS_BYTES = 8, 24
"""Bytes of a seed, and of offset, first row and first column, of a matrix in a batch."""


def packer(template: Launch) -> tuple[Callable[..., bytes], bytes]:
    """The packer of the head, and the packed tail, of launches like `template`.

    ``pack_head(*head) + tail`` is a launch; `head` has the values of the fields `HEAD`.
    """
    numbers = tuple(
        kind == ElementType.number for kind in (template.mu_type, template.sigma_type, template.weights_type)
    )
    return _PACK_HEAD[numbers], _TAIL.pack(*template[_HEAD_FIELDS:])


def pack(launch: Launch) -> bytes:
    """The bytes of the C++ struct ``Launch``."""
    pack_head, tail = packer(launch)
    return pack_head(*launch[:_HEAD_FIELDS]) + tail


def type_name(launch: Launch) -> str:
    """The name of the launch's `type`."""
    return ElementType(launch.type).name


def computing_name(launch: Launch) -> str:
    """The name of the computing type of the launch's `type`."""
    return MATRIX_TYPES[type_name(launch)].computing


def words_in_memory(seed: int, offsets: int) -> dict[str, int]:
    """The fields of a launch whose seed is at an address, and whose offset, first row and first column at another.

    Without `offsets` these three are 0.
    """
    return {
        "seed_at": seed,
        "offset_at": offsets,
        "first_row_at": offsets and offsets + 8,
        "first_column_at": offsets and offsets + 16,
    }


def has_origin_in_memory(launch: Launch) -> bool:
    """Whether the seed, the first row or the first column is in memory."""
    return bool(launch.seed_at or launch.first_row_at or launch.first_column_at)


def batch_steps(launch: Launch) -> dict[str, int]:
    """Bytes from one matrix of a batch to the next, by fields that are addresses."""
    rows, name = launch.rows, type_name(launch)
    result = rows * SIZES[computing_name(launch) if launch.operation == Operation.gradient else name]
    offsets = OFFSETS_BYTES if launch.batched & Batched.offsets else 0
    return {
        "mu": rows * launch.mu_stride if launch.batched & Batched.mu else 0,
        "sigma": rows * launch.sigma_stride if launch.batched & Batched.sigma else 0,
        "matrix": rows * launch.columns * SIZES[name],
        "first": result,
        "second": result,
        "seed_at": SEED_BYTES if launch.batched & Batched.seed else 0,
        "offset_at": offsets,
        "first_row_at": offsets,
        "first_column_at": offsets,
    }


def matrix_of_batch(launch: Launch, b: int) -> Launch:
    """Matrix `b` of a batch."""
    addresses = {name: getattr(launch, name) for name in batch_steps(launch)}
    in_memory = {name for name, address in addresses.items() if address or not name.endswith("_at")}
    moved = {name: addresses[name] + b * step for name, step in batch_steps(launch).items() if name in in_memory}
    return launch._replace(**moved, batch=0)


def parts_of_batch(launch: Launch, most: int) -> Iterator[Launch]:
    """A batch in parts of at most `most` matrices."""
    if launch.batch <= most:
        yield launch
        return
    for b in range(0, launch.batch, most):
        yield matrix_of_batch(launch, b)._replace(batch=min(most, launch.batch - b))
