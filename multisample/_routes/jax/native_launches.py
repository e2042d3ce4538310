"""A handler that Numba compiles, in front of the one in Python: it repeats launches that Python has made before.

The handler in Python takes 40 us and Python's lock, of which a launch on a CUDA device needs 5. It records each launch
as bytes, with the places of the operands' addresses in them. The compiled handler looks up the record of a call, writes
the addresses of this call into a copy, and launches. It passes every call without a record on to Python, and every
question of XLA's.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import cfunc, njit, types
from numba.extending import intrinsic

from multisample.backends.driver import PLACES
from multisample.backends.kernels.compilation import cached, source_digest
from multisample.backends.kernels.cpu.intrinsics import stack_array
from multisample.backends.system import cuda_driver, xla_ffi

__all__ = ["NativeLaunches"]

_SLOTS = 4096  # A power of 2. Half of them are used at most; further calls stay with Python.
_LAUNCH_WORDS = 64  # The longest recorded launch, in words of 8 bytes.
_ALIGNMENT = 31  # The kernel depends on the address of the matrix modulo 32.
_MASK = (1 << 32) - 1
# The sources of patches: the addresses of a call, and the stream.
_SOURCES = ("mu", "sigma", "seed", "offsets", "matrix", "stream")
# Places in a record, in words of 8 bytes: the sizes of its parts; then the key, the patches and the launch.
_STRING_SIZE, _KERNEL, _PATCHES, _LAUNCH_SIZE, _HEAD = 0, 1, 2, 3, 4
_NUMBERS = 5  # of the key after the string: three lengths of the matrix, device, misalignment


@intrinsic
def _word_at(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], ir.IntType(64).as_pointer()), align=1)

    return types.int64(types.int64), codegen


@intrinsic
def _byte_at(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = builder.load(builder.inttoptr(args[0], ir.IntType(8).as_pointer()))
        return builder.zext(byte, ir.IntType(64))

    return types.int64(types.int64), codegen


@intrinsic
def _call(typingctx: Any, function: Any, argument: Any) -> Any:
    """``function(argument)`` in C: an address, of a function that returns an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        pointer = builder.inttoptr(args[0], ir.FunctionType(word, [word]).as_pointer())
        return builder.call(pointer, args[1:])

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def _launch(typingctx: Any, function: Any, configuration: Any, kernel: Any, extra: Any) -> Any:
    """``cuLaunchKernelEx(configuration, kernel, nullptr, extra)``, where `function` is its address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        pointer = builder.inttoptr(args[0], ir.FunctionType(ir.IntType(32), [word] * 4).as_pointer())
        error = builder.call(pointer, [args[1], args[2], word(0), args[3]])
        return builder.zext(error, word)

    return types.int64(*[types.int64] * 4), codegen


def _mixed(hashed, number):
    """The hash of what `hashed` is the hash of, and of a number from 0 on. Nothing overflows 63 bits."""
    return (hashed * 31 + (number & _MASK)) & _MASK


_mix = njit(forceinline=True)(_mixed)


def _handler(configuration_size: int) -> Callable[..., Any]:
    """``handler(frame, in_python, table, launch_kernel, get_device)``, to be compiled; its arguments are addresses."""
    execute, extension, stage, api, context = xla_ffi.EXECUTE, *(8 * k for k in xla_ffi.FRAME_HEAD)
    arguments_at, results_at, attribute_count, attributes_at = (8 * k for k in xla_ffi.FRAME_PARTS)
    stream_get, ordinal_get = xla_ffi.STREAM_GET, xla_ffi.ORDINAL_GET
    data, dims = xla_ffi.BUFFER_DATA, xla_ffi.BUFFER_DIMS

    def handler(frame, in_python, table, launch_kernel, get_device):
        if (
            _word_at(frame + extension) != 0
            or _word_at(frame + stage) & _MASK != execute
            or _word_at(frame + attribute_count) != 1
        ):
            return _call(in_python, frame)
        string = _word_at(_word_at(frame + attributes_at))
        string, size = _word_at(string), _word_at(string + 8)
        result = _word_at(_word_at(frame + results_at))
        shape, matrix = _word_at(result + dims), _word_at(result + data)
        functions = _word_at(frame + api)
        request = stack_array(4, np.int64)  # XLA_FFI_DeviceOrdinal_Get_Args, then XLA_FFI_Stream_Get_Args.
        request[0], request[1], request[2], request[3] = 28, 0, _word_at(frame + context), 0
        if _call(_word_at(functions + ordinal_get), request.ctypes.data) != 0:
            return _call(in_python, frame)
        device, misalignment = request[3] & _MASK, matrix & _ALIGNMENT
        current = stack_array(1, np.int32)
        if _call(get_device, current.ctypes.data) & _MASK != 0 or current[0] != device:
            return _call(in_python, frame)  # It makes the device current.

        hashed = 0
        for k in range(size):
            hashed = _mix(hashed, _byte_at(string + k))
        for k in range(3):
            hashed = _mix(hashed, _word_at(shape + 8 * k))
        hashed = _mix(_mix(hashed, device), misalignment)
        while True:
            record = _word_at(table + 8 * (hashed & (_SLOTS - 1)))
            if record == 0:
                return _call(in_python, frame)
            key = record + 8 * _HEAD
            numbers = key + (size + 7) // 8 * 8
            if _word_at(record + 8 * _STRING_SIZE) == size:
                same = _word_at(numbers + 24) == device and _word_at(numbers + 32) == misalignment
                for k in range(3):
                    same = same and _word_at(numbers + 8 * k) == _word_at(shape + 8 * k)
                for k in range(size):
                    same = same and _byte_at(key + k) == _byte_at(string + k)
                if same:
                    break
            hashed += 1

        request[0], request[3] = 32, 0
        if _call(_word_at(functions + stream_get), request.ctypes.data) != 0:
            return _call(in_python, frame)
        patches, count = numbers + 8 * _NUMBERS, _word_at(record + 8 * _PATCHES)
        launch, launch_size = stack_array(_LAUNCH_WORDS, np.int64), _word_at(record + 8 * _LAUNCH_SIZE)
        for k in range((launch_size + 7) // 8):
            launch[k] = _word_at(patches + 24 * count + 8 * k)
        arguments = _word_at(frame + arguments_at)
        for k in range(patches, patches + 24 * count, 24):
            source = _word_at(k + 8)
            if source < 4:
                address = _word_at(_word_at(arguments + 8 * source) + data)
            elif source == 4:
                address = matrix
            else:
                address = request[3]  # the stream
            launch[_word_at(k)] = address + _word_at(k + 16)
        # CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE and CU_LAUNCH_PARAM_END of cuda.h.
        extra, length = stack_array(5, np.int64), stack_array(1, np.int64)
        length[0] = launch_size - configuration_size
        extra[0], extra[1], extra[2] = 1, launch.ctypes.data + configuration_size, 2
        extra[3], extra[4] = length.ctypes.data, 0
        kernel = _word_at(record + 8 * _KERNEL)
        if _launch(launch_kernel, launch.ctypes.data, kernel, extra.ctypes.data) != 0:
            return _call(in_python, frame)  # It reports the error.
        return 0

    return handler


class NativeLaunches:
    """The compiled handler, and the launches that it can repeat.

    Parameters
    ----------
    in_python : int
        The address of the handler in Python.
    configuration_size : int
        Bytes of a launch before the parameters of its kernel.
    """

    def __init__(self, in_python: int, configuration_size: int) -> None:
        self._table = np.zeros(_SLOTS, np.int64)
        self._kept: dict[tuple[bytes, bytes, int, int], np.ndarray[Any, Any]] = {}
        self._lock = threading.Lock()
        # The handler that XLA calls knows the addresses of this process. The one that it calls is the same in every
        # process, and compiled once; Python integers would be constants of it.
        handler = cached(_handler(configuration_size), f"xla_handler_{configuration_size}", _digest())
        driver = (cuda_driver.launch_function(), cuda_driver.device_function())
        launch, device = (np.int64(ctypes.cast(function, ctypes.c_void_p).value or 0) for function in driver)
        python, table = np.int64(in_python), np.int64(self._table.ctypes.data)
        self._compiled = cfunc(types.int64(types.int64))(lambda frame: handler(frame, python, table, launch, device))
        self.address: int = self._compiled.address
        """The address of the compiled handler."""

    def record(
        self,
        string: bytes,
        shape: bytes,
        device: int,
        addresses: list[int],
        parameters: Callable[..., list[tuple[int, bytes]]],
    ) -> None:
        """Record the launch of a call.

        Parameters
        ----------
        string, shape : bytes
            The call's attribute, and the shape of its result.
        device : int
        addresses : list of int
            Of mu, sigma, seed, offsets, or 0, and matrix. The alignment of the last counts.
        parameters : callable
            ``parameters(*addresses, stream)``: the kernels and their parameters: see `MemoryLauncher.parameters`.
        """
        misalignment = addresses[4] & _ALIGNMENT
        kind = string, shape, device, misalignment
        if kind in self._kept:  # The handler passed the call on, because another device is current.
            return
        launches = parameters(*addresses, 0)
        if len(launches) != 1:  # A long batch.
            return
        kernel, launch = launches[0]
        words = np.frombuffer(_padded(launch), np.int64)
        patches = [
            (place // 8, source, added)
            for source, name in enumerate(_SOURCES)
            if name != "offsets" or addresses[source]
            for place, added in PLACES[name]
        ]
        numbers = [*xla_ffi.unpacked_shape(shape), device, misalignment]
        head = np.array([len(string), kernel, len(patches), len(launch)], np.int64)
        key = np.frombuffer(_padded(string), np.int64)
        record = np.concatenate([head, key, np.array(numbers), np.array(patches, np.int64).reshape(-1), words])
        hashed = 0
        for number in (*string, *numbers):
            hashed = _mixed(hashed, number)
        with self._lock:
            if kind in self._kept or len(words) > _LAUNCH_WORDS or len(self._kept) >= _SLOTS // 2:
                return
            self._kept[kind] = record
            while self._table[hashed % _SLOTS]:
                hashed += 1
            self._table[hashed % _SLOTS] = record.ctypes.data  # Only now does the compiled handler see the record.


def _digest() -> str:
    return source_digest() + source_digest("multisample._routes.jax")


def _padded(data: bytes) -> bytes:
    """The data, with zeros up to a whole word."""
    return data + bytes(-len(data) % 8)
