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
    "FIELD_AT", "FORMATS", "HEAD", "HOST", "INPUTS", "OPERANDS", "PACKED_LAUNCH", "SIZES", "SPAN", "STEPS",
    "ElementType", "Launch", "Operands", "Operation", "Span", "WordFormat", "computing_name", "matrix_of_batch", "pack",
    "packer", "parts_of_batch", "type_name", "unpack", "word_formats",
]  # fmt: skip

HOST = -1
"""The `device` of a launch in host memory."""


class Operation(enum.IntEnum):
    """The operation of a launch: see `OPERANDS`.

    z is the noise, and w are the weights; sums are over all columns c.

    sample
        ``matrix[r, c] = mu[r] + sigma[r] * z[r, c]``.
    gradient
        ``first[r] = sum(matrix[r, c])`` and ``second[r] = sum(matrix[r, c] * z[r, c])``.
    moments
        ``first[r] = sum(w[c] * (mu[r] + sigma[r] * z[r, c]))``, and with two results
        ``second[r] = sum(w[c] * (sigma[r] * z[r, c])**2)``.
    perturb
        ``target[e] = source[e] + sum(w[r] * z[r, e])`` for the elements e of each `Span`: fused multiply-adds in the
        computing type, in the order of the rows, and one rounding.
    """

    sample = 0
    gradient = 1
    moments = 2
    perturb = 3


class Operands(NamedTuple):
    """Names of the fields of `Launch` whose memory an operation reads and writes."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]


OPERANDS: dict[int, Operands] = {
    Operation.sample: Operands(("mu", "sigma"), ("matrix",)),
    Operation.gradient: Operands(("matrix",), ("first", "second")),
    Operation.moments: Operands(("weights", "mu", "sigma"), ("first", "second")),
    Operation.perturb: Operands(("weights",), ("matrix",)),
}
"""The operands of each operation."""


class WordFormat(enum.IntEnum):
    """How a seed or an offset is stored in memory. The higher bits of a narrow word are 0."""

    whole = 0
    """64 bits."""
    high_first = 1
    """Two words of 32 bits, the high half first, as in the data of JAX's keys."""
    bits_32 = 2
    bits_16 = 3
    bits_8 = 4


def word_formats(seed: WordFormat, offset: WordFormat = WordFormat.whole) -> int:
    """The field `word_formats` of a launch."""
    return seed | offset << 8


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
    """Address of the first of `rows` elements; one number for all of them if `mu_type` is `ElementType.number`."""
    sigma: _Input = 0
    """The same."""
    weights: _Input = 0
    """The same, of `columns` elements; for perturb of `rows` elements."""
    matrix: _Address = 0
    """Address of the first element, in host memory or in memory of `device`; for perturb of the first `Span`, in host
    memory."""
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
    """Address of the seed in memory of `device`; 0 if the field `seed` has it. See `word_formats`."""
    offset_at: _Address = 0
    """The same for `offset`."""
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
    mu_step: _I64 = 0
    """Steps are bytes from one matrix of a batch to the next, 0 for what all matrices share or lack. See `STEPS`."""
    sigma_step: _I64 = 0
    weights_step: _I64 = 0
    matrix_step: _I64 = 0
    result_step: _I64 = 0
    seed_step: _I64 = 0
    offset_step: _I64 = 0
    origin_step: _I64 = 0
    rows: _I64 = 1
    columns: _I64 = 1
    """At least 1. Perturb has as many columns as its spans have elements."""
    spans: _I64 = 0
    """How many spans perturb has."""
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
    """How many matrices; 0 counts as 1."""
    origin_in_memory: _U32 = 0
    """Whether the seed, the first row or the first column is in memory, as in every batch."""
    word_formats: _U32 = 0
    """The `WordFormat` of the seed in memory, and in the next 8 bits that of the offset."""
    column_phase: _U32 = 0
    """If `first_column` is in memory: 1 + first_column % 8, or 0 if unknown."""


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
# Packers of a head. The key says which of `INPUTS` are numbers.
_PACK_HEAD = {
    numbers: struct.Struct(
        "".join("d" if number else "P" for number in numbers) + _FORMAT[len(INPUTS) : _HEAD_FIELDS]
    ).pack
    for numbers in itertools.product((False, True), repeat=len(INPUTS))
}

FIELD_AT: dict[str, int] = {
    # The end of the field minus its size: calcsize counts padding before the last field, and none behind it.
    name: struct.calcsize(_FORMAT[: k + 1]) - struct.calcsize(_FORMAT[k])
    for k, name in enumerate(Launch._fields)
}
"""Byte offsets of the fields in a packed launch."""

PACKED_LAUNCH = struct.calcsize(_FORMAT)
"""Bytes of a packed launch."""

STEPS = {
    "mu": "mu_step", "sigma": "sigma_step", "weights": "weights_step", "matrix": "matrix_step", "first": "result_step",
    "second": "result_step", "seed_at": "seed_step", "offset_at": "offset_step", "first_row_at": "origin_step",
    "first_column_at": "origin_step",
}  # fmt: skip
"""The fields of the head that differ between the matrices of a batch, each with the field of its step."""


class Span(NamedTuple):
    """Elements of one parameter, which perturb reads and writes: `rows` runs of `width` elements.

    Element w of run r is element ``e = first + r * jump + w`` of the parameter, and column e of the noise. The offset
    of its noise is that of the launch plus ``id * 2**32``. The launch has its type.
    """

    source: _Address
    """Address of the first element."""
    target: _Address
    """The same, of the result; it may be `source`."""
    first: _I64
    """``0 <= e < 2**34``"""
    rows: _I64
    width: _I64
    """At least 1."""
    jump: _I64
    source_row: _I64
    """Bytes from one run to the next; all these are multiples of the element size."""
    source_stride: _I64
    """Bytes from one element of a run to the next."""
    target_row: _I64
    target_stride: _I64
    """The elements of a target must not overlap."""
    id: _U64
    """Less than 2**32."""


SPAN = struct.Struct("".join(hint.__metadata__[0] for hint in get_type_hints(Span, include_extras=True).values()))
"""The format of a packed span: its fields one after another, of 8 bytes each."""


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


def unpack(data: bytes) -> Launch:
    """The launch with these bytes."""
    launch = Launch._make(struct.unpack(_FORMAT, data))
    numbers = [name for name in INPUTS if getattr(launch, f"{name}_type") == ElementType.number]
    return launch._replace(**{name: struct.unpack_from("d", data, FIELD_AT[name])[0] for name in numbers})


def type_name(launch: Launch) -> str:
    """The name of the launch's `type`."""
    return ElementType(launch.type).name


def computing_name(launch: Launch) -> str:
    """The name of the computing type of the launch's `type`."""
    return MATRIX_TYPES[type_name(launch)].computing


def matrix_of_batch(launch: Launch, b: int) -> Launch:
    """Matrix `b` of a batch."""
    moved = {name: getattr(launch, name) + b * getattr(launch, step) for name, step in STEPS.items()}
    return launch._replace(**moved, batch=0)


def parts_of_batch(launch: Launch, most: int) -> Iterator[Launch]:
    """A batch in parts of at most `most` matrices."""
    if launch.batch <= most:
        yield launch
        return
    for b in range(0, launch.batch, most):
        yield matrix_of_batch(launch, b)._replace(batch=min(most, launch.batch - b))
