"""The public API as type checkers see it. Never run; `make types` reads it."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import assert_type

import grpc

from rpcwheel import (
    AsyncWheelTimer,
    FailbackInvoker,
    FailbackPolicy,
    HashedWheel,
    ManualTimer,
    PeriodicTask,
    Timeout,
    TimerStats,
    WheelTimer,
    shared_timer,
    with_failback,
)
from rpcwheel.failback import aio


def the_timer() -> None:
    with WheelTimer(HashedWheel(tick=0.1, slots=512), executor=ThreadPoolExecutor()) as timer:
        assert_type(timer, WheelTimer)
        timeout = timer.new_timeout(lambda timeout: print(timeout.deadline), timedelta(seconds=2))
        assert_type(timeout, Timeout)
        assert_type(timeout.reschedule(3.0), bool)
        assert_type(timeout.cancel(), bool)
        assert_type(timer.stats(), TimerStats)
        assert_type(timer.stop(), list[Timeout])
    assert_type(shared_timer(), WheelTimer)
    assert_type(ManualTimer().advance(1), int)
    assert_type(PeriodicTask(timer, 5.0, print).start(), PeriodicTask)


async def the_timer_on_a_loop() -> None:
    async with AsyncWheelTimer(max_pending=10) as timer:
        assert_type(timer, AsyncWheelTimer)
        assert_type(await timer.aclose(), list[Timeout])


@with_failback(on=grpc.StatusCode.UNAVAILABLE)
def push(line: str, *, urgent: bool = False) -> bytes:
    return line.encode() if urgent else b""


@with_failback(on={ConnectionError}, default=0)
async def count(line: str) -> int:
    return len(line)


async def failback() -> None:
    assert_type(push("a", urgent=True), bytes | None)
    push(1)  # type: ignore[arg-type]
    assert_type(push.failback.pending, int)
    assert_type(await count("a"), int)
    await count.failback.close(drain=1.0)
    assert_type(FailbackInvoker(FailbackPolicy(on=OSError)).flush(1.0), bool)
    assert_type(await aio.FailbackInvoker(FailbackPolicy(on=OSError)).flush(1.0), bool)
