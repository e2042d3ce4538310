"""The libraries of torch_ext for this machine: prebuilt in the wheel, or built once and cached.

A build holds a lock, so that concurrent processes build once, and renames its result into the cache. Before a library
is loaded, its digest is compared with the recorded one.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from multisample.backends.errors import BackendUnavailableError
from multisample.backends.system import cache

from . import build, csrc_files, prebuilt, targets, toolchain
from .compiler_flags import LIBRARIES, Library, LibraryKind

COMMAND = "python -m multisample build torch_ext"
"""The command that builds ahead of time, or again after a failure."""

# Names below the root of the cache. Only folders of builds are ever removed, and only those with the marker.
_FOLDER, _BUILDING, _MARKER = "torch_ext", "building", "multisample-build"
_RECORD = "record.json"

# The compiler's output of failed builds in this process, by library.
_failures: dict[Path, str] = {}


def cpu_library(*, retry: bool = False) -> Path:
    """The library with the operators and their CPU implementation. It is built if none fits.

    With `retry`, it is built again even if a build has failed in this process. BackendUnavailableError if it cannot be
    built, with the end of the compiler's output, or if the cache is not safe to use.
    """
    return _library("cpu", retry)


def cuda_library(*, retry: bool = False) -> Path:
    """The library with the CUDA implementation, to load after `cpu_library`. It is built if none fits.

    It is built for the architectures of ``TORCH_CUDA_ARCH_LIST``, or else for the devices that PyTorch sees. `retry`
    and the errors are as for `cpu_library`.
    """
    return _library("cuda", retry)


def is_built(kind: LibraryKind) -> bool:
    """Whether a fitting, undamaged library exists, so that `missing_tools` do not matter. Never raises.

    For "cuda", this may initialize CUDA. A child forked after that cannot use CUDA.
    """
    try:
        return _prebuilt(kind, ask_devices=True).path is not None or _is_whole(_place(kind))
    except (ImportError, OSError, RuntimeError, cache.CacheError):
        return False


def is_prebuilt(kind: LibraryKind) -> bool:
    """Whether a fitting library came with the wheel. Does not initialize CUDA to check its devices. Never raises."""
    try:
        return _prebuilt(kind).path is not None
    except (ImportError, OSError, RuntimeError):
        return False


def unusable(kind: LibraryKind, *, ask_devices: bool = False) -> tuple[str, ...]:
    """Why existing libraries are not used: other sources, another machine, damage. Never raises."""
    try:
        reasons = [_prebuilt(kind, ask_devices=ask_devices).reason]
        if _any_built(kind):
            reasons += _damage(_place(kind))
    except (ImportError, OSError, RuntimeError, cache.CacheError):
        return ()
    return tuple(filter(None, reasons))


def refusal() -> tuple[str, ...]:
    """Why the cache is not safe to use; empty if it is safe. Never raises."""
    try:
        cache.folder(_FOLDER, create=False)
    except FileNotFoundError:
        pass
    except cache.CacheError as error:
        return (str(error),)
    return ()


def cuda_reasons(*, ahead_of_time: bool = False) -> tuple[str, ...]:
    """Why there is no CUDA library for this machine, apart from `missing_tools`. Cheap, and never raises.

    With `ahead_of_time`, it is enough that the library can be built: no device is needed where TORCH_CUDA_ARCH_LIST
    names architectures or the wheel has a library.
    """
    if not toolchain.is_installed("torch"):
        return ("PyTorch is not installed: pip install torch",)
    try:
        import torch
    except Exception as error:  # A broken installation may raise anything.
        return (f"PyTorch cannot be imported ({error}): reinstall it",)
    if torch.version.cuda is None:
        return ("PyTorch is built without CUDA: install a PyTorch that is built with CUDA",)
    reasons = []
    needs_device = not (ahead_of_time and (targets.named_architectures() or is_prebuilt("cuda")))
    if needs_device and targets.device_count() == 0:
        reasons.append("no CUDA device: see nvidia-smi and CUDA_VISIBLE_DEVICES")
    # Without nvcc, an earlier build is enough. `is_built` initializes CUDA, so it is called last.
    missing = toolchain.missing_nvcc()
    if missing and not is_prebuilt("cuda") and not (_any_built("cuda") and is_built("cuda")):
        reasons += [*unusable("cuda"), *missing]
    return tuple(reasons)


# --- Which library ----------------------------------------------------------------------------------------------------


def _place(kind: LibraryKind) -> Path:
    """The path of the library once it is built. Its folder's name is a digest of all that the library depends on."""
    import torch

    library = LIBRARIES[kind]
    # Different machines may share a home folder.
    machine = [platform.system(), platform.machine(), targets.libc()]
    processor = targets.cuda_architectures() if kind == "cuda" else targets.processor()
    parts = [csrc_files.digest(), *library.flags, *library.native_flags, torch.__version__, *machine, processor]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    return cache.root() / _FOLDER / f"{library.name}-{key}" / f"{library.module}.so"


