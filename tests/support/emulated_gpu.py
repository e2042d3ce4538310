"""A GPU emulated on the CPU, for kernels whose threads neither share memory nor wait: the plain kernels in Python.

Numba compiles the kernel unchanged for the CPU, with other functions for the indices and for memory. The threads of a
grid run one after another. Every memory access is checked, and the first wrong access ends the launch.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
from launches import address_of, extent
from llvmlite import ir
from numba import config, njit, types
from numba.core import cgutils
from numba.core.imputils import lower_constant
from numba.extending import intrinsic, models, overload_attribute, register_model, typeof_impl
from numba.np.arrayobj import populate_array

from multisample.backends.kernels.compilation import _Callee
from multisample.backends.kernels.cuda import group, intrinsics, plain
from multisample.backends.kernels.cuda.geometry import PLAIN_THREADS
from multisample.backends.kernels.cuda.plain import CALL, GEOMETRY
from multisample.backends.kernels.stream import rounding

Array = np.ndarray[Any, Any]

_WARP, _MOST_ACCESSES = 32, 100_000_000
_ERRORS = (
    "", "accesses memory outside of", "makes a misaligned access to", "writes an element twice in", "never ends, in",
)  # fmt: skip
_OUTSIDE, _MISALIGNED, _TWICE, _ENDLESS = range(1, len(_ERRORS))

# The state of a launch. Compiled kernels contain the addresses of these arrays.
_state, _packed = np.zeros(32, np.int64), np.zeros(4096 // 8, np.uint64)
# Addresses of the state: the indices, the first error, the number of accesses, the size of an element, the flags of
# written elements, and the begin and the end of the output and of each input.
_BLOCK, _THREAD, _ERROR, _WRONG, _NEAR, _ACCESSES, _ELEMENT, _WRITTEN, _OUT = (
    address_of(_state) + 8 * k for k in range(9)
)
_REGION, _MOST_INPUTS = 16, 4
_INPUTS = _OUT + _REGION
_END = _INPUTS + _MOST_INPUTS * _REGION


class BrokenKernelError(Exception):
    """A kernel has undefined behaviour on a GPU."""


def _callee(function: Callable[..., Any]) -> Any:
    """`function`, compiled to LLVM IR. Machine code is generated once, for the whole kernel."""
    return _Callee(function, targetoptions={"nopython": True, "error_model": "numpy"})


@_callee
def _get(at):
    return intrinsics.load(at, np.int64)


@_callee
def _set(at, value):
    intrinsics.store(at, np.int64(value))


@_callee
def _fail(error, address, region):
    _set(_ERROR, error)
    _set(_WRONG, address)
    _set(_NEAR, region)
    raise RuntimeError("a wrong access")


@_callee
def _check(address, size, first, end):
    """Check an access to one of the regions from `first` to `end`."""
    _set(_ACCESSES, _get(_ACCESSES) + 1)
    if _get(_ACCESSES) > _MOST_ACCESSES:
        _fail(_ENDLESS, address, first)
    if address % min(size, 16) != 0:
        _fail(_MISALIGNED, address, first)
    for region in range(first, end, _REGION):
        if _get(region) <= address and address + size <= _get(region + 8):
            return
    _fail(_OUTSIDE, address, first)


@intrinsic
def _size_of(typingctx: Any, x: Any) -> Any:
    return types.int64(x), lambda context, builder, signature, args: ir.IntType(64)(x.bitwidth // 8)


@_callee
def load(address, dtype):
    _check(address, _size_of(dtype(0)), _INPUTS, _END)
    return intrinsics.load(address, dtype)


@_callee
def _check_store(address, size):
    _check(address, size, _OUT, _INPUTS)
    element_size = _get(_ELEMENT)
    element = _get(_WRITTEN) + (address - _get(_OUT)) // element_size
    for k in range(size // element_size):
        if intrinsics.load(element + k, np.uint8) != 0:
            _fail(_TWICE, address, _OUT)
        intrinsics.store(element + k, np.uint8(1))


@_callee
def store(address, x):
    _check_store(address, _size_of(x))
    intrinsics.store(address, x)


@_callee
def store_vector(address, x, count):
    size = _size_of(x[0])
    at_once = min(count, 16 // size, 4)
    for k in range(count):
        if k % at_once == 0:
            _check_store(address + k * size, at_once * size)
        intrinsics.store(address + k * size, x[k])


class Index:
    """``cuda.threadIdx`` or ``cuda.blockIdx``, at an address of the state."""

    def __init__(self, at: int) -> None:
        self.at = at


class _IndexType(types.Type):  # type: ignore[misc]
    def __init__(self, at: int) -> None:
        self.at = at
        super().__init__(f"Index({at})")


register_model(_IndexType)(models.OpaqueModel)


@typeof_impl.register(Index)
def _type_of_index(index: Index, context: Any) -> _IndexType:
    return _IndexType(index.at)


@lower_constant(_IndexType)
def _no_value(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    return context.get_dummy_value()


@overload_attribute(_IndexType, "x")
def _x_of_index(index):
    at = index.at
    return lambda index: np.int32(_get(at))


@intrinsic(prefer_literal=True)
def _local_array(typingctx: Any, shape: Any, dtype: Any) -> Any:
    lengths = [length.literal_value for length in (shape if isinstance(shape, types.BaseTuple) else [shape])]
    kind, size = types.Array(dtype.dtype, len(lengths), "C"), dtype.dtype.bitwidth // 8

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = context.get_data_type(dtype.dtype)
        memory = cgutils.alloca_once(builder, ir.ArrayType(element, math.prod(lengths)))
        strides = [size * math.prod(lengths[k + 1 :]) for k in range(len(lengths))]
        constants = [[context.get_constant(types.intp, x) for x in numbers] for numbers in (lengths, strides, [size])]
        array = context.make_array(kind)(context, builder)
        populate_array(array, builder.bitcast(memory, element.as_pointer()), *constants[:2], constants[2][0], None)
        return array._getvalue()

    return kind(shape, dtype), codegen


cuda, local = ModuleType("cuda"), ModuleType("local")
vars(local).update(array=_local_array)
vars(cuda).update(
    jit=lambda **options: lambda function: function, threadIdx=Index(_THREAD), blockIdx=Index(_BLOCK), local=local
)


@_callee
def log2(x):
    return np.log2(x)


@_callee
def square_root(x):
    return np.sqrt(x)


@_callee
def cosine(x):
    return np.cos(x)


@_callee
def sine(x):
    return np.sin(x)


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """Replace the GPU's functions in the modules of the kernels."""
    with (
        mock.patch.multiple(plain, cuda=cuda, store=store, store_vector=store_vector),
        mock.patch.multiple(
            group, load=load, log2=log2, square_root=square_root, cosine=cosine, sine=sine,
            from_float16=rounding.from_float16, narrowing=lambda dtype, capability: rounding.NARROWING[dtype],
        ),
    ):  # fmt: skip
        yield


