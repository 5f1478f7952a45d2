"""Channels of `grpc` that are closed while calls of them are queued."""

import grpc
import pytest

from rpcwheel._grpc.finished import FinishedError
from rpcwheel.call import CallPolicy
from rpcwheel.call.client_state import ChannelCalls
from rpcwheel.failback import FailbackPolicy
from rpcwheel.interceptors.sync import FailbackQueues, apply_policies


class Inner(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """An interceptor whose unary calls fail, and whose response streams are `stream`."""

    def __init__(self, stream):
        self._stream = stream

    def intercept_unary_unary(self, _continuation, _details, _request):
        return FinishedError(grpc.StatusCode.UNAVAILABLE, "down")

    def intercept_unary_stream(self, _continuation, _details, _request):
        return self._stream


@pytest.fixture
def open_channel(timer):
    """Makes a channel of a kit with an interceptor below, and with a queued call."""
    queues = FailbackQueues(timer)

    def open_channel(inner):
        policy = CallPolicy(failback=FailbackPolicy(retry_on="UNAVAILABLE", backoff=60.0))
        bare = grpc.intercept_channel(grpc.insecure_channel("127.0.0.1:1"), inner)
        settings = {"timer": timer, "queues": queues, "keeps": True, "stacklevel": 2}
        channel = apply_policies(bare, policy, **settings)
        assert channel.unary_unary("/test.Shop/UnaryUnary")(b"x") is None
        return channel

    yield open_channel
    queues.close(0)


def generator():
    yield b"y"


@pytest.mark.parametrize("make", [generator, lambda: iter([b"y"])], ids=["generator", "iterator"])
def test_close_leaves_response_streams_that_cannot_be_canceled(open_channel, make):
    """OpenTelemetry's interceptor returns generators."""
    closed = []
    channel = open_channel(Inner(make()))
    channel.on_close(lambda: closed.append(channel))
    stream = channel.unary_stream("/test.Shop/UnaryStream")(b"x")
    channel.close()
    assert closed == [channel]
    assert list(stream) == [b"y"]


class Slotted:
    """A call without weak references."""

    __slots__ = ()

    def cancel(self):
        raise AssertionError("not known to the channel")


def test_close_leaves_calls_without_weak_references():
    calls = ChannelCalls()
    calls.add_running(Slotted())
    assert calls.running == []


class Waiting:
    """A call that waits for its next attempt."""

    has_ended = False

    def end_waiting(self):
        self.has_ended = True


def test_a_call_that_begins_to_wait_when_its_channel_was_closed_ends():
    calls, before, after = ChannelCalls(), Waiting(), Waiting()
    assert calls.add_waiting(before)
    assert not before.has_ended
    calls.end_waiting()
    assert not calls.add_waiting(after)
    assert before.has_ended
    assert after.has_ended


def test_a_delivery_ends_with_an_inner_channel_and_not_with_its_own():
    own, inner, of_own, of_inner = ChannelCalls(), ChannelCalls(), Waiting(), Waiting()
    with own.delivery():
        assert own.add_waiting(of_own)
        assert inner.add_waiting(of_inner)
    own.end_waiting()
    inner.end_waiting()
    assert not of_own.has_ended
    assert of_inner.has_ended


def test_close_ends_waiting_calls_before_the_connections_may_close(open_channel, monkeypatch):
    channel, waiting, ended = open_channel(Inner(None)), Waiting(), []
    channel._state.channel_calls.add_waiting(waiting)
    keep = FailbackQueues.keep

    def note_and_keep(*args):
        ended.append(waiting.has_ended)
        return keep(*args)

    monkeypatch.setattr(FailbackQueues, "keep", note_and_keep)
    channel.close()
    assert ended == [True]
