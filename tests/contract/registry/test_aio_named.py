"""The channel by name of grpc.aio: the rules of its twin, on a loop."""

import asyncio
import gc

import grpc
import pytest

from fixtures.shops import HOLD, SERVICE, WHO
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel.cluster.aio import ClusterChannel
from rpcwheel.cluster.policy import ClusterPolicy
from rpcwheel.errors import ConfigurationError, RegistryClosed
from rpcwheel.instance import ServiceInstance
from rpcwheel.observe import ListenerFailed, RecordSkipped
from rpcwheel.registry.aio import FailbackRegistry, channel, open_registry
from rpcwheel.registry.aio_named import SESSIONS
from rpcwheel.registry.policy import RegistryPolicy
from rpcwheel.registry.provider import Settings
from rpcwheel.registry.providers.memory import MemoryProvider
from rpcwheel.registry.url import parse_url
from rpcwheel.testing import FlakyProvider


@pytest.fixture(autouse=True)
async def none_stays_open():
    yield
    gc.collect()
    await asyncio.wait_for(aio_wait_until(lambda: len(SESSIONS) == 0), WAIT_S)


@pytest.fixture
async def registry(memory):
    async with open_registry(memory) as registry:
        yield registry


@pytest.fixture
async def flaky(memory):
    provider = FlakyProvider(MemoryProvider(parse_url(memory), Settings(2.0, 1.0)))
    policy = RegistryPolicy(lease=2.0, timeout=1.0)
    async with FailbackRegistry(provider, policy=policy) as registry:
        yield provider, registry


@pytest.fixture
def serve(make_aio_shop, registry):
    """Start a server and publish it; gives its instance."""

    async def serve(name, **told) -> ServiceInstance:
        shop = make_aio_shop(name)
        instance = ServiceInstance(service=SERVICE, host="127.0.0.1", port=shop.listen(), **told)
        await shop.server.start()
        await registry.register(instance, wait=WAIT_S)
        return instance

    return serve


async def who(to_service, times=1):
    ask = to_service.unary_unary(WHO)
    return {await ask(b"", timeout=WAIT_S) for _ in range(times)}


async def at_last(to_service, names):
    async with asyncio.timeout(WAIT_S):
        while await who(to_service, 2 * len(names)) != names:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)


