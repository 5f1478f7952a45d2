"""A channel by name calls the instances that the registry has."""

import gc

import grpc
import pytest

import rpcwheel
from fixtures.engine_watchers import RecordingWatcher
from fixtures.shops import SERVICE, WHO
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.balancer import BalancerPolicy
from rpcwheel.errors import ConfigurationError, RegistryClosed
from rpcwheel.instance import ServiceInstance
from rpcwheel.registry import RegistryPolicy
from rpcwheel.registry.backend import Settings
from rpcwheel.registry.backends import open_backend
from rpcwheel.resolver.resolver import SHARED_REGISTRIES
from rpcwheel.testing import FlakyBackend

POLICY = RegistryPolicy(lease_ttl=1800.0, timeout=1.0)
NEVER_S = 10**6


@pytest.fixture
def open_channel(world):
    """Opens channels by name; a first call waits longer than a machine stands still."""

    def open_one(target, *credentials, pick_timeout=WAIT_S, balancer_policy=None, **settings):
        policy = balancer_policy or BalancerPolicy(pick_timeout=pick_timeout)
        settings = {"balancer_policy": policy} | settings
        function = world.api.secure_channel if credentials else world.api.insecure_channel
        return world.keep(world.do(function, target, *credentials, **settings))

    return open_one


def open_registries():
    """How many registries are open for channels."""
    return sum(map(bool, SHARED_REGISTRIES._users.values()))


@pytest.fixture
def registry(world, memory):
    return world.keep(world.do(world.api.open_registry, memory, registry_policy=POLICY))


def open_flaky(world, memory, backend_class=FlakyBackend):
    """A backend with an engine that fails when it is told to, and a registry over it."""
    backend = backend_class(open_backend(memory, Settings(lease_s=1800.0, timeout_s=1.0)))
    registry = world.do(world.module("registry").Registry, backend, registry_policy=POLICY)
    return backend, world.keep(registry)


@pytest.fixture
def flaky(world, memory):
    backend, registry = open_flaky(world, memory)
    yield backend, registry
    backend.up()


@pytest.fixture
def serve(world, make_shop, registry, certificates):
    """Start a server, perhaps with TLS, and publish it; gives its instance."""

    def serve(name, shop=None, *, tls=False, **fields) -> ServiceInstance:
        shop = shop or make_shop(name)
        if tls:
            fields["protocol"] = "grpcs"
            credentials = certificates.server_credentials()
            port = shop.server.add_secure_port("127.0.0.1:0", credentials)
        else:
            port = shop.listen()
        instance = ServiceInstance(service=SERVICE, host="127.0.0.1", port=port, **fields)
        shop.server.start()
        world.do(registry.register, instance, wait=WAIT_S)
        return instance

    return serve


def who(world, channel, times=4):
    """The names of the servers that were called."""
    return {world.call(channel, method=WHO, timeout=WAIT_S).result() for _ in range(times)}


def is_refused(world, channel):
    try:
        return not who(world, channel, times=1)
    except grpc.RpcError:
        return True


def error_text(world, channel):
    error = world.call(channel, method=WHO, timeout=WAIT_S).error()
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    return error.details()


# Which servers are called


def test_a_channel_calls_all_published_servers_and_follows_changes(
    world, serve, registry, memory, open_channel
):
    one = serve("a")
    channel = open_channel(f"{memory}/{SERVICE}")
    assert isinstance(channel, world.module("balancer").BalancedChannel)
    assert (isinstance(channel, world.grpc.Channel), channel.name) == (True, SERVICE)
    assert who(world, channel) == {b"a"}
    serve("b")
    assert wait_until(lambda: who(world, channel) == {b"a", b"b"})
    world.do(registry.unregister, one, wait=WAIT_S)
    assert wait_until(lambda: who(world, channel) == {b"b"})


def test_a_stub_whose_channel_was_dropped_follows_the_changes(world, serve, registry, memory):
    one = serve("a")
    open_one = world.api.insecure_channel
    ask = world.do(lambda: open_one(f"{memory}/{SERVICE}").unary_unary(WHO))
    gc.collect()
    assert world.do(ask, b"", timeout=WAIT_S) == b"a"
    serve("b")
    world.do(registry.unregister, one, wait=WAIT_S)
    assert wait_until(lambda: world.do(ask, b"", timeout=WAIT_S) == b"b")


def test_a_service_without_instances_is_unavailable(world, registry, memory, open_channel):
    channel = open_channel(f"{memory}/{SERVICE}")
    assert error_text(world, channel) == f"no instance of {SERVICE} is known: {memory} lists none"


def test_the_status_without_instances_says_how_to_list_those_of_a_registry(
    world, tmp_path, open_channel
):
    url = f"sqlite://{tmp_path}/a b.db?namespace=eu"
    channel = open_channel(url, service=SERVICE)
    assert error_text(world, channel) == (
        f"no instance of {SERVICE} is known: {url} lists none; "
        f"`rpcwheel registry ls '{url}'` shows what it lists"
    )


def test_group_version_and_zone_select_the_servers(world, serve, memory, open_channel):
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
        channel = open_channel(f"{memory}/{SERVICE}{query}", **arguments)
        selects = lambda channel=channel, called=called: who(world, channel, 8) == called  # noqa: E731
        assert wait_until(selects), (query, arguments)
    channel = open_channel(f"{memory}/{SERVICE}", group="bleu", version="1")
    reason = f"is known: {memory} has 4, but none of group 'bleu' and version '1'"
    assert reason in error_text(world, channel)


# The registry


