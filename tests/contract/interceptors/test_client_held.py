"""Calls that are held while they run: cancelled, dropped and watched, at every moment."""

import gc
import threading
from functools import partial

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue

from fixtures.clients import LATER, answer, begin, both, patient
from fixtures.shop import UNARY_STREAM, UNARY_UNARY, Hang, Silent
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.failback import FailbackPolicy
from rpcwheel.interceptors import CallPolicy, Queues, intercept_channel
from rpcwheel.observe import HookFailed


@pytest.fixture
def client(shop_channel, timer):
    """Makes channels with policies; by default calls are retried after five manual seconds."""

    def make(**settings):
        given = {"retry": LATER, "idempotent": True} | settings
        return intercept_channel(shop_channel, CallPolicy(**given), timer=timer)

    return make


# --- What is sent ---


def begin_with(channel, style, message):
    """Begin a call that is held, with a message of protobuf."""
    given = {"request_serializer": StringValue.SerializeToString}
    if style == "future":
        return channel.unary_unary(UNARY_UNARY, **given).future(message)
    return channel.unary_stream(UNARY_STREAM, **given)(message)


@both
def test_a_retry_sends_the_request_as_it_was_when_the_call_began(shop, client, timer, style):
    shop.then("UNAVAILABLE")
    message = StringValue(value="first")
    call = begin_with(client(), style, message)
    message.value = "spoilt"
    patient(timer)
    assert StringValue.FromString(answer(call, style)).value == "first"


@both
def test_failback_delivers_the_request_as_it_was_when_the_call_began(shop, shop_channel, style):
    shop.then("UNAVAILABLE")
    with Queues() as queues:
        policy = CallPolicy(failback=FailbackPolicy(on="UNAVAILABLE", wait=0.01))
        channel = intercept_channel(shop_channel, policy, queues=queues)
        message = StringValue(value="first")
        call = begin_with(channel, style, message)
        message.value = "spoilt"
        assert call.code() is grpc.StatusCode.OK
        assert queues.flush(WAIT_S)
    assert StringValue.FromString(shop.calls[1].requests[0]).value == "first"


# --- Cancelling ---


@both
def test_a_call_can_be_cancelled_between_two_tries(shop, client, timer, style):
    shop.then("UNAVAILABLE")
    call = begin(client(), style)
    told = []
    call.add_done_callback(told.append)
    wait_until(lambda: timer.pending == 1)
    assert call.running()
    assert call.is_active()
    assert call.cancel()
    assert (call.cancelled(), call.done(), call.cancel()) == (True, True, False)
    assert call.code() is grpc.StatusCode.CANCELLED
    with pytest.raises(grpc.FutureCancelledError):
        call.result()
    assert timer.pending == 0
    wait_until(lambda: told == [call])
    assert len(shop.calls) == 1


@both
def test_a_call_can_be_cancelled_in_its_second_try(shop, client, timer, style):
    hang = Hang()
    shop.then("UNAVAILABLE", hang)
    call = begin(client(), style)
    patient(timer)
    assert hang.begun.wait(WAIT_S)
    assert call.cancel()
    assert shop.calls[1].ended.wait(WAIT_S)
    assert call.details() == "Locally cancelled by application!"


def test_cancelling_wakes_who_waits_for_the_result(shop, client, timer):
    shop.then("UNAVAILABLE")
    call = begin(client(), "future")
    wait_until(lambda: timer.pending == 1)
    ends = []
    waits = [
        threading.Thread(target=lambda give=give: ends.append(ended_by(give)))
        for give in (call.result, call.exception, call.traceback, call.code)
    ]
    for thread in waits:
        thread.start()
    call.cancel()
    for thread in waits:
        thread.join(WAIT_S)
    assert sorted(map(str, ends)) == sorted(["FutureCancelledError"] * 3 + ["StatusCode.CANCELLED"])


def test_cancelling_wakes_who_waits_for_a_message(shop, client, timer):
    shop.then("UNAVAILABLE")
    call = begin(client(), "stream")
    wait_until(lambda: timer.pending == 1)
    ends = []
    thread = threading.Thread(target=lambda: ends.append(ended_by(partial(next, call))))
    thread.start()
    call.cancel()
    thread.join(WAIT_S)
    assert ends == ["EndedCall"]


def ended_by(give):
    try:
        return give()
    except (grpc.FutureCancelledError, grpc.RpcError) as error:
        return type(error).__name__


def test_waiting_for_a_result_ends_in_time_and_the_call_goes_on(shop, client, timer):
    shop.then("UNAVAILABLE")
    call = begin(client(), "future")
    for give in (call.result, call.exception, call.traceback):
        with pytest.raises(grpc.FutureTimeoutError):
            give(timeout=0.01)
    patient(timer)
    assert call.result(WAIT_S) == b"x"


def test_the_time_that_remains_is_that_of_all_tries(shop, client, timer):
    shop.then("UNAVAILABLE")
    call = begin(client(timeout=60.0), "future")
    wait_until(lambda: timer.pending == 1)
    assert call.time_remaining() == 60.0
    timer.advance(4.0)
    assert call.time_remaining() == 56.0
    call.cancel()
    assert begin(client(), "future").time_remaining() is None


# --- Dropping ---


@both
def test_a_call_that_is_dropped_is_cancelled(shop, client, style):
    hang = Hang()
    shop.then(hang)
    call = begin(client(), style)
    assert hang.begun.wait(WAIT_S)
    del call
    assert shop.calls[0].ended.wait(WAIT_S)


@both
def test_a_call_that_is_dropped_between_two_tries_is_not_made_again(shop, client, timer, style):
    shop.then("UNAVAILABLE")
    call = begin(client(), style)
    wait_until(lambda: timer.pending == 1)
    del call
    gc.collect()
    wait_until(lambda: timer.pending == 0)


def test_a_stream_that_is_left_half_read_is_cancelled(shop, client):
    shop.then(Silent(after=1))
    for message in client().unary_stream(UNARY_STREAM)(b"xyz"):
        assert message == b"x"
        break
    assert shop.calls[0].ended.wait(WAIT_S)


# --- Callbacks ---


@both
def test_a_callback_that_raises_or_hangs_stops_no_channel_and_no_call(
    shop, client, timer, events, style
):
    end, threads = threading.Event(), []

    def hang(*_):
        threads.append(threading.current_thread().name)
        end.wait(WAIT_S)

    def broken(*_):
        raise RuntimeError("a hook")

    channel = client()
    shop.then("UNAVAILABLE")
    call = begin(channel, style)
    for hook in (broken, hang):
        call.add_done_callback(hook)
        assert call.add_callback(hook)
    patient(timer)
    assert answer(call, style) == b"x"
    for _ in range(3):  # the channel's thread lives, and so does the wheel
        shop.then("UNAVAILABLE")
        call = begin(channel, "future")
        patient(timer)
        assert answer(call, "future") == b"x"
    wait_until(lambda: threads)
    end.set()
    wait_until(lambda: len(threads) == 2)
    assert all(name.startswith("rpcwheel-worker") for name in threads)
    hooks = [event.hook for event in events if isinstance(event, HookFailed)]
    assert hooks == ["done callback"] * 2


def test_a_callback_that_is_added_late_is_called_at_once(shop, client):
    call = begin(client(), "future")
    call.result(WAIT_S)
    told = []
    call.add_done_callback(told.append)
    assert told == [call]
    assert not call.add_callback(told.clear)
