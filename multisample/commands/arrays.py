"""Reading vectors from files, and writing files atomically."""

import contextlib
import errno
import os
import secrets
import shutil
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from multisample._arguments import describe
from multisample.backends.contract import HostArray

Vector: TypeAlias = HostArray | float


def to_numpy(array: Any) -> HostArray:
    """Convert any library's array to a NumPy array; waits for the device."""
    for method in ("get", "copy_to_host", "cpu"):  # CuPy, Numba, PyTorch
        if hasattr(array, method):
            array = getattr(array, method)()
    return np.asarray(array)


def size_text(size: float) -> str:
    """`size` in bytes as text with a unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


# --- Reading ------------------------------------------------------------------------------------------------------


def read_vector(name: str, text: str) -> Vector:
    """Read the argument `name`: a number, or the path of a .npy file. `sample` checks the shape and the values."""
    with contextlib.suppress(ValueError):
        return float(text)
    path = Path(text)
    if path.suffix.lower() != ".npy":
        raise ValueError(f"{name}: expected a number or a .npy file, got {text!r}")
    # np.load would read another format as a pickle, and would suggest allow_pickle. read_array refuses objects.
    with path.open("rb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy warns before it raises.
        try:
            vector: HostArray = np.lib.format.read_array(file)
        except MemoryError:
            raise
        except Exception as error:  # A damaged file raises any error from OverflowError to tokenize.TokenError.
            raise ValueError(f"{path}: not a complete .npy file of numbers ({describe(error, 300)})") from error
    return vector


# --- Writing ------------------------------------------------------------------------------------------------------


def check_output(output: Path, *, force: bool) -> None:
    """ValueError or OSError if `output` cannot be the name of a new file."""
    if output.suffix.lower() != ".npy":
        raise ValueError(f"{output}: expected an output file that ends in .npy")
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # Not the OSError for a loop of links.
        if not stat.S_ISREG(output.stat().st_mode):
            raise FileExistsError(errno.EEXIST, "exists and is not a file", str(output))
        if not force:
            raise _exists(output)


def _exists(output: Path) -> FileExistsError:
    return FileExistsError(errno.EEXIST, "exists; --force overwrites it", str(output))


@contextlib.contextmanager
def new_file(output: Path, size: int, *, force: bool) -> Iterator[BinaryIO]:
    """A file for about `size` bytes, which gets the name `output` at the end. After an error, the folder is unchanged.

    With `force`, the file replaces another one, and gets its permissions.
    """
    target = Path(os.path.realpath(output))  # Write to the target of a link, so that the link remains.
    # In the same folder, so that the rename is atomic.
    temporary = target.with_name(f".multisample-{secrets.token_hex(8)}.part")
    try:
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
        # The temporary file of a private file must be private too.
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666 if mode is None else 0o600)
        with os.fdopen(descriptor, "wb") as file:
            disk = shutil.disk_usage(target.parent)
            if disk.total and size > disk.free:  # Some network file systems report sizes of 0.
                raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {size_text(disk.free)} free")
            yield file
        if mode is not None:
            temporary.chmod(mode)
        if force or not _link(temporary, target):
            temporary.replace(target)
    except FileExistsError:
        raise _exists(output) from None
    except OSError as error:
        # Name `output`, since the user has not seen the temporary file's name.
        message = f"{error.strerror or error} ({size_text(size)} to write)"
        raise OSError(error.errno, message, str(output)) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _link(temporary: Path, target: Path) -> bool:
    """Give the file `temporary` the name `target` too; FileExistsError if the name is taken.

    Where the file system has no hard links, return False with an empty file in place of `target`.
    """
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise
    except OSError:
        os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        return False
    return True
