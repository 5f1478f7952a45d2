"""Many reconnects during many calls on uvloop: no call fails."""

import asyncio

import grpc
import pytest

from fixtures.aio_channels import ANSWERS, KINDS, STYLES, Stub
from fixtures.shop import Silent
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel.transport.aio import ReconnectingChannel

try:
    import uvloop
except ImportError:  # not on Windows
    uvloop = None
else:
    uvloop.new_event_loop().close()  # the first one opens a pipe that libuv keeps (signal.c)

TASKS = 8
REPLACEMENTS = 100


async def storm(channel):
    """Reconnect under busy tasks; returns the failures, and the number of successes."""
    stub, wrong, well, over = Stub(channel), [], 0, False

    async def work(number):
        nonlocal well
        kind, style = KINDS[number % 4], list(STYLES.values())[number // 4]
        while not over:
            try:
                answer = await style(stub, kind)
            except BaseException as error:
                wrong.append(error)
                raise
            if answer != ANSWERS[kind]:
                wrong.append(answer)
            well += 1

    async with asyncio.TaskGroup() as group:
        for number in range(TASKS):
            group.create_task(work(number))
        for _ in range(REPLACEMENTS):
            before = well
            await aio_wait_until(lambda before=before: well > before or wrong)
            assert channel.reconnect("to and fro", force=True)
        over = True
    return wrong, well


@pytest.mark.skipif(uvloop is None, reason="uvloop is not installed")
def test_no_call_fails_on_uvloop(shop, timer):
    async def main():
        async with ReconnectingChannel(shop.target, timer=timer) as channel:
            wrong, well = await storm(channel)
            assert (wrong, channel.calls) == ([], 0)
            assert well >= REPLACEMENTS
            shop.then(silent := Silent())
            call = Stub(channel).unary_stream(b"x")
            waiting = asyncio.create_task(call.read())
            await aio_wait_until(silent.begun.is_set)
            assert channel.reconnect("it is dead", drain_timeout=0, force=True)
            with pytest.raises(grpc.aio.AioRpcError, match="it is dead"):
                await asyncio.wait_for(waiting, WAIT_S)

    uvloop.run(main())
