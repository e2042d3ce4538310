"""The libraries of torch_ext for this machine: prebuilt in the wheel, or built once and cached.

A library has the operators and some units of kernels. Other units are libraries of their own, built when a call needs
them. A build holds a lock, so that concurrent processes build once, and renames its result into the cache. Before a
library is loaded, its digest is compared with the recorded one.
"""

import hashlib
import json
import math
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from multisample.backends.errors import BackendUnavailableError
from multisample.backends.system import cache, threads
from multisample.backends.system.live_line import LiveLine

from . import build, csrc_files, prebuilt, targets, toolchain
from .compiler_flags import LIBRARIES, Library, estimate
from .units import LibraryKind, Unit, all_units

# Names below the root of the cache. Only folders of builds are ever removed, and only those with the marker.
_FOLDER, _BUILDING, _MARKER = "torch_ext", "building", "multisample-build"
_RECORD = "record.json"

# The compiler's output of failed builds in this process, by library.
_failures: dict[Path, str] = {}


def libraries(
    kinds: Iterable[LibraryKind], *, whole: bool = False, meanwhile: Callable[[], object] = lambda: None
) -> dict[LibraryKind, Path]:
    """The libraries of `kinds`. All that are missing are built at once, while ``meanwhile()`` is called.

    The one for "cpu" has the operators and their CPU implementation. The one for "cuda", to load beside it, is built
    for the architectures of ``TORCH_CUDA_ARCH_LIST``, or else for the devices that PyTorch sees. It has the units of
    all calls if `whole`; else it may lack some: see `unit_library`. BackendUnavailableError if a library cannot be
    built, with the end of the compiler's output, or if the cache is not safe to use.
    """
    return _libraries({kind: _wanted(kind, whole) for kind in kinds}, meanwhile)


def unit_library(unit: Unit) -> Path:
    """A library with one unit, for a loaded library that lacks it. It is built if none fits.

    The errors are as for `libraries`.
    """
    return _libraries({"cuda": (LIBRARIES["cuda"].only(unit),)})["cuda"]


def is_built(kind: LibraryKind, *, whole: bool = False) -> bool:
    """Whether a fitting, undamaged library exists, so that `missing_tools` do not matter. Never raises.

    With `whole`, the library must have the units of all calls. For "cuda", this may initialize CUDA. A child forked
    after that cannot use CUDA.
    """
    try:
        return _existing(kind, _wanted(kind, whole)) is not None
    except (ImportError, OSError, RuntimeError, cache.CacheError):
        return False


def compiled() -> tuple[int, int, float]:
    """How many units for CUDA are compiled, of how many, and the usual seconds to compile all, or 0 if all are."""
    library, every = LIBRARIES["cuda"], all_units()
    if is_built("cuda", whole=True):
        return len(every), len(every), 0
    own = library.units if is_built("cuda") else ()
    units = [unit for unit in every if unit in own or _is_whole(_place(library.only(unit)))]
    return len(units), len(every), estimate([library.with_all_units()], _processors())


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
        if _any_built(kind) and (place := _place(LIBRARIES[kind])).exists():
            reasons.append(f"{place} is damaged")
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


def _wanted(kind: LibraryKind, whole: bool) -> tuple[Library, ...]:
    """The libraries that serve a request, the one to build last."""
    library = LIBRARIES[kind]
    return (library.with_all_units(),) if whole else (library.with_all_units(), library)


def _place(library: Library) -> Path:
    """The path of the library once it is built. Its folder's name is a digest of all that the library depends on."""
    import torch

    # Different machines may share a home folder.
    machine = [platform.system(), platform.machine(), targets.libc()]
    architectures = targets.cuda_architectures() if library.kind == "cuda" else ""
    parts = [csrc_files.digest(), *(unit.text for unit in library.units), *library.flags]
    parts += [torch.__version__, *machine, architectures]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    return cache.root() / _FOLDER / f"{library.name}-{key}" / f"{library.module}.so"


def _prebuilt(kind: LibraryKind, *, ask_devices: bool = False) -> prebuilt.Found:
    """The library that came with the wheel. `ask_devices` checks it against all devices, and initializes CUDA."""
    if kind == "cpu":
        return prebuilt.cpu_library()
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


def _existing(kind: LibraryKind, wanted: Iterable[Library]) -> Path | None:
    """The library from the wheel, which has all units, or one of `wanted` from the cache."""
    prebuilt_path = _prebuilt(kind, ask_devices=True).path
    return prebuilt_path or next(filter(_is_whole, map(_place, wanted)), None)


