"""Programs that use the sampler: ``python -m multisample examples`` lists them."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = [
    "asian_option", "basket_option", "bayesian_regression", "cart_pole", "cem_cluster", "cem_torchrun",
    "evolution_strategy", "mezo", "mppi", "score_exchange", "tetris",
]  # fmt: skip

if TYPE_CHECKING:
    from . import (  # isort: skip
        asian_option, basket_option, bayesian_regression, cart_pole, cem_cluster, cem_torchrun, evolution_strategy,
        mezo, mppi, score_exchange, tetris,
    )  # fmt: skip
else:

    def __getattr__(name: str) -> object:
        # Imported on first use: tetris imports Numba.
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        return importlib.import_module(f".{name}", __name__)
