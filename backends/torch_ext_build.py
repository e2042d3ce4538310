"""The libraries of torch_ext are compiled on the user's machine, unless some that fit came with the installation: once,
however many processes ask for them at once, and whatever was killed before.

PyTorch's `load` compiles and loads in one go, and waits for ever on a file that a killed process left. So it runs in a
process of its own, in a folder that only it knows, under a lock that the kernel releases when its holder dies; what it
has finished is moved to where everybody looks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, TypeAlias

from multisample.exceptions import BackendUnavailableError

from . import csrc_files, prebuilt

__all__ = [
    "COMMAND", "LibraryKind", "build_portable", "cpu_library", "cuda_library", "cuda_reasons", "is_built",
    "is_prebuilt", "missing_nvcc", "missing_tools", "prebuilt_reason",
]  # fmt: skip

LibraryKind: TypeAlias = Literal["cpu", "cuda"]

COMMAND = "python -m multisample build torch_ext"
"""Builds ahead of time, and again after a failure."""

# Of the end of the compiler's output, as much as a terminal shows.
_LINES = 30
_PRIVATE = "building-"


@dataclasses.dataclass(frozen=True)
class _Library:
    """A shared object, and how it is made."""

    name: str
    source: str
    where: str
    """What it runs on, in words."""
    seconds: int
    """What it usually takes to build it."""
    flags: tuple[str, ...]
    flags_here: tuple[str, ...] = ()
    """More of them, for the machine that it is built on."""
    link_flags: tuple[str, ...] = ()
    needs: tuple[LibraryKind, ...] = ()
    """Libraries to load before it."""
    is_portable: bool = False
    """Whether it is for other machines than this one, which need not be able to load it."""


# The stable ABI of PyTorch 2.10, which later versions keep.
_COMMON = ("-std=c++17", "-O3", "-DTORCH_TARGET_VERSION=0x020a000000000000")
_LIBRARIES: dict[LibraryKind, _Library] = {
    "cpu": _Library(
        "torch_cpu",
        "torch_cpu.cpp",
        "the CPU",
        10,
        # A contracted product and sum would round once where the stream rounds twice. The other two change no result:
        # nobody here looks at errno or at the floating-point exceptions.
        (*_COMMON, "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden"),
        flags_here=("-march=native",),
    ),
    "cuda": _Library(
        "torch_cuda",
        "torch_cuda.cu",
        "CUDA",
        60,
        (*_COMMON, "-DUSE_CUDA", "-Xcompiler=-fvisibility=hidden"),
        needs=("cpu",),
    ),
}

# What was said of a build that failed in this process, by the library that it should have made.
_failures: dict[Path, str] = {}


def cpu_library(*, retry: bool = False) -> Path:
    """The library with the operator and its CPU implementation; built if none is there that fits.

    Parameters
    ----------
    retry : bool
        Build also where a build has failed in this process before.

    Returns
    -------
    pathlib.Path

    Raises
    ------
    BackendUnavailableError
        If it cannot be built, with the end of the compiler's output.
    """
    return _library("cpu", retry)


def cuda_library(*, retry: bool = False) -> Path:
    """The library with the CUDA implementation, to be loaded after that of `cpu_library`; built if none is there that
    fits.

    It is built for the architectures of ``TORCH_CUDA_ARCH_LIST``, or else of the devices that PyTorch sees.

    Parameters
    ----------
    retry : bool
        Build also where a build has failed in this process before.

    Returns
    -------
    pathlib.Path

    Raises
    ------
    BackendUnavailableError
        If it cannot be built, with the end of the compiler's output.
    """
    return _library("cuda", retry)


def is_built(kind: LibraryKind) -> bool:
    """Whether the library is there, so that `missing_tools` do not matter. Never raises.

    For "cuda" this may initialize CUDA, after which a process cannot fork and use CUDA in the fork.
    """
    try:
        return _prebuilt(kind, ask_devices=True).path is not None or _place(kind).is_file()
    except (ImportError, OSError, RuntimeError):
        return False


def is_prebuilt(kind: LibraryKind) -> bool:
    """Whether a library came with the installation that fits, as far as that is known without initializing CUDA.

    Never raises.
    """
    try:
        return _prebuilt(kind).path is not None
    except (ImportError, OSError, RuntimeError):
        return False


def prebuilt_reason(kind: LibraryKind) -> tuple[str, ...]:
    """Why what came with the installation does not fit, as far as `is_prebuilt` knows; empty if nothing came.

    Never raises.
    """
    try:
        reason = _prebuilt(kind).reason
    except (ImportError, OSError, RuntimeError):
        return ()
    return (reason,) if reason else ()


def missing_tools() -> tuple[str, ...]:
    """What stands in the way of a build, each with the command that mends it; cheap, and never raises."""
    reasons = []
    if not _is_installed("torch"):
        reasons.append("PyTorch is not installed: pip install torch")
    if not _is_installed("setuptools"):  # torch.utils.cpp_extension imports it, and not every PyTorch requires it.
        reasons.append("setuptools is not installed: pip install setuptools")
    if shutil.which("ninja", path=_search_path()) is None:
        reasons.append("ninja is not installed: pip install ninja")
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler, path=_search_path()) is None:
        reasons.append(f"no C++ compiler ({compiler!r} was looked for): install g++, or set CXX to a compiler")
    if not _is_installed("fcntl"):
        reasons.append("this system has no fcntl, without which builds cannot be locked: use Linux or macOS")
    return tuple(reasons)


def cuda_reasons(*, ahead_of_time: bool = False) -> tuple[str, ...]:
    """Why there is no CUDA library for this machine, apart from `missing_tools`; cheap, and never raises.

    Parameters
    ----------
    ahead_of_time : bool
        Whether it is enough that it can be built: no device is needed where TORCH_CUDA_ARCH_LIST names architectures,
        or where a library came with the installation.
    """
    if not _is_installed("torch"):
        return ("PyTorch is not installed: pip install torch",)
    try:
        import torch
    except Exception as error:  # Whatever a broken installation may do.
        return (f"PyTorch cannot be imported ({error}): install it anew",)
    if torch.version.cuda is None:
        return ("PyTorch is built without CUDA: install a PyTorch that is built with CUDA",)
    reasons = []
    if not (ahead_of_time and (_named_architectures() or is_prebuilt("cuda"))) and _device_count() == 0:
        reasons.append("no CUDA device: see nvidia-smi and CUDA_VISIBLE_DEVICES")
    # Where nvcc is missing, a library may have been built before. To ask for it initializes CUDA: not without need.
    if _cuda_home() is None and not is_prebuilt("cuda") and not (_any_built("cuda") and is_built("cuda")):
        reasons.extend(prebuilt_reason("cuda"))
        reasons.extend(missing_nvcc())
    return tuple(reasons)


def missing_nvcc() -> tuple[str, ...]:
    """What compiles for CUDA, if it is not there; that may do no harm where a library was built before."""
    return ("nvcc not found: install the CUDA toolkit or set CUDA_HOME",) if _cuda_home() is None else ()


# --- Which library ----------------------------------------------------------------------------------------------------


def _cache_root() -> Path:
    try:
        for variable, below in (("MULTISAMPLE_CACHE_DIR", ""), ("XDG_CACHE_HOME", "multisample")):
            if folder := os.environ.get(variable):
                return Path(folder).expanduser().absolute() / below
        return Path.home() / ".cache" / "multisample"
    except RuntimeError as error:  # There are users without a home.
        raise _unavailable(f"{error} Set MULTISAMPLE_CACHE_DIR to a folder that can be written to.") from error


def _place(kind: LibraryKind) -> Path:
    """Where the library is once it is built: a folder for everything that it depends on."""
    import torch

    library = _LIBRARIES[kind]
    # Home folders are shared by machines that differ.
    machine = [platform.system(), platform.machine(), _libc()]
    processor = _cuda_architectures() if kind == "cuda" else _processor()
    parts = [csrc_files.digest(), *library.flags, *library.flags_here, torch.__version__, *machine, processor]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    return _cache_root() / f"{library.name}-{key}" / f"{_module_name(library)}.so"


def _prebuilt(kind: LibraryKind, *, ask_devices: bool = False) -> prebuilt.Found:
    """What came with the installation. To ask the devices initializes CUDA; not asked, any will do."""
    if kind == "cpu":
        return prebuilt.cpu_library(_features())
    import torch

    if torch.version.cuda is None:
        return prebuilt.Found(None)
    devices = range(_device_count()) if ask_devices or torch.cuda.is_initialized() else range(0)
    return prebuilt.cuda_library(torch.version.cuda, map(torch.cuda.get_device_capability, devices))


def _module_name(library: _Library) -> str:
    return f"multisample_{library.name}"


def _any_built(kind: LibraryKind) -> bool:
    """Whether there is such a library, for this machine or another."""
    try:
        return any(_cache_root().glob(f"{_LIBRARIES[kind].name}-*"))
    except (OSError, RuntimeError):
        return False


def _processor() -> str:
    """What -march=native sees."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    # x86 and Arm; cores of one machine may differ.
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features"))})) or platform.processor()


