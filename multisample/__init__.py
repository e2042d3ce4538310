"""Draw vectors from a normal distribution with independent components: same seed, same bits, everywhere.

`sample` draws; `list_backends` lists the backends that can run here. STREAM.md, beside this file, specifies the stream
of numbers. The submodules `cem`, `dask`, `examples`, `jax`, `numba`, `torch` and `triton` are imported on first use.
"""

from __future__ import annotations

import _thread
import sys
from typing import TYPE_CHECKING

# Locks, caches and handlers need one interpreter with a GIL. Only Python 3.12 and later can detect a subinterpreter.
if "t" in getattr(sys, "abiflags", "") or not getattr(_thread, "_is_main_interpreter", lambda: True)():
    raise ImportError("multisample: free-threaded builds of Python and subinterpreters are not supported")

from multisample.backends.contract import BackendStatus
from multisample.backends.errors import BackendUnavailableError, UnknownBackendError

from ._backends import list_backends, register_backend
from ._include import get_include
from ._limit_threads import limit_threads
from ._moments import weighted_moments
from ._perturb import perturb
from ._randomness.generator import Generator, Key, manual_seed
from ._sample import sample
from ._standard_normal import standard_normal
from ._version import __version__

__all__ = [
    "BackendStatus", "BackendUnavailableError", "Generator", "Key", "UnknownBackendError", "__version__", "get_include",
    "limit_threads", "list_backends", "manual_seed", "perturb", "register_backend", "sample", "standard_normal",
    "weighted_moments",
]  # fmt: skip

if TYPE_CHECKING:
    from . import cem as cem
    from . import dask as dask
    from . import examples as examples
    from . import jax as jax
    from . import numba as numba
    from . import torch as torch
    from . import triton as triton
else:  # A type checker that sees __getattr__ accepts every name.
    _SUBMODULES = ("cem", "dask", "examples", "jax", "numba", "torch", "triton")

    # Names of functions elsewhere, and the functions here.
    _ELSEWHERE = {
        "randn": "multisample.torch.randn, or multisample.standard_normal for NumPy",
        "randn_like": "multisample.torch.randn_like",
        "normal": "multisample.sample(mu, sigma, n), multisample.standard_normal(size) or multisample.jax.normal",
    }

    def __getattr__(name: str) -> object:
        # Imported on first use: dask imports Dask, jax JAX, torch PyTorch, triton Triton.
        if name not in _SUBMODULES:
            advice = f"; use {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{advice}")
        import importlib

        return importlib.import_module(f".{name}", __name__)

    def __dir__() -> list[str]:
        from importlib.util import find_spec

        # help() reads every listed attribute, so libraries are listed only where they are installed.
        submodules = [name for name in _SUBMODULES if name in ("cem", "examples") or find_spec(name) is not None]
        return sorted({*__all__, *submodules, "__doc__", "__file__", "__path__"})
