"""The backend of a call: a named backend runs or raises. "auto" takes the first backend of a fixed order that runs."""

import dataclasses
import importlib.metadata
import importlib.util
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from fake_backend import FakeBackend

import multisample
from multisample import BackendStatus, BackendUnavailableError, UnknownBackendError, _backends, sample
from multisample._libraries.library import NOUNS
from multisample._plan import PLANS, PlanCache
from multisample.backends import registry
from multisample.backends.contract import Backend
from multisample.backends.launch import Launch
from multisample.backends.memory.host import arrays_at

MEMBERS = {name for name in (*vars(Backend), *Backend.__annotations__) if not name.startswith("_") and name != "mro"}


class Fake(FakeBackend):
    """A backend for all memory that draws one number."""

    device_kinds = ("cpu", "cuda")

    def launch(self, draw: Launch) -> None:
        arrays_at(draw)["matrix"][...] = 77


@pytest.fixture(autouse=True)
def restored(registered: Callable[[Any], Any]) -> None:
    """Restore the registry after every test."""


@pytest.fixture
def pretend() -> Callable[..., Fake]:
    """``pretend(name, *reasons)``: registers a fake backend, in place of a backend with this name."""

    def pretend(name: str, *reasons: str) -> Fake:
        fake = registry._registered[name] = Fake(name, *reasons)
        return fake

    return pretend


def test_list_backends_gives_the_status_of_every_backend(pretend: Callable[..., Fake]) -> None:
    pretend("cupy")
    pretend("numba", "no CUDA device: install a driver", "package missing: pip install numba-cuda")
    statuses = multisample.list_backends()
    assert statuses["cupy"] == BackendStatus(True, (), "1.2", "a stand-in")
    reasons = "no CUDA device: install a driver", "package missing: pip install numba-cuda"
    assert statuses["numba"] == BackendStatus(False, reasons, "", "")
    status = statuses["cpu"]
    assert (status.available, status.reasons) == (True, ())
    assert "numba" in status.version and "thread" in status.device
    with pytest.raises(dataclasses.FrozenInstanceError):
        status.available = False


def test_the_reason_for_a_missing_package_has_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec, version = importlib.util.find_spec, importlib.metadata.version

    def version_but_not_of_numba(name: str) -> str:
        if name == "numba":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "numba" else find_spec(name))
    monkeypatch.setattr(importlib.metadata, "version", version_but_not_of_numba)
    status = multisample.list_backends()["cpu"]
    assert not status.available
    assert any("numba is not installed: pip install numba" in reason for reason in status.reasons)
    for call in (lambda: sample([0.0], [1.0], 2), lambda: sample(np.zeros(2), np.ones(2), 2, backend="cpu")):
        with pytest.raises(BackendUnavailableError, match="pip install numba"):
            call()


def test_the_error_for_an_unknown_name_lists_registered_names(pretend: Callable[..., Fake]) -> None:
    pretend("abacus", "no beads")
    with pytest.raises(UnknownBackendError, match=r"^backend: .*'tpu'; accepted are 'auto', .*'cpu'.*'abacus'") as e:
        sample([0.0], [1.0], 2, backend="tpu")
    assert issubclass(UnknownBackendError, ValueError)
    assert str(pickle.loads(pickle.dumps(e.value))) == str(e.value)  # A process pool returns the error.


@pytest.mark.parametrize("convert", [np.array, list, torch.tensor])
def test_a_named_backend_that_cannot_run_gives_every_reason(pretend: Callable[..., Fake], convert: Any) -> None:
    fake, generator = pretend("abacus", "no beads: buy some", "no fingers: grow some"), multisample.Generator(1)

    def draw() -> Any:
        return sample(convert([0.0, 1.0]), convert([1.0, 1.0]), 2, backend="abacus", generator=generator)

    for _ in range(2):
        with pytest.raises(BackendUnavailableError, match=r"^backend: 'abacus' .*no beads: buy.*no fingers: grow") as e:
            draw()
        assert isinstance(e.value, RuntimeError)
    assert generator.offset == 0
    fake.reasons, before = (), fake.status_calls
    for _ in range(5):
        assert (draw() == 77).all()
    assert fake.status_calls == before + 1  # The status is cached after a choice.


def test_a_named_backend_that_does_not_serve_the_memory_raises_a_value_error(pretend: Callable[..., Fake]) -> None:
    pretend("abacus").device_kinds = ("cuda",)
    with pytest.raises(ValueError, match=r"^backend: 'abacus' serves cuda memory, got a PyTorch tensor in cpu memory"):
        sample(torch.zeros(1), torch.ones(1), 2, backend="abacus")


ORDER = {
    ("torch", "cuda"): ("torch_ext", "cupy", "numba"), ("torch", "cpu"): ("torch_ext", "cpu"),
    ("cupy", "cuda"): ("cupy", "numba", "torch_ext"), ("numba", "cuda"): ("numba", "cupy", "torch_ext"),
    ("jax", "cuda"): ("cupy", "numba", "torch_ext"), ("foreign", "cuda"): ("cupy", "numba", "torch_ext"),
    ("jax", "cpu"): ("cpu",), ("foreign", "cpu"): ("cpu",), ("numpy", "cpu"): ("cpu",),
}  # fmt: skip


