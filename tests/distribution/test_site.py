"""The documentation site, built as CONTRIBUTING.md says and opened in a headless browser at a phone's width."""

import importlib
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest
from places import ROOT

import multisample
from multisample import examples

pytestmark = pytest.mark.site

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    page = (ROOT / ".github" / "CONTRIBUTING.md").read_text(encoding="utf-8")
    options = re.findall(r"^sphinx-build (.+) build/site ", page, re.MULTILINE)[0].split()
    assert "--fail-on-warning" in options
    command = [sys.executable, "-m", "sphinx", *options, folder]
    # A virtual environment in the clone, which may have any name and has pages of its own.
    with tempfile.TemporaryDirectory(dir=ROOT) as environment:
        Path(environment, "pyvenv.cfg").touch()
        Path(environment, "README.md").write_text("# A page of a package\n")
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        message = f"expected one of {', '.join(BROWSERS)}: apt-get install chromium-headless-shell"
        # GitHub's runners have a browser, so a missing one is a fault there.
        (pytest.fail if "GITHUB_ACTIONS" in os.environ else pytest.skip)(message)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


def anchors(file: Path) -> set[str]:
    return set(re.findall(r'\bid="(.+?)"', file.read_text(encoding="utf-8")))


# Of the open page: elements that reach beyond the screen and do not scroll, images that did not load, and all links.
MEASURES = """() => {
    const scrolls = element => element && element.tagName != "ARTICLE" && (
        ["auto", "scroll"].includes(getComputedStyle(element).overflowX) || scrolls(element.parentElement));
    const wide = element => element.getBoundingClientRect().right > innerWidth + 1 && !scrolls(element.parentElement);
    return {
        wide: [...document.querySelectorAll("article, article *")].filter(wide).slice(0, 3).map(e => e.outerHTML),
        broken: [...document.images].filter(image => !image.naturalWidth).map(image => image.src),
        links: [...document.links].map(link => link.href),
    };
}"""


def test_every_page_fits_a_phone_and_has_no_broken_link(site: Path, browser: Any) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 30
    page = browser.new_page(viewport={"width": 360, "height": 740})
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(f"{page.url}: {error}"))
    page.on("requestfailed", lambda request: errors.append(f"{page.url}: {request.url} did not load"))
    links = set()
    for path in pages:
        page.goto(path.as_uri())
        found = page.evaluate(MEASURES)
        name = path.relative_to(site)
        errors += [f"{name}: too wide for a phone: {element[:200]}" for element in found["wide"]]
        errors += [f"{name}: {image} is no image" for image in found["broken"]]
        links |= {(name, link) for link in found["links"] if not link.startswith(("http:", "https:"))}
    targets: dict[Path, set[str]] = {}
    for name, link in links:
        address, fragment = urldefrag(unquote(link))
        target = Path(address.removeprefix("file://").partition("?")[0])
        if not target.is_file():
            errors.append(f"{name}: {link} leads nowhere")
        elif fragment and target.suffix == ".html":
            if target not in targets:
                targets[target] = anchors(target)
            if fragment not in targets[target]:
                errors.append(f"{name}: {link} has no such anchor")
    assert len(targets) > 20
    assert not errors, "\n".join(errors)


def test_search_finds_pages_and_names_without_a_server(site: Path, browser: Any) -> None:
    page = browser.new_page()
    for words, expected in (("lognormal", "when-not.html"), ("weighted_moments", "reference/multisample.html#")):
        page.goto(f"{(site / 'search.html').as_uri()}?q={words}")
        page.wait_for_selector(f"#search-results a[href*='{expected}']", timeout=20_000)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_are_light_or_dark_as_the_system_is(site: Path, browser: Any, scheme: str) -> None:
    page = browser.new_page(color_scheme=scheme)
    page.goto((site / "index.html").as_uri())
    color = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", color)[:3])) < 3 * 128) == (scheme == "dark")
    images = "document.querySelectorAll('main img, article img')"
    shown = page.evaluate(f"[...{images}].filter(i => i.offsetWidth).map(i => i.src)")
    assert len(shown) >= 2
    assert all(f"-{scheme}.svg" in image for image in shown)


def test_every_page_has_an_icon_a_description_and_a_license(site: Path) -> None:
    for path in site.rglob("*.html"):
        page = path.read_text(encoding="utf-8")
        for text in ("/icon.svg", '<meta name="description" content="', "MIT License"):
            assert text in page, f"{path.relative_to(site)} has no {text}"


def test_examples_are_pages_with_their_output_and_no_download(site: Path) -> None:
    page = (site / "examples.html").read_text(encoding="utf-8")
    for name in set(examples.__all__) - {"tetris"}:
        assert f'href="examples/{name}.html"' in page
        shown = (site / "examples" / f"{name}.html").read_text(encoding="utf-8")
        assert f"$ python -m multisample examples {name}\n" in shown
    for path in {*site.rglob("*.html")} - {*site.glob("_modules/**/*")}:
        assert "\n\n</pre>" not in path.read_text(encoding="utf-8"), f"{path.name} has a block with an empty last line"


def test_every_block_of_code_has_a_button_that_copies_it(site: Path, browser: Any) -> None:
    page = browser.new_page()
    page.goto((site / "index.html").as_uri())
    assert page.locator("button.copybtn").count() == page.locator("article div.highlight pre").count() > 5


def test_the_speed_table_and_the_first_commands_fit_the_column(site: Path, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto((site / "index.html").as_uri())
    assert page.evaluate("""() => {
        const table = document.querySelector("#speed table"), block = document.querySelector("#install pre");
        return table.offsetWidth <= table.parentElement.offsetWidth + 1 && block.scrollWidth <= block.clientWidth;
    }""")


def test_the_reference_has_every_public_name(site: Path) -> None:
    found = set(itertools.chain.from_iterable(map(anchors, (site / "reference").glob("*.html"))))
    names = {f"multisample.{name}" for name in multisample.__all__} - {"multisample.__version__"}
    for library in ("cem", "dask", "examples.tetris", "jax", "numba", "torch", "triton"):
        module = importlib.import_module(f"multisample.{library}")
        names |= {f"{module.__name__}.{name}" for name in module.__all__ if name != "FEATURES"}
    assert names - found == set()
