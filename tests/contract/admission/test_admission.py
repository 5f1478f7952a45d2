"""Attempts that a client does not send: circuit breaker, throttle, rate and concurrency limits."""

import asyncio
import contextlib
import gc
import sys
from functools import partial

import grpc
import pytest

from fixtures.client_interceptors import interceptor
from fixtures.clients import WAYS, held, in_every_way, ways
from fixtures.leaks import no_garbage_collector
from fixtures.shop import STREAM_UNARY, UNARY_UNARY, Hang, Silent
from fixtures.waiting import in_thread, wait_until
from fixtures.ways import open_in_kit, open_intercepted
from fixtures.worlds import METHODS, RETRY, only_aio
from rpcwheel.admission import BreakerPolicy, ConcurrencyPolicy, ThrottlePolicy
from rpcwheel.call import DefaultResponsePolicy, HedgingPolicy, MethodPolicy, RetryPolicy
from rpcwheel.events import BreakerClosed, BreakerOpened, ThrottleBegan, ThrottleEnded
from rpcwheel.failback import FailbackPolicy
from rpcwheel.limit import RatePolicy
from rpcwheel.telemetry import components

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
RESOURCE_EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED

BREAKER = BreakerPolicy(
    window_calls=4, minimum_calls=2, half_open_calls=2, open_duration=10.0, health_check=False
)

PLAIN = {"retry": None}

RETRIED = {"retry": RETRY, "idempotent": True}

WAITS = ConcurrencyPolicy(max_calls=1, max_wait=5.0)
"""One call runs; others wait for up to 5 s."""

QUEUED = FailbackPolicy(retry_on="UNAVAILABLE", backoff=60.0)

GRACE_S = 30.0


@pytest.fixture
def admissions():
    """Returns the states of the methods that were called in this test."""
    known = components.of_kind("admission")

    def states():
        ours = [each for each in components.of_kind("admission") if each not in known]
        return [state for each in ours for state in each.status()]

    return states


@pytest.fixture
def waiting(admissions):
    """Returns how many attempts wait for a concurrency limit."""
    return lambda: sum(state.waiting or 0 for state in admissions())


@pytest.fixture
def busy(shop, client, timer):
    """Opens a channel, by default with `WAITS`, and begins a call that runs; returns both."""

    def open_busy(concurrency=WAITS, **settings):
        settings = {"concurrency": concurrency, "timer": timer} | PLAIN | settings
        channel = client.open(**settings)
        shop.then(hang := Hang())
        running = client.begin(channel)
        assert hang.begun.wait(30)
        return channel, running

    return open_busy


def fail(shop, client, channel, count):
    shop.then(*["UNAVAILABLE"] * count)
    for _ in range(count):
        assert client.refused(channel).code() is UNAVAILABLE


def is_answered(client, channel):
    try:
        return client.ask(channel) == b"x"
    except grpc.RpcError:  # the end of the attempt before is not known yet
        return False


@in_every_way
def test_an_open_breaker_sends_no_calls_until_a_probe_succeeds(shop, client, timer, events):
    channel = client.open(breaker=BREAKER, timer=timer, **PLAIN)
    fail(shop, client, channel, 2)
    wait_until(lambda: timer.pending == 1)  # the end of the last attempt is known
    error = client.refused(channel)
    assert error.code() is UNAVAILABLE
    assert error.details() == ("not sent: the circuit breaker is open, because calls have failed")
    assert len(shop.calls) == 2
    timer.advance(10.0)
    assert client.ask(channel) == b"x"
    wait_until(lambda: is_answered(client, channel))
    wait_until(lambda: events.of(BreakerClosed))
    (opened,) = wait_until(lambda: events.of(BreakerOpened))  # emitted on another thread
    assert (opened.method, opened.reason) == (client.method, "2 of 2 calls failed: UNAVAILABLE")
    assert timer.pending == 0


def cannot_be_serialized(_):
    raise LookupError


