"""Compiles the Python kernel for a GPU with numba-cuda, once per machine and not once per process.

Importing this module imports numba-cuda.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numba_cuda
import numpy as np
from numba import cuda, njit, types
from numba.cuda.dispatcher import _Kernel
from numba.cuda.extending import overload
from numba.cuda.utils import numba_target_override

from multisample.backends.element_types import SIZES
from multisample.backends.kernels.compilation import KernelCache, source_digest

from . import intrinsics as cuda_intrinsics
from .geometry import (
    FEW_THREADS,
    MOST_THREADS,
    SHIFTED_THREADS,
    SHORT_ROW_THREADS,
    SMALL_THREADS,
    STORE_KINDS,
    TRANSPOSED_THREADS,
    staged_threads,
)
from .kernel import sample_kernel
from .moments import finishing_kernel, moments_kernel
from .moments_geometry import MOMENT_ROWS, MOMENT_THREADS
from .parameters import MOMENTS_SIGNATURE, SIGNATURE, perturb_signature
from .perturb import perturb_kernel
from .perturb_geometry import PERTURB_THREADS

# The intrinsics, for each kind of devices.
_DEVICES = {"usual": cuda_intrinsics, "small": ModuleType("of_small_devices"), "before 8.0": ModuleType("before_8_0")}
vars(_DEVICES["small"]).update(vars(cuda_intrinsics), LARGE_SHARED_MEMORY=False)
vars(_DEVICES["before 8.0"]).update(vars(_DEVICES["small"]), NARROWING=cuda_intrinsics.NARROWING_BEFORE_8_0)

_FLAGS = False, True
# The kernels: for each kind, a function of the intrinsics and of a variant; and all variants, with the kind of devices.
_KERNELS: dict[str, Callable[..., Callable[..., None]]] = {
    "sample": sample_kernel,
    "moments": lambda gpu, *choices: (
        finishing_kernel(gpu, choices[0]) if choices[-1] else moments_kernel(gpu, *choices[:-1])
    ),
    "perturb": perturb_kernel,
}
_VARIANTS = (
    *itertools.product(["sample"], SIZES, *(_FLAGS,) * 3, range(len(STORE_KINDS)), *(_FLAGS,) * 2, _DEVICES),
    *itertools.product(["moments"], ("float32", "float64"), *(_FLAGS,) * 2, (1, MOMENT_ROWS), *(_FLAGS,) * 3, _DEVICES),
    *itertools.product(["perturb"], SIZES, *(_FLAGS,) * 4, _DEVICES),
)

ADVANCE_SIGNATURE = types.void(types.int64)


def device_kind(capability: tuple[int, int]) -> str:
    """The kind of devices of a compute capability: a key of `_DEVICES`."""
    if capability < (8, 0):
        return "before 8.0"
    return "small" if capability in ((8, 6), (8, 9)) or capability[0] == 12 else "usual"


def _run(call: Any, geometry: Any, variant: int) -> None:
    raise NotImplementedError("for a GPU only")


@overload(_run, prefer_literal=True, jit_options={"forceinline": True})
def _run_variant(call: Any, geometry: Any, variant: Any) -> Callable[..., Any] | None:
    if not isinstance(variant, types.IntegerLiteral):
        return None
    kind, *choices, device = _VARIANTS[variant.literal_value]
    kernel = njit(forceinline=True)(_KERNELS[kind](_DEVICES[device], *choices))

    def run(call: Any, geometry: Any, variant: Any) -> None:
        kernel(call, geometry)

    return run


def _kernel(name: str, *choices: Any) -> Callable[..., None]:
    """The Python function of the kernel with these choices, one of `_VARIANTS`. Profilers show its `name`.

    The compiler gets all choices as one literal. Loading a cached kernel then builds none of its functions.
    """
    variant = _VARIANTS.index(choices)

    def kernel(call: Any, geometry: Any) -> None:
        _run(call, geometry, variant)

    kernel.__qualname__ = name
    return kernel


def variant_kernel(
    dtype: str, shared_noise: bool, antithetic: bool, fast_math: bool, store_kind: int, origin_in_memory: bool = False,
    batched: bool = False, *, device: str = "usual",
) -> Callable[..., None]:  # fmt: skip
    """The Python function of a `sample_kernel`. `device` is a result of `device_kind`."""
    names = [dtype, "shared" if shared_noise else "independent", *["antithetic"] * antithetic]
    names += ["fast" if fast_math else "portable", STORE_KINDS[store_kind], *["origin_in_memory"] * origin_in_memory]
    name = "_".join(["sample_kernel", *names, *["batched"] * (origin_in_memory and batched)])
    return _kernel(
        name, "sample", dtype, shared_noise, antithetic, fast_math, store_kind, origin_in_memory, batched, device
    )


def moments_variant(
    real: str, antithetic: bool, fast_math: bool, rows: int, with_second: bool, origin_in_memory: bool, finishing: bool,
    *, device: str = "usual",
) -> Callable[..., None]:  # fmt: skip
    """The Python function of a `moments_kernel`; if `finishing`, of the `finishing_kernel`."""
    flags = {"antithetic": antithetic, "fast": fast_math, "second": with_second, "origin_in_memory": origin_in_memory}
    names = ["moments_kernel", real, str(rows), *(name for name, flag in flags.items() if flag)]
    name = f"finish_moments_kernel_{real}" if finishing else "_".join(names)
    return _kernel(name, "moments", real, antithetic, fast_math, rows, with_second, origin_in_memory, finishing, device)


def perturb_variant(
    dtype: str, fast_math: bool, one_member: bool, strided: bool, origin_in_memory: bool, *, device: str = "usual"
) -> Callable[..., None]:
    """The Python function of a `perturb_kernel`."""
    names = ["perturb_kernel", dtype, "fast" if fast_math else "portable", "strided" if strided else "runs"]
    names += [*["one_member"] * one_member, *["origin_in_memory"] * origin_in_memory]
    return _kernel("_".join(names), "perturb", dtype, fast_math, one_member, strided, origin_in_memory, device)


def advance_kernel() -> Callable[..., None]:
    """The kernel that adds 1 to an offset in memory, to be compiled. It is launched after the kernels that read it."""

    def kernel(counter: Any) -> None:
        cuda_intrinsics.store(counter, np.uint64(cuda_intrinsics.load(counter, np.uint64) + np.uint64(1)))

    kernel.__qualname__ = "advance_kernel"
    return kernel


def launch_bounds(
    dtype: str, shared_noise: bool, antithetic: bool, store_kind: int, capability: tuple[int, int]
) -> tuple[int, int]:
    """Maximum threads of a block, and minimum blocks per multiprocessor.

    The bounds limit the registers of a thread, for a high occupancy, without spills in the loop over rows. Without
    bounds, nvJitLink takes three times as many registers, and up to twice the time.
    """
    name = STORE_KINDS[store_kind]
    if name.startswith("kTransposed"):
        # The thread's dimensions stay in registers through all loops. Before 9.0, nvJitLink compiles shuffles to calls,
        # around which these registers are saved.
        threads = TRANSPOSED_THREADS if name == "kTransposed" else staged_threads(shared_noise)
        if name == "kTransposed" and capability < (9, 0):
            return threads, 384 // threads
        return threads, (512 if dtype == "float64" and not shared_noise else 768) // threads
    if name == "kFewColumns":
        return FEW_THREADS, 5 if antithetic or dtype == "float64" else 8
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


def moments_bounds(real: str, rows: int, with_second: bool) -> tuple[int, int]:
    """`launch_bounds` of the kernels of weighted moments."""
    return MOMENT_THREADS, 2 if real == "float64" else 3 if rows > 1 and with_second else 4


def perturb_bounds(
    dtype: str, one_member: bool, strided: bool, origin_in_memory: bool, capability: tuple[int, int]
) -> tuple[int, int]:
    """`launch_bounds` of the kernels of perturb."""
    if one_member:
        # An SM of capability 7.5 holds 1024 threads. nvJitLink ignores launch bounds above that.
        few = strided or origin_in_memory or dtype == "float64" or capability == (7, 5)
        return PERTURB_THREADS, 4 if few else 6
    return PERTURB_THREADS, 2 if strided or origin_in_memory else 3


def compile_variant(kind: str, *choices: Any) -> Any:
    """The kernel of a kind in `_KERNELS`, compiled for the current device or loaded from the cache.

    `choices` are those of `variant_kernel`, `moments_variant` or `perturb_variant`, without the device.
    """
    capability = cuda.get_current_device().compute_capability
    device = device_kind(capability)
    if kind == "sample":
        dtype, shared_noise, antithetic, _, store_kind, *_ = choices
        bounds = launch_bounds(dtype, shared_noise, antithetic, store_kind, capability)
        return _compiled(variant_kernel(*choices, device=device), SIGNATURE, launch_bounds=bounds)
    if kind == "moments":
        real, _, _, rows, with_second, *_ = choices
        bounds = moments_bounds(real, rows, with_second)
        return _compiled(moments_variant(*choices, device=device), MOMENTS_SIGNATURE, launch_bounds=bounds)
    dtype, _, one_member, strided, origin_in_memory = choices
    bounds = perturb_bounds(dtype, one_member, strided, origin_in_memory, capability)
    return _compiled(perturb_variant(*choices, device=device), perturb_signature(strided), launch_bounds=bounds)


def compile_advance() -> Any:
    """The kernel of `advance_kernel`, compiled for the current device or loaded from the cache."""
    return _compiled(advance_kernel(), ADVANCE_SIGNATURE)


def _compiled(function: Callable[..., None], signature: Any, **options: Any) -> Any:
    dispatcher = cuda.jit(lto=False, opt=True, debug=False, **options)(function)
    name = f"cuda-{function.__qualname__}"
    dispatcher._cache = KernelCache(name, source_digest() + numba_cuda.__version__, _reduce, _rebuild, "numba")
    return dispatcher.compile(signature.args)


def _reduce(kernel: Any) -> Any:
    return kernel._reduce_states()


def _rebuild(target_context: Any, payload: Any) -> Any:
    with numba_target_override():
        return _Kernel._rebuild(**payload)
