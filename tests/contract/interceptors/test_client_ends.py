"""Calls that end whatever hangs, stops or closes meanwhile, and are made again only for sure."""

import threading
import time

import grpc
import pytest

from fixtures.shop import IMPATIENT, STREAM_STREAM, STREAM_UNARY, UNARY_STREAM, UNARY_UNARY, Hang
from fixtures.small_servers import METHOD, serving
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.deadline import DeadlinePolicy, RetryPolicy
from rpcwheel.failback import FailbackPolicy
from rpcwheel.interceptors import CallPolicy, FailsafePolicy, Queues, intercept_channel
from rpcwheel.observe import CallRetrying, CallSlow, add_sink, remove_sink
from rpcwheel.timer import WheelTimer

AT_ONCE = RetryPolicy(on="UNAVAILABLE", wait=0.0, budget=None)
LATER = RetryPolicy(on="UNAVAILABLE", wait=9.0)


def code_of(make):
    with pytest.raises(grpc.RpcError) as caught:
        make()
    return caught.value.code().name


# --- What was never sent ---


def test_a_server_that_hands_on_its_upstreams_failure_is_called_once():
    ran = []

    def relay(_, context):
        ran.append(1)
        context.abort(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses; ...")

    with (
        serving(grpc.unary_unary_rpc_method_handler(relay)) as target,
        grpc.insecure_channel(target, options=IMPATIENT) as plain,
    ):
        channel = intercept_channel(plain, CallPolicy(retry=AT_ONCE))
        assert code_of(lambda: channel.unary_unary(METHOD)(b"x")) == "UNAVAILABLE"
        call = channel.unary_unary(METHOD).future(b"x")
        assert code_of(lambda: call.result(WAIT_S)) == "UNAVAILABLE"
    assert ran == [1, 1]


@pytest.mark.parametrize("held", [False, True])
def test_a_connection_that_is_refused_is_tried_again_for_any_method(events, held):
    with grpc.insecure_channel("127.0.0.1:1", options=IMPATIENT) as plain:
        call = intercept_channel(plain, CallPolicy(retry=AT_ONCE)).unary_unary(METHOD)
        make = (lambda: call.future(b"x").result(WAIT_S)) if held else lambda: call(b"x")
        assert code_of(make) == "UNAVAILABLE"
    assert isinstance(events[0], CallRetrying)


# --- What stops or hangs ---


@pytest.mark.parametrize("kind", ["future", "messages", "done"])
def test_a_call_ends_though_its_timer_is_stopped_between_two_tries(
    shop, shop_channel, events, kind
):
    timer = WheelTimer()
    policy = CallPolicy(timeout=30, retry=LATER, idempotent=True)
    channel = intercept_channel(shop_channel, policy, timer=timer)
    shop.then("UNAVAILABLE")
    if kind == "messages":
        call = channel.unary_stream(UNARY_STREAM)(b"x")
    else:
        call = channel.unary_unary(UNARY_UNARY).future(b"x")
    wait_until(lambda: events)
    timer.stop()
    if kind == "done":
        wait_until(call.done)
    assert code_of(lambda: list(call) if kind == "messages" else call.result(9)) == "UNAVAILABLE"


def test_users_callbacks_that_hang_do_not_hold_up_calls_through_two_interceptors(
    shop, shop_channel
):
    policy = CallPolicy(timeout=WAIT_S, retry=AT_ONCE, idempotent=True)
    channel = intercept_channel(intercept_channel(shop_channel, policy), policy)
    opened = threading.Event()
    hangs = [Hang() for _ in range(6)]
    shop.then(*hangs)
    calls = [channel.unary_unary(UNARY_UNARY).future(b"x", timeout=0.5) for _ in hangs]
    for call in calls:
        call.add_done_callback(lambda _: opened.wait(WAIT_S))
    try:
        assert [call.exception(9).code().name for call in calls] == ["DEADLINE_EXCEEDED"] * 6
        assert channel.unary_unary(UNARY_UNARY).future(b"x").result(9) == b"x"
    finally:
        opened.set()


def test_a_sink_that_blocks_does_not_hold_up_the_timer(shop, shop_channel, timer):
    blocked, opened = threading.Event(), threading.Event()

    def block(event):
        if isinstance(event, CallSlow):
            blocked.set()
            opened.wait(WAIT_S)

    policy = CallPolicy(timeout=DeadlinePolicy(slow_after=2.0))
    hang = Hang()
    shop.then(hang)
    call = intercept_channel(shop_channel, policy, timer=timer).unary_unary(UNARY_UNARY).future(b"")
    assert hang.begun.wait(WAIT_S)
    add_sink(block)
    try:
        begun = time.monotonic()
        timer.advance(3)
        assert time.monotonic() - begun < WAIT_S / 2
        assert blocked.wait(WAIT_S)
    finally:
        opened.set()
        remove_sink(block)
        call.cancel()


# --- What closes ---


@pytest.mark.parametrize("kind", ["blocking", "future", "messages"])
def test_a_channel_that_closes_between_two_tries_cancels_the_call(shop, timer, events, kind):
    plain = grpc.insecure_channel(shop.target, options=IMPATIENT)
    failsafe = FailsafePolicy(on=grpc.RpcError, default=b"no")
    policy = CallPolicy(retry=LATER, idempotent=True, failsafe=failsafe)
    channel = intercept_channel(plain, policy, timer=timer)
    shop.then("UNAVAILABLE")
    made = []

    def make():
        match kind:
            case "blocking":
                channel.unary_unary(UNARY_UNARY)(b"x")
            case "future":
                channel.unary_unary(UNARY_UNARY).future(b"x").result(WAIT_S)
            case "messages":
                list(channel.unary_stream(UNARY_STREAM)(b"x"))

    thread = threading.Thread(target=lambda: made.append(code_of(make)))
    thread.start()
    wait_until(lambda: timer.pending == 1)
    plain.close()
    timer.advance(9)
    thread.join(WAIT_S)
    assert made == ["CANCELLED"]


# --- What is late ---


@pytest.mark.parametrize("style", ["blocking", "future", "messages"])
def test_a_call_that_is_late_is_answered_as_any_other(shop, shop_channel, style):
    policy = CallPolicy(failsafe=FailsafePolicy(on="DEADLINE_EXCEEDED", default=b"no"))
    channel = intercept_channel(shop_channel, policy)
    match style:
        case "blocking":
            assert channel.unary_unary(UNARY_UNARY)(b"x", timeout=0) == b"no"
        case "future":
            assert channel.unary_unary(UNARY_UNARY).future(b"x", timeout=0).result() == b"no"
        case "messages":
            assert list(channel.unary_stream(UNARY_STREAM)(b"x", timeout=0)) == [b"no"]
    assert shop.calls == []


def test_a_call_that_is_late_is_delivered_later(shop, shop_channel):
    with Queues() as queues:
        failback = FailbackPolicy(on="DEADLINE_EXCEEDED", wait=0.01, default=b"queued")
        channel = intercept_channel(shop_channel, CallPolicy(failback=failback), queues=queues)
        assert channel.unary_unary(UNARY_UNARY)(b"x", timeout=0) == b"queued"
        assert queues.flush(WAIT_S)
    assert [seen.requests for seen in shop.calls] == [[b"x"]]


@pytest.mark.parametrize("method", [STREAM_UNARY, STREAM_STREAM])
def test_requests_that_never_end_do_not_keep_a_call_that_may_not_wait(shop, shop_channel, method):
    opened = threading.Event()

    def requests():
        yield b"1"
        opened.wait(WAIT_S)

    with Queues() as queues:
        failback = FailbackPolicy(on="UNAVAILABLE", wait=0.01, default=b"queued")
        channel = intercept_channel(shop_channel, CallPolicy(failback=failback), queues=queues)
        shop.then("UNAVAILABLE")
        try:
            if method == STREAM_UNARY:
                make = channel.stream_unary(method)
            else:
                make = lambda *args: list(channel.stream_stream(method)(*args))  # noqa: E731
            assert code_of(lambda: make(requests())) == "UNAVAILABLE"
        finally:
            opened.set()
