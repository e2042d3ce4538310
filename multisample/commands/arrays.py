"""Vectors in from files, matrices out to files: a result is there whole, or it is not there at all.

A matrix that is larger than memory is written through a memory map. A disk that fills up under a memory map ends the
process with a signal that nothing can catch, so the space is reserved before the first sample is drawn.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import os
import secrets
import shutil
import stat
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO, TypeAlias

import numpy as np

from multisample.backends.contract import HostArray

__all__ = ["Vector", "check_output", "read_vector", "size_text", "to_numpy", "write_npy"]

Vector: TypeAlias = HostArray | list[float] | float


def to_numpy(array: Any) -> HostArray:
    """`array`, of whichever library, in host memory: waits for the device."""
    for method in ("get", "copy_to_host", "cpu"):  # CuPy, Numba, PyTorch
        if hasattr(array, method):
            array = getattr(array, method)()
    return np.asarray(array)


def size_text(size: float) -> str:
    """`size` in bytes, for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


# --- In -----------------------------------------------------------------------------------------------------------


def read_vector(name: str, text: str) -> Vector:
    """Argument `name`, which is a number or the path of a .npy, .npz or .csv file.

    Its shape and values are left for `sample` to judge. A .npy file is mapped, not read. Text has no dtype, and comes
    as a list, which to `sample` has none either.
    """
    with contextlib.suppress(ValueError):
        return float(text)
    path = Path(text)
    read = _READERS.get(path.suffix.lower())
    if read is None:
        raise ValueError(f"{name}: expected a number or a .npy, .npz or .csv file, got {text!r}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy warns before it raises.
            return read(path, name)
    except Exception as error:  # A damaged file raises almost anything, from OverflowError to tokenize.TokenError.
        if isinstance(error, OSError) and error.filename:
            raise
        raise ValueError(f"{path}: {_one_line(error)}") from error


def _one_line(error: Exception, limit: int = 300) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else f"{text[:limit]}..."


def _read_npy(path: Path, name: str) -> HostArray:
    # Not np.load, which takes a file that is no .npy for a pickle, and recommends to trust it. This refuses objects.
    try:
        return np.asarray(np.lib.format.open_memmap(path, mode="r"))
    except OSError:
        raise
    except Exception as error:
        raise ValueError(f"not a whole .npy file of numbers ({_one_line(error)})") from error


def _read_npz(path: Path, name: str) -> HostArray:
    with path.open("rb") as file:
        if not zipfile.is_zipfile(file):
            raise ValueError("not a .npz archive")
        file.seek(0)
        with np.load(file, allow_pickle=False) as archive:
            found = archive.files
            if name not in found and len(found) != 1:
                raise ValueError(f"expected an array called {name!r}, or a single one, got {_list_text(found)}")
            array = archive[name if name in found else found[0]]
    if not isinstance(array, np.ndarray):  # A member that is no .npy file comes as bytes.
        raise ValueError(f"expected an array called {name!r}, or a single one, got a file of another kind")
    return array


def _read_csv(path: Path, name: str) -> list[float]:
    expected = f"expected one column or one row of numbers, or a header line that names a column {name!r}"
    # Spreadsheets mark UTF-8 with a byte order mark.
    with path.open(encoding="utf-8-sig", newline="") as file:
        names = _header(file, name)
        if names and name not in names:
            raise ValueError(f"{expected}; got columns {_list_text(names)}")
        column = names.index(name) if names else None
        table = np.loadtxt(file, delimiter=",", ndmin=2, quotechar='"', usecols=column)
    if not names and table.size == 0:
        raise ValueError(f"{expected}; got an empty file")
    if not names and min(table.shape) != 1:
        raise ValueError(f"{expected}; got {table.shape[0]} rows of {table.shape[1]} columns")
    values: list[float] = table.reshape(-1).tolist()
    return values


_READERS: dict[str, Callable[[Path, str], HostArray | list[float]]] = {
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".csv": _read_csv,
}


def _header(file: TextIO, name: str) -> list[str]:
    """The names in the header line of `file`, or none; the rest of the file is numbers and comments."""
    for line in iter(file.readline, ""):
        # NumPy writes headers as comments, and comments may be anything.
        comment = line.startswith("#")
        fields = [field.strip() for field in next(csv.reader([line.lstrip("# ").strip()], skipinitialspace=True), [])]
        if name in fields:
            return fields
        if fields and not comment:
            if not any(map(_is_number, fields)):
                return fields
            break
    file.seek(0)
    return []


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _list_text(names: list[str], most: int = 8) -> str:
    shown = ", ".join(map(repr, names[:most])) or "none"
    return shown if len(names) <= most else f"{shown}, ... ({len(names)})"


# --- Out ----------------------------------------------------------------------------------------------------------


def check_output(output: Path, *, force: bool) -> None:
    """ValueError or OSError if `output` cannot be made."""
    if output.suffix.lower() != ".npy":
        raise ValueError(f"{output}: expected an output file that ends in .npy")
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        output.stat()  # OSError for a loop of links, for which resolve() raises RuntimeError.
    folder = output.resolve().parent
    if not folder.is_dir():
        raise OSError(errno.ENOENT, "there is no such folder", str(folder))
    if not os.access(folder, os.W_OK):
        raise OSError(errno.EACCES, "cannot write to this folder", str(folder))
    if output.exists() and not output.is_file():
        raise FileExistsError(errno.EEXIST, "exists, and is not a file", str(output))
    if output.exists() and not force:
        raise FileExistsError(errno.EEXIST, "exists; --force overwrites it", str(output))


def write_npy(
    output: Path, shape: tuple[int, int], dtype: np.dtype[Any], fill: Callable[[np.memmap[Any, Any]], None]
) -> None:
    """Make the .npy file `output` of an array that `fill` fills; if anything stops it, all is as before.

    A file that is replaced passes its permissions on.
    """
    target = output.resolve()  # So that a link stays a link.
    # In the same folder, so that it can be put into place at a stroke.
    temporary = target.with_name(f".multisample-{secrets.token_hex(8)}.part")
    size = shape[0] * shape[1] * dtype.itemsize
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
    try:
        _check_space(target.parent, size)
        # Nobody else may read what replaces a private file, while it is written either.
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666 if mode is None else 0o600))
        mapped = np.lib.format.open_memmap(temporary, mode="w+", dtype=dtype, shape=shape)
        _reserve(temporary)
        fill(mapped)
        mapped.flush()
        del mapped  # Not every system renames an open file.
        if mode is not None:
            temporary.chmod(mode)
        temporary.replace(target)
    except OSError as error:
        # Name `output`: the user does not know the temporary file.
        message = f"{error.strerror or error} ({size_text(size)} to write)"
        raise OSError(error.errno, message, str(output)) from error
    finally:
        temporary.unlink(missing_ok=True)


def _check_space(folder: Path, size: int) -> None:
    usage = shutil.disk_usage(folder)
    if usage.total and size > usage.free:  # Some network file systems say 0 of 0.
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {size_text(usage.free)} free")


def _reserve(path: Path) -> None:
    if not hasattr(os, "posix_fallocate"):
        return
    with path.open("r+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # A file system that cannot.
                raise
