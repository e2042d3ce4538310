"""`weighted_moments` in torch.func: vmap is one batch, with the bits of each call."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from multisample import Key, _plan, weighted_moments

torch = pytest.importorskip("torch")

# Forward-mode AD imports modules of PyTorch that PyTorch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:::torch")

B, D, N = 3, 5, 40
WEIGHTS, MU, SIGMA = torch.rand(B, N), torch.randn(B, D), torch.rand(B, D) + 0.1
SEEDS = [3, 4, 5]


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("batched", [x for x in itertools.product((False, True), repeat=4) if any(x)])
def test_elements_of_vmap_equal_their_own_calls(batched: tuple[bool, ...], order: Any) -> None:
    arguments = [x if is_batched else x[0] for x, is_batched in zip((WEIGHTS, MU, SIGMA), batched[:3], strict=True)]
    seeds = torch.tensor(SEEDS) if batched[3] else 7
    dims = tuple(0 if is_batched else None for is_batched in batched)
    found = torch.func.vmap(lambda w, m, s, k: weighted_moments(w, m, s, seed=k, order=order), dims)(*arguments, seeds)
    assert len(found) == order
    for b in range(B):
        w, m, s = (x[b] if is_batched else x for x, is_batched in zip(arguments, batched[:3], strict=True))
        right = weighted_moments(w, m, s, seed=SEEDS[b] if batched[3] else 7, order=order)
        assert all(torch.equal(x[b], y) for x, y in zip(found, right, strict=True))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The plans that have run, one for each launch."""
    found = []

    def run(self: Any, *arguments: Any, before: Any = _plan.Plan.run) -> Any:
        found.append(self)
        return before(self, *arguments)

    monkeypatch.setattr(_plan.Plan, "run", run)
    return found


def test_vmap_of_one_call_of_batches_and_of_vmap_is_one_launch(runs: list[Any]) -> None:
    torch.func.vmap(lambda w: weighted_moments(w, MU[0], 2.0, seed=Key(3, 4)))(WEIGHTS)
    found = torch.func.vmap(lambda w: weighted_moments(w, MU, SIGMA, seed=SEEDS))(WEIGHTS)
    twice = torch.func.vmap(
        lambda seed: torch.func.vmap(lambda w: weighted_moments(w, MU[0], SIGMA[0], seed=seed))(WEIGHTS)
    )(torch.tensor(SEEDS))
    assert [plan.template.batch for plan in runs] == [B, B * B, B * B]
    for j, k in itertools.product(range(B), repeat=2):
        right = weighted_moments(WEIGHTS[k], MU[j], SIGMA[j], seed=SEEDS[j])
        assert all(torch.equal(x[k, j], y) for x, y in zip(found, right, strict=True))
        right = weighted_moments(WEIGHTS[k], MU[0], SIGMA[0], seed=SEEDS[j])
        assert all(torch.equal(x[j, k], y) for x, y in zip(twice, right, strict=True))


def loss(mu: Any, sigma: Any, weights: Any, seed: Any) -> Any:
    first, second = weighted_moments(weights, mu, sigma, seed=seed)
    return (first**2).sum() + second.sum()


def test_derivatives_equal_those_of_recorded_calls() -> None:
    mu, sigma = MU[0].clone().requires_grad_(), SIGMA[0].clone().requires_grad_()
    right = torch.autograd.grad(loss(mu, sigma, WEIGHTS[1], 4), (mu, sigma))
    torch.testing.assert_close(torch.func.grad(loss, (0, 1))(MU[0], SIGMA[0], WEIGHTS[1], 4), right)
    each = torch.func.vmap(torch.func.grad(loss, (0, 1)), (None, None, 0, 0))(
        MU[0], SIGMA[0], WEIGHTS, torch.tensor(SEEDS)
    )
    torch.testing.assert_close(tuple(x[1] for x in each), right)
    _, tangent = torch.func.jvp(lambda m, s: loss(m, s, WEIGHTS[1], 4), (MU[0], SIGMA[0]), (MU[1], SIGMA[1]))
    torch.testing.assert_close(tangent, (right[0] * MU[1]).sum() + (right[1] * SIGMA[1]).sum(), rtol=1e-4, atol=1e-4)
    total = torch.func.vmap(lambda w: weighted_moments(w, mu, sigma, seed=4)[0])(WEIGHTS).sum()
    (own_gradient,) = torch.autograd.grad(total, mu)
    torch.testing.assert_close(own_gradient, WEIGHTS.sum().expand(D))


def test_errors_name_the_argument() -> None:
    def moments(weights: Any) -> Any:
        return weighted_moments(weights, MU[0], 1.0, seed=1)

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
    assert torch.allclose(found, WEIGHTS[0].sum().expand(D))
