"""Calls of `grpc` that have ended on this side have the whole interface of gRPC's calls."""

import pickle

import grpc
import pytest

from rpcwheel._grpc.finished import FinishedError, FinishedResponse, FinishedStream, refused_by
from rpcwheel.errors import REFUSALS

CODE = grpc.StatusCode.DEADLINE_EXCEEDED


def assert_ended(call):
    assert call.done()
    assert not any((call.running(), call.is_active(), call.cancel(), call.add_callback(print)))
    assert call.time_remaining() is None
    called = []
    call.add_done_callback(called.append)
    assert called == [call]


def test_a_failed_call_is_the_error_that_it_raises():
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


def test_a_failed_call_with_another_error_raises_that_error():
    error = ValueError("a bug")
    call = FinishedError(grpc.StatusCode.INTERNAL, "", error=error)
    assert call.exception() is error
    with pytest.raises(ValueError, match="a bug"):
        call.result()


def test_a_canceled_call_raises_future_cancelled_error():
    call = FinishedError(grpc.StatusCode.CANCELLED, "", cancelled=True)
    assert call.cancelled()
    for method in (call.result, call.exception, call.traceback):
        with pytest.raises(grpc.FutureCancelledError):
            method()
    with pytest.raises(FinishedError):
        next(call)


def test_a_default_response_is_a_call_with_status_ok():
    call = FinishedResponse(b"x", "why", initial=(("i", "1"),))
    assert (call.result(), call.exception(), call.traceback()) == (b"x", None, None)
    assert (call.code(), call.details()) == (grpc.StatusCode.OK, "why")
    assert (call.initial_metadata(), call.trailing_metadata()) == ((("i", "1"),), ())
    assert FinishedResponse(b"x", "why").initial_metadata() == ()
    assert not isinstance(call, grpc.RpcError)
    assert_ended(call)


@pytest.mark.parametrize(("messages", "read"), [(None, []), ((b"a", b"b"), [b"a", b"b"])])
def test_the_messages_of_a_default_response_stream_are_iterated(messages, read):
    assert list(FinishedStream(messages, "")) == read


@pytest.mark.parametrize("kind", REFUSALS)
def test_a_refusal_of_a_failback_queue_can_be_pickled(kind):
    error = refused_by(kind("q: not queued"), FinishedError(CODE, "too late"))
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.code()) == (type(error), "q: not queued", CODE)
