"""Failback of `grpc.aio`: the caller gets a default, the call is delivered later."""

import asyncio
import itertools

import grpc
import pytest

from fixtures.aio_policy_channels import PAIRED, answer_of, begin, refused, sent
from fixtures.failback_queues import FlakyCoroutine
from fixtures.shop import (
    STREAM_UNARY,
    UNARY_UNARY,
    Fail,
    Hang,
)
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel.call import CallPolicy, RetryPolicy, deadline_scope
from rpcwheel.errors import FailbackClosed, FailbackFull
from rpcwheel.events import CallbackFailed, FailbackGaveUp
from rpcwheel.failback import FailbackPolicy
from rpcwheel.interceptors import aio
from rpcwheel.interceptors.aio import FailbackQueues

LATER = FailbackPolicy(retry_on="UNAVAILABLE", backoff=30.0, default=(b"later",))


@pytest.fixture
async def queues(timer):
    queues = FailbackQueues(timer)
    yield queues
    await queues.close(0)


@pytest.mark.parametrize(("kind", "channels"), PAIRED, indirect=["channels"])
async def test_a_failed_call_gets_the_default_and_is_redelivered(shop, channels, queues, kind):
    shop.then(Fail("UNAVAILABLE", "gone", (("k", "v"),)))
    channel = channels.retrying(retry=None, failback=LATER, queues=queues)
    call = begin(channel, kind, b"a", b"b", metadata=(("id", "7"),))
    assert await answer_of(call, kind) == [b"later"]
    assert await call.code() is grpc.StatusCode.OK
    assert await call.details() == "queued by failback after UNAVAILABLE: gone"
    assert tuple(await call.trailing_metadata()) == (("k", "v"), ("rpcwheel-answer", "failback"))
    assert queues.pending == 1
    assert await queues.flush(WAIT_S)
    assert b"".join(shop.calls[-1].requests) == b"ab"
    assert shop.calls[-1].metadata["id"] == "7"
    assert shop.calls[-1].metadata["grpc-previous-rpc-attempts"] == "1"
    assert 1.1 * WAIT_S < shop.calls[-1].time_remaining < 61
    assert queues.stats()["*"].redelivered == 1


async def test_a_redelivery_that_fails_is_retried(shop, own, queues, timer):
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    channel = own.retrying(retry=None, failback=LATER, queues=queues)
    await channel.unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S)
    timer.advance(30.0)
    await aio_wait_until(lambda: len(shop.calls) == 2 and timer.pending == 1)
    timer.advance(60.0)
    await aio_wait_until(lambda: queues.pending == 0)
    previous = [seen.metadata.get("grpc-previous-rpc-attempts") for seen in shop.calls]
    assert previous == [None, "1", "2"]
    assert shop.calls[-1].time_remaining < 1.1 * WAIT_S


async def test_failback_waits_at_most_its_limit_for_the_end_of_a_request_stream(
    shop, own, queues, monkeypatch
):
    """Or until the deadline. If the requests do not end, the caller gets the failure."""

    async def endless():
        yield b"a"
        await asyncio.Event().wait()

    shop.then(*["UNAVAILABLE"] * 3)
    soon = own.retrying(retry=None, failback=LATER, timeout=0.4, queues=queues)
    await refused(soon.stream_unary(STREAM_UNARY)(endless()))
    monkeypatch.setattr("rpcwheel.call.aio_call.READ_TIMEOUT_S", 0.05)
    channel = own.retrying(retry=None, failback=LATER, queues=queues)
    for requests in (None, endless()):
        await refused(channel.stream_unary(STREAM_UNARY)(requests))
    assert not queues.pending


OTHERS = FailbackPolicy(retry_on="ALREADY_EXISTS", backoff=30.0)


async def blocked_requests():
    yield b"a"
    await asyncio.Event().wait()


NOT_ALL_KNOWN = {
    "asynchronous iterator": blocked_requests,
    "iterator": lambda: itertools.repeat(b"a"),
    "written": lambda: None,
}
"""Request streams that do not end."""


@pytest.mark.parametrize("requests", NOT_ALL_KNOWN.values(), ids=NOT_ALL_KNOWN)
@pytest.mark.parametrize("failback", [OTHERS, LATER.model_copy(update={"max_attempts": 1})])
async def test_the_request_stream_is_not_read_on_for_an_error_that_is_not_queued(
    shop, channels, queues, requests, failback
):
    shop.then("UNAVAILABLE")
    channel = channels.retrying(retry=None, failback=failback, queues=queues)
    call = channel.stream_unary(STREAM_UNARY)(requests())
    error = await refused(call)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert not hasattr(error, "__notes__")  # else it was gathered, and not known to its end
    if requests() is None:
        with pytest.raises(asyncio.InvalidStateError):
            await call.write(b"late")


