"""The `sample` command: reads vectors from files and writes a matrix of any size to a file.

A window of the sample matrix can be drawn alone. So a matrix larger than memory is drawn window by window, with the
same bits as in one draw.
"""

import argparse
import re
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from multisample._checks.operands import common_length
from multisample._checks.window_and_options import checked_window
from multisample._sample import sample
from multisample.backends.system.live_line import RARE, LiveLine

from .arrays import Vector, check_output, new_file, read_vector, size_text, to_numpy

_LEAST_MEMORY = 4 << 10


def add_parser(subparsers: Any) -> Any:
    """Add ``sample`` to the command line."""
    parser = subparsers.add_parser(
        "sample",
        help="draw from mu and sigma in files, to a .npy file",
        description="Draw n samples of d dimensions, x[i, j] = mu[i] + sigma[i] * z[i, j], to a .npy file of shape"
        " (d, n). A matrix larger than memory is drawn in windows. Equal seeds give equal bits for every backend and"
        " window size.",
    )
    for name, meaning in (("mu", "means"), ("sigma", "standard deviations")):
        parser.add_argument(name, help=f"{meaning}: a .npy file, or, for one of the two vectors, a number")
    parser.add_argument("-n", "--samples", type=int, required=True, metavar="N", help="number of samples")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the .npy file to write")
    parser.add_argument("--seed", type=int, help="0 <= SEED < 2**64 (default: a random seed, which is printed)")
    parser.add_argument("--backend", default="auto", help="backend that draws (default: auto)")
    for name, choices, meaning in (
        ("--noise", ("independent", "shared"), "separate noise for every dimension, or one row of noise for all"),
        ("--layout", ("dn", "nd"), "dn: shape (d, n); nd: transposed, shape (n, d), with the same bits"),
    ):
        parser.add_argument(name, choices=choices, default=choices[0], help=f"{meaning} (default: {choices[0]})")
    parser.add_argument(
        "--dtype",
        choices=("float16", "float32", "float64"),
        help="default: the dtype of the files; float32 for integers",
    )
    parser.add_argument("--antithetic", action="store_true", help="samples 2 k and 2 k + 1 have opposite noise")
    parser.add_argument("--fast-math", action="store_true", help="a faster, less exact transform on a GPU")
    parser.add_argument("--dim-offset", type=int, default=0, metavar="I", help="first row of the drawn window")
    parser.add_argument("--sample-offset", type=int, default=0, metavar="J", help="first column of the drawn window")
    parser.add_argument("--force", action="store_true", help="overwrite an existing output file")
    parser.add_argument(
        "--memory",
        type=_byte_count,
        default="64M",  # A larger window takes longer: its memory comes fresh from the system.
        metavar="BYTES",
        help="largest window in memory; at least 4K, with suffix K, M or G for powers of 1024 (default: 64M)",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Draw the matrix that `args` describes."""
    start = time.perf_counter()
    check_output(args.output, force=args.force)
    n, _, _ = checked_window(args.samples, args.dim_offset, args.sample_offset)
    seed = secrets.randbits(64) if args.seed is None else args.seed
    options = {"backend": args.backend, "seed": seed, "noise": args.noise}
    options |= {"antithetic": args.antithetic, "fast_math": args.fast_math}
    mu, sigma = (read_vector(name, text) for name, text in (("mu", args.mu), ("sigma", args.sigma)))
    d, dtype = _check(mu, sigma, args, options)
    # Each call below passes `dtype`, so the dtypes of the vectors do not matter.
    vectors = [np.asarray(mu), np.asarray(sigma)]
    total = d * n * dtype.itemsize
    transposed = args.layout == "nd"
    shape = (n, d) if transposed else (d, n)
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    done, begin = 0, time.monotonic()
    with new_file(args.output, total, force=args.force) as file, LiveLine(sys.stderr, RARE) as line:
        np.lib.format.write_array_header_1_0(file, header)
        for window in windows(shape, args.memory // dtype.itemsize):
            rows, columns = reversed(window) if transposed else window
            window_mu, window_sigma = (x[rows] if x.ndim else float(x) for x in vectors)
            drawn = sample(
                window_mu,
                window_sigma,
                columns.stop - columns.start,
                layout=args.layout,
                dtype=dtype.name,
                dim_offset=args.dim_offset + rows.start,
                sample_offset=args.sample_offset + columns.start,
                **options,
            )
            done += file.write(to_numpy(drawn).data)
            if total > args.memory:
                show = line.show if done == total else line.update
                show(_progress(done, total, time.monotonic() - begin))
    elapsed = time.perf_counter() - start
    print(f"{args.output}: shape {shape}, {dtype.name}, seed {seed}, {elapsed:.3g} s")
    return 0


def _check(mu: Vector, sigma: Vector, args: argparse.Namespace, options: dict[str, Any]) -> tuple[int, np.dtype[Any]]:
    """The number of dimensions and the dtype of the result; `sample` checks everything except `n`."""
    try:
        # Draw no columns. `validate` also checks values that the backend has copied to a device.
        empty = sample(
            mu, sigma, 0, dtype=args.dtype, dim_offset=args.dim_offset, sample_offset=args.sample_offset,
            validate=True, **options,
        )  # fmt: skip
        common_length({name: np.shape(x) for name, x in (("mu", mu), ("sigma", sigma))})
    except (TypeError, ValueError) as error:
        if str(error).startswith(("mu", "sigma")):
            raise ValueError(f"{error}; mu is {args.mu}, sigma is {args.sigma}") from error
        raise
    return empty.shape[0], to_numpy(empty).dtype


def windows(shape: tuple[int, int], capacity: int) -> Iterator[tuple[slice, slice]]:
    """Windows of at most `capacity` elements that tile a matrix of this shape: contiguous, in the order of its file."""
    height, width = shape
    # Windows of whole blocks of the stream, which have four samples, compute no block twice. In layout nd, a row is a
    # sample: where only one to three rows fit into a window, up to four windows compute the same block.
    if width > capacity:
        rows, columns = 1, capacity - capacity % 4
    else:
        rows, columns = capacity // max(width, 1), max(width, 1)
        rows -= rows % 4 if rows > 4 else 0
    for top in range(0, height, rows):
        for left in range(0, width, columns):
            yield slice(top, min(top + rows, height)), slice(left, min(left + columns, width))


def _byte_count(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)", text.upper(), re.ASCII)
    count = int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]] if match else 0
    if count < _LEAST_MEMORY:
        raise argparse.ArgumentTypeError(f"expected bytes, at least 4K, such as 500M or 2G, got {text!r}")
    return count


def _progress(done: int, total: int, seconds: float) -> str:
    """The bytes written, the rate and the time left."""
    rate = done / max(seconds, 1e-9)
    return (
        f"{100 * done // total:3d}%  {size_text(done)} of {size_text(total)}"
        f"  {size_text(rate)}/s  {(total - done) / rate:.0f} s left"
    )
