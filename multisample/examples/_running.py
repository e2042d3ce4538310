"""Options of the examples, and their exit codes. A library that is missing is an error of one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

_INSTALL = {
    "cupy": ("CuPy", "pip install cupy-cuda12x, or cupy-cuda13x for CUDA 13"),
    "dask": ("Dask", "pip install 'dask[array]'"),
    "distributed": ("distributed", "pip install distributed"),
    "jax": ("JAX", "pip install jax"),
    "torch": ("PyTorch", "pip install torch"),
}


def parsed(name: str, doc: str | None, argv: Sequence[str] | None, **options: Any) -> argparse.Namespace:
    """The arguments of example `name`, by their defaults: a value, a tuple of choices, or a list of any length."""
    parser = argparse.ArgumentParser(
        prog=f"python -m multisample examples {name}", description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    for option, default in options.items():
        kind: dict[str, Any] = {"type": type(default)}
        if isinstance(default, tuple):
            kind, default = {"choices": default}, default[0]
        elif isinstance(default, list):
            kind = {"nargs": "+"}
        parser.add_argument(f"--{option}", **kind, default=default, help="[%(default)s]")
    return parser.parse_args(argv)


def run_and_exit(main: Callable[[], int]) -> NoReturn:
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