async def refusal(to_service):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await to_service.unary_unary(WHO)(b"", timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    return caught.value.details()


@pytest.mark.parametrize("balance", ["round_robin", "core"])
async def test_it_calls_all_that_are_published_and_follows_who_comes_and_goes(
    serve, registry, memory, balance
):
    one = await serve("a")
    async with channel(f"{memory}/{SERVICE}", balance=balance) as to_service:
        assert await who(to_service) == {b"a"}
        await serve("b")
        await at_last(to_service, {b"a", b"b"})
        await registry.unregister(one, wait=WAIT_S)
        await at_last(to_service, {b"b"})


@pytest.mark.parametrize("balance", ["round_robin", "core"])
async def test_where_nobody_is_published_calls_say_so(registry, memory, balance):
    async with channel(f"{memory}/{SERVICE}", balance=balance) as to_service:
        assert await refusal(to_service) == f"no instance of {SERVICE} is known"


async def test_group_and_version_say_which_are_meant(serve, memory):
    await serve("a")
    await serve("b", group="blue", version="1")
    async with channel(f"{memory}/{SERVICE}?group=blue", version="1") as to_service:
        assert await who(to_service, 4) == {b"b"}
    async with channel(f"{memory}/{SERVICE}") as to_service:
        await at_last(to_service, {b"a", b"b"})


async def test_calls_outlive_a_change_of_addresses(make_aio_shop, serve, registry, memory):
    shop = make_aio_shop("a")
    one = ServiceInstance(service=SERVICE, host="127.0.0.1", port=shop.listen())
    await shop.server.start()
    await registry.register(one, wait=WAIT_S)
    async with channel(f"{memory}/{SERVICE}") as to_service:
        call = to_service.unary_unary(HOLD)(b"", timeout=WAIT_S)
        await asyncio.wait_for(shop.held.wait(), WAIT_S)
        await serve("b")
        await registry.unregister(one, wait=WAIT_S)
        await at_last(to_service, {b"b"})
        shop.release.set()
        assert await call == b"a"


async def test_no_change_of_a_list_of_grpc_s_own_ends_a_call(
    make_aio_shop, serve, registry, memory
):
    shop = make_aio_shop("a")
    one = ServiceInstance(service=SERVICE, host="127.0.0.1", port=shop.listen())
    await shop.server.start()
    await registry.register(one, wait=WAIT_S)
    at_once = ClusterPolicy(drain=0.0)
    async with channel(f"{memory}/{SERVICE}", balance="core", cluster=at_once) as to_service:
        call = to_service.unary_unary(HOLD)(b"", timeout=WAIT_S)
        await asyncio.wait_for(shop.held.wait(), WAIT_S)
        await serve("b")
        await at_last(to_service, {b"a", b"b"})
        await registry.unregister(one, wait=WAIT_S)
        await at_last(to_service, {b"b"})
        shop.release.set()
        assert await call == b"a"


async def test_members_are_told_of_when_they_come_and_go(serve, registry, memory):
    one = await serve("a")
    made, gone = [], []
    settings = {"on_member": made.append, "on_removed": gone.append}
    async with channel(f"{memory}/{SERVICE}", **settings) as to_service:
        await who(to_service)
        assert [member.id for member in made] == [one.id]
        await registry.unregister(one, wait=WAIT_S)
        await aio_wait_until(lambda: gone == made)


async def test_each_that_is_gone_is_told_of_whatever_who_is_told_raises(
    serve, registry, memory, events
):
    instances = [await serve("a"), await serve("b")]
    gone = []

    def forget(member):
        gone.append(member)
        raise KeyError("a bug")

    async with channel(f"{memory}/{SERVICE}", on_removed=forget) as to_service:
        await at_last(to_service, {b"a", b"b"})
        members = set(to_service.members)
        for one in instances:
            await registry.unregister(one, wait=WAIT_S)
        await aio_wait_until(lambda: set(gone) == members)
    told = [one for one in events if isinstance(one, ListenerFailed)]
    assert [repr(one.error) for one in told] == ["KeyError('a bug')"] * 2
    assert "forget" in told[0].listener


@pytest.mark.parametrize("balance", ["round_robin", "core"])
async def test_with_credentials_all_is_over_tls(
    make_aio_shop, registry, memory, certificates, balance
):
    shop = make_aio_shop("a")
    port = shop.server.add_secure_port("127.0.0.1:0", certificates.server_credentials())
    await shop.server.start()
    one = ServiceInstance(service=SERVICE, host="127.0.0.1", port=port, protocol="grpcs")
    await registry.register(one, wait=WAIT_S)
    trusted = certificates.channel_credentials()
    async with channel(f"{memory}/{SERVICE}", trusted, balance=balance) as to_service:
        assert await who(to_service) == {b"a"}


async def test_who_can_t_be_in_the_list_is_told_of_once(serve, registry, memory, events):
    await serve("a")
    other = ServiceInstance(service=SERVICE, host="127.0.0.1", port=2, protocol="grpcs")
    nowhere = ServiceInstance(service=SERVICE, host="no.such.host.invalid", port=1)
    for one in (other, nowhere):
        await registry.register(one, wait=WAIT_S)
    async with channel(f"{memory}/{SERVICE}", balance="core") as to_service:
        assert await who(to_service, 3) == {b"a"}
        await serve("b")
        await at_last(to_service, {b"a", b"b"})
    told = sorted(one.key for one in events if isinstance(one, RecordSkipped))
    assert told == ["127.0.0.1:2", "no.such.host.invalid:1"]


async def test_while_the_registry_can_t_be_reached_calls_end_with_the_reason_in_time(flaky, timer):
    provider, registry = flaky
    provider.down("the cable is cut")
    settings = {"cluster": ClusterPolicy(wait=30.0), "timer": timer}
    async with channel(SERVICE, registry=registry, **settings) as to_service:
        await aio_wait_until(lambda: timer.pending)
        timer.advance(30.0)
        assert "the cable is cut" in await refusal(to_service)
    provider.up()
    assert timer.pending == 0


async def test_a_call_that_has_waited_in_vain_is_told_why_nothing_is_known_yet(flaky, timer):
    provider, registry = flaky
    provider.down("the cable is cut")
    settings = {"cluster": ClusterPolicy(wait=5.0), "timer": timer}
    async with channel(SERVICE, registry=registry, **settings) as to_service:
        waits = asyncio.ensure_future(refusal(to_service))
        await aio_wait_until(
            lambda: timer.pending == 2
        )  # the call's, and that of the last question
        timer.advance(5.0)
        assert "the cable is cut" in await waits
    provider.up()


async def test_a_registry_of_the_user_s_stays_open(registry):
    async with channel(SERVICE, registry=registry):
        pass
    assert not registry.closed
    await registry.close()
    with pytest.raises(RegistryClosed):
        channel(SERVICE, registry=registry)


async def test_channels_by_one_url_share_a_session_until_the_last_is_closed(memory):
    one, other = channel(f"{memory}/shop.Orders"), channel(f"{memory}/shop.Audit")
    assert len(SESSIONS) == 1
    await one.close()
    await one.close()
    assert len(SESSIONS) == 1
    await other.close()
    assert len(SESSIONS) == 0


@pytest.mark.parametrize("balance", ["round_robin", "core"])
async def test_a_channel_that_is_dropped_lets_go_of_its_registry(serve, memory, balance):
    await serve("a")
    to_service = channel(f"{memory}/{SERVICE}", balance=balance)
    assert await who(to_service) == {b"a"}
    del to_service
    gc.collect()
    await asyncio.wait_for(aio_wait_until(lambda: len(SESSIONS) == 0), WAIT_S)


@pytest.mark.parametrize("balance", ["round_robin", "core"])
async def test_a_stub_whose_channel_nobody_keeps_follows_too(serve, registry, memory, balance):
    one = await serve("a")
    ask = channel(f"{memory}/{SERVICE}", balance=balance).unary_unary(WHO)
    gc.collect()
    assert await ask(b"", timeout=WAIT_S) == b"a"
    await serve("b")
    await registry.unregister(one, wait=WAIT_S)
    async with asyncio.timeout(WAIT_S):
        while await ask(b"", timeout=WAIT_S) != b"b":  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)


