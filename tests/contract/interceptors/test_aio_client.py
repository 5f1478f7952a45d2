"""The client's policies at work on a loop, through both doors: tries, deadlines, answers."""

import asyncio

import grpc
import pytest

from fixtures.aio_doors import doors, own, read_all, refused, sent  # noqa: F401 - fixtures
from fixtures.shop import (
    STREAM_STREAM,
    STREAM_UNARY,
    UNARY_STREAM,
    UNARY_UNARY,
    Fail,
    Hang,
    Silent,
)
from fixtures.waiting import aio_wait_until
from rpcwheel.deadline import DeadlinePolicy, RetryPolicy, deadline_scope
from rpcwheel.interceptors import FailsafePolicy
from rpcwheel.observe import (
    CallExcused,
    CallNotRetried,
    CallRetrying,
    CallSlow,
    HookFailed,
    StreamSilent,
)

# ruff: noqa: F811 - fixtures are imported by name


async def test_the_server_is_told_how_many_tries_went_before(shop, doors):
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    call = doors.retrying().unary_unary(UNARY_UNARY)(b"x", metadata=(("k", "v"),))
    assert await call == b"x"
    told = [seen.metadata.get("grpc-previous-rpc-attempts") for seen in shop.calls]
    assert told == [None, "1", "2"]
    assert [seen.metadata["k"] for seen in shop.calls] == ["v"] * 3


async def test_the_tries_never_get_more_time_than_is_left_of_the_call(shop, doors):
    shop.then("UNAVAILABLE", Hang())
    retry = RetryPolicy(on="UNAVAILABLE", wait=0.2)
    error = await refused(doors.retrying(retry=retry).unary_unary(UNARY_UNARY)(b"x", timeout=0.5))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    first, second = shop.calls
    # Of the 0.2 s; the wire has the seconds rounded up, the server another clock.
    assert second.time_remaining <= first.time_remaining - 0.1


async def test_the_wait_before_a_retry_is_the_timers(shop, doors, timer):
    shop.then("UNAVAILABLE")
    retry = RetryPolicy(on="UNAVAILABLE", wait=5.0)
    call = doors.retrying(timer=timer, retry=retry).unary_unary(UNARY_UNARY)(b"x")
    await aio_wait_until(lambda: timer.pending)
    timer.advance(4.9)
    await asyncio.sleep(0.05)
    assert len(shop.calls) == 1
    timer.advance(0.1)
    assert await call == b"x"
    assert len(shop.calls) == 2


async def test_the_server_may_say_how_long_to_wait(shop, doors, timer):
    shop.then(Fail("UNAVAILABLE", trailing=(("grpc-retry-pushback-ms", "3000"),)))
    call = doors.retrying(timer=timer).unary_unary(UNARY_UNARY)(b"x")
    await aio_wait_until(lambda: timer.pending)
    timer.advance(2.9)
    assert timer.pending
    timer.advance(0.1)
    assert await call == b"x"


async def test_the_server_may_ask_not_to_try_again(shop, doors, events):
    shop.then(Fail("UNAVAILABLE", trailing=(("grpc-retry-pushback-ms", "-1"),)))
    await refused(doors.retrying().unary_unary(UNARY_UNARY)(b"x"))
    assert [type(event) for event in events] == [CallNotRetried]
    assert len(shop.calls) == 1


async def test_a_server_that_always_fails_sees_few_retries(shop, doors):
    shop.then(*["UNAVAILABLE"] * 400)
    retry = RetryPolicy(on="UNAVAILABLE", wait=0.0, budget=0.2, reserve=0)
    member = doors.retrying(retry=retry).unary_unary(UNARY_UNARY)
    for _ in range(200):
        await refused(member(b"x"))
    assert 200 < len(shop.calls) <= 240


async def test_what_a_server_may_have_done_is_not_done_twice(shop, doors):
    shop.then("UNAVAILABLE")
    error = await refused(doors.retrying(idempotent=False).unary_unary(UNARY_UNARY)(b"x"))
    assert error.details() == f"scripted for {UNARY_UNARY}"
    assert len(shop.calls) == 1


async def test_what_no_server_has_seen_is_tried_again_for_any_method(shop, doors, events):
    shop.kill()
    await refused(doors.retrying(idempotent=False).unary_unary(UNARY_UNARY)(b"x", timeout=5.0))
    shop.start()
    assert [type(event) for event in events] == [CallRetrying, CallRetrying, CallNotRetried]


async def test_calls_made_in_a_scope_share_its_deadline(shop, doors):
    with deadline_scope(3.0):
        await doors.retrying().unary_unary(UNARY_UNARY)(b"x", timeout=9.0)
    assert shop.calls[0].time_remaining <= 3.5


async def test_no_request_leaves_after_the_deadline(shop, doors):
    with deadline_scope(0.0):
        call = doors.retrying().unary_unary(UNARY_UNARY)(b"x")
    error = await refused(call)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert error.details() == "Deadline Exceeded before the call began: its deadline has passed"
    assert await call.code() is error.code()
    assert not shop.calls