def _prebuilt(kind: LibraryKind, *, ask_devices: bool = False) -> prebuilt.Found:
    """The library that came with the wheel. `ask_devices` checks it against all devices, and initializes CUDA."""
    if kind == "cpu":
        return prebuilt.cpu_library(targets.processor_features())
    import torch

    if torch.version.cuda is None:
        return prebuilt.Found(None)
    devices = range(targets.device_count()) if ask_devices or torch.cuda.is_initialized() else range(0)
    return prebuilt.cuda_library(torch.version.cuda, map(torch.cuda.get_device_capability, devices))


def _any_built(kind: LibraryKind) -> bool:
    """Whether there is a built library for this machine or another."""
    try:
        return any((cache.root() / _FOLDER).glob(f"{LIBRARIES[kind].name}-*"))
    except (OSError, cache.CacheError):
        return False


def _is_whole(place: Path) -> bool:
    """Whether the library exists and matches its record. CacheError if another user could have written it."""
    try:
        folder = cache.folder(_FOLDER, place.parent.name, create=False)
        content = cache.read(folder / _RECORD)
        record = json.loads(content) if content else {}
        return bool(record.get(place.name) == [place.stat().st_size, cache.digest_of(place)])
    except (OSError, cache.DamagedError):
        return False


# --- Building ---------------------------------------------------------------------------------------------------------


def _library(kind: LibraryKind, retry: bool) -> Path:
    library = LIBRARIES[kind]
    if not toolchain.is_installed("torch"):
        raise _unavailable("PyTorch is not installed: pip install torch")
    try:
        found = _prebuilt(kind, ask_devices=True)
        if found.path is not None:
            return found.path
        # This comes before the lock, which is not recursive.
        needed = [_library(other, retry) for other in library.needs]
        place = _place(kind)
        if _is_whole(place):
            return place
        lacking = (*toolchain.missing_tools(), *(cuda_reasons(ahead_of_time=True) if kind == "cuda" else ()))
        if lacking:
            raise _unavailable("; ".join(dict.fromkeys((*unusable(kind, ask_devices=True), *lacking))))
        if retry:
            _failures.pop(place, None)
        _raise_failure(place)
        _build(library, needed, place)
    except cache.CacheError as error:
        raise _unavailable(str(error)) from error
    except OSError as error:
        at = f"{error.filename}: " if error.filename else ""
        raise _unavailable(
            f"{at}{error.strerror or error}; set MULTISAMPLE_CACHE_DIR to a folder that can be written to, in place of"
            f" {cache.root()}"
        ) from error
    return place


def _damage(place: Path) -> tuple[str, ...]:
    return (f"{place} is damaged",) if place.exists() else ()


def _build(library: Library, needed: Iterable[Path], place: Path) -> None:
    root = cache.folder(_FOLDER, create=True)
    with cache.locked(root / "lock", f"waiting for another process that builds torch_ext in {root}"):
        if _is_whole(place):  # Another process came first.
            return
        _raise_failure(place)
        building = cache.folder(_FOLDER, _BUILDING, create=True)
        _remove_killed_builds(building)
        for reason in _damage(place):
            cache.say(f"{reason}, and is built again")
        cache.say(
            f"building torch_ext for {library.device}, once for this machine and this version of PyTorch;"
            f" it usually takes about {library.seconds} s"
        )
        private = Path(tempfile.mkdtemp(dir=building))
        try:
            (private / _MARKER).touch()
            work, finished = private / "work", private / "finished"
            work.mkdir()
            code, output = build.compile_library(library, needed, work)
            built = work / place.name
            csrc_files.digest()  # Raises if the compiler may have read other sources than those that name the library.
            if code != 0 or not built.is_file():
                _failures[place] = build.failure_text(code, output)
                _raise_failure(place)
            finished.mkdir(mode=0o700)
            _put(built.rename(finished / place.name))
            if place.parent.exists():
                place.parent.rename(private / "damaged")
            finished.rename(place.parent)
            cache.sync(root)
        finally:
            shutil.rmtree(private, ignore_errors=True)


def _put(path: Path) -> None:
    """Write a built library to disk, durably, with its record beside it."""
    path.chmod(0o700)
    cache.sync(path)
    record = {path.name: [path.stat().st_size, cache.digest_of(path)]}
    cache.write(path.with_name(_RECORD), json.dumps(record).encode())


def _remove_killed_builds(building: Path) -> None:
    """Remove the folders of killed builds. The caller holds the lock, so no build is running."""
    for folder in building.iterdir():
        if (folder / _MARKER).is_file():
            shutil.rmtree(folder, ignore_errors=True)


def _raise_failure(place: Path) -> None:
    if place in _failures:
        raise _unavailable(_failures[place])


def _unavailable(reason: str) -> BackendUnavailableError:
    space = "\n" if "\n" in reason else " "  # The compiler's output begins on a new line.
    return BackendUnavailableError(f"backend: 'torch_ext' could not be built:{space}{reason}\nto try again: {COMMAND}")
