"""A server is published once it serves, where clients reach it, and stays so."""

import subprocess
import sys
import time

import grpc
import pytest

from fixtures.shops import SERVICE, WHO
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.errors import ConfigurationError
from rpcwheel.registry.policy import RegistryPolicy
from rpcwheel.registry.provider import Settings
from rpcwheel.registry.providers.memory import MemoryProvider
from rpcwheel.registry.publisher import Publisher
from rpcwheel.registry.sync import FailbackRegistry, open_registry
from rpcwheel.registry.url import parse_url
from rpcwheel.testing import FlakyProvider

QUICK = {"lame_duck": 0, "grace": 5.0}


@pytest.fixture
def registry(memory):
    with open_registry(memory) as registry:
        yield registry


@pytest.fixture
def shop(make_shop):
    return make_shop()


@pytest.fixture
def flaky(memory):
    return FlakyProvider(MemoryProvider(parse_url(memory), Settings(lease_s=2.0, timeout_s=1.0)))


def ids(registry, service=SERVICE):
    return [one.id for one in registry.lookup(service).instances]


def ask(port, method=WHO):
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        return channel.unary_unary(method)(b"", timeout=WAIT_S)


# Up


def test_two_servers_at_one_place_with_an_id_each_are_both_published(make_shop, memory, registry):
    shop, other = make_shop("a"), make_shop("b")
    with (
        Publisher(shop.server, memory, SERVICE, port=0, id="worker-1", **QUICK) as first,
        Publisher(other.server, memory, SERVICE, port=0, id="worker-2", **QUICK) as second,
    ):
        assert first.wait_published(WAIT_S)
        assert second.wait_published(WAIT_S)
        assert sorted(ids(registry)) == ["worker-1", "worker-2"]
    assert ids(registry) == []


def test_a_server_without_a_port_is_bound_started_and_published(shop, memory, registry):
    with Publisher(shop.server, memory, SERVICE, port=0, **QUICK) as published:
        assert published.wait_published(WAIT_S)
        assert ids(registry) == [f"127.0.0.1:{published.port}"]
        assert ask(published.port) == b"a"
    assert ids(registry) == []
    assert shop.server.wait_for_termination(timeout=0) is False


def test_a_server_that_has_a_port_and_runs_is_published_as_it_is(shop, memory, registry):
    port = shop.listen()
    shop.server.start()
    with Publisher(shop.server, memory, SERVICE, port=port, **QUICK) as published:
        assert published.wait_published(WAIT_S)
        assert ask(port) == b"a"
        assert [one.target for one in published.instances] == [f"127.0.0.1:{port}"]
    assert ids(registry) == []
    with pytest.raises(grpc.RpcError):
        ask(port)


def test_what_is_not_named_is_what_the_server_has_handlers_for(make_shop, memory, registry):
    everybody_s = ["grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"]
    shop = make_shop(services=["shop.Orders", "shop.Audit", *everybody_s])
    with Publisher(shop.server, memory, port=0, **QUICK) as published:
        assert published.wait_published(WAIT_S)
        assert registry.services() == ["shop.Audit", "shop.Orders"]


def test_a_server_whose_services_are_unknown_is_not_started(make_shop, memory):
    shop = make_shop(services=["grpc.health.v1.Health"])
    port = shop.listen()
    published = Publisher(shop.server, memory, port=port)
    with pytest.raises(ConfigurationError, match="name the services that are published"):
        published.start()
    assert published.state == "closed"
    shop.server.start()
    assert ask(port, "/grpc.health.v1.Health/Who") == b"a"


def test_the_path_of_a_url_names_the_service_and_its_options_group_and_version(
    shop, memory, registry
):
    url = f"{memory}/{SERVICE}?group=blue&version=2.0"
    with Publisher(shop.server, url, port=0, **QUICK) as published:
        (instance,) = published.instances
    assert (instance.service, instance.group, instance.version) == (SERVICE, "blue", "2.0")


