"""Tests of JAX run on the CPU and on a GPU that JAX has, with each backend that serves JAX on that device."""

from collections.abc import Iterator
from typing import Any

import pytest

import multisample

jax = pytest.importorskip("jax")


def _devices(platform: str) -> list[Any]:
    try:
        found: list[Any] = jax.devices(platform)
    except RuntimeError:
        return []
    return found


def _served(platform: str, names: tuple[str, ...]) -> list[tuple[str, str]]:
    """The platform with each backend of `names` that it can run."""
    if not _devices(platform):
        return []
    found = []
    for name in names:
        try:
            multisample._backends.choose(name, "jax", platform)
        except (multisample.BackendUnavailableError, ValueError):
            continue
        found.append((platform, name))
    return found


# On the CPU, the backends differ only in the C function that draws. Tests with `jax_place` run "auto" alone.
ON_CPU = {"jax_place": ("auto",), "every_place": ("auto", "torch_ext")}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for fixture in ON_CPU.keys() & metafunc.fixturenames:
        places = [*_served("cpu", ON_CPU[fixture]), *_served("cuda", ("auto", "cupy", "numba", "torch_ext"))]
        metafunc.parametrize(fixture, places, indirect=True, ids=map("-".join, places))


def _place(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a backend, for ``sample(..., backend=every_place)``, with one of its devices as JAX's default."""
    platform, name = request.param
    with jax.default_device(_devices(platform)[0]):
        yield name


every_place, jax_place = pytest.fixture(_place), pytest.fixture(_place)


@pytest.fixture
def x64() -> Iterator[None]:
    """For a test with types of 64 bits."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture
def gpus() -> list[Any]:
    """JAX's CUDA devices. A test is skipped if there are none."""
    return _devices("cuda") or pytest.skip("this JAX has no CUDA device")
