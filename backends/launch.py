"""One launch as plain numbers and addresses: ``Launch`` of ``csrc/launch.h``. Every layer passes it.

C++ and CUDA kernels take its bytes, kernels in Python its fields. A new field is an attribute of `Launch` here, and a
member of the struct there.
"""

from __future__ import annotations

import enum
import functools
import struct
from collections.abc import Callable
from typing import Annotated, NamedTuple, TypeAlias, get_type_hints

from .element_types import MATRIX_TYPES, SIZES, ElementType

__all__ = [
    "FIELD_AT", "FORMATS", "HEAD", "HOST", "INPUTS", "OPERANDS", "PACKED_LAUNCH", "SAMPLE_CALL", "SIZES", "SPAN",
    "STEPS", "UNIT_FACTOR", "ElementType", "Launch", "Operands", "Operation", "Span", "WordFormat", "computing_name",
    "matrix_of_batch", "pack", "packer", "runs_down", "type_name", "unpack",
]  # fmt: skip

HOST = -1
"""The `device` of a launch in host memory."""


class Operation(enum.IntEnum):
    """The operation of a launch: ``csrc/launch.h`` has the formulas, and `OPERANDS` has the fields."""

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
    """How a seed or an offset is stored in memory: see ``csrc/launch.h``."""

    whole = 0
    high_first = 1
    bits_32 = 2
    bits_16 = 3
    bits_8 = 4


# Types of fields, with their formats of `struct`. Numba's kernels compute with "P" and "q" as signed numbers.
_Address: TypeAlias = Annotated[int, "P"]
_Input: TypeAlias = Annotated["int | float", "P"]
_U64: TypeAlias = Annotated[int, "Q"]
_I64: TypeAlias = Annotated[int, "q"]
_U32: TypeAlias = Annotated[int, "I"]
_I32: TypeAlias = Annotated[int, "i"]


class Launch(NamedTuple):
    """One launch. ``csrc/launch.h`` describes the fields. An address of 0 is null.

    An input is an address, or one number if its type is `ElementType.number`. `matrix` is in host memory or in memory
    of `device`. `scratch` has room for `Launcher.scratch_size` float64 numbers. `STEPS` has the step of each address.
    """

    # The head: values of a call. See `packer`.
    weights: _Input = 0
    first: _Address = 0
    second: _Address = 0
    seed_at: _Address = 0
    first_row_at: _Address = 0
    first_column_at: _Address = 0
    scratch: _Address = 0
    stream: _Address = 0
    threads: _U64 = 0
    offset_at: _Address = 0
    mu: _Input = 0
    sigma: _Input = 0
    matrix: _Address = 0
    seed: _U64 = 0
    offset: _U64 = 0
    first_row: _I64 = 0
    first_column: _I64 = 0

    # The tail: the same for all calls of a plan.
    mu_stride: _I64 = 0
    sigma_stride: _I64 = 0
    row_stride: _I64 = 0
    column_stride: _I64 = 0
    rows: _I64 = 1
    columns: _I64 = 1
    mu_type: _U32 = ElementType.number
    sigma_type: _U32 = ElementType.number
    weights_type: _U32 = ElementType.number
    type: _U32 = ElementType.float32
    weights_stride: _I64 = 0
    mu_step: _I64 = 0
    sigma_step: _I64 = 0
    weights_step: _I64 = 0
    matrix_step: _I64 = 0
    result_step: _I64 = 0
    seed_step: _I64 = 0
    offset_step: _I64 = 0
    origin_step: _I64 = 0
    spans: _I64 = 0
    operation: _U32 = Operation.sample
    results: _U32 = 0
    shared_noise: _U32 = 0
    antithetic: _U32 = 0
    fast_math: _U32 = 0
    device: _I32 = HOST
    batch: _U32 = 0
    origin_in_memory: _U32 = 0
    word_formats: _U32 = 0
    column_phase: _U32 = 0


FORMATS: dict[str, str] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(Launch, include_extras=True).items()
}
"""The format of each field, as of `struct`."""

