"""torch.compile and torch.export: one graph; the eager bits with a seed, and new numbers without a seed."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import run_python
from tables import ONE_OPTION, slow_but
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import grad, vmap

import multisample.torch
from multisample import Generator, Key, sample
from multisample.torch import Normal

# The compiler uses PyTorch's own deprecated functions.
pytestmark = pytest.mark.filterwarnings("ignore:::torch")

D, N = 5, 7
HALF, DOUBLE = {"dtype": "float16", "fast_math": True}, {"dtype": torch.float64, "backend": "torch_ext"}
OPTIONS = ONE_OPTION | {"half": HALF, "double": DOUBLE}


@pytest.fixture(autouse=True)
def reset_the_compiler() -> None:
    torch.compiler.reset()


def vectors(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.linspace(-2, 3, D, device=device), torch.linspace(0.5, 2, D, device=device)


def compiled(function: Any, backend: Any = "aot_eager", **options: Any) -> Any:
    return torch.compile(function, backend=backend, fullgraph=True, **options)


def around(x: Any) -> Any:
    """An operation to compile with a draw."""
    return x * 2 + 1


def test_with_a_seed_compiled_code_draws_the_eager_bits(torch_device: str) -> None:
    vectors_ = vectors(torch_device)
    part = functools.partial(sample, sigma=vectors_[1], seed=3)

    def draw(mu: Any, sigma: Any, scalar: Any) -> Any:
        draws = [around(sample(around(mu), sigma, N, seed=2**64 - 3, **options)) for options in OPTIONS.values()]
        others = (0.5, 2, scalar, sigma[:, None])
        pairs = [pair for other in others for pair in ((mu, other), (other, sigma))]
        return [*draws, *(sample(*pair, N, seed=3) for pair in pairs), part(mu, n=N)]

    arguments = *vectors_, torch.tensor(0.5, device=torch_device)
    for k, (x, expected) in enumerate(zip(compiled(draw)(*arguments), draw(*arguments), strict=True)):
        assert torch.equal(x, expected), k


@pytest.mark.slow
def test_inductor_draws_the_eager_bits_and_gradients(torch_device: str) -> None:
    inputs = [x.requires_grad_() for x in vectors(torch_device)]

    def loss(mu: Any, sigma: Any) -> Any:
        return torch.tanh(sample(mu.exp(), around(sigma), N, seed=3)).square().sum()

    got = torch.autograd.grad(compiled(loss, backend="inductor")(*inputs), inputs)
    for x, expected in zip(got, torch.autograd.grad(loss(*inputs), inputs), strict=True):
        torch.testing.assert_close(x, expected)


def test_out_is_written_in_compiled_code(torch_device: str) -> None:
    mu, sigma = vectors(torch_device)
    for layout, shape in (("dn", (D, N)), ("nd", (N, D))):
        out = torch.zeros(shape, device=torch_device)

        def draw(out: Any, layout: Any = layout) -> Any:
            return around(sample(mu, sigma, N, seed=3, out=out, layout=layout))

        got = compiled(draw)(out)
        assert torch.equal(out, sample(mu, sigma, N, seed=3, layout=layout))
        assert torch.equal(got, around(out))


@pytest.mark.slow
def test_changing_sizes_seeds_offsets_and_numbers_recompile_once(torch_device: str) -> None:
    calls: dict[str, list[Callable[[int], tuple[Any, ...]]]] = {
        "n": [lambda k: (torch.zeros(D), 1.0, k, 3, 0)],
        "d": [lambda k: (torch.zeros(k), torch.ones(k), N, 3, 0)],
        "seed": [lambda k: (torch.zeros(D), 1.0, N, k, 0), lambda k: (torch.zeros(D), 1.0, N, 2**63 - 1 - k, 0)],
        "seeds": [lambda k: (torch.zeros(D), 1.0, N, [k, Key(7, k)], 0)],
        "offset": [lambda k: (torch.zeros(D), 1.0, N, 3, k)],
        "sigma": [lambda k: (torch.zeros(D), k / 8, N, 3, 0)],
    }

    def draw(mu: Any, sigma: Any, n: Any, seed: Any, dim_offset: Any) -> Any:
        return sample(mu, sigma, n, seed=seed, dim_offset=dim_offset, sample_offset=2 * dim_offset)

    for name, makers in calls.items():
        torch.compiler.reset()
        counter = CompileCounterWithBackend("aot_eager")
        function = compiled(draw, backend=counter)
        for make in makers:
            for k in range(2, 9):
                call = [x.to(torch_device) if isinstance(x, torch.Tensor) else x for x in make(k)]
                assert torch.equal(function(*call), draw(*call)), (name, k)
        # One static graph for the first call, and one dynamic graph for all others.
        assert counter.frame_count == 2, name


def test_gradients_support_dynamic_shapes(torch_device: str) -> None:
    def loss(mu: Any, sigma: Any, n: int) -> Any:
        return sample(mu, sigma, n, seed=3).square().sum()

    counter = CompileCounterWithBackend("aot_eager")
    function = compiled(loss, backend=counter, dynamic=True)
    for d, n in ((3, 4), (5, 9), (17, 2)):
        inputs = [torch.ones(d, device=torch_device, requires_grad=True) for _ in range(2)]
        got = torch.autograd.grad(function(*inputs, n), inputs)
        assert all(map(torch.equal, got, torch.autograd.grad(loss(*inputs, n), inputs)))
    assert counter.frame_count == 1


@pytest.mark.parametrize("compiler", slow_but(["aot_eager"], ["aot_eager", "inductor"]))
def test_each_run_draws_new_numbers_from_the_generator_of_pytorch(torch_device: str, compiler: str) -> None:
    mu, sigma = vectors(torch_device)
    # Two calls in one graph draw different numbers.
    function = compiled(lambda: torch.stack((sample(mu, sigma, 2000), sample(mu, sigma, 2000))), backend=compiler)
    function()
    torch.manual_seed(3)
    first = [function() for _ in range(4)]
    torch.manual_seed(3)
    assert all(map(torch.equal, first, [function() for _ in range(4)]))
    draws = torch.cat(first)
    assert len({x.cpu().numpy().tobytes() for x in draws}) == 8
    z = ((draws - mu[:, None]) / sigma[:, None]).double().cpu()
    # Bounds for 80,000 normals, and for the correlations of 8 * 7 pairs of 10,000 normals.
    assert abs(z.mean()) < 5 / 80_000**0.5
    assert abs(z.std() - 1) < 5 / 160_000**0.5
    assert (torch.corrcoef(z.flatten(1)) - torch.eye(8)).abs().max() < 5 / 10_000**0.5


def test_a_distribution_can_be_compiled(torch_device: str) -> None:
    def loss(loc: Any, scale: Any, n: int) -> Any:
        q = Normal(loc, scale)
        return q.log_prob(q.rsample((n, 2))).mean()

    inputs = [x.requires_grad_() for x in vectors(torch_device)]
    counter = CompileCounterWithBackend("aot_eager")
    function = compiled(loss, backend=counter)
    for n in (1000, 2000, 3000):
        _, slope = torch.autograd.grad(function(*inputs, n), inputs)
        # The backward pass draws the same z. Then log_prob is -log(scale) - z**2 / 2 plus a constant.
        torch.testing.assert_close(slope, -1 / inputs[1].detach() / D, rtol=1e-4, atol=1e-4)
    assert counter.frame_count <= 2


def test_batches_can_be_compiled(torch_device: str) -> None:
    mu = torch.linspace(-2, 3, 3 * D, device=torch_device).reshape(3, D)
    function = compiled(vmap(grad(lambda mu: sample(mu, 1.0, N).square().sum()), randomness="different"))
    first, second = function(torch.zeros_like(mu)), function(torch.zeros_like(mu))
    assert len({x.cpu().numpy().tobytes() for x in torch.cat((first, second))}) == 6
    seeded = compiled(lambda mu: vmap(lambda mu: sample(mu, 1.0, N, seed=3))(mu))
    assert torch.equal(seeded(mu), torch.stack([sample(x, 1.0, N, seed=3) for x in mu]))
    with pytest.raises(RuntimeError, match="randomness error mode"):
        compiled(lambda mu: vmap(lambda mu: sample(mu, 1.0, N))(mu))(mu)


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "float": ({"n": 2.5}, TypeError, "n: expected an integer, got 2.5 of type float"),
    "seed": ({"seed": 2**64}, ValueError, r"seed: expected 0 <= seed < 2\*\*64"),
    "shape": ({"sigma": torch.ones(D - 1)}, ValueError, "sigma: expected as many elements as mu, 5, got 4"),
}


CASES = [pytest.param(*x, id=name, marks=[pytest.mark.slow] * (name != "seed")) for name, x in WRONG.items()]


@pytest.mark.parametrize(("call", "error", "message"), CASES)
# After an error, PyTorch compiles the function again in parts, with warnings.
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_compiled_calls_raise_the_eager_errors(call: dict[str, Any], error: type[Exception], message: str) -> None:
    def draw(mu: Any) -> Any:
        return around(sample(mu, **{"sigma": 1.0, "n": N, "seed": 3, **call}))

    with pytest.raises(Unsupported, match=message):
        compiled(draw)(torch.zeros(D))
    with pytest.raises(error, match=f"^{message}"):
        torch.compile(draw, backend="aot_eager")(torch.zeros(D))


OUTSIDE: dict[str, Callable[[], dict[str, Any]]] = {
    "Generator": lambda: {"generator": Generator(5)},
    "torch.Generator": lambda: {"generator": torch.Generator().manual_seed(5)},
    "backend": lambda: {"backend": "cpu", "seed": 5},
    "array": lambda: {"mu": np.zeros(D, np.float32), "seed": 5},
}


@pytest.mark.parametrize("options", slow_but([OUTSIDE["Generator"]], OUTSIDE.values()))
def test_calls_without_an_operator_break_the_graph(options: Callable[[], dict[str, Any]]) -> None:
    def draw(mu: Any, options: dict[str, Any]) -> Any:
        x = sample(**{"mu": around(mu), "sigma": 1.0, "n": N, **options})
        return around(torch.as_tensor(x))

    mu, passed, same = torch.zeros(D), options(), options()
    with pytest.raises(Unsupported, match="sample can be part of a graph only with plain PyTorch tensors"):
        compiled(draw)(mu, options())
    function = torch.compile(draw, backend="aot_eager")
    for _ in range(2):
        assert torch.equal(function(mu, passed), draw(mu, same))


@pytest.mark.slow
def test_the_first_call_of_a_program_can_be_compiled(torch_device: str, tmp_path: Path) -> None:
    program = f"""
