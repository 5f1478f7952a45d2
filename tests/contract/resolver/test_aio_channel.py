"""A channel by name of grpc.aio calls the instances that the registry has."""

import asyncio
import functools
import gc

import grpc
import pytest

import rpcwheel
from fixtures.shops import HOLD, SERVICE, WHO
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel.balancer import BalancerPolicy
from rpcwheel.balancer.aio_channel import BalancedChannel
from rpcwheel.errors import ConfigurationError, RegistryClosed
from rpcwheel.events import CallbackFailed
from rpcwheel.instance import ServiceInstance
from rpcwheel.registry import RegistryPolicy
from rpcwheel.registry.aio import Registry, open_registry
from rpcwheel.registry.backend import Settings
from rpcwheel.registry.backends import open_backend
from rpcwheel.resolver.aio import insecure_channel
from rpcwheel.resolver.resolver import SESSIONS
from rpcwheel.testing import FlakyBackend

POLICY = RegistryPolicy(lease_ttl=1800.0, timeout=1.0)
NEVER_S = 10**6

channel = functools.partial(insecure_channel, balancer_policy=BalancerPolicy(pick_timeout=WAIT_S))
"""Its first call waits for instances for longer than a machine stands still."""


@pytest.fixture
async def registry(memory):
    async with open_registry(memory, registry_policy=POLICY) as registry:
        yield registry


@pytest.fixture
async def flaky(memory):
    backend = FlakyBackend(open_backend(memory, Settings(lease_s=1800.0, timeout_s=1.0)))
    async with Registry(backend, registry_policy=POLICY) as registry:
        yield backend, registry
        backend.up()


@pytest.fixture
def serve(make_aio_shop, registry):
    """Start a server and publish it; gives its instance."""

    async def serve(name, shop=None, **fields) -> ServiceInstance:
        shop = shop or make_aio_shop(name)
        instance = ServiceInstance(service=SERVICE, host="127.0.0.1", port=shop.listen(), **fields)
        await shop.server.start()
        await registry.register(instance, wait=WAIT_S)
        return instance

    return serve


async def who(to_service, times=1):
    ask = to_service.unary_unary(WHO)
    return {await ask(b"", timeout=WAIT_S) for _ in range(times)}


async def wait_until_called(to_service, names):
    async with asyncio.timeout(WAIT_S):
        while await who(to_service, 2 * len(names)) != names:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)


async def error_text(to_service):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await to_service.unary_unary(WHO)(b"", timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    return caught.value.details()


# Which servers are called


async def test_a_channel_calls_all_published_servers_and_follows_changes(serve, registry, memory):
    one = await serve("a")
    async with channel(f"{memory}/{SERVICE}") as to_service:
        assert isinstance(to_service, BalancedChannel)
        assert await who(to_service) == {b"a"}
        await serve("b")
        await wait_until_called(to_service, {b"a", b"b"})
        await registry.unregister(one, wait=WAIT_S)
        await wait_until_called(to_service, {b"b"})


async def test_a_service_without_instances_is_unavailable(registry, memory):
    async with channel(f"{memory}/{SERVICE}") as to_service:
        assert await error_text(to_service) == f"no instance of {SERVICE} is known"


async def test_calls_outlive_a_change_of_addresses(make_aio_shop, serve, registry, memory):
    shop = make_aio_shop("a")
    one = await serve("a", shop)
    async with channel(
        f"{memory}/{SERVICE}", balancer_policy=BalancerPolicy(drain_timeout=NEVER_S)
    ) as to_service:
        call = to_service.unary_unary(HOLD)(b"", timeout=WAIT_S)
        await asyncio.wait_for(shop.held.wait(), WAIT_S)
        await serve("b")
        await registry.unregister(one, wait=WAIT_S)
        await wait_until_called(to_service, {b"b"})
        shop.release.set()
        assert await call == b"a"


async def test_a_stub_whose_channel_was_dropped_follows_the_changes(serve, registry, memory):
    one = await serve("a")
    ask = channel(f"{memory}/{SERVICE}").unary_unary(WHO)
    gc.collect()
    assert await ask(b"", timeout=WAIT_S) == b"a"
    await serve("b")
    await registry.unregister(one, wait=WAIT_S)
    async with asyncio.timeout(WAIT_S):
        while await ask(b"", timeout=WAIT_S) != b"b":  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)


