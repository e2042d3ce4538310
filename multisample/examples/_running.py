"""Runs an example as a program. A library that is missing is an error of one line."""

from __future__ import annotations

import sys
from collections.abc import Callable

_INSTALL = {
    "cupy": ("CuPy", "pip install cupy-cuda12x, or cupy-cuda13x for CUDA 13"),
    "dask": ("Dask", "pip install 'dask[array]'"),
    "distributed": ("distributed", "pip install distributed"),
    "jax": ("JAX", "pip install jax"),
    "torch": ("PyTorch", "pip install torch"),
}


def run(main: Callable[[], int]) -> None:
    """Call `main` and exit with its code."""
    try:
        raise SystemExit(main())
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in _INSTALL:
            raise
        library, command = _INSTALL[name]
        print(f"multisample: error: {library} is not installed: {command}", file=sys.stderr)
        raise SystemExit(1) from None