@pytest.mark.parametrize(
    "unsendable",
    [
        {"serializer": cannot_be_serialized},
        {"serializer": lambda _: "not bytes"},
        {"metadata": (("Not A Key", ""),)},
    ],
    ids=["raises", "no bytes", "metadata"],
)
@in_every_way
def test_calls_that_cannot_be_sent_do_not_open_the_breaker(client, timer, events, unsendable):
    channel = client.open(breaker=BREAKER, timer=timer, **PLAIN)
    for _ in range(3):
        with contextlib.suppress(Exception):  # grpc.aio sends an empty message after the first kind
            client.ask(channel, **unsendable)
    assert client.ask(channel) == b"x"
    assert events.of(BreakerOpened) == []


@in_every_way
def test_messages_that_are_too_large_say_nothing_about_the_load_of_the_server(client, timer):
    breaker = BREAKER.replace(failures="RESOURCE_EXHAUSTED")
    throttle = ThrottlePolicy(minimum_calls=1, window=60.0, max_rejection=1.0)
    channel = client.open(breaker=breaker, throttle=throttle, timer=timer, **PLAIN)
    for _ in range(3):
        error = client.refused(channel, bytes(5 << 20))
        assert error.code() is RESOURCE_EXHAUSTED
        assert "not sent" not in error.details()
    assert client.ask(channel) == b"x"


@in_every_way
def test_requests_that_cannot_be_iterated_do_not_open_the_breaker(client, timer, events):
    def requests():
        yield b"x"
        raise LookupError

    channel = client.open(breaker=BREAKER, timer=timer, **PLAIN)
    for _ in range(3):
        with contextlib.suppress(Exception, asyncio.CancelledError):
            client.answer(client.begin(channel, requests=requests()))
    assert client.answer(client.begin(channel, requests=[b"x"])) == b"x"
    assert events.of(BreakerOpened) == []


@in_every_way
def test_calls_that_are_lost_together_with_their_server_do_not_open_the_breaker(shop, client):
    breaker = BreakerPolicy(window_calls=4, minimum_calls=2, health_check=False)
    channel = client.open(breaker=breaker, **PLAIN)
    hangs = [Hang() for _ in range(4)]
    shop.then(*hangs)
    calls = [client.begin(channel) for _ in hangs]
    assert all(hang.begun.wait(30) for hang in hangs)
    shop.kill()
    assert {call.error().code() for call in calls} == {UNAVAILABLE}
    assert not client.refused(channel).details().startswith("not sent")


@in_every_way
def test_a_call_that_is_not_sent_is_not_retried(shop, client, timer):
    channel = client.open(breaker=BREAKER, timer=timer, retry=RETRY, idempotent=True)
    shop.then("NOT_FOUND")
    client.refused(channel)
    shop.then("UNAVAILABLE")
    assert client.refused(channel).details().startswith("not sent")  # its retry
    assert client.refused(channel).details().startswith("not sent")
    assert len(shop.calls) == 2


@in_every_way
def test_a_call_that_is_not_sent_gets_the_default_response(shop, client, timer):
    default = DefaultResponsePolicy(on="UNAVAILABLE", default=client.default(b"none"))
    channel = client.open(breaker=BREAKER, timer=timer, default_response=default, **PLAIN)
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    assert [client.ask(channel) for _ in range(3)] == [b"none"] * 3
    assert len(shop.calls) == 2


@in_every_way
def test_a_throttle_sends_only_a_part_of_the_calls_that_a_server_does_not_accept(
    shop, client, timer, events
):
    throttle = ThrottlePolicy(max_rejection=1.0)
    channel = client.open(throttle=throttle, timer=timer, **PLAIN)
    shop.then(*["RESOURCE_EXHAUSTED"] * 100)
    errors = [client.refused(channel) for _ in range(100)]
    sent = len(shop.calls)
    assert 1 <= sent < 40
    not_sent = [error for error in errors if error.details().startswith("not sent: throttled")]
    assert len(not_sent) == 100 - sent
    assert {error.code() for error in not_sent} == {UNAVAILABLE}
    wait_until(lambda: timer.pending == 1)
    timer.advance(5.0)
    (ended,) = wait_until(lambda: events.of(ThrottleEnded))
    assert len(wait_until(lambda: events.of(ThrottleBegan))) == 1
    assert ended.refused == 100 - sent
    shop.reset()
    assert client.ask(channel) == b"x"


