"""A file that several write: each waits for the others, and none leaves half of one."""

import sys

import pytest

from rpcwheel.registry import _whole_file
from rpcwheel.registry._whole_file import locked, replace_whole


@pytest.mark.skipif(sys.platform == "win32", reason="locks of POSIX")
def test_one_has_the_lock_at_a_time_and_the_next_one_when_it_is_let_go(tmp_path, monkeypatch):
    monkeypatch.setattr(_whole_file, "BUSY_S", 0.01)
    with locked(tmp_path / "a") as first, locked(tmp_path / "a") as second:
        assert (first, second) == (True, False)
    with locked(tmp_path / "a") as third:
        assert third


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path):
    for text in (b"one", b"two"):
        replace_whole(tmp_path / "a", text, "new")
        assert (tmp_path / "a").read_bytes() == text
    assert [one.name for one in tmp_path.iterdir()] == ["a"]


def test_what_cannot_be_put_there_leaves_nothing_behind(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(OSError, match="a"):
        replace_whole(tmp_path / "a", b"one", "new")
    assert [one.name for one in tmp_path.iterdir()] == ["a"]
