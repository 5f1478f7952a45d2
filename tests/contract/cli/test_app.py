"""`rpcwheel` as a whole: version, help, suggestions, completion, and a missing extra."""

import os
import subprocess
import sys
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

import pytest

from fixtures.programs import python
from fixtures.waiting import WAIT_S
from rpcwheel.cli import app, main
from rpcwheel.journal import open_journal_backend

FULL = Path("/dev/full")
"""A file of Linux whose writes fail."""


@pytest.mark.parametrize(("queue", "form"), [("native", "compiled"), ("pure", "pure Python")])
def test_version_shows_the_form_of_the_timer(queue, form, monkeypatch, capsys) -> None:
    monkeypatch.setattr(app, "FORM", queue)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"rpcwheel {version('rpcwheel')} ({form} timer)\n"


@pytest.mark.parametrize(
    ("words", "suggestion"),
    [
        (["docter"], "Did you mean 'doctor'?"),
        (["registry", "unregistr"], "Did you mean 'unregister'"),
        (["doctor", "a:1", "--timeot", "2"], "--timeout"),
    ],
)
def test_a_mistyped_command_or_option_gets_a_suggestion(words, suggestion, capsys) -> None:
    assert main(words) == 2
    assert suggestion in capsys.readouterr().err


def test_the_shell_completes_commands_and_the_schemes_of_registry_urls() -> None:
    for words, found in [
        ("rpcwheel registry un", ["unregister"]),
        ("rpcwheel registry ls r", ["redis://"]),
    ]:
        completed = python(
            *("-m", "rpcwheel"),
            _RPCWHEEL_COMPLETE="complete_bash",
            COMP_WORDS=words,
            COMP_CWORD=str(len(words.split()) - 1),
        )
        assert completed.stdout.split() == found, completed.stderr


def test_only_the_command_that_is_used_is_imported() -> None:
    code = """
import sys
from rpcwheel.cli import main
status = main(["config", "--help"])
names = "config", "journal", "top"
print(status, *(name for name in names if f"rpcwheel.cli.{name}" in sys.modules))
"""
    run = python("-c", code)
    assert run.stdout.splitlines()[-1] == "0 config", run.stderr


def test_without_the_extra_it_says_what_to_install_and_it_needs_no_protobuf(tmp_path) -> None:
    code = """
import sys
sys.modules["google"] = None
from rpcwheel.cli import main
for package in ("typer", "hyperframe", "rich"):
    for name in [name for name in sys.modules if name.startswith("rpcwheel.cli.")]:
        del sys.modules[name]
    sys.modules[package] = None
    assert main(["--help"]) == 2
    del sys.modules[package]
sys.exit(main())
"""
    run = python("-c", code, "doctor", f"unix:{tmp_path}/none.sock")
    needs = "rpcwheel: the command line needs typer, rich and hyperframe"
    assert run.stderr == f"{needs}: pip install 'rpcwheel[cli]'\n" * 3
    assert run.returncode == 1
    assert "no such socket" in run.stdout


def status_and_error(words, output, unbuffered):
    """Run a command with this standard output; return its status, and what it says of errors."""
    run = subprocess.run(
        [sys.executable, "-m", "rpcwheel", *words.split()],
        stdout=output,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        timeout=4 * WAIT_S,
        check=False,
    )
    return run.returncode, run.stderr


@pytest.mark.parametrize(("words", "unbuffered"), [("config schema", "1"), ("--version", "")])
def test_a_closed_pipe_ends_the_command_without_a_traceback(words, unbuffered) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as pipe:
        assert status_and_error(words, pipe, unbuffered) == (1, b"")


@pytest.mark.parametrize(
    ("words", "status", "closed"),
    [
        ("config schema", 0, ">&-"),
        ("journal retry sqlite://{}/calls.db --all", 2, "<&- 2>&-"),
    ],
)
def test_commands_work_without_standard_streams(words, status, closed, tmp_path) -> None:
    url = f"sqlite://{tmp_path}/calls.db"
    with closing(open_journal_backend(url)) as backend:
        backend.routes()
    program = f'exec "$0" -m rpcwheel "$@" {closed}'
    run = subprocess.run(
        ["sh", "-c", program, sys.executable, *words.format(tmp_path).split()],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=4 * WAIT_S,
        check=False,
    )
    assert run.returncode == status
    assert b"Traceback" not in run.stderr
    assert b"give --yes" not in run.stdout  # errors are not printed to standard output


def test_ctrl_c_while_the_command_line_is_imported_ends_with_130(monkeypatch, capsys) -> None:
    class Interrupting:
        def find_spec(self, name, *_):
            if name == "rpcwheel.cli.app":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "rpcwheel.cli.app")
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    assert main(["--version"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(not FULL.exists(), reason="needs Linux")
@pytest.mark.parametrize(("words", "unbuffered"), [("config schema", ""), ("--version", "1")])
def test_output_to_a_full_disk_ends_with_1(words, unbuffered) -> None:
    message = b"rpcwheel: the output cannot be written: No space left on device\n"
    with FULL.open("wb") as full:
        assert status_and_error(words, full, unbuffered) == (1, message)


def test_help_has_no_types_of_python(capsys) -> None:
    assert main(["journal", "ls", "--help"]) == 0
    assert "list[" not in capsys.readouterr().out
