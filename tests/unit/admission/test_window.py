"""When exactly a window forgets an attempt. The models test the rest."""

from rpcwheel.admission.window import CountWindow, TimeWindow


def test_an_attempt_leaves_a_window_of_calls_when_it_is_replaced():
    window, counts = CountWindow(3), []
    for failed, slow in ((True, True), (False, True), (True, False), *[(False, False)] * 3):
        window.record(0, failed, slow)
        counts.append((window.calls, window.failures, window.slow))
    assert counts == [(1, 1, 1), (2, 1, 2), (3, 2, 2), (3, 1, 1), (3, 1, 0), (3, 0, 0)]


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
