"""Each word of the kernels has the one meaning that the glossary of csrc/README.md gives it; old names are gone."""

import re
from pathlib import Path

import pytest

import multisample.backends
from multisample.backends.native import csrc_files

CSRC = csrc_files.folder()
BACKENDS = Path(multisample.backends.__file__).resolve().parent
PACKAGE = Path(multisample.__file__).resolve().parent

WORDS = (CSRC / "README.md").read_text(encoding="utf-8").split("\n## Words\n")[1].split("\n## ")[0]

# A pattern, the files in which it is forbidden, and the word to use instead: the list below the glossary.
FORBIDDEN = re.findall(r"^- `(.+)` in `(.+)`: (.+)$", WORDS, re.M)


def sources() -> list[Path]:
    folders = [CSRC, BACKENDS / "kernels"]
    return [
        path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".h", ".cuh", ".cu", ".cpp")
    ]


@pytest.mark.parametrize(("pattern", "files", "word"), FORBIDDEN)
def test_no_word_has_another_meaning(pattern: str, files: str, word: str) -> None:
    searched = [path for path in sources() if path.match(files)]
    assert searched
    found = [
        f"{path}:{number}: {line.strip()}"
        for path in searched
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert not found, (word, found)


def test_the_whole_package_says_shared_noise() -> None:
    pages = [path for folder in (PACKAGE, CSRC, BACKENDS) for kind in ("*.py", "*.md") for path in folder.rglob(kind)]
    assert len(pages) > 100
    assert not [path for path in pages if re.search("(?i)common[ _]noise", path.read_text(encoding="utf-8"))]
