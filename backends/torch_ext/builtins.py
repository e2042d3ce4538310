"""The hot parts of a call as builtin functions of the compiled library. The library must find Python's C functions.

Each has a twin in Python with the same results. `csrc/torch/python_calls.h` has the code.
"""

import ctypes
import struct
import sys
from pathlib import Path
from typing import Any


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
    key : callable
        ``key(objects)`` makes `Library.key` of PyTorch's library. `objects` are those of ``TorchObjects`` in C++.
    addresses : callable
        ``addresses(objects)`` makes a function that returns the addresses of tensors as packed words. For a nested
        tensor, or a subclass other than Parameter, the function returns None.
    tree : callable
        ``tree()`` makes the compiled `tree_of` of `multisample/_libraries/torch.py`, which returns None for uncommon
        modules.
    """

    def __init__(self, path: Path) -> None:
        library, any_object, text, address = ctypes.PyDLL(str(path)), ctypes.py_object, ctypes.c_char_p, ctypes.c_void_p

        def builtin(name: str, *types: Any) -> Any:
            function = getattr(library, f"multisample_python_{name}")
            function.argtypes, function.restype = types, any_object
            return function

        self.launch = builtin("launch", text, address, any_object, any_object)
        self.is_valid = builtin("is_valid", text)
        self.key = builtin("key", any_object)
        self.plan = builtin("plan", text, address, ctypes.c_uint64, *(ctypes.c_int,) * 2, *(any_object,) * 2)
        self.addresses = builtin("addresses", any_object)
        self.tree = builtin("tree")
        self.tree()  # Raises without Python.
        library.multisample_python_set_place(_place_of_address())


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
