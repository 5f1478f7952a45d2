"""A queue whose timer is stopped: its calls are reported, and calls that fail later are refused."""

import asyncio
import gc
import warnings

import pytest

from fixtures.failback_queues import FLAKY, FlakyCoroutine, FlakyFunction
from fixtures.waiting import wait_until
from fixtures.worlds import AioWorld, SyncWorld
from rpcwheel.errors import FailbackClosed
from rpcwheel.events import FailbackLost, FailbackRejected
from rpcwheel.failback import FailbackInvoker, FailbackPolicy, aio, sync
from rpcwheel.timer import AsyncWheelTimer, ManualTimer, WheelTimer

REASON = "its timer was stopped"
POLICY = FailbackPolicy(retry_on=ConnectionError, backoff=3600, name="audit")


def lost(events):
    return [event for event in events if isinstance(event, FailbackLost)]


STOPPABLE = [(SyncWorld, WheelTimer), (SyncWorld, ManualTimer), (AioWorld, AsyncWheelTimer)]


@pytest.mark.parametrize(("world", "kind"), STOPPABLE, indirect=["world"])
def test_a_stopped_timer_loses_the_queued_calls_and_close_returns_them(world, kind, events):
    timer, module = world.do(kind), {"sync": sync, "aio": aio}[world.name]
    failback = module.FailbackInvoker(POLICY, timer=timer)
    for number in range(3):
        world.do(failback.invoke, FLAKY[world.name](ConnectionError()), number)
    assert len(world.do(timer.stop)) == 3
    assert wait_until(lambda: lost(events))
    assert [(event.name, event.count, event.reason) for event in lost(events)] == [
        ("audit", 3, REASON)
    ]
    assert (failback.pending, failback.stats().lost) == (0, 3)
    left = world.do(failback.close)
    assert [(call.args, call.attempts, call.reason) for call in left] == [
        ((number,), 1, REASON) for number in range(3)
    ]
    assert len(lost(events)) == 1
    assert world.do(failback.close) == []


def test_a_call_that_fails_after_the_timer_was_stopped_raises_failback_closed(events):
    timer, error = WheelTimer(), ConnectionError("down")
    failback = FailbackInvoker(POLICY, timer=timer)
    timer.stop()
    with pytest.raises(FailbackClosed, match="timer was stopped; make a new queue") as caught:
        failback.invoke(FlakyFunction(error))
    assert caught.value.__cause__ is error
    assert failback.invoke(FlakyFunction(), 1) == (1,)
    assert failback.stats().rejected == 1
    assert [type(event) for event in events] == [FailbackRejected]


def test_calls_in_the_timer_of_a_closed_loop_are_reported_at_the_next_failure(events):
    async def main():
        failback = aio.FailbackInvoker(POLICY, timer=AsyncWheelTimer())
        await failback.invoke(FlakyCoroutine(ConnectionError()), "first")
        return failback

    failback = asyncio.run(main())
    with pytest.raises(FailbackClosed):
        asyncio.run(failback.invoke(FlakyCoroutine(ConnectionError()), "second"))
    assert [event.count for event in lost(events)] == [1]
    assert [call.args for call in asyncio.run(failback.close())] == [("first",)]
    del failback
    events.clear()
    with warnings.catch_warnings():  # that the timer was not stopped: here, and in no later test
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