async def test_a_predicate_is_called_before_the_request_stream_is_read_on(
    shop, own, queues, events
):
    def broken(error):
        raise RuntimeError("no idea")

    shop.then("UNAVAILABLE")
    channel = own.retrying(retry=None, failback=FailbackPolicy(retry_on=broken), queues=queues)
    error = await refused(channel.stream_unary(STREAM_UNARY)(blocked_requests()))
    assert not hasattr(error, "__notes__")
    await aio_wait_until(lambda: events)
    assert [type(event) for event in events] == [CallbackFailed]


@pytest.mark.parametrize(("kind", "channels"), PAIRED, indirect=["channels"])
async def test_a_call_that_begins_after_its_deadline_is_queued(shop, channels, queues, kind):
    failback = LATER.model_copy(update={"retry_on": "DEADLINE_EXCEEDED"})
    channel = channels.retrying(failback=failback, queues=queues)
    with deadline_scope(0.0):
        call = begin(channel, kind)
    assert await answer_of(call, kind) == [b"later"]
    assert queues.pending == 1
    assert await queues.flush(WAIT_S)
    (seen,) = shop.calls
    assert b"".join(seen.requests) == b"x"
    assert "grpc-previous-rpc-attempts" not in seen.metadata


@pytest.mark.parametrize(("kind", "channels"), PAIRED, indirect=["channels"])
async def test_a_call_that_cannot_be_queued_fails_with_an_rpc_error(shop, channels, queues, kind):
    await queues.close()
    shop.then(Fail("UNAVAILABLE", "gone", (("k", "v"),)))
    call = begin(channels.retrying(retry=None, failback=LATER, queues=queues), kind)
    error = await refused(answer_of(call, kind))
    assert isinstance(error, FailbackClosed)
    assert error.code() is await call.code() is grpc.StatusCode.UNAVAILABLE
    assert error.trailing_metadata()["k"] == "v"
    assert str(error) == await call.details()
    assert "was not queued" in str(error)


async def test_authorization_metadata_is_not_sent_again(shop, own, queues):
    shop.then("UNAVAILABLE")
    channel = own.retrying(retry=None, failback=LATER, queues=queues)
    await channel.unary_unary(UNARY_UNARY)(b"x", metadata=(("authorization", "old"), ("k", "v")))
    assert await queues.flush(WAIT_S)
    first, second = shop.calls
    assert "authorization" in first.metadata
    assert "authorization" not in second.metadata
    assert second.metadata["k"] == "v"


async def test_a_call_is_queued_after_its_retries(shop, own, queues):
    shop.then(*["UNAVAILABLE"] * 3)
    channel = own.retrying(failback=LATER, queues=queues)
    await channel.unary_unary(UNARY_UNARY)(b"x")
    assert (len(shop.calls), queues.pending) == (3, 1)


async def test_the_whole_request_stream_is_sent_again(shop, own, queues):
    shop.kill()
    channel = own.retrying(retry=None, failback=LATER, queues=queues)
    assert await channel.stream_unary(STREAM_UNARY)(sent(b"a", b"b")) == (b"later",)
    shop.start()
    await aio_wait_until(
        lambda: channel.get_state() is not grpc.ChannelConnectivity.TRANSIENT_FAILURE
    )
    await queues.flush(WAIT_S)
    assert shop.calls[-1].requests == [b"a", b"b"]


async def test_a_call_whose_request_stream_exceeds_the_buffer_is_not_queued(shop, own, queues):
    shop.then("UNAVAILABLE")
    big = [b"x" * 600_000] * 2
    channel = own.retrying(retry=None, failback=LATER, queues=queues)
    error = await refused(channel.stream_unary(STREAM_UNARY)(sent(*big)))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert not queues.pending


async def test_an_error_that_retry_on_does_not_name_is_the_callers(shop, own, queues):
    shop.then("NOT_FOUND")
    channel = own.retrying(failback=LATER, queues=queues)
    error = await refused(channel.unary_unary(UNARY_UNARY)(b"x"))
    assert error.code() is grpc.StatusCode.NOT_FOUND


async def test_a_full_queue_raises_failback_full(shop, own, queues):
    full = LATER.model_copy(update={"max_pending": 1})
    member = own.retrying(retry=None, failback=full, queues=queues).unary_unary(UNARY_UNARY)
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    await member(b"x")
    call = member(b"y")
    with pytest.raises(FailbackFull) as caught:
        await call
    assert isinstance(caught.value.__cause__, grpc.aio.AioRpcError)
    assert await call.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_call_dropped_by_a_full_queue_says_so_in_its_details(shop, own, queues):
    full = LATER.model_copy(update={"max_pending": 1, "overflow": "drop"})
    push = own.retrying(retry=None, failback=full, queues=queues).unary_unary(UNARY_UNARY)
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    await push(b"x")
    call = push(b"y")
    assert await call == full.default
    assert (await call.details()).startswith("dropped by failback after UNAVAILABLE: scripted")
    assert tuple(await call.trailing_metadata())[-1] == ("rpcwheel-answer", "failback-dropped")