@pytest.mark.parametrize("ask", ["code", "details", "trailing_metadata", "callback", "nothing"])
async def test_a_call_is_tried_again_though_nobody_awaits_it(shop, doors, ask):
    shop.then("UNAVAILABLE")
    call = doors.retrying().unary_unary(UNARY_UNARY)(b"x")
    ended = asyncio.Event()
    match ask:
        case "callback":
            call.add_done_callback(lambda _: ended.set())
            await ended.wait()
        case "nothing":
            await aio_wait_until(call.done)
        case _:
            await getattr(call, ask)()
    assert len(shop.calls) == 2
    assert await call.code() is grpc.StatusCode.OK


async def test_a_forgotten_call_with_one_answer_goes_on(shop, doors):
    shop.then("UNAVAILABLE")
    doors.retrying().unary_unary(UNARY_UNARY)(b"x")
    await aio_wait_until(lambda: len(shop.calls) == 2)


async def test_many_may_await_one_call(shop, doors):
    shop.then("UNAVAILABLE")
    call = doors.retrying().unary_unary(UNARY_UNARY)(b"x")
    assert await asyncio.gather(*(asyncio.wait_for(call, 9) for _ in range(3))) == [b"x"] * 3


async def test_a_call_is_slow_while_it_still_runs(shop, doors, timer, events):
    shop.then(hang := Hang())
    deadline = DeadlinePolicy(slow_after=1.0)
    call = doors.retrying(timer=timer, timeout=deadline).unary_unary(UNARY_UNARY)(b"x")
    await aio_wait_until(hang.begun.is_set)
    timer.advance(1.0)
    await aio_wait_until(lambda: events)
    assert events == [CallSlow(UNARY_UNARY, "client", 1.0)]
    call.cancel()
    await aio_wait_until(call.done)
    assert not timer.pending


async def test_a_call_that_has_ended_is_not_slow(shop, doors, timer):
    deadline = DeadlinePolicy(slow_after=1.0)
    channel = doors.retrying(timer=timer, timeout=deadline)
    await channel.unary_unary(UNARY_UNARY)(b"x")
    assert await read_all(channel.unary_stream(UNARY_STREAM)(b"xy")) == [b"x", b"y"]
    assert not timer.pending


async def test_only_a_timeout_hands_the_call_through(shop, doors):
    channel = doors.retrying(retry=None, timeout=5.0)
    assert await channel.unary_unary(UNARY_UNARY)(b"x") == b"x"
    assert shop.calls[0].time_remaining <= 5.5  # the server's clock is the wall's


# --- Response streams ---


@pytest.mark.parametrize("read", ["iterate", "read"])
async def test_a_stream_is_not_begun_again_after_its_first_message(shop, doors, read):
    shop.then(Fail("UNAVAILABLE", after=1))
    call = doors.retrying().unary_stream(UNARY_STREAM)(b"xyz")
    messages = call if read == "iterate" else reads(call)
    assert await anext(aiter(messages)) == b"x"
    await refused(anext(aiter(messages)))
    assert len(shop.calls) == 1


async def reads(call):
    while (message := await call.read()) is not grpc.aio.EOF:
        yield message


@pytest.mark.parametrize("read", ["iterate", "read"])
async def test_a_silent_stream_is_cancelled_with_a_clear_error(shop, doors, events, timer, read):
    shop.then(silent := Silent(after=1))
    deadline = DeadlinePolicy(message_timeout=2.0)
    call = doors.retrying(timer=timer, timeout=deadline).unary_stream(UNARY_STREAM)(b"xyz")
    messages = call.__aiter__() if read == "iterate" else reads(call)
    assert await anext(messages) == b"x"
    await aio_wait_until(silent.begun.is_set)
    assert not timer.pending  # nobody waits for a message
    waiting = asyncio.ensure_future(anext(messages))
    await aio_wait_until(lambda: timer.pending)
    timer.advance(2.0)
    error = await refused(waiting)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert error.details() == "no message for 2 s (message_timeout)"
    assert await call.code() is error.code()
    await aio_wait_until(shop.calls[0].ended.is_set)
    assert StreamSilent(UNARY_STREAM, 2.0) in events


async def test_silence_before_the_first_message_may_be_tried_again(shop, doors, timer):
    shop.then(Silent())
    retry = RetryPolicy(on="DEADLINE_EXCEEDED", wait=0.0)
    deadline = DeadlinePolicy(message_timeout=2.0)
    channel = doors.retrying(timer=timer, timeout=deadline, retry=retry)
    waiting = asyncio.ensure_future(read_all(channel.unary_stream(UNARY_STREAM)(b"xy")))
    await aio_wait_until(lambda: timer.pending and shop.calls)
    timer.advance(2.0)
    assert await waiting == [b"x", b"y"]
    assert len(shop.calls) == 2


