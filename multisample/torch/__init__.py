"""What PyTorch users find beside `multisample.sample`, which takes their tensors as it takes any other array.

Gradients, torch.func and torch.compile need nothing from here: `multisample.sample` is the same call there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    from ._keys import take_key
    from ._normal import Normal
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError("multisample.torch needs PyTorch: pip install 'torch>=2.11' ninja setuptools") from error

if TYPE_CHECKING:
    from ._sharded import sample_sharded

__all__ = ["Normal", "load_operators", "sample_sharded", "take_key"]


def load_operators() -> None:
    """Load ``torch.ops.multisample``, which is first built if it has not been.

    A call of `multisample.sample` that takes torch_ext does as much; but what calls the operators directly, as does a
    program that was saved by ``torch.export.save``, may come first.

    Raises
    ------
    BackendUnavailableError
        With every reason, if torch_ext cannot be built or loaded, for CUDA too where PyTorch has a CUDA device.

    Examples
    --------
    >>> import torch
    >>> import multisample.torch
    >>> multisample.torch.load_operators()
    >>> x = torch.ops.multisample.sample(torch.zeros(3), torch.ones(3), 5, seed=7)
    >>> torch.equal(x, multisample.sample(torch.zeros(3), 1.0, 5, seed=7))
    True
    """
    import torch

    from .._backends import choose

    choose("torch_ext", "torch", "cuda" if torch.cuda.is_available() else "cpu")


def __getattr__(name: str) -> Any:
    # DTensors take a second to import, and not every build of PyTorch has them.
    if name != "sample_sharded":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ._sharded import sample_sharded

    globals()[name] = sample_sharded
    return sample_sharded


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
