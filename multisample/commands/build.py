"""The `build` command: compiles backends ahead of time, and shows the errors."""

from __future__ import annotations

import argparse
import time
from typing import Any

from multisample.backends import registry
from multisample.backends.native import libraries, prebuilt
from multisample.backends.native.build import LibraryKind

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """Add ``build`` to the command line."""
    parser = subparsers.add_parser(
        "build",
        help="compile a backend ahead of time",
        description="Compile one backend or all available backends ahead of time. The cache on disk"
        " (MULTISAMPLE_CACHE_DIR) stores the results; a damaged library is compiled again. For cpu: all kernels. For"
        " torch_ext: the CPU library, and with CUDA the CUDA library. cupy and numba compile each kernel on first use.",
        allow_abbrev=False,
    )
    parser.add_argument("backend", nargs="?", choices=sorted(registry.names()), help="default: all available backends")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Build the backend of `args`, or all available backends; raises if the named backend cannot be built."""
    for name in [args.backend] if args.backend else registry.names():
        reasons = () if args.backend else registry.find(name).status().reasons
        if reasons:
            print(f"{name}: not built: " + "; ".join(reasons))
        elif name == "torch_ext":
            _build_torch_ext()
        elif name == "cpu":
            _build_cpu()
        else:
            print(f"{name}: nothing to build: {name} compiles each kernel on first use")
    return 0


def _build_cpu() -> None:
    from multisample.backends.kernels.cpu import calls, kernel, moments

    start = time.perf_counter()
    kernels = calls.compile_all() + kernel.compile_all() + moments.compile_all()
    print(f"cpu: compiled {kernels} kernels in {time.perf_counter() - start:.1f} s", flush=True)


def _build_torch_ext() -> None:
    _build_library("cpu")
    reasons = libraries.cuda_reasons(ahead_of_time=True)
    if reasons:
        print("torch_ext, CUDA: not built: " + "; ".join(reasons))
    else:
        _build_library("cuda")


def _build_library(kind: LibraryKind) -> None:
    library = libraries.cpu_library if kind == "cpu" else libraries.cuda_library
    was_built = libraries.is_built(kind)
    start = time.perf_counter()
    path = library(retry=True)
    if path.is_relative_to(prebuilt.root()):
        how = "came with the installation"
    else:
        how = "was built before" if was_built else f"built in {time.perf_counter() - start:.1f} s"
    print(f"torch_ext, {kind.upper()}: {how}: {path}", flush=True)