def _features() -> set[str]:
    """What every core has."""
    cores = [set(line.split()) for line in _processor().splitlines()]
    return set.intersection(*cores) if cores else set()


def _libc() -> str:
    # platform.libc_ver would read all of the interpreter.
    name = "CS_GNU_LIBC_VERSION"
    return os.confstr(name) or "" if name in getattr(os, "confstr_names", ()) else ""


def _named_architectures() -> str:
    names = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    return "" if names == "native" else names


def _cuda_architectures() -> str:
    """What to compile for, as TORCH_CUDA_ARCH_LIST puts it; empty if there is no device."""
    import torch

    if names := _named_architectures():
        return names
    found = {torch.cuda.get_device_capability(device) for device in range(_device_count())}
    # A device may be newer than PyTorch and its CUDA: it compiles the newest PTX that these have for itself.
    known = [int("".join(filter(str.isdigit, name))) for name in torch.cuda.get_arch_list() if name.startswith("sm_")]
    newest = divmod(max(known), 10) if known else (99, 0)
    names = ";".join(f"{major}.{minor}" for major, minor in sorted({min(capability, newest) for capability in found}))
    return f"{names}+PTX" if names else ""


def _device_count() -> int:
    import torch

    if torch.version.cuda is None:
        return 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Of drivers that are too old: then there is no device.
            return int(torch.cuda.device_count())
    except Exception:  # Whatever a driver may do.
        return 0


