"""The numba backend's reasons when it cannot run: they name the package to change."""

import importlib.util
from typing import Any

import pytest
from processes import run_python

import multisample
from multisample._plan import PLANS
from multisample.backends import registry
from multisample.backends.kernels.cuda import toolchain as cuda_toolchain

no_numba_cuda = importlib.util.find_spec("numba_cuda") is None
requires_numba_cuda = pytest.mark.skipif(no_numba_cuda, reason="numba-cuda is not installed")


def clashes() -> tuple[str, ...]:
    """The version clashes, without the cached result."""
    found: tuple[str, ...] = cuda_toolchain.clashes.__wrapped__()
    return found


def test_without_numba_cuda_the_reason_has_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "numba_cuda" else find_spec(name, *rest)
    )
    status = registry.find("numba").status()
    assert not status.available
    (reason,) = status.reasons
    assert "numba-cuda is not installed" in reason
    assert "pip install 'numba-cuda[cu13]" in reason
    PLANS.clear()  # A call with a plan does not ask for the status.
    with pytest.raises(multisample.BackendUnavailableError, match="numba-cuda is not installed"):
        multisample.sample([0.0], [1.0], 3, backend="numba")


@pytest.mark.slow
@requires_numba_cuda
def test_the_reason_names_a_numpy_that_is_too_new() -> None:
    # NumPy 2.5 has removed this function, which numba-cuda 0.30 uses.
    code = "import warnings; warnings.simplefilter('ignore'); import numpy; vars(numpy).pop('row_stack', None);"
    code += "import multisample; x = multisample.list_backends()['numba']; print(x.available, *x.reasons)"
    done = run_python("-c", code, seconds=120)
    assert done.stdout.startswith("False")
    assert "does not work with NumPy" in done.stdout
    assert "pip install 'numpy<2.5'" in done.stdout
    assert not done.stderr


@requires_numba_cuda
def test_installed_compilers_are_compatible() -> None:
    assert clashes() == ()


@requires_numba_cuda
def test_the_reason_names_a_linker_older_than_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from numba.cuda.cudadrv import nvvm

    compile_ir = nvvm.compile_ir

    def newer(*arguments: Any, **options: Any) -> bytes:
        ptx = compile_ir(*arguments, **options).decode()
        version = next(line for line in ptx.splitlines() if line.startswith(".version"))
        return ptx.replace(version, ".version 99.9").encode()

    monkeypatch.setattr(nvvm, "compile_ir", newer)
    (reason,) = clashes()
    assert "cannot link the PTX of libNVVM" in reason
    assert "99.9" in reason
    assert "pip install 'nvidia-" in reason


@requires_numba_cuda
def test_the_reason_names_a_compiler_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    from numba.cuda.cudadrv import nvvm

    class Missing:
        def __init__(self) -> None:
            raise RuntimeError("libnvvm.so.4: cannot open shared object file")

    monkeypatch.setattr(nvvm, "NVVM", Missing)
    (reason,) = clashes()
    assert "libNVVM cannot compile (libnvvm.so.4: cannot open shared object file)" in reason
    assert "pip install 'numba-cuda[cu13]" in reason


@requires_numba_cuda
@pytest.mark.parametrize(("understood", "compilers", "command"), [
    (11080, 12, "install a newer driver"), (13000, 13, None), (13040, 13, None),
    (12040, 13, "pip install 'numba-cuda[cu12]>=0.30.4,<0.31', or install a newer driver"),
])  # fmt: skip
def test_the_reason_names_a_driver_older_than_the_compilers(
    monkeypatch: pytest.MonkeyPatch, understood: int, compilers: int, command: str | None
) -> None:
    from cuda.bindings import driver, nvjitlink

    monkeypatch.setattr(driver, "cuDriverGetVersion", lambda: (0, understood))
    monkeypatch.setattr(nvjitlink, "version", lambda: (compilers, 3))
    if command is None:
        assert clashes() == ()
        return
    (reason,) = clashes()
    supported = f"{understood // 1000}.{understood % 1000 // 10}"
    message = f"supports CUDA {supported}, but the compilers are of CUDA {compilers}.3"
    assert message in reason
    assert reason.endswith(command)
