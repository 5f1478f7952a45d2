"""docs/grpcio.md lists all canaries."""

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "grpcio.md"


@pytest.mark.skipif(not PAGE.exists(), reason="the docs are not installed")
def test_grpcio_md_names_each_canary():
    named = set(re.findall(r"`(test_\w+)`", PAGE.read_text()))
    files = HERE.glob("test_canaries_[!d]*.py")
    there = {name for file in files for name in re.findall(r"def (test_\w+)", file.read_text())}
    assert named == there
