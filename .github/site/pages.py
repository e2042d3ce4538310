"""Extension of Sphinx: pages keep their places in the repository, and have short names in the site."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpydoc.xref
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.project import Project
from sphinx.transforms import SphinxTransform


class Pages(Project):
    """Files of the repository under their names in the site."""

    names: dict[str, str]

    def path2doc(self, filename: str | os.PathLike[str]) -> str | None:
        path = os.path.relpath(Path(self.srcdir, filename), self.srcdir)
        return self.names.get(path) or super().path2doc(filename)


class Pictures(SphinxTransform):
    """A `<picture>` becomes its dark and its light image, so that the theme's switch chooses one."""

    default_priority = 200  # Before Sphinx collects images.

    def apply(self, **kwargs: object) -> None:
        for raw in list(self.document.findall(nodes.raw)):
            found = re.search(r'srcset="(.+?)".*<img alt="(.+?)" src="(.+?)"', raw.astext(), re.DOTALL)
            if found:
                dark, text, light = found.groups()
                images = [nodes.image(uri=dark, alt=text), nodes.image(uri=light, alt=text)]
                images[0]["classes"], images[1]["classes"] = ["only-dark"], ["only-light"]
                raw.replace_self(nodes.paragraph("", "", *images))


def _name_pages(app: Sphinx) -> None:
    pages = Pages(app.srcdir, app.config.source_suffix)
    pages.names = {file: name for section in app.config.navigation.values() for name, _, file in section}
    pages.names["README.md"] = app.config.root_doc
    app.project = app.env.project = pages


def _add_navigation(app: Sphinx, name: str, source: list[str]) -> None:
    """List all pages on the front page."""
    if name == app.config.root_doc:
        for caption, pages in app.config.navigation.items():
            entries = "\n".join(f"{title} </{name}>" if title else f"/{name}" for name, title, _ in pages)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n"


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    numpydoc.xref.DEFAULT_LINKS.clear()  # They need inventories of other sites, and so a network.
    app.add_config_value("navigation", {}, "env")
    app.connect("builder-inited", _name_pages)
    app.connect("source-read", _add_navigation)
    app.add_transform(Pictures)