def _cuda_home() -> Path | None:
    """The toolkit that is named or on the PATH, or is where toolkits are by default; it has nvcc."""
    if named := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        homes = [Path(named)]
    else:
        nvcc = shutil.which("nvcc", path=_search_path())
        # What is on the PATH may be a link to the compiler, or a script beside which there is no toolkit.
        homes = [Path(nvcc).resolve().parents[1]] if nvcc else []
        homes.append(Path("/usr/local/cuda"))
    homes = [home for home in homes if (home / "bin" / "nvcc").is_file()]
    whole = [home for home in homes if (home / "include" / "cuda_runtime.h").is_file()]
    return next(iter(whole + homes), None)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _search_path() -> str:
    """PATH, and after it where pip puts ninja: not on the PATH if a virtual environment is used but not activated."""
    scripts = [sysconfig.get_path("scripts", sysconfig.get_preferred_scheme(key)) for key in ("prefix", "user")]
    return os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent), *scripts])


# --- Building ---------------------------------------------------------------------------------------------------------

# Compilers are in process groups of ninja's: SIGTERM, unlike SIGKILL, lets it end them. The imports of the process that
# starts this one are its imports too.
_CHILD = """
import sys
sys.path[:] = {path!r}
import os, signal, threading

def end_with_parent():
    os.read(0, 1)  # Nothing comes but the end, when the other process closes it or dies.
    os.killpg(0, signal.SIGTERM)

threading.Thread(target=end_with_parent, daemon=True).start()
import torch
from torch.utils.cpp_extension import load
try:
    for library in {needed!r}:
        torch.ops.load_library(library)
    if {is_portable!r}:
        torch.ops.load_library = lambda library: None  # By which `load` loads what it has compiled.
    load(**{arguments!r})
except OSError as error:
    sys.exit(f"{{error}}\\n{{error.__cause__ or ''}}")  # Of a library that cannot be loaded, the linker knows why.
except (RuntimeError, ValueError) as error:
    sys.exit(str(error))
"""


def _library(kind: LibraryKind, retry: bool) -> Path:
    library = _LIBRARIES[kind]
    if not _is_installed("torch"):
        raise _unavailable("PyTorch is not installed: pip install torch")
    try:
        found = _prebuilt(kind, ask_devices=True)
        if found.path is not None:
            return found.path
        # Before the lock is taken, which does not nest.
        needed = [_library(other, retry) for other in library.needs]
        place = _place(kind)
        if place.is_file():
            return place
        reasons = (*missing_tools(), *(cuda_reasons(ahead_of_time=True) if kind == "cuda" else ()))
        if reasons:
            raise _unavailable("; ".join(dict.fromkeys(filter(None, (found.reason, *reasons)))))
        if retry:
            _failures.pop(place, None)
        _raise_failure(place)
        _build(library, needed, place)
    except OSError as error:
        at = f"{error.filename}: " if error.filename else ""
        raise _unavailable(
            f"{at}{error.strerror or error}; set MULTISAMPLE_CACHE_DIR to a folder that can be written to, in place of"
            f" {_cache_root()}"
        ) from error
    return place


def build_portable(kind: LibraryKind, place: Path, *flags: str) -> None:
    """Compile a library for machines that are not known, and whatever PyTorch they have.

    Parameters
    ----------
    kind : {"cpu", "cuda"}
        A library for CUDA is made for the architectures of TORCH_CUDA_ARCH_LIST.
    place : pathlib.Path
        The file to make.
    *flags : str
        What the compiler is told beyond what it always is, such as the processor.

    Raises
    ------
    BackendUnavailableError
        If it cannot be compiled, with the end of the compiler's output.
    """
    library = _portable(_LIBRARIES[kind], flags)
    with tempfile.TemporaryDirectory(prefix=_PRIVATE) as private:
        code, output = _compile(library, (), Path(private))
        made = Path(private, f"{_module_name(library)}.so")
        if code != 0 or not made.is_file():
            raise BackendUnavailableError(f"{place.name} could not be built:\n{_complaint(code, output)}")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(made, place)


