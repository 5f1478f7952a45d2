"""Calls of `grpc.aio` with policies: retries, deadlines, default responses, what ends meanwhile.

Rules of the adapters run with both APIs (`channels`), the others with one (`own`).
"""

import asyncio
import threading

import grpc
import pytest

from fixtures.aio_policy_channels import PAIRED, answer_of, begin, read_all, refused
from fixtures.shop import (
    STREAM_STREAM,
    UNARY_STREAM,
    UNARY_UNARY,
    Fail,
    Hang,
    Silent,
)
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel.call import DeadlinePolicy, DefaultResponsePolicy, RetryPolicy, deadline_scope
from rpcwheel.call.config import call_options
from rpcwheel.events import (
    CallbackFailed,
    CallSlow,
    DefaultResponseUsed,
    RetryScheduled,
    RetryStopped,
    StreamStalled,
)
from rpcwheel.timer import WheelTimer

NO_CONNECTION = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: refused"


async def test_attempts_carry_the_number_of_previous_attempts(shop, channels):
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    call = channels.retrying().unary_unary(UNARY_UNARY)(b"x", metadata=(("k", "v"),))
    assert await call == b"x"
    previous = [seen.metadata.get("grpc-previous-rpc-attempts") for seen in shop.calls]
    assert previous == [None, "1", "2"]
    assert [seen.metadata["k"] for seen in shop.calls] == ["v"] * 3


async def test_a_call_is_not_retried_after_its_deadline(shop, own, timer):
    """A backoff that would exceed it is not begun; each attempt has the remaining time."""
    shop.then(*["UNAVAILABLE"] * 4)
    retry = RetryPolicy(retry_on="UNAVAILABLE", backoff=40.0, max_attempts=9, retry_budget=None)
    member = own.retrying(timer=timer, retry=retry).unary_unary(UNARY_UNARY)
    call = member(b"x", timeout=100.0)
    for _ in range(2):
        await aio_wait_until(lambda: timer.pending)
        timer.advance(40.0)
    error = await refused(call)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    left = [seen.time_remaining for seen in shop.calls]
    assert len(left) == 3
    assert all(one <= limit for one, limit in zip(left, (101.0, 61.0, 21.0), strict=True))


class NotesWaitForReady(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self) -> None:
        self.noted = []

    async def intercept_unary_unary(self, continuation, details, request):
        self.noted.append(details.wait_for_ready)
        return await continuation(details, request)


async def test_wait_for_ready_of_the_policy_applies_to_calls_that_do_not_set_it(shop, channels):
    for settings in ({}, {"retry": None}):
        notes = NotesWaitForReady()
        channel = channels.retrying(wait_for_ready=True, inner=[notes], **settings)
        call = channel.unary_unary(UNARY_UNARY)
        await call(b"x")
        await call(b"x", wait_for_ready=False)
        assert notes.noted == [True, False]


async def test_call_options_apply_to_the_calls_begun_inside(shop, channels):
    call = channels.retrying().unary_unary(UNARY_UNARY)
    shop.then("UNAVAILABLE")
    with call_options(retry=None):
        assert (await refused(call(b"x"))).code() is grpc.StatusCode.UNAVAILABLE
    shop.then("UNAVAILABLE")
    assert await call(b"x") == b"x"
    assert len(shop.calls) == 3


async def test_an_attempt_may_have_its_own_timeout(shop, own):
    shop.then(Hang())
    retry = RetryPolicy(
        retry_on="UNAVAILABLE",
        backoff=0.0,
        max_attempts=100,
        attempt_timeout=0.3,
        retry_budget=None,
    )
    member = own.retrying(retry=retry).unary_unary(UNARY_UNARY)
    assert await member(b"x", timeout=2 * WAIT_S) == b"x"
    assert all(seen.time_remaining < 1 for seen in shop.calls)


async def test_a_retry_waits_for_the_pushback_of_the_server(shop, own, timer):
    shop.then(Fail("UNAVAILABLE", trailing=(("grpc-retry-pushback-ms", "3000"),)))
    call = own.retrying(timer=timer).unary_unary(UNARY_UNARY)(b"x")
    await aio_wait_until(lambda: timer.pending)
    timer.advance(2.9)
    assert timer.pending
    timer.advance(0.1)
    assert await call == b"x"


async def test_a_negative_pushback_of_the_server_forbids_the_retry(shop, own, events):
    shop.then(Fail("UNAVAILABLE", trailing=(("grpc-retry-pushback-ms", "-1"),)))
    await refused(own.retrying().unary_unary(UNARY_UNARY)(b"x"))
    assert len(shop.calls) == 1
    await aio_wait_until(lambda: events)
    assert [type(event) for event in events] == [RetryStopped]


