"""A file includes only headers of its own layer and of lower ones. csrc/README.md has the layers.

Users compile with the folder `include` alone, so the headers of `include` and `stream` name others by relative paths.
"""

import os
import re
from pathlib import Path

import pytest

from multisample.backends.native import csrc_files

ROOT = csrc_files.folder()
SOURCES = sorted(path for path in ROOT.rglob("*") if path.suffix in (".cpp", ".cu", ".cuh", ".h"))
BELOW = {
    "stream": {"stream"},
    "include": {"stream"},
    "element_types.h": {"stream"},
    "launch.h": {"element_types.h", "stream"},
    "cuda": {"cuda", "launch.h", "element_types.h", "stream"},
    "torch": {"torch", "cuda", "launch.h", "element_types.h", "stream"},
}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_file_includes_only_lower_layers(path: Path) -> None:
    layer = path.relative_to(ROOT).parts[0]
    text = path.read_text(encoding="utf-8")
    base = path.parent if layer in ("include", "stream") else ROOT
    for name in re.findall(r'#include "([^"]+)"', text):
        included = Path(os.path.normpath(base / name))
        assert included.is_file(), f"{name} is not named from {base}"
        assert included.relative_to(ROOT).parts[0] in BELOW[layer], name
    frameworks = re.findall(r"#include <((?:torch|ATen|c10|cupy|jaxlib|xla|nanobind|pybind11|Python)\b[^>]*)>", text)
    assert not frameworks or layer == "torch", frameworks


def test_every_layer_has_files() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in SOURCES} == set(BELOW)
