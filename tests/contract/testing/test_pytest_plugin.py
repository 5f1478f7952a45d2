"""The pytest plugin, in runs of pytest that load it by its entry point."""

import re
from importlib.metadata import metadata
from pathlib import Path

import pytest

from fixtures.programs import python

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "testing.md"

INI = "[pytest]\nasyncio_default_fixture_loop_scope = function\n"


@pytest.fixture
def run_pytest(tmp_path):
    """A function that runs files with pytest, with every warning an error."""

    def run(*arguments: str, **files: str) -> str:
        (tmp_path / "pytest.ini").write_text(INI)
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text)
        done = python(*(arguments or ("-m", "pytest", "-q")), cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_a_run_that_uses_no_fixture_imports_neither_rpcwheel_nor_grpc(run_pytest):
    test = """
import sys

def test_modules(pytestconfig):
    assert pytestconfig.pluginmanager.has_plugin("rpcwheel")
    packages = {name.partition(".")[0] for name in sys.modules}
    assert packages & {"rpcwheel", "grpc", "pydantic", "tenacity"} == set()
"""
    assert "1 passed" in run_pytest(test_modules=test)


def test_the_tests_of_the_guide_pass_if_rpcwheel_is_imported_before_pytest(run_pytest, tmp_path):
    """Without the warning of pytest that it can not rewrite the assertions of imported modules."""
    page = GUIDE.read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    installed = tmp_path / "rpcwheel-0.dist-info"  # as of a wheel, which lists the files
    installed.mkdir()
    installed.joinpath("METADATA").write_text(str(metadata("rpcwheel")))
    installed.joinpath("RECORD").write_text("rpcwheel/__init__.py,,\nrpcwheel/timer/core.py,,\n")
    installed.joinpath("entry_points.txt").write_text("[pytest11]\nrpcwheel = _rpcwheel_pytest\n")
    run = "import rpcwheel, pytest, sys; sys.exit(pytest.main(['-q']))"
    output = run_pytest("-c", run, **{f"test_{n}": block for n, block in enumerate(blocks)})
    assert f"{page.count('def test_')} passed" in output
    assert "warning" not in output, output