@ways("sync stream", "aio stream")
def test_a_stream_that_goes_on_shows_a_throttle_that_the_server_accepts_calls(
    shop, client, timer, admissions
):
    throttle = ThrottlePolicy(multiplier=10.0, minimum_calls=1, window=60.0, max_rejection=0.5)
    channel = client.open(throttle=throttle, timer=timer, **PLAIN)
    fail(shop, client, channel, 1)
    wait_until(lambda: admissions()[0].rejection == 0.5)
    shop.then(hang := Hang())
    for _ in range(2):  # at most one of them is throttled
        call = client.begin(channel)
        assert wait_until(lambda call=call: hang.begun.is_set() or call.done())
        if hang.begun.is_set():
            break
    timer.advance(1.0)
    (after,) = admissions()
    assert after.rejection == 0.0
    call.cancel()


@in_every_way
def test_a_call_above_the_concurrency_limit_is_refused(shop, client, busy):
    channel, running = busy(concurrency=1)
    error = client.refused(channel)
    assert error.code() is RESOURCE_EXHAUSTED
    assert error.details() == "not sent: as many calls run as the concurrency limit allows"
    shop.calls[0].ended.set()
    client.answer(running)
    wait_until(lambda: is_answered(client, channel))


@in_every_way
def test_a_call_above_the_concurrency_limit_waits_for_another_to_end(shop, client, busy, timer):
    channel, first = busy()
    second = client.begin(channel, b"y")
    wait_until(lambda: timer.pending == 1)
    third = client.begin(channel, b"z")
    wait_until(lambda: timer.pending == 2)
    assert len(shop.calls) == 1
    shop.calls[0].ended.set()
    client.answer(first)
    assert [client.answer(call) for call in (second, third)] == [b"y", b"z"]
    wait_until(lambda: timer.pending == 0)


@in_every_way
def test_a_call_that_has_waited_too_long_for_the_concurrency_limit_is_refused(
    shop, client, busy, timer
):
    channel, first = busy()
    late, late_by_deadline = client.begin(channel), client.begin(channel, timeout=60.0)
    wait_until(lambda: timer.pending == 2)
    timer.advance(5.0)
    assert [call.code() for call in (late, late_by_deadline)] == [RESOURCE_EXHAUSTED] * 2
    shop.calls[0].ended.set()
    client.answer(first)
    assert client.ask(channel) == b"x"
    assert len(shop.calls) == 2


@ways("sync future", "sync stream", "aio unary", "aio stream")
def test_a_call_that_has_waited_in_vain_is_not_retried(shop, client, busy, timer):
    retry = RETRY.replace(retry_on="RESOURCE_EXHAUSTED")
    channel, first = busy(api="channel", retry=retry, idempotent=True)
    late = client.begin(channel)
    wait_until(lambda: timer.pending == 1)
    timer.advance(5.0)
    assert late.code() is RESOURCE_EXHAUSTED
    shop.calls[0].ended.set()
    client.answer(first)


@held
def test_a_call_that_waits_can_be_canceled(shop, client, busy, timer):
    channel, first = busy()
    second = client.begin(channel)
    wait_until(lambda: timer.pending == 1)
    assert second.cancel()
    wait_until(lambda: timer.pending == 0)
    assert second.code() is grpc.StatusCode.CANCELLED
    shop.calls[0].ended.set()
    client.answer(first)
    assert client.ask(channel) == b"x"
    assert len(shop.calls) == 2


