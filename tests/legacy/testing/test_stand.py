"""What the checks stand on: it waits, renews, and closes, whatever the clock."""

import pytest

from rpcwheel.instance import ServiceInstance
from rpcwheel.registry.backend import Settings, View
from rpcwheel.registry.backends import open_backend
from rpcwheel.testing import _harness
from rpcwheel.testing._harness import ConformanceHarness, RecordingWatcher, decoded, on_threads


def make(timer=None, lease=1.0):
    return lambda: open_backend("memory://stand", Settings(lease, 1.0, timer))


def test_leaving_it_closes_all_that_it_made(timer):
    with ConformanceHarness(make(timer)) as stand:
        for _ in range(3):
            stand.publish(stand.new(), stand.instance())
    assert timer.pending == 0


def test_waiting_in_vain_says_what_was_wanted_and_what_there_was(timer, monkeypatch):
    monkeypatch.setattr(_harness, "PATIENCE_S", 0.05)
    with ConformanceHarness(make(timer)) as stand:
        backend = stand.new()
        many = [stand.instance(number) for number in range(6)]
        stand.publish(backend, stand.instance(1, weight=3))
        with pytest.raises(
            AssertionError, match=r"find .*\(weight 100\) and 2 more, but found .*3"
        ):
            stand.finds(backend, *many)
        with pytest.raises(AssertionError, match="must be told of nothing, but was told nothing"):
            RecordingWatcher().sees(stand)


def test_what_makes_no_backend_is_told():
    with ConformanceHarness(lambda: "etcd") as stand, pytest.raises(AssertionError, match="make"):
        stand.new()


def test_an_error_on_any_thread_is_raised():
    done = []
    with pytest.raises(ZeroDivisionError):
        on_threads(lambda: done.append(1), lambda: 1 / 0, lambda: done.append(1))
    assert done == [1, 1]


def test_a_record_under_anothers_id_or_unreadable_is_told():
    one = ServiceInstance(service="a", host="b", port=1)
    with pytest.raises(AssertionError, match="'b:1' is found under 'c'"):
        decoded(View({"c": one.encoded()}))
    with pytest.raises(AssertionError, match="'b:1' has become unreadable"):
        decoded(View({"b:1": b"?"}))
