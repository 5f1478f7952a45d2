"""A channel by name calls whoever serves the service, as the registry has it at each moment."""

import gc
import time

import grpc
import pytest

from fixtures.shops import HOLD, SERVICE, WHO
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.cluster.policy import ClusterPolicy
from rpcwheel.cluster.sync import ClusterChannel
from rpcwheel.errors import ConfigurationError, RegistryClosed
from rpcwheel.instance import ServiceInstance
from rpcwheel.observe import ListenerFailed, RecordSkipped
from rpcwheel.registry.named import SESSIONS, channel
from rpcwheel.registry.policy import RegistryPolicy
from rpcwheel.registry.provider import Settings
from rpcwheel.registry.providers.memory import MemoryProvider
from rpcwheel.registry.sync import FailbackRegistry, open_registry
from rpcwheel.registry.url import parse_url
from rpcwheel.testing import FlakyProvider

POLICY = RegistryPolicy(lease=2.0, timeout=1.0)


@pytest.fixture(autouse=True)
def none_stays_open():
    yield
    gc.collect()
    assert wait_until(lambda: len(SESSIONS) == 0)


@pytest.fixture
def registry(memory):
    with open_registry(memory) as registry:
        yield registry


@pytest.fixture
def flaky(memory):
    """A provider with an engine that fails when told to, and a registry over it."""
    provider = FlakyProvider(MemoryProvider(parse_url(memory), Settings(2.0, 1.0)))
    with FailbackRegistry(provider, policy=POLICY) as registry:
        yield provider, registry


@pytest.fixture
def serve(make_shop, registry):
    """Start a server and publish it; gives its instance."""

    def serve(name, **told) -> ServiceInstance:
        shop = make_shop(name)
        instance = ServiceInstance(service=SERVICE, host="127.0.0.1", port=shop.listen(), **told)
        shop.server.start()
        registry.register(instance, wait=WAIT_S)
        return instance

    return serve


def who(to_service, times=1):
    ask = to_service.unary_unary(WHO)
    return {ask(b"", timeout=WAIT_S) for _ in range(times)}


def refusal(to_service, timeout=WAIT_S):
    with pytest.raises(grpc.RpcError) as caught:
        to_service.unary_unary(WHO)(b"", timeout=timeout)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    return caught.value.details()


class Nobody:
    """A watcher that heeds nothing."""

    def saw(self, view): ...

    def suspect(self, reason): ...


# Whom it calls


@pytest.mark.parametrize("balance", ["round_robin", "core"])
def test_it_calls_all_that_are_published_and_follows_who_comes_and_goes(
    serve, registry, memory, balance
):
    one = serve("a")
    with channel(f"{memory}/{SERVICE}", balance=balance) as to_service:
        assert who(to_service) == {b"a"}
        serve("b")
        assert wait_until(lambda: who(to_service, 4) == {b"a", b"b"})
        registry.unregister(one, wait=WAIT_S)
        assert wait_until(lambda: who(to_service, 4) == {b"b"})


@pytest.mark.parametrize("balance", ["round_robin", "core"])
def test_calls_wait_until_it_is_known_whom_to_call(serve, memory, balance):
    with channel(memory, service=SERVICE, balance=balance) as to_service:
        call = to_service.unary_unary(WHO).future(b"", timeout=WAIT_S, wait_for_ready=True)
        time.sleep(0.1)
        assert not call.done()
        serve("a")
        assert call.result() == b"a"


@pytest.mark.parametrize("balance", ["round_robin", "core"])
def test_where_nobody_is_published_calls_say_so(registry, memory, balance):
    with channel(f"{memory}/{SERVICE}", balance=balance) as to_service:
        assert refusal(to_service) == f"no instance of {SERVICE} is known"


