"""Programs that use the sampler: ``python -m multisample examples`` lists them."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = [
    "asian_option", "basket_option", "bayesian_regression", "cart_pole", "cart_pole_jax", "cart_poles", "cem_cluster",
    "cem_torchrun", "evolution_strategy", "monte_carlo_dask", "mppi", "tetris",
]  # fmt: skip

if TYPE_CHECKING:
    from . import asian_option as asian_option
    from . import basket_option as basket_option
    from . import bayesian_regression as bayesian_regression
    from . import cart_pole as cart_pole
    from . import cart_pole_jax as cart_pole_jax
    from . import cart_poles as cart_poles
    from . import cem_cluster as cem_cluster
    from . import cem_torchrun as cem_torchrun
    from . import evolution_strategy as evolution_strategy
    from . import monte_carlo_dask as monte_carlo_dask
    from . import mppi as mppi
    from . import tetris as tetris
else:

    def __getattr__(name: str) -> object:
        # Imported on first use: tetris imports Numba.
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        return importlib.import_module(f".{name}", __name__)
