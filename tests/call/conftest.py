"""Where the parameters of `perturb` are, and the backend that serves them there."""

from typing import Any, NamedTuple

import pytest
from skip_rules import require


class Place(NamedTuple):
    backend: str
    device: str

    def put(self, x: Any) -> Any:
        """A copy of a tensor on the device, with its strides."""
        import torch

        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=self.device).copy_(x)


def _place(request: pytest.FixtureRequest) -> Place:
    backend, device = request.param
    require(backend, on_cuda=device == "cuda")
    if device == "cuda" and not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("this PyTorch has no CUDA device")
    return Place(backend, device)


ON_CPU, ON_CUDA = ("cpu", "torch_ext"), ("torch_ext", "cupy", "numba")
EVERYWHERE = [*((name, "cpu") for name in ON_CPU), *((name, "cuda") for name in ON_CUDA)]
everywhere = pytest.fixture(_place, params=EVERYWHERE, ids="-".join)


@pytest.fixture(params=ON_CPU)
def host(request: pytest.FixtureRequest) -> str:
    """The name of a backend for arrays in host memory."""
    require(request.param, on_cuda=False)
    return str(request.param)
