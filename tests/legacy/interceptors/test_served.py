"""What both servers decide about a call, without a server."""

import contextvars

import pytest
from scenarios.served import handler

from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.deadline import DeadlinePolicy, current_deadline
from rpcwheel.interceptors import CallPolicy
from rpcwheel.interceptors.core import CallRules
from rpcwheel.interceptors.served import MOST_METHODS, Answers, Served, ServerState
from rpcwheel.observe import CallLate, CallSlow

METHOD = "/test.Small/Call"


class Context:
    def __init__(self, left):
        self.left = left

    def time_remaining(self):
        return self.left


def served(timer=None, **settings):
    rules = CallRules.of(CallPolicy(timeout=DeadlinePolicy(**settings)))
    return Served(METHOD, rules, timer)


def begun(one, left):
    """What a handler would see."""

    def begin():
        assert one.begin(Context(left))
        return current_deadline()

    deadline = contextvars.copy_context().run(begin)
    return None if deadline is None else deadline.remaining()


@pytest.mark.parametrize(
    ("left", "limit", "seen"),
    [(50, None, 50), (50, 20, 20), (20, 50, 20), (None, 20, 20), (9.2e18, 20, 20)],
)
def test_the_shorter_limit_is_the_deadline(left, limit, seen):
    assert seen - 10 < begun(served(timeout=limit), left) <= seen


@pytest.mark.parametrize("left", [None, 9.2e18])
def test_without_limits_there_is_no_deadline(left):
    assert begun(served(), left) is None


def test_a_call_without_time_is_late_and_changes_nothing(events):
    assert not served(timeout=WAIT_S).begin(Context(0))
    assert events == [CallLate(METHOD, 0.0)]
    assert current_deadline() is None


def test_only_a_method_with_a_limit_is_watched(timer, events):
    assert served(timer).watch() is None
    watch = served(timer, slow_after=2.0).watch()
    timer.advance(3)
    assert watch.expired()
    assert wait_until(lambda: events == [CallSlow(METHOD, "server", 2.0)])


@pytest.mark.parametrize("end", [StopIteration, KeyError, KeyboardInterrupt])
def test_a_stream_that_has_ended_is_watched_no_longer(end, timer):
    def step():
        raise end

    answers = Answers(step, served(timer, slow_after=2.0).watch())
    assert timer.pending == 1
    with pytest.raises(end):
        next(answers)
    assert timer.pending == 0


def test_a_stream_that_was_dropped_is_watched_no_longer(timer):
    answers = Answers(lambda: b"more", served(timer, slow_after=2.0).watch())
    assert next(iter(answers)) == b"more"
    assert timer.pending == 1
    del answers
    assert timer.pending == 0


def behavior(request, context):
    return request


def unchanged(kind, behavior, served):
    def serve(request, context):
        return behavior(request, context)

    return serve


def test_a_handler_is_wrapped_once_however_often_it_is_called():
    state = ServerState(None, timer=None)
    original = handler("unary_unary", behavior)
    first = state.around(original, METHOD, unchanged)
    assert first is not original
    assert state.around(original, METHOD, unchanged) is first
    other = handler("unary_stream", behavior)
    assert state.around(other, METHOD, unchanged).response_streaming


def test_a_handler_without_its_behavior_is_left_alone():
    broken = handler("unary_unary", None)
    assert ServerState(None, timer=None).around(broken, METHOD, unchanged) is broken


def test_the_handlers_of_methods_that_clients_make_up_do_not_pile_up():
    state = ServerState(None, timer=None)
    original = handler("unary_unary", behavior)
    for number in range(MOST_METHODS + 10):
        state.around(original, f"/a.B/{number}", unchanged)
    assert len(state._made) <= MOST_METHODS
