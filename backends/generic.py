"""Launchers of any backend: its own, or made from `Backend.launch`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .contract import Backend, Launcher, MemoryLauncher
from .launch import Launch, Operation, matrix_of_batch, words_in_memory
from .memory.host import address_of, inputs_at

_NAMES: dict[int, str] = {
    Operation.sample: "samples",
    Operation.gradient: "gradients",
    Operation.moments: "weighted moments",
    Operation.perturb: "perturbations",
}


def check_operation(backend: Backend, operation: int) -> None:
    """ValueError if the backend does not run `operation`."""
    if operation not in backend.operations:
        found = ", ".join(_NAMES[other] for other in backend.operations)
        raise ValueError(f"backend: {backend.name!r} has no {_NAMES[operation]}, only {found}")


def launcher(backend: Backend, launch: Launch) -> Launcher:
    """The `Launcher` of a backend for launches like `launch`.

    Raises
    ------
    ValueError
        If the backend does not run the operation.
    """
    check_operation(backend, launch.operation)
    own: Callable[[Launch], Launcher] | None = getattr(backend, "launcher", None)
    return generic_launcher(backend, launch) if own is None else own(launch)


def memory_launcher(backend: Backend, launch: Launch, has_offsets: bool) -> MemoryLauncher:
    """The `MemoryLauncher` of a backend for launches like `launch`.

    Raises
    ------
    ValueError
        If the backend does not run the operation.
    """
    check_operation(backend, launch.operation)
    own: Callable[[Launch, bool], MemoryLauncher] | None = getattr(backend, "memory_launcher", None)
    if own is not None:
        return own(launch, has_offsets)

    def run(
        mu: int, sigma: int, weights: int, matrix: int | bytes, first: int, second: int, seed: int, offsets: int,
        stream: int, scratch: int,
    ) -> None:  # fmt: skip
        backend.launch(
            launch._replace(
                mu=mu, sigma=sigma, weights=weights, matrix=address_of(matrix), first=first, second=second,
                stream=stream, scratch=scratch, **words_in_memory(seed, offsets),
            )
        )  # fmt: skip

    return MemoryLauncher(run)


def generic_launcher(backend: Backend, launch: Launch) -> Launcher:
    """A `Launcher` that calls `Backend.launch`."""

    def is_valid(mu: Any, sigma: Any, weights: Any) -> bool:
        batch = launch._replace(mu=mu, sigma=sigma, weights=weights or 0)
        for b in range(max(launch.batch, 1)):
            inputs = inputs_at(matrix_of_batch(batch, b))
            if not all(bool(np.isfinite(x).all()) for x in inputs.values()) or not bool((inputs["sigma"] >= 0).all()):
                return False
        return True

    def run(
        geometry: None, mu: Any, sigma: Any, weights: Any, matrix: int | bytes, first: int, second: int, seed: int,
        offset: int, seed_at: int, offset_at: int, first_row: int, first_column: int, stream: int, scratch: int,
    ) -> None:  # fmt: skip
        backend.launch(
            launch._replace(
                mu=mu, sigma=sigma, weights=weights, matrix=address_of(matrix), first=first, second=second, seed=seed,
                offset=offset, seed_at=seed_at, offset_at=offset_at, first_row=first_row, first_column=first_column,
                stream=stream, scratch=scratch,
            )
        )  # fmt: skip

    return Launcher(run, is_valid)