def test_calls_succeed_while_the_registry_is_down(world, serve, flaky, open_channel):
    backend, registry = flaky
    serve("a")
    channel = open_channel(SERVICE, registry=registry)
    assert who(world, channel) == {b"a"}
    backend.down()
    backend.forget()
    assert who(world, channel, 20) == {b"a"}


@pytest.mark.parametrize("over", [True, False], ids=["over", "waits"])
def test_calls_fail_with_the_error_of_the_registry_after_the_pick_timeout(
    world, flaky, timer, open_channel, over
):
    """A first call waits for the pick timeout in real time; the timer's may be over before."""
    backend, registry = flaky
    backend.down("the cable is cut")
    pick_timeout = 30.0 if over else 0.05
    channel = open_channel(SERVICE, registry=registry, pick_timeout=pick_timeout, timer=timer)
    assert wait_until(lambda: timer.pending)
    if over:
        timer.advance(30.0)
    reason = error_text(world, channel)
    yet = "" if over else " yet"
    assert reason.startswith(f"no instance of {SERVICE} is known{yet}: ")
    assert reason.endswith("the cable is cut")
    world.do(channel.close)
    assert timer.pending == 0


def test_calls_fail_at_once_while_the_registry_refuses_access(world, serve, memory, open_channel):
    class Locked(FlakyBackend):
        """Like an engine, it refuses watches after a refusal."""

        def watch(self, service, watcher):
            self.watcher = watcher
            return self.inner.watch("nobody", RecordingWatcher())

        def unlock(self):
            self.up()
            assert wait_until(lambda: hasattr(self, "watcher"))
            self.watcher.on_view(self.inner.lookup(SERVICE))

    serve("a")
    locked, registry = open_flaky(world, memory, Locked)
    locked.refuse("no rights")
    channel = open_channel(SERVICE, registry=registry, pick_timeout=NEVER_S)
    assert "no rights" in error_text(world, channel)
    locked.unlock()
    assert wait_until(lambda: channel.subchannels)
    assert who(world, channel) == {b"a"}


def test_a_registry_of_the_user_stays_open(world, registry, open_channel):
    world.do(open_channel(SERVICE, registry=registry).close)
    assert not registry.closed
    world.do(registry.close)
    with pytest.raises(RegistryClosed):
        open_channel(SERVICE, registry=registry)


def test_channels_of_one_registry_url_share_a_session_until_the_last_is_closed_or_dropped(
    world, memory, open_channel
):
    gc.collect()
    assert wait_until(lambda: open_registries() == 0)
    one = open_channel(f"{memory}/shop.Orders")
    other = world.do(world.api.insecure_channel, f"{memory}/shop.Audit?group=blue")
    in_sync = rpcwheel.insecure_channel(f"{memory}/shop.Orders")
    assert open_registries() == 1
    policy = RegistryPolicy(lease_ttl=20.0)
    with_policy = open_channel(f"{memory}/shop.Orders", registry_policy=policy)
    assert open_registries() == 2
    world.do(with_policy.close)
    world.do(one.close)
    world.do(one.close)
    in_sync.close()
    assert open_registries() == 1
    del other
    assert wait_until(lambda: (gc.collect(), open_registries())[1] == 0)


def test_a_channel_that_is_refused_leaves_no_session(world, memory, open_channel):
    gc.collect()
    with pytest.raises(ConfigurationError, match="lb_policy: there is no 'best'"):
        open_channel(f"{memory}/{SERVICE}", lb_policy="best")
    assert wait_until(lambda: open_registries() == 0)


# TLS


@pytest.fixture
def open_kit_channel(world, memory):
    """Opens a channel to the service by a kit."""

    def open_one(*credentials):
        kit, policy = world.keep(world.do(world.api.Kit)), BalancerPolicy(pick_timeout=WAIT_S)
        target = f"{memory}/{SERVICE}"
        return world.keep(world.do(kit.channel, target, *credentials, balancer_policy=policy))

    return open_one


def refusal(world, channel):
    """The status details of calls of each style, which all fail at once and equally."""
    calls = [
        world.call(channel, kind, b"", method=WHO, timeout=WAIT_S, **options)
        for kind, options in (
            ("unary_unary", {}),
            ("unary_unary", {"wait_for_ready": True}),
            ("unary_stream", {}),
        )
    ]
    errors = [call.error() for call in calls]
    assert {error.code() for error in errors} == {grpc.StatusCode.FAILED_PRECONDITION}
    (details,) = {error.details() for error in errors}
    return details


def test_an_insecure_channel_calls_nothing_while_one_instance_has_tls(
    world, serve, registry, memory, open_channel, open_kit_channel
):
    serve("plain")
    channel = open_channel(f"{memory}/{SERVICE}")
    assert who(world, channel) == {b"plain"}
    secure = serve("secure", tls=True)
    assert wait_until(lambda: is_refused(world, channel))
    assert not channel.subchannels
    details = refusal(world, channel)
    assert f"instances of {SERVICE} require TLS" in details
    assert "use rpcwheel.secure_channel(target, credentials)" in details
    assert refusal(world, open_kit_channel()) == details
    world.do(registry.unregister, secure, wait=WAIT_S)
    assert wait_until(lambda: channel.subchannels)
    assert who(world, channel) == {b"plain"}


def test_a_secure_channel_calls_only_instances_with_tls(
    world, serve, memory, open_channel, open_kit_channel, certificates
):
    serve("plain")
    credentials = certificates.channel_credentials()
    channel = open_channel(f"{memory}/{SERVICE}", credentials)
    assert f"no instance of {SERVICE} is published with TLS" in refusal(world, channel)
    serve("secure", tls=True)
    assert wait_until(lambda: channel.subchannels)
    assert who(world, channel) == {b"secure"}
    assert who(world, open_kit_channel(credentials)) == {b"secure"}
