"""Launchers of any backend: its own, or made from `Backend.launch`."""

from collections.abc import Callable
from typing import Any

from .contract import Backend, Launcher
from .launch import Launch, Operation
from .memory.host import address_of


def check_operation(backend: Backend, operation: int) -> None:
    """ValueError if the backend does not run `operation`."""
    if operation not in backend.operations:
        found = ", ".join(Operation(other).name for other in backend.operations)
        raise ValueError(
            f"backend: {backend.name!r} cannot run the operation {Operation(operation).name}, only {found}"
        )


def launcher(backend: Backend, launch: Launch) -> Launcher:
    """The `Launcher` of a backend for launches like `launch`; ValueError if the backend does not run the operation."""
    check_operation(backend, launch.operation)
    own: Callable[[Launch], Launcher] | None = getattr(backend, "launcher", None)
    return generic_launcher(backend, launch) if own is None else own(launch)


def generic_launcher(backend: Backend, launch: Launch) -> Launcher:
    """A `Launcher` that calls `Backend.launch`."""

    def run(geometry: None, *arguments: Any) -> None:
        fields = dict(zip(_ARGUMENTS, arguments, strict=True))
        if launch.origin_step:
            fields |= {"first_row": 0, "first_row_at": fields["first_row"], "first_column_at": fields["first_row"]}
        # The caller keeps packed spans, a bytes object, alive.
        backend.launch(launch._replace(**fields | {"matrix": address_of(fields["matrix"])}))

    return Launcher(run)


# The arguments of `Launcher.run` after the geometry.
_ARGUMENTS = (
    "mu", "sigma", "weights", "matrix", "first", "second", "seed", "offset", "seed_at", "offset_at", "first_row",
    "first_column", "stream", "scratch",
)  # fmt: skip
