"""Programs that use the sampler: ``python -m multisample examples`` lists them."""

__all__ = [
    "bayesian_regression", "cart_pole", "cem_cluster", "evolution_strategy", "mezo", "mppi", "option_prices",
    "populations", "tetris",
]  # fmt: skip
