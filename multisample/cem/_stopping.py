"""The end of a run: its status, which no operation waits for, and its message."""

from __future__ import annotations

import math
from typing import Any

from multisample.backends.contract import HostArray

RUNNING, CONVERGED, COLLAPSED, UNSCORED, DIVERGED, STOPPED_BY_CALLBACK = range(6)
"""How a run ended. With a status below UNSCORED, the last iteration has refitted the mean and standard deviation."""
_REASONS = {
    RUNNING: "All {nit} iterations ran.",
    CONVERGED: "The largest standard deviation, {sigma:.3g}, is at most tol = {tol:.3g}.",
    COLLAPSED: "The standard deviation collapsed in iteration {nit}: adding it no longer changes the mean. If the"
    " collapse was too early, set noise_floor or smoothing, or raise n or elite_frac.",
    UNSCORED: "No score was finite in iteration {nit}, so mean and standard deviation cannot be refitted.",
    DIVERGED: "The mean or the standard deviation overflowed in iteration {nit}; mu and sigma are from before it.",
    STOPPED_BY_CALLBACK: "The callback ended the run.",
}


def status_after(xp: Any, mean: Any, sigma: Any, unscored: Any, tol: float | None) -> Any:
    """The status after a refit to `mean` and `sigma`, for each search. `unscored`: no score was finite."""
    one_sigma_away = mean + sigma
    status = xp.where((one_sigma_away == mean).all(-1), COLLAPSED, RUNNING)
    if tol is not None:
        status = xp.where(xp.amax(sigma, -1) <= tol, CONVERGED, status)
    status = xp.where(xp.isfinite(one_sigma_away).all(-1), status, DIVERGED)
    return xp.where(unscored, UNSCORED, status)


def message_of(n: int, tol: float | None, status: Any, nit: Any, nonfinite: Any, sigma: HostArray) -> str:
    """The status in words. `sigma` has the largest standard deviation after each iteration of `n` scores."""
    reason = _REASONS[int(status)]
    if status == RUNNING and tol is not None and nit:
        reason = "All {nit} iterations ran; the largest standard deviation, {sigma:.3g}, is above tol."
    reason = reason.format(nit=nit, sigma=sigma[nit - 1] if nit else math.nan, tol=tol)
    if not nonfinite:
        return reason
    return f"{reason} {nonfinite} of {n * nit} scores were NaN or infinite, and counted as worst."
