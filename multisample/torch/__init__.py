"""Additions for PyTorch: `Normal`, `perturb_`, `randn`, `randn_like`, `sample_sharded`, `take_key`, `load_operators`.

`multisample.sample` itself takes tensors, and supports gradients, torch.func and torch.compile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    from ._keys import take_key
    from ._normal import Normal
    from ._perturb import perturb_
    from ._randn import randn, randn_like
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError("multisample.torch needs PyTorch: pip install 'torch>=2.11' ninja setuptools") from error

if TYPE_CHECKING:
    from ._sharded import sample_sharded

__all__ = ["Normal", "load_operators", "perturb_", "randn", "randn_like", "sample_sharded", "take_key"]


def load_operators() -> None:
    """Load ``torch.ops.multisample``, and build it first if necessary.

    A call of `multisample.sample` with torch_ext loads the operators too. Call this function before code that uses the
    operators directly, such as a program saved by ``torch.export.save``.

    Raises
    ------
    BackendUnavailableError
        If torch_ext cannot be built or loaded, for CUDA too if PyTorch has a CUDA device; gives every reason.

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
    from .._routes import torch_compile_perturb  # noqa: F401  It registers the operator of perturb.

    choose("torch_ext", "torch", "cuda" if torch.cuda.is_available() else "cpu")


if not TYPE_CHECKING:  # A type checker that sees __getattr__ accepts every name.

    def __getattr__(name: str) -> Any:
        # DTensors take a second to import, and not every build of PyTorch has them.
        if name != "sample_sharded":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from ._sharded import sample_sharded

        globals()[name] = sample_sharded
        return sample_sharded


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