def test_what_is_told_of_a_server_arrives(shop, memory, registry):
    told = {
        "weight": 7,
        "group": "blue",
        "version": "2.0",
        "zone": "eu-1",
        "metadata": {"commit": "abc"},
    }
    before = time.time()
    with Publisher(shop.server, memory, SERVICE, port=0, **told, **QUICK) as published:
        assert published.wait_published(WAIT_S)
        (instance,) = registry.lookup(SERVICE).instances
    assert told == {name: getattr(instance, name) for name in told}
    assert before - 1 <= instance.started_at <= time.time()


def test_a_server_is_published_in_several_registries_and_those_of_the_user_stay_open(
    shop, memory, registry
):
    other = f"{memory}-other"
    with open_registry(other) as looking:
        with Publisher(shop.server, [registry, other], SERVICE, port=0, **QUICK) as published:
            assert published.wait_published(WAIT_S)
            assert ids(registry) == ids(looking) == [published.instances[0].id]
            opened = published.registries[1]
        assert ids(registry) == ids(looking) == []
    assert not registry.closed
    assert opened.closed


def test_an_engine_that_is_down_at_the_start_is_no_error_and_is_told_later(shop, flaky):
    flaky.down()
    policy = RegistryPolicy(lease=2.0, timeout=1.0)
    with (
        FailbackRegistry(flaky, policy=policy) as registry,
        Publisher(shop.server, registry, SERVICE, port=0, **QUICK) as published,
    ):
        assert ask(published.port) == b"a"
        assert not published.wait_published(0.05)
        flaky.up()
        assert published.wait_published(WAIT_S)


def test_what_the_registry_has_lost_is_published_again(shop, memory):
    policy = RegistryPolicy(lease=0.5, timeout=1.0)
    lost = FlakyProvider(MemoryProvider(parse_url(memory), Settings(lease_s=0.5, timeout_s=1.0)))
    with (
        FailbackRegistry(lost, policy=policy) as registry,
        Publisher(shop.server, registry, SERVICE, port=0, **QUICK) as published,
    ):
        assert published.wait_published(WAIT_S)
        lost.forget()
        assert wait_until(lambda: lost.inner.lookup(SERVICE).records)


# Where


def test_a_server_that_listens_elsewhere_than_it_is_published_is_not(shop, memory, registry):
    port = shop.listen("127.0.0.1")
    said = rf"nobody accepts connections at 127\.0\.0\.2:{port} .*listens at 127\.0\.0\.1:{port}"
    with pytest.raises(ConfigurationError, match=said):
        Publisher(shop.server, memory, SERVICE, port=port, host="127.0.0.2").start()
    assert ids(registry) == []


def test_a_port_that_another_process_has_is_told_of(shop, memory):
    with Elsewhere() as other, pytest.raises(ConfigurationError, match="can't be bound"):
        Publisher(shop.server, memory, SERVICE, port=other.port).start()


def test_a_port_in_front_of_the_server_is_published_as_it_is_told(shop, memory):
    with Elsewhere() as proxy:
        shop.listen()
        where = {"port": proxy.port, "host": "127.0.0.1"}
        with Publisher(shop.server, memory, SERVICE, **where, **QUICK) as published:
            assert published.instances[0].target == f"127.0.0.1:{proxy.port}"
            assert published.own_ports is None


def test_a_host_of_another_machine_is_published_unseen(shop, memory):
    port = shop.listen()
    where = {"port": port + 1, "host": "192.0.2.7"}
    with Publisher(shop.server, memory, SERVICE, **where, **QUICK) as published:
        assert published.instances[0].target == f"192.0.2.7:{port + 1}"


def test_a_port_can_t_be_given_to_a_server_that_runs(shop, memory):
    port = shop.listen()
    shop.server.start()
    with pytest.raises(ConfigurationError, match="the server runs already"):
        Publisher(shop.server, memory, SERVICE, port=port + 1).start()
    assert ask(port) == b"a"  # it is the user's, and runs on


