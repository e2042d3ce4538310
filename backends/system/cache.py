"""Compiled code on disk, shared between processes and checked before it is loaded.

Loading a shared object, or unpickling a kernel of Numba, runs it. So folders and files of the cache must belong to this
user or to root, no other user may have write access, and every file is compared with a recorded digest.
"""

import contextlib
import fcntl
import functools
import hashlib
import os
import pickle
import secrets
import stat
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

_MAGIC = b"multisample cache 1\n"
_DIGEST_SIZE = hashlib.sha256().digest_size

Code = TypeVar("Code")


class CacheError(Exception):
    """The cache, or a file in it, cannot be used. The message names the path and the remedy."""


class DamagedError(CacheError):
    """A file cannot be read, or its content is not what was written. A new file may replace it."""


def root() -> Path:
    """The folder of all caches: MULTISAMPLE_CACHE_DIR, or `multisample` in the user's cache folder.

    Raises CacheError if neither the variable nor a home folder exists, or if the path is relative and the working
    directory was deleted.
    """
    try:
        for variable, below in (("MULTISAMPLE_CACHE_DIR", ""), ("XDG_CACHE_HOME", "multisample")):
            if folder := os.environ.get(variable):
                try:
                    return Path(folder).expanduser().absolute() / below
                except FileNotFoundError:
                    raise CacheError(
                        f"{variable}: expected a folder, got {folder!r} relative to a working directory that was"
                        " deleted; set it to an absolute path"
                    ) from None
        return Path.home() / ".cache" / "multisample"
    except RuntimeError as error:  # Some users have no home.
        raise CacheError(f"{error} Set MULTISAMPLE_CACHE_DIR to a folder that can be written to.") from error


def folder(*names: str, create: bool) -> Path:
    """The folder `names` below the root. Only this user or root can write to it.

    With `create`, folders that are missing are created, with mode 0700; otherwise they raise FileNotFoundError.
    CacheError if a folder cannot be created or read, belongs to another user, or is writable by others.
    """
    path = root()
    try:
        if create:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(path, path.stat())  # The root may be a symbolic link that the user chose.
        for name in names:
            path = path / name
            if create:
                path.mkdir(mode=0o700, exist_ok=True)
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode):
                raise CacheError(
                    f"{path}: expected a folder; remove it, or set MULTISAMPLE_CACHE_DIR to another folder"
                )
            _check_owner(path, status)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not create:
            raise
        reason = error.strerror or error
        raise CacheError(f"{path}: {reason}; set MULTISAMPLE_CACHE_DIR to a folder that can be written to") from error
    return path


