"""The rule by which tests are skipped: a test whose backend cannot run is skipped, unless
``MULTISAMPLE_TEST_BACKENDS`` names the backend: then the test fails.
"""

import ctypes
import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import pytest

from multisample.backends import registry
from multisample.backends.native import library_cache

VARIABLE = "MULTISAMPLE_TEST_BACKENDS"


def requested() -> list[str] | None:
    """The names of backends in the variable; None without the variable."""
    value = os.environ.get(VARIABLE)
    return None if value is None else [name.strip() for name in value.split(",") if name.strip()]


@functools.cache
def device_count() -> int:
    """The number of CUDA devices, from the driver, without importing an array library."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    return count.value if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0


@functools.cache
def reasons_against(backend: str) -> tuple[str, ...]:
    """Reasons why `backend` cannot run on CUDA here."""
    reasons = registry.find(backend).status().reasons
    return reasons or (library_cache.cuda_reasons() if backend == "torch_ext" else ())


def require_device() -> None:
    """Skip a module of tests of CUDA without a device, unless the variable names backends: then each test decides."""
    if device_count() == 0 and requested() is None:
        pytest.skip("no CUDA device", allow_module_level=True)


def requires(package: str, library: str, load: Callable[[], Any]) -> pytest.MarkDecorator:
    """Skip tests without `package`, with which ``load()`` loads `library`."""
    reason = f"{package} is not installed"
    if importlib.util.find_spec(package) is not None:
        try:
            load()
            reason = ""
        except Exception as error:  # A broken installation may raise anything.
            reason = f"{library} cannot be loaded: {error}"
    return pytest.mark.skipif(bool(reason), reason=reason)


def require(backend: str, *, on_cuda: bool = True) -> None:
    """Skip the test if `backend` cannot run; fail it if the variable names the backend.

    The variable requires torch_ext on CUDA only where there is a device.
    """
    names = requested()
    if names is not None and backend not in names:
        pytest.skip(f"{VARIABLE} does not ask for {backend}")
    if on_cuda and device_count() == 0 and names is None:
        pytest.skip("no CUDA device")
    on_cpu = registry.find(backend).status().reasons
    reasons = reasons_against(backend) if on_cuda else on_cpu
    if not reasons:
        return
    is_exception = backend == "torch_ext" and on_cuda and device_count() == 0 and not on_cpu
    if names is not None and not is_exception:
        pytest.fail(f"{VARIABLE} asks for {backend!r}: {'; '.join(reasons)}", pytrace=False)
    pytest.skip(f"{backend} cannot run{' on CUDA' * on_cuda}: {'; '.join(reasons)}")
