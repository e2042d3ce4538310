"""The cross-entropy method: draw candidates, score them, refit mean and standard deviation to the best, repeat.

`minimize` runs the loop with a function that scores all candidates in one call, or tasks of them on an executor. `CEM`
splits the loop into `ask` and `tell`, for scores that come from elsewhere or later. `step` is one iteration as a pure
function, for JAX's transformations. The array library of the caller's arrays computes everything, on their device; this
package imports no array library.
"""

from __future__ import annotations

from ._method import CEM, CEMState, Result, minimize
from ._refit import State
from ._step import start, step
from ._tasks import Task

__all__ = ["CEM", "CEMState", "Result", "State", "Task", "minimize", "start", "step"]