@in_every_way
def test_a_call_waits_for_a_token_of_the_rate_limit(shop, client, timer):
    channel = client.open(rate=RatePolicy(rate=1.0, max_wait=2.0), timer=timer, **PLAIN)
    assert client.ask(channel) == b"x"
    second = client.begin(channel, b"y")
    wait_until(lambda: timer.pending == 1)
    third = client.begin(channel, b"z")
    wait_until(lambda: timer.pending == 2)
    error = client.refused(channel)
    assert error.code() is RESOURCE_EXHAUSTED
    assert error.details() == "not sent: more calls per second than the rate limit allows"
    timer.advance(1.0)
    assert client.answer(second) == b"y"
    assert (len(shop.calls), timer.pending) == (2, 1)
    timer.advance(1.0)
    assert client.answer(third) == b"z"
    assert (len(shop.calls), timer.pending) == (3, 0)


@pytest.fixture
def kit(world, timer):
    return world.do(world.api.Kit, breaker=BREAKER, timer=timer)


def read_one(world, channel, kind, *, iterates):
    """Read one message of a response stream, and leave the call without canceling it."""
    begin = getattr(channel, kind)(METHODS[kind])
    request = b"x" if kind == "unary_stream" else iter([b"x"])

    def iterate():
        for message in begin(request):
            assert message == b"x"
            break

    def read():
        assert next(begin(request)) == b"x"

    async def iterate_on_loop():
        async for message in begin(request):
            assert message == b"x"
            break

    async def read_on_loop():
        assert await begin(request).read() == b"x"

    if world.name == "sync":
        world.do(iterate if iterates else read)
    else:
        world.do(iterate_on_loop if iterates else read_on_loop)


def is_sent(world, ask):
    try:
        return world.do(ask, b"y") == b"y"
    except grpc.RpcError:
        return False


@only_aio
@no_garbage_collector()
@pytest.mark.parametrize("kind", ["unary_stream", "stream_stream"])
def test_a_retried_stream_that_its_caller_leaves_gives_back_its_place(shop, world, kind):
    policy = ConcurrencyPolicy(max_calls=1, per="target")
    retry = RetryPolicy(retry_on="UNAVAILABLE", backoff=0.001)
    kit = world.do(world.api.Kit, concurrency=policy, retry=retry, idempotent=True)
    channel = world.keep(world.do(kit.channel, shop.target))
    shop.then("UNAVAILABLE", Silent(after=1))
    read_one(world, channel, kind, iterates=True)
    assert world.do(channel.unary_unary(UNARY_UNARY), b"y") == b"y"
    assert shop.calls[1].ended.wait(30)
    world.do(kit.close)


@no_garbage_collector()
@pytest.mark.parametrize("iterates", [True, False], ids=["iterates", "reads"])
@pytest.mark.parametrize("kind", ["unary_stream", "stream_stream"])
@pytest.mark.parametrize("front", [None, open_in_kit, open_intercepted])
def test_a_stream_that_its_caller_leaves_gives_back_its_place(shop, world, front, kind, iterates):
    """At once, but for intercepted calls of `grpc.aio`: gRPC makes a reference cycle of each."""
    policy = ConcurrencyPolicy(max_calls=1, per="target")
    kit = world.do(world.api.Kit, concurrency=policy, retry=None)
    if front is None:
        channel = world.keep(world.do(kit.channel, shop.target))
    else:
        _, channel = front(world, partial(world.channel, shop.target), kit)
    shop.then(Silent(after=1))
    read_one(world, channel, kind, iterates=iterates)
    if world.name == "aio" and front is open_intercepted:
        world.do(gc.collect)
    ask = channel.unary_unary(UNARY_UNARY)
    if world.name == "aio":
        assert world.do(ask, b"y") == b"y"
    else:
        wait_until(lambda: is_sent(world, ask))  # threads of gRPC free the call
    assert shop.calls[0].ended.wait(30)
    world.do(kit.close)


