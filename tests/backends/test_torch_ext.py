"""CPU tensors of torch_ext, and the reasons why the backend cannot run."""

import importlib.metadata
import importlib.resources
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cuda_memory import ExportedByDlpack
from forks import forked, in_forks

import multisample
from multisample.backends import registry
from multisample.backends.native import library_cache

Array = np.ndarray[Any, Any]

pytestmark = pytest.mark.skipif(not registry.find("torch_ext").status().available, reason="torch_ext cannot be built")


@forked
def test_large_results_use_all_threads_also_in_forked_children(bits: Callable[[Any], Array]) -> None:
    mu, sigma = (torch.from_numpy(x.astype(np.float32)) for x in (np.linspace(-3, 3, 700), np.linspace(0, 2, 700)))
    expected = bits(multisample.sample(mu.numpy(), sigma.numpy(), 3001, backend="cpu", seed=4))

    def is_right() -> bool:
        return np.array_equal(bits(multisample.sample(mu, sigma, 3001, backend="torch_ext", seed=4)), expected)

    assert is_right()
    assert in_forks(is_right) == [True]


def test_the_reason_names_a_missing_or_old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = registry.find("torch_ext")
    version = importlib.metadata.version
    for old in ("2.10.1", "1.13.0+cu117"):
        stated = lambda name, old=old: old if name == "torch" else version(name)  # noqa: E731
        monkeypatch.setattr(importlib.metadata, "version", stated)
        status = backend.status()
        assert not status.available
        assert "pip install --upgrade 'torch>=2.11'" in status.reasons[0]

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert backend.status().reasons == ("package torch is not installed: pip install 'torch>=2.11'",)


def test_auto_takes_cpu_if_the_build_fails(monkeypatch: Any, bits: Callable[[Any], Array], new_choices: None) -> None:
    def fail(*kinds: Any, **options: Any) -> Any:
        raise multisample.BackendUnavailableError("backend: 'torch_ext' could not be built: no such luck")

    backend = registry.find("torch_ext")
    monkeypatch.setattr(backend, "_cpu", None)
    monkeypatch.setattr(library_cache, "libraries", fail)
    mu, sigma = torch.zeros(3), torch.ones(3)
    got = multisample.sample(mu, sigma, 5, seed=1)
    assert np.array_equal(bits(got), bits(multisample.sample(mu, sigma, 5, seed=1, backend="cpu")))
    generator = multisample.Generator(1)
    with pytest.raises(multisample.BackendUnavailableError, match="no such luck"):
        multisample.sample(mu, sigma, 5, generator=generator, backend="torch_ext")
    assert generator.offset == 0


def test_dlpack_arrays_with_negative_strides_raise() -> None:
    """PyTorch would abort the process."""
    backwards = np.arange(5, dtype=np.float32)[::-1]
    interface = types.SimpleNamespace(__cuda_array_interface__={**backwards.__array_interface__, "version": 3})
    adopt = registry.find("torch_ext").adopt
    for array in (ExportedByDlpack(backwards), interface):
        with pytest.raises(BufferError, match="negative strides"):
            adopt(array)
    assert adopt(ExportedByDlpack(backwards[::-1])).tolist() == [0, 1, 2, 3, 4]


def test_bfloat16_arrays_are_shared_without_ml_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    values = torch.arange(3, dtype=torch.bfloat16)
    owner: Any = types.SimpleNamespace(__dlpack__=values.__dlpack__, __dlpack_device__=values.__dlpack_device__)
    shared = registry.find("torch_ext").adopt(owner)
    assert shared.dtype == torch.bfloat16 and shared.data_ptr() == values.data_ptr()
