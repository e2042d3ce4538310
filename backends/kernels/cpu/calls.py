"""Calls on host memory as C functions, for callers that cannot wait for the interpreter: XLA and PyTorch's operators.

The cpu backend calls the functions too, for everything but small samples. One function draws samples of all types: it
calls kernels by address, from a table that compiled code knows by name.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numpy as np

from multisample.backends.element_types import MATRIX_TYPES, ElementType
from multisample.backends.kernels.compilation import address_of, callee, inline, source_digest
from multisample.backends.kernels.stream.arithmetic import fma
from multisample.backends.launch import Launch, Operation, runs_down, type_name

from .addresses import c_address, call_c, numbers_at, symbol
from .fields import HALF, LAUNCH_WORDS, WORD, half, numbers_of
from .gradient import gradient_function
from .helper_threads import find_threads, for_each, starting_function, threads_for
from .intrinsics import stack_array, stack_copy
from .kernel import call_window, settings_kernel, value_kernel, window_kernel
from .moments import moments_function
from .perturb import perturb_function
from .thread_windows import THREAD_WORK, most_threads, window_shape, work_of

# Addresses of window kernels, by `_place_of`.
_kernels = np.zeros(8 * (max(ElementType) + 1), np.int64)
llvmlite.binding.add_symbol("multisample_cpu_kernels", _kernels.ctypes.data)

# The address of the C function for inputs of other types: see `set_reader`.
_reader = np.zeros(1, np.int64)
llvmlite.binding.add_symbol("multisample_cpu_reader", _reader.ctypes.data)

_NUMBER, _, _, _FLOAT32, _FLOAT64 = map(int, tuple(ElementType)[:5])
# Rows whose mu and sigma are converted at a time.
_BAND = 1 << 11


@inline
def _place_of(kind, shared_noise, antithetic, down):
    """The place of a window kernel in `_kernels`."""
    return 8 * kind + 4 * shared_noise + 2 * antithetic + down


@inline
def _sizes(launch):
    """Bytes of a number of the computing type, and of an element."""
    kind = half(launch, HALF.type)
    if kind == _FLOAT64:
        return 8, 8
    return 4, 4 if kind == _FLOAT32 else 2


@inline
def _converted(to, data, stride, kind, count, real):
    """Address and stride of elements of mu or sigma in the computing type: in `to` if they had another type."""
    if kind == (_FLOAT64 if real == 8 else _FLOAT32):
        return data, stride
    # The struct `Reading` of csrc/torch/cpu.cpp.
    reading = data, stride, kind, count, to.ctypes.data, np.int64(real == 8)
    call_c(numbers_at(symbol("multisample_cpu_reader"), 1, np.int64)[0], stack_copy(reading))
    return to.ctypes.data, real


@inline
def _place(data, step, stride, kind, b, row):
    """Address of an element of mu or sigma, or the bits of the number in its place."""
    return data if kind == _NUMBER else data + b * step + row * stride


@inline
def _scale(matrix, noise, mu, sigma, rows, real):
    """Scale the noise of one column, and shift it. All operands are contiguous."""
    z, x = numbers_at(noise, rows, real), numbers_at(matrix, rows, real)
    m, s = numbers_at(mu, rows, real), numbers_at(sigma, rows, real)
    for r in range(np.uint64(rows)):
        x[r] = fma(s[r], z[r], m[r])


@inline
def _draw_window(launch, kernel, b, top, bottom, left, right):
    real, size = _sizes(launch)
    row_stride, column_stride = launch[WORD.row_stride], launch[WORD.column_stride]
    mu_stride, sigma_stride = launch[WORD.mu_stride], launch[WORD.sigma_stride]
    mu_type, sigma_type = half(launch, HALF.mu_type), half(launch, HALF.sigma_type)
    seed, offset, first_row, first_column = numbers_of(launch, b)
    m, s = stack_array(_BAND, np.float64), stack_array(_BAND, np.float64)
    is_computing = mu_type == sigma_type == (_FLOAT64 if real == 8 else _FLOAT32)
    keeps_noise, zero, one = half(launch, HALF.results) != 0, stack_array(1, np.float64), stack_array(1, np.float64)
    if keeps_noise and real == 8:
        numbers_at(zero.ctypes.data, 1, np.float64)[0], numbers_at(one.ctypes.data, 1, np.float64)[0] = 0, 1
    elif keeps_noise:
        numbers_at(zero.ctypes.data, 1, np.float32)[0], numbers_at(one.ctypes.data, 1, np.float32)[0] = 0, 1
    height = bottom - top if is_computing and not keeps_noise else _BAND
    for r in range(top, bottom, height):
        rows = min(height, bottom - r)
        mu = _place(launch[WORD.mu], launch[WORD.mu_step], mu_stride, mu_type, b, r)
        sigma = _place(launch[WORD.sigma], launch[WORD.sigma_step], sigma_stride, sigma_type, b, r)
        mu, mu_step = _converted(m, mu, mu_stride, mu_type, rows, real)
        sigma, sigma_step = _converted(s, sigma, sigma_stride, sigma_type, rows, real)
        matrix = launch[WORD.matrix] + b * launch[WORD.matrix_step] + r * row_stride + left * column_stride
        vectors, noise = (mu, sigma, mu_step, sigma_step, real), launch[WORD.first] + r * real
        if keeps_noise:
            vectors = zero.ctypes.data, one.ctypes.data, 0, 0, real
        call_window(
            kernel, vectors, (noise if keeps_noise else matrix, rows, right - left, row_stride, column_stride, size),
            (seed, offset, first_row + r, first_column + left),
        )  # fmt: skip
        if keeps_noise and real == 8:
            _scale(matrix, noise, mu, sigma, rows, np.float64)
        elif keeps_noise:
            _scale(matrix, noise, mu, sigma, rows, np.float32)


def _draw_part(arguments, index):
    """Draw window `index` of matrix `b`; if no windows are `across`, the whole matrix `index` of a batch."""
    address, kernel, b, skip, height, width, across = arguments
    launch = numbers_at(address, LAUNCH_WORDS, np.int64)
    top, bottom, left, right = 0, launch[WORD.rows], 0, launch[WORD.columns]
    if across == 0:
        b = index
    else:
        top, left = index // across * height, max(index % across * width - skip, 0)
        bottom, right = min(top + height, bottom), min((index % across + 1) * width - skip, right)
    _draw_window(launch, kernel, b, top, bottom, left, right)


def _draw_function() -> Callable[..., Any]:
    draw_part = callee(_draw_part, "cpu-draw_part")

    def draw_all(address):
        launch = numbers_at(address, LAUNCH_WORDS, np.int64)
        rows, columns, batch = launch[WORD.rows], launch[WORD.columns], max(half(launch, HALF.batch), 1)
        shared_noise, antithetic = half(launch, HALF.shared_noise), half(launch, HALF.antithetic)
        down = np.int64(launch[WORD.row_stride] == _sizes(launch)[1] and rows > 1)
        place = _place_of(half(launch, HALF.type), shared_noise, antithetic, down)
        kernels = numbers_at(symbol("multisample_cpu_kernels"), place + 2, np.int64)
        # A caller that did not know the lengths may have the other kernel alone: see `_find_kernel`.
        kernel = kernels[place] if kernels[place] != 0 else kernels[place ^ 1]
        most, limit = most_threads(work_of(rows, columns, shared_noise)), launch[WORD.threads]
        threads, block = threads_for(most, limit), 8 if antithetic else 4
        are_whole = threads == 1 or (batch > 1 and rows * columns <= 2 * THREAD_WORK)
        if are_whole:
            threads = threads_for(min(batch, most_threads(batch * rows * columns)), limit)
        skip, height, width, across, count = 0, 0, 0, 0, batch
        for b in range(1 if are_whole else batch):
            if not are_whole:
                height, width = window_shape(rows, columns, threads, shared_noise, block, down != 0)
                skip = numbers_of(launch, b)[3] % block
                # `skip` columns of the first block come before the matrix: no window ends inside a block.
                across = (skip + columns + width - 1) // width
                count = across * ((rows + height - 1) // height)
            # One call: the code of `for_each` takes long to compile.
            for_each(draw_part, (address, kernel, b, skip, height, width, across), count, threads)
        return 0

    return draw_all


_FUNCTIONS = {
    Operation.gradient: gradient_function,
    Operation.moments: moments_function,
    Operation.perturb: perturb_function,
}


@functools.cache
def _address(operation: int, dtype: str) -> int:
    """The address of ``int64 run(const Launch*)`` for an operation in host memory.

    The function never enters the interpreter. It returns 0, or 1 if memory cannot be allocated. A sample, of any type,
    needs its kernel: see `_find_kernel`; and `set_reader`, unless mu and sigma are vectors of the computing type.
    """
    if operation == Operation.sample:
        return c_address(_draw_function(), "cpu-draw_all", source_digest())
    name = f"cpu-{Operation(operation).name}_{dtype}"
    return c_address(_FUNCTIONS[Operation(operation)](dtype), name, source_digest())


def function_address(launch: Launch) -> int:
    """`Backend.c_function`."""
    dtype = type_name(launch)
    find_threads()
    if launch.operation != Operation.sample:
        return _address(launch.operation, dtype)
    _find_kernel(dtype, bool(launch.shared_noise), bool(launch.antithetic), runs_down(launch))
    return _address(Operation.sample, "")


def set_reader(address: int) -> None:
    """Set the C function that reads mu and sigma of other types than the computing type: ``multisample_read_cpu``."""
    _reader[0] = address


def _find_kernel(dtype: str, shared_noise: bool, antithetic: bool, down: bool) -> None:
    """Enter a window kernel into the table.

    JAX finds kernels by the layout, before it knows the lengths of a matrix. Of matrices with one row or one column,
    both kernels draw the same bits, one of them more slowly.
    """
    in_python: Any = _place_of
    place = in_python.py_func(ElementType[dtype], shared_noise, antithetic, down)
    if not _kernels[place]:
        _kernels[place] = address_of(window_kernel(dtype, shared_noise, antithetic, down))


def kernels() -> list[Callable[[], Any]]:
    """All kernels and C functions of the cpu backend, as functions that compile them."""
    flags = False, True
    return [
        *(functools.partial(window_kernel, *kind) for kind in itertools.product(MATRIX_TYPES, flags, flags, flags)),
        *(functools.partial(value_kernel, real, weighted) for real in ("float32", "float64") for weighted in flags),
        *(functools.partial(settings_kernel, restores) for restores in flags),
        starting_function,
        *(functools.partial(_address, operation, dtype) for operation in _FUNCTIONS for dtype in MATRIX_TYPES),
        functools.partial(_address, Operation.sample, ""),
    ]
