"""The publisher of grpc.aio keeps the rules of the sync one."""

import asyncio
import contextlib
import signal
import threading

import grpc
import grpc_health.v1.health as grpc_health
import pytest
from grpc_health.v1 import health_pb2

from fixtures.shops import HOLD, SERVICE, WHO
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel.errors import ConfigurationError
from rpcwheel.events import CallbackFailed, ShutdownStep
from rpcwheel.publisher.aio import Publisher
from rpcwheel.registry import RegistryPolicy
from rpcwheel.registry import open_registry as open_sync_registry
from rpcwheel.registry.aio import Registry, open_registry
from rpcwheel.registry.backend import Settings
from rpcwheel.registry.backends import open_backend
from rpcwheel.resolver.aio import insecure_channel
from rpcwheel.testing import FlakyBackend

QUICK = {"port": 0, "lame_duck": 0.05, "grace": 60.0}
ALL = ["withdraw", "not serving", "wait", "stop", "closed"]
LONG = RegistryPolicy(lease_ttl=10**6, timeout=600.0)
"""Neither a lease nor a request ends within a test."""
ENDED = {grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE}


@pytest.fixture
async def registry(memory):
    async with open_registry(memory, registry_policy=LONG) as registry:
        yield registry


@pytest.fixture
def shop(make_aio_shop):
    return make_aio_shop()


@contextlib.asynccontextmanager
async def serving(shop, *args, **settings):
    """Publish a server; stop it at once, as the stop is not what is tested."""
    published = Publisher(shop.server, *args, **{"port": 0} | settings)
    await published.start()
    try:
        yield published
    finally:
        await published.stop(grace=0)


async def ids(registry):
    return [one.id for one in (await registry.lookup(SERVICE)).instances]


async def ask(port, method=WHO):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as to_server:
        return await to_server.unary_unary(method)(b"", timeout=WAIT_S)


async def wait_until_withdrawn(registry):
    async with asyncio.timeout(WAIT_S):
        while await ids(registry):
            pass


def steps(events):
    return [one.step for one in events if isinstance(one, ShutdownStep)]


# Start


async def test_a_server_is_bound_started_published_and_stopped_in_order(
    shop, memory, registry, events
):
    async with Publisher(shop.server, memory, SERVICE, **QUICK) as published:
        assert await published.wait_published(WAIT_S)
        assert await ids(registry) == [f"127.0.0.1:{published.port}"]
        assert await ask(published.port) == b"a"
    await wait_until_withdrawn(registry)
    await aio_wait_until(lambda: steps(events) == ALL)
    assert await shop.server.wait_for_termination(WAIT_S) is False


async def test_a_running_server_is_published_with_its_port(shop, registry):
    port = shop.listen()
    await shop.server.start()
    async with Publisher(shop.server, registry, SERVICE, **QUICK | {"port": port}) as published:
        assert await published.wait_published(WAIT_S)
        assert await ids(registry) == [f"127.0.0.1:{port}"]
    await wait_until_withdrawn(registry)


async def test_a_server_whose_services_are_not_named_is_refused(shop, memory):
    published = Publisher(shop.server, memory, **QUICK)
    with pytest.raises(ConfigurationError, match="name the services that are published"):
        await published.start()
    assert published.state == "closed"


async def test_invalid_arguments_are_refused_at_once(shop, make_shop, memory):
    urls = ["memory://a", "memory://a?nope=1"]
    with open_sync_registry(memory) as sync_registry:
        for server, registry, error, message in (
            (make_shop().server, "memory://", TypeError, "there is rpcwheel"),
            (object(), "memory://", TypeError, "server must be what grpc"),
            (shop.server, sync_registry, TypeError, "registry must be"),
            (shop.server, urls, ConfigurationError, "no option 'nope'"),
        ):
            with pytest.raises(error, match=message):
                Publisher(server, registry, SERVICE, port=1)


# The order of the stop


async def test_no_call_fails_while_servers_are_replaced(make_aio_shop, memory, timer):
    """By the manual timer, each server serves until the client knows that it is withdrawn."""

    async def start(name):
        settings = {"port": 0, "lame_duck": 60.0, "grace": 3600.0}
        settings |= {"timer": timer, "registry_policy": LONG}
        published = Publisher(make_aio_shop(name).server, memory, SERVICE, **settings)
        await published.start()
        assert await published.wait_published(WAIT_S)
        return published

    def is_known(published):
        return any(one.instance.port == published.port for one in to_service.subchannels)

    old = await start("a")
    async with insecure_channel(f"{memory}/{SERVICE}") as to_service:
        who = to_service.unary_unary(WHO)
        answers, over = [], False

        async def call():
            while not over:
                answers.append(await who(b"", timeout=WAIT_S))

        def answered(name):
            return name in answers or any(one.done() for one in calling)

        calling = [asyncio.create_task(call()) for _ in range(2)]
        await aio_wait_until(lambda: answered(b"a"))
        for name in ("b", "c"):
            new = await start(name)
            await aio_wait_until(lambda: answered(name.encode()))  # noqa: B023
            old.begin_stop()
            await aio_wait_until(lambda: not is_known(old))  # noqa: B023
            await aio_wait_until(lambda: timer.advance(1.0) >= 0 and old.state == "closed")  # noqa: B023
            old = new
        over = True
        await asyncio.gather(*calling)
    await old.stop(grace=0)
    assert set(answers) == {b"a", b"b", b"c"}


