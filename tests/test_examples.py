"""The examples run alone, quickly, and show what they are for."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rpcwheel

PACKAGE = Path(rpcwheel.__file__).parents[1]
EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("name", ["failback_sync.py", "failback_aio.py"])
def test_a_failback_example_delivers_what_it_queued(name: str) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": str(PACKAGE),
            "PYTHONUNBUFFERED": "1",
        },  # one story, in order
    )
    assert run.returncode == 0, run.stderr
    story, _, after = run.stdout.partition("up again")
    assert "up: the server answers number: 1" in story
    assert re.findall(r"killed: None after .* ms; in the queue: (\d)", story) == ["1", "2", "3"]
    assert sorted(re.findall(r"server: order (\d)", after)) == ["2", "3", "4"]
    assert run.stdout.endswith("all delivered: True\n")


@pytest.mark.parametrize("name", ["failback_sync.py", "failback_aio.py"])
def test_an_example_is_short(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) < 40