async def test_it_is_a_channel_of_many_members(memory):
    async with channel(f"{memory}/{SERVICE}") as to_service:
        assert isinstance(to_service, ClusterChannel)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"url": "memory://a"}, ConfigurationError, "which service is meant"),
        ({"url": "etdc://a/shop.Orders"}, ConfigurationError, "did you mean etcd://"),
        ({"url": "memory://a/shop.Orders", "registry": 7}, TypeError, "registry must be"),
        ({"url": "memory://a/shop.Orders", "policy": 7}, TypeError, "must be a RegistryPolicy"),
        ({"url": "memory://a/shop.Orders", "on_removed": 7}, TypeError, "on_removed must be"),
        (
            {"url": "memory://a/shop.Orders", "balance": "core", "on_member": print},
            ConfigurationError,
            "balance='core' has no members",
        ),
    ],
)
async def test_arguments_that_make_no_sense_are_refused_at_once(arguments, error, said):
    with pytest.raises(error, match=said):
        channel(**arguments)


def test_it_is_made_on_a_loop():
    with pytest.raises(RuntimeError, match="no event loop runs here"):
        channel("memory://a/shop.Orders")


async def test_what_is_no_policy_of_a_registry_is_refused(memory):
    with pytest.raises(TypeError, match="policy must be a RegistryPolicy or None, not"):
        channel(memory, service="shop.Orders", policy={"lease": 2})
