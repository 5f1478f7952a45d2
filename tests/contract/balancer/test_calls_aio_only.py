"""Calls of a balanced channel that only `grpc.aio` has: written, awaited by tasks, with a loop."""

import asyncio
import contextvars
import gc
import weakref

import grpc
import pytest

from fixtures.aio_channels import Stub, awaiting, caller, steps
from fixtures.balanced_channels import counts, instance
from fixtures.client_interceptors import aio_interceptor
from fixtures.grpcio import BUGS_OF_INTERCEPTORS
from fixtures.leaks import no_garbage_collector
from fixtures.shop import STREAM_STREAM, UNARY_STREAM, UNARY_UNARY
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel.balancer import BalancerPolicy, Picker
from rpcwheel.balancer.aio import BalancedChannel

# Calls that wait


async def test_a_written_request_stream_begins_when_a_subchannel_is_ready(shops, aio_balanced):
    channel = aio_balanced()
    call = channel.stream_stream(STREAM_STREAM)(timeout=WAIT_S)
    writing = asyncio.create_task(call.write(b"a"))
    reading = asyncio.create_task(call.read())
    await steps(20)
    assert [task.done() for task in (writing, reading)] == [False, False]
    channel.update([instance(shops[0])])
    await writing
    await call.write(b"b")
    await call.done_writing()
    assert [await reading, await call.read(), await call.read()] == [b"a", b"b", grpc.aio.EOF]


async def test_a_picker_runs_in_the_context_of_the_caller_and_sees_the_call(shops, aio_balanced):
    seen, variable = [], contextvars.ContextVar("variable", default="none")

    class Noting(Picker):
        def prepare(self, subchannels, weights):
            return lambda *call: (seen.append((variable.get(), *call)), subchannels[0])[1]

    channel = aio_balanced(lb_policy=Noting())
    variable.set("the caller's")
    call = channel.unary_unary(UNARY_UNARY, str.encode)("text", timeout=WAIT_S)
    variable.set("another")
    channel.update([instance(shops[0])])
    assert await call == b"text"
    assert seen[-1] == ("the caller's", UNARY_UNARY, "text", None)


async def test_a_call_that_begins_to_wait_lets_no_other_call_pick_again(aio_balanced, set_limit):
    for name in ("pending.FIRST_POLL_S", "pending.MAX_POLL_S", "aio_channel.FIRST_POLL_S"):
        set_limit(f"balancer.{name}", 3600.0)
    set_limit("balancer.aio_channel.MAX_POLL_S", 3600.0)
    asked = []

    class Undecided(Picker):
        sees_all_states = True

        def prepare(self, subchannels, weights):
            return lambda *_: asked.append(subchannels)

    method = aio_balanced(1, lb_policy=Undecided()).unary_unary(UNARY_UNARY)
    calls = []
    for _ in range(50):
        calls.append(method(b"x"))
        await steps()
    assert 50 < len(asked) < 250
    for call in calls:
        call.cancel()


@pytest.mark.parametrize("kind", ["unary_unary", "stream_stream"])
async def test_a_canceled_task_cancels_the_call_that_it_awaits(aio_balanced, kind):
    channel = aio_balanced()
    method = getattr(Stub(channel), kind)
    call = method(b"x") if kind == "unary_unary" else method()
    task = awaiting(call if kind == "unary_unary" else call.read())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert call.cancelled()


async def test_a_waiting_task_is_kept_alive_by_its_call(shops, timer):
    """The loop has only weak references to tasks; the call must keep its task alive."""
    policy = BalancerPolicy(pick_timeout=WAIT_S)
    results = []

    async def read(channel):
        results.append([one async for one in channel.unary_stream(UNARY_STREAM)(b"ab")])
        await channel.close()

    channel = BalancedChannel("test.Shop", balancer_policy=policy, timer=timer)
    known = weakref.ref(channel)
    asyncio.create_task(read(channel))  # noqa: RUF006
    await steps()
    del channel
    gc.collect()
    known().update([instance(shops[0])])
    await aio_wait_until(lambda: results)
    assert results == [[b"a", b"b"]]


async def test_a_stream_may_be_dropped_after_a_task_has_waited_for_it(aio_balanced):
    call = aio_balanced().unary_stream(UNARY_STREAM)(b"x")
    waiting = asyncio.create_task(call.code())
    await steps()
    waiting.cancel()
    await asyncio.wait([waiting])
    gone = weakref.ref(call)
    del call, waiting
    gc.collect()
    assert gone() is None


def test_a_loop_may_be_closed_while_calls_wait(timer):
    gone = []

    async def main():
        channel = BalancedChannel("test.Shop", timer=timer)
        call = channel.unary_unary(UNARY_UNARY)(b"x")
        stream = channel.unary_stream(UNARY_STREAM)(b"x")
        await asyncio.sleep(0)
        gone.extend(map(weakref.ref, (channel, call, stream)))

    asyncio.run(main())
    gc.collect()
    assert [one() for one in gone] == [None] * 3
    assert timer.pending == 0


def test_a_task_that_awaits_a_call_is_canceled_with_its_loop(timer):
    channel = BalancedChannel("test.Shop", timer=timer)
    ends = []

    async def call():
        try:
            await channel.unary_unary(UNARY_UNARY)(b"x")
        except asyncio.CancelledError:
            ends.append("canceled")
            raise

    async def main():
        task = asyncio.create_task(call())
        await asyncio.sleep(0)
        return task

    with no_garbage_collector():
        asyncio.run(main())
    assert ends == ["canceled"]
    channel.update([])  # without a loop: does nothing
    assert channel.subchannels == ()


@BUGS_OF_INTERCEPTORS
async def test_an_interceptor_may_answer_or_raise(shops, aio_balanced):
    async def answer(_, __, request):
        if request == b"raise":
            raise KeyError(request)
        return b"cached"

    channel = aio_balanced(shops[0], interceptors=[aio_interceptor(answer)])
    call = caller(channel)
    assert await call() == b"cached"
    with pytest.raises(KeyError):
        await call(b"raise")
    await aio_wait_until(lambda: channel.calls == 0)
    assert (counts(shops), channel.subchannels[0].healthy) == ([0, 0, 0], True)