@pytest.mark.parametrize(
    ("arguments", "called"),
    [
        ({}, {b"a", b"b", b"c"}),
        ({"group": "blue"}, {b"b", b"c"}),
        ({"group": ""}, {b"a"}),
        ({"group": "blue", "version": "2"}, {b"c"}),
        ({"group": "*", "version": "2"}, {b"c"}),
        ({"url": "?group=blue&version=1"}, {b"b"}),
        ({"url": "?group=blue&version=1", "version": "*"}, {b"b", b"c"}),
    ],
)
def test_group_and_version_say_which_are_meant(serve, memory, arguments, called):
    serve("a")
    serve("b", group="blue", version="1")
    serve("c", group="blue", version="2")
    url = f"{memory}/{SERVICE}{arguments.pop('url', '')}"
    with channel(url, **arguments) as to_service:
        assert wait_until(lambda: who(to_service, 6) == called)


def test_those_of_the_own_zone_are_called_first(serve, memory):
    serve("a", zone="eu-1")
    serve("b", zone="eu-2")
    with channel(f"{memory}/{SERVICE}", zone="eu-2") as to_service:
        assert who(to_service, 6) == {b"b"}


def test_weights_are_those_of_the_registry(serve, registry, memory):
    serve("a", weight=300)
    serve("b", weight=100)
    with channel(f"{memory}/{SERVICE}") as to_service:
        who(to_service)
        ask = to_service.unary_unary(WHO)
        answers = [ask(b"", timeout=WAIT_S) for _ in range(40)]
    assert answers.count(b"a") == 30


def test_stubs_and_calls_outlive_a_change_of_addresses(make_shop, serve, registry, memory):
    shop = make_shop("a")
    one = ServiceInstance(service=SERVICE, host="127.0.0.1", port=shop.listen())
    shop.server.start()
    registry.register(one, wait=WAIT_S)
    with channel(f"{memory}/{SERVICE}") as to_service:
        call = to_service.unary_unary(HOLD).future(b"", timeout=WAIT_S)
        assert shop.held.wait(WAIT_S)
        serve("b")
        registry.unregister(one, wait=WAIT_S)
        assert wait_until(lambda: who(to_service, 4) == {b"b"})
        shop.release.set()
        assert call.result() == b"a"


def test_no_change_of_a_list_of_grpc_s_own_ends_a_call(make_shop, serve, registry, memory):
    shop = make_shop("a")
    one = ServiceInstance(service=SERVICE, host="127.0.0.1", port=shop.listen())
    shop.server.start()
    registry.register(one, wait=WAIT_S)
    at_once = ClusterPolicy(drain=0.0)
    with channel(f"{memory}/{SERVICE}", balance="core", cluster=at_once) as to_service:
        call = to_service.unary_unary(HOLD).future(b"", timeout=WAIT_S)
        assert shop.held.wait(WAIT_S)
        serve("b")
        assert wait_until(lambda: who(to_service, 4) == {b"a", b"b"})
        registry.unregister(one, wait=WAIT_S)
        assert wait_until(lambda: who(to_service, 4) == {b"b"})
        shop.release.set()
        assert call.result() == b"a"


def test_members_are_told_of_when_they_come_and_go(serve, registry, memory):
    one = serve("a")
    made, gone = [], []
    settings = {"on_member": made.append, "on_removed": gone.append}
    with channel(f"{memory}/{SERVICE}", **settings) as to_service:
        who(to_service)
        assert [member.id for member in made] == [one.id]
        registry.unregister(one, wait=WAIT_S)
        assert wait_until(lambda: gone == made)


def test_each_that_is_gone_is_told_of_whatever_who_is_told_raises(serve, registry, memory, events):
    instances = [serve("a"), serve("b")]
    gone = []

    def forget(member):
        gone.append(member)
        raise KeyError("a bug")

    with channel(f"{memory}/{SERVICE}", on_removed=forget) as to_service:
        assert wait_until(lambda: who(to_service, 4) == {b"a", b"b"})
        members = set(to_service.members)
        for one in instances:
            registry.unregister(one, wait=WAIT_S)
        assert wait_until(lambda: set(gone) == members)
    told = [one for one in events if isinstance(one, ListenerFailed)]
    assert [repr(one.error) for one in told] == ["KeyError('a bug')"] * 2
    assert "forget" in told[0].listener


