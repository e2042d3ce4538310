"""Random batches: each matrix has the bits of its own call.

``MULTISAMPLE_TEST_BATCHES=100000 pytest -m slow tests/call/test_random_batches.py`` draws as many batches on the CPU,
and as many on the GPU if there is one.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cuda_memory import require
from seed_forms import key_arrays
from tables import DTYPES

import multisample
from multisample.backends import registry

Array = np.ndarray[Any, Any]
BATCHES = int(os.environ.get("MULTISAMPLE_TEST_BATCHES", "4000"))
# Libraries with their backends. Those of one device share its batches.
ON_HOST = [("numpy", "auto", "cpu"), ("torch", "auto", "cpu")]
ON_GPU = [("torch", "torch_ext"), ("torch", "cupy"), ("torch", "numba")]


def on_gpu(array: Array) -> Any:
    """A tensor on the GPU, with the strides of `array`."""
    torch = sys.modules["torch"]
    tensor = torch.from_numpy(array)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda").copy_(tensor)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)  # Each part compiles kernels of its own.
@pytest.mark.parametrize("names", ON_HOST + ON_GPU, ids=" ".join)
def test_each_matrix_of_a_random_batch_has_the_bits_of_its_own_call(
    names: tuple[str, ...], dtype: str, bits: Any
) -> None:
    (library, *backends), fellows = names, ON_GPU if names in ON_GPU else ON_HOST
    place: Any = np.asarray
    if library == "torch":
        torch = pytest.importorskip("torch")
        place = torch.from_numpy
    if fellows is ON_GPU:
        require(backends[0])
        place = on_gpu
    elif library == "torch" and registry.find("torch_ext").status().reasons:
        backends = ["cpu"]

    def same(a: Any, b: Any) -> bool:
        if place is np.asarray:
            return bool(np.array_equal(bits(a), bits(b)))
        integer = getattr(torch, f"int{8 * a.element_size()}")
        return bool(torch.equal(a.view(integer), b.view(integer)))

    draw, source = random.Random(f"{names} {dtype}"), np.random.default_rng(len(dtype))
    for _ in range(max(BATCHES // (len(fellows) * len(DTYPES)), 1)):
        check_random_batch(place, draw, source, draw.choice(backends), dtype, same)


def strided(shape: tuple[int, ...], dtype: str, draw: random.Random) -> Array:
    """Zeros of this shape: contiguous, or with gaps, and with the axes of vectors and of a matrix in any order."""
    if draw.random() < 0.5:
        return np.zeros(shape, dtype)
    order = draw.sample(range(len(shape)), len(shape))
    if len(shape) == 3:  # Matrices one after another.
        order = [0, *draw.sample([1, 2], 2)]
    steps = [draw.choice([1, 1, 2]) for _ in shape]
    base = np.zeros([shape[axis] * steps[axis] + draw.randrange(2) for axis in order], dtype).transpose(
        np.argsort(order)
    )
    return base[tuple(slice(0, size * step, step) for size, step in zip(shape, steps, strict=True))]


def check_random_batch(
    place: Any, draw: random.Random, source: Any, backend: str, dtype: str, same: Callable[[Any, Any], bool]
) -> None:
    batch, d = draw.randrange(9), draw.choice([0, 1, 1, 2, 3, 5, 8, 17])
    n = draw.choice([0, 1, 1, 2, 3, 4, 7, 16, 33, 64, 130])
    if draw.random() < 0.01:
        n = 9000  # Several threads share such a batch.
    real = "float64" if dtype == "float64" else draw.choice(["float32", "float16", "float64"])
    vectors: list[Any] = []
    for low in (-2.0, 0.0):
        shape = draw.choice(
            [(batch, d), (batch, d), (d,), None if len(vectors) == 0 or vectors[0] is not None else (d,)]
        )
        if shape is None:
            vectors.append(None)
            continue
        vector = strided(shape, real, draw)
        vector[...] = source.uniform(low, 2.0, shape)
        vectors.append(place(vector))
    number = draw.uniform(0, 2)
    vectors = [number if x is None else x for x in vectors]
    forms = key_arrays(batch, draw)
    seed, keys = draw.choice([form for form in forms if batch or not isinstance(form[0], tuple)])
    if isinstance(seed, np.ndarray) and draw.random() < 0.5:
        seed = place(seed)
    options: dict[str, Any] = {
        "dtype": dtype, "layout": draw.choice(["dn", "nd"]), "backend": backend, "antithetic": draw.random() < 0.4,
        "noise": draw.choice(["independent", "shared"]), "dim_offset": draw.choice([0, 0, draw.randrange(2**32 - 32)]),
        "sample_offset": draw.choice([0, 0, draw.randrange(99), draw.randrange(2**34 - 10000)]),
    }  # fmt: skip
    shape = (batch, d, n) if options["layout"] == "dn" else (batch, n, d)
    out = None
    if draw.random() < 0.4 and (dtype != "bfloat16" or place is not np.asarray):
        out = place(strided(shape, "int16" if dtype == "bfloat16" else dtype, draw))
        if dtype == "bfloat16":
            out = out.view(sys.modules["torch"].bfloat16)
    whole = multisample.sample(*vectors, n, seed=seed, out=out, **options)
    assert tuple(whole.shape) == shape
    assert out is None or whole is out
    for b in range(batch):
        own = [x if isinstance(x, float) else x[b] if x.ndim == 2 else x for x in vectors]
        alone = multisample.sample(*own, n, seed=keys[b], **options)
        assert same(whole[b], alone), (batch, d, n, b, seed, options, vectors, out is None)
