"""Dask arrays whose blocks are windows of one matrix of samples.

A window needs no other window, so blocks are drawn in any order, by any worker, and drawn again where one is lost.
"""

from __future__ import annotations

import functools
import math
from typing import Any, SupportsIndex

import numpy as np

try:
    import dask.array as da
    from dask.array.core import normalize_chunks
    from dask.array.utils import meta_from_array
    from dask.base import tokenize
    from dask.layers import ArraySliceDep
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "dask":
        raise
    raise ImportError("multisample.dask needs Dask: pip install 'dask[array]>=2025.3' distributed") from error

from .._arguments import describe
from .._checks.operands import common_length
from .._checks.window_and_options import checked_window
from .._libraries import CPU, HOST, is_number, library_of
from .._limit_threads import limit_threads
from .._randomness.generator import Generator, Key
from .._randomness.generator_argument import check_generator, source_of
from .._randomness.seed_argument import checked_key
from .._sample import sample as draw
from .._typing import DType, Layout, Noise

__all__ = ["sample"]


def sample(
    mu: Any,
    sigma: Any,
    n: SupportsIndex,
    *,
    chunks: Any = "auto",
    seed: SupportsIndex | Key | None = None,
    generator: Generator | None = None,
    noise: Noise = "independent",
    dtype: DType | None = None,
    layout: Layout = "dn",
    antithetic: bool = False,
    fast_math: bool = False,
    backend: str = "auto",
) -> da.Array:
    """Draw one matrix of samples as a lazy Dask array.

    The computed array equals the result of `multisample.sample`, bit for bit, for all chunks, workers and schedulers.
    Each block is drawn when it is computed, by one thread.

    Parameters
    ----------
    mu, sigma : array or dask.array.Array, shape (d,) or (d, 1)
        Means, and standard deviations of at least 0: NumPy or CuPy arrays, lists, or Dask arrays of NumPy or CuPy
        blocks. One of the two may be a number. The graph holds an array once, and sends it once to a worker.
        Vectors that are too large for that should be Dask arrays; they are rechunked to the rows of `chunks`.
    chunks : int, tuple, dict, str or -1, default "auto"
        The blocks of the result, in any form that `dask.array` takes.
    n, seed, generator, noise, dtype, layout, antithetic, fast_math : various
        As in `multisample.sample`, with one seed or a `Generator`. A block may cut an antithetic pair.
    backend : str, default "auto"
        "cupy" gives blocks of CuPy, drawn on the GPU of the worker. "auto" and "cpu" give blocks of the library of `mu`
        and `sigma`, which is NumPy for lists.

    Returns
    -------
    dask.array.Array, shape (d, n), or (n, d) with layout "nd"
        Equal arguments give equal names of blocks, so Dask computes equal arrays once.

    Raises
    ------
    TypeError
        If `mu` or `sigma` is not an array of NumPy, CuPy or Dask; also as for `multisample.sample`.
    ValueError
        If `chunks` do not add up to the shape, or have an unknown size; if a Dask array has unknown chunks; also as for
        `multisample.sample`. Values in Dask arrays are checked block by block, when they are computed.
    UnknownBackendError
        If no backend is called `backend`.
    BackendUnavailableError
        If the backend cannot run in this process, or, when a block is computed, in the worker's.

    Notes
    -----
    A block gets its window from its position, so the graph has no entry for each block until Dask schedules it: a graph
    of 10**6 blocks takes under a second and under 10 MB. Blockwise operations on the result are fused with the draw.

    Examples
    --------
    >>> import multisample
    >>> x = multisample.dask.sample([0.0, 10.0], [1.0, 0.5], 10**9, chunks=(2, 10**6), seed=7)
    >>> x
    dask.array<sample, shape=(2, 1000000000), dtype=float32, chunksize=(2, 1000000), chunktype=numpy.ndarray>
    >>> x[:, 4:8].compute()
    array([[-0.4690999 , -0.49651867, -0.90605396,  1.0891341 ],
           [10.0463505 , 10.319257  , 10.5873995 , 10.31622   ]],
          dtype=float32)
    """
    n, _, _ = checked_window(n, 0, 0)
    vectors = [_vector(name, x) for name, x in (("mu", mu), ("sigma", sigma))]
    options: dict[str, Any] = {
        "noise": noise, "layout": layout, "antithetic": antithetic, "fast_math": fast_math, "backend": backend,
    }  # fmt: skip
    key = (0, 0) if seed is None else checked_key(seed)
    # An empty draw, which checks the arguments and makes an array like the blocks.
    mu_like, sigma_like = map(_stand_in, vectors)
    no_samples: Any = draw(
        mu_like, sigma_like, 0, seed=Key(*key), generator=None if seed is None else generator, dtype=dtype,
        **options,
    )  # fmt: skip
    if library_of("mu", no_samples).name not in ("numpy", "cupy"):
        raise TypeError(
            f"backend: expected one that gives blocks of NumPy or CuPy, got {backend!r} with blocks of type"
            f" {type(no_samples).__name__}"
        )
    d = common_length({name: np.shape(x) for name, x in zip(("mu", "sigma"), vectors, strict=True)})
    sizes = _checked_chunks(chunks, (d, n) if layout == "dn" else (n, d), no_samples.dtype)
    if seed is None:
        check_generator(generator, HOST, CPU)
        key = source_of(generator, HOST, CPU).take(generator)

    rows = "i" if layout == "dn" else "j"
    arguments: list[Any] = [ArraySliceDep(sizes), "ij"]
    for x in vectors:
        if is_number(x) or not x.ndim:
            arguments += [float(x), None]
            continue
        if isinstance(x, da.Array):
            vector = (x[:, 0] if x.ndim == 2 else x).rechunk((sizes[layout == "nd"],))
        else:  # One block; each block of the result takes its rows from it.
            vector = da.from_array(x.reshape(-1), chunks=-1)
        arguments += [vector, rows]
    options["dtype"] = str(no_samples.dtype)
    block = functools.partial(_draw_block, seed=Key(*key), **options)
    token = tokenize(sizes, key, *sorted(options.items()), *(getattr(x, "name", x) for x in arguments[2::2]))
    array: da.Array = da.blockwise(
        block, "ij", *arguments, name=f"sample-{token}", meta=no_samples[:0, :0], align_arrays=False
    )
    return array


