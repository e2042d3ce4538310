"""Variational inference fits the posterior of a Bayesian linear regression with `multisample.torch.Normal`.

The variational family has independent normal weights. For this model its optimum has a closed form: the mean is the
exact posterior mean, and the variances are the reciprocals of the posterior precision's diagonal. The program prints
the optimum next to the fit.

python -m multisample examples bayesian_regression                  # on the CPU
python -m multisample examples bayesian_regression --device cuda    # on a GPU
"""

from collections.abc import Sequence
from typing import Any

from ._running import parsed

FEATURES, OBSERVATIONS, NOISE = 6, 200, 0.5


def fit(steps: int = 600, seed: int = 7, device: str = "cpu") -> tuple[Any, Any, Any, Any]:
    """Maximize the evidence lower bound by Adam, with 64 samples of the weights in each step.

    `seed` is that of the data and of the samples. Returns means and standard deviations of the weights, shape (6,): of
    the fit, and of the optimum of the family.
    """
    import torch

    from multisample.torch import Normal

    data = torch.Generator().manual_seed(seed)
    inputs = torch.randn(OBSERVATIONS, FEATURES, generator=data)
    targets = inputs @ torch.linspace(-2, 2, FEATURES) + NOISE * torch.randn(OBSERVATIONS, generator=data)
    precision = torch.eye(FEATURES) + inputs.T @ inputs / NOISE**2
    best_loc = torch.linalg.solve(precision, inputs.T @ targets / NOISE**2)
    best_scale = precision.diagonal().rsqrt()
    inputs, targets = inputs.to(device), targets.to(device)

    samples = torch.Generator(device).manual_seed(seed)
    loc = torch.zeros(FEATURES, device=device, requires_grad=True)
    log_scale = torch.full((FEATURES,), -2.5, device=device, requires_grad=True)
    optimizer = torch.optim.Adam([loc, log_scale], lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        posterior = Normal(loc, log_scale.exp(), generator=samples, validate_args=False)
        weights = posterior.rsample((64,))
        misfit = (targets - weights @ inputs.T).square().sum(1) / (2 * NOISE**2)
        loss = (misfit + weights.square().sum(1) / 2).mean() - posterior.entropy().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return loc.detach().cpu(), log_scale.detach().exp().cpu(), best_loc, best_scale


def main(argv: Sequence[str] | None = None) -> int:
    """Print the fitted weights beside the optimum."""
    args = parsed("bayesian_regression", __doc__, argv, device=("cpu", "cuda"), seed=7)
    result = fit(seed=args.seed, device=args.device)
    print("weight  fitted mean  optimum  fitted deviation  optimum")
    for k, (loc, scale, best_loc, best_scale) in enumerate(zip(*(x.tolist() for x in result), strict=True)):
        print(f"{k:6}  {loc:11.3f}  {best_loc:7.3f}  {scale:16.4f}  {best_scale:7.4f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
