"""Extension of Sphinx: pages keep their places in the repository, and have short names in the site."""

from __future__ import annotations

import ast
import html
import os
import re
import textwrap
from pathlib import Path
from typing import Any

import numpydoc.xref
from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.project import Project
from sphinx.transforms import SphinxTransform


class Pages(Project):
    """Files of the repository under their names in the site."""

    names: dict[str, str]

    def path2doc(self, filename: str | os.PathLike[str]) -> str | None:
        path = os.path.relpath(Path(self.srcdir, filename), self.srcdir)
        # Other programs are files to read, not pages.
        return self.names.get(path) or (None if path.endswith(".py") else super().path2doc(filename))


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


class Sources(SphinxTransform):
    """Link files that are not pages to the repository, if its address is known."""

    default_priority = 200

    def apply(self, **kwargs: object) -> None:
        if self.config.address:
            for link in list(self.document.findall(addnodes.download_reference)):
                file, _ = self.env.relfn2path(link["reftarget"], self.env.docname)
                to = nodes.reference("", "", *link.children, refuri=f"{self.config.address}/blob/HEAD/{file}")
                link.replace_self(to)


class Blocks(SphinxTransform):
    """Blocks of code do not end in an empty line."""

    default_priority = 200

    def apply(self, **kwargs: object) -> None:
        for block in self.document.findall(nodes.literal_block):
            block.rawsource = block.rawsource.rstrip()
            block.children[:] = [nodes.Text(block.astext().rstrip())]


def _name_pages(app: Sphinx) -> None:
    pages = Pages(app.srcdir, app.config.source_suffix)
    pages.names = {file: name for section in app.config.navigation.values() for name, _, file in section}
    pages.names["README.md"] = app.config.root_doc
    app.project = app.env.project = pages


def _read_source(app: Sphinx, name: str, source: list[str]) -> None:
    """List all pages on the front page, and make Markdown of programs."""
    if name == app.config.root_doc:
        for caption, pages in app.config.navigation.items():
            paths = [(title, name if name == "self" else f"/{name}") for name, title, _ in pages]
            entries = "\n".join(f"{title} <{path}>" if title else path for title, path in paths)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n"
    elif name.startswith("examples/"):
        title = next(title for page, title, _ in app.config.navigation["Examples"] if page == name)
        source[0] = _program_page(title, Path(app.env.doc2path(name)).stem, source[0])


def _program_page(title: str, name: str, source: str) -> str:
    """The docstring of an example, its output and its source."""
    document = ast.get_docstring(ast.parse(source)) or ""
    commands = r"((?:^(?:python -m|mpiexec|torchrun) .*\n?)+)"
    document = re.sub(commands, r"```sh\n\1\n```\n", document, flags=re.MULTILINE)
    output = Path(__file__).with_name("output").joinpath(f"{name}.txt").read_text(encoding="utf-8")
    code = source.split('"""', 2)[2].strip()
    return (
        f"# {title}\n\n{document}\n\n## Output\n\n```text\n$ python -m multisample examples {name}\n{output}```\n\n"
        f"## Source\n\n`````python\n{code}\n`````\n"
    )


def _describe(app: Sphinx, name: str, template: str, context: dict[str, Any], document: nodes.document | None) -> None:
    """Give a page its description for search engines: its first paragraph."""
    paragraph = next(iter(document.findall(nodes.paragraph)), None) if document else None
    text = textwrap.shorten(paragraph.astext() if paragraph else app.config.description, 160)
    context["metatags"] = context.get("metatags", "") + f'<meta name="description" content="{html.escape(text)}">'


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    numpydoc.xref.DEFAULT_LINKS.clear()  # They need inventories of other sites, and so a network.
    app.add_config_value("navigation", {}, "env")
    app.add_config_value("address", "", "env")
    app.add_config_value("description", "", "html")
    app.connect("builder-inited", _name_pages)
    app.connect("source-read", _read_source)
    app.connect("html-page-context", _describe)
    for transform in (Pictures, Sources, Blocks):
        app.add_transform(transform)