async def test_on_subchannel_and_on_removed_are_called_if_they_raise(
    serve, registry, memory, events
):
    instances = [await serve("a"), await serve("b")]
    made, gone = [], []

    def forget(subchannel):
        gone.append(subchannel)
        raise KeyError("a bug")

    def failures():
        return [one for one in events if isinstance(one, CallbackFailed)]

    policy = BalancerPolicy(pick_timeout=WAIT_S, self_preservation=False)
    settings = {"on_subchannel": made.append, "on_removed": forget, "balancer_policy": policy}
    async with channel(f"{memory}/{SERVICE}", **settings) as to_service:
        await wait_until_called(to_service, {b"a", b"b"})
        assert {one.id for one in made} == {one.id for one in instances}
        for one in instances:
            await registry.unregister(one, wait=WAIT_S)
        await aio_wait_until(lambda: set(gone) == set(made))
        await aio_wait_until(lambda: len(failures()) == 2)
    assert {repr(one.error) for one in failures()} == {"KeyError('a bug')"}
    assert "forget" in failures()[0].callback


# The registry


async def test_after_the_pick_timeout_calls_fail_with_the_error_of_the_registry(flaky, timer):
    backend, registry = flaky
    backend.down("the cable is cut")
    settings = {"balancer_policy": BalancerPolicy(pick_timeout=30.0), "timer": timer}
    async with channel(SERVICE, registry=registry, **settings) as to_service:
        await aio_wait_until(lambda: timer.pending)
        timer.advance(30.0)
        assert "the cable is cut" in await error_text(to_service)
    assert timer.pending == 0


async def test_the_first_call_fails_with_the_reason_after_the_pick_timeout(flaky, timer):
    backend, registry = flaky
    backend.down("the cable is cut")
    settings = {"balancer_policy": BalancerPolicy(pick_timeout=0.2), "timer": timer}
    async with channel(SERVICE, registry=registry, **settings) as to_service:
        await aio_wait_until(lambda: timer.pending)  # its time does not pass
        said = await error_text(to_service)
    assert said.startswith(f"no instance of {SERVICE} is known yet: ")
    assert said.endswith("the cable is cut")


async def test_a_registry_of_the_user_stays_open(registry):
    async with channel(SERVICE, registry=registry):
        pass
    assert not registry.closed
    await registry.close()
    with pytest.raises(RegistryClosed):
        channel(SERVICE, registry=registry)


# Arguments

URL = "memory://a/shop.Orders"


async def test_invalid_arguments_are_refused_at_once():
    for arguments, error, said in (
        ({"target": "memory://a"}, ConfigurationError, "no service is named"),
        ({"target": "etdc://a/shop.Orders"}, ConfigurationError, "did you mean etcd://"),
        ({"target": URL, "registry": 7}, TypeError, "registry must be"),
        ({"target": URL, "registry_policy": 7}, TypeError, "must be a RegistryPolicy or"),
        ({"target": URL, "on_removed": 7}, TypeError, "on_removed must be"),
    ):
        with pytest.raises(error, match=said):
            channel(**arguments)


def test_without_a_running_loop_it_is_refused():
    with pytest.raises(RuntimeError, match="no event loop runs here"):
        channel("memory://a/shop.Orders")


async def test_channels_of_one_registry_url_share_a_session_until_the_last_is_closed_or_dropped(
    memory,
):
    gc.collect()
    await aio_wait_until(lambda: len(SESSIONS._open) == 0)
    one, other, blocking = (
        channel(f"{memory}/shop.Orders"),
        channel(f"{memory}/shop.Audit?group=blue"),
        rpcwheel.insecure_channel(f"{memory}/shop.Orders"),
    )
    assert len(SESSIONS._open) == 1
    with_policy = channel(f"{memory}/shop.Orders", registry_policy=RegistryPolicy(lease_ttl=20.0))
    assert len(SESSIONS._open) == 2
    await with_policy.close()
    await one.close()
    await one.close()
    blocking.close()
    assert len(SESSIONS._open) == 1
    del other
    gc.collect()
    await aio_wait_until(lambda: len(SESSIONS._open) == 0)
