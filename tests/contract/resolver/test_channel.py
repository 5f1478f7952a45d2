"""A channel by name calls the instances that the registry has."""

import functools

import grpc
import pytest

from fixtures.shops import HOLD, SERVICE, WHO
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.balancer import BalancedChannel, BalancerPolicy
from rpcwheel.errors import ConfigurationError, RegistryClosed
from rpcwheel.events import CallbackFailed
from rpcwheel.instance import ServiceInstance
from rpcwheel.registry import Registry, RegistryPolicy, open_registry
from rpcwheel.registry.backend import Settings
from rpcwheel.registry.backends import open_backend
from rpcwheel.resolver import insecure_channel
from rpcwheel.testing import FlakyBackend

POLICY = RegistryPolicy(lease_ttl=1800.0, timeout=1.0)
NEVER_S = 10**6

channel = functools.partial(insecure_channel, balancer_policy=BalancerPolicy(pick_timeout=WAIT_S))
"""Its first call waits for instances for longer than a machine stands still."""


@pytest.fixture
def registry(memory):
    with open_registry(memory, registry_policy=POLICY) as registry:
        yield registry


@pytest.fixture
def flaky(memory):
    """A backend with an engine that fails when fields to, and a registry over it."""
    backend = FlakyBackend(open_backend(memory, Settings(lease_s=1800.0, timeout_s=1.0)))
    with Registry(backend, registry_policy=POLICY) as registry:
        yield backend, registry
        backend.up()


@pytest.fixture
def serve(make_shop, registry):
    """Start a server and publish it; gives its instance."""

    def serve(name, shop=None, **fields) -> ServiceInstance:
        shop = shop or make_shop(name)
        instance = ServiceInstance(service=SERVICE, host="127.0.0.1", port=shop.listen(), **fields)
        shop.server.start()
        registry.register(instance, wait=WAIT_S)
        return instance

    return serve


def who(to_service, times=1):
    ask = to_service.unary_unary(WHO)
    return {ask(b"", timeout=WAIT_S) for _ in range(times)}


