"""The stream in kernels of users on a CUDA device: 10^8 elements each."""

from typing import Any

import numpy as np
import pytest
from skip_rules import require, require_device

import multisample

require_device()

ROWS, COLUMNS = 1000, 102_400
"""A window of 10^8 elements, a multiple of 4 THREADS. It ends at the last row, and crosses column 2^32."""
SEED, OFFSET, FIRST_ROW, FIRST_COLUMN = 2**64 - 3, 2**63 + 5, 2**32 - ROWS, 2**32 - COLUMNS // 2
WINDOW: dict[str, Any] = {
    "seed": multisample.Key(SEED, OFFSET), "dim_offset": FIRST_ROW, "sample_offset": FIRST_COLUMN,
}  # fmt: skip
THREADS = 256
# Keeps z = -0.0, which a mean of 0.0 would turn into 0.0.
MEAN = -0.0

KERNELS = r"""
#include <multisample/normal.h>

typedef unsigned long long u64;

template <class Real>
__device__ void put(Real* at, const multisample::Normals<Real>& z) {
  at[0] = z.z0, at[1] = z.z1, at[2] = z.z2, at[3] = z.z3;
}

#define ELEMENTS(name, Real, function)                                                                        \
  extern "C" __global__ void name(u64 seed, u64 offset, u64 row, u64 column, u64 columns, Real* z) {          \
    const u64 k = u64(blockIdx.x) * blockDim.x + threadIdx.x;                                                 \
    z[k] = multisample::Stream(seed, offset).function(row + k / columns, column + k % columns);              \
  }
#define GROUPS(name, Real, function)                                                                          \
  extern "C" __global__ void name(u64 seed, u64 offset, u64 row, u64 column, u64 columns, Real* z) {          \
    const u64 k = u64(blockIdx.x) * blockDim.x + threadIdx.x, groups = columns / 4;                           \
    put(z + 4 * k, multisample::Stream(seed, offset).function(row + k / groups, column / 4 + k % groups));    \
  }
ELEMENTS(normal, float, normal)
ELEMENTS(normal_f64, double, normal_f64)
ELEMENTS(fast_normal, float, fast_normal)
GROUPS(normals4, float, normals4)
GROUPS(normals4_f64, double, normals4_f64)
GROUPS(fast_normals4, float, fast_normals4)
"""


@pytest.fixture
def cupy() -> Any:
    require("cupy")
    import cupy

    return cupy


@pytest.fixture
def torch() -> Any:
    require("torch_ext")
    import torch

    return torch


@pytest.mark.parametrize("options", [(), ("--use_fast_math",)], ids=["plain", "use_fast_math"])
@pytest.mark.parametrize("kernel", ["normal", "normals4", "normal_f64", "normals4_f64", "fast_normal", "fast_normals4"])
def test_nvrtc(cupy: Any, kernel: str, options: tuple[str, ...]) -> None:
    module = cupy.RawModule(code=KERNELS, options=("-std=c++17", f"-I{multisample.get_include()}", *options))
    dtype, fast = ("float64" if "f64" in kernel else "float32"), kernel.startswith("fast")
    x = multisample.sample(
        cupy.full(ROWS, MEAN, dtype), 1.0, COLUMNS, backend="cupy", dtype=dtype, fast_math=fast, **WINDOW
    )
    z = cupy.empty_like(x)
    arguments = *map(np.uint64, (SEED, OFFSET, FIRST_ROW, FIRST_COLUMN, COLUMNS)), z
    blocks = z.size // (4 if "4" in kernel.removesuffix("_f64") else 1) // THREADS
    module.get_function(kernel)((blocks,), (THREADS,), arguments)
    integer = "u8" if dtype == "float64" else "u4"
    assert bool((z.view(integer) == x.view(integer)).all())


@pytest.fixture
def cuda() -> Any:
    require("numba")
    from numba import cuda

    return cuda


@pytest.mark.parametrize("fastmath", [False, True])
@pytest.mark.parametrize("name", ["normal", "normals4", "normal_f64", "normals4_f64"])
def test_numba(cuda: Any, name: str, fastmath: bool) -> None:
    function = getattr(multisample.numba, name)

    def elements(seed, offset, row, column, columns, z):  # type: ignore[no-untyped-def]
        k = cuda.grid(1)
        z[k] = function(seed, offset, row + k // columns, column + k % columns)

    def groups(seed, offset, row, column, columns, z):  # type: ignore[no-untyped-def]
        k = cuda.grid(1)
        per_row = columns // 4
        z0, z1, z2, z3 = function(seed, offset, row + k // per_row, column // 4 + k % per_row)
        z[4 * k] = z0
        z[4 * k + 1] = z1
        z[4 * k + 2] = z2
        z[4 * k + 3] = z3

    dtype = np.dtype("float64" if "f64" in name else "float32")
    kernel = cuda.jit(groups if "4" in name.removesuffix("_f64") else elements, fastmath=fastmath)
    z = cuda.device_array(ROWS * COLUMNS, dtype)
    blocks = z.size // (4 if "4" in name.removesuffix("_f64") else 1) // THREADS
    kernel[blocks, THREADS](np.uint64(SEED), np.uint64(OFFSET), FIRST_ROW, FIRST_COLUMN, COLUMNS, z)
    mean = cuda.to_device(np.full(ROWS, MEAN, dtype))
    x = multisample.sample(mean, 1.0, COLUMNS, backend="numba", dtype=dtype.name, **WINDOW)
    integer = f"u{dtype.itemsize}"
    assert np.array_equal(z.copy_to_host().view(integer), x.copy_to_host().view(integer).ravel())


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "not fused"])
def test_triton(torch: Any, fused: bool) -> None:
    pytest.importorskip("triton")
    import triton_kernels

    x = multisample.sample(torch.full((ROWS,), MEAN, device="cuda"), 1.0, COLUMNS, backend="torch_ext", **WINDOW)
    for kernel, per_program in ((triton_kernels.elements, 1024), (triton_kernels.groups, 4 * 1024)):
        z = torch.empty_like(x)
        kernel[ROWS, -(-COLUMNS // per_program)](
            SEED, OFFSET, FIRST_ROW, FIRST_COLUMN, COLUMNS, z, 1024, enable_fp_fusion=fused
        )
        assert torch.equal(z.view(torch.int32), x.view(torch.int32))
        # A fused addition would have other bits.
        shifted = torch.empty_like(x)
        kernel[ROWS, -(-COLUMNS // per_program)](
            SEED, OFFSET, FIRST_ROW, FIRST_COLUMN, COLUMNS, shifted, 1024, 0.7, enable_fp_fusion=fused
        )
        assert torch.equal(shifted.view(torch.int32), (x + np.float32(0.7)).view(torch.int32))
