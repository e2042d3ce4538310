"""Compiles the sampling kernels in Python for a GPU, with numba-cuda. Each machine compiles a kernel once.

Importing this module imports numba-cuda.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numba_cuda
from numba import cuda, types
from numba.cuda.dispatcher import _Kernel
from numba.cuda.extending import overload
from numba.cuda.utils import numba_target_override

from multisample.backends.kernels.compilation import KernelCache, jit, source_digest

from . import intrinsics as cuda_intrinsics
from .geometry import (
    FEW_THREADS,
    MOST_THREADS,
    PLAIN_THREADS,
    PLAIN_TRANSPOSED_THREADS,
    SHIFTED_THREADS,
    SHORT_ROW_THREADS,
    TRANSPOSED_THREADS,
    staged_threads,
)
from .kernel import advance_kernel, sample_kernel
from .kernel_choice import SMALL_THREADS, STORE_KINDS
from .keys import KernelKey, choices_of, name_of
from .parameters import SIGNATURE

# The module of intrinsics for each kind of device.
_DEVICES = {"usual": cuda_intrinsics, "small": ModuleType("of_small_devices"), "before 8.0": ModuleType("before_8_0")}
vars(_DEVICES["small"]).update(vars(cuda_intrinsics), LARGE_SHARED_MEMORY=False)
vars(_DEVICES["before 8.0"]).update(vars(_DEVICES["small"]), NARROWING=cuda_intrinsics.NARROWING_BEFORE_8_0)

# The kernels of this process, each with its kind of device. The compiler gets a kernel's index as a literal.
_variants: list[tuple[KernelKey, str]] = []

ADVANCE_SIGNATURE = types.void(types.int64)


def device_kind(capability: tuple[int, int]) -> str:
    """The kind of a device with this compute capability: a key of `_DEVICES`."""
    if capability < (8, 0):
        return "before 8.0"
    return "small" if capability in ((8, 6), (8, 9)) or capability[0] == 12 else "usual"


def _run(call: Any, geometry: Any, variant: int) -> None:
    raise NotImplementedError("for a GPU only")


@overload(_run, prefer_literal=True, jit_options={"forceinline": True})
def _run_variant(call: Any, geometry: Any, variant: Any) -> Callable[..., Any] | None:
    if not isinstance(variant, types.IntegerLiteral):
        return None
    key, device = _variants[variant.literal_value]
    kernel = jit()(sample_kernel(_DEVICES[device], *choices_of(key).values()))

    def run(call: Any, geometry: Any, variant: Any) -> None:
        kernel(call, geometry)

    return run


def kernel_function(key: KernelKey, capability: tuple[int, int]) -> Callable[..., None]:
    """The Python function of a kernel, for devices of a compute capability.

    The compiler gets all choices as one literal. Loading a cached kernel then builds none of its functions.
    """
    variant = len(_variants)
    _variants.append((key, device_kind(capability)))

    def kernel(call: Any, geometry: Any) -> None:
        _run(call, geometry, variant)

    kernel.__qualname__ = name_of(key)
    return kernel


def launch_bounds(key: KernelKey, capability: tuple[int, int]) -> tuple[int, int]:
    """Maximum threads of a block, and minimum blocks per multiprocessor.

    The bounds limit the registers of a thread, which raises the occupancy. The loop over rows still spills none.
    Without bounds, kernels have three times as many registers and take up to twice the time.
    """
    dtype, shared_noise, antithetic = key.dtype, key.shared_noise, key.antithetic
    name = STORE_KINDS[key.store_kind]
    if name.startswith("kTransposed"):
        # The thread's dimensions stay in registers through all loops. Before 9.0, nvJitLink compiles shuffles to calls,
        # around which these registers are saved.
        threads = TRANSPOSED_THREADS if name == "kTransposed" else staged_threads(shared_noise)
        if name == "kTransposed" and capability < (9, 0):
            return threads, 384 // threads
        return threads, (512 if dtype == "float64" and not shared_noise else 768) // threads
    if name == "kFewColumns":
        return FEW_THREADS, 5 if antithetic or dtype == "float64" else 8
    if name == "kPlain":
        return PLAIN_THREADS, 3
    if name == "kPlainTransposed":
        return PLAIN_TRANSPOSED_THREADS, 8
    if name == "kSmallMatrices":
        return SMALL_THREADS, 3 if dtype == "float64" else 4
    if name == "kShifted":
        # With independent noise, a fourth block makes fast_math slower.
        return SHIFTED_THREADS, 4 if shared_noise and capability != (7, 5) else 3
    if name == "kStaged":
        # Before 9.0, nvJitLink compiles the barriers of a warp to calls, which take registers.
        calls = not shared_noise and capability < (9, 0)
        return SHORT_ROW_THREADS, 3 if dtype == "float64" or calls else 4
    blocks = 3 if dtype == "float64" or (name == "kAligned" and antithetic) else 5
    # An SM of capability 7.5 holds 1024 threads. nvJitLink ignores launch bounds above that.
    return MOST_THREADS, min(blocks, 3) if capability == (7, 5) else blocks


def compile_kernel(key: KernelKey) -> Any:
    """The kernel, compiled or loaded from the cache. The current device is that of `key`."""
    capability = cuda.get_current_device().compute_capability
    bounds = launch_bounds(key, capability)
    return _compiled(kernel_function(key, capability), SIGNATURE, launch_bounds=bounds)


def compile_advance() -> Any:
    """The kernel `advance_kernel` for the current device, compiled or loaded from the cache."""
    return _compiled(advance_kernel(cuda_intrinsics), ADVANCE_SIGNATURE)


def _compiled(function: Callable[..., None], signature: Any, **options: Any) -> Any:
    dispatcher = cuda.jit(lto=False, opt=True, debug=False, **options)(function)
    name = f"cuda-{function.__qualname__}"
    digest = source_digest()
    digest += numba_cuda.__version__ if digest else ""
    dispatcher._cache = KernelCache(name, digest, _reduce, _rebuild, "numba")
    return dispatcher.compile(signature.args)


def _reduce(kernel: Any) -> Any:
    return kernel._reduce_states()


def _rebuild(target_context: Any, payload: Any) -> Any:
    with numba_target_override():
        return _Kernel._rebuild(**payload)
