"""A call on a loop ends in time, and is made no more often than is safe, whatever happens to it."""

import asyncio

import grpc
import pytest

from fixtures.aio_doors import doors, own, read_all, refused  # noqa: F401 - fixtures
from fixtures.shop import STREAM_STREAM, STREAM_UNARY, UNARY_STREAM, UNARY_UNARY, Fail
from fixtures.waiting import aio_wait_until
from rpcwheel.deadline import RetryPolicy, deadline_scope
from rpcwheel.failback import FailbackPolicy
from rpcwheel.interceptors import FailsafePolicy
from rpcwheel.interceptors.aio import Queues
from rpcwheel.observe import CallExcused, CallNotRetried
from rpcwheel.timer import WheelTimer

# ruff: noqa: F811 - fixtures are imported by name

CALLS = {
    "unary_unary": (UNARY_UNARY, b"x"),
    "unary_stream": (UNARY_STREAM, b"x"),
    "stream_unary": (STREAM_UNARY, [b"x"]),
    "stream_stream": (STREAM_STREAM, [b"x"]),
}
NO_CONNECTION = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: refused"


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream"])
async def test_a_call_whose_timer_is_stopped_before_its_retry_fails_as_its_try_did(
    shop, doors, events, kind
):
    timer = WheelTimer()
    shop.then(Fail("UNAVAILABLE", "gone"))
    retry = RetryPolicy(on="UNAVAILABLE", wait=0.3)
    method = UNARY_UNARY if kind == "unary_unary" else UNARY_STREAM
    call = getattr(doors.retrying(timer=timer, retry=retry), kind)(method)(b"x")
    await aio_wait_until(lambda: timer.pending)
    timer.stop()
    error = await refused(asyncio.wait_for(call if kind == "unary_unary" else read_all(call), 20))
    assert error.details() == "gone"
    assert len(shop.calls) == 1
    reasons = [event.reason for event in events if isinstance(event, CallNotRetried)]
    assert reasons == ["its timer was stopped"]


async def test_a_timer_that_is_merely_late_is_waited_for(shop, doors, timer):
    shop.then("UNAVAILABLE")
    retry = RetryPolicy(on="UNAVAILABLE", wait=0.001)
    call = doors.retrying(timer=timer, retry=retry).unary_unary(UNARY_UNARY)(b"x")
    await aio_wait_until(lambda: timer.pending)
    await asyncio.sleep(1.2)  # beyond the second after which the timer is looked at
    assert not call.done()
    timer.advance(0.001)
    assert await call == b"x"


@pytest.mark.parametrize("writes", [False, True])
async def test_a_failed_call_waits_not_long_for_a_request_stream_without_end(shop, doors, writes):
    async def endless():
        yield b"a"
        await asyncio.Event().wait()

    shop.then(Fail("UNAVAILABLE", "gone"))
    queues = Queues()
    failback = FailbackPolicy(on="UNAVAILABLE", wait=30.0)
    channel = doors.retrying(retry=None, failback=failback, queues=queues)
    call = channel.stream_unary(STREAM_UNARY)(None if writes else endless())
    error = await refused(asyncio.wait_for(call, 10))
    assert error.details() == "gone"
    assert not queues.pending
    await queues.close(0)


async def test_a_server_that_hands_on_the_failure_of_its_upstream_is_not_called_twice(shop, doors):
    """Its words are those of a call that was never sent. It has seen this one."""
    shop.then(Fail("UNAVAILABLE", NO_CONNECTION))
    error = await refused(doors.retrying(idempotent=False).unary_unary(UNARY_UNARY)(b"x"))
    assert error.details() == NO_CONNECTION
    assert len(shop.calls) == 1


async def test_a_channel_that_does_not_tell_its_state_proves_nothing(
    shop, own, events, monkeypatch
):
    def mute(_: object = None) -> None:
        raise RuntimeError("not told")

    shop.kill()
    channel = own.retrying(idempotent=False)
    monkeypatch.setattr(channel._channel, "get_state", mute)
    await refused(channel.unary_unary(UNARY_UNARY)(b"x", timeout=5.0))
    shop.start()
    assert [type(event) for event in events] == [CallNotRetried]


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream", "stream_unary", "stream_stream"])
async def test_failsafe_answers_a_call_that_began_after_its_deadline(shop, doors, events, kind):
    failsafe = FailsafePolicy(on="DEADLINE_EXCEEDED", default=[b"safe"])
    channel = doors.retrying(failsafe=failsafe)
    method, request = CALLS[kind]
    with deadline_scope(0.0):
        call = getattr(channel, kind)(method)(request)
    assert await (read_all(call) if kind.endswith("stream") else call) == [b"safe"]
    assert await call.code() is grpc.StatusCode.OK
    assert not shop.calls
    assert [type(event) for event in events] == [CallExcused]


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream", "stream_unary", "stream_stream"])
async def test_failback_delivers_a_call_that_began_after_its_deadline(shop, doors, kind):
    queues = Queues()
    failback = FailbackPolicy(on="DEADLINE_EXCEEDED", wait=30.0, default=[b"later"])
    channel = doors.retrying(failback=failback, queues=queues)
    method, request = CALLS[kind]
    with deadline_scope(0.0):
        call = getattr(channel, kind)(method)(request)
    assert await (read_all(call) if kind.endswith("stream") else call) == [b"later"]
    assert queues.pending == 1
    assert await queues.flush(20)
    await queues.close(0)
    (seen,) = shop.calls
    assert b"".join(seen.requests) == b"x"
    assert "grpc-previous-rpc-attempts" not in seen.metadata


async def test_another_failsafe_leaves_a_call_that_began_after_its_deadline(shop, doors):
    channel = doors.retrying(failsafe=FailsafePolicy(on="UNAVAILABLE", default=b"safe"))
    with deadline_scope(0.0):
        call = channel.unary_unary(UNARY_UNARY)(b"x")
    error = await refused(call)
    assert error.details() == "Deadline Exceeded before the call began: its deadline has passed"
    assert not shop.calls
