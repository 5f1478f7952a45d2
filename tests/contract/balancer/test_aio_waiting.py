"""Calls that begin while no subchannel is READY; grpc.aio."""

import asyncio
import contextvars
import gc
import weakref

import grpc
import pytest

from fixtures.aio_balanced_channels import (
    First,
    awaiting,
    caller,
    counts,
    still_waits,
    subchannel_of,
)
from fixtures.aio_channels import ANSWERS, KINDS, STYLES, Stub, steps
from fixtures.aio_policy_channels import refused
from fixtures.balanced_channels import instance, refusing_port
from fixtures.shop import STREAM_STREAM, UNARY_STREAM, UNARY_UNARY, Hang
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel.balancer import BalancerPolicy, Picker, RingHash
from rpcwheel.balancer.aio import BalancedChannel

State = grpc.ChannelConnectivity


# Until instances are known


async def test_calls_of_each_kind_wait_until_instances_are_known(shops, aio_balanced):
    channel = aio_balanced()
    rows = [(style, kind) for style in STYLES.values() for kind in KINDS]
    waiting = [asyncio.create_task(style(Stub(channel), kind)) for style, kind in rows]
    await steps(20)
    assert not any(task.done() for task in waiting)
    channel.update([instance(shops[0])])
    answers = await asyncio.gather(*waiting)
    assert answers == [ANSWERS[kind] for _, kind in rows]


@pytest.mark.parametrize(
    ("seconds", "code"),
    [(None, "UNAVAILABLE"), (WAIT_S, "UNAVAILABLE"), (0.02, "DEADLINE_EXCEEDED")],
)
async def test_a_call_waits_for_pick_timeout_and_at_most_until_its_deadline(
    aio_balanced, seconds, code
):
    channel = aio_balanced(policy={"pick_timeout": 0.1})
    call = caller(channel)(timeout=seconds)
    left = call.time_remaining()
    assert (left is None) if seconds is None else (0 <= left <= seconds)
    error = await refused(call)
    assert error.code().name == code
    assert error.details() == "no instance of test.Shop is known yet"


