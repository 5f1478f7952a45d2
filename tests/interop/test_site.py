"""The documentation site, as Sphinx builds it."""

import importlib.util
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import rpcwheel
from fixtures.programs import ROOT

PACKAGE = Path(rpcwheel.__file__).parent  # in the tree, or where a wheel was installed


class Resources(HTMLParser):
    """The URLs that a browser loads for a page without being asked."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.feed(page.read_text("utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        if tag == "link" and values.get("rel") in {"stylesheet", "preload", "icon", "prefetch"}:
            self.loaded.append(values.get("href") or "")
        elif tag != "a":
            self.loaded += [
                values[name] or "" for name in ("src", "srcset", "data") if name in values
            ]


@pytest.mark.skipif(PACKAGE.parent != ROOT, reason="needs files of the source tree")
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("sphinx", "myst_parser", "pydata_sphinx_theme"))),
    reason="needs the extra rpcwheel[docs]",
)
@pytest.mark.timeout(1200)
def test_the_site_is_built_without_a_warning_and_loads_nothing_from_elsewhere(
    tmp_path: Path,
) -> None:
    arguments = ("--fail-on-warning", "--keep-going", "--quiet", "docs", str(tmp_path))
    run = subprocess.run(
        [sys.executable, "-m", "sphinx", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, "")

    files = {page.relative_to(tmp_path): page for page in tmp_path.rglob("*.html")}
    pages = [page for path, page in sorted(files.items()) if path.parts[0] != "_static"]
    loaded = {url for page in pages for url in Resources(page).loaded}
    for style in tmp_path.rglob("*.css"):
        loaded |= set(re.findall(r"""url\(["']?([^"')]+)""", style.read_text("utf-8")))
    assert len(loaded) > 10
    assert [url for url in loaded if re.match(r"(?:[a-z]+:)?//", url)] == []

    text = (tmp_path / "llms.txt").read_text("utf-8")
    listed = re.findall(r"^- \[.+\]\((.+)\): .+$", text, re.MULTILINE)
    not_listed = {"index.html", "genindex.html", "py-modindex.html", "search.html"}
    assert {*listed} == {str(page.relative_to(tmp_path)) for page in pages} - not_listed
