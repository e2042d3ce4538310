"""Run every example in docstrings and pages, and check that every public name has a complete docstring."""

import ast
import doctest
import importlib
import importlib.util
import inspect
import operator
import os
import pkgutil
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

import multisample.cem
import multisample.numba
import multisample.torch
from bench.report.page_figures import FIGURES
from bench.report.page_markers import marked_pages, written
from bench.report.results import Results
from multisample.backends import registry
from multisample.examples import tetris

MISSING = {name for name in ("dask", "jax", "triton") if importlib.util.find_spec(name) is None}
if "dask" not in MISSING:
    import multisample.dask

# In an sdist, backends and csrc are in the package. In a clone, the package has links to them.
TOP = {name: ROOT / name for name in ("backends", "csrc")}
FOLDERS = {name: path if path.exists() else ROOT / "multisample" / name for name, path in TOP.items()}
COMMITTED = Results(ROOT / "bench" / "results")
WITH_DOCUMENTS = (ROOT / ".github", ROOT / "bench", ROOT / "multisample", *FOLDERS.values())
DOCUMENTS = sorted({ROOT / "README.md", *(path for folder in WITH_DOCUMENTS for path in folder.rglob("*.md"))})


def module_names() -> list[str]:
    """Every installed module except `__main__`, which would run, and modules that need a missing library."""
    names = ["multisample", *(x.name for x in pkgutil.walk_packages(multisample.__path__, "multisample."))]
    left_out = {"__main__"} | MISSING
    return [name for name in dict.fromkeys(names) if not left_out & set(name.split(".")) or "_libraries" in name]


def run_examples(test: doctest.DocTest) -> None:
    """Run examples; a failure shows the expected and the actual output."""
    output: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.REPORT_NDIFF)
    runner.run(test, out=output.append, clear_globs=False)
    assert runner.failures == 0, "".join(output)


NAMES = [pytest.param(name, marks=[pytest.mark.slow] * name.endswith(".learning")) for name in module_names()]


