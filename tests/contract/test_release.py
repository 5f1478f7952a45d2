"""The scripts that make a release: links and bytes of the sdist, notes from the changelog."""

import csv
import io
import json
import os
import re
import runpy
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import rpcwheel
from fixtures.programs import ROOT

pytestmark = pytest.mark.skipif(
    not (ROOT / ".ci").exists() or Path(rpcwheel.__file__).parents[1] != ROOT,
    reason="needs files of the source tree",
)


@pytest.fixture
def dist(monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    return runpy.run_path(str(ROOT / ".ci" / "dist.py"))


@pytest.fixture
def release_notes(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / ".ci")
    return runpy.run_path(str(ROOT / ".ci" / "release_notes.py"))


def test_links_of_the_readme_lead_to_the_tag_of_the_version(dist) -> None:
    text = dist["with_absolute_links"]((ROOT / "README.md").read_text("utf-8"), "1.2.3")
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    repository = project["urls"]["Repository"]
    assert f"{repository}/blob/v1.2.3/docs/semantics.md" in links
    assert f"{repository}/raw/v1.2.3/docs/images/overview.svg" in links
    assert [link for link in links if not link.startswith(("https:", "#"))] == []


def test_links_of_a_version_without_a_tag_lead_to_main(dist) -> None:
    text = dist["with_absolute_links"]("[a](docs/a.md#b)", "1.2.4.dev7+g0a1b2c3")
    assert text.endswith("/blob/main/docs/a.md#b)")


def archive(path: Path, names: list[str], mtime: int, owner: str) -> Path:
    with tarfile.open(path, "w:gz") as new:
        for name in names:
            member = tarfile.TarInfo(f"rpcwheel-1.2.3/{name}")
            member.mtime, member.uname, member.size = mtime, owner, 4
            new.addfile(member, io.BytesIO(b"text"))
    return path


def test_times_owners_and_order_do_not_change_the_bytes_of_an_sdist(dist, tmp_path) -> None:
    first, second = tmp_path / "a.tar.gz", tmp_path / "b.tar.gz"
    built = tmp_path / "rpcwheel-1.2.3.tar.gz"
    dist["write_sdist"](archive(built, ["a", "b"], 1, "root"), first)
    dist["write_sdist"](archive(built, ["b", "a"], 2, "shop"), second)
    assert first.read_bytes() == second.read_bytes()


CHANGELOG = """
# Changelog

## 1.2.3 (2026-11-28)

### Fixed

- b

## 1.2.30

- c
"""


def test_the_notes_of_a_version_are_its_part_of_the_changelog(release_notes) -> None:
    part = release_notes["part"]
    assert part(CHANGELOG, "1.2.3") == "### Fixed\n\n- b\n"
    assert part(CHANGELOG, "1.2.30") == "- c\n"
    assert part(CHANGELOG, "1.2") == ""


def test_a_version_is_not_released_with_another_tag_or_open_fragments(release_notes) -> None:
    problems = release_notes["problems"]
    assert problems("1.2.3", "1.2.3", [], "- b\n") == []
    assert problems("1.2.3", "1.2.4.dev1", ["7.fixed.md"], "") == [
        "the commit has the version 1.2.4.dev1, not 1.2.3",
        "run `make changelog VERSION=1.2.3`: 7.fixed.md",
        "CHANGELOG.md has no part `## 1.2.3`",
    ]


@pytest.fixture
def pages(tmp_path):
    """The branch of the documentation site, with some versions."""
    for name in ("dev", "0.9.0", "0.10.0", "0.11.0rc1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").touch()
    return tmp_path


def test_the_version_switcher_leads_to_the_site_of_the_project(pages) -> None:
    text = (ROOT / ".github" / "workflows" / "docs.yml").read_text("utf-8")
    (command,) = re.findall(r"python3 source/(docs/versions\.py pages.*)", text)
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"]
    repository = urls["Repository"].removeprefix("https://github.com/")
    subprocess.run(
        ["sh", "-c", f'"$PYTHON" "$ROOT"/{command.replace(" pages", f" {pages}")}'],
        env=os.environ
        | {"GITHUB_REPOSITORY": repository, "PYTHON": sys.executable, "ROOT": str(ROOT)},
        check=True,
    )
    site = urlsplit(urls["Documentation"]).path
    listed = json.loads((pages / "versions.json").read_text("utf-8"))
    assert {version["url"] for version in listed} == {
        f"{site}{page.parent.name}/" for page in pages.glob("*/index.html")
    }


def test_the_site_leads_to_the_newest_release_or_to_the_main_branch(pages) -> None:
    versions = runpy.run_path(str(ROOT / "docs" / "versions.py"))
    names = sorted(("dev", "0.9.0", "0.11.0rc1", "0.10.0"), key=versions["order"])
    assert names == ["0.11.0rc1", "dev", "0.9.0", "0.10.0"]
    versions["write"](pages, "/")
    assert 'url=0.10.0/index.html"' in (pages / "index.html").read_text("utf-8")


@pytest.mark.parametrize("name", ["fixed", "killed"])
def test_the_lines_of_mutants_exist(name) -> None:
    with (ROOT / "tests" / "mutation" / f"{name}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    gone = [
        (row["module"], row["before"])
        for row in rows
        if (ROOT / row["module"]).read_text("utf-8").count(f"\n{row['before']}\n")
        <= int(row["nth"])
    ]
    assert rows
    assert gone == []
