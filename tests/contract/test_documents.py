"""The documents: their code runs, and their links and pictures are right."""

import functools
import json
import re
import runpy
import socket
from pathlib import Path

import pytest
import typer

import rpcwheel
from fixtures.programs import ROOT, python
from rpcwheel.cli.app import app
from rpcwheel.kit.config import OTHER_VARIABLES

PACKAGE = Path(rpcwheel.__file__).parent  # in the tree, or where a wheel was installed

DOCUMENTS = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "deploy/README.md",
    *sorted(
        str(path.relative_to(ROOT))
        for path in ROOT.glob("docs/**/*.md")
        if ROOT / "docs/reference" not in path.parents  # generated
    ),
]

in_the_tree = pytest.mark.skipif(PACKAGE.parent != ROOT, reason="needs files of the source tree")


# Code

RUN_ELSEWHERE = (
    "docs/guides/testing.md",  # testing/test_pytest_plugin.py runs it with pytest
    "docs/migration/",  # tests/interop/test_migration.py
    "docs/registries.md",  # registry/test_manual.py, with a registry in memory
    "docs/tutorial/",  # tests/faults/test_tutorial.py
)
"""Documents whose code runs in other tests. Here it is only compiled."""

CODE = re.compile(
    r"(?:<!-- not run: (?P<reason>[^\n]+) -->\n+)?^```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)

RUN_DOCUMENTS = """
import json, os, sys
import rpcwheel  # once for all documents, as it takes longer than most of them

for package in (rpcwheel, rpcwheel.aio):
    for name in package.__all__:
        getattr(package, name)
failed = []
for blocks in json.load(sys.stdin):
    child = os.fork()
    if not child:
        for block in blocks:
            exec(compile(block, block.partition(chr(10))[0], "exec"), {"__name__": "__main__"})
        sys.exit()
    if os.waitpid(child, 0)[1]:
        failed.append(blocks[0].partition(chr(10))[0])
sys.exit(f"failed: {failed}" if failed else 0)
"""


def test_the_python_code_of_each_document_runs() -> None:
    """Each block is a program. Blocks after `<!-- not run: why -->` are only compiled."""
    documents = []
    for name in DOCUMENTS:
        text = (ROOT / name).read_text("utf-8")
        blocks = []
        for block in CODE.finditer(text):
            if block["language"] != "python":
                continue
            where = f"{name}, line {text.count(chr(10), 0, block.start('code')) + 1}"
            compile(block["code"], where, "exec")
            if not name.startswith(RUN_ELSEWHERE) and not block["reason"]:
                blocks.append(f"# {where}\n{block['code']}")
        documents += [blocks] if blocks else []
    with socket.socket() as server_that_is_down:
        server_that_is_down.bind(("127.0.0.1", 0))
        port = server_that_is_down.getsockname()[1]
        code = json.dumps(documents).replace("127.0.0.1:50051", f"127.0.0.1:{port}")
        run = python("-c", RUN_DOCUMENTS, stdin=code)
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_commands_of_documents_exist_with_their_options() -> None:
    for name in DOCUMENTS:
        text = (ROOT / name).read_text("utf-8")
        blocks = [block["code"] for block in CODE.finditer(text) if block["language"] != "python"]
        lines = [*"\n".join(blocks).splitlines(), *re.findall(r"`([^`\n]+)`", CODE.sub("", text))]
        wrong = []
        for line in lines:
            if match := re.match(r"(?:\$ )?(?:python -m )?(?:rpcwheel) ([a-z].*)", line):
                wrong += wrong_words(match[1])
            elif match := re.match(r"(?:\$ )?make ([a-z-]+)", line):
                wrong += [] if match[1] in make_targets() else [line]
        assert not wrong, name


def wrong_words(line: str) -> list[str]:
    """Return the commands and options in the arguments of `rpcwheel` that do not exist."""
    words = re.sub(r"\s#.*", "", line).split()
    command = typer.main.get_command(app)
    while words and hasattr(command, "commands"):
        names = [name for name in words.pop(0).split("|") if name != "..."]
        if missing := [name for name in names if name not in command.commands]:
            return missing
        if len(names) != 1:
            return []  # several commands, whose options differ
        command = command.get_command(None, names[0])
    options = {"--help", *(each for parameter in command.params for each in parameter.opts)}
    return [
        word
        for word in re.findall(r"(?<!\S)--[a-z][a-z-]*", " ".join(words))
        if word not in options
    ]


@functools.cache
def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


# Links and pictures


@functools.cache
def anchors(path: Path) -> set[str]:
    """The fragments that the headings of a Markdown file have on GitHub."""
    text = re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one).strip().lower().replace(" ", "-") for one in headings}


@in_the_tree
def test_the_relative_links_of_documents_exist() -> None:
    missing = []
    for document in map(ROOT.joinpath, DOCUMENTS):
        for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", document.read_text("utf-8")):
            file, _, anchor = link.partition("#")
            target = document.parent / file if file else document
            if not target.exists() or (anchor and anchor not in anchors(target)):
                missing.append((document.name, link))
    assert not missing


@in_the_tree
@pytest.mark.parametrize("name", ["delivery", "faults", "packages", "policies", "wheel"])
def test_a_picture_that_a_script_draws_is_up_to_date(name: str, monkeypatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs/images")
    script = runpy.run_path(str(ROOT / "docs/images" / f"{name}.py"))
    assert script["PICTURE"].read_text("utf-8") == script["draw"]()


# Contents


@in_the_tree
def test_the_architecture_describes_every_package_and_lists_every_decision() -> None:
    text = (ROOT / "docs/architecture.md").read_text("utf-8")
    described = set(re.findall(r"`(\w+)(?:/\w+\.py)?`", text))
    paths = [*PACKAGE.glob("*/__init__.py"), *PACKAGE.glob("*.py")]
    names = {path.parent.name if path.name == "__init__.py" else path.stem for path in paths}
    assert names - {"rpcwheel"} - described == set()
    decisions = {f"decisions/{path.name}" for path in ROOT.glob("docs/decisions/*.md")}
    decisions.remove("decisions/index.md")
    assert set(re.findall(r"\((decisions/[^)#]+)\)", text)) >= decisions


def test_the_terms_of_the_glossary_are_in_alphabetical_order() -> None:
    text = (ROOT / "docs/glossary.md").read_text("utf-8")
    terms = [term.lower() for term in re.findall(r"^\| \*\*(.+?)\*\*", text, re.MULTILINE)]
    assert len(terms) > 30
    assert terms == sorted(set(terms))


def test_the_reference_lists_the_variables_of_the_environment() -> None:
    text = (ROOT / "docs/reference.md").read_text("utf-8")
    assert [name for name in OTHER_VARIABLES if f"`{name}`" not in text] == []
