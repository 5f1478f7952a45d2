"""The publisher of grpc.aio: the rules of its twin, on a loop."""

import asyncio
import subprocess
import sys
import threading
import time

import grpc
import grpc_health.v1.health as grpc_health
import pytest
from grpc_health.v1 import health_pb2

from fixtures.shops import HOLD, SERVICE, WHO
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel.errors import ConfigurationError
from rpcwheel.observe import ListenerFailed, ServingEnds
from rpcwheel.registry import open_registry as open_for_threads
from rpcwheel.registry.aio import FailbackRegistry, Publisher, channel, open_registry
from rpcwheel.registry.policy import RegistryPolicy
from rpcwheel.registry.provider import Settings
from rpcwheel.registry.providers.memory import MemoryProvider
from rpcwheel.registry.url import parse_url
from rpcwheel.testing import FlakyProvider

QUICK = {"port": 0, "lame_duck": 0.05, "grace": 5.0}
ALL = ["withdraw", "not serving", "wait", "stop", "closed"]


@pytest.fixture
async def registry(memory):
    async with open_registry(memory) as registry:
        yield registry


@pytest.fixture
def shop(make_aio_shop):
    return make_aio_shop()


async def ids(registry):
    return [one.id for one in (await registry.lookup(SERVICE)).instances]


async def ask(port, method=WHO):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as held:
        return await held.unary_unary(method)(b"", timeout=WAIT_S)


def steps(events):
    return [one.step for one in events if isinstance(one, ServingEnds)]


async def test_a_server_is_bound_started_published_and_ended_in_order(
    shop, memory, registry, events
):
    async with Publisher(shop.server, memory, SERVICE, **QUICK) as published:
        assert await published.wait_published(WAIT_S)
        assert await ids(registry) == [f"127.0.0.1:{published.port}"]
        assert await ask(published.port) == b"a"
    assert await ids(registry) == []
    await aio_wait_until(lambda: steps(events) == ALL)
    assert await shop.server.wait_for_termination(0) is False


async def test_a_server_that_runs_is_published_as_it_is(shop, registry):
    port = shop.listen()
    await shop.server.start()
    settings = QUICK | {"port": port}
    async with Publisher(shop.server, registry, SERVICE, **settings) as published:
        assert await published.wait_published(WAIT_S)
        assert await ids(registry) == [f"127.0.0.1:{port}"]
    assert await ids(registry) == []


async def test_services_are_to_be_named(shop, memory):
    published = Publisher(shop.server, memory, **QUICK)
    with pytest.raises(ConfigurationError, match="name the services that are published"):
        await published.start()
    assert published.state == "closed"


async def test_while_clients_hear_of_its_end_a_server_goes_on_and_is_not_found(
    shop, registry, timer, events
):
    settings = QUICK | {"lame_duck": 60.0}
    async with Publisher(shop.server, registry, SERVICE, timer=timer, **settings) as published:
        assert await published.wait_published(WAIT_S)
        published.begin_stop()
        await aio_wait_until(lambda: "wait" in steps(events) and timer.pending)
        assert await ids(registry) == []
        assert await ask(published.port) == b"a"
        timer.advance(60.0)
        assert await published.wait(WAIT_S)
    assert timer.pending == 0


async def test_no_call_fails_while_a_server_of_two_is_replaced(make_aio_shop, memory):
    def serve(name):
        settings = {"port": 0, "lame_duck": 1.0}
        return Publisher(make_aio_shop(name).server, memory, SERVICE, **settings)

    async with serve("a"), channel(f"{memory}/{SERVICE}") as to_service:
        who = to_service.unary_unary(WHO)
        answers = []

        async def call():
            while True:
                answers.append(await who(b"", timeout=WAIT_S))

        calling = [asyncio.create_task(call()) for _ in range(2)]
        for name in (b"b", b"c"):
            async with serve(name.decode()) as published:
                assert await published.wait_published(WAIT_S)
                await aio_wait_until(lambda: name in answers or any(one.done() for one in calling))  # noqa: B023
        for one in calling:
            assert one.cancel()
        for one in await asyncio.gather(*calling, return_exceptions=True):
            assert isinstance(one, asyncio.CancelledError)
    assert set(answers) == {b"a", b"b", b"c"}


async def test_calls_in_flight_may_end_within_the_grace(shop, memory):
    async with (
        Publisher(shop.server, memory, SERVICE, **QUICK) as published,
        grpc.aio.insecure_channel(f"127.0.0.1:{published.port}") as held,
    ):
        call = held.unary_unary(HOLD)(b"", timeout=WAIT_S)
        await asyncio.wait_for(shop.held.wait(), WAIT_S)
        published.begin_stop()
        assert not await published.wait(0.3)
        shop.release.set()
        assert await call == b"a"


@pytest.mark.parametrize("settings", [{"lame_duck": 600}, {"grace": 600}])
async def test_whoever_is_in_a_hurry_ends_it_at_once(shop, memory, settings, events):
    async with (
        Publisher(shop.server, memory, SERVICE, **QUICK | settings) as published,
        grpc.aio.insecure_channel(f"127.0.0.1:{published.port}") as held,
    ):
        call = held.unary_unary(HOLD)(b"", timeout=WAIT_S)
        await asyncio.wait_for(shop.held.wait(), WAIT_S)
        published.begin_stop()
        step = "wait" if "lame_duck" in settings else "stop"
        await aio_wait_until(lambda: steps(events)[-1:] == [step])
        await published.stop(grace=0)
        assert published.state == "closed"
        assert await call.code() in {grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE}


