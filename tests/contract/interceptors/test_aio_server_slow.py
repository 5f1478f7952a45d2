"""Calls that run for long are told by the aio server, and nothing of them waits after their end."""

import asyncio
import threading

import grpc
import pytest
from scenarios.served import KINDS, ONE_ANSWER, STREAMS, aio_ask, begin, handler

from fixtures.grpc_servers import IMPATIENT
from fixtures.small_servers import METHOD, aio_serving
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel.deadline import DeadlinePolicy
from rpcwheel.interceptors import CallPolicy
from rpcwheel.interceptors._aio_server import server_interceptors
from rpcwheel.observe import CallSlow
from rpcwheel.timer import AsyncWheelTimer, ManualTimer

SLOW = CallPolicy(timeout=DeadlinePolicy(slow_after=2.0))


class Gate:
    """Where handlers of any nature wait; opened from the loop."""

    def __init__(self):
        self.entered = threading.Event()
        self.opened = threading.Event()

    def wait(self):
        self.entered.set()
        assert self.opened.wait(WAIT_S)

    async def wait_on_loop(self):
        self.entered.set()
        await aio_wait_until(self.opened.is_set)


def generating(kind, gate, end):
    async def unary(request, context):
        await gate.wait_on_loop()
        end()
        return b"done"

    async def stream(request, context):
        yield b"first"
        await gate.wait_on_loop()
        end()
        yield b"done"

    return unary if kind in ONE_ANSWER else stream


def writing(kind, gate, end):
    async def stream(request, context):
        await context.write(b"first")
        await gate.wait_on_loop()
        end()
        await context.write(b"done")

    return generating(kind, gate, end) if kind in ONE_ANSWER else stream


def plain(kind, gate, end):
    def unary(request, context):
        gate.wait()
        end()
        return b"done"

    def stream(request, context):
        yield b"first"
        gate.wait()
        end()
        yield b"done"

    return unary if kind in ONE_ANSWER else stream


NATURES = [generating, writing, plain]


def well():
    pass


def with_a_bug():
    raise KeyError("a bug")


async def answers(call, kind):
    return [await call] if kind in ONE_ANSWER else [answer async for answer in call]


@pytest.mark.parametrize("nature", NATURES)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_that_runs_for_long_is_told_while_it_runs(kind, nature, timer, events):
    gate = Gate()
    made = handler(kind, nature(kind, gate, well))
    async with (
        aio_serving(made, interceptors=server_interceptors(SLOW, timer=timer)) as target,
        grpc.aio.insecure_channel(target, options=IMPATIENT) as channel,
    ):
        call = begin(channel, kind)
        await aio_wait_until(gate.entered.is_set)
        timer.advance(1.9)
        assert not any(isinstance(event, CallSlow) for event in events)
        timer.advance(0.2)
        await aio_wait_until(lambda: CallSlow(METHOD, "server", 2.0) in events)
        gate.opened.set()
        assert (await answers(call, kind))[-1] == b"done"


@pytest.mark.parametrize("end", [well, with_a_bug])
@pytest.mark.parametrize("nature", NATURES)
@pytest.mark.parametrize("kind", KINDS)
async def test_nothing_waits_for_a_call_that_has_ended(kind, nature, end, timer):
    gate = Gate()
    made = handler(kind, nature(kind, gate, end))
    async with (
        aio_serving(made, interceptors=server_interceptors(SLOW, timer=timer)) as target,
        grpc.aio.insecure_channel(target, options=IMPATIENT) as channel,
    ):
        call = begin(channel, kind)
        await aio_wait_until(gate.entered.is_set)
        assert timer.pending == 1
        gate.opened.set()
        try:
            await answers(call, kind)
        except grpc.RpcError:
            assert end is with_a_bug
        await aio_wait_until(lambda: timer.pending == 0)


@pytest.mark.parametrize("nature", NATURES)
@pytest.mark.parametrize("kind", KINDS)
async def test_nothing_waits_for_a_call_that_its_client_left(kind, nature, timer):
    gate = Gate()
    made = handler(kind, nature(kind, gate, well))
    async with (
        aio_serving(made, interceptors=server_interceptors(SLOW, timer=timer)) as target,
        grpc.aio.insecure_channel(target, options=IMPATIENT) as channel,
    ):
        call = begin(channel, kind)
        if kind in STREAMS:
            assert await call.read() == b"first"
        await aio_wait_until(gate.entered.is_set)
        assert timer.pending == 1
        call.cancel()
        if nature is plain and kind in ONE_ANSWER:
            gate.opened.set()  # its thread works on
        await aio_wait_until(lambda: timer.pending == 0)
        gate.opened.set()


@pytest.mark.parametrize("nature", NATURES)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_timer_that_takes_no_more_does_not_harm_a_call(kind, nature):
    gate = Gate()
    gate.opened.set()
    timer = ManualTimer()
    timer.stop()
    made = handler(kind, nature(kind, gate, well))
    async with aio_serving(made, interceptors=server_interceptors(SLOW, timer=timer)) as target:
        assert (await aio_ask(target, kind))[-1] == b"done"


async def test_a_timer_on_the_loop_of_the_server_does_as_well(events):
    gate = Gate()
    policy = CallPolicy(timeout=DeadlinePolicy(slow_after=0.01))
    made = handler("unary_unary", plain("unary_unary", gate, well))
    async with (
        AsyncWheelTimer() as timer,
        aio_serving(made, interceptors=server_interceptors(policy, timer=timer)) as target,
    ):
        call = asyncio.create_task(aio_ask(target, "unary_unary"))
        await aio_wait_until(lambda: CallSlow(METHOD, "server", 0.01) in events)
        gate.opened.set()
        assert await call == [b"done"]


@pytest.mark.parametrize("kind", STREAMS)
async def test_nothing_waits_for_a_plain_stream_that_did_not_come_about(kind, timer):
    def behavior(request, context):
        raise KeyError("a bug")

    made = handler(kind, behavior)
    async with aio_serving(made, interceptors=server_interceptors(SLOW, timer=timer)) as target:
        with pytest.raises(grpc.RpcError):
            await aio_ask(target, kind)
        assert timer.stats().started == 1
        await aio_wait_until(lambda: timer.pending == 0)