async def test_a_pushback_above_max_pushback_ends_the_call_at_once(shop, own, timer, events):
    shop.then(Fail("UNAVAILABLE", trailing=(("grpc-retry-pushback-ms", "999999999999"),)))
    await refused(own.retrying(timer=timer).unary_unary(UNARY_UNARY)(b"x"))
    assert (len(shop.calls), timer.pending) == (1, 0)
    await aio_wait_until(lambda: events)
    assert "longer than max_pushback (300 s)" in events[0].reason


async def test_the_retry_budget_limits_retries_to_a_failing_server(shop, own):
    shop.then(*["UNAVAILABLE"] * 400)
    retry = RetryPolicy(retry_on="UNAVAILABLE", backoff=0.0, retry_budget=0.2, min_retries=0)
    member = own.retrying(retry=retry).unary_unary(UNARY_UNARY)
    for _ in range(200):
        await refused(member(b"x"))
    assert 200 < len(shop.calls) <= 240


@pytest.mark.parametrize(("kind", "channels"), PAIRED, indirect=["channels"])
async def test_a_method_that_is_not_idempotent_is_not_retried(shop, channels, kind):
    """Also if its details are those of gRPC without a connection."""
    shop.then(Fail("UNAVAILABLE", NO_CONNECTION))
    call = begin(channels.retrying(idempotent=False), kind)
    error = await refused(answer_of(call, kind))
    assert error.details() == NO_CONNECTION
    assert len(shop.calls) == 1


async def test_a_refused_connection_is_retried_for_idempotent_methods_only(shop, own, events):
    shop.kill()
    for idempotent in (False, True):
        channel = own.retrying(idempotent=idempotent)
        await refused(channel.unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S))
    shop.start()
    kinds = [RetryStopped, RetryScheduled, RetryScheduled, RetryStopped]
    await aio_wait_until(lambda: len(events) == len(kinds))
    assert [type(event) for event in events] == kinds


async def test_a_call_that_is_not_awaited_is_retried(shop, own):
    async def done_callback(call):
        ended = asyncio.Event()
        call.add_done_callback(lambda _: ended.set())
        await ended.wait()

    for ask in (
        lambda call: call.code(),
        lambda call: call.details(),
        lambda call: call.trailing_metadata(),
        lambda call: aio_wait_until(call.done),
        done_callback,
    ):
        shop.reset()
        shop.then("UNAVAILABLE")
        call = own.retrying().unary_unary(UNARY_UNARY)(b"x")
        await ask(call)
        assert len(shop.calls) == 2
        assert await call.code() is grpc.StatusCode.OK


async def test_calls_made_in_a_scope_share_its_deadline(shop, own):
    with deadline_scope(WAIT_S):
        await own.retrying().unary_unary(UNARY_UNARY)(b"x", timeout=70.0)
    assert shop.calls[0].time_remaining < 1.1 * WAIT_S


async def test_a_call_whose_deadline_has_passed_is_not_sent(shop, channels):
    for settings in (
        {},
        {"default_response": DefaultResponsePolicy(on="UNAVAILABLE", default=b"safe")},
    ):
        channel = channels.retrying(**settings)
        with deadline_scope(0.0):
            call = channel.unary_unary(UNARY_UNARY)(b"x")
        error = await refused(call)
        assert error.code() is await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert error.details() == "Deadline Exceeded before the call began: its deadline has passed"
    assert not shop.calls


async def test_several_tasks_may_await_one_call(shop, own):
    shop.then("UNAVAILABLE")
    call = own.retrying().unary_unary(UNARY_UNARY)(b"x")
    assert await asyncio.gather(*(asyncio.wait_for(call, 9) for _ in range(3))) == [b"x"] * 3


async def test_a_slow_call_is_reported_while_it_runs(shop, channels, timer, events):
    shop.then(hang := Hang())
    deadline = DeadlinePolicy(slow_call_threshold=1.0)
    call = channels.retrying(timer=timer, timeout=deadline).unary_unary(UNARY_UNARY)(b"x")
    await aio_wait_until(hang.begun.is_set)
    timer.advance(1.0)
    await aio_wait_until(lambda: events)
    assert events == [CallSlow(UNARY_UNARY, "client", 1.0)]
    call.cancel()
    await aio_wait_until(call.done)
    assert not timer.pending