_HEAD_FIELDS = Launch._fields.index("mu_stride")
HEAD = Launch._fields[:_HEAD_FIELDS]
"""Fields of the head, each of 8 bytes."""

INPUTS = ("mu", "sigma", "weights")
"""Fields that are addresses or numbers; the type of `x` is the field `x_type`, and its stride `x_stride`."""

_FORMAT = "".join(FORMATS.values())
_TAIL = struct.Struct(_FORMAT[_HEAD_FIELDS:])


@functools.cache
def _head_packer(*numbers: bool) -> Callable[..., bytes]:
    """The packer of a head. `numbers` says which of `INPUTS` are numbers."""
    formats = FORMATS | {name: "d" for name, number in zip(INPUTS, numbers, strict=True) if number}
    return struct.Struct("".join(formats[name] for name in HEAD)).pack


FIELD_AT: dict[str, int] = {
    # The end of the field minus its size: calcsize counts padding before the last field, and none behind it.
    name: struct.calcsize(_FORMAT[: k + 1]) - struct.calcsize(_FORMAT[k])
    for k, name in enumerate(Launch._fields)
}
"""Byte offsets of the fields in a packed launch."""

PACKED_LAUNCH = struct.calcsize(_FORMAT)
"""Bytes of a packed launch."""

SAMPLE_CALL = slice(FIELD_AT["offset_at"], FIELD_AT["weights_type"])
"""The bytes of the C++ struct ``SampleCall`` in a packed launch: the end of the head, and the begin of the tail."""

STEPS = {
    "mu": "mu_step", "sigma": "sigma_step", "weights": "weights_step", "matrix": "matrix_step", "first": "result_step",
    "second": "result_step", "seed_at": "seed_step", "offset_at": "offset_step", "first_row_at": "origin_step",
    "first_column_at": "origin_step",
}  # fmt: skip
"""The fields of the head that differ between the matrices of a batch, each with the field of its step."""


class Span(NamedTuple):
    """Elements of one parameter, which perturb reads and writes: ``csrc/launch.h`` describes the fields."""

    source: _Address
    target: _Address
    first: _I64
    rows: _I64
    width: _I64
    jump: _I64
    source_row: _I64
    source_stride: _I64
    target_row: _I64
    target_stride: _I64
    id: _U64
    source_step: _I64 = 0
    target_step: _I64 = 0
    factor: _U64 = 0x3FF0_0000_0000_0000  # 1.0


UNIT_FACTOR = Span._field_defaults["factor"]
"""The field `factor` of a span whose elements are not scaled."""

SPAN = struct.Struct("".join(hint.__metadata__[0] for hint in get_type_hints(Span, include_extras=True).values()))
"""The format of a packed span: its fields one after another, of 8 bytes each."""


def packer(template: Launch) -> tuple[Callable[..., bytes], bytes]:
    """The packer of the head, and the packed tail, of launches like `template`.

    ``pack_head(*head) + tail`` is a launch; `head` has the values of the fields `HEAD`.
    """
    types = template.mu_type, template.sigma_type, template.weights_type
    pack_head = _head_packer(*(kind == ElementType.number for kind in types))
    return pack_head, _TAIL.pack(*template[_HEAD_FIELDS:])


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


def runs_down(launch: Launch) -> bool:
    """Whether vectors of a kernel for the CPU run down the columns: rows are adjacent in memory."""
    return launch.rows > 1 and launch.row_stride == SIZES[type_name(launch)]


def computing_name(launch: Launch) -> str:
    """The name of the computing type of the launch's `type`."""
    return MATRIX_TYPES[type_name(launch)].computing


def matrix_of_batch(launch: Launch, b: int) -> Launch:
    """Matrix `b` of a batch."""
    steps = {name: getattr(launch, step) for name, step in STEPS.items()}
    moved = {name: getattr(launch, name) + b * step for name, step in steps.items() if step}  # -0.0 + 0 would be 0.0.
    return launch._replace(**moved, batch=0)
