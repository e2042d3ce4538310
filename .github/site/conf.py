"""The documentation site: the repository's pages in place, and a reference made from docstrings.

Why Sphinx: numpydoc reads NumPy's sections and links their types, MyST reads the pages as they are, and Sphinx's search
works without a server. `sphinx-build --fail-on-warning --conf-dir .github/site . build/site` builds it.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

# Sections of the navigation. A page has its name in the site, a title (or "" for its heading), and its file.
navigation = {
    "Guides": [
        ("numpy", "NumPy: arguments, generators", "multisample/README.md"),
        ("torch", "", "multisample/torch/README.md"),
        ("jax", "", "multisample/jax/README.md"),
        ("dask", "Dask, executors", "multisample/dask/README.md"),
        ("arrays", "Other array libraries", "multisample/_libraries/README.md"),
        ("batches", "", "multisample/BATCHES.md"),
        ("parameters", "", "multisample/PARAMETERS.md"),
        ("kernels", "Your own kernels", "csrc/include/README.md"),
        ("cem", "", "multisample/cem/README.md"),
        ("examples", "", "multisample/examples/README.md"),
        ("common-tasks", "", "multisample/COMMON_TASKS.md"),
        ("coming-from", "", "multisample/COMING_FROM.md"),
        ("when-not", "", "multisample/WHEN_NOT.md"),
    ],
    "Reference": [
        ("reference/multisample", "", ".github/site/multisample.rst"),
        ("reference/cem", "", ".github/site/cem.rst"),
        ("reference/torch", "", ".github/site/torch.rst"),
        ("reference/jax", "", ".github/site/jax.rst"),
        ("reference/dask", "", ".github/site/dask.rst"),
        ("reference/kernels", "", ".github/site/kernels.rst"),
        ("reference/tetris", "", ".github/site/tetris.rst"),
        ("environment", "", "multisample/ENVIRONMENT.md"),
        ("stream", "", "multisample/STREAM.md"),
    ],
    "Figures": [("figures", "", "bench/README.md"), ("machines", "", "bench/results/machines.md")],
    "Inside": [
        ("calls", "", "multisample/_routes/README.md"),
        ("kernel", "", "csrc/README.md"),
        ("backends", "", "backends/README.md"),
        ("reference/backends", "", ".github/site/backends.rst"),
        ("libraries", "", "backends/native/README.md"),
    ],
    "Project": [
        ("changelog", "", ".github/CHANGELOG.md"),
        ("citing", "", ".github/CITING.md"),
        ("security", "", ".github/SECURITY.md"),
        ("contributing", "", ".github/CONTRIBUTING.md"),
        ("releasing", "", ".github/RELEASING.md"),
    ],
}

project = "multisample"
author = "multisample's authors"
version = release = runpy.run_path(str(ROOT / "multisample" / "_version.py"))["__version__"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "numpydoc", "pages"]
root_doc = "index"
# A new page that navigation lacks is a warning, and so an error.
include_patterns = ["**.md", ".github/site/*.rst"]
# In a clone, the package has links to backends and csrc.
exclude_patterns = [".git", ".venv", ".editable", "**.*_cache", "build", "dist", "report", "tests", "**/__pycache__"]
exclude_patterns += ["multisample/backends", "multisample/csrc"] if (ROOT / "backends").exists() else []

# Headings have the anchors that GitHub gives them.
myst_heading_anchors = 4

# A name in backticks is a link if the reference has it.
default_role = "py:obj"
nitpicky = True
# Arguments, other libraries, and modules that are not public, have no entries.
nitpick_ignore_regex = [("py:.*", r"(?!multisample\.).*|multisample\.(backends|examples)\..*")]
# Without these libraries, the reference is the same.
autodoc_mock_imports = ["torch", "jax", "dask", "triton"]
autodoc_typehints = "none"
autodoc_default_options = {"members": True}
numpydoc_show_class_members = False
# Types that docstrings name without their modules. numpydoc links no other words.
numpydoc_xref_param_type = True
numpydoc_xref_ignore = "all"
numpydoc_xref_aliases = {name: f"multisample.{name}" for name in ("BackendStatus", "Generator", "Key")}
numpydoc_xref_aliases |= {name: f"multisample.cem.{name}" for name in ("CEM", "CEMState", "Result", "State", "Task")}

html_theme = "furo"
html_title = f"multisample {version}"
html_static_path = html_css_files = ["phone.css"]
html_copy_source = False
html_show_sphinx = False
html_permalinks_icon = "#"