async def test_a_call_that_has_ended_is_not_reported_as_slow(shop, channels, timer):
    deadline = DeadlinePolicy(slow_call_threshold=1.0)
    channel = channels.retrying(timer=timer, timeout=deadline)
    await channel.unary_unary(UNARY_UNARY)(b"x")
    assert await read_all(channel.unary_stream(UNARY_STREAM)(b"xy")) == [b"x", b"y"]
    assert not timer.pending


# --- Response streams ---


@pytest.mark.parametrize("read", ["iterate", "read"])
async def test_a_stream_is_not_retried_after_its_first_message(shop, own, read):
    shop.then(Fail("UNAVAILABLE", after=1))
    call = own.retrying().unary_stream(UNARY_STREAM)(b"xyz")
    messages = call if read == "iterate" else reads(call)
    assert await anext(aiter(messages)) == b"x"
    await refused(anext(aiter(messages)))
    assert len(shop.calls) == 1


async def reads(call):
    while (message := await call.read()) is not grpc.aio.EOF:
        yield message


@pytest.mark.parametrize("read", ["iterate", "read"])
async def test_message_timeout_ends_a_stalled_stream_with_deadline_exceeded(
    shop, own, events, timer, read
):
    shop.then(silent := Silent(after=1))
    deadline = DeadlinePolicy(message_timeout=2.0)
    call = own.retrying(timer=timer, timeout=deadline).unary_stream(UNARY_STREAM)(b"xyz")
    messages = call.__aiter__() if read == "iterate" else reads(call)
    assert await anext(messages) == b"x"
    await aio_wait_until(silent.begun.is_set)
    assert not timer.pending  # no caller waits for a message
    waiting = asyncio.ensure_future(anext(messages))
    await aio_wait_until(lambda: timer.pending)
    timer.advance(2.0)
    error = await refused(waiting)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert error.details() == "no message for 2 s (message_timeout)"
    assert await call.code() is error.code()
    await aio_wait_until(shop.calls[0].ended.is_set)
    await aio_wait_until(lambda: StreamStalled(UNARY_STREAM, 2.0) in events)


async def test_a_stream_that_stalls_before_its_first_message_is_retried(shop, own, timer):
    shop.then(Silent())
    retry = RetryPolicy(retry_on="DEADLINE_EXCEEDED", backoff=0.0)
    deadline = DeadlinePolicy(message_timeout=2.0)
    channel = own.retrying(timer=timer, timeout=deadline, retry=retry)
    waiting = asyncio.ensure_future(read_all(channel.unary_stream(UNARY_STREAM)(b"xy")))
    await aio_wait_until(lambda: timer.pending and shop.calls)
    timer.advance(2.0)
    assert await waiting == [b"x", b"y"]
    assert len(shop.calls) == 2


async def test_a_message_that_arrives_just_before_message_timeout_is_received(shop, own, timer):
    going = DeadlinePolicy(message_timeout=2.0)
    call = own.retrying(timer=timer, timeout=going).stream_stream(STREAM_STREAM)()
    await call.write(b"a")
    assert await call.read() == b"a"
    reading = asyncio.ensure_future(call.read())
    await aio_wait_until(lambda: timer.pending)
    await call.write(b"b")
    await aio_wait_until(reading.done)
    timer.advance(2.0)  # no caller waits now
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF


async def test_read_and_iteration_can_not_be_mixed(channels):
    call = channels.retrying().unary_stream(UNARY_STREAM)(b"xy")
    assert await call.read() == b"x"
    if channels.name == "channel":  # grpc.aio's own call round ours lets it pass
        with pytest.raises(grpc.aio.UsageError):
            aiter(call)
    assert await call.read() == b"y"
    assert await call.read() is grpc.aio.EOF


# --- Default responses ---


@pytest.mark.parametrize(("kind", "channels"), PAIRED, indirect=["channels"])
async def test_a_failed_call_ends_with_the_default_response(shop, channels, events, kind):
    shop.then(Fail("NOT_FOUND", "gone", (("k", "v"),)))
    default_response = DefaultResponsePolicy(on="NOT_FOUND", default=(b"1", b"2"))
    call = begin(channels.retrying(default_response=default_response), kind)
    assert await answer_of(call, kind) == [b"1", b"2"]
    assert await call.code() is grpc.StatusCode.OK
    assert await call.details() == "default response after NOT_FOUND: gone"
    assert tuple(await call.trailing_metadata()) == (
        ("k", "v"),
        ("rpcwheel-answer", "default-response"),
    )
    await aio_wait_until(lambda: events)
    assert [type(event) for event in events] == [DefaultResponseUsed]


