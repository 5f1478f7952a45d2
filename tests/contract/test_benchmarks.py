"""The pages of docs/benchmarks: pictures, comparisons and tables have the same figures."""

import re
import shutil

import pytest

from fixtures.programs import ROOT, python

DOCS = ROOT / "docs" / "benchmarks"
PAGES = sorted(path for path in DOCS.glob("*.md") if path.name != "index.md")


def check(directory=DOCS):
    """The exit status, and the files that differ from the tables of their page."""
    # In a process: importing `benchmarks` switches metrics and traces off.
    run = python("-m", "benchmarks", "--check", str(directory))
    assert run.stderr == ""
    return run.returncode, run.stdout.split()


def test_pictures_and_comparisons_have_the_figures_of_the_tables():
    assert check() == (0, [])


def test_a_figure_that_differs_from_its_picture_and_comparisons_is_found(tmp_path):
    shutil.copytree(DOCS, tmp_path, dirs_exist_ok=True)
    page = tmp_path / "timer.md"
    text = page.read_text()
    row = re.search(r"^\| HierarchicalWheel +\|.*$", text, re.MULTILINE)[0]
    page.write_text(text.replace(row, re.sub(r"\d", "9", row)))
    assert check(tmp_path) == (1, ["timer.md", "timer-pair.svg"])


def test_each_module_has_all_that_it_imports():
    paths = [path.relative_to(ROOT).with_suffix("") for path in ROOT.glob("benchmarks/*/**/*.py")]
    modules = [".".join(path.parts) for path in paths if path.name != "__init__"]
    run = python("-c", "".join(f"import {module}\n" for module in sorted(modules)))
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_names_its_rivals_and_says_how_to_repeat_it_what_is_lost_and_what_is_won(page):
    text = page.read_text()
    for heading in ("How to repeat it", "Where rpcwheel loses", "Where rpcwheel wins"):
        assert f"\n## {heading}\n" in text
    assert re.search(r"`python -m benchmarks\.\w+", text)
    assert re.search(r"^\* Machine: ", text, re.MULTILINE)
    assert ".svg)" in text


def test_each_picture_is_on_a_page_and_has_the_same_style_as_the_others():
    pictures = list(DOCS.glob("*.svg"))
    shown = {name for page in PAGES for name in re.findall(r"\]\((\S+\.svg)\)", page.read_text())}
    assert {picture.name for picture in pictures} == shown
    styles = {re.search("<style>.*</style>", each.read_text(), re.DOTALL)[0] for each in pictures}
    assert len(styles) == 1
