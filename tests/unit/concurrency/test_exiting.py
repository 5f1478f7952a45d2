"""`BackgroundCalls`."""

import pytest

from fixtures.interrupts import interrupted_at_each_call
from fixtures.timers import run_threads
from fixtures.waiting import WAIT_S, in_thread, wait_until
from rpcwheel._concurrency.exiting import BackgroundCalls
from rpcwheel.events import TaskFailed

MANY = 10**6
"""Steps of waiting; together longer than a test may take."""


class Caller:
    """A caller that records `end_at_exit`."""

    def __init__(self, happened, error=None):
        self.happened = happened
        self.error = error

    def end_at_exit(self):
        self.happened.append("ended")
        if self.error is not None:
            raise self.error


@pytest.fixture
def background():
    return BackgroundCalls()


def test_close_waits_for_calls_in_flight_and_then_ends_their_callers(background):
    happened = []
    caller = Caller(happened)
    assert background.add(caller)
    first, second = background.begin_call(), background.begin_call()
    background.end_call(first)
    closing = in_thread(background.close, MANY)
    assert wait_until(lambda: background.closed)
    happened.append("answered")
    background.end_call(second)
    closing.result(WAIT_S)
    assert happened == ["answered", "ended"]


def test_close_ends_callers_and_then_cancels_calls_that_do_not_end(background):
    happened = []
    caller = Caller(happened)
    background.add(caller)
    stuck, other = background.begin_call(), background.begin_call()
    stuck.cancel = lambda: happened.append("canceled")
    background.close(1)
    assert happened == ["ended", "canceled"]
    background.end_call(other)


def test_exceptions_of_callers_and_cancellations_do_not_prevent_those_of_others(background, events):
    def fail():
        happened.append("canceled")
        raise error

    happened, error = [], ValueError("broken")
    callers = [Caller(happened, error), Caller(happened, error), Caller(happened)]
    stuck = [background.begin_call() for _ in range(3)]
    for caller, call in zip(callers, stuck, strict=True):
        background.add(caller)
        call.cancel = fail
    background.close(1)
    assert happened == ["ended"] * 3 + ["canceled"] * 3
    assert [event.error for event in events if isinstance(event, TaskFailed)] == [error] * 5


def test_end_call_is_idempotent(background):
    call, other = background.begin_call(), background.begin_call()
    background.end_call(call)
    background.end_call(call)
    background.end_call(other)
    background.close(MANY)


def test_calls_begin_after_one_that_was_interrupted(background):
    for _ in interrupted_at_each_call(lambda: background.end_call(background.begin_call())):
        run_threads(lambda: background.end_call(background.begin_call()))


def test_close_does_not_wait_for_a_call_that_was_garbage_collected(background):
    background.begin_call()
    background.close(MANY)


def test_close_ignores_lost_calls(background):
    canceled = []
    call = background.begin_call()
    call.is_lost = lambda: True
    call.cancel = lambda: canceled.append(call)
    background.close(MANY)
    assert canceled == []


def test_no_call_begins_and_no_caller_is_added_after_close(background):
    background.close()
    assert background.begin_call() is None
    assert not background.add(Caller([]))


def test_a_forked_child_begins_calls_and_has_none_of_its_parent(background):
    happened = []
    caller = Caller(happened)
    background.add(caller)
    of_parent = background.begin_call()
    background.close(1)
    background.reset()
    call = background.begin_call()
    background.end_call(call)
    background.end_call(of_parent)
    background.close(MANY)
    assert happened == ["ended"]  # by the parent
