"""The events of the start and the end of overloads and of throttling."""

import gc
import threading
import weakref
from collections import Counter
from contextlib import contextmanager
from functools import partial

from fixtures.forks import held_by_another_thread, holds_in_child
from fixtures.timers import FullTimer
from fixtures.waiting import wait_until
from rpcwheel.events import ThrottleBegan, ThrottleEnded, add_sink, remove_sink
from rpcwheel.limit.refusals import Refusals

TARGET, METHOD = "refused:1", "/shop.Orders/Get"
BEGAN, ENDED = ThrottleBegan(TARGET, METHOD), partial(ThrottleEnded, TARGET, METHOD)


def new_refusals(timer):
    return Refusals(timer, lambda: BEGAN, ENDED)


def are_reported(events, *expected):
    """Wait until these events have been emitted; workers may emit them in any order."""

    def emitted():
        return Counter(each for each in events if getattr(each, "target", "") == TARGET)

    return wait_until(lambda: emitted() == Counter(expected))


def test_the_number_of_refused_calls_and_their_duration_are_reported(timer, events):
    refusals = new_refusals(timer)
    refusals.note()
    timer.advance(3.0)
    refusals.note(2)
    assert are_reported(events, BEGAN)
    timer.advance(4.0)
    assert refusals.calls == 3
    timer.advance(1.0)
    assert refusals.calls == 0
    assert are_reported(events, BEGAN, ENDED(3, 3.0))
    refusals.note()
    timer.advance(5.0)
    assert are_reported(events, BEGAN, ENDED(3, 3.0), BEGAN, ENDED(1, 0.0))


def test_a_begin_is_reported_if_the_timer_will_report_the_end(events):
    timer = FullTimer()
    refusals = new_refusals(timer)
    refusals.note(7)
    assert refusals.calls == 0
    timer.is_full = False
    refusals.note()
    timer.advance(3.0)
    refusals.note(2)
    timer.is_full = True
    timer.advance(2.0)  # it would look again in three seconds
    assert refusals.calls == 0
    assert are_reported(events, BEGAN, ENDED(3, 3.0))


def test_a_process_that_was_suspended_as_calls_were_refused_reports_them(timer, events):
    refusals, now_ns = new_refusals(timer), timer._timer_state.now

    def suspend():
        refusals._now_ns, before_ns = now_ns, now_ns()
        timer.advance(5.0)
        return before_ns

    refusals._now_ns = suspend
    refusals.note(3)
    timer.advance(5.0)
    assert are_reported(events, BEGAN, ENDED(3, 0.0))


def test_calls_that_are_refused_once_the_end_is_decided_belong_to_the_next_series(timer, events):
    refusals = new_refusals(timer)
    refusals.note()
    lock = refusals._lock

    @contextmanager
    def note_after_release():
        with lock:
            yield
        refusals._lock = lock
        refusals.note(100)

    refusals._lock = note_after_release()
    timer.advance(5.0)
    timer.advance(5.0)
    assert are_reported(events, BEGAN, ENDED(1, 0.0), BEGAN, ENDED(100, 0.0))


def test_events_are_emitted_on_another_thread(timer):
    began, threads = ThrottleBegan("threads:1", METHOD), []

    def sink(event):
        if event == began:
            threads.append(threading.current_thread())

    add_sink(sink)
    try:
        Refusals(timer, lambda: began, ENDED).note()
        assert threading.current_thread() not in wait_until(lambda: threads)
    finally:
        remove_sink(sink)


def test_a_forked_child_begins_without_refused_calls_and_with_a_free_lock(timer):
    ends = []
    refusals = Refusals(timer, lambda: BEGAN, lambda *end: ends.append(end) or ENDED(*end))
    refusals.note()

    def begins():
        refusals.reset_after_fork()
        timer.advance(5.0)  # a manual timer has the timeouts of the parent
        refusals.note(2)
        timer.advance(5.0)
        return ends == [(2, 0.0)]

    with held_by_another_thread(refusals._lock):
        assert holds_in_child(begins)


def test_the_timer_does_not_keep_refusals_alive(timer):
    refusals = new_refusals(timer)
    refusals.note()
    assert timer.pending == 1
    reference = weakref.ref(refusals)
    del refusals
    gc.collect()
    assert reference() is None
    timer.advance(5.0)
