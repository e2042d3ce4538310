"""The hot parts of a call as builtin functions of the compiled library. They need a Python in the library's process.

Each has a twin in Python with the same results. `csrc/torch/python_calls.h` has the code.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# The struct Signature: dimensions, sizes, strides, dtype, device type and index, two flags.
_SIGNATURE = struct.Struct("5q3i2I4x")


class PlanFunctions(NamedTuple):
    """The Python functions that a compiled plan calls, in the order of ``PlanFunction`` in C++: see `Plan`."""

    allocate: Callable[[Any], Any]
    take: Callable[[Any], tuple[int, int]]
    check_generator: Callable[[Any], None] | None
    run_in_python: Callable[..., Any] | None
    """Runs calls that raise or that are uncommon. If None, such calls return None."""
    stream: Callable[[Any], int] | None
    is_capturing: Callable[[int], bool] | None
    scratch: Callable[[int], Any] | None
    """``scratch(sample_offset)``: scratch memory on the device, or None."""
    fail: Callable[[int], None]
    thread_limit: Callable[[], int]


class Builtins:
    """The builtin functions of the loaded library at `path`."""

    def __init__(self, path: Path) -> None:
        library = ctypes.PyDLL(str(path))
        self._key, self._launch = library.multisample_python_key, library.multisample_python_launch
        self._is_valid, self._plan = library.multisample_python_is_valid, library.multisample_python_plan
        self._key.argtypes = (ctypes.py_object,) * 7
        self._launch.argtypes = ctypes.c_char_p, ctypes.c_void_p, ctypes.py_object, ctypes.py_object
        self._is_valid.argtypes = (ctypes.c_char_p,)
        self._plan.argtypes = (
            ctypes.c_char_p, ctypes.c_void_p, *[ctypes.c_uint64] * 3, ctypes.c_int, *[ctypes.py_object] * 3,
        )  # fmt: skip
        self._addresses = library.multisample_python_addresses
        self._addresses.argtypes = ctypes.py_object, ctypes.py_object, ctypes.c_long
        for function in (self._key, self._launch, self._is_valid, self._plan, self._addresses):
            function.restype = ctypes.py_object

    def launch(
        self, launch: bytes, run: Any, fail: Callable[[int], None], thread_limit: Callable[[], int]
    ) -> Callable[..., None]:
        """`Launcher.run` for launches like the packed `launch`.

        It calls ``run(launch)``, and ``fail(error)`` after an error.

        Raises
        ------
        ValueError
            If the library finds no Python in this process.
        """
        address = ctypes.cast(run, ctypes.c_void_p)
        builtin: Callable[..., None] = self._launch(launch, address, fail, thread_limit)
        return builtin

    def is_valid(self, launch: bytes) -> Callable[[Any, Any, Any], bool]:
        """`Launcher.is_valid` for launches like the packed `launch`."""
        builtin: Callable[[Any, Any, Any], bool] = self._is_valid(launch)
        return builtin

    def plan(
        self, launch: bytes, run: Any, window: tuple[int, int], mask: int, has_list: bool, matrix: Any,
        functions: PlanFunctions,
    ) -> Callable[..., Any]:  # fmt: skip
        """`Plan.run` for samples and gradients.

        Parameters
        ----------
        launch : bytes
            The packed template of the plan.
        run : callable
            See `launch`.
        window : tuple of int
            The greatest row and column at which the window can begin.
        mask : int
            The bits that are 0 in the address of an aligned vector.
        has_list : bool
            Whether the seed is the only element of a list or tuple.
        matrix : torch.Tensor or None
            A matrix like the one that a gradient reads.
        functions : PlanFunctions
        """
        address = ctypes.cast(run, ctypes.c_void_p)
        builtin: Callable[..., Any] = self._plan(
            launch, address, *window, mask, has_list, matrix, tuple(functions), int
        )
        return builtin

    def key(
        self, signature: Callable[[Any], Hashable], out_signature: Callable[[Any], Hashable]
    ) -> Callable[..., Hashable] | None:
        """A function that makes the key of a call with tensors; None if it misreads the tensors of this PyTorch.

        Parameters
        ----------
        signature, out_signature : callable
            The signature (all properties that a plan depends on) of a tensor with any number of dimensions, and of
            `out`.
        """
        import torch

        builtin: Callable[..., Hashable] = self._key(
            torch.Tensor, torch.nn.Parameter, int, float, signature, out_signature, torch.Tensor.is_neg
        )
        example = torch.empty_strided((3, 2), (5, 7), dtype=torch.int16, device="cpu", requires_grad=False)
        key: Any = builtin(example, 0.0, None, 0, None, 0, 0)
        if not isinstance(key[0], bytes) or _SIGNATURE.unpack(key[0])[:6] != (2, 3, 2, 5, 7, _INT16):
            return None
        return builtin

    def addresses(self) -> Callable[[Sequence[Any]], bytes | None] | None:
        """``addresses(tensors)``: the addresses of tensors as packed words; None if one has its own class or is nested.

        There is none if it misreads the tensors of this PyTorch.
        """
        import torch

        examples = [torch.zeros(2), torch.nn.Parameter(torch.zeros(3))]
        builtin: Callable[..., Any] = self._addresses(torch.Tensor, torch.nn.Parameter, _place_of_address(examples))
        right = struct.pack("2P", *(x.data_ptr() for x in examples))
        return builtin if builtin(examples) == right else None


def _place_of_address(tensors: Sequence[Any]) -> int:
    """Where Python's tensors hold the address of their implementation, ``_cdata``; 0 if that cannot be found."""
    if sys.implementation.name != "cpython":
        return 0
    places = set()
    for x in tensors:
        words = struct.pack("P", x._cdata), ctypes.string_at(id(x), type(x).__basicsize__)
        places |= {k for k in range(0, len(words[1]), len(words[0])) if words[1].startswith(words[0], k)} or {0}
    return places.pop() if len(places) == 1 else 0


# The number of torch.int16 in PyTorch's C interface.
_INT16 = 2
