"""A kit is closed, whatever happens to `close`."""

import asyncio
from types import SimpleNamespace

import pytest

import rpcwheel


async def test_a_close_that_is_canceled_while_heartbeats_end_closes_the_live_view():
    kit, ending = rpcwheel.aio.Kit(status_port=0, heartbeat=10.0), asyncio.Event()

    async def aclose():
        ending.set()
        await asyncio.Event().wait()

    kit._manager = SimpleNamespace(aclose=aclose)
    closing = asyncio.create_task(kit.close(0))
    await ending.wait()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert kit.status_address is None
