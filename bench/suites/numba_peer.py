"""The kernel that people write with `numba.cuda.random`: xoroshiro128+ and Box-Muller, with a state for each thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda
from numba.cuda.random import create_xoroshiro128p_states, xoroshiro128p_normal_float32

THREADS, BLOCKS_OF_A_MULTIPROCESSOR = 256, 8


@cuda.jit
def draw(states, mu, sigma, out):  # type: ignore[no-untyped-def]
    first = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
    state = first * cuda.blockDim.x + cuda.threadIdx.x
    for i in range(first, out.shape[0], cuda.gridDim.x * cuda.blockDim.y):
        for j in range(cuda.threadIdx.x, out.shape[1], cuda.blockDim.x):
            out[i, j] = mu[i] + sigma[i] * xoroshiro128p_normal_float32(states, state)


def start(mu: Any, sigma: Any, n: int) -> Callable[[Any], None]:
    """A function that fills an array of shape (d, n), on the default stream."""
    width = min(THREADS, 1 << (n - 1).bit_length())
    rows = THREADS // width
    blocks = min(-(-len(mu) // rows), BLOCKS_OF_A_MULTIPROCESSOR * cuda.get_current_device().MULTIPROCESSOR_COUNT)
    states = create_xoroshiro128p_states(blocks * THREADS, seed=7)
    kernel, vectors = draw[blocks, (width, rows)], [cuda.as_cuda_array(vector) for vector in (mu, sigma)]
    return lambda out: kernel(states, *vectors, cuda.as_cuda_array(out, sync=False))