# Over TLS


@pytest.mark.parametrize("balance", ["round_robin", "core"])
def test_with_credentials_all_is_over_tls(make_shop, registry, memory, certificates, balance):
    shop = make_shop("a")
    port = shop.server.add_secure_port("127.0.0.1:0", certificates.server_credentials())
    shop.server.start()
    one = ServiceInstance(service=SERVICE, host="127.0.0.1", port=port, protocol="grpcs")
    registry.register(one, wait=WAIT_S)
    trusted = certificates.channel_credentials()
    with channel(f"{memory}/{SERVICE}", trusted, balance=balance) as to_service:
        assert who(to_service) == {b"a"}
    with channel(f"{memory}/{SERVICE}", balance=balance) as to_service:  # grpc's own roots
        assert refusal(to_service)


# A list of grpc's own


def test_who_can_t_be_in_the_list_is_told_of_once(serve, registry, memory, events):
    serve("a")
    others = [
        ServiceInstance(service=SERVICE, host="no.such.host.invalid", port=1),
        ServiceInstance(service=SERVICE, host="127.0.0.1", port=2, protocol="grpcs"),
    ]
    for other in others:
        registry.register(other, wait=WAIT_S)
    with channel(f"{memory}/{SERVICE}", balance="core") as to_service:
        assert who(to_service, 3) == {b"a"}
        serve("b")
        assert wait_until(lambda: who(to_service, 4) == {b"a", b"b"})
    told = {(one.key, str(one.error)) for one in events if isinstance(one, RecordSkipped)}
    assert told == {
        ("no.such.host.invalid:1", "it has no ipv4 address"),
        ("127.0.0.1:2", "it is over TLS, and others in the list are not: give credentials"),
    }
    assert len([one for one in events if isinstance(one, RecordSkipped)]) == 2


# The registry


def test_a_registry_that_goes_away_harms_no_call(serve, flaky):
    provider, registry = flaky
    serve("a")
    with channel(SERVICE, registry=registry) as to_service:
        assert who(to_service) == {b"a"}
        provider.down()
        provider.forget()
        assert who(to_service, 20) == {b"a"}
    provider.up()


def test_while_the_registry_can_t_be_reached_calls_end_with_the_reason_in_time(flaky, timer):
    provider, registry = flaky
    provider.down("the cable is cut")
    cluster = ClusterPolicy(wait=30.0)
    with channel(SERVICE, registry=registry, cluster=cluster, timer=timer) as to_service:
        assert wait_until(lambda: timer.pending)
        timer.advance(30.0)
        assert "the cable is cut" in refusal(to_service)
    provider.up()
    assert timer.pending == 0


def test_a_channel_that_is_closed_before_leaves_no_timeout(flaky, timer):
    provider, registry = flaky
    provider.down()
    with channel(SERVICE, registry=registry, timer=timer):
        assert wait_until(lambda: timer.pending)
    assert timer.pending == 0


def test_that_the_registry_refuses_is_told_at_once_and_forgotten_when_it_does_no_more(
    serve, memory
):
    class Locked(FlakyProvider):
        """As engines do, it lets nobody watch whom it refuses."""

        def watch(self, service, watcher):
            self.watcher = watcher
            return self.inner.watch("nobody", Nobody())

        def unlock(self):
            self.up()
            self.watcher.saw(self.inner.lookup(SERVICE))

    serve("a")
    locked = Locked(MemoryProvider(parse_url(memory), Settings(2.0, 1.0)))
    locked.refuse("no rights")
    cluster = ClusterPolicy(wait=600)
    with (
        FailbackRegistry(locked, policy=POLICY) as registry,
        channel(SERVICE, registry=registry, cluster=cluster) as to_service,
    ):
        assert "no rights" in refusal(to_service)
        locked.unlock()
        assert wait_until(lambda: to_service.members)
        assert who(to_service) == {b"a"}


