"""oneMKL's vsRngGaussian, of the package `mkl`, through ctypes."""

import ctypes
import functools
import importlib.metadata
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

# Constants of mkl_vsl_defines.h: the fastest generators; ICDF, a transform faster than Box-Muller; SEQUENTIAL, since
# one thread draws the numbers of a stream.
GENERATORS = {"SFMT19937": 13 << 20, "ARS5": 15 << 20, "Philox4x32x10": 16 << 20}
ICDF, SEQUENTIAL = 2, 1
# One call draws many short rows in less time than a call for each. mu and sigma are applied after it, in the cache.
SHORT, BLOCK = 2**13, 2**17


@functools.cache
def _library() -> ctypes.CDLL:
    files = importlib.metadata.files("mkl") or []
    library = ctypes.CDLL(str(next(file for file in files if file.name.startswith("libmkl_rt.so")).locate()))
    library.MKL_Set_Threading_Layer(SEQUENTIAL)
    integer, address, number = ctypes.c_int, ctypes.c_void_p, ctypes.c_float
    library.vsRngGaussian.argtypes = [integer, address, integer, address, number, number]
    return library


def missing() -> str | None:
    """Why oneMKL cannot run here, or None."""
    try:
        _library()
    except (importlib.metadata.PackageNotFoundError, StopIteration, OSError) as error:
        return f"no oneMKL: pip install --no-deps mkl ({type(error).__name__}: {error})"
    return None


def filling(generator: str, threads: int) -> Callable[[Any, Any], None]:
    """A function that fills a matrix, given columns (mu, sigma), or None for z alone.

    Each of the `threads` has a stream with a seed of its own, and a part of the rows.
    """
    library, streams, pool = _library(), [ctypes.c_void_p() for _ in range(threads)], ThreadPoolExecutor(threads)
    for seed, stream in enumerate(streams):
        if status := library.vslNewStream(ctypes.byref(stream), GENERATORS[generator], seed + 7):
            raise RuntimeError(f"{generator}: expected a stream, got the status {status} of vslNewStream")

    def fill_part(stream: ctypes.c_void_p, out: Any, columns: Any) -> None:
        d, n = out.shape
        rows = 1 if n > SHORT else BLOCK // n
        for i in range(0, d, d if columns is None else rows):
            part = out[i:] if columns is None else out[i : i + rows]
            fused = columns is not None and rows == 1
            mean, deviation = [float(column[i, 0]) for column in columns] if fused else (0.0, 1.0)
            library.vsRngGaussian(ICDF, stream, part.size, part.ctypes.data, mean, deviation)
            if columns is not None and not fused:
                np.multiply(part, columns[1][i : i + rows], out=part)
                np.add(part, columns[0][i : i + rows], out=part)

    def fill(out: Any, columns: Any = None) -> None:
        if threads == 1:
            return fill_part(streams[0], out, columns)
        bounds = [len(out) * thread // threads for thread in range(threads + 1)]
        parts = [slice(*pair) for pair in itertools.pairwise(bounds)]
        vectors = [columns and [column[part] for column in columns] for part in parts]
        list(pool.map(fill_part, streams, [out[part] for part in parts], vectors))

    return fill
