"""The cross-entropy method: draw candidates, score them, refit mean and standard deviation to the best, repeat.

`minimize` is the loop, for whoever can score all candidates in one call; `CEM` is the same in two halves, `ask` and
`tell`, for whoever scores them elsewhere or later; `step` is one iteration as a pure function, for JAX's
transformations. Nothing here imports an array library: what is computed is computed by that of the caller's arrays, on
their device.
"""

from __future__ import annotations

from ._method import CEM, CEMState, Result, minimize
from ._refit import State
from ._step import start, step

__all__ = ["CEM", "CEMState", "Result", "State", "minimize", "start", "step"]
