"""The `build` command: compiles backends ahead of time, and shows the errors."""

import argparse
import contextlib
import functools
import io
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, wait
from typing import Any

from multisample.backends import registry
from multisample.backends.native import library_cache, prebuilt
from multisample.backends.native.units import LibraryKind
from multisample.backends.system.live_line import RARE, LiveLine
from multisample.backends.system.threads import thread_count

from .workers import Workers


def add_parser(subparsers: Any) -> Any:
    """Add ``build`` to the command line."""
    parser = subparsers.add_parser(
        "build",
        help="compile a backend ahead of time",
        description="Compile one backend or all available backends ahead of time. The cache on disk"
        " (MULTISAMPLE_CACHE_DIR) stores the results; a damaged library is compiled again. For cpu: about 50"
        " seconds of work that the processors share. For torch_ext: these kernels, the operators and, with CUDA, the"
        " CUDA library with the kernels of all calls; without this command, a call compiles the kernels that it needs."
        " cupy and numba compile each kernel on first use.",
    )
    parser.add_argument("backend", nargs="?", choices=sorted(registry.names()), help="default: all available backends")
    return parser


def run(args: argparse.Namespace) -> int:
    """Build the backend of `args`, or all available backends; raises if the named backend cannot be built."""
    has_kernels = False
    for name in [args.backend] if args.backend else registry.names():
        reasons = () if args.backend else registry.find(name).status().reasons
        if reasons:
            print(f"{name}: not built: " + "; ".join(reasons))
        elif name == "torch_ext":
            _build_torch_ext()
            has_kernels = True
        elif name == "cpu":
            if not has_kernels:
                print(_compile_kernels(), flush=True)
        else:
            print(f"{name}: nothing to build: {name} compiles each kernel on first use")
    return 0


# --- Kernels for the CPU ----------------------------------------------------------------------------------------------


def _compile_kernels() -> str:
    """Compile the kernels, in processes, since threads would wait for Numba's lock. Returns a line about them."""
    # Numba takes half a second to import.
    from multisample.backends.kernels.cpu import calls

    kernels = calls.kernels()
    done: list[tuple[bool, set[tuple[str, type[Warning]]]]] = []
    start = time.monotonic()

    def show() -> None:
        line.update(f"cpu: {len(done)} of {len(kernels)} kernels, {time.monotonic() - start:.0f} s")

    with LiveLine(sys.stderr, RARE) as line, Workers(min(thread_count(), len(kernels))) as pool:
        show()
        waiting = {pool.submit(_compile, kernel) for kernel in kernels}
        # The pool notices the death only of workers that ran before the latest `submit`, so submit once more.
        pool.submit(int)
        while waiting:
            finished, waiting = wait(waiting, 1.0, FIRST_COMPLETED)
            done += [future.result() for future in finished]
            show()
    # Show a warning once, even if several processes gave it.
    for message, category in sorted({warning for _, found in done for warning in found}, key=str):
        warnings.warn(message, category, stacklevel=1)
    compiled = sum(was_compiled for was_compiled, _ in done)
    before = f"; {len(done) - compiled} were compiled before" if compiled < len(done) else ""
    return f"cpu: compiled {compiled} kernels in {time.monotonic() - start:.1f} s{before}"


def _compile(kernel: Callable[[], Any]) -> tuple[bool, set[tuple[str, type[Warning]]]]:
    """Whether the kernel was not in the cache, and warnings."""
    from numba.core.event import install_recorder

    with (
        install_recorder("numba:compile") as compilations,
        contextlib.redirect_stderr(io.StringIO()),  # Each process would print that it compiles.
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always", RuntimeWarning)
        kernel()
    return bool(compilations.buffer), {(str(warning.message), warning.category) for warning in caught}


# --- Libraries --------------------------------------------------------------------------------------------------------


def _build_torch_ext() -> None:
    """Build the libraries, and compile the kernels for the CPU at the same time."""
    reasons = library_cache.cuda_reasons(ahead_of_time=True)
    kinds: tuple[LibraryKind, ...] = ("cpu",) if reasons else ("cpu", "cuda")
    built_before = [kind for kind in kinds if library_cache.is_built(kind, whole=True)]
    kernels = functools.cache(_compile_kernels)
    start = time.perf_counter()
    libraries = library_cache.libraries(kinds, whole=True, meanwhile=kernels)
    seconds = time.perf_counter() - start
    for kind, path in libraries.items():
        if path.is_relative_to(prebuilt.root()):
            how = "came with the installation"
        else:
            how = "was built before" if kind in built_before else f"built in {seconds:.1f} s"
        print(f"torch_ext, {kind.upper()}: {how}: {path}", flush=True)
    if reasons:
        print("torch_ext, CUDA: not built: " + "; ".join(reasons))
    print(kernels(), flush=True)