async def test_a_message_in_the_last_moment_counts(shop, own, timer):
    going = DeadlinePolicy(message_timeout=2.0)
    call = own.retrying(timer=timer, timeout=going).stream_stream(STREAM_STREAM)()
    await call.write(b"a")
    assert await call.read() == b"a"
    reading = asyncio.ensure_future(call.read())
    await aio_wait_until(lambda: timer.pending)
    await call.write(b"b")
    await aio_wait_until(reading.done)
    timer.advance(2.0)  # nobody waits now
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF


async def test_silence_that_is_noticed_too_late_is_none(own, timer):
    going = DeadlinePolicy(message_timeout=2.0)
    call = own.retrying(timer=timer, timeout=going).stream_stream(STREAM_STREAM)()
    listening = call._conductor.listen(call, call._try)
    timer.advance(2.0)  # the loop is told, and comes to it later ...
    listening.cancel()  # ... than to the message
    await call.write(b"a")
    assert await call.read() == b"a"
    call.cancel()


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream"])
async def test_a_timer_that_was_stopped_costs_what_needs_it_and_no_call(shop, doors, timer, kind):
    timer.stop()
    deadline = DeadlinePolicy(timeout=9.0, slow_after=1.0, message_timeout=2.0)
    retry = RetryPolicy(on="UNAVAILABLE", wait=1.0)
    channel = doors.retrying(timer=timer, timeout=deadline, retry=retry)
    method = UNARY_UNARY if kind == "unary_unary" else UNARY_STREAM
    read = asyncio.wait_for if kind == "unary_unary" else lambda call, _: read_all(call)
    assert await read(getattr(channel, kind)(method)(b"x"), 9) in (b"x", [b"x"])
    shop.then("UNAVAILABLE")
    error = await refused(read(getattr(channel, kind)(method)(b"x"), 9))
    assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_reading_and_iterating_do_not_mix(doors):
    call = doors.retrying().unary_stream(UNARY_STREAM)(b"xy")
    assert await call.read() == b"x"
    if doors.name == "channel":  # grpc.aio's own call round ours lets it pass
        with pytest.raises(grpc.aio.UsageError):
            aiter(call)
    assert await call.read() == b"y"
    assert await call.read() is grpc.aio.EOF


# --- Failsafe ---


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream", "stream_unary", "stream_stream"])
async def test_failsafe_answers_with_its_default(shop, doors, events, kind):
    method, request = {
        "unary_unary": (UNARY_UNARY, b"x"),
        "unary_stream": (UNARY_STREAM, b"x"),
        "stream_unary": (STREAM_UNARY, sent(b"x")),
        "stream_stream": (STREAM_STREAM, [b"x"]),
    }[kind]
    shop.then(Fail("NOT_FOUND", "gone", (("k", "v"),)))
    failsafe = FailsafePolicy(on="NOT_FOUND", default=(b"1", b"2"))
    call = getattr(doors.retrying(failsafe=failsafe), kind)(method)(request)
    answer = await read_all(call) if kind.endswith("stream") else list(await call)
    assert answer == [b"1", b"2"]
    assert await call.code() is grpc.StatusCode.OK
    assert await call.details() == "failsafe after NOT_FOUND: gone"
    assert tuple(await call.trailing_metadata()) == (("k", "v"), ("rpcwheel-answer", "failsafe"))
    assert [type(event) for event in events] == [CallExcused]


async def test_messages_in_the_callers_hands_are_followed_by_the_failure(shop, doors):
    shop.then(Fail("NOT_FOUND", after=1))
    failsafe = FailsafePolicy(on="NOT_FOUND", default=(b"1",))
    call = doors.retrying(failsafe=failsafe).unary_stream(UNARY_STREAM)(b"xyz")
    assert await anext(aiter(call)) == b"x"
    await refused(anext(aiter(call)))


# --- Hooks ---


async def test_a_callback_that_raises_harms_nothing(own, events):
    call = own.retrying().unary_unary(UNARY_UNARY)(b"x")
    told = []
    call.add_done_callback(lambda _: 1 / 0)
    call.add_done_callback(told.append)
    assert await call == b"x"
    assert told == [call]
    (event,) = events
    assert isinstance(event, HookFailed)
    assert isinstance(event.error, ZeroDivisionError)


async def test_a_wait_that_raises_leaves_the_failure(shop, doors, events):
    shop.then("UNAVAILABLE")
    retry = RetryPolicy(on="UNAVAILABLE", wait=lambda _: 1 / 0)
    error = await refused(doors.retrying(retry=retry).unary_unary(UNARY_UNARY)(b"x"))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert HookFailed in map(type, events)


async def test_a_predicate_that_raises_leaves_the_failure(shop, doors, events):
    shop.then("NOT_FOUND")
    failsafe = FailsafePolicy(on=lambda _: 1 / 0)
    error = await refused(doors.retrying(failsafe=failsafe).unary_unary(UNARY_UNARY)(b"x"))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert HookFailed in map(type, events)
