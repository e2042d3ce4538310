"""PyTorch's generators determine the numbers, and a restored state draws them again."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forks import forked
from processes import run_python
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from multisample import Generator, Key, cem, sample
from multisample.torch import take_key

D, N = 5, 7


@pytest.fixture(params=["plain", "recorded", "nd", "transformed"])
def draw(request: pytest.FixtureRequest, torch_device: str) -> Callable[..., torch.Tensor]:
    """A call with PyTorch's randomness, on each route."""
    mu, sigma = torch.linspace(-2, 3, D, device=torch_device), torch.linspace(0.5, 2, D, device=torch_device)
    if request.param == "recorded":
        mu.requires_grad_()

    def draw(**options: Any) -> torch.Tensor:
        if request.param == "nd":
            options["layout"] = "nd"
        if request.param == "transformed":
            batch = mu.expand(1, D)
            return torch.func.vmap(lambda mu: sample(mu, sigma, N, **options), randomness="different")(batch)[0]
        return sample(mu, sigma, N, **options).detach()

    return draw


def all_differ(*samples: torch.Tensor) -> bool:
    return len({x.cpu().numpy().tobytes() for x in samples}) == len(samples)


@pytest.mark.parametrize("source", ["manual_seed", "generator", "rng_state"])
def test_a_source_that_is_set_back_draws_equal_numbers(draw: Any, torch_device: str, source: str) -> None:
    options: dict[str, Any] = {}
    if source == "manual_seed":
        reset: Any = functools.partial(torch.manual_seed, 3)
    elif source == "generator":
        options["generator"] = generator = torch.Generator(torch_device).manual_seed(3)
        reset = functools.partial(generator.set_state, generator.get_state())
    else:
        random: Any = torch.cuda if torch_device == "cuda" else torch
        draw()
        reset = functools.partial(random.set_rng_state, random.get_rng_state())
    reset()
    first = [draw(**options) for _ in range(3)]
    reset()
    assert all(torch.equal(x, draw(**options)) for x in first)
    assert all_differ(*first, draw(**options))
    torch.manual_seed(4)
    assert all_differ(*first, draw(**options))


def loss_and_gradients(device: str, run: Callable[..., Any]) -> list[torch.Tensor]:
    """The loss and the gradients of two layers that draw. `run` runs a layer, and may recompute it."""
    torch.manual_seed(5)
    mu = torch.linspace(-2, 3, D, device=device, requires_grad=True)
    log_sigma = torch.linspace(-1, 1, D, device=device, requires_grad=True)

    def layer(mu: torch.Tensor, log_sigma: torch.Tensor) -> torch.Tensor:
        return torch.tanh(sample(mu, log_sigma.exp(), N)).mean(1)

    loss = run(layer, run(layer, mu, log_sigma), log_sigma).square().sum()
    sample(mu.detach(), 1.0, N)  # Change the generator's state before the backward pass.
    loss.backward()  # Reentrant checkpoints do not support torch.autograd.grad.
    return [loss.detach(), mu.grad, log_sigma.grad]


def selective(policy: CheckpointPolicy) -> dict[str, Any]:
    contexts = functools.partial(create_selective_checkpoint_contexts, lambda *_, **__: policy)
    return {"use_reentrant": False, "context_fn": contexts}


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "reentrant": {"use_reentrant": True}, "not reentrant": {"use_reentrant": False},
    "stored": selective(CheckpointPolicy.MUST_SAVE), "recomputed": selective(CheckpointPolicy.PREFER_RECOMPUTE),
}  # fmt: skip


@pytest.mark.parametrize("options", CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_stored_and_recomputed_activations_have_equal_numbers(torch_device: str, options: dict[str, Any]) -> None:
    draws = []

    def counted(layer: Any, *inputs: Any) -> Any:
        draws.append(1)
        return layer(*inputs)

    got = loss_and_gradients(torch_device, lambda layer, *inputs: checkpoint(counted, layer, *inputs, **options))
    expected = loss_and_gradients(torch_device, lambda layer, *inputs: layer(*inputs))
    assert len(draws) == 4
    assert all(map(torch.equal, got, expected))


LOAD = """
saved = torch.load("checkpoint.pt")
assert saved["key"] == multisample.Key(7, 2**64 - 1) and type(saved["key"]) is multisample.Key
assert saved["generator"].state == saved["state"] == {"seed": 2**64 - 1, "offset": 1, "spawned": 2}
assert saved["graph safe"].graph_safe and not saved["generator"].graph_safe
search = multisample.cem.CEM(torch.zeros(3), 1.0, 50, seed=[0, 0])
search.state = saved["search"]
assert torch.equal(search.ask(), saved["samples"])
"""


@pytest.mark.parametrize("imports", ["import multisample.torch, torch", "import torch, multisample"])
def test_torch_load_accepts_keys_generators_and_searches(tmp_path: Path, imports: str) -> None:
    generator, search = Generator(2**64 - 1), cem.CEM(torch.zeros(3), 2.0, 50, seed=[7, 2**64 - 1])
    generator.take()
    generator.spawn(2)
    samples = search.ask()
    search.tell(samples, samples.square().sum(1))
    saved = {
        "key": Key(7, 2**64 - 1), "generator": generator, "graph safe": Generator(7, graph_safe=True),
        "state": generator.state, "search": search.state, "samples": search.ask(),
    }  # fmt: skip
    assert {type(x) for x in saved["search"].values()} == {torch.Tensor}
    torch.save(saved, tmp_path / "checkpoint.pt")
    run_python("-c", f"{imports}\n{LOAD}", folder=tmp_path)


def test_take_key_returns_the_key_that_a_call_would_take(torch_device: str) -> None:
    mu, sigma = torch.zeros(3, device=torch_device), torch.ones(3, device=torch_device)
    generator = torch.Generator(torch_device)
    for source in (generator, None):
        manual_seed: Any = torch.manual_seed if source is None else source.manual_seed
        manual_seed(2**63 + 5)
        keys = [take_key(source, torch_device if source is None else None) for _ in range(3)]
        assert len(set(keys)) == 3
        manual_seed(2**63 + 5)
        for key in keys:
            expected = sample(mu, sigma, 40, generator=source)
            assert torch.equal(sample(mu, sigma, 40, seed=key), expected)


def test_take_key_uses_the_default_device() -> None:
    torch.manual_seed(1)
    key = take_key()
    torch.manual_seed(1)
    assert take_key(device="cpu") == take_key(torch.Generator().manual_seed(1)) == key


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"generator": 3}, TypeError, "^generator: expected a torch.Generator, got 3 of type int"),
    ({"device": "meta"}, ValueError, "^device: expected a CPU or a CUDA device, got meta"),
    ({"generator": torch.Generator(), "device": "cuda:0"}, ValueError, "^generator: expected one on cuda:0, got"),
])  # fmt: skip
def test_take_key_raises_for_invalid_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        take_key(**arguments)


class Noise(torch.utils.data.Dataset[Any]):
    """The dataset of multisample/torch/README.md."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return sample(np.zeros(3, np.float32), 1.0, 5, seed=take_key())


@forked
def test_workers_of_a_data_loader_draw_new_numbers_in_each_epoch_and_repeat_after_manual_seed() -> None:
    def epochs() -> torch.Tensor:
        torch.manual_seed(3)
        loader = torch.utils.data.DataLoader(Noise(), 4, num_workers=2, multiprocessing_context="fork")
        return torch.cat([batch for _ in range(2) for batch in loader])

    first = epochs()
    assert all_differ(*first)
    assert torch.equal(epochs(), first)
