"""When exactly a window forgets an attempt, or a loss is forgotten. The models test the rest."""

from collections import deque

import pytest

from rpcwheel.admission import window as window_module
from rpcwheel.admission.window import CountWindow, LostTogether, TimeWindow


def test_an_attempt_leaves_a_window_of_calls_when_it_is_replaced():
    window, counts = CountWindow(3), []
    for failed, slow in ((True, True), (False, True), (True, False), *[(False, False)] * 3):
        window.record(0, failed, slow)
        counts.append((window.calls, window.failures, window.slow))
    assert counts == [(1, 1, 1), (2, 1, 2), (3, 2, 2), (3, 1, 1), (3, 1, 0), (3, 0, 0)]


def test_a_finalizer_of_users_may_end_an_attempt_while_another_replaces_a_failure(monkeypatch):
    """It, or a signal handler, runs on the same thread, which has the lock."""

    finalizers = []

    class Interrupted(deque):
        def popleft(self):
            first = super().popleft()
            while finalizers:
                finalizers.pop()()
            return first

    monkeypatch.setattr(window_module, "deque", Interrupted)
    window = CountWindow(2)
    for failed, counts in ((True, (1, 1)), (False, (2, 1)), (False, (2, 0)), (True, (2, 1))):
        finalizers[:] = [lambda: window.record(0, False, False)]
        window.record(0, failed, False)
        assert (window.calls, window.failures) == counts


@pytest.mark.parametrize("at_once", [1, 2], ids=["nested", "one by one"])
def test_finalizers_of_users_may_end_attempts_while_a_failure_is_recorded(monkeypatch, at_once):
    finalizers = []

    class Interrupted(deque):
        def append(self, attempt):
            super().append(attempt)
            run, finalizers[:] = finalizers[:at_once], finalizers[at_once:]
            for finalizer in run:
                finalizer()

    monkeypatch.setattr(window_module, "deque", Interrupted)
    window = CountWindow(1)
    # The second one replaces the first one, and the failure that is being recorded.
    finalizers[:] = [lambda: window.record(0, True, False), lambda: window.record(0, False, False)]
    window.record(0, True, False)
    assert (window.calls, window.failures) == (1, 0)
    window.record(0, True, False)
    assert (window.calls, window.failures) == (1, 1)


def test_an_attempt_at_the_first_instant_of_a_slot_counts_in_it():
    window, counts = TimeWindow(1000), []
    for now_ns in range(0, 2000, 100):
        window.record(now_ns, True, False)
        counts.append((window.calls, window.failures))
    assert counts == [(min(number, 10),) * 2 for number in range(1, 21)]


def test_an_earlier_time_counts_as_the_latest_one():
    window = TimeWindow(1000)
    window.record(5000, False, False)
    window.record(100, False, True)
    window.move(200)
    assert (window.calls, window.slow) == (2, 1)
    window.move(5999)
    assert (window.calls, window.slow) == (2, 1)
    window.move(6000)
    assert (window.calls, window.slow) == (0, 0)


def test_attempts_are_lost_together_for_one_second():
    lost, lost_ns = LostTogether(), 10**9
    assert not lost.note_failure("UNAVAILABLE", 0, lost_ns)
    assert lost.note_failure("UNAVAILABLE", lost_ns - 1, 2 * lost_ns - 1)
    assert not lost.note_failure("UNAVAILABLE", lost_ns - 1, 2 * lost_ns)


def test_a_connection_breaks_again_after_two_seconds_or_a_minute_without_a_success():
    lost, breaks_ns = LostTogether(), 10**9
    assert not lost.note_failure("UNAVAILABLE", 0, breaks_ns)
    for works, quiet_ns in ((True, 2 * 10**9), (False, 60 * 10**9)):
        for early_ns, breaks in ((1, False), (0, True)):
            if works:
                lost.note_success(breaks_ns)
            breaks_ns += quiet_ns - early_ns
            assert not lost.note_failure("UNAVAILABLE", 0, breaks_ns)
            assert lost.note_failure("UNAVAILABLE", breaks_ns - 1, breaks_ns) is breaks