def _libraries(
    wanted: Mapping[LibraryKind, tuple[Library, ...]], meanwhile: Callable[[], object] = lambda: None
) -> dict[LibraryKind, Path]:
    """For each kind a library that exists, or the last of `wanted`. All that are missing are built at once."""
    if not toolchain.is_installed("torch"):
        raise _unavailable("PyTorch is not installed: pip install torch")
    try:
        found = {kind: _existing(kind, libraries) for kind, libraries in wanted.items()}
        missing = {kind: wanted[kind][-1] for kind, path in found.items() if path is None}
        lacking: list[str] = []
        for kind in missing:
            tools = (*toolchain.missing_tools(), *(cuda_reasons(ahead_of_time=True) if kind == "cuda" else ()))
            lacking += (*unusable(kind, ask_devices=True), *tools) if tools else ()
        if lacking:
            raise _unavailable("; ".join(dict.fromkeys(lacking)))
        if missing:
            _build({_place(library): library for library in missing.values()}, meanwhile)
        return {kind: path or _place(missing[kind]) for kind, path in found.items()}
    except cache.CacheError as error:
        raise _unavailable(str(error)) from error
    except OSError as error:
        at = f"{error.filename}: " if error.filename else ""
        raise _unavailable(
            f"{at}{error.strerror or error}; set MULTISAMPLE_CACHE_DIR to a folder that can be written to, in place of"
            f" {cache.root()}"
        ) from error


def _build(libraries: Mapping[Path, Library], meanwhile: Callable[[], object]) -> None:
    root = cache.folder(_FOLDER, create=True)
    with cache.locked(root / "lock", f"waiting for another process that builds torch_ext in {root}"):
        # Another process may have come first.
        libraries = {place: library for place, library in libraries.items() if not _is_whole(place)}
        _raise_failure(libraries)
        if not libraries:
            return
        building = cache.folder(_FOLDER, _BUILDING, create=True)
        # Folders of killed builds: other processes wait for the lock, and other threads for that of torch_ext.
        for folder in building.iterdir():
            if (folder / _MARKER).is_file():
                shutil.rmtree(folder, ignore_errors=True)
        for place in filter(Path.exists, libraries):
            cache.say(f"{place} is damaged, and is built again")
        cache.say(_announcement(libraries.values()))
        private = Path(tempfile.mkdtemp(dir=building))
        try:
            (private / _MARKER).touch()
            works = {private / library.name: library for library in libraries.values()}
            with LiveLine(sys.stderr) as line:
                total = sum(len(library.sources) + len(library.units) for library in libraries.values())
                failures = build.compile_libraries(
                    works, lambda done: line.update(f"multisample: {done} of {total} sources compiled"), meanwhile
                )
            csrc_files.digest()  # Raises if the compiler may have read other sources than those that name the library.
            for place, folder, failure in zip(libraries, works, failures, strict=True):
                if failure:
                    _failures[place] = failure
                    continue
                finished = private / f"{folder.name}-finished"
                finished.mkdir(mode=0o700)
                _put((folder / place.name).rename(finished / place.name))
                if place.parent.exists():
                    place.parent.rename(private / f"{folder.name}-damaged")
                finished.rename(place.parent)
        finally:
            shutil.rmtree(private, ignore_errors=True)
        _raise_failure(libraries)


def _announcement(libraries: Collection[Library]) -> str:
    devices = " and ".join({"cpu": "the CPU", "cuda": "CUDA"}[library.kind] for library in libraries)
    parts = ["the operators"] if any(library.sources for library in libraries) else []
    units = dict.fromkeys(unit.name for library in libraries for unit in library.units)
    parts += [f"{len(units)} kinds of kernels"] if len(units) > 2 else units
    processors = _processors()
    seconds = math.ceil(estimate(libraries, processors))
    return (
        f"building torch_ext for {devices} ({', '.join(parts)}), once for this machine and this version of PyTorch; it"
        f" usually takes about {seconds} s on {processors} {'processor' if processors == 1 else 'processors'}"
    )


def _processors() -> int:
    """How many compilers run at once."""
    return min(filter(None, (threads.processors(), threads.positive(os.environ.get("MAX_JOBS", "")))))


def _put(path: Path) -> None:
    """Write the record of a built library beside it."""
    path.chmod(0o700)
    record = {path.name: [path.stat().st_size, cache.digest_of(path)]}
    cache.write(path.with_name(_RECORD), json.dumps(record).encode())


def _raise_failure(places: Iterable[Path]) -> None:
    for place in places:
        if place in _failures:
            raise _unavailable(_failures[place])


def _unavailable(reason: str) -> BackendUnavailableError:
    space = "\n" if "\n" in reason else " "  # The compiler's output begins on a new line.
    return BackendUnavailableError(
        f"backend: 'torch_ext' could not be built:{space}{reason}\nto try again: python -m multisample build torch_ext"
    )
