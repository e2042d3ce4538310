"""Launches for tests of kernels and backends, with defaults for all fields."""

import contextlib
import ctypes
import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

import multisample
from multisample.backends import registry
from multisample.backends.launch import HOST, SIZES, SPAN, ElementType, Launch, Operation, WordFormat

WORDS = ("seed", "offset", "first_row", "first_column")
"""The fields of a launch that a kernel may read from device memory."""


@dataclasses.dataclass(kw_only=True)
class Window:
    """Seed, offset and window of a case for a kernel, and the order of the blocks and threads."""

    seed: int = 1
    offset: int = 0
    dim_offset: int = 0
    sample_offset: int = 0
    in_memory: tuple[str, ...] = ()
    """The `WORDS` that the kernel reads from memory. Their values in the launch itself are wrong on purpose."""
    backwards: bool = False

    @property
    def has_origin_in_memory(self) -> bool:
        """Whether the case needs the kernel that reads the seed and the window from memory."""
        return bool(set(self.in_memory) - {"offset"})

    def words(self) -> dict[str, int]:
        return dict(zip(WORDS, (self.seed, self.offset, self.dim_offset, self.sample_offset), strict=True))

    def on_cpu(self) -> dict[str, Any]:
        """Options of a call of the cpu backend."""
        window = {"dim_offset": self.dim_offset, "sample_offset": self.sample_offset}
        return {"backend": "cpu", "seed": multisample.Key(self.seed, self.offset), **window}


class Vector(NamedTuple):
    """An input of a launch: its address, or a number, its stride, and its type."""

    value: float
    stride: int
    type: int


AnyVector: TypeAlias = "Vector | np.ndarray[Any, Any] | float"


def a_vector(x: AnyVector) -> Vector:
    """An input of a launch, from an array or a number."""
    if isinstance(x, Vector):
        return x
    if isinstance(x, float):
        return Vector(x, 0, ElementType.number)
    return Vector(address_of(x), x.strides[0], ElementType[x.dtype.name])


def vector_fields(name: str, x: AnyVector) -> dict[str, Any]:
    """The fields of the input `name`."""
    value, stride, kind = a_vector(x)
    return {name: value, f"{name}_stride": stride, f"{name}_type": kind}


def a_launch(
    rows: int = 3, columns: int = 5, dtype: str = "float32", *, mu: AnyVector = 0.0, sigma: AnyVector = 1.0,
    weights: AnyVector = 0.0, matrix: np.ndarray[Any, Any] | int = 0, strides: tuple[int, int] | None = None,
    **changes: Any,
) -> Launch:  # fmt: skip
    """A launch in host memory with seed 1, and `changes`. `matrix` may be an address; `strides` are in bytes."""
    size = SIZES[dtype]
    if isinstance(matrix, np.ndarray):
        assert matrix.shape == (rows, columns) and matrix.itemsize == size
        matrix, strides = address_of(matrix), strides or matrix.strides
    row_stride, column_stride = strides or (columns * size, size)
    vectors = vector_fields("mu", mu) | vector_fields("sigma", sigma) | vector_fields("weights", weights)
    place = {"matrix": matrix, "row_stride": row_stride, "column_stride": column_stride, "device": HOST}
    launch = Launch(**vectors, **place, rows=rows, columns=columns, seed=1, type=ElementType[dtype])
    return launch._replace(**changes)


def head_of(launch: Launch) -> tuple[Any, ...]:
    """The arguments of `Launcher.run` after the geometry; of the words, only seed and offset may be in memory."""
    mu, sigma, weights, matrix, first, second = (
        getattr(launch, name) for name in ("mu", "sigma", "weights", "matrix", "first", "second")
    )
    if launch.operation == Operation.perturb:
        matrix = ctypes.string_at(matrix, launch.spans * SPAN.size)
    return (
        mu, sigma, weights, matrix, first, second, launch.seed, launch.offset, launch.seed_at, launch.offset_at,
        launch.first_row,
        launch.first_column, launch.stream, launch.scratch,
    )  # fmt: skip


def stored_word(name: str, value: int) -> int:
    """The 64-bit number that stands in memory for a word: a seed has its high half first."""
    return (value << 32 | value >> 32) & 0xFFFF_FFFF_FFFF_FFFF if name == "seed" else value


def stored_words(values: dict[str, int]) -> list[int]:
    """`stored_word` of each word."""
    return [stored_word(name, value) for name, value in values.items()]


def word_fields(values: dict[str, int], names: Collection[str], address: int = 8) -> dict[str, int]:
    """Fields of a launch that reads the words `names` from `stored_words` at `address`; its own values differ."""
    fields = {name: value ^ 0x100000005 if name in names else value for name, value in values.items()}
    fields |= {f"{name}_at": address + 8 * k for k, name in enumerate(values) if name in names}
    return fields | {"origin_in_memory": bool({*names} - {"offset"}), "word_formats": WordFormat.high_first}


def with_words_in_memory(launch: Launch, *names: str) -> tuple[Launch, np.ndarray[Any, Any]]:
    """A launch that reads these words from memory, and the memory; its own values of the words differ."""
    values = {name: getattr(launch, name) for name in WORDS}
    memory = np.array(stored_words(values), np.uint64)
    return launch._replace(**word_fields(values, names, memory.ctypes.data)), memory


def extent(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int]:
    """How far the elements of an array lie below and above its first element, in the unit of the strides."""
    reach = [stride * (length - 1) for stride, length in zip(strides, shape, strict=True)]
    return -sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)


def address_of(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


@contextlib.contextmanager
def without_builtins() -> Iterator[None]:
    """Disable the compiled builtins of torch_ext, so that its calls run in Python."""
    from multisample._libraries.torch import TORCH
    from multisample._plan import PLANS

    backend: Any = registry.find("torch_ext")
    backend.prepare("cpu")
    before, state = (backend.builtins, TORCH.key, TORCH.keyed_seed), TORCH.__dict__.pop("state", None)
    assert before[0] is not None
    backend.builtins = TORCH.key = TORCH.keyed_seed = None
    PLANS.clear()
    try:
        yield
    finally:
        backend.builtins, TORCH.key, TORCH.keyed_seed = before
        if state is not None:
            TORCH.state = state
        PLANS.clear()
