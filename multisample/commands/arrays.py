"""Reading vectors from files, and writing matrices to files atomically.

A matrix larger than memory is written through a memory map. If the disk fills up under a memory map, a signal kills the
process. So the space is reserved before the first sample is drawn.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

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
    # Not np.load, which treats any other file as a pickle and suggests allow_pickle. open_memmap refuses objects.
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy warns before it raises.
            mapped = np.lib.format.open_memmap(path, mode="r")
        # A signal ends a process that reads mapped memory of a file that another program has truncated.
        vector = np.fromfile(path, mapped.dtype, mapped.size, offset=mapped.offset)
        return vector.reshape(mapped.shape, order="C" if mapped.flags.c_contiguous else "F")
    except OSError as error:
        if error.filename:
            raise
        raise ValueError(f"{path}: {_one_line(error)}") from error
    except MemoryError:
        raise
    except Exception as error:  # A damaged file raises any error from OverflowError to tokenize.TokenError.
        raise ValueError(f"{path}: not a complete .npy file of numbers ({_one_line(error)})") from error


def _one_line(error: Exception, limit: int = 300) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else f"{text[:limit]}..."


# --- Writing ------------------------------------------------------------------------------------------------------


def check_output(output: Path, *, force: bool) -> None:
    """ValueError or OSError if `output` cannot be written."""
    if output.suffix.lower() != ".npy":
        raise ValueError(f"{output}: expected an output file that ends in .npy")
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        output.stat()  # Raises OSError for a loop of links, where resolve() raises RuntimeError.
    folder = output.resolve().parent
    if not folder.is_dir():
        raise OSError(errno.ENOENT, "no such folder", str(folder))
    if not os.access(folder, os.W_OK):
        raise OSError(errno.EACCES, "cannot write to this folder", str(folder))
    if output.exists() and not output.is_file():
        raise FileExistsError(errno.EEXIST, "exists and is not a file", str(output))
    if output.exists() and not force:
        raise _exists(output)


def _exists(output: Path) -> FileExistsError:
    return FileExistsError(errno.EEXIST, "exists; --force overwrites it", str(output))


def write_npy(
    output: Path, shape: tuple[int, int], dtype: np.dtype[Any], fill: Callable[[np.memmap[Any, Any]], None], *,
    force: bool,
) -> None:  # fmt: skip
    """Write the .npy file `output` with an array that `fill` fills. If an error occurs, the folder is unchanged.

    With `force`, the file replaces another one, and gets its permissions. Otherwise another one is an error, also if it
    appears while `fill` runs.
    """
    target = output.resolve()  # Write to the target of a link, so that the link remains.
    # In the same folder, so that the rename is atomic.
    temporary = target.with_name(f".multisample-{secrets.token_hex(8)}.part")
    size = shape[0] * shape[1] * dtype.itemsize
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
    try:
        _check_space(target.parent, size)
        # The temporary file of a private file must be private too.
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666 if mode is None else 0o600))
        mapped = np.lib.format.open_memmap(temporary, mode="w+", dtype=dtype, shape=shape)
        _reserve(temporary)
        fill(mapped)
        mapped.flush()
        del mapped  # Some systems cannot rename an open file.
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
        temporary.unlink(missing_ok=True)


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


def _check_space(folder: Path, size: int) -> None:
    usage = shutil.disk_usage(folder)
    if usage.total and size > usage.free:  # Some network file systems report sizes of 0.
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {size_text(usage.free)} free")


def _reserve(path: Path) -> None:
    if not hasattr(os, "posix_fallocate"):
        return
    with path.open("r+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # The file system cannot reserve space.
                raise