def _check_owner(path: Path, status: os.stat_result) -> None:
    """Raise CacheError unless only this user or root can write to `path`."""
    if status.st_uid not in (os.geteuid(), 0):
        raise CacheError(
            f"{path}: belongs to another user (uid {status.st_uid}), who could put code there that would run here;"
            " set MULTISAMPLE_CACHE_DIR to a folder of your own"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CacheError(
            f"{path}: others can write to it (mode {stat.S_IMODE(status.st_mode):04o}), and could put code there that"
            f" would run here; run chmod go-w {path}, or set MULTISAMPLE_CACHE_DIR to a folder of your own"
        )


def read(path: Path) -> bytes | None:
    """The payload of `write`, or None if there is no such file.

    DamagedError if it cannot be read or is not what was written, CacheError if another user could have written it.
    """
    try:
        with open(_open(path, os.O_RDONLY), "rb") as file:
            content = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedError(f"{path}: {error.strerror or error}") from error
    start = len(_MAGIC) + _DIGEST_SIZE
    payload = content[start:]
    if content[:start] != _MAGIC + hashlib.sha256(payload).digest():
        raise DamagedError(f"{path}: damaged")
    return payload


def write(path: Path, payload: bytes) -> None:
    """Replace the file `path` atomically, so that a killed process or a full disk never leaves a partial file.

    CacheError if it cannot be written. The old file then stays.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        try:
            with open(_open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                file.write(_MAGIC + hashlib.sha256(payload).digest() + payload)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise CacheError(f"{path}: {error.strerror or error}") from error


def _open(path: Path, flags: int) -> int:
    """A file descriptor of a regular file, not of a symbolic link, that only this user or root can write to."""
    # Without O_NONBLOCK, opening a FIFO waits for a writer.
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CacheError(f"{path}: expected a file; remove it, or set MULTISAMPLE_CACHE_DIR to another folder")
        _check_owner(path, status)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def digest_of(path: Path) -> str:
    """The SHA-256 digest of a file, in hexadecimal digits. CacheError if another user could have written it."""
    with open(_open(path, os.O_RDONLY), "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


# --- Locks ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(path: Path, waiting: str) -> Iterator[None]:
    """Hold the lock file `path` against other processes. Print `waiting` if the lock is taken.

    The system releases the lock when its process dies. Threads of a process share the lock, and forked children do not
    inherit it. CacheError if another user could have written the file.
    """
    descriptor = _open(path, os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(waiting)
            fcntl.lockf(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# --- Kernels ----------------------------------------------------------------------------------------------------------


class KernelFiles:
    """Compiled kernels of a backend in a folder of the cache.

    A failure of the cache never reaches the caller: the kernel is compiled anew, and a warning names the file. `digest`
    is that of all sources that the kernels are compiled from. If it is empty, kernels are not cached, since kernels of
    other versions could have the same name.
    """

    def __init__(self, folder: str, backend: str, digest: str) -> None:
        self._folder, self._backend, self._digest = folder, backend, digest

    def load_or_compile(
        self, kernel: str, dependencies: Iterable[str], compile_kernel: Callable[[], Code],
        pack: Callable[[Code], bytes] = pickle.dumps, unpack: Callable[[bytes], Code] = pickle.loads,
    ) -> Code:  # fmt: skip
        """``compile_kernel()``, or its result from the cache, whose files have ``pack(result)``.

        `dependencies` are all that the machine code depends on besides the sources.
        """
        digest = hashlib.sha256("\0".join((self._digest, *dependencies)).encode()).hexdigest()
        file = f"{kernel}-{digest[:20]}"
        with self._errors_as_warnings(file), contextlib.suppress(FileNotFoundError):  # No folder yet.
            payload = read(self._path(file, create=False))
            if payload is not None:
                return unpack(payload)  # A file of another version may raise anything.
        say_compiling(self._backend)
        code = compile_kernel()
        with self._errors_as_warnings(file):
            write(self._path(file, create=True), pack(code))
        return code

    def _path(self, file: str, create: bool) -> Path:
        if not self._digest:
            raise CacheError("the importer of multisample has no files, whose digest would name the kernel")
        return folder(self._folder, create=create) / file

    @contextlib.contextmanager
    def _errors_as_warnings(self, file: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            reason = str(error)
            if not isinstance(error, CacheError):
                reason = f"{root() / self._folder / file}: {type(error).__name__}: {error}"
            warn_once(self._folder, f"a kernel of {self._backend!r} was compiled without its cached copy: {reason}")


# --- Messages ---------------------------------------------------------------------------------------------------------

_warned: set[str] = set()


def say(message: str) -> None:
    """Print one line on stderr in one write, because other threads and processes may print too."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # No stderr, a full disk, a closed file.
        sys.stderr.write(f"multisample: {message}\n")
        sys.stderr.flush()


@functools.cache  # The first time in this process for each backend.
def say_compiling(backend: str) -> None:
    """Print that the kernels of a backend are compiled."""
    say(f"compiling kernels of {backend}, once for this machine: some seconds for each kind of call")


def warn_once(kind: str, message: str) -> None:
    """Issue a RuntimeWarning, the first time in this process for each `kind`."""
    if kind not in _warned:
        _warned.add(kind)
        warnings.warn(f"multisample: {message}", RuntimeWarning, stacklevel=2)