def test_breakers_of_a_kit_are_set_by_hand(shop, world, kit):
    kit.breakers.force_open("/test.Shop/Unary*")
    channel = world.keep(world.do(kit.channel, shop.target))
    assert world.call(channel).error().details().startswith("not sent")
    assert world.call(channel, "stream_unary", b"y").result() == b"y"
    states = {breaker.method: breaker.state.value for breaker in kit.breakers}
    assert states == {UNARY_UNARY: "forced_open", "/test.Shop/StreamUnary": "closed"}
    kit.breakers.reset(UNARY_UNARY)
    assert world.call(channel).result() == b"x"
    kit.breakers.disable()
    shop.then(*["UNAVAILABLE"] * 8)
    for _ in range(8):
        assert world.call(channel).error().details().startswith("scripted")
    world.do(kit.close)


def test_channels_of_a_kit_to_one_target_share_their_breakers(shop, world, kit, timer):
    first, second = (world.keep(world.do(kit.channel, shop.target)) for _ in range(2))
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    for channel in (first, second):
        world.call(channel).error()
    (breaker,) = kit.breakers
    wait_until(lambda: breaker.state.value == "open")
    assert world.call(first).error().details().startswith("not sent")
    assert world.call(second).error().details().startswith("not sent")
    assert (breaker.target, breaker.state.value) == (shop.target, "open")
    world.do(kit.close)


@ways(*WAYS)
def test_a_call_that_waits_ends_if_its_channel_is_closed(client, busy, timer):
    channel, first = busy(api="channel")
    second = client.begin(channel)
    wait_until(lambda: timer.pending == 1)
    client.world.do(channel.close)
    assert [call.code() for call in (first, second)] == [grpc.StatusCode.CANCELLED] * 2


@ways(*WAYS)
def test_a_call_that_waits_for_a_token_ends_if_its_channel_is_closed(client, timer):
    rate = RatePolicy(rate=1.0, max_wait=2.0)
    channel = client.open(api="channel", rate=rate, timer=timer, **PLAIN)
    assert client.ask(channel) == b"x"
    second = client.begin(channel)
    wait_until(lambda: timer.pending == 1)
    client.world.do(channel.close)
    assert second.code() is grpc.StatusCode.CANCELLED
    if client.world.name == "sync":
        assert second.error().details() == "Channel closed!"
    assert timer.pending == 0


@pytest.mark.parametrize("settings", [PLAIN, RETRIED], ids=["plain", "retried"])
@ways(*WAYS)
def test_a_call_that_waits_is_not_sent_after_a_channel_with_a_queued_call_is_closed(
    shop, client, timer, waiting, settings
):
    world = client.world
    methods = {STREAM_UNARY: MethodPolicy(retry=None, failback=QUEUED)}
    settings = {"concurrency": WAITS, "methods": methods, "timer": timer} | settings
    kit = world.do(world.api.Kit, **settings)
    channel = world.do(kit.channel, shop.target)
    shop.then("UNAVAILABLE", hang := Hang())
    assert world.call(channel, "stream_unary").result() is None
    first = client.begin(channel)
    assert hang.begun.wait(30)
    second = client.begin(channel)
    wait_until(lambda: waiting() == 1)
    grace = (GRACE_S,) if world.name == "aio" else ()
    closing = in_thread(world.do, channel.close, *grace)
    assert second.code() is grpc.StatusCode.CANCELLED
    assert waiting() == 0
    if world.name == "sync":
        closing.result(GRACE_S)  # has canceled the call that runs, unless it is blocking
    shop.calls[1].ended.set()
    if world.name == "aio" or client.style == "blocking":
        assert client.answer(first) == b"x"
    else:
        assert first.code() is grpc.StatusCode.CANCELLED
    closing.result(GRACE_S)
    assert len(shop.calls) == 2
    world.do(kit.close, 0)


