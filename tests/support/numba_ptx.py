"""The PTX that Numba makes of kernels, without a GPU."""

from __future__ import annotations

import importlib.util
import json

import pytest
from processes import run_python

__all__ = ["numba_ptx", "requires_libnvvm"]

# In a process of its own, because it replaces the device whose properties Numba reads to compile.
_COMPILE = """
import json
import sys
from types import SimpleNamespace

from numba import cuda
from numba.cuda import dispatcher

import multisample


def compiled(function, signature, capability=(9, 0), **options):
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=capability)
    return cuda.compile(function, signature, device=False, abi="numba", cc=capability, output="ptx", **options)[0]


found = {}
"""


def _no_libnvvm() -> str:
    """The reason why Numba cannot compile; empty if it can."""
    if importlib.util.find_spec("numba_cuda") is None:
        return "numba-cuda is not installed"
    try:
        from numba.cuda.cudadrv import nvvm

        nvvm.NVVM()
    except Exception as error:  # A broken installation may raise anything.
        return f"libNVVM cannot be loaded: {error}"
    return ""


requires_libnvvm = pytest.mark.skipif(bool(_no_libnvvm()), reason=_no_libnvvm())


def numba_ptx(program: str, *arguments: str) -> dict[str, str]:
    """The dict `found` that `program` fills by its function ``compiled(kernel, signature, capability, **options)``."""
    found: dict[str, str] = json.loads(
        run_python("-c", f"{_COMPILE}{program}\nprint(json.dumps(found))", *arguments, seconds=900).stdout
    )
    return found
