"""Array libraries on which the cross-entropy method runs."""

from __future__ import annotations

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


def of_name(name: str) -> Library:
    if name == "numpy":
        return Library(name, np.array, np.asarray, lambda seeds: np.array(seeds, np.uint64))
    if name == "torch":
        tensor = pytest.importorskip("torch").from_numpy
        return Library(
            name, lambda x: tensor(np.array(x)), np.asarray, lambda seeds: tensor(np.array(seeds, np.uint64).view("i8"))
        )
    array = pytest.importorskip("jax").numpy.asarray
    halves = lambda seeds: np.array([[seed >> 32, seed & 0xFFFFFFFF] for seed in seeds], np.uint32)  # noqa: E731
    return Library(name, array, np.asarray, lambda seeds: array(halves(seeds)))


@pytest.fixture(params=["numpy", "torch", "jax"])
def library(request: pytest.FixtureRequest) -> Iterator[Library]:
    library = of_name(request.param)
    scope = contextlib.nullcontext()
    if library.name == "jax":
        jax = pytest.importorskip("jax")
        scope = jax.default_device(jax.devices("cpu")[0])
    with scope:
        yield library


@pytest.fixture(params=["numpy", "torch"])
def array_library(request: pytest.FixtureRequest) -> Library:
    """A library with mutable arrays, and without a compiler."""
    return of_name(request.param)
