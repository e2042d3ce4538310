"""The floating-point settings of the calling thread, for arithmetic on the caller's values outside of kernels.

A library linked with ``-ffast-math``, `torch.set_flush_denormal` and C's `fesetround` change them. Kernels set the
default settings themselves.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

# Their product is 0.625 of the smallest subnormal number, to which it rounds. It is 0 if subnormal numbers are flushed,
# or if the thread rounds down or towards 0.
_SMALL, _SMALLER = 2.0**-600, 1.25 * 2.0**-475
# 1 + _LITTLE is 1, unless the thread rounds up.
_LITTLE = 2.0**-60


def has_default_floats() -> bool:
    """Whether this thread rounds to nearest and keeps subnormal numbers."""
    return _SMALL * _SMALLER > 0.0 and 1.0 + _LITTLE == 1.0


@contextlib.contextmanager
def default_floats() -> Iterator[None]:
    """Run the block with IEEE 754's default settings on this thread, then restore the settings before."""
    from .kernel import settings_kernel  # Numba takes half a second to import.

    before = settings_kernel()()
    try:
        yield
    finally:
        settings_kernel(restores=True)(before)


def with_default_floats(function: Function) -> Function:
    """Decorator: runs each call with IEEE 754's default settings."""

    @functools.wraps(function)
    def run(*arguments: Any, **options: Any) -> Any:
        if has_default_floats():
            return function(*arguments, **options)
        with default_floats():
            return function(*arguments, **options)

    return run  # type: ignore[return-value]