def _vector(name: str, x: Any) -> Any:
    """`mu` or `sigma` as a number, or an array of NumPy, CuPy or Dask."""
    if isinstance(x, da.Array):
        if any(map(math.isnan, x.shape)):
            raise ValueError(
                f"{name}: expected a Dask array with known chunks, as by compute_chunk_sizes(), got shape {x.shape}"
            )
        return x
    if is_number(x):
        return x
    library = library_of(name, x)
    if library is HOST:
        return HOST.normalized(name, x)
    if library.name != "cupy":
        raise TypeError(
            f"{name}: expected an array of NumPy, CuPy or Dask, a list or a number, got {describe(x)} of type"
            f" {type(x).__name__}"
        )
    return x


def _stand_in(x: Any) -> Any:
    """`x`; for a Dask array, an array of its blocks' library with its shape and dtype, in the memory of one element."""
    if not isinstance(x, da.Array):
        return x
    one = np.ones_like(meta_from_array(x), shape=(1,))
    return np.broadcast_to(one[0], x.shape)


def _checked_chunks(chunks: Any, shape: tuple[int, int], dtype: np.dtype[Any]) -> tuple[tuple[int, ...], ...]:
    """`chunks` as sizes of blocks; ValueError if they do not add up to `shape`."""
    try:
        sizes: tuple[tuple[int, ...], ...] = normalize_chunks(chunks, shape, dtype=dtype)
        valid = all(sum(axis) == length and min(axis) >= 0 for axis, length in zip(sizes, shape, strict=True))
    except (TypeError, ValueError, ArithmeticError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"chunks: expected blocks of shape {shape}, got {describe(chunks)} ({reason})") from error
    if not valid:
        raise ValueError(f"chunks: expected sizes that add up to shape {shape}, got {describe(chunks)}")
    return sizes


def _draw_block(window: tuple[slice, slice], mu: Any, sigma: Any, **options: Any) -> Any:
    """The block at `window`. `mu` and `sigma` are numbers, the block's rows, or all rows."""
    rows, columns = window if options["layout"] == "dn" else window[::-1]
    d = rows.stop - rows.start
    mu, sigma = (x if is_number(x) or len(x) == d else x[rows] for x in (mu, sigma))
    try:
        # The scheduler's threads draw other blocks at the same time.
        with limit_threads(1):
            return draw(
                mu, sigma, columns.stop - columns.start, dim_offset=rows.start, sample_offset=columns.start, **options
            )  # fmt: skip
    except ValueError as error:  # Indices in the message count within the block.
        raise ValueError(f"{error} (in the rows from {rows.start} on)") from error