import multisample, sys
assert "torch" not in sys.modules
import torch

def draw(mu):
    return multisample.sample(mu, 1.0, 4, seed=3) * 2

mu = torch.zeros(5, device={torch_device!r})
x = torch.compile(draw, backend="aot_eager", fullgraph=True)(mu)
assert torch.equal(x, draw(mu))
"""
    run_python("-c", program, folder=tmp_path)


class Noisy(torch.nn.Module):
    """Adds noise of a learnt scale to its input, with and without a seed."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((D,), 0.5))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        n = x.shape[0]
        return x + sample(0.0, self.scale, n, layout="nd"), sample(0.0, self.scale, n, seed=3)


@pytest.mark.parametrize("strict", slow_but([False], [False, True]))
def test_an_exported_program_draws_new_numbers(torch_device: str, strict: bool) -> None:
    module = Noisy().to(torch_device)
    shapes, mu = ({0: torch.export.Dim.DYNAMIC},), torch.zeros(4, D, device=torch_device)
    program = torch.export.export(module, (mu,), dynamic_shapes=shapes, strict=strict).module()
    x = torch.zeros(9, D, device=torch_device)
    (first, same), (second, again) = program(x), program(x)
    assert first.shape == (9, D)
    assert not torch.equal(first, second)
    assert torch.equal(same, sample(0.0, module.scale, 9, seed=3))
    assert torch.equal(same, again)