async def test_a_call_with_wait_for_ready_waits_until_its_deadline(shops, aio_balanced):
    channel = aio_balanced(policy={"pick_timeout": 0})
    late = caller(channel)(timeout=0.1, wait_for_ready=True)
    waiting = awaiting(caller(channel)(timeout=None, wait_for_ready=True))
    assert (await refused(late)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
    channel.update([])
    assert await still_waits(waiting)
    channel.update([instance(shops[0])])
    assert await waiting == b"x"


async def test_a_call_that_may_not_wait_fails_at_once(aio_balanced):
    channel = aio_balanced(policy={"pick_timeout": 0})
    details = "no instance of test.Shop is known yet"
    assert (await refused(caller(channel)())).details() == details
    without_time = await refused(caller(aio_balanced())(timeout=0))
    assert without_time.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_call_fails_at_once_if_there_are_no_instances(aio_balanced):
    channel = aio_balanced()
    waiting = awaiting(caller(channel)())
    assert await still_waits(waiting)
    channel.update([])
    for call in (waiting, caller(channel)()):
        error = await refused(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert error.details() == "no instance of test.Shop is known"


async def test_reported_errors_end_waiting_calls(shops, aio_balanced):
    channel = aio_balanced()
    patient = awaiting(caller(channel)(wait_for_ready=True))
    waiting = [awaiting(caller(channel)()) for _ in range(2)]
    await asyncio.sleep(0)
    channel.report_error("etcd://h:1 is unreachable")
    for call in (*waiting, caller(channel)()):
        details = (await refused(call)).details()
        assert details == "no instance of test.Shop is known: etcd://h:1 is unreachable"
    channel.update([instance(shops[0])])
    assert await patient == b"x"
    channel.report_error("too late")
    assert await caller(channel)() == b"x"


async def test_reported_errors_with_wait_are_in_the_status_of_calls_that_have_waited(
    aio_balanced,
):
    channel = aio_balanced(policy={"pick_timeout": 0.1})
    call = caller(channel)()
    channel.report_error("etcd://h:1 is unreachable", wait=True)
    details = (await refused(call)).details()
    assert details == "no instance of test.Shop is known yet: etcd://h:1 is unreachable"


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


async def test_a_write_ends_with_the_status_of_a_call_that_never_begins(aio_balanced):
    channel = aio_balanced()
    call = channel.stream_stream(STREAM_STREAM)(timeout=WAIT_S)
    writing = asyncio.create_task(call.write(b"a"))
    await asyncio.sleep(0)
    channel.update([])
    assert (await refused(writing)).code() is grpc.StatusCode.UNAVAILABLE


# While no subchannel is READY


async def test_calls_fail_within_50_ms_if_all_connections_have_failed(dead, aio_balanced):
    channel = aio_balanced(dead)
    call = caller(channel)
    await refused(call())  # gRPC needs a while to find out
    taken = []
    for _ in range(20):
        began = asyncio.get_running_loop().time()
        error = await refused(call())
        taken.append(asyncio.get_running_loop().time() - began)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert error.details().startswith("the only server of test.Shop can't be reached")
    assert sorted(taken)[10] < 0.05
    assert f"127.0.0.1:{dead}: " in error.details()
    assert "onnection refused" in error.details()


@pytest.mark.parametrize("how", ["an update", "a server that starts"])
async def test_a_call_with_wait_for_ready_waits_for_any_subchannel(shops, aio_balanced, how):
    shop = shops[0]
    shop.kill()
    with refusing_port() as dead:
        channel = aio_balanced(dead, shop, lb_policy=First())
        waiting = awaiting(caller(channel)(wait_for_ready=True))
        await aio_wait_until(lambda: channel.get_state() is State.TRANSIENT_FAILURE)
        assert await still_waits(waiting)
        if how == "an update":
            channel.update([instance(shops[1], id="new")])
        else:
            shop.start()
        assert await waiting == b"x"


async def test_the_deadline_of_a_call_with_wait_for_ready_holds_while_all_have_failed(
    dead, aio_balanced
):
    channel = aio_balanced(dead)
    await refused(caller(channel)())
    error = await refused(caller(channel)(timeout=0.05, wait_for_ready=True))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert error.details().startswith("the only server of test.Shop can't be reached")


async def test_a_call_with_wait_for_ready_waits_after_a_forced_reconnect(shops, aio_balanced):
    channel = aio_balanced(shops[0])
    assert await caller(channel)() == b"x"
    shops[0].kill()
    channel.subchannels[0].channel.reconnect("the test wants it", force=True)
    waiting = awaiting(caller(channel)(wait_for_ready=True))
    await aio_wait_until(lambda: channel.get_state() is State.TRANSIENT_FAILURE)
    assert await still_waits(waiting)
    shops[0].start()
    assert await waiting == b"x"


# What a call keeps while it waits


async def test_request_and_metadata_are_those_of_the_begin(shops, aio_balanced):
    channel = aio_balanced()
    metadata, request = grpc.aio.Metadata(("from", "caller")), bytearray(b"x")
    method = channel.unary_unary(UNARY_UNARY, request_serializer=bytes)
    call = method(request, metadata=metadata, timeout=WAIT_S)
    metadata["from"], request[0] = "later", ord("y")
    channel.update([instance(shops[0])])
    assert await call == b"x"
    assert shops[0].calls[0].metadata["from"] == "caller"


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


async def test_the_deadline_is_that_of_the_whole_call(shops, aio_balanced):
    channel = aio_balanced()
    call = caller(channel)(timeout=500, wait_for_ready=True)
    await aio_wait_until(lambda: call.time_remaining() < 499.9)
    left = call.time_remaining()
    shops[0].then(hang := Hang())
    channel.update([instance(shops[0])])
    await aio_wait_until(hang.begun.is_set)
    assert call.time_remaining() <= left
    assert shops[0].calls[0].time_remaining > 400
    call.cancel()


async def test_an_error_of_a_key_function_is_raised_by_its_call_only(shops, aio_balanced):
    def key(_, request, __):
        return {b"good": "good"}[request]

    channel = aio_balanced(lb_policy=RingHash(key))
    calls = [caller(channel)(request) for request in (b"bad", b"good", b"bad", b"good")]
    await asyncio.sleep(0)
    channel.update([instance(shops[0])])
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(one) for one in results] == [KeyError, bytes, KeyError, bytes]
    assert await calls[0].code() is grpc.StatusCode.UNKNOWN
    with pytest.raises(KeyError):  # it need not wait
        await caller(channel)(b"bad")


async def test_wrong_arguments_of_one_call_do_not_disturb_others(shops, aio_balanced):
    channel = aio_balanced()
    good = caller(channel)()
    with pytest.raises(TypeError):
        caller(channel)(timeout="soon")
    with pytest.raises(grpc.aio.UsageError, match="Call credentials"):
        caller(channel)(credentials="secret")
    channel.update([instance(shops[0])])
    assert await good == b"x"


# Its end


@pytest.mark.parametrize("kind", KINDS)
async def test_a_waiting_call_can_be_canceled(shops, aio_balanced, kind):
    channel = aio_balanced()
    method = getattr(Stub(channel), kind)
    call = method(b"x") if kind.startswith("unary") else method()
    ended = []
    call.add_done_callback(ended.append)
    assert call.cancel()
    assert not call.cancel()
    assert (call.cancelled(), call.done(), ended) == (True, True, [call])
    assert await call.code() is grpc.StatusCode.CANCELLED
    with pytest.raises(asyncio.CancelledError):
        await (call if kind.endswith("unary") else call.read())
    channel.update([instance(shops[0])])
    assert await caller(channel)() == b"x"
    assert counts(shops) == [1, 0, 0]


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


async def test_a_timeout_of_the_caller_cancels_a_waiting_call(aio_balanced):
    call = caller(aio_balanced())()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await call
    assert call.cancelled()


async def test_a_dropped_response_stream_is_not_begun_but_a_dropped_unary_call_is(
    shops, aio_balanced
):
    channel = aio_balanced()
    stream = channel.unary_stream(UNARY_STREAM)(b"ab", timeout=WAIT_S)
    gone = weakref.ref(stream)
    del stream
    await aio_wait_until(lambda: (gc.collect(), gone())[1] is None)
    channel.unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S)
    channel.update([instance(shops[0])])
    await aio_wait_until(lambda: shops[0].calls)
    await steps(20)
    assert [seen.method for seen in shops[0].calls] == [UNARY_UNARY]


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
        gc.disable()
        task = asyncio.create_task(call())
        await asyncio.sleep(0)
        return task

    try:
        asyncio.run(main())
    finally:
        gc.enable()
    assert ends == ["canceled"]
    channel.update([])  # without a loop: does nothing
    assert channel.subchannels == ()


async def test_many_waiting_calls_begin_when_a_subchannel_is_ready(shops, aio_balanced):
    channel = aio_balanced(lb_policy="ring_hash:user")
    call = caller(channel)
    waiting = [
        awaiting(call(metadata=(("user", str(number)),), timeout=WAIT_S)) for number in range(500)
    ]
    await steps(20)
    channel.update([instance(shop) for shop in shops])
    assert await asyncio.gather(*waiting) == [b"x"] * 500
    assert all(counts(shops))
    assert subchannel_of(channel, shops[0]).calls == 0
