"""The hot parts of a call as builtin functions of the compiled library. The library must find Python's C functions.

Each has a twin in Python with the same results. `csrc/torch/python_calls.h` has the code.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

# The struct Signature: dimensions, sizes, strides, dtype, device type and index, two flags.
_SIGNATURE = struct.Struct("5q3i2I4x")


class Builtins:
    """The builtin functions of the loaded library at `path`. `run` is a C function that takes a packed launch.

    ValueError if the process has no Python, or if PyTorch's tensors have their addresses at an unknown place.

    Attributes
    ----------
    launch : callable
        ``launch(packed_launch, run, fail, thread_limit)`` makes `Launcher.run`, which calls ``fail(error)`` after an
        error.
    is_valid : callable
        ``is_valid(packed_launch)`` makes `Launcher.is_valid`.
    plan : callable
        ``plan(packed_launch, run, mask, has_list, checks, matrix, functions)`` makes the run of a plan.
        `functions` are those of ``PlanFunction`` in C++: see `TorchExtBackend.compiled_plan`.
    tree : callable
        ``tree()`` makes the compiled `tree_of` of `multisample/_libraries/torch.py`, which returns None for uncommon
        modules.
    """

    def __init__(self, path: Path) -> None:
        library, any_object, text, address = ctypes.PyDLL(str(path)), ctypes.py_object, ctypes.c_char_p, ctypes.c_void_p

        def builtin(name: str, *types: Any) -> Callable[..., Any]:
            function: Any = getattr(library, f"multisample_python_{name}")
            function.argtypes, function.restype = types, any_object
            made: Callable[..., Any] = function
            return made

        self.launch = builtin("launch", text, address, any_object, any_object)
        self.is_valid = builtin("is_valid", text)
        self._key = builtin("key", any_object)
        self.plan = builtin("plan", text, address, ctypes.c_uint64, *(ctypes.c_int,) * 2, *(any_object,) * 2)
        self._addresses = builtin("addresses", any_object, any_object)
        self.tree = builtin("tree")
        self.tree()  # Raises without Python.
        library.multisample_python_set_place(_place_of_address())

    def key(self, library: Any) -> Callable[..., Hashable] | None:
        """`Library.key` of `library`, which is PyTorch's; None if it misreads the tensors of this PyTorch."""
        import torch

        objects = (
            torch.Tensor, torch.nn.Parameter, library.signature, library.target_signature, torch.Tensor.is_neg,
            library.state, library.questions, library.flags,
        )  # fmt: skip
        builtin: Callable[..., Hashable] = self._key(objects)
        example = torch.empty_strided((3, 2), (5, 7), dtype=torch.int16, device="cpu", requires_grad=False)
        key: Any = builtin(example, 0.0, None, 0, None, 0, 0)
        if not isinstance(key[0], bytes) or _SIGNATURE.unpack(key[0])[:6] != (2, 3, 2, 5, 7, _INT16):
            return None
        return builtin

    def addresses(self) -> Callable[[Sequence[Any]], bytes | None]:
        """``addresses(tensors)``: the addresses of tensors as packed words.

        For a nested tensor, or a subclass other than Parameter, the function returns None.
        """
        import torch

        builtin: Callable[..., Any] = self._addresses(torch.Tensor, torch.nn.Parameter)
        return builtin


def _place_of_address() -> int:
    """Where Python's tensors hold the address of their implementation, ``_cdata``. ValueError if that is unknown."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    places = set()
    if sys.implementation.name == "cpython":
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            tensors = torch.zeros(2, device="cpu"), torch.nn.Parameter(torch.zeros(3, device="cpu"))
            for x in tensors:
                word, content = struct.pack("P", x._cdata), ctypes.string_at(id(x), type(x).__basicsize__)
                places |= {k for k in range(0, len(content), len(word)) if content.startswith(word, k)} or {0}
    if len(places) != 1 or 0 in places:
        raise ValueError(f"expected one place of the address in a tensor, got {places}")
    return places.pop()


# The number of torch.int16 in PyTorch's C interface.
_INT16 = 2