def test_credentials_that_are_not_known_can_t_be_bound_with(shop, memory):
    with pytest.raises(
        ConfigurationError, match=r"call add_secure_port\('\[::\]:0', credentials\)"
    ):
        Publisher(shop.server, memory, SERVICE, port=0, protocol="grpcs").start()


def test_a_server_over_tls_is_published_as_one(shop, memory, certificates):
    port = shop.server.add_secure_port("127.0.0.1:0", certificates.server_credentials())
    with Publisher(shop.server, memory, SERVICE, port=port, protocol="grpcs", **QUICK) as published:
        assert published.instances[0].protocol == "grpcs"


class Elsewhere:
    """A process that listens at a port of the loopback."""

    LISTEN = (
        "import socket; listener = socket.create_server(('127.0.0.1', 0)); "
        "print(listener.getsockname()[1], flush=True); input()"
    )

    def __enter__(self):
        command = [sys.executable, "-c", self.LISTEN]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.port = int(self._process.stdout.readline())
        return self

    def __exit__(self, *_):
        self._process.communicate("\n")


# Arguments


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"registry": "etcd:127.0.0.1"}, ConfigurationError, "no URL of a registry"),
        ({"registry": "etdc://127.0.0.1"}, ConfigurationError, "did you mean etcd://"),
        ({"registry": []}, ConfigurationError, "registry is empty"),
        ({"registry": 7}, TypeError, "registry must be a registry, a URL"),
        ({"registry": ["memory://", "memory://a?nope=1"]}, ConfigurationError, "no option 'nope'"),
        ({"registry": ["memory://", 7]}, TypeError, "registry must be a .*Registry or a URL"),
        ({"service": "shop Orders"}, ConfigurationError, "service: it must be a name"),
        ({"service": 7}, TypeError, "a service is named by a string"),
        (
            {"registry": "memory://a/shop.Users"},
            ConfigurationError,
            "names the service 'shop.Users'",
        ),
        ({"port": "50051"}, TypeError, "port must be a number"),
        ({"port": 70000}, ConfigurationError, "port must be from 1 to 65535"),
        ({"host": "0.0.0.0"}, ConfigurationError, "an address to listen on"),
        ({"weight": 1001}, ConfigurationError, "weight"),
        ({"protocol": "http"}, ConfigurationError, "protocol"),
        ({"metadata": {"a": 7}}, TypeError, "metadata"),
        ({"health": object()}, TypeError, "health must be"),
        ({"lame_duck": -1}, ConfigurationError, "lame_duck must be 0 or more seconds"),
        ({"grace": "5"}, TypeError, "grace must be seconds"),
        ({"policy": 7}, TypeError, "policy must be a RegistryPolicy"),
        ({"timer": 7}, TypeError, "timer must be"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_at_once(shop, given, error, said):
    settings = {"registry": "memory://", "service": SERVICE, "port": 50051} | given
    with pytest.raises(error, match=said):
        Publisher(shop.server, settings.pop("registry"), settings.pop("service"), **settings)


def test_a_server_of_the_other_world_or_one_that_is_over_is_refused(shop):
    with pytest.raises(TypeError, match="server must be what grpc"):
        Publisher(object(), "memory://", SERVICE, port=1)
    shop.server.start()
    shop.server.stop(None)
    with pytest.raises(ConfigurationError, match="the server was stopped before"):
        Publisher(shop.server, "memory://", SERVICE, port=1)


def test_it_shows_what_it_is_about(make_shop, memory):
    shop = make_shop(services=["shop.Orders", "shop.Audit"])
    published = Publisher(shop.server, memory, port=0, **QUICK)
    assert repr(published) == "<Publisher of a server at port 0: new>"
    with published:
        where = f"127.0.0.1:{published.port}"
        assert repr(published) == f"<Publisher of shop.Orders and 1 more at {where}: serving>"
    assert published.state == "closed"
