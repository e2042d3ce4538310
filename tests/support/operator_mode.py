"""A mode of PyTorch that records operators."""

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Records the names of the operators in `seen`. An operator whose name is `refused` fails the test."""

    def __init__(self, refused: Callable[[str], bool] = lambda name: False) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.refused = refused

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not self.refused(str(function)), function
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))

    @property
    def ours(self) -> list[str]:
        """The names of multisample's operators."""
        return [name for name in self.seen if name.startswith("multisample.")]