class OfLength(torch.nn.Module):
    """Calls whose d or n is the length of the input."""

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        n = x.shape[0]
        return [
            sample(x, 1.0, N, seed=3), sample(0.5, x.exp()[:, None], N, seed=3, layout="nd"),
            sample(x.new_zeros(D), 1.0, n, seed=3, sample_offset=2**34 - 9), sample(x, x.exp(), n, seed=3),
            Normal(x, x.exp(), validate_args=False).rsample((), seed=3),
        ]  # fmt: skip


@pytest.mark.parametrize("strict", slow_but([False], [False, True]))
@pytest.mark.parametrize("least", slow_but([None], [None, 1]))
def test_sizes_of_an_exported_program_may_be_unbounded(torch_device: str, strict: bool, least: int | None) -> None:
    dim, x = torch.export.Dim("b", min=least), torch.linspace(0, 1, 9, device=torch_device)
    program = torch.export.export(OfLength(), (x[:5],), dynamic_shapes=({0: dim},), strict=strict).module()
    assert all(map(torch.equal, program(x), OfLength()(x)))
    with pytest.raises(RuntimeError, match=r"sample_offset must be .* at most 2\*\*34, got \d+; n is 10"):
        program(torch.zeros(10, device=torch_device))


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_a_size_may_depend_on_data(torch_device: str) -> None:
    class Positive(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            y = x[x > 0]
            normal = Normal(y, y.exp(), validate_args=False)
            return [normal.rsample(seed=3), normal.rsample((N,), seed=3), sample(y, y.exp(), N, seed=3)]

    x = torch.tensor([1.0, -1.0, 2.0, -3.0], device=torch_device)
    expected = Positive()(x)
    assert [y.shape for y in expected] == [(2,), (N, 2), (2, N)]
    for function in (compiled(Positive()), torch.export.export(Positive(), (x,)).module()):
        assert all(map(torch.equal, function(x), expected))
        assert [len(y) for y in function(x.abs())] == [4, N, 4]


def test_compiled_code_refuses_an_out_that_overlaps(torch_device: str) -> None:
    memory = torch.zeros(D * N, device=torch_device)
    draw = compiled(lambda mu, out: sample(mu, 1.0, N, seed=3, out=out), backend="eager")
    with pytest.raises(RuntimeError, match="out must have memory of its own, got memory that mu also uses"):
        draw(memory[:D], memory.view(D, N))
    assert not memory.any()


def test_the_default_device_does_not_matter() -> None:
    mu = torch.zeros(D)
    seeds = np.array([7, 8])
    calls: list[Callable[[], Any]] = [
        lambda: compiled(lambda mu: multisample.perturb(mu, [0.1, 0.2], seed=7))(mu),
        lambda: vmap(lambda mu: sample(mu, 1.0, N, seed=seeds))(mu[None]), lambda: sample(mu, 1.0, N, seed=seeds),
    ]  # fmt: skip
    expected = [call() for call in calls]
    torch.compiler.reset()
    with torch.device("meta"):
        assert all(torch.equal(call(), x) for call, x in zip(calls, expected, strict=True))


@pytest.mark.slow
def test_a_saved_program_runs_in_a_process_that_loads_the_operators(tmp_path: Path) -> None:
    class Both(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            return [sample(x, 1.0, N, seed=3), multisample.perturb([x], 0.5, seed=3)[0]]

    x = torch.zeros(D)
    with torch.no_grad():
        torch.export.save(torch.export.export(Both(), (x,), strict=True), tmp_path / "program.pt2")
        torch.save(Both()(x), tmp_path / "expected.pt")
    program = """
import torch, multisample.torch
multisample.torch.load_operators()
found = torch.export.load("program.pt2").module()(torch.zeros(5))
assert all(map(torch.equal, found, torch.load("expected.pt")))
"""
    run_python("-W", "ignore", "-c", program, folder=tmp_path)


def test_exporting_a_call_with_a_generator_raises() -> None:
    multisample.torch.load_operators()

    class Counted(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return sample(x, 1.0, N, generator=Generator(1))

    with pytest.raises(ValueError, match=r"^sample can be part of a graph only with plain PyTorch tensors"):
        torch.export.export(Counted(), (torch.zeros(D),), strict=False)
