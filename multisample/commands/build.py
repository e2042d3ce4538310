"""The `build` command: what is compiled on first use otherwise, ahead of time, where somebody sees what goes wrong."""

from __future__ import annotations

import argparse
import time
from typing import Any

from multisample.backends import prebuilt, registry, torch_ext_build

__all__ = ["add_parser", "run"]

_BUILT = "torch_ext"


def add_parser(subparsers: Any) -> None:
    """Add ``build`` to the command line."""
    parser = subparsers.add_parser(
        "build",
        help="compile a backend ahead of time",
        description="Compile a backend ahead of time, and keep the result on disk, in MULTISAMPLE_CACHE_DIR if set."
        " For torch_ext: the CPU library, and the CUDA library where there is CUDA. The other backends have nothing"
        " to build: they compile on first use.",
        allow_abbrev=False,
    )
    parser.add_argument("backend", choices=sorted({_BUILT, *registry.names()}), help="the backend to build")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Build the backend of `args`; 1, by way of an error, if it cannot be built."""
    if args.backend != _BUILT:
        print(f"{args.backend}: nothing to build: it compiles on first use")
        return 0
    _build("cpu")
    reasons = torch_ext_build.cuda_reasons(ahead_of_time=True)
    if reasons:
        print(f"{_BUILT}, CUDA: not built: " + "; ".join(reasons))
    else:
        _build("cuda")
    return 0


def _build(kind: torch_ext_build.LibraryKind) -> None:
    library = torch_ext_build.cpu_library if kind == "cpu" else torch_ext_build.cuda_library
    had = torch_ext_build.is_built(kind)
    start = time.perf_counter()
    path = library(retry=True)
    if path.is_relative_to(prebuilt.root()):
        how = "came with the installation"
    else:
        how = "was built before" if had else f"built in {time.perf_counter() - start:.1f} s"
    print(f"{_BUILT}, {kind.upper()}: {how}: {path}", flush=True)
