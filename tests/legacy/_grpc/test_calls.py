"""Calls that ended here are calls of grpc in all they do."""

import grpc
import pytest

from rpcwheel._grpc.finished import FinishedError, FinishedResponse, FinishedStream, refused_by
from rpcwheel.errors import FailbackClosed, FailbackFull

CODE = grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_failure_here_is_a_whole_call_and_the_error_it_raises():
    call = FinishedError(CODE, "too late", trailing=(("k", "v"),))
    with pytest.raises(grpc.RpcError) as caught:
        call.result()
    assert caught.value is call is call.exception()
    assert call.traceback() is not None
    with pytest.raises(FinishedError):
        next(iter(call))
    assert (call.code(), call.details(), call.debug_error_string()) == (CODE, "too late", "")
    assert (call.initial_metadata(), call.trailing_metadata()) == ((), (("k", "v"),))
    assert_ended(call)
    assert not call.cancelled()
    assert str(call) == repr(call)
    assert "too late" in str(call)


def test_a_cancelled_call_raises_what_grpcs_do():
    call = FinishedError(grpc.StatusCode.CANCELLED, "", cancelled=True)
    assert call.cancelled()
    for give in (call.result, call.exception, call.traceback):
        with pytest.raises(grpc.FutureCancelledError):
            give()
    with pytest.raises(FinishedError):
        next(call)


def test_a_call_may_end_with_another_error():
    error = ValueError("a bug")
    call = FinishedError(grpc.StatusCode.INTERNAL, "", error=error)
    assert call.exception() is error
    with pytest.raises(ValueError, match="a bug"):
        call.result()


def test_an_answer_is_a_whole_call():
    call = FinishedResponse(b"x", "why", initial=(("i", "1"),))
    assert (call.result(), call.exception(), call.traceback()) == (b"x", None, None)
    assert (call.code(), call.details()) == (grpc.StatusCode.OK, "why")
    assert call.initial_metadata() == (("i", "1"),)
    assert not isinstance(call, grpc.RpcError)
    assert_ended(call)


@pytest.mark.parametrize(("messages", "got"), [(None, []), ((b"a", b"b"), [b"a", b"b"])])
def test_an_answer_of_a_stream_is_iterated(messages, got):
    assert list(FinishedStream(messages, "")) == got


def assert_ended(call):
    assert call.done()
    assert not any((call.running(), call.is_active(), call.cancel(), call.add_callback(print)))
    assert call.time_remaining() is None
    told = []
    call.add_done_callback(told.append)
    assert told == [call]


@pytest.mark.parametrize("kind", [FailbackFull, FailbackClosed])
def test_a_refusal_by_a_queue_is_a_failed_call_and_an_error_of_both_kinds(kind):
    failure = FinishedError(CODE, "too late", initial=(("i", "v"),), trailing=(("k", "v"),))
    call = refused_by(kind("q: not queued"), failure)
    assert isinstance(call, kind)
    assert isinstance(call, grpc.RpcError)
    with pytest.raises(kind) as caught:
        call.result()
    assert caught.value is call is call.exception()
    assert call.__cause__ is failure
    assert (str(call), call.code(), call.details()) == ("q: not queued", CODE, "q: not queued")
    assert (call.initial_metadata(), call.trailing_metadata()) == ((("i", "v"),), (("k", "v"),))
