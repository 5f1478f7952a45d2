"""A kit is closed, whatever happens to `close`."""

import asyncio
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

import rpcwheel
from fixtures.waiting import WAIT_S


async def test_a_close_that_is_canceled_while_heartbeats_end_closes_the_live_view():
    kit, ending = rpcwheel.aio.Kit(status_port=0, heartbeat=10.0), asyncio.Event()

    async def aclose():
        ending.set()
        await asyncio.Event().wait()

    kit._manager = SimpleNamespace(aclose=aclose)
    closing = asyncio.create_task(kit.close(0))
    await asyncio.wait_for(ending.wait(), WAIT_S)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert kit.status_address is None


def test_a_detector_whose_close_raises_does_not_keep_the_heartbeats(world):
    kit = world.api.Kit(heartbeat=10.0)
    broken = Mock(close=Mock(side_effect=ZeroDivisionError))
    kit._detectors[broken] = None
    with pytest.raises(ZeroDivisionError):
        world.do(kit.close, 0)
    assert kit._manager.closed
    del kit._detectors[broken]
