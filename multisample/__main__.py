"""``python -m multisample``: the command line.

`multisample.commands` has the commands. This module parses the line, and prints errors that are not bugs as one line.
"""

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from multisample.backends.errors import BackendUnavailableError
from multisample.backends.system.cache import say

from ._version import __version__
from .commands import COMMANDS, report

__all__ = ["main"]


# Packages of the examples: the name of each library, and the command that installs it.
_INSTALL = {
    "cupy": ("CuPy", "pip install cupy-cuda12x, or cupy-cuda13x for CUDA 13"),
    "dask": ("Dask", "pip install 'dask[array]'"),
    "distributed": ("distributed", "pip install distributed"),
    "jax": ("JAX", "pip install jax"),
    "torch": ("PyTorch", "pip install torch"),
}


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"multisample: error: {message} ({self.prog} --help says more)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` names; returns the exit code."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # The caller has closed it. Otherwise the next file would get its descriptor.
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
    parser = _Parser(
        prog="python -m multisample",
        description="Normal vectors with independent components: same seed, same bits, on every backend."
        " Without a command: the report.",
    )
    parser.add_argument("--version", action="version", version=f"multisample {__version__}")
    parser.set_defaults(run=report.run)
    subparsers = parser.add_subparsers(title="commands", metavar="command")
    for command in COMMANDS:
        command.add_parser(subparsers).set_defaults(run=command.run)

    try:
        with _stopped_by_signals():
            args = parser.parse_args(argv)
            code: int = args.run(args)
            _flush("stdout")  # If the pipe is closed, fail here, inside the `try`.
            return code
    except BrokenPipeError:  # The reader has closed the pipe.
        return 128 + 13
    except KeyboardInterrupt as interrupt:
        stopped_by = interrupt.args[0] if interrupt.args else signal.SIGINT
        say(f"stopped by {stopped_by.name}")
        return 128 + stopped_by
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else error)
    except MemoryError as error:
        return _fail(f"out of memory: {error}" if str(error) else "out of memory")
    except (ValueError, TypeError, BackendUnavailableError, BrokenExecutor) as error:
        return _fail(error)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _INSTALL:
            raise
        library, advice = _INSTALL[package]
        return _fail(f"{library} is not installed: {advice}")
    finally:
        for name in ("stdout", "stderr"):
            with contextlib.suppress(OSError):
                _flush(name)


def _fail(message: object) -> int:
    say(f"error: {message}")
    return 1


def _flush(name: str) -> None:
    """Flush a stream. After an error, redirect it to /dev/null, since Python flushes it again at exit."""
    stream = getattr(sys, name)
    try:
        stream.flush()
    except OSError as error:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise OSError(error.errno, error.strerror, name) from error


# Signals that end a process, except those of errors in the process.
_SIGNALS = (
    "SIGALRM", "SIGHUP", "SIGIO", "SIGPROF", "SIGPWR", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGVTALRM",
    "SIGXCPU",
)  # fmt: skip


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Turn signals that would end the process into KeyboardInterrupt, so that cleanup runs."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number))

    def send_again(ignored: Any) -> None:
        # Python ignores an exception in a C callback, such as LLVM's, and calls this hook. It also ignores exceptions
        # that the hook raises. So a timer sends the signal again.
        if isinstance(ignored.exc_value, KeyboardInterrupt):
            number = ignored.exc_value.args[0] if ignored.exc_value.args else signal.SIGINT
            threading.Timer(0.01, os.kill, (os.getpid(), number)).start()
        else:
            hook(ignored)

    hook, sys.unraisablehook = sys.unraisablehook, send_again
    previous = {}
    try:
        for name in _SIGNALS:
            number = getattr(signal, name, None)
            # A signal that is ignored, as after nohup, stays ignored. Only the main thread may set handlers.
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                with contextlib.suppress(ValueError):
                    previous[number] = signal.signal(number, stop)
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        sys.unraisablehook = hook


if __name__ == "__main__":
    raise SystemExit(main())