async def test_calls_in_flight_may_end_within_the_grace(shop, memory, events):
    async with (
        Publisher(shop.server, memory, SERVICE, **QUICK) as published,
        grpc.aio.insecure_channel(f"127.0.0.1:{published.port}") as held,
    ):
        call = held.unary_unary(HOLD)(b"", timeout=WAIT_S)
        await asyncio.wait_for(shop.held.wait(), WAIT_S)
        published.begin_stop()
        await aio_wait_until(lambda: "stop" in steps(events))
        shop.release.set()
        assert await call == b"a"


@pytest.mark.parametrize("settings", [{"lame_duck": 600}, {"grace": 600}])
async def test_stop_with_grace_0_hurries_a_running_stop(shop, memory, settings, events):
    async with (
        Publisher(shop.server, memory, SERVICE, **QUICK | settings) as published,
        grpc.aio.insecure_channel(f"127.0.0.1:{published.port}") as held,
    ):
        call = held.unary_unary(HOLD)(b"")
        await asyncio.wait_for(shop.held.wait(), WAIT_S)
        published.begin_stop()
        step = "wait" if "lame_duck" in settings else "stop"
        await aio_wait_until(lambda: steps(events)[-1:] == [step])
        await asyncio.gather(*[published.stop(grace=0) for _ in range(3)])
        assert published.state == "closed"
        assert await call.code() in ENDED


async def test_it_can_be_stopped_from_any_thread(shop, memory):
    async with Publisher(shop.server, memory, SERVICE, **QUICK) as published:
        threading.Thread(target=published.begin_stop).start()
        assert await published.wait(WAIT_S)


async def test_start_and_stop_are_idempotent(shop, memory, events):
    published = Publisher(shop.server, memory, SERVICE, **QUICK)
    await published.start()
    await published.start()
    await asyncio.gather(*[published.stop() for _ in range(4)])
    await published.stop()
    await aio_wait_until(lambda: steps(events) == ALL)
    with pytest.raises(RuntimeError, match="can't start again"):
        await published.start()


async def test_a_stop_during_the_start_undoes_the_start(shop, memory):
    class Health:
        async def set(self, service, status):
            await published.stop()

    published = Publisher(shop.server, memory, SERVICE, health=Health(), **QUICK)
    await published.start()
    assert published.state == "closed"
    assert published.registrations == ()
    assert await shop.server.wait_for_termination(WAIT_S) is False


@pytest.mark.parametrize("ran_before", [False, True])
async def test_a_canceled_start_is_undone(shop, memory, ran_before):
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


async def test_on_serving_and_what_it_returns_are_called_on_the_loop(shop, memory):
    loops = []

    def on_serving(published):
        loops.append((published.state, asyncio.get_running_loop()))
        return lambda: loops.append(("stopped", asyncio.get_running_loop()))

    async with serving(shop, memory, SERVICE, on_serving=on_serving):
        pass
    loop = asyncio.get_running_loop()
    await aio_wait_until(lambda: loops == [("starting", loop), ("stopped", loop)])


async def test_registrations_are_those_of_the_aio_registry(shop, registry, memory):
    async with serving(shop, [registry, memory], SERVICE) as published:
        assert published.registries[0] is registry
        assert isinstance(published.registries[1], Registry)
        assert published.registrations[0] == registry.registrations[0]
        assert await published.registrations[1].wait_published(WAIT_S)


async def test_a_publisher_that_was_never_started_closes_its_registries(shop, memory):
    published = Publisher(shop.server, memory, SERVICE, **QUICK)
    await published.stop()
    assert published.registries[0].closed
    assert published.state == "closed"


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


async def test_a_frozen_registry_delays_neither_the_stop_nor_the_loop(shop, memory, events, timer):
    backend = FlakyBackend(open_backend(memory, Settings(lease_s=10**6, timeout_s=600.0)))
    async with Registry(backend, registry_policy=LONG) as frozen:
        settings = QUICK | {"timer": timer}
        async with Publisher(shop.server, frozen, SERVICE, **settings) as published:
            assert await published.wait_published(WAIT_S)
            backend.freeze()
            published.begin_stop()
            await aio_wait_until(lambda: timer.advance(1.0) >= 0 and published.state == "closed")
        backend.up()
    await aio_wait_until(lambda: steps(events) == ALL)


# Signals and health


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


@pytest.mark.parametrize("module", [grpc_health, grpc_health.aio], ids=["sync", "aio"])
async def test_health_servicers_of_both_worlds_are_set(shop, memory, module):
    health = module.HealthServicer()

    async def says(service):
        status = health.Check(health_pb2.HealthCheckRequest(service=service), None)
        return (status if module is grpc_health else await status).status

    async with serving(shop, memory, SERVICE, health=health):
        assert await says(SERVICE) == await says("") == health_pb2.HealthCheckResponse.SERVING
    assert await says(SERVICE) == await says("") == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_failing_health_servicer_is_an_event_at_the_stop_and_undoes_the_start(
    shop, make_aio_shop, memory, events
):
    class Broken:
        def __init__(self, status) -> None:
            self.fails_at = status

        async def set(self, service, status):
            if status == self.fails_at:
                raise LookupError(service)

    async with serving(shop, memory, SERVICE, health=Broken(2)):
        pass
    await aio_wait_until(lambda: steps(events) == ALL)
    await aio_wait_until(lambda: [one for one in events if isinstance(one, CallbackFailed)])
    published = Publisher(make_aio_shop().server, memory, SERVICE, health=Broken(1), **QUICK)
    with pytest.raises(LookupError):
        await published.start()
    assert published.state == "closed"
