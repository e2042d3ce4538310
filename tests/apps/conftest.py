"""Array libraries on which the cross-entropy method runs."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest


class Library(NamedTuple):
    """Operations of the tests on the arrays of a library."""

    name: str
    array: Callable[[Any], Any]
    to_numpy: Callable[[Any], np.ndarray[Any, Any]]
    seeds: Callable[[list[int]], Any]


@pytest.fixture(params=["numpy", "torch", "jax"])
def library(request: pytest.FixtureRequest) -> Iterator[Library]:
    name, scope = request.param, contextlib.nullcontext()
    if name == "numpy":
        library = Library(name, np.array, np.asarray, lambda seeds: np.array(seeds, np.uint64))
    elif name == "torch":
        tensor = pytest.importorskip("torch").from_numpy
        seeds = lambda seeds: tensor(np.array(seeds, np.uint64))  # noqa: E731
        library = Library(name, lambda x: tensor(np.array(x)), np.asarray, seeds)
    else:
        jax = pytest.importorskip("jax")
        scope = jax.default_device(jax.devices("cpu")[0])
        halves = lambda seeds: np.array([[seed >> 32, seed & 0xFFFFFFFF] for seed in seeds], np.uint32)  # noqa: E731
        library = Library(name, jax.numpy.asarray, np.asarray, lambda seeds: jax.numpy.asarray(halves(seeds)))
    with scope:
        yield library
