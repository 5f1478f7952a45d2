"""A measurement in a process of its own gives rows, or the reason why not."""

import sys

from fixtures.benches import ROOT

sys.path.append(str(ROOT))  # behind the installed rpcwheel: the benchmarks are not installed

from benchmarks import _child
from benchmarks.calls.subjects import Skipped


def test_what_fails_is_told_of_as_skipped():
    (told,) = _child.rows("this step", "benchmarks.no_such_module", (), patience_s=60)
    assert isinstance(told, Skipped)
    assert told.what == "this step"
    assert "exit status 1" in told.why


def test_what_takes_too_long_is_ended_and_told_of_as_skipped():
    (told,) = _child.rows("it", "http.server", ("0",), patience_s=0.5)
    assert "timed out after 0.5 seconds" in told.why
