"""The documentation site: the repository's pages in place, and a reference made from docstrings.

Why Sphinx: numpydoc reads NumPy's sections and links their types, MyST reads the pages as they are, and Sphinx's search
works without a server. `sphinx-build --fail-on-warning --conf-dir .github/site . build/site` builds it.
"""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

# Sections of the navigation. A page has its name in the site, a title (or "" for its heading), and its file.
navigation = {
    "Getting started": [
        ("self", "Install and draw", ""),
        ("numpy", "", "multisample/README.md"),
        ("common-tasks", "", "multisample/COMMON_TASKS.md"),
        ("coming-from", "Coming from other libraries", "multisample/COMING_FROM.md"),
        ("when-not", "", "multisample/WHEN_NOT.md"),
    ],
    "Guides": [
        ("torch", "", "multisample/torch/README.md"),
        ("jax", "", "multisample/jax/README.md"),
        ("dask", "Dask and executors", "multisample/dask/README.md"),
        ("arrays", "Other array libraries", "multisample/_libraries/README.md"),
        ("batches", "Batches of matrices", "multisample/BATCHES.md"),
        ("parameters", "", "multisample/PARAMETERS.md"),
        ("kernels", "Your own kernels", "csrc/include/README.md"),
        ("cem", "", "multisample/cem/README.md"),
    ],
    "Examples": [
        ("examples", "All examples", "multisample/examples/README.md"),
        ("examples/cart_pole", "MPPI: poles on carts", "multisample/examples/cart_pole.py"),
        ("examples/mppi", "MPPI in a kernel", "multisample/examples/mppi.py"),
        ("examples/evolution_strategy", "An evolution strategy", "multisample/examples/evolution_strategy.py"),
        ("examples/populations", "Populations", "multisample/examples/populations.py"),
        ("examples/mezo", "MeZO on a transformer", "multisample/examples/mezo.py"),
        ("examples/bayesian_regression", "Variational inference", "multisample/examples/bayesian_regression.py"),
        ("examples/option_prices", "Option prices", "multisample/examples/option_prices.py"),
        ("examples/cem_cluster", "The cross-entropy method on a cluster", "multisample/examples/cem_cluster.py"),
    ],
    "Reference": [
        ("reference/multisample", "", ".github/site/multisample.rst"),
        ("reference/torch", "", ".github/site/torch.rst"),
        ("reference/jax", "", ".github/site/jax.rst"),
        ("reference/dask", "", ".github/site/dask.rst"),
        ("reference/cem", "", ".github/site/cem.rst"),
        ("reference/kernels", "", ".github/site/kernels.rst"),
        ("reference/tetris", "", ".github/site/tetris.rst"),
        ("environment", "", "multisample/ENVIRONMENT.md"),
        ("stream", "The random stream", "multisample/STREAM.md"),
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

PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
project, description = (re.search(rf'^{key} = "(.+)"', PYPROJECT, re.MULTILINE)[1] for key in ("name", "description"))
# The address of the repository, where links to sources lead. Without an address, such links are downloads.
address = next(iter(re.findall(r'^Source = "(.+)"', PYPROJECT, re.MULTILINE)), "")
version = release = runpy.run_path(str(ROOT / "multisample" / "_version.py"))["__version__"]
author = "multisample's authors"
project_copyright = f"2026 {author}, MIT License. {project} {version}. {description}."


def environments() -> list[str]:
    """The virtual environments in the repository."""
    found = []
    for folder, below, files in os.walk(ROOT):
        if "pyvenv.cfg" in files:
            found.append(os.path.relpath(folder, ROOT))
            below.clear()
    return found


extensions = [
    "myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.viewcode", "numpydoc",
    "sphinx_copybutton", "pages",
]  # fmt: skip
root_doc = "index"
# Programs are pages too: `pages` makes Markdown of them.
source_suffix = {".md": "markdown", ".rst": "restructuredtext", ".py": "markdown"}
programs = [file for _, _, file in navigation["Examples"] if file.endswith(".py")]
# A new page that navigation lacks is a warning, and so an error.
include_patterns = ["**.md", ".github/site/*.rst", *programs]
# In a clone, the package has links to backends and csrc.
exclude_patterns = [".git", ".editable", "**.*_cache", "build", "dist", "report", "tests", "**/__pycache__"]
exclude_patterns += environments()
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
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
numpydoc_show_class_members = False
# Types that docstrings name without their modules. numpydoc links no other words.
numpydoc_xref_param_type = True
numpydoc_xref_ignore = "all"
numpydoc_xref_aliases = {name: f"multisample.{name}" for name in ("BackendStatus", "Generator", "Key")}
numpydoc_xref_aliases |= {name: f"multisample.cem.{name}" for name in ("CEM", "CEMState", "Result", "State", "Task")}

# Only what a reader types is copied.
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_theme_options = {"footer_icons": [{"name": "Source", "url": address, "html": "Source code"}] if address else []}
html_title = f"{project} {version}"
html_favicon = "pictures/icon.svg"
html_static_path = html_css_files = ["phone.css"]
html_copy_source = False
html_show_sphinx = False
html_permalinks_icon = "#"
