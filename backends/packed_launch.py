"""Launching from Python: what the backends share that pack a call and cut it into blocks themselves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .contract import RawArray, RawVector
from .geometry import Geometry, geometry
from .sample_call import pack_call, pack_plain_call

__all__ = ["PackedLaunch"]


class PackedLaunch:
    """`launch` and `plain_launch` of `multisample.backends.contract.Backend`, for a class that has `_run`."""

    def plain_launch(self) -> Callable[..., None]:
        """As the contract says."""
        return self._launch_plain

    def launch(
        self,
        mu: RawVector,
        sigma: RawVector,
        out: RawArray,
        dtype: str,
        seed: int,
        offset: int,
        counter: int,
        dim_offset: int,
        sample_offset: int,
        shared: bool,
        antithetic: bool,
        fast_math: bool,
        device: int,
        stream: int,
    ) -> None:
        """As the contract says, on a CUDA device."""
        assert not isinstance(out, np.ndarray)
        rows, columns = out.shape
        cut, packed_cut = geometry(
            rows, columns, dtype, out.strides, out.pointer % 32, sample_offset % 8,
            shared or (fast_math and dtype != "float64"), shared, antithetic,
        )  # fmt: skip
        packed = pack_call(
            mu, sigma, out, dtype, seed, offset, counter, dim_offset, sample_offset,
            shared, antithetic, fast_math, device, stream,
        )  # fmt: skip
        self._run(packed, cut, packed_cut, dtype, shared, antithetic, fast_math, device, stream)

    def _launch_plain(
        self,
        mu: int,
        sigma: int,
        out: int,
        d: int,
        n: int,
        dtype: str,
        seed: int,
        offset: int,
        shared: bool,
        fast_math: bool,
        device: int,
        stream: int,
    ) -> None:
        packed = pack_plain_call(mu, sigma, out, d, n, dtype, seed, offset, shared, fast_math, device, stream)
        size = 8 if dtype == "float64" else 4
        cheap = shared or (fast_math and size == 4)
        cut, packed_cut = geometry(d, n, dtype, (n * size, size), out % 32, 0, cheap, shared, False)
        self._run(packed, cut, packed_cut, dtype, shared, False, fast_math, device, stream)

    def _run(
        self,
        packed: bytes,
        cut: Geometry,
        packed_cut: bytes,
        dtype: str,
        shared: bool,
        antithetic: bool,
        fast_math: bool,
        device: int,
        stream: int,
    ) -> None:
        """Launch the kernel for such a call with the bytes of both C++ structs."""
        raise NotImplementedError