async def test_an_engine_that_hangs_holds_up_no_end(shop, memory, events):
    dead = FlakyProvider(MemoryProvider(parse_url(memory), Settings(2.0, 30.0)))
    policy = RegistryPolicy(lease=2.0, timeout=30.0)
    async with FailbackRegistry(dead, policy=policy) as registry:
        async with Publisher(shop.server, registry, SERVICE, **QUICK) as published:
            assert await published.wait_published(WAIT_S)
            dead.freeze()
            began = time.monotonic()
            await published.stop()
            assert time.monotonic() - began < 15.0
        dead.up()
    await aio_wait_until(lambda: steps(events) == ALL)


async def test_it_can_be_ended_from_any_thread(shop, memory):
    async with Publisher(shop.server, memory, SERVICE, **QUICK) as published:
        threading.Thread(target=published.begin_stop).start()
        assert await published.wait(WAIT_S)


async def test_it_ends_once_whoever_asks_and_however_often(shop, memory, events):
    published = Publisher(shop.server, memory, SERVICE, **QUICK)
    with pytest.raises(RuntimeError, match="was not started"):
        published.begin_stop()
    await published.start()
    await published.start()
    await asyncio.gather(*[published.stop() for _ in range(4)])
    await published.stop()
    await aio_wait_until(lambda: steps(events) == ALL)
    with pytest.raises(RuntimeError, match="can't start again"):
        await published.start()


async def test_what_was_never_started_lets_go_of_its_registries(shop, memory):
    published = Publisher(shop.server, memory, SERVICE, **QUICK)
    await published.stop()
    assert published.registries[0].closed
    assert published.state == "closed"


async def test_who_is_cancelled_while_he_waits_for_the_end_does_not_stop_it(shop, memory, events):
    settings = QUICK | {"lame_duck": 0.3}
    published = Publisher(shop.server, memory, SERVICE, **settings)
    await published.start()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(published.stop(), 0.05)
    assert await published.wait(WAIT_S)
    await aio_wait_until(lambda: steps(events) == ALL)


def test_a_loop_that_ends_meanwhile_is_not_held_up():
    """In a process of its own: grpc.aio bears one loop at a time."""
    code = """if True:
        import asyncio, grpc.aio
        from rpcwheel.observe import ServingEnds, add_sink
        from rpcwheel.registry.aio import Publisher

        said = []

        def say(event):
            if isinstance(event, ServingEnds):
                print(event.step)
                said.append(event.step)

        add_sink(say)

        async def main():
            settings = {"port": 0, "lame_duck": 600, "grace": 600}
            published = Publisher(grpc.aio.server(), "memory://", "shop.Orders", **settings)
            await published.start()
            published.begin_stop()
            while "wait" not in said:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)  # it lies in its lame duck, and the loop ends

        asyncio.run(main())
    """
    command = [sys.executable, "-W", "error", "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.split() == ["withdraw", "not", "serving", "wait", "closed"]


@pytest.mark.parametrize("world", ["sync", "aio"])
async def test_a_health_servicer_of_either_world_is_told(shop, memory, world):
    health = grpc_health.aio.HealthServicer() if world == "aio" else grpc_health.HealthServicer()

    def says(service):
        return health._server_status[service]

    async with Publisher(shop.server, memory, SERVICE, health=health, **QUICK):
        assert says(SERVICE) == says("") == health_pb2.HealthCheckResponse.SERVING
    assert says(SERVICE) == says("") == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_health_that_fails_is_told_at_the_end_and_undoes_all_at_the_start(
    shop, make_aio_shop, memory, events
):
    class Broken:
        def __init__(self, status) -> None:
            self.fails_at = status

        async def set(self, service, status):
            if status == self.fails_at:
                raise LookupError(service)

    async with Publisher(shop.server, memory, SERVICE, health=Broken(2), **QUICK):
        pass
    await aio_wait_until(lambda: steps(events) == ALL)
    await aio_wait_until(lambda: [one for one in events if isinstance(one, ListenerFailed)])
    other = make_aio_shop()
    published = Publisher(other.server, memory, SERVICE, health=Broken(1), **QUICK)
    with pytest.raises(LookupError):
        await published.start()
    assert published.state == "closed"


async def test_a_server_of_the_other_world_is_refused(make_shop):
    with pytest.raises(TypeError, match="there is rpcwheel"):
        Publisher(make_shop().server, "memory://", SERVICE, port=1)
    with pytest.raises(TypeError, match="server must be what grpc"):
        Publisher(object(), "memory://", SERVICE, port=1)


async def test_what_was_opened_in_vain_is_closed(shop):
    with pytest.raises(ConfigurationError, match="no option 'nope'"):
        Publisher(shop.server, ["memory://a", "memory://a?nope=1"], SERVICE, port=1)


async def test_a_sync_registry_is_refused(shop, memory):
    with (
        open_for_threads(memory) as registry,
        pytest.raises(TypeError, match="registry must be"),
    ):
        Publisher(shop.server, registry, SERVICE, port=1)
