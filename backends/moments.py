"""One launch of weighted moments: ``Moments`` of ``csrc/moments.h``. Every layer passes it.

C++ and CUDA kernels take its bytes, kernels in Python its fields.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

from .draw import PACKED_DRAW, Draw, Vector, pack, packer

__all__ = ["PACKED_MOMENTS", "Moments", "moments_packer", "pack_moments"]


class Moments(NamedTuple):
    """Weighted moments of a sample.

    With w the weights: ``first[r]`` is the sum of ``w[c] * (mu[r] + sigma[r] * z[r, c])`` over all columns c, and
    ``second[r]`` that of ``w[c] * (sigma[r] * z[r, c]) ** 2``.
    """

    draw: Draw
    """The noise z, `mu` and `sigma`, and as `type` that of both results. Its matrix, strides and batch are not used."""
    weights: Vector
    first: int
    """Address of `rows` contiguous elements."""
    second: int
    """The same; 0 for none."""


_TAIL = struct.Struct("PqdI4xPP")

PACKED_MOMENTS = PACKED_DRAW + _TAIL.size
"""Bytes of a `Moments`."""


def pack_moments(moments: Moments) -> bytes:
    """The bytes of the C++ struct ``Moments``."""
    return pack(moments.draw) + _TAIL.pack(*moments.weights[:4], moments.first, moments.second)


def moments_packer(moments: Moments) -> Callable[..., bytes]:
    """A function that packs moments like `moments`, faster than `pack_moments`.

    ``packed(weights, mu, sigma, first, second, seed, offset, first_row, first_column, stream, scratch=0, threads=0)``,
    where `mu` and `sigma` are addresses, or numbers if the draw has numbers.
    """
    draw, tail, (_, stride, _, kind, _) = packer(moments.draw), _TAIL.pack, moments.weights
    return lambda weights, mu, sigma, first, second, seed, offset, row, column, stream, scratch=0, threads=0: (
        draw(mu, sigma, 0, seed, offset, 0, row, column, stream, threads, scratch)
        + tail(weights, stride, 0.0, kind, first, second)
    )
