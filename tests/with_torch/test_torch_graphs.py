"""PyTorch's CUDA graphs: each replay draws new numbers with PyTorch's generator, and no call waits for the device."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from skip_rules import require, require_device
from tables import ONE_OPTION
from torch._dynamo.utils import counters

from multisample import Generator, sample
from multisample.torch import Normal

require_device()

# PyTorch's compiler uses PyTorch's own deprecated functions.
pytestmark = pytest.mark.filterwarnings("ignore:::torch")

D, N = 37, 1000
REPLAYS = 5
CALLS = ONE_OPTION | {"fast": {"fast_math": True}, "half": {"dtype": "float16"}, "double": {"dtype": torch.float64}}


@pytest.fixture(params=["torch_ext", "cupy", "numba"])
def cuda_backend(request: pytest.FixtureRequest) -> str:
    require(request.param)
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA device")
    return str(request.param)


@pytest.fixture
def cuda() -> str:
    require("torch_ext")
    return "cuda"


def vectors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.linspace(-3, 3, D, device="cuda"), torch.linspace(0.5, 2, D, device="cuda")


def captured(call: Callable[[], Any], generator: Any = None) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of `call` and the captured result, which each replay overwrites. `call` first runs on another stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Newer PyTorch versions warn that registration is unnecessary.
            graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        result = call()
    # PyTorch writes the generator's seed and offset on the stream of the capture. Replays do not wait for the write.
    torch.cuda.synchronize()
    return graph, result


@contextlib.contextmanager
def forbid_synchronization() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def replays(graph: torch.cuda.CUDAGraph, result: torch.Tensor) -> torch.Tensor:
    copies = []
    with forbid_synchronization():
        for _ in range(REPLAYS):
            graph.replay()
            copies.append(result.clone())
    return torch.stack(copies)


def distinct(draws: torch.Tensor) -> int:
    return len({x.cpu().numpy().tobytes() for x in draws})


def check_independent(draws: torch.Tensor) -> None:
    """Check that correlations of draws are within five standard deviations of 0."""
    x = draws.double().flatten(1).cpu()
    limit = 5 / x.shape[1] ** 0.5
    assert (torch.corrcoef(x) - torch.eye(len(x), dtype=torch.float64)).abs().max() < limit
    assert x.mean(1).abs().max() < limit
    assert (x.std(1) - 1).abs().max() < limit


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_each_replay_draws_new_numbers_from_the_default_or_a_registered_generator(
    cuda_backend: str, options: dict[str, Any], registered: bool
) -> None:
    mu, sigma = vectors()
    generator = torch.Generator("cuda") if registered else None
    graph, x = captured(lambda: sample(mu, sigma, N, backend=cuda_backend, generator=generator, **options), generator)

    def seeded(seed: int, other: int) -> torch.Tensor:
        torch.manual_seed(seed if generator is None else other)
        if generator is not None:
            generator.manual_seed(seed)
        return replays(graph, x)

    first = seeded(3, 1)
    assert distinct(first) == REPLAYS
    assert first.isfinite().all()
    assert torch.equal(first, seeded(3, 2))
    assert distinct(torch.cat((first, seeded(4, 1)))) == 2 * REPLAYS


def test_two_calls_in_a_graph_draw_different_numbers(cuda_backend: str) -> None:
    mu = torch.zeros(D, device="cuda")
    graph, x = captured(lambda: torch.stack([sample(mu, 1.0, N, backend=cuda_backend) for _ in range(2)]))
    check_independent(replays(graph, x).flatten(0, 1))


def test_an_unregistered_generator_draws_new_numbers_or_raises(cuda_backend: str) -> None:
    mu, sigma = vectors()
    sample(mu, sigma, N, backend=cuda_backend)
    generator, graph, x = torch.Generator("cuda").manual_seed(3), torch.cuda.CUDAGraph(), None
    with torch.cuda.graph(graph):
        mu.clone()
        try:
            x = sample(mu, sigma, N, backend=cuda_backend, generator=generator)
        except RuntimeError as error:  # PyTorch versions that require registration raise.
            assert str(error).startswith("generator: expected multisample.Generator(seed, graph_safe=True)")
    torch.cuda.synchronize()  # As in `captured`.
    assert x is None or distinct(replays(graph, x)) == REPLAYS


def check_gradients(mu: Any, sigma: Any, x: Any, got: Any) -> None:
    """Check the gradients of the sum of squares."""
    z = (x - mu[:, None]) / sigma[:, None]
    torch.testing.assert_close(got[0], 2 * x.sum(1), rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(got[1], 2 * (x * z).sum(1), rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("source", ["default", "torch.Generator", "Generator"])
def test_a_captured_backward_pass_uses_the_drawn_offset(cuda: str, source: str) -> None:
    mu, sigma = (x.requires_grad_() for x in vectors())
    registered = torch.Generator(cuda) if source == "torch.Generator" else None
    options = {"default": {}, "torch.Generator": {"generator": registered},
               "Generator": {"generator": Generator(3, graph_safe=True)}}[source]  # fmt: skip

    def call() -> Any:
        x = sample(mu, sigma, N, **options)
        return x.detach(), torch.autograd.grad(x.square().sum(), (mu, sigma))

    graph, (x, gradients) = captured(call, registered)
    draws = []
    for _ in range(REPLAYS):
        with forbid_synchronization():
            graph.replay()
        draws.append(x.clone())
        check_gradients(mu.detach(), sigma.detach(), x, gradients)
    assert distinct(torch.stack(draws)) == REPLAYS


def test_graphed_callables_draw_new_numbers_in_each_step(cuda: str) -> None:
    mu, sigma = (x.requires_grad_() for x in vectors())

    def draw(mu: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return sample(mu, sigma, N)

    function: Any = torch.cuda.make_graphed_callables(draw, (mu, sigma))
    torch.cuda.synchronize()  # As in `captured`.
    draws = []
    for _ in range(REPLAYS):
        x = function(mu, sigma)
        draws.append(x.detach().clone())
        check_gradients(mu.detach(), sigma.detach(), draws[-1], torch.autograd.grad(x.square().sum(), (mu, sigma)))
    assert distinct(torch.stack(draws)) == REPLAYS


def steps(function: Callable[..., Any], *inputs: Any) -> list[Any]:
    results = []
    for _ in range(REPLAYS):
        torch.compiler.cudagraph_mark_step_begin()
        results.append(function(*inputs).clone())
    return results


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_compiled_code_replays_graphs_with_new_numbers(cuda: str, options: dict[str, Any]) -> None:
    torch.compiler.reset()
    counters.clear()
    mu, sigma = vectors()
    f = lambda mu, sigma: sample(mu * 2, sigma, N, **options) + 1  # noqa: E731
    function = torch.compile(f, mode="reduce-overhead", fullgraph=True)
    steps(function, mu, sigma)
    torch.manual_seed(3)
    with forbid_synchronization():
        first = steps(function, mu, sigma)
    assert distinct(torch.stack(first)) == REPLAYS
    torch.manual_seed(3)
    assert all(map(torch.equal, first, steps(function, mu, sigma)))
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_compiled_training_replays_graphs(cuda: str) -> None:
    torch.compiler.reset()
    counters.clear()
    loc, log_scale = (torch.zeros(D, device=cuda, requires_grad=True) for _ in range(2))
    target = torch.linspace(-1, 1, D, device=cuda)
    optimiser = torch.optim.Adam((loc, log_scale), lr=0.05, capturable=True)

    @torch.compile(mode="reduce-overhead", fullgraph=True)
    def loss(loc: torch.Tensor, log_scale: torch.Tensor) -> torch.Tensor:
        x = Normal(loc, log_scale.exp(), validate_args=False).rsample((64,))
        # The minimum is at the target's mean and scale 0.5.
        return (2 * (x - target).square() - log_scale).sum(1).mean()

    for _ in range(300):
        torch.compiler.cudagraph_mark_step_begin()
        optimiser.zero_grad(set_to_none=True)
        loss(loc, log_scale).backward()
        optimiser.step()
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert (loc - target).abs().max() < 0.2
    assert (log_scale.exp() - 0.5).abs().max() < 0.15