async def test_a_predicate_that_raises_leaves_the_error_unchanged(shop, own, queues, events):
    shop.then("NOT_FOUND")
    broken = FailbackPolicy(retry_on=lambda _: 1 / 0)
    channel = own.retrying(failback=broken, queues=queues)
    error = await refused(channel.unary_unary(UNARY_UNARY)(b"x"))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    await aio_wait_until(lambda: CallbackFailed in map(type, events))


async def test_a_call_that_the_caller_canceled_is_not_queued(shop, own, queues):
    shop.then(hang := Hang())
    cancelled = FailbackPolicy(retry_on="CANCELLED")
    retry = RetryPolicy(retry_on={"CANCELLED", "UNAVAILABLE"})
    channel = own.retrying(failback=cancelled, retry=retry, queues=queues)
    call = channel.unary_unary(UNARY_UNARY)(b"x")
    await aio_wait_until(hang.begun.is_set)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not queues.pending
    assert len(shop.calls) == 1


async def test_a_request_is_kept_as_it_was_when_the_call_failed(shop, own, queues):
    shop.then("UNAVAILABLE")
    channel = own.retrying(retry=None, failback=LATER, queues=queues)
    member = channel.unary_unary(UNARY_UNARY, request_serializer=b"".join)
    await member(request := [b"a"])
    request.append(b"b")
    assert await queues.flush(WAIT_S)
    assert shop.calls[-1].requests == [b"a"]


# --- Queues ---


GONE = ConnectionError("gone")


def policy(**settings):
    return FailbackPolicy(**{"retry_on": ConnectionError, "backoff": 30.0} | settings)


async def test_entries_and_flush_cover_all_queues(timer):
    async with aio.FailbackQueues(timer) as queues:
        function = FlakyCoroutine()
        for one in (policy(), policy()):
            assert queues.queue_for(one, "/a/B").enqueue(GONE, function)
        assert repr(queues) == "<FailbackQueues ['/a/B', '/a/B (2)'] pending=2>"
        entries = queues.entries()
        assert [(name, len(queued)) for name, queued in entries.items()] == [
            ("/a/B", 1),
            ("/a/B (2)", 1),
        ]
        assert await queues.flush(WAIT_S)
        assert (queues.pending, len(function.calls)) == (0, 2)


async def test_close_returns_the_calls_that_were_not_delivered(timer):
    queues = aio.FailbackQueues(timer)
    for one in (policy(), policy()):
        queues.queue_for(one, "/a/B").enqueue(GONE, FlakyCoroutine(*[GONE] * 4))
    assert len(await queues.close(0)) == 2
    assert await queues.close() == []


async def test_a_queue_that_is_created_after_close_is_closed(timer):
    queues = aio.FailbackQueues(timer)
    await queues.close()
    with pytest.raises(FailbackClosed):
        queues.queue_for(policy(), "/a/B").enqueue(GONE, FlakyCoroutine())


async def test_a_queued_call_whose_channel_was_closed_is_given_up_with_a_reason(
    shop, timer, events
):
    shop.then("UNAVAILABLE")
    async with aio.FailbackQueues(timer) as queues, grpc.aio.insecure_channel(shop.target) as bare:
        channel = aio.intercept_channel(
            bare, CallPolicy(failback=policy(retry_on="UNAVAILABLE")), queues=queues
        )
        await channel.unary_unary(UNARY_UNARY)(b"x")
        await bare.close()
        assert await queues.flush(WAIT_S)
        assert await queues.close() == []
    (event,) = [event for event in events if isinstance(event, FailbackGaveUp)]
    assert event.reason.startswith("its channel was closed;")


async def test_a_call_whose_channel_is_closed_during_an_attempt_is_given_up_with_a_reason(
    shop, timer, events
):
    hang = Hang()
    shop.then("UNAVAILABLE", hang)
    async with aio.FailbackQueues(timer) as queues, grpc.aio.insecure_channel(shop.target) as bare:
        channel = aio.intercept_channel(
            bare, CallPolicy(failback=policy(retry_on="UNAVAILABLE")), queues=queues
        )
        await channel.unary_unary(UNARY_UNARY)(b"x")
        timer.advance(60)
        assert await asyncio.to_thread(hang.begun.wait, WAIT_S)
        await bare.close()
        assert await queues.flush(WAIT_S)
    (event,) = [event for event in events if isinstance(event, FailbackGaveUp)]
    assert event.reason.startswith("its attempt was cancelled")
