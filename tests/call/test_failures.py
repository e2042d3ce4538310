"""After an error no generator has advanced, on every route of a call. test_arguments.py has the tests of `out`."""

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import launches
import numpy as np
import pytest
import torch
from fake_backend import FakeBackend

import multisample
from multisample import BackendUnavailableError, Generator, sample
from multisample.backends import registry
from multisample.backends.kernels.cpu import kernel as cpu_kernels
from multisample.backends.native import library_cache

pytestmark = pytest.mark.usefixtures("new_choices")

D, N = 3, 7
# A matrix of 256 TiB, which no machine can allocate: 2**34 columns of 4096 rows.
TOO_MANY, TOO_HIGH = 2**34, 4096


def numpy_vectors(d: int) -> tuple[Any, Any]:
    return np.zeros(d, np.float32), np.ones(d, np.float32)


def torch_vectors(d: int) -> tuple[Any, Any]:
    return torch.zeros(d), torch.ones(d)


def recorded_vectors(d: int) -> tuple[Any, Any]:
    return torch.zeros(d, requires_grad=True), torch.ones(d)


def by(vectors: Callable[[int], tuple[Any, Any]], backend: str) -> Callable[..., Any]:
    return lambda d, n, **options: sample(*vectors(d), n, backend=backend, **options)


def differentiated(d: int, n: int, **options: Any) -> Any:
    """A call that PyTorch transforms."""
    mu, sigma = torch_vectors(d)
    return torch.func.vjp(lambda mu: sample(mu, sigma, n, **options), mu)[0]


ROADS: dict[str, Callable[..., Any]] = {
    "by_numpy": by(numpy_vectors, "cpu"),
    "by_lists": by(lambda d: ([0.0] * d, [1.0] * d), "cpu"),
    "by_torch": by(torch_vectors, "torch_ext"),
    "by_torch_on_numba": by(torch_vectors, "cpu"),
    "by_numpy_on_torch": by(numpy_vectors, "torch_ext"),
    "recorded": by(recorded_vectors, "auto"),
    "by_normal": lambda d, n, **options: multisample.torch.Normal(*recorded_vectors(d), **options).rsample((n,)),
    "differentiated": differentiated,
}


class Sources:
    """Every generator from which a call can take an offset."""

    def __init__(self, road: str) -> None:
        torch.manual_seed(3)
        self.own, self.torch = Generator(5), torch.Generator().manual_seed(4)
        self.options: list[dict[str, Any]] = [{}, {"generator": self.own}]
        if road in {"by_torch", "by_torch_on_numba", "recorded", "differentiated", "by_normal"}:
            self.options.append({"generator": self.torch})

    def states(self) -> list[Any]:
        default = multisample._randomness.generator.DEFAULT_GENERATOR
        of_torch = [source.get_state().tolist() for source in (self.torch, torch.default_generator)]
        return [self.own.state, default.state, *of_torch]


def check_refused(road: str, d: int, n: int, error: Any, match: str, **more: Any) -> None:
    """Check that the call fails with each generator and changes nothing."""
    sources = Sources(road)
    for options in sources.options:
        before = sources.states()
        with pytest.raises(error, match=match):
            ROADS[road](d, n, **options, **more)
        assert sources.states() == before, options


@pytest.mark.parametrize("road", ROADS)
def test_an_allocation_failure_changes_nothing(road: str) -> None:
    ROADS[road](D, N)  # Compile the kernels.
    for _ in range(2):
        check_refused(road, TOO_HIGH, TOO_MANY, (MemoryError, RuntimeError), "(?i)alloc")


@pytest.mark.parametrize("road", ROADS)
def test_a_failure_to_compile_changes_nothing(road: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise BackendUnavailableError("backend: 'torch_ext' could not be built: the compiler is on fire")

    for cached in (cpu_kernels.window_kernel, cpu_kernels.value_kernel):
        cached.cache_clear()
    monkeypatch.setattr(cpu_kernels, "compile_cached", fail)
    for name in ("_cpu", "_cuda"):
        monkeypatch.setattr(registry.find("torch_ext"), name, None)
    monkeypatch.setattr(library_cache, "libraries", fail)
    # Calls with "auto" take another backend, which records no gradient.
    expected = ValueError if road in ("recorded", "by_normal", "differentiated") else BackendUnavailableError
    check_refused(road, D, 29, expected, "the compiler is on fire|torch_ext")
    if road == "by_numpy":
        out = np.full((D, 29), 77, np.float32)
        with pytest.raises(BackendUnavailableError, match="on fire"):
            ROADS[road](D, 29, out=out)
        assert (out == 77).all()


@pytest.fixture(params=["builtins", "python"])
def broken_torch_ext(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the kernels of torch_ext return errors."""
    for road in ("by_torch", "by_numpy_on_torch"):  # The CPU library, and the CUDA library if there is a GPU.
        ROADS[road](D, N)
    backend: Any = registry.find("torch_ext")

    class Broken:
        multisample_is_valid_cpu = backend._cpu.multisample_is_valid_cpu
        multisample_has_unit = staticmethod(lambda unit: True)
        multisample_run_cpu = multisample_run_cuda = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda draw: 1)

        def multisample_cuda_error(self, *error: int) -> bytes:
            return b"no memory for the sums"

    monkeypatch.setattr(backend, "_cpu", Broken())
    if backend._cuda is not None:
        monkeypatch.setattr(backend, "_cuda", Broken())
    with launches.without_builtins() if request.param == "python" else contextlib.nullcontext():
        yield


@pytest.mark.usefixtures("broken_torch_ext")
@pytest.mark.parametrize("road", ["by_torch", "by_numpy_on_torch", "recorded", "by_normal"])
def test_a_failed_launch_puts_the_offset_back_into_our_generators(road: str) -> None:
    sources = Sources(road)
    for n in (41, 41):
        before = sources.states()
        with pytest.raises((MemoryError, RuntimeError), match="no memory for the sums"):
            ROADS[road](D, n, generator=sources.own)
        assert sources.states() == before
    if road == "by_numpy_on_torch":
        with pytest.raises((MemoryError, RuntimeError), match="no memory for the sums"):
            ROADS[road](D, 41)
        assert sources.states() == before


def test_an_offset_is_not_put_back_after_another_call_has_taken_one(registered: Callable[[Any], Any]) -> None:
    generator = Generator(5)

    class Meanwhile(FakeBackend):
        """A backend whose launch takes another offset, as a concurrent call does, and then fails."""

        def launch(self, draw: Any) -> None:
            generator.take()
            raise RuntimeError("too late")

    registered(Meanwhile("meanwhile"))
    with pytest.raises(RuntimeError, match="too late"):
        sample(*numpy_vectors(D), N, backend="meanwhile", generator=generator)
    assert generator.offset == 2
