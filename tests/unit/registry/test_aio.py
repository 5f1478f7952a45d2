"""Subscriptions of `rpcwheel.aio` that begin while another thread closes their registry."""

import asyncio
import threading

from fixtures.waiting import WAIT_S
from rpcwheel.registry import aio, registry


async def test_a_subscription_that_begins_while_the_registry_closes_ends(monkeypatch):
    opened, subscribe = aio.open_registry("memory://"), registry.Registry.subscribe

    def subscribe_before_the_close(*arguments):
        subscription = subscribe(*arguments)
        closing = threading.Thread(target=asyncio.run, args=(opened.close(),))
        closing.start()
        closing.join()
        return subscription

    monkeypatch.setattr(registry.Registry, "subscribe", subscribe_before_the_close)
    async with asyncio.timeout(WAIT_S):
        assert [snapshot async for snapshot in opened.subscribe("shop.Orders")] == []
