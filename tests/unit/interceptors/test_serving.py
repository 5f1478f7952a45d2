"""The decisions of both server interceptors, without a server."""

from itertools import repeat
from unittest.mock import MagicMock, Mock

import pytest
from scenarios.served import handler

from rpcwheel.call import CallPolicy, DeadlinePolicy
from rpcwheel.call.config import MethodConfig
from rpcwheel.interceptors.serving import (
    MAX_HANDLERS,
    ServedMethod,
    ServedStream,
    ServerState,
)
from rpcwheel.telemetry.call_counts import CountedMessages

METHOD = "/test.Small/Call"


def served(timer=None, **settings):
    config = MethodConfig.from_policy(CallPolicy(timeout=DeadlinePolicy(**settings)))
    return ServedMethod(METHOD, config, timer, None)


def watched(messages, timer):
    """A stream of responses with a `CallSlow` timeout."""
    stream = ServedStream(served(timer, slow_call_threshold=2.0), context=None)
    stream.start_timeout()
    return CountedMessages(messages, stream, stream.code)


@pytest.mark.parametrize("end", [StopIteration, KeyError, KeyboardInterrupt])
def test_the_timeout_of_a_stream_is_canceled_at_its_end(end, timer):
    answers = watched(MagicMock(__next__=Mock(side_effect=end)), timer)
    assert timer.pending == 1
    with pytest.raises(end):
        next(answers)
    assert timer.pending == 0


def test_the_timeout_of_a_dropped_stream_is_canceled(timer):
    answers = watched(repeat(b"more"), timer)
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


def test_a_handler_is_wrapped_once():
    state = ServerState(None, timer=None)
    original = handler("unary_unary", behavior)
    first = state.wrap(original, METHOD, unchanged)
    assert first is not original
    assert state.wrap(original, METHOD, unchanged) is first
    other = handler("unary_stream", behavior)
    assert state.wrap(other, METHOD, unchanged).response_streaming


def test_a_handler_without_behavior_is_returned_unchanged():
    broken = handler("unary_unary", None)
    assert ServerState(None, timer=None).wrap(broken, METHOD, unchanged) is broken


def test_a_bounded_number_of_handlers_is_cached(monkeypatch):
    monkeypatch.setattr("rpcwheel.interceptors.serving.MAX_METHODS", 20)
    state = ServerState(None, timer=None)
    original = handler("unary_unary", behavior)
    for number in range(30):
        state.wrap(original, f"/a.B/{number}", unchanged)
    assert len(state._wrapped) <= 20


def test_handlers_that_are_made_for_each_call_are_not_kept():
    state = ServerState(None, timer=None)
    made = [handler("unary_unary", behavior) for _ in range(100)]
    wrapped = [state.wrap(each, METHOD, unchanged) for each in made]
    assert state.wrap(made[-1], METHOD, unchanged) is wrapped[-1]
    assert sum(len(handlers) for handlers in state._wrapped.values()) <= MAX_HANDLERS
