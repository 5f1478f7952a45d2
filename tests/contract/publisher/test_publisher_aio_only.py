"""The publisher of grpc.aio: its loop, cancellation of tasks, and coroutines as callbacks.

`test_publisher.py` has the rules of both worlds.
"""

import asyncio
import signal

import grpc
import pytest

from fixtures.shops import SERVICE, WHO
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel.errors import ConfigurationError
from rpcwheel.events import ShutdownStep
from rpcwheel.publisher.aio import Publisher
from rpcwheel.registry import RegistryPolicy
from rpcwheel.registry import open_registry as open_sync_registry
from rpcwheel.registry.aio import Registry, open_registry

QUICK = {"port": 0, "lame_duck": 0.05, "grace": 60.0}
ALL = ["withdraw", "not serving", "wait", "stop", "closed"]
LONG = RegistryPolicy(lease_ttl=10**6, timeout=600.0)
"""Neither a lease nor a request ends within a test."""


@pytest.fixture
async def registry(memory):
    async with open_registry(memory, registry_policy=LONG) as registry:
        yield registry


@pytest.fixture
def shop(make_aio_shop):
    return make_aio_shop()


async def ask(port, method=WHO):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as to_server:
        return await to_server.unary_unary(method)(b"", timeout=WAIT_S)


def steps(events):
    return [one.step for one in events.of(ShutdownStep)]


# Start


async def test_a_server_and_a_registry_of_the_sync_api_are_refused(shop, make_shop, memory):
    with open_sync_registry(memory) as other, pytest.raises(TypeError, match="registry must be"):
        Publisher(shop.server, other, SERVICE, port=1)
    with pytest.raises(TypeError, match=r"there is rpcwheel\.Publisher"):
        Publisher(make_shop().server, memory, SERVICE, port=1)


# The order of the stop


@pytest.mark.parametrize("ran_before", [False, True])
async def test_a_canceled_start_is_undone(shop, memory, ran_before, set_limit):
    set_limit("publisher.shutdown.HURRIED_TIMEOUT_S", 0.01)
    called = asyncio.Event()

    class Hanging:
        async def set(self, service, status):
            called.set()
            await asyncio.Event().wait()

    port = shop.listen()
    if ran_before:
        await shop.server.start()
    settings = QUICK | {"port": port, "health": Hanging()}
    published = Publisher(shop.server, memory, SERVICE, **settings)
    starting = asyncio.create_task(published.start())
    await asyncio.wait_for(called.wait(), WAIT_S)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert await published.wait(WAIT_S)
    assert published.registrations == ()
    if ran_before:
        assert await ask(port) == b"a"
    else:
        assert await shop.server.wait_for_termination(WAIT_S) is False


async def test_registrations_are_those_of_the_aio_registry(shop, registry, memory):
    async with Publisher(shop.server, [registry, memory], SERVICE, **QUICK) as published:
        assert published.registries[0] is registry
        assert isinstance(published.registries[1], Registry)
        assert published.registrations[0] == registry.registrations[0]
        assert await published.registrations[1].wait_published(WAIT_S)


async def test_canceling_stop_does_not_cancel_the_shutdown(shop, memory, events, timer):
    published = Publisher(shop.server, memory, SERVICE, timer=timer, **QUICK)
    await published.start()
    stopping = asyncio.create_task(published.stop())
    await aio_wait_until(lambda: steps(events))
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    await aio_wait_until(lambda: timer.advance(1.0) >= 0 and published.state == "closed")
    await aio_wait_until(lambda: steps(events) == ALL)


# Signals


async def test_a_signal_handler_of_the_loop_is_refused(shop, memory):
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, print)
    published = Publisher(shop.server, memory, SERVICE, signals=True, **QUICK)
    try:
        with pytest.raises(ConfigurationError, match=r"SIGTERM has a handler of loop\.add_signal"):
            await published.start()
        assert published.state == "new"
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        await published.stop()
