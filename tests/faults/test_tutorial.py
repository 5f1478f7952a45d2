"""A reader who follows the tutorial sees what it shows: its commands run in terminals.

`tests/fixtures/tutorial_pages.py` has the rules of the pages.
"""

import os
import re
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from fixtures.ports import free_port
from fixtures.processes import PACKAGE
from fixtures.tutorial_pages import EXAMPLES, PAGES, Session, ShownFile, Terminal, steps
from fixtures.waiting import WAIT_S

PORTS = ("50051", "50052", "9090")
"""Of the pages; those of a test are in the same order."""

TIMEOUT_S = 7.0
"""In place of the timeouts of clients, so that calls succeed on a machine that stalls."""

pytestmark = pytest.mark.timeout(10 * WAIT_S)  # a page starts up to ten programs
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


class Reader:
    """Follows the pages in a directory, with ports that are free."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        free = sorted(str(free_port()) for _ in PORTS)  # all have five digits
        self._ports = dict(zip(PORTS, free, strict=True))
        self._environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(PACKAGE),
            "PYTHONWARNINGS": "error",
            "PYTEST_ADDOPTS": "-p no:asyncio",  # a reader does not install it
            "XDG_CACHE_HOME": str(directory / "cache"),
        }

    def _of_this_run(self, text: str) -> str:
        return re.sub("|".join(PORTS), lambda found: self._ports[found[0]], text)

    def write_files(self, page: Path) -> None:
        """Write the files of a page."""
        for step in steps(page):
            if isinstance(step, ShownFile):
                code = self._of_this_run(step.code)
                if step.name.startswith("client"):
                    code = re.sub(r"\btimeout=\d\.\d", f"timeout={TIMEOUT_S}", code)
                (self._directory / step.name).write_text(code)

    def run(self, sessions: list[Session]) -> None:
        """Run the commands, in order, and wait for all that is to appear."""
        with ExitStack() as stack:
            terminals = {
                number: stack.enter_context(Terminal(self._directory, self._environment))
                for number in {session.terminal for session in sessions}
            }
            for number, session in enumerate(sessions):
                terminal = terminals[session.terminal]
                lines = [self._of_this_run(line) for line in session.lines]
                differs = [self._of_this_run(text) for text in session.differs]
                terminal.run(replace(session, lines=lines, differs=differs))
                if ends_its_programs(session, sessions[number + 1 :]):
                    terminal.wait_for_prompt()
            for terminal in terminals.values():  # a page stops what it has started
                terminal.wait_for_end()


def ends_its_programs(session: Session, later: list[Session]) -> bool:
    """Whether the next line for this terminal is a command, or there is none."""
    following = (other.lines[0] for other in later if other.terminal == session.terminal)
    return next(following, "$ ").startswith("$ ")


@every_page
def test_the_commands_of_a_page_show_what_it_says(page: Path, tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    for earlier in PAGES[: PAGES.index(page) + 1]:
        reader.write_files(earlier)
    reader.run([step for step in steps(page) if isinstance(step, Session)])


def test_the_pages_show_the_files_of_examples_tutorial() -> None:
    shown = [step for page in PAGES for step in steps(page) if isinstance(step, ShownFile)]
    assert {file.name: file.code for file in shown} == {
        path.name: path.read_text("utf-8")
        for path in EXAMPLES.glob("*.py")
        if not path.name.startswith("aio_")
    }


@every_page
def test_each_block_of_a_page_is_run(page: Path) -> None:
    blocks = re.findall(r"^```\w", page.read_text("utf-8"), re.MULTILINE)
    assert len(steps(page)) == len(blocks)


def test_the_programs_for_aio_show_the_same(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    for page in PAGES:
        reader.write_files(page)
    for name in ("aio_server.py", "aio_client.py"):
        (tmp_path / name).write_text((EXAMPLES / name).read_text("utf-8"))
    reader.run(
        [
            Session(1, ["$ python aio_server.py 50051", "serving on port 50051"], []),
            Session(
                2, ["$ python aio_client.py price tea", "...", "tea: 3.50, says 50051 (0.1 s)"], []
            ),
            Session(2, ["$ python aio_client.py place tea", "...", "tea: accepted (0.1 s)"], []),
            Session(1, ["ordered: tea", "^C", "stopped"], []),
        ]
    )
