"""Vectors of seeds and moments with PyTorch: gradients, torch.func, torch.compile and operators."""

import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from operator_mode import Operators

import multisample
from multisample import Key, _plan, sample, weighted_moments

pytestmark = pytest.mark.filterwarnings("ignore:::torch")

SEEDS = [3, 5, 2**64 - 1, 7]
N = 9


def vectors(device: str, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    mu, sigma = (torch.rand(4, 6, dtype=torch.float64, generator=generator) for _ in range(2))
    return mu.to(device, dtype), sigma.to(device, dtype)


def seed_tensor(device: str, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.from_numpy(np.array(SEEDS, np.uint64)).view(dtype).to(device)


def one_by_one(mu: torch.Tensor, sigma: torch.Tensor, **options: Any) -> torch.Tensor:
    mu, sigma = mu.expand(4, 6), sigma.expand(4, 6)
    return torch.stack([sample(mu[b], sigma[b], N, seed=SEEDS[b], **options) for b in range(4)])


FORMS = {
    "list": lambda device: list(SEEDS),
    "tensor": lambda device: seed_tensor(device, torch.uint64),
    "tensor on the host": lambda device: seed_tensor("cpu", torch.uint64),
    "seeds and offsets": lambda device: torch.from_numpy(np.array([[x, 0] for x in SEEDS], np.uint64)).to(device),
}


@pytest.mark.parametrize(
    ("form", "compiled"), [*((form, False) for form in FORMS), ("list", True), ("seeds and offsets", True)]
)
def test_gradients_are_sums_over_the_batch(torch_device: str, form: str, compiled: bool) -> None:
    def draw(mu: Any, sigma: Any) -> Any:
        return sample(mu, sigma, N, seed=seeds, antithetic=True, layout="nd")

    torch._dynamo.reset()
    function = torch.compile(draw, backend="aot_eager", fullgraph=True) if compiled else draw
    mu, sigma = vectors(torch_device, torch.float64)
    for own in [(mu[1], sigma)] if compiled else [(mu, sigma), (mu, sigma[0]), (mu[1], sigma)]:
        seeds = FORMS[form](torch_device)
        leaves = [x.clone().requires_grad_() for x in own]
        x = function(*leaves)
        expected = one_by_one(*leaves, antithetic=True, layout="nd")
        assert torch.equal(x, expected)
        weights = torch.linspace(-1, 1, x.numel(), dtype=x.dtype, device=x.device).reshape(x.shape)
        if not compiled:  # Gradients do not depend on later changes of the seeds.
            seeds[0] = seeds[1]
        got = torch.autograd.grad((x * weights).sum(), leaves, retain_graph=True)
        assert all(map(torch.allclose, got, torch.autograd.grad((expected * weights).sum(), leaves)))
        by_operator = torch.autograd.grad((x * weights).sum(), leaves, create_graph=True)
        assert compiled or all(map(torch.equal, got, by_operator))


def test_derivatives_of_any_order(torch_device: str) -> None:
    mu, sigma = vectors(torch_device, torch.float64)
    draw = functools.partial(sample, n=3, seed=seed_tensor(torch_device, torch.uint64))
    wide = mu.reshape(4, 2, 3)
    for own in ((mu, sigma[0]), (mu[0, 0], sigma), (wide, sigma[:, :3]), (sigma[0, :3], wide)):
        leaves = [x.clone().requires_grad_() for x in own]
        assert torch.autograd.gradcheck(draw, leaves, check_forward_ad=True, check_batched_grad=True)
        assert torch.autograd.gradgradcheck(draw, leaves)


def test_moments_record_gradients_of_a_batch(torch_device: str) -> None:
    mu, sigma = (x.requires_grad_() for x in vectors(torch_device, torch.float64))
    weights = torch.rand(4, N, dtype=torch.float64, device=torch_device)
    got = weighted_moments(weights, mu, sigma, seed=SEEDS)
    alone = [weighted_moments(weights[b], mu[b], sigma[b], seed=SEEDS[b]) for b in range(4)]
    with torch.no_grad():
        assert all(map(torch.equal, got, weighted_moments(weights, mu, sigma, seed=SEEDS)))
    for k, leaf in enumerate((mu, sigma)):
        expected = torch.stack([moments[k] for moments in alone])
        assert torch.equal(got[k], expected)
        gradients = [torch.autograd.grad(m.sum(), leaf, retain_graph=True)[0] for m in (got[k], expected)]
        assert torch.allclose(*gradients)


@pytest.mark.parametrize("names", ["mu", "sigma", "mu sigma"])
def test_derivatives_of_moments(torch_device: str, names: str) -> None:
    vectors_of = dict(zip(("mu", "sigma"), (x[0] for x in vectors(torch_device, torch.float64)), strict=True))
    weights = torch.rand(N, dtype=torch.float64, device=torch_device)
    leaves = [vectors_of[name].clone().requires_grad_() for name in names.split()]

    def moments(*leaves: Any) -> Any:
        return weighted_moments(weights, seed=1, **vectors_of | dict(zip(names.split(), leaves, strict=True)))

    assert torch.autograd.gradcheck(moments, leaves) and torch.autograd.gradgradcheck(moments, leaves)
    assert all(map(torch.equal, moments(*leaves), moments(*(x.detach() for x in leaves))))


def test_seeds_that_change_before_the_backward_pass_of_moments_are_refused(torch_device: str) -> None:
    mu, sigma = (x.requires_grad_() for x in vectors(torch_device))
    seeds = torch.arange(4, device=torch_device)
    first, _ = weighted_moments(torch.ones(4, N, device=torch_device), mu, sigma, seed=seeds)
    seeds += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.sum().backward()


@pytest.mark.parametrize("own", ["mu", "seed", "mu, seed", "mu, sigma", "mu, sigma, seed"])
def test_vmap_is_one_launch(torch_device: str, own: str) -> None:
    mu, sigma = vectors(torch_device)
    seeds, names = seed_tensor(torch_device), own.split(", ")
    batch = {"mu": mu, "sigma": sigma, "seed": seeds}
    one = {"mu": mu[0], "sigma": sigma[0], "seed": SEEDS[0]}
    with Operators() as operators:
        draw = torch.func.vmap(lambda *own: sample(**{**one, **dict(zip(names, own, strict=True))}, n=N))
        x = draw(*(batch[name] for name in names))
    assert operators.ours == ["multisample.sample.default"]
    for b in range(4):
        alone = {**one, **{name: SEEDS[b] if name == "seed" else batch[name][b] for name in names}}
        assert torch.equal(x[b], sample(**alone, n=N))


def test_batches_inside_vmap_are_one_launch(torch_device: str) -> None:
    mu, _ = vectors(torch_device)
    seeds = torch.arange(12, device=torch_device).reshape(3, 4)
    data = torch.tensor([[0, 3], [1, 5]], dtype=torch.uint32, device=torch_device)
    with Operators() as operators:
        x = torch.func.vmap(lambda row: torch.func.vmap(lambda m, k: sample(m, 1.0, N, seed=k))(mu, row))(seeds)
        y = torch.func.vmap(lambda m: sample(m, 1.0, N, seed=[1, 2]))(mu)
        z = torch.func.vmap(lambda key: sample(mu[0], 1.0, N, seed=key))(data)
    assert operators.ours == ["multisample.sample.default"] * 3
    for a, b in itertools.product(range(3), range(4)):
        assert torch.equal(x[a, b], sample(mu[b], 1.0, N, seed=4 * a + b))
    for a, b in itertools.product(range(4), range(2)):
        assert torch.equal(y[a, b], sample(mu[a], 1.0, N, seed=b + 1))
    assert torch.equal(z[1], sample(mu[0], 1.0, N, seed=2**32 + 5))


def test_gradients_through_vmap(torch_device: str) -> None:
    mu, sigma = vectors(torch_device, torch.float64)
    slopes = torch.func.grad(lambda m, s, key: (sample(m, s, N, seed=key) ** 2).sum(), (0, 1))
    got = torch.func.vmap(slopes)(mu, sigma, seed_tensor(torch_device))
    for b in range(4):
        m, s = mu[b].clone().requires_grad_(), sigma[b].clone().requires_grad_()
        expected = torch.autograd.grad((sample(m, s, N, seed=SEEDS[b]) ** 2).sum(), (m, s))
        assert all(torch.allclose(x[b], y) for x, y in zip(got, expected, strict=True))
    assert slopes(*[mu[:0].reshape(0, 2, 3)] * 2, seed_tensor(torch_device)[:0])[0].shape == (0, 2, 3)


def test_a_compiled_batch_is_written_to_out(torch_device: str) -> None:
    mu, sigma = vectors(torch_device)
    out = torch.zeros(4, 6, N, device=torch_device)
    function = torch.compile(lambda m, s, k: sample(m, s, N, seed=k, out=out), backend="aot_eager", fullgraph=True)
    assert torch.equal(function(mu, sigma, seed_tensor(torch_device)), one_by_one(mu, sigma))
    assert torch.equal(out, one_by_one(mu, sigma))


def test_the_operators_pass_the_tests_of_torch_library(torch_device: str) -> None:
    multisample.torch.load_operators()
    mu, sigma = (x.requires_grad_() for x in vectors(torch_device))
    keys = torch.stack([seed_tensor(torch_device)] * 2, 1)
    torch.library.opcheck(torch.ops.multisample.sample.default, (mu, sigma, N, None, keys), {"seed": 0})
    grad = torch.rand(4, 6, N, device=torch_device)
    torch.library.opcheck(torch.ops.multisample.sample_backward.default, (grad, None, keys), {"seed": 0})


def test_operators_refuse_wrong_shapes(torch_device: str) -> None:
    multisample.torch.load_operators()
    sigma = torch.ones(6, device=torch_device)
    of_mu, of_keys, both = "mu must have shape", "keys must have shape", "(mu|keys) must have shape"
    for mu, keys, message in (((4, 6), (3, 2), both), ((4, 6), (4, 3), of_keys), ((4, 6, 1), (4, 2), of_mu)):
        key_tensor = torch.zeros(keys, dtype=torch.int64, device=torch_device)
        with pytest.raises(RuntimeError, match=message):
            torch.ops.multisample.sample(torch.zeros(mu, device=torch_device), sigma, N, None, key_tensor, seed=0)


MU, SIGMA = vectors("cpu")
WEIGHTS = torch.rand(4, N)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("batched", [x for x in itertools.product((False, True), repeat=4) if any(x)])
def test_elements_of_vmap_of_moments_equal_their_own_calls(batched: tuple[bool, ...], order: Any) -> None:
    arguments = [x if is_batched else x[0] for x, is_batched in zip((WEIGHTS, MU, SIGMA), batched[:3], strict=True)]
    seeds = seed_tensor("cpu") if batched[3] else 7
    dims = tuple(0 if is_batched else None for is_batched in batched)
    found = torch.func.vmap(lambda w, m, s, k: weighted_moments(w, m, s, seed=k, order=order), dims)(*arguments, seeds)
    assert len(found) == order
    for b in range(4):
        w, m, s = (x[b] if is_batched else x for x, is_batched in zip(arguments, batched[:3], strict=True))
        right = weighted_moments(w, m, s, seed=SEEDS[b] if batched[3] else 7, order=order)
        assert all(torch.equal(x[b], y) for x, y in zip(found, right, strict=True))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry for each launch: the plan that ran."""
    found = []

    def run(self: Any, *arguments: Any, before: Any = _plan.Plan.run) -> Any:
        found.append(self)
        return before(self, *arguments)

    monkeypatch.setattr(_plan.Plan, "run", run)
    return found


def test_vmap_of_moments_of_batches_and_of_vmap_is_one_launch(runs: list[Any]) -> None:
    torch.func.vmap(lambda w: weighted_moments(w, MU[0], 2.0, seed=Key(3, 4)))(WEIGHTS)
    found = torch.func.vmap(lambda w: weighted_moments(w, MU, SIGMA, seed=SEEDS))(WEIGHTS)
    draw = lambda seed: torch.func.vmap(lambda w: weighted_moments(w, MU[0], SIGMA[0], seed=seed))  # noqa: E731
    twice = torch.func.vmap(lambda seed: draw(seed)(WEIGHTS))(seed_tensor("cpu"))
    assert [plan.template.batch for plan in runs] == [4, 16, 16]
    for j, k in itertools.product(range(4), repeat=2):
        right = weighted_moments(WEIGHTS[k], MU[j], SIGMA[j], seed=SEEDS[j])
        assert all(torch.equal(x[k, j], y) for x, y in zip(found, right, strict=True))
        right = weighted_moments(WEIGHTS[k], MU[0], SIGMA[0], seed=SEEDS[j])
        assert all(torch.equal(x[j, k], y) for x, y in zip(twice, right, strict=True))


def loss(mu: Any, sigma: Any, weights: Any, seed: Any) -> Any:
    first, second = weighted_moments(weights, mu, sigma, seed=seed)
    return (first**2).sum() + second.sum()


def test_derivatives_of_moments_equal_those_of_recorded_calls() -> None:
    mu, sigma = MU[0].clone().requires_grad_(), SIGMA[0].clone().requires_grad_()
    right = torch.autograd.grad(loss(mu, sigma, WEIGHTS[1], SEEDS[1]), (mu, sigma))
    torch.testing.assert_close(torch.func.grad(loss, (0, 1))(MU[0], SIGMA[0], WEIGHTS[1], SEEDS[1]), right)
    each = torch.vmap(torch.func.grad(loss, (0, 1)), (None, None, 0, 0))(MU[0], SIGMA[0], WEIGHTS, seed_tensor("cpu"))
    torch.testing.assert_close(tuple(x[1] for x in each), right)
    _, tangent = torch.func.jvp(lambda m, s: loss(m, s, WEIGHTS[1], SEEDS[1]), (MU[0], SIGMA[0]), (MU[1], SIGMA[1]))
    torch.testing.assert_close(tangent, (right[0] * MU[1]).sum() + (right[1] * SIGMA[1]).sum(), rtol=1e-4, atol=1e-4)
    total = torch.func.vmap(lambda w: weighted_moments(w, mu, sigma, seed=4)[0])(WEIGHTS).sum()
    (own_gradient,) = torch.autograd.grad(total, mu)
    torch.testing.assert_close(own_gradient, WEIGHTS.sum().expand(6))


def test_errors_of_moments_name_the_argument() -> None:
    moments = functools.partial(weighted_moments, mu=MU[0], sigma=1.0, seed=1)
    with pytest.raises(ValueError, match=r"^weights: require grad"):
        torch.func.grad(lambda w: moments(w)[0].sum())(WEIGHTS[0])
    for wrong, message in ((torch.zeros(2, 0), "shape"), (torch.full((2, 4), torch.nan), "finite weights")):
        with pytest.raises(ValueError, match=f"^weights: expected {message}"):
            torch.func.vmap(moments)(wrong)


@pytest.mark.parametrize("transformed", [False, True])
def test_the_gradient_of_mu_alone_draws_no_noise(transformed: bool, runs: list[Any]) -> None:
    def total(mu: Any) -> Any:
        return sum(x.sum() for x in weighted_moments(WEIGHTS[0], mu, SIGMA[0], seed=3))

    leaf = MU[0].clone().requires_grad_()
    for _ in range(2):  # The first call checks and makes a plan.
        runs.clear()
        found = torch.func.grad(total)(MU[0]) if transformed else torch.autograd.grad(total(leaf), leaf)[0]
    assert len(runs) == 1
    assert torch.allclose(found, WEIGHTS[0].sum().expand(6))