def error_text(to_service):
    with pytest.raises(grpc.RpcError) as caught:
        to_service.unary_unary(WHO)(b"", timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    return caught.value.details()


# Which servers are called


def test_a_channel_calls_all_published_servers_and_follows_changes(serve, registry, memory):
    one = serve("a")
    with channel(f"{memory}/{SERVICE}") as to_service:
        assert isinstance(to_service, BalancedChannel)
        assert isinstance(to_service, grpc.Channel)
        assert to_service.name == SERVICE
        assert who(to_service) == {b"a"}
        serve("b")
        assert wait_until(lambda: who(to_service, 4) == {b"a", b"b"})
        registry.unregister(one, wait=WAIT_S)
        assert wait_until(lambda: who(to_service, 4) == {b"b"})


def test_a_call_that_waits_for_ready_waits_for_the_first_server(serve, memory):
    with channel(memory, service=SERVICE) as to_service:
        call = to_service.unary_unary(WHO).future(b"", timeout=WAIT_S, wait_for_ready=True)
        serve("a")
        assert call.result() == b"a"


def test_a_service_without_instances_is_unavailable(registry, memory):
    with channel(f"{memory}/{SERVICE}") as to_service:
        assert error_text(to_service) == f"no instance of {SERVICE} is known"


def test_group_version_and_zone_select_the_servers(serve, memory):
    serve("a", zone="eu-1")
    serve("b", group="blue", version="1")
    serve("c", group="blue", version="2")
    serve("d", zone="eu-2")
    for query, arguments, called in (
        ("", {}, {b"a", b"b", b"c", b"d"}),
        ("", {"group": "blue", "version": "2"}, {b"c"}),
        ("?group=blue&version=1", {"version": "*"}, {b"b", b"c"}),
        ("?group=", {"zone": "eu-2"}, {b"d"}),
    ):
        with channel(f"{memory}/{SERVICE}{query}", **arguments) as to_service:
            assert wait_until(lambda: who(to_service, 8) == called), (query, arguments)  # noqa: B023


def test_a_group_without_instances_is_named_in_the_status(serve, memory):
    serve("a")
    serve("b", group="blue", version="1")
    fields = r"no instance of .* is known: it has 2, but none of group 'bleu' and version '1'"
    with (
        channel(f"{memory}/{SERVICE}", group="bleu", version="1") as to_service,
        pytest.raises(grpc.RpcError, match=fields),
    ):
        to_service.unary_unary(WHO)(b"", timeout=WAIT_S)


def test_weights_are_those_of_the_registry(serve, memory):
    serve("a", weight=300)
    serve("b", weight=100)
    with channel(f"{memory}/{SERVICE}") as to_service:
        assert wait_until(lambda: who(to_service, 4) == {b"a", b"b"})
        ask = to_service.unary_unary(WHO)
        answers = [ask(b"", timeout=WAIT_S) for _ in range(40)]
    assert 28 <= answers.count(b"a") <= 32


def test_calls_outlive_a_change_of_addresses(make_shop, serve, registry, memory):
    shop = make_shop("a")
    one = serve("a", shop)
    with channel(
        f"{memory}/{SERVICE}", balancer_policy=BalancerPolicy(drain_timeout=NEVER_S)
    ) as to_service:
        call = to_service.unary_unary(HOLD).future(b"", timeout=WAIT_S)
        assert shop.held.wait(WAIT_S)
        serve("b")
        registry.unregister(one, wait=WAIT_S)
        assert wait_until(lambda: who(to_service, 4) == {b"b"})
        shop.release.set()
        assert call.result() == b"a"


def test_on_subchannel_and_on_removed_are_called_if_they_raise(serve, registry, memory, events):
    instances = [serve("a"), serve("b")]
    made, gone = [], []

    def forget(subchannel):
        gone.append(subchannel)
        raise KeyError("a bug")

    def failures():
        return [one for one in events if isinstance(one, CallbackFailed)]

    policy = BalancerPolicy(pick_timeout=WAIT_S, self_preservation=False)
    settings = {"on_subchannel": made.append, "on_removed": forget, "balancer_policy": policy}
    with channel(f"{memory}/{SERVICE}", **settings) as to_service:
        assert wait_until(lambda: who(to_service, 4) == {b"a", b"b"})
        assert {one.id for one in made} == {one.id for one in instances}
        for one in instances:
            registry.unregister(one, wait=WAIT_S)
        assert wait_until(lambda: set(gone) == set(made))
        assert wait_until(lambda: len(failures()) == 2)
    assert {repr(one.error) for one in failures()} == {"KeyError('a bug')"}
    assert "forget" in failures()[0].callback


# The registry


def test_calls_succeed_while_the_registry_is_down(serve, flaky):
    backend, registry = flaky
    serve("a")
    with channel(SERVICE, registry=registry) as to_service:
        assert who(to_service) == {b"a"}
        backend.down()
        backend.forget()
        assert who(to_service, 20) == {b"a"}


def test_after_the_pick_timeout_calls_fail_with_the_error_of_the_registry(flaky, timer):
    backend, registry = flaky
    backend.down("the cable is cut")
    policy = BalancerPolicy(pick_timeout=30.0)
    with channel(SERVICE, registry=registry, balancer_policy=policy, timer=timer) as to_service:
        assert wait_until(lambda: timer.pending)
        timer.advance(30.0)
        assert "the cable is cut" in error_text(to_service)
    assert timer.pending == 0


def test_the_first_call_fails_with_the_reason_after_the_pick_timeout(flaky, timer):
    backend, registry = flaky
    backend.down("the cable is cut")
    policy = BalancerPolicy(pick_timeout=0.2)
    with channel(SERVICE, registry=registry, balancer_policy=policy, timer=timer) as to_service:
        assert wait_until(lambda: timer.pending)  # its time does not pass
        said = error_text(to_service)
    assert said.startswith(f"no instance of {SERVICE} is known yet: ")
    assert said.endswith("the cable is cut")


def test_a_closed_channel_leaves_no_timeout(flaky, timer):
    backend, registry = flaky
    backend.down()
    with channel(SERVICE, registry=registry, timer=timer):
        assert wait_until(lambda: timer.pending)
    assert timer.pending == 0


def test_calls_fail_at_once_while_the_registry_refuses_access(serve, memory):
    class NoInstances:
        """A watcher that heeds nothing."""

        def on_view(self, view): ...

        def on_contact_lost(self, reason): ...

    class Locked(FlakyBackend):
        """Like an engine, it refuses watches after a refusal."""

        def watch(self, service, watcher):
            self.watcher = watcher
            return self.inner.watch("nobody", NoInstances())

        def unlock(self):
            self.up()
            assert wait_until(lambda: hasattr(self, "watcher"))
            self.watcher.on_view(self.inner.lookup(SERVICE))

    serve("a")
    locked = Locked(open_backend(memory, Settings(lease_s=1800.0, timeout_s=1.0)))
    locked.refuse("no rights")
    policy = BalancerPolicy(pick_timeout=NEVER_S)
    with (
        Registry(locked, registry_policy=POLICY) as registry,
        channel(SERVICE, registry=registry, balancer_policy=policy) as to_service,
    ):
        assert "no rights" in error_text(to_service)
        locked.unlock()
        assert wait_until(lambda: to_service.subchannels)
        assert who(to_service) == {b"a"}


def test_a_registry_of_the_user_stays_open(registry):
    with channel(SERVICE, registry=registry):
        pass
    assert not registry.closed
    registry.close()
    with pytest.raises(RegistryClosed):
        channel(SERVICE, registry=registry)


# Arguments

URL = "memory://a/shop.Orders"

REFUSED = [
    ({"target": "memory://a"}, ConfigurationError, "no service is named"),
    ({"target": "shop.Orders", "zone": "a"}, ConfigurationError, "is an address"),
    ({"target": "etdc://a/shop.Orders"}, ConfigurationError, "did you mean etcd://"),
    ({"target": f"{URL}?tls=1"}, ConfigurationError, "there is no option 'tls'"),
    (
        {"target": URL, "service": "shop.Audit"},
        ConfigurationError,
        "names the service 'shop.Orders'",
    ),
    ({"target": URL, "registry": 7}, TypeError, "registry must be"),
    ({"target": URL, "lb_policy": "best"}, ConfigurationError, "lb_policy: there is no 'best'"),
    ({"target": URL, "on_removed": 7}, TypeError, "on_removed must be"),
    ({"target": URL, "balancer_policy": 7}, TypeError, "must be a BalancerPolicy"),
    ({"target": URL, "registry_policy": 7}, TypeError, "must be a RegistryPolicy or None"),
    ({"target": URL, "timer": 7}, TypeError, "timer must be"),
    ({"target": 7}, ConfigurationError, "7 is an address"),
]


def test_invalid_arguments_are_refused_at_once(registry, memory):
    both = {"target": f"{memory}/{SERVICE}", "registry": registry}
    two = {"target": SERVICE, "service": "shop.Audit", "registry": registry}
    for arguments, error, said in [
        *REFUSED,
        (both, ConfigurationError, "a URL or registry=, not both"),
        (two, ConfigurationError, "two services are named"),
    ]:
        with pytest.raises(error, match=said):
            channel(**arguments)
