"""What PyTorch users find beside `multisample.sample`, which takes their tensors as it takes any other array."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._sharded import sample_sharded

__all__ = ["sample_sharded"]


def __getattr__(name: str) -> Any:
    # DTensors take a second to import, and not every build of PyTorch has them.
    if name != "sample_sharded":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ._sharded import sample_sharded

    globals()[name] = sample_sharded
    return sample_sharded


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