@pytest.mark.parametrize("name", NAMES)
def test_every_module_has_a_docstring_and_its_examples_run(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__
    assert len(module.__doc__.split()) > 5
    for test in doctest.DocTestFinder().find(module):
        run_examples(test)


def test_module_names_include_all_kinds_of_modules() -> None:
    assert {"multisample._sample", "multisample.backends.cpu", "multisample.commands"} <= set(module_names())


CLASSES_OF_RESULTS = ("BackendStatus", "BackendUnavailableError", "Key", "UnknownBackendError")
PUBLIC = sorted(set(multisample.__all__) - {"__version__"})
# Functions for kernels raise nothing.
IN_KERNELS = {f"numba.{name}": getattr(multisample.numba, name) for name in multisample.numba.__all__}
if "triton" not in MISSING:
    IN_KERNELS |= {f"triton.{name}": getattr(multisample.triton, name).fn for name in multisample.triton.__all__}
METHODS = (
    "Generator.spawn", "cem.minimize", "cem.CEM", "cem.start", "cem.step", "cem.CEM.ask", "cem.CEM.tell",
    "cem.CEM.ask_tasks", "cem.CEM.tell_scores", "cem.Task.draw", "cem.Task.score", "examples.tetris.play",
    "examples.tetris.moves", "examples.tetris.placement", "examples.tetris.Learner", "examples.tetris.Learner.step",
    *({"dask.sample"} if "dask" not in MISSING else ()), *(f"torch.{name}" for name in multisample.torch.__all__),
    *((f"jax.{name}" for name in multisample.jax.__all__) if "jax" not in MISSING else ()),
)  # fmt: skip
CALLABLE = (*IN_KERNELS, *METHODS, *sorted({*PUBLIC}.difference(CLASSES_OF_RESULTS)))


def documentation(thing: Any) -> str:
    text = inspect.getdoc(thing)
    assert text, f"{thing} has no docstring"
    return text


def section(text: str, name: str) -> str | None:
    """The text of a NumPy section, or None."""
    underline = "-" * len(name)
    match = re.search(rf"^{name}\n{underline}\n(.*?)(?=^[A-Z][A-Za-z ]+\n---|\Z)", text, re.MULTILINE | re.DOTALL)
    return match and match[1]


def test_all_lists_every_public_name() -> None:
    for name in multisample.__all__:
        assert hasattr(multisample, name)
    assert sorted(multisample.__all__) == list(multisample.__all__)
    names = {name for name, value in vars(multisample).items() if not inspect.ismodule(value) and name[0] != "_"}
    assert names - {"TYPE_CHECKING", "annotations"} == set(multisample.__all__) - {"__version__"}


@pytest.mark.parametrize("name", CALLABLE)
def test_parameters_results_and_errors_are_described(name: str) -> None:
    function = IN_KERNELS.get(name) or operator.attrgetter(name)(multisample)
    signature = inspect.signature(function)
    text, expected = documentation(function), sorted(set(signature.parameters) - {"self"})
    described = section(text, "Parameters")
    assert (described is not None) == bool(expected)
    named = re.findall(r"^(\w.*?) : \S", described or "", re.MULTILINE)
    assert sorted(name.strip() for line in named for name in line.split(",")) == expected
    returns = not inspect.isclass(function) and signature.return_annotation not in (None, "None")
    assert (section(text, "Returns") is not None) == returns
    if expected and name not in IN_KERNELS:
        raised = section(text, "Raises")
        assert raised is not None
        for error in ("TypeError", "ValueError"):
            assert re.search(rf"^{error}$", raised, re.MULTILINE)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_docstring_begins_with_a_summary_line_and_has_an_example(name: str) -> None:
    text = documentation(getattr(multisample, name))
    first, *rest = text.splitlines()
    assert first[0].isupper()
    assert first.endswith((".", "?")) or name in CLASSES_OF_RESULTS
    assert not rest or rest[0] == ""
    assert ">>> " in (section(text, "Examples") or "")


@pytest.mark.parametrize("kind", [multisample.BackendStatus, multisample.cem.Result, tetris.Settings])
def test_every_field_of_a_result_is_described(kind: Any) -> None:
    described = section(documentation(kind), "Attributes")
    assert described is not None
    named = [name for line in re.findall(r"^(\w.*?) : ", described, re.MULTILINE) for name in line.split(", ")]
    assert named == list(kind.__dataclass_fields__)


def place_of(path: Path) -> Path:
    """The path of a document in a clone, relative to its root."""
    for name, folder in FOLDERS.items():
        if path.is_relative_to(folder):
            return Path(name, path.relative_to(folder))
    return path.relative_to(ROOT)


def name_of(path: Path) -> str:
    return place_of(path).as_posix()


def blocks(path: Path) -> list[tuple[int, str]]:
    """Blocks of Python code, with the numbers of their first lines."""
    text = path.read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start(1)), match[1]) for match in found]


def lacks(code: str) -> bool:
    """Whether an example needs an optional library, and the library cannot run here."""
    if "import cupy" in code:
        return not multisample.list_backends()["cupy"].available
    return any(re.search(rf"\b{name}\b", code) for name in MISSING)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_examples_in_documents_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    names: dict[str, Any] = {}
    for line, code in blocks(path):
        if ">>>" not in code:
            ast.parse(code)
            continue
        test = doctest.DocTestParser().get_doctest(code, names, path.name, str(path), line)
        if not lacks(code):
            run_examples(test)
        names = test.globs


def test_the_front_page_is_short_and_shows_how_to_draw() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1500
    assert any("multisample.sample(" in code and ">>>" in code for _, code in blocks(ROOT / "README.md"))


def test_the_drawings_are_those_of_the_script() -> None:
    site = ROOT / ".github" / "site"
    drawings = runpy.run_path(str(site / "draw.py"))["drawings"]()
    assert drawings == {path.name: path.read_text(encoding="utf-8") for path in (site / "pictures").iterdir()}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_within_the_repository_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            top, *below = Path(os.path.normpath(place_of(path).parent / target)).parts
            assert FOLDERS.get(top, ROOT / top).joinpath(*below).exists(), target


@pytest.mark.parametrize("page", list(marked_pages()), ids=lambda page: "-".join(page.relative_to(ROOT).parts))
def test_pages_have_the_numbers_of_the_results(page: Path) -> None:
    text, prefix = page.read_text(encoding="utf-8"), os.path.relpath(COMMITTED.folder, page.parent)
    assert written(text, COMMITTED, FIGURES, prefix) == text, "python -m bench.report --pages writes the page"
    assert all((page.parent / path).is_file() for path in re.findall(r'(?:src|srcset)="([^"]+)"', text))