def innermost_functions():
    """The names of the functions in which the threads are now."""
    return [frame.f_code.co_name for frame in sys._current_frames().values()]


@pytest.mark.parametrize("settings", [PLAIN, RETRIED], ids=["plain", "retried"])
@ways("sync blocking")
def test_a_call_that_has_waited_ends_if_its_channel_is_closed_before_it_is_sent(
    shop, client, busy, timer, settings
):
    def close_in_the_second_call(continuation, details, request):
        if shop.calls:
            channel.close()
        return continuation(details, request)

    inner = [interceptor(close_in_the_second_call)]
    channel, first = busy(api="channel", inner=inner, **settings)
    second = client.begin(channel)
    # Not until its timeout is set: if the first call ends right then, the second one does not wait,
    # and as of any call that begins later, gRPC's ValueError is its result.
    wait_until(lambda: "wait_on_thread" in innermost_functions())
    shop.calls[0].ended.set()
    assert client.answer(first) == b"x"
    assert second.code() is grpc.StatusCode.CANCELLED
    assert second.error().details() == "Channel closed!"
    assert len(shop.calls) == 1


def test_a_delivery_that_waits_is_sent_although_its_channel_is_closed(shop, world, timer, waiting):
    settings = {"concurrency": WAITS, "failback": QUEUED, "timer": timer} | PLAIN
    kit = world.do(world.api.Kit, **settings)
    channel = world.do(kit.channel, shop.target)
    shop.then("UNAVAILABLE", hang := Hang())
    assert world.call(channel, "unary_unary", b"a").result() is None
    running = world.call(channel, "unary_unary", b"b")
    assert hang.begun.wait(30)
    flushed = in_thread(world.do, kit.flush, GRACE_S)
    wait_until(lambda: waiting() == 1)
    world.do(channel.close)
    assert running.code() is grpc.StatusCode.CANCELLED
    assert flushed.result(GRACE_S)
    assert [call.requests for call in shop.calls] == [[b"a"], [b"b"], [b"a"]]
    assert world.do(kit.close) == []


@ways("aio unary")
def test_a_hedge_that_waits_does_not_end_its_call_during_the_grace_of_close(
    shop, client, busy, timer, waiting
):
    hedging = HedgingPolicy(delay=1.0, max_attempts=2, retry_budget=None)
    channel, call = busy(api="channel", hedging=hedging)
    wait_until(lambda: timer.pending == 1)
    timer.advance(1.0)
    wait_until(lambda: waiting() == 1)
    closing = in_thread(client.world.do, channel.close, GRACE_S)
    wait_until(lambda: waiting() == 0)
    shop.calls[0].ended.set()
    assert client.answer(call) == b"x"
    closing.result(GRACE_S)
    assert len(shop.calls) == 1


@held
def test_a_call_that_is_canceled_before_it_waits_keeps_no_permit(shop, client, busy, timer):
    channel, first = busy(api="channel")
    multicallable = getattr(channel, client.kind)(client.method)

    def begin_and_cancel():
        begin = getattr(multicallable, "future", multicallable)
        begin(b"y").cancel()  # with grpc.aio: before its task has run
        with contextlib.suppress(TypeError, ValueError):
            begin(b"y", metadata=[("only-a-key",)])

    client.world.do(begin_and_cancel)
    wait_until(lambda: timer.pending == 0)
    shop.calls[0].ended.set()
    client.answer(first)
    assert client.ask(channel) == b"x"
    assert len(shop.calls) == 2


@ways("sync future", "aio unary")
def test_a_hedge_that_is_not_sent_does_not_end_the_call(shop, client, busy, timer):
    hedging = HedgingPolicy(delay=1.0, max_attempts=3, retry_budget=None)
    _, call = busy(api="channel", concurrency=1, hedging=hedging)
    for _ in range(3):
        timer.advance(1.0)
    shop.calls[0].ended.set()
    assert client.answer(call) is not None
    assert len(shop.calls) == 1
