"""How calls of `grpc` are read: their style, their end, their failure."""

import weakref
from functools import partial

import grpc
import pytest

from fixtures.leaks import no_garbage_collector
from fixtures.shop import UNARY_STREAM, UNARY_UNARY, Hang, Silent
from fixtures.waiting import WAIT_S, wait_until
from fixtures.worlds import each_kind
from rpcwheel._grpc.calls import (
    FailureStatus,
    code_for,
    failure_of,
    has_status,
    is_blocking_unary,
    is_channel_closed_error,
    is_single_threaded,
    outcome_of,
    run_at_end,
)
from rpcwheel._grpc.finished import FinishedError, FinishedResponse
from rpcwheel.admission.method import MethodAdmission
from rpcwheel.heartbeat.sync import _read
from rpcwheel.registry.backends.dubbo_metadata import MetadataCache


def test_the_style_of_a_continuation_that_is_not_grpcs_is_unknown():
    assert is_blocking_unary(lambda details, request: None) is None
    assert is_blocking_unary(partial(print)) is None


def test_the_failure_of_a_call_is_found_for_all_forms_of_calls(shop_channel):
    error = FinishedError(grpc.StatusCode.DEADLINE_EXCEEDED, "")
    plain = grpc.RpcError()
    assert failure_of(error) is error
    assert failure_of(plain) is plain
    assert failure_of(FinishedResponse(b"", "")) is None
    assert failure_of(b"a response") is None
    assert failure_of(shop_channel.unary_unary(UNARY_UNARY).future(b"x")) is None
    canceled = shop_channel.unary_stream(UNARY_STREAM)(b"x")
    canceled.cancel()
    assert isinstance(failure_of(canceled), grpc.FutureCancelledError)


def test_the_failure_of_a_canceled_call_does_not_keep_the_call(shop_channel):
    """A call in a cycle lives until the interpreter ends, where its finalizer can hang."""
    call = shop_channel.unary_stream(UNARY_STREAM)(b"x")
    call.cancel()
    left = weakref.ref(call)
    failure = failure_of(call)
    del call
    assert isinstance(failure, grpc.FutureCancelledError)
    assert left() is None


def dubbo_metadata(call):
    cache = MetadataCache(1.0, lambda: None)
    cache._call = lambda *_: call.result()
    assert "UNAVAILABLE" in cache._answer_of(("app", "1"), "localhost", 1)


@pytest.mark.parametrize("read", [outcome_of, partial(_read, print, 0), dubbo_metadata])
def test_what_reads_a_failed_call_does_not_keep_the_call(shop, shop_channel, read):
    """Probes, heartbeats, and calls for Dubbo's metadata; else as above."""
    shop.then("UNAVAILABLE")
    call = shop_channel.unary_unary(UNARY_UNARY).future(b"x")
    assert call.exception() is call
    left = weakref.ref(call)
    with no_garbage_collector():
        read(call)
        del call
        assert wait_until(lambda: left() is None)


def test_only_failures_of_calls_have_a_status():
    assert has_status(FinishedError(grpc.StatusCode.DEADLINE_EXCEEDED, ""))
    others = (grpc.RpcError(), ValueError(), grpc.FutureCancelledError())
    assert not any(map(has_status, others))


class Numbered(grpc.RpcError):
    """An error of an interceptor whose code is a number."""

    def code(self):
        return 14


def test_a_status_is_read_as_far_as_an_error_has_it():
    pair = (("k", "v"),)
    whole = FinishedError(grpc.StatusCode.ABORTED, "", initial=pair, trailing=pair)
    assert FailureStatus.of(whole) == (grpc.StatusCode.ABORTED, "", pair, pair)
    assert FailureStatus.of(Numbered("a")) == (grpc.StatusCode.UNKNOWN, "Numbered: a", (), ())


LARGER = "essage larger than max (6 vs. 5)"


@pytest.mark.parametrize(
    ("code", "details", "says_nothing"),
    [
        ("RESOURCE_EXHAUSTED", f"SERVER: Received m{LARGER}", True),
        ("RESOURCE_EXHAUSTED", f"grpc: received m{LARGER}", True),  # of a server in Go
        ("RESOURCE_EXHAUSTED", f"trying to send m{LARGER}", True),
        ("RESOURCE_EXHAUSTED", f"stock: Received m{LARGER}", False),
        ("RESOURCE_EXHAUSTED", "Invalid metadata", False),
        ("INTERNAL", "Invalid metadata", True),
        ("UNAVAILABLE", "Invalid metadata", False),
        ("UNKNOWN", "Received http2 header with status: 413", True),  # of a proxy
        ("UNKNOWN", "Received http2 header with status: 500", False),
        ("UNKNOWN", f"Received m{LARGER}", False),
        ("UNKNOWN", f"Exception calling application: Received m{LARGER}", False),
    ],
)
def test_a_call_that_could_not_be_sent_says_nothing_about_its_server(code, details, says_nothing):
    error = FinishedError(grpc.StatusCode[code], details)
    assert code_for(MethodAdmission, error) == ("CANCELLED" if says_nothing else code)


def test_a_callback_of_run_at_end_does_not_keep_the_call_alive(shop, shop_channel):
    silent, ended = Silent(), []
    shop.then(silent)
    call = shop_channel.unary_stream(UNARY_STREAM)(b"x")
    run_at_end(call, lambda: ended.append("dropped"))
    assert silent.begun.wait(WAIT_S)
    assert ended == []
    del call
    assert wait_until(lambda: ended == ["dropped"])


def test_run_at_end_runs_at_once_if_the_call_has_ended_or_takes_no_callbacks(shop_channel):
    ended = []
    call = shop_channel.unary_unary(UNARY_UNARY).with_call(b"x")[1]
    run_at_end(call, lambda: ended.append("ended"))
    assert wait_until(lambda: ended == ["ended"])
    run_at_end(object(), lambda: ended.append("other"))
    assert ended == ["ended", "other"]


def test_single_threaded_streams_are_recognized(shop, shop_channel):
    option = (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1)
    with grpc.insecure_channel(shop.target, options=[option]) as channel:
        assert is_single_threaded(channel.unary_stream(UNARY_STREAM)(b"x"))
    assert not is_single_threaded(shop_channel.unary_stream(UNARY_STREAM)(b"x"))


def raised_by(call, *args):
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the caller examines it
        call(*args)
    return caught.value


@each_kind
def test_a_call_on_a_closed_channel_is_recognized_by_its_error(shop, world, kind):
    channel = world.channel(shop.target)
    multicallable = getattr(channel, kind)(UNARY_UNARY)
    world.do(channel.close)
    request = b"a" if kind.startswith("unary") else iter([b"a"])
    for call in filter(None, (multicallable, getattr(multicallable, "future", None))):
        assert is_channel_closed_error(raised_by(world.do, call, request))


def test_a_call_whose_channel_is_closed_while_it_runs_is_recognized_by_its_error(shop):
    hang = Hang()
    shop.then(hang)
    channel = grpc.insecure_channel(shop.target)
    call = channel.unary_unary(UNARY_UNARY).future(b"a")
    assert hang.begun.wait(WAIT_S)
    channel.close()
    assert is_channel_closed_error(raised_by(call.result))
    removed = FinishedError(grpc.StatusCode.CANCELLED, "Stream removed (Channel closed!)")
    assert is_channel_closed_error(removed)  # the details of gRPC's core


def test_other_errors_do_not_mean_that_a_channel_was_closed():
    others = (ValueError("no"), grpc.aio.UsageError("no"), RuntimeError("Channel is closed."))
    assert not any(map(is_channel_closed_error, others))
