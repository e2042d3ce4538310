"""Programs that use the sampler, each in a folder of its own: so far `tetris`, which the cross-entropy method plays."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["tetris"]

if TYPE_CHECKING:
    from . import tetris as tetris
else:

    def __getattr__(name: str) -> object:
        # Imported on first use: tetris imports Numba.
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        return importlib.import_module(f".{name}", __name__)
