"""The build hook of wheels: adds compiled libraries on request, and the folder that editable wheels put on sys.path.

README.md beside this file describes MULTISAMPLE_PREBUILT. The hook compiles with the PyTorch, the compilers and the
toolkit of the environment, so the build must not be isolated.
"""

import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal, TypeAlias

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_VARIABLE = "MULTISAMPLE_PREBUILT"
_Kinds: TypeAlias = tuple[Literal["cpu", "cuda"], ...]
_KINDS: dict[str, _Kinds] = {"": (), "0": (), "cpu": ("cpu",), "1": ("cpu", "cuda")}


class WheelHook(BuildHookInterface[Any]):
    """Called by hatchling around the build of each wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Prepare a wheel. `version` is "standard" or "editable"."""
        if version == "editable":
            self._link_package()
            return
        kinds = _requested_kinds()
        if kinds:
            self._temporary = tempfile.TemporaryDirectory()
            build_data["tag"] = f"py3-none-{self._compile(Path(self._temporary.name), kinds)}"
            build_data["pure_python"] = False
            build_data["force_include"][self._temporary.name] = "multisample/backends/native/prebuilt"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the libraries that `initialize` compiled. The wheel has copies."""
        if hasattr(self, "_temporary"):
            self._temporary.cleanup()

    def _link_package(self) -> None:
        """Make the folder that editable installations put on sys.path. It has only the package.

        The root of the checkout would also make `backends`, `bench` and `tests` importable from anywhere.
        """
        link = Path(self.root, *self.build_config.dev_mode_dirs, "multisample")
        link.parent.mkdir(exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(Path("..", "multisample"), target_is_directory=True)

    def _compile(self, folder: Path, kinds: _Kinds) -> str:
        """Compile libraries into `folder`, and return their common platform tag."""
        sys.path.insert(0, str(self.root))  # `prebuilt` refuses libraries of other sources than those of the wheel.
        from multisample.backends.native import wheels

        try:
            return wheels.platform_tag(wheels.build_all(kinds, folder))
        except (RuntimeError, ValueError) as error:
            sys.exit(f"{_VARIABLE}={os.environ[_VARIABLE]}: the libraries were not built: {error}")


def _requested_kinds() -> _Kinds:
    value = os.environ.get(_VARIABLE, "")
    if value not in _KINDS:
        sys.exit(f"{_VARIABLE}: expected 1, cpu or 0, got {value!r}")
    kinds = _KINDS[value]
    missing = [name for name in ("torch", "numpy") if kinds and importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f"{_VARIABLE}={value}: {' and '.join(missing)} cannot be imported where the wheel is built. Build it where"
            " torch>=2.11, numpy, ninja, setuptools, hatchling and the compilers are installed, and not in isolation:"
            " python -m build --wheel --no-isolation, or pip wheel --no-build-isolation"
        )
    return kinds