@pytest.mark.parametrize(("kind", "channels"), PAIRED, indirect=["channels"])
async def test_a_call_whose_deadline_has_passed_ends_with_the_default_response(
    shop, channels, events, kind
):
    default_response = DefaultResponsePolicy(on="DEADLINE_EXCEEDED", default=[b"safe"])
    channel = channels.retrying(default_response=default_response)
    with deadline_scope(0.0):
        call = begin(channel, kind)
    assert await answer_of(call, kind) == [b"safe"]
    assert await call.code() is grpc.StatusCode.OK
    assert not shop.calls
    await aio_wait_until(lambda: events)
    assert [type(event) for event in events] == [DefaultResponseUsed]


async def test_after_received_messages_the_caller_gets_the_failure(shop, own):
    shop.then(Fail("NOT_FOUND", after=1))
    default_response = DefaultResponsePolicy(on="NOT_FOUND", default=(b"1",))
    call = own.retrying(default_response=default_response).unary_stream(UNARY_STREAM)(b"xyz")
    assert await anext(aiter(call)) == b"x"
    await refused(anext(aiter(call)))


# --- The user's own code ---


async def test_a_done_callback_that_raises_is_reported(own, events):
    call = own.retrying().unary_unary(UNARY_UNARY)(b"x")
    called = []
    call.add_done_callback(lambda _: 1 / 0)
    call.add_done_callback(called.append)
    assert await call == b"x"
    await aio_wait_until(lambda: called and events)
    assert called == [call]
    (event,) = events
    assert isinstance(event, CallbackFailed)
    assert isinstance(event.error, ZeroDivisionError)


async def test_a_backoff_that_raises_ends_the_retries(shop, own, events):
    shop.then("UNAVAILABLE")
    retry = RetryPolicy(retry_on="UNAVAILABLE", backoff=lambda _: 1 / 0)
    error = await refused(own.retrying(retry=retry).unary_unary(UNARY_UNARY)(b"x"))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    await aio_wait_until(lambda: CallbackFailed in map(type, events))


async def test_a_predicate_that_raises_leaves_the_failure(shop, own, events):
    shop.then("NOT_FOUND")
    default_response = DefaultResponsePolicy(on=lambda _: 1 / 0)
    error = await refused(
        own.retrying(default_response=default_response).unary_unary(UNARY_UNARY)(b"x")
    )
    assert error.code() is grpc.StatusCode.NOT_FOUND
    await aio_wait_until(lambda: CallbackFailed in map(type, events))


# --- Timers that stop ---


async def test_with_a_stopped_timer_calls_are_not_retried(shop, own, timer):
    timer.stop()
    deadline = DeadlinePolicy(timeout=WAIT_S, slow_call_threshold=1.0, message_timeout=2.0)
    retry = RetryPolicy(retry_on="UNAVAILABLE", backoff=1.0)
    channel = own.retrying(timer=timer, timeout=deadline, retry=retry)
    for kind in ("unary_unary", "unary_stream"):
        assert await answer_of(begin(channel, kind), kind) == [b"x"]
        shop.then("UNAVAILABLE")
        error = await refused(answer_of(begin(channel, kind), kind))
        assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_call_ends_if_its_timer_is_stopped_before_the_retry(shop, own, timer, events):
    shop.then(Fail("UNAVAILABLE", "gone"), Fail("UNAVAILABLE", "gone"))
    channel = own.retrying(timer=timer, retry=RetryPolicy(retry_on="UNAVAILABLE", backoff=0.01))
    kinds = ("unary_unary", "unary_stream")
    ends = [asyncio.ensure_future(answer_of(begin(channel, kind), kind)) for kind in kinds]
    await aio_wait_until(lambda: timer.pending == 2)
    timer.stop()
    for end in ends:
        assert (await refused(end)).details() == "gone"
    assert len(shop.calls) == 2
    await aio_wait_until(
        lambda: (
            [event.reason for event in events if isinstance(event, RetryStopped)]
            == ["its timer was stopped or takes no more timeouts"] * 2
        )
    )


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream"])
async def test_the_deadline_applies_while_a_task_blocks_the_timer(shop, own, kind):
    shop.then("UNAVAILABLE", Hang())
    free = threading.Event()
    with WheelTimer() as busy:
        busy.new_timeout(lambda _: free.wait(), 0.0)
        channel = own.retrying(timer=busy, retry=RetryPolicy(retry_on="UNAVAILABLE", backoff=0.01))
        try:
            async with asyncio.timeout(WAIT_S):
                error = await refused(answer_of(begin(channel, kind, timeout=0.3), kind))
        finally:
            free.set()
    assert error.code() in {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE}