def _portable(library: _Library, flags: Iterable[str]) -> _Library:
    import torch

    # Others have no use for paths of this machine.
    folders = (csrc_files.folder().parent, Path(torch.__file__).parents[1])
    more = [f"-ffile-prefix-map={folder}/=" for folder in folders]
    if library.source.endswith(".cu"):
        # Not compressed, machine code takes four times the space.
        threads = os.environ.get("MAX_JOBS") or os.cpu_count() or 1
        more = [*(f"-Xcompiler={flag}" for flag in more), "-Xfatbin=-compress-all", f"--threads={threads}"]
    # Of PyTorch's libraries, those alone that have the stable ABI. Some also have symbols of the C++ library, without
    # their versions: that library comes first.
    link = ("-Wl,--as-needed", "-Wl,--no-undefined", "-lstdc++") if sys.platform == "linux" else ()
    return dataclasses.replace(
        library, flags=(*library.flags, *more, *flags), flags_here=(), link_flags=link, is_portable=True
    )


def _build(library: _Library, needed: Iterable[Path], place: Path) -> None:
    root = place.parents[1]
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root / "lock", f"waiting for another process that builds torch_ext in {root}"):
        # Others may have come first.
        if place.is_file():
            return
        _raise_failure(place)
        for left in root.glob(f"{_PRIVATE}*"):
            shutil.rmtree(left, ignore_errors=True)
        _say(
            f"building torch_ext for {library.where}, once for this machine and this version of PyTorch;"
            f" it usually takes about {library.seconds} s"
        )
        private = Path(tempfile.mkdtemp(prefix=_PRIVATE, dir=root))
        try:
            code, output = _compile(library, needed, private)
            made = private / place.name
            if code != 0 or not made.is_file():
                _failures[place] = _complaint(code, output)
                _raise_failure(place)
            place.parent.mkdir(exist_ok=True)
            made.replace(place)
        finally:
            shutil.rmtree(private, ignore_errors=True)


def _compile(library: _Library, needed: Iterable[Path], folder: Path) -> tuple[int, str]:
    """Exit code and output of a process that builds `library` in `folder`, and dies with this one."""
    sources = csrc_files.folder()
    is_cuda = library.source.endswith(".cu")
    arguments = {
        "name": _module_name(library),
        "sources": [str(sources / library.source)],
        "extra_cuda_cflags" if is_cuda else "extra_cflags": [*library.flags, *library.flags_here],
        "extra_ldflags": list(library.link_flags),
        "extra_include_paths": [str(sources)],
        "build_directory": str(folder),
        "is_python_module": False,
    }
    script = _CHILD.format(
        path=sys.path, needed=[str(path) for path in needed], is_portable=library.is_portable, arguments=arguments
    )
    environment = os.environ | {"PATH": _search_path()}
    if is_cuda:
        environment |= {"TORCH_CUDA_ARCH_LIST": _cuda_architectures(), "CUDA_HOME": str(_cuda_home())}
    log = folder / "log"
    # Not a pipe for the output: a compiler cache that stays in the background would keep it open.
    with (
        log.open("wb") as file,
        subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
        ) as process,
    ):  # fmt: skip
        try:
            code = process.wait()
        finally:
            assert process.stdin is not None
            process.stdin.close()  # If it runs still, as after Ctrl-C, it ends now.
            process.wait()
    return code, log.read_text(errors="replace")


def _complaint(code: int, output: str) -> str:
    return "\n".join(output.rstrip().splitlines()[-_LINES:] or [f"the build ended with exit code {code}"])


@contextlib.contextmanager
def _locked(path: Path, waiting: str) -> Iterator[None]:
    """Hold the lock on `path`, which keeps out threads of this process too; say so if it has to be waited for."""
    import fcntl  # Not on Windows.

    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(waiting)
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # To close it is not enough where a fork has it open.


def _raise_failure(place: Path) -> None:
    if place in _failures:
        raise _unavailable(_failures[place])


def _unavailable(reason: str) -> BackendUnavailableError:
    space = "\n" if "\n" in reason else " "  # What a compiler says begins on a line of its own.
    return BackendUnavailableError(f"backend: 'torch_ext' could not be built:{space}{reason}\nto try again: {COMMAND}")


def _say(message: str) -> None:
    # In one piece: others may write too.
    sys.stderr.write(f"multisample: {message}\n")
    sys.stderr.flush()