@pytest.mark.parametrize(("library", "device_kind"), ORDER)
def test_auto_takes_the_first_available_backend(pretend: Callable[..., Fake], library: str, device_kind: str) -> None:
    order = ORDER[library, device_kind]
    pretend("abacus")  # A third party's backend, which "auto" ignores.
    for available in itertools.product((True, False), repeat=len(order)):
        _backends.forget()
        for name in ("torch_ext", "cupy", "numba", "cpu"):
            pretend(name)
        for name, can_run in zip(order, available, strict=True):
            pretend(name, *([] if can_run else [f"no {name} today", "and none tomorrow"]))
        if any(available):
            chosen = _backends.choose("auto", library, device_kind)
            assert chosen.name == order[available.index(True)]
            continue
        with pytest.raises(BackendUnavailableError) as caught:
            _backends.choose("auto", library, device_kind)
        message = str(caught.value)
        assert message.startswith(f"backend: none can serve {NOUNS[library]} in {device_kind} memory")
        places = [message.index(f"'{name}' cannot run here: no {name} today; and none tomorrow") for name in order]
        assert places == sorted(places)


def test_a_call_uses_the_choice_of_auto(pretend: Callable[..., Fake]) -> None:
    pretend("torch_ext")
    assert (sample(torch.zeros(2), torch.ones(2), 3) == 77).all()
    assert not (sample(np.zeros(2), np.ones(2), 3) == 77).any()
    expected = sample(np.zeros(2), np.ones(2), 3, seed=1)
    pretend("torch_ext", "no compiler")
    _backends.forget()
    np.testing.assert_array_equal(sample(torch.zeros(2).double(), torch.ones(2), 3, seed=1).numpy(), expected)


def test_a_registered_backend_is_listed_and_used_and_no_plan_stays() -> None:
    for _ in range(2):
        sample([0.0], [1.0], 2)
        with pytest.raises(UnknownBackendError):
            sample([0.0], [1.0], 2, backend="abacus")
    assert len(PLANS) > 0
    multisample.register_backend(Fake("abacus"))
    assert [len(cache) for cache in PlanCache.every] == [0] * len(PlanCache.every)
    assert multisample.list_backends()["abacus"].version == "1.2"
    for _ in range(2):
        assert (sample([0.0], [1.0], 2, backend="abacus") == 77).all()


def changed(attribute: str, value: object) -> Any:
    backend = Fake("new")
    setattr(backend, attribute, value)
    return backend


def lacking(member: str) -> Any:
    class Lacking(Fake):
        def __getattribute__(self, attribute: str) -> Any:
            if attribute == member:
                raise AttributeError(attribute)
            return super().__getattribute__(attribute)

    return Lacking("new")


REFUSED: list[tuple[Any, type[Exception], str]] = [
    *((Fake(name), ValueError, rf"{name!r} is taken; .*cpu.*abacus.*'auto'") for name in ("cpu", "auto", "abacus")),
    *(
        (lacking(member), TypeError, rf"^backend: expected .*{member}.*, got .*without {member}$")
        for member in sorted(MEMBERS)
    ),
    *(
        (changed("protocol", version), TypeError,
         rf"^backend: expected one that follows version 2 of the protocol, got protocol = {version!r}$")
        for version in (1, 3, None)
    ),
    *(
        (nothing, TypeError, "^backend: ")
        for nothing in (None, 3, "cpu", object, type("Class", (Fake,), {"name": "new"}))
    ),
    (changed("name", None), TypeError, "name"), (changed("name", ""), TypeError, "name"),
    (changed("host_library", "nowhere"), ValueError, "nowhere"),
]  # fmt: skip


@pytest.mark.parametrize(("refused", "error", "message"), REFUSED, ids=map(str, range(len(REFUSED))))
def test_registering_an_unusable_backend_raises_and_changes_nothing(refused: Any, error: Any, message: str) -> None:
    multisample.register_backend(Fake("abacus"))
    before = dict(registry._registered), registry.names()
    with pytest.raises(error, match=message):
        multisample.register_backend(refused)
    assert (dict(registry._registered), registry.names()) == before


def test_a_built_in_name_is_taken_before_its_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    with pytest.raises(ValueError, match="'cpu' is taken"):
        multisample.register_backend(Fake("cpu"))
    assert registry.find("cpu").status().available


def test_the_contract_has_exactly_the_required_members() -> None:
    attributes = {"protocol", "name", "device_kinds", "host_library", "operations"}
    assert attributes | {"status", "prepare", "adopt", "launch", "advancer"} == MEMBERS


def test_values_are_checked_for_a_backend_that_does_not_check_them() -> None:
    multisample.register_backend(FakeBackend("abacus"))
    weights = np.array([1, np.inf, 1], np.float32)
    with pytest.raises(ValueError, match=r"^sigma: .*sigma\[1\] = -1"):
        sample([0.0, 0.0], [1.0, -1.0], 3, seed=1, backend="abacus")
    with pytest.raises(ValueError, match=r"^weights: .*weights\[1\] = inf"):
        multisample.weighted_moments(weights, np.zeros(2, np.float32), 1.0, seed=1, backend="abacus")