def test_a_registry_of_the_user_s_stays_open(registry):
    with channel(SERVICE, registry=registry):
        pass
    assert not registry.closed
    registry.close()
    with pytest.raises(RegistryClosed):
        channel(SERVICE, registry=registry)


def test_channels_by_one_url_share_a_session_until_the_last_is_closed(memory):
    one, other = channel(f"{memory}/shop.Orders"), channel(f"{memory}/shop.Audit?group=blue")
    assert len(SESSIONS) == 1
    apart = channel(f"{memory}/shop.Orders", policy=RegistryPolicy(lease=20.0))
    assert len(SESSIONS) == 2
    apart.close()
    one.close()
    one.close()
    assert len(SESSIONS) == 1
    other.close()
    assert len(SESSIONS) == 0


def test_a_channel_that_is_dropped_lets_go_of_its_registry(serve, memory):
    serve("a")
    to_service = channel(f"{memory}/{SERVICE}")
    assert who(to_service) == {b"a"}
    del to_service
    gc.collect()
    assert wait_until(lambda: len(SESSIONS) == 0)


def test_it_is_a_channel_of_many_members(memory):
    with channel(f"{memory}/{SERVICE}") as to_service:
        assert isinstance(to_service, ClusterChannel)
        assert isinstance(to_service, grpc.Channel)
        assert to_service.name == SERVICE


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"url": "memory://a"}, ConfigurationError, "which service is meant"),
        ({"url": "shop.Orders"}, ConfigurationError, "is no URL of a registry"),
        ({"url": "etdc://a/shop.Orders"}, ConfigurationError, "did you mean etcd://"),
        ({"url": "memory://a/shop.Orders?tls=1"}, ConfigurationError, "there is no option 'tls'"),
        (
            {"url": "memory://a/shop.Orders", "service": "shop.Audit"},
            ConfigurationError,
            "names the service 'shop.Orders'",
        ),
        ({"url": "memory://a/shop.Orders", "registry": 7}, TypeError, "registry must be"),
        ({"url": "memory://a/shop.Orders", "balance": "best"}, ConfigurationError, "balance"),
        (
            {"url": "memory://a/shop.Orders", "balance": "core", "on_member": print},
            ConfigurationError,
            "balance='core' has no members",
        ),
        (
            {"url": "memory://a/shop.Orders", "balance": "core", "on_removed": print},
            ConfigurationError,
            "balance='core' has no members",
        ),
        ({"url": "memory://a/shop.Orders", "on_removed": 7}, TypeError, "on_removed must be"),
        ({"url": "memory://a/shop.Orders", "cluster": 7}, TypeError, "must be a ClusterPolicy"),
        ({"url": "memory://a/shop.Orders", "policy": 7}, TypeError, "must be a RegistryPolicy"),
        ({"url": "memory://a/shop.Orders", "timer": 7}, TypeError, "timer must be"),
        ({"url": 7}, TypeError, "named by a URL"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_at_once(arguments, error, said):
    with pytest.raises(error, match=said):
        channel(**arguments)


def test_a_url_and_a_registry_together_are_refused(registry, memory):
    with pytest.raises(ConfigurationError, match="a URL or registry=, not both"):
        channel(f"{memory}/{SERVICE}", registry=registry)
    with pytest.raises(ConfigurationError, match="two services are named"):
        channel(SERVICE, service="shop.Audit", registry=registry)


def test_what_is_no_policy_of_a_registry_is_refused(memory):
    with pytest.raises(TypeError, match="policy must be a RegistryPolicy or None, not"):
        channel(memory, service="shop.Orders", policy={"lease": 2})
