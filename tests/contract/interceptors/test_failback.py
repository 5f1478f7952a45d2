"""Failback of calls: the caller gets a default response, and the call is delivered later."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue
from tenacity import wait_fixed

from fixtures.aio_channels import refused
from fixtures.client_interceptors import interceptor
from fixtures.clients import held, ways
from fixtures.failback_queues import in_world
from fixtures.interrupts import Interrupt
from fixtures.shop import STREAM_UNARY, UNARY_STREAM, UNARY_UNARY, Fail, Hang
from fixtures.waiting import WAIT_S, in_thread, wait_until
from fixtures.worlds import RETRY
from rpcwheel.admission import BreakerPolicy
from rpcwheel.call import MethodPolicy, deadline_scope
from rpcwheel.errors import FailbackClosed
from rpcwheel.events import CallbackFailed, DeadLetterFailed, FailbackGaveUp
from rpcwheel.failback import FailbackPolicy
from rpcwheel.interceptors import FailbackQueues

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE

AUDIT = FailbackPolicy(retry_on="UNAVAILABLE", backoff=wait_fixed(60), default=(b"later",))
OTHERS = AUDIT.replace(retry_on="ALREADY_EXISTS")

TENANT = ContextVar("tenant", default=None)

each_world = ways("sync future", "aio unary")


@pytest.fixture
def open_channel(client, queues):
    """Makes channels with failback, and without retries unless set."""

    def open_channel(failback=AUDIT, **settings):
        given = {"retry": None, "failback": failback} | settings
        return client.open(queues=queues, **given)

    return open_channel


@pytest.fixture
def flush(client, queues):
    """Delivers the queued calls."""
    return lambda: client.world.do(queues.flush, WAIT_S)


def all_wait(queues) -> bool:
    """Whether no attempt runs."""
    entries = [entry for listed in queues.entries().values() for entry in listed]
    return all(entry.next_attempt_s is not None for entry in entries)


def is_default(answer) -> bool:
    return answer in (AUDIT.default, *AUDIT.default)


def test_a_failed_call_gets_the_default_and_is_delivered_later(
    shop, client, open_channel, queues, timer
):
    shop.then(Fail("UNAVAILABLE", "gone", (("k", "v"),)))
    metadata = (("id", "7"), ("authorization", "stale"))
    call = client.begin(open_channel(), timeout=WAIT_S, metadata=metadata)
    assert is_default(client.answer(call))
    assert call.code() is grpc.StatusCode.OK
    if client.style != "blocking":
        assert call.details() == "queued by failback after UNAVAILABLE: gone"
        assert tuple(call.ask("trailing_metadata")) == (("k", "v"), ("rpcwheel-answer", "failback"))
    assert (queues.pending, len(shop.calls)) == (1, 1)
    ((entry,),) = queues.entries().values()
    assert (entry.function, entry.attempts, entry.next_attempt_s) == (client.method, 1, 60.0)
    timer.advance(60.0)
    wait_until(lambda: queues.pending == 0)
    first, second = shop.calls
    assert second.requests == [b"x"]
    assert second.metadata["id"] == "7"
    assert "authorization" in first.metadata
    assert "authorization" not in second.metadata
    assert second.metadata["grpc-previous-rpc-attempts"] == "1"
    assert second.time_remaining <= 1.1 * WAIT_S
    assert queues.stats()["*"].redelivered == 1


@each_world
def test_a_delivery_that_the_server_cancels_is_repeated(shop, client, open_channel, queues, timer):
    """As a server that is being stopped may do; the caller of the first attempt sees it."""
    channel = open_channel()
    shop.then("CANCELLED")
    assert client.begin(channel).code() is grpc.StatusCode.CANCELLED
    shop.then("UNAVAILABLE", "CANCELLED")
    assert is_default(client.ask(channel))
    for attempts in (3, 4):
        wait_until(lambda: timer.pending == 1)
        timer.advance(60.0)
        wait_until(lambda attempts=attempts: len(shop.calls) == attempts)
        wait_until(lambda: all_wait(queues))
    wait_until(lambda: queues.pending == 0)


def test_requests_that_follow_the_failure_are_read_in_the_context_of_the_caller_and_sent(
    shop, client, open_channel, flush, set_limit
):
    set_limit("call.failed_calls.READ_TIMEOUT_S", WAIT_S)
    shop.then("UNAVAILABLE")
    gate, seen = threading.Event(), []

    def is_queued(_error):
        gate.set()
        return True

    def note(message):
        seen.append(TENANT.get())
        return message

    channel = open_channel(AUDIT.replace(retry_on=is_queued))
    requests = client.requests(b"a", b"b", b"c", gate=gate)
    if client.world.name == "sync":
        noted = map(note, requests)
    else:
        noted = (note(message) async for message in requests)
    token = TENANT.set("shop")
    call = client.begin(channel, requests=noted)
    TENANT.reset(token)
    assert is_default(client.answer(call))
    assert seen == ["shop"] * 3
    assert flush()
    assert shop.calls[1].requests == [b"a", b"b", b"c"]
    assert shop.calls[1].time_remaining < 61


def test_a_call_whose_deadline_has_passed_is_queued_with_the_requests_that_exist(
    shop, client, open_channel, flush, set_limit
):
    set_limit("call.failed_calls.LATE_READ_S", WAIT_S)
    channel = open_channel(AUDIT.replace(retry_on="DEADLINE_EXCEEDED"))
    with deadline_scope(0.0):
        assert is_default(client.ask(channel))
        assert is_default(client.ask(channel, requests=iter([b"a", b"b"])))
    assert flush()
    assert sorted(seen.requests for seen in shop.calls) == [[b"a", b"b"], [b"x"]]
    assert not any("grpc-previous-rpc-attempts" in seen.metadata for seen in shop.calls)


def test_requests_are_not_awaited_after_the_deadline(client, open_channel, queues):
    channel = open_channel(AUDIT.replace(retry_on="DEADLINE_EXCEEDED"))
    gate = threading.Event()
    with deadline_scope(0.0):
        error = client.refused(channel, requests=client.requests(b"a", gate=gate))
    gate.set()
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert not queues.pending


@each_world
def test_calls_are_not_given_up_while_the_circuit_breaker_is_open(
    shop, client, open_channel, queues, timer
):
    breaker = BreakerPolicy(window_calls=2, minimum_calls=2, open_duration=10.0, health_check=False)
    failback = AUDIT.replace(max_attempts=2, backoff=wait_fixed(1))
    channel = open_channel(failback, breaker=breaker, timer=timer)
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    for _ in range(3):
        assert is_default(client.ask(channel))
    wait_until(lambda: timer.pending == 4)  # with that of the breaker
    for _ in range(9):
        timer.advance(1)
        wait_until(lambda: queues.entries() and all_wait(queues))
    assert (queues.pending, len(shop.calls)) == (3, 2)
    while queues.pending:
        timer.advance(1)
        wait_until(lambda: all_wait(queues))
    assert queues.stats()["*"].redelivered == 3
    assert len(shop.calls) == 5
    assert {seen.metadata["grpc-previous-rpc-attempts"] for seen in shop.calls[2:]} == {"1"}


def test_failback_delivers_the_request_as_it_was_when_the_call_began(
    shop, client, open_channel, flush
):
    shop.then("UNAVAILABLE")
    message = StringValue(value="as it was")
    call = client.begin(open_channel(), message, serializer=StringValue.SerializeToString)
    wait_until(call.done if client.style == "blocking" else lambda: shop.calls)
    message.value = "changed"
    client.answer(call)
    assert flush()
    assert StringValue.FromString(shop.calls[1].requests[0]).value == "as it was"


# --- What is not queued ---


def broken(error):
    raise RuntimeError("no idea")


def test_an_error_that_is_not_queued_is_the_callers_and_no_request_is_read_for_it(
    shop, client, open_channel, queues, events
):
    for failback in (OTHERS, AUDIT.replace(max_attempts=1), FailbackPolicy(retry_on=broken)):
        shop.then("UNAVAILABLE", "UNAVAILABLE")
        channel, gate = open_channel(failback), threading.Event()
        assert client.refused(channel).code() is UNAVAILABLE
        error = client.refused(channel, requests=client.requests(b"a", gate=gate))
        gate.set()
        assert error.code() is UNAVAILABLE
        assert not hasattr(error, "__notes__")  # else it was gathered, and not known to its end
    assert queues.pending == 0
    wait_until(lambda: [type(event) for event in events] == [CallbackFailed] * 2)


@ways("sync future", "sync stream", "aio unary", "aio stream")
def test_failback_waits_at_most_its_limit_for_the_end_of_a_request_stream(
    shop, client, open_channel, queues, set_limit
):
    """If the requests do not end, the caller gets the failure."""
    set_limit("call.failed_calls.READ_TIMEOUT_S", 0.05)
    shop.then("UNAVAILABLE")
    gate = threading.Event()
    error = client.refused(open_channel(), requests=client.requests(b"a", gate=gate))
    gate.set()
    assert error.code() is UNAVAILABLE
    assert not queues.pending


@each_world
def test_a_call_whose_request_stream_exceeds_the_buffer_is_not_queued(
    shop, client, open_channel, queues
):
    shop.then("UNAVAILABLE")
    big = iter([b"x" * 600_000] * 2)
    assert client.refused(open_channel(), requests=big).code() is UNAVAILABLE
    assert not queues.pending


@each_world
def test_a_call_that_the_caller_canceled_is_not_queued(shop, client, open_channel, queues):
    shop.then(hang := Hang())
    retry = RETRY.replace(retry_on={"CANCELLED", "UNAVAILABLE"})
    call = client.begin(open_channel(AUDIT.replace(retry_on="CANCELLED"), retry=retry))
    assert hang.begun.wait(WAIT_S)
    call.cancel()
    with pytest.raises(client.world.canceled_error):
        call.result()
    assert not queues.pending
    assert len(shop.calls) == 1


@held
def test_a_call_dropped_by_a_full_queue_says_so_in_its_details(shop, client, open_channel):
    channel = open_channel(AUDIT.replace(max_pending=1, overflow="drop"))
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    client.ask(channel)
    call = client.begin(channel)
    assert is_default(client.answer(call))
    assert call.code() is grpc.StatusCode.OK
    assert call.details().startswith("dropped by failback after UNAVAILABLE: scripted")
    assert tuple(call.ask("trailing_metadata"))[-1] == ("rpcwheel-answer", "failback-dropped")


def test_a_call_that_cannot_be_queued_fails_with_an_rpc_error(shop, client, open_channel, queues):
    client.world.do(queues.close)
    shop.then(Fail("UNAVAILABLE", "gone", (("k", "v"),)))
    call = client.begin(open_channel())
    error = call.error()
    check_closed(error)
    assert error.__cause__.code() is UNAVAILABLE
    assert call.code() is UNAVAILABLE


def check_closed(error) -> None:
    assert isinstance(error, FailbackClosed)
    assert error.code() is UNAVAILABLE
    assert ("k", "v") in tuple(error.trailing_metadata())
    assert str(error) == error.details()
    assert "was not queued" in str(error)


@ways("sync blocking")
def test_outer_interceptors_of_grpc_see_a_call_that_cannot_be_queued_fail(
    shop, client, open_channel, queues
):
    codes = []

    def note(continuation, details, request):
        call = continuation(details, request)
        codes.append(call.code())
        return call

    queues.close()
    shop.then(Fail("UNAVAILABLE", "gone", (("k", "v"),)))
    channel = grpc.intercept_channel(open_channel(), interceptor(note))
    check_closed(client.refused(channel))
    assert codes == [UNAVAILABLE]


# --- Queues ---


def test_a_policy_has_one_queue_with_its_name_or_its_pattern(timer):
    named, other = AUDIT.replace(name="audit"), AUDIT.replace()
    with FailbackQueues(timer) as queues:
        one = queues.queue_for(named, "/a/*")
        assert queues.queue_for(named, "/b/*") is one
        assert queues.queue_for(other, "/a/*") is queues.queue_for(other, "/b/*") is not one
        queues.queue_for(AUDIT.replace(), "/a/*")  # equal, but another
        assert list(queues.stats()) == ["audit", "/a/*", "/a/* (2)"]


@each_world
def test_a_queue_has_the_first_pattern_of_its_policy_whichever_call_fails_first(
    shop, client, open_channel, queues
):
    twice = AUDIT.replace()
    methods = {
        "/test.Shop/*Stream": MethodPolicy(failback=twice),
        "/test.Shop/Stream*": MethodPolicy(failback=twice),
        UNARY_UNARY: MethodPolicy(idempotent=True),
    }
    channel = open_channel(methods=methods)
    shop.then(*["UNAVAILABLE"] * 3)
    for kind in ("stream_unary", "unary_stream", "unary_unary"):
        client.world.call(channel, kind).result()
    queued = {name: stats.queued_total for name, stats in queues.stats().items()}
    assert queued == {"/test.Shop/*Stream": 2, "*": 1}


@each_world
def test_close_returns_the_calls_that_were_not_delivered(shop, client, open_channel, queues):
    shop.then(*["UNAVAILABLE"] * 2)
    client.ask(open_channel())
    client.world.call(open_channel(AUDIT.replace(name="b")), "stream_unary", b"y").result()
    assert queues.pending == 2
    assert repr(queues) == "<FailbackQueues ['*', 'b'] pending=2>"
    assert {name: len(queued) for name, queued in queues.entries().items()} == {"*": 1, "b": 1}
    failed = client.world.do(queues.close, drain_timeout=0)
    assert [(call.function, call.args) for call in failed] == [
        (UNARY_UNARY, (b"x",)),
        (STREAM_UNARY, (b"y",)),
    ]
    assert client.world.do(queues.close) == []


@each_world
def test_close_inside_a_hook_of_one_queue_closes_none(
    shop, client, open_channel, queues, timer, events
):
    hook = in_world(client.world, lambda _: queues.close())
    shop.then(*["UNAVAILABLE"] * 3)
    client.ask(channel := open_channel())  # its queue would be closed first
    one_more = {"max_attempts": 2, "backoff": wait_fixed(1), "dead_letter": hook}
    client.ask(open_channel(AUDIT.replace(**one_more)))
    timer.advance(1)
    wait_until(lambda: events.of(DeadLetterFailed))
    assert "close() inside an attempt of this queue" in str(events.of(DeadLetterFailed)[0].error)
    wait_until(lambda: queues.pending == 1)
    shop.then(*["UNAVAILABLE"] * 2)
    assert is_default(client.ask(channel))
    assert is_default(client.ask(open_channel(AUDIT.replace(name="made after that"))))
    timer.advance(60)
    wait_until(lambda: queues.pending == 0)
    assert queues.stats()["*"].redelivered == 2


@each_world
def test_flush_delivers_the_calls_of_all_queues(shop, client, open_channel, queues, flush):
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    client.ask(open_channel(), b"x")
    client.ask(open_channel(AUDIT.replace()), b"y")
    assert flush()
    assert queues.pending == 0
    assert {seen.requests[0] for seen in shop.calls[2:]} == {b"x", b"y"}


@each_world
def test_a_queue_that_is_created_after_the_end_of_a_with_statement_is_closed(client, queues):
    end = queues.__exit__ if client.world.name == "sync" else queues.__aexit__
    client.world.do(end, None, None, None)
    queue = queues.queue_for(AUDIT.replace(retry_on=ConnectionError), "/a/B")
    with pytest.raises(FailbackClosed):
        client.world.do(queue.enqueue, ConnectionError("gone"), asyncio.sleep)


@held
def test_a_queued_call_whose_channel_was_closed_is_given_up_with_a_reason(
    shop, client, open_channel, queues, flush, events
):
    shop.then("UNAVAILABLE")
    received = []
    channel = open_channel(AUDIT.replace(dead_letter=received.append))
    client.ask(channel)
    client.world.do(channel.close)
    assert flush()
    assert client.world.do(queues.close) == []
    wait_until(lambda: events.of(FailbackGaveUp))
    (gave_up,) = events.of(FailbackGaveUp)
    assert [failed.reason for failed in received] == [gave_up.reason]
    assert gave_up.reason.startswith("its channel was closed;")


# --- Only `grpc` ---


@ways("sync future")
def test_flush_of_several_queues_can_be_interrupted(shop, client, open_channel, queues):
    channel = open_channel(methods={UNARY_STREAM: {"failback": AUDIT.replace(name="other")}})
    shop.then(*["UNAVAILABLE"] * 4)
    client.world.call(channel).result()
    client.world.call(channel, "unary_stream").result()

    def interrupt():  # when both retries are on their way, or have failed
        wait_until(lambda: len(shop.calls) >= 4)
        ctrl_c.send()

    with Interrupt() as ctrl_c, ThreadPoolExecutor(1) as threads:
        threads.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            queues.flush()  # the retries fail too, so flush would never end
    assert queues.pending == 2


@ways("sync future")
def test_close_drains_all_queues_at_the_same_time(shop, client, open_channel, queues):
    kinds = ("unary_unary", "stream_unary", "unary_stream")
    hangs = [Hang() for _ in kinds]
    shop.then(*["UNAVAILABLE"] * 3, *hangs)
    for kind in kinds:
        client.world.call(open_channel(AUDIT.replace()), kind).result()

    def release():
        if all(hang.begun.wait(WAIT_S) for hang in hangs):
            for seen in shop.calls:
                seen.ended.set()  # the server answers

    releasing = in_thread(release)
    assert queues.close(drain_timeout=WAIT_S) == []
    releasing.result(WAIT_S)


# --- Only `grpc.aio` ---


async def test_failback_waits_until_the_deadline_for_the_end_of_the_requests(shop, own):
    async def endless():
        yield b"a"
        await asyncio.Event().wait()

    shop.then("UNAVAILABLE", "UNAVAILABLE")
    channel = own.retrying(retry=None, failback=AUDIT, timeout=0.4)
    for requests in (endless(), None):
        await refused(channel.stream_unary(STREAM_UNARY)(requests))
