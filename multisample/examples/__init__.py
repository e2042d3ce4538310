"""Programs that use the sampler: ``python -m multisample examples`` lists them."""

from typing import TYPE_CHECKING

__all__ = [
    "bayesian_regression", "cart_pole", "cem_cluster", "evolution_strategy", "mezo", "mppi", "option_prices",
    "populations", "tetris",
]  # fmt: skip

if TYPE_CHECKING:
    from . import (  # isort: skip
        bayesian_regression, cart_pole, cem_cluster, evolution_strategy, mezo, mppi, option_prices, populations,
        tetris,
    )  # fmt: skip
else:

    def __getattr__(name: str) -> object:
        # Imported on first use: tetris imports Numba.
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        return importlib.import_module(f".{name}", __name__)