@intrinsic
def _parameters(typingctx: Any) -> Any:
    """Read the parameters from their packed bytes: Numba's tuples have the layout of structs."""
    both = types.Tuple((CALL, GEOMETRY))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values, at = [], address_of(_packed)
        for kind in both:
            value = context.get_value_type(kind)
            values.append(builder.load(builder.inttoptr(ir.IntType(64)(at), value.as_pointer())))
            at += context.get_abi_sizeof(value)
        return context.make_tuple(builder, both, values)

    return both(), codegen


def compile_kernel(function: Callable[..., None]) -> Any:
    """Compile ``function(call, geometry)`` for `launch`, within `emulated`."""
    kernel = _callee(function)

    def grid(blocks, threads, backwards):
        call, geometry = _parameters()
        for b in range(blocks):
            for t in range(threads):
                _set(_BLOCK, blocks - 1 - b if backwards else b)
                _set(_THREAD, threads - 1 - t if backwards else t)
                kernel(call, geometry)

    # Most of LLVM's optimizations take longer than they save.
    with mock.patch.object(config, "OPT", config._OptLevel(1)):
        return njit(types.void(types.int64, types.int64, types.boolean))(grid)


def launch(
    kernel: Any, blocks: int, threads: int, parameters: bytes, out: Array, inputs: Sequence[Array | float], *,
    backwards: bool = False,
) -> None:  # fmt: skip
    """Run a grid of a kernel of `compile_kernel`, in ascending or descending order. `parameters` are the bytes of the
    call and of the geometry; `inputs` are up to four arrays. A wrong access, such as a second write of an element,
    raises BrokenKernelError.
    """
    if blocks < 1 or threads % _WARP != 0 or not 0 < threads <= PLAIN_THREADS:
        raise BrokenKernelError(f"invalid grid: {blocks} blocks of {threads} threads")
    _packed.view(np.uint8)[...] = np.frombuffer(parameters.ljust(_packed.nbytes), np.uint8)
    regions = [_bounds(memory) if isinstance(memory, np.ndarray) else (0, 0) for memory in (out, *inputs)]
    written = np.zeros((regions[0][1] - regions[0][0]) // out.itemsize, np.uint8)
    _state[...] = 0
    _state[6:8] = out.itemsize, address_of(written)
    _state[8 : 8 + 2 * len(regions)] = np.ravel(regions)
    try:
        kernel(blocks, threads, backwards)
    except RuntimeError:
        block, thread, error, address, region = _state[:5].tolist()
        name, bytes_off = "the output" if region == _OUT else "an input", address - _state[(region - _BLOCK) // 8]
        raise BrokenKernelError(
            f"block {block}, thread {thread}: {_ERRORS[error]} {name}, {bytes_off} bytes behind its first byte"
        ) from None


def _bounds(array: Array) -> tuple[int, int]:
    (below, above), first = extent(array.shape, array.strides), address_of(array)
    return first - below, first + above + array.itemsize
