"""A headless service of Kubernetes: channels call all addresses of a host, and follow them."""

import socket
import sys
import threading
from types import SimpleNamespace

import grpc
import pytest

import rpcwheel
from fixtures.engine_watchers import RecordingWatcher
from fixtures.shops import WHO
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel import RegistryPolicy
from rpcwheel.balancer import BalancerPolicy
from rpcwheel.errors import ExtraMissing, RegistryRefused, RegistryUnavailable
from rpcwheel.events import RecordSkipped
from rpcwheel.registry import ServiceInstance
from rpcwheel.registry.backend import Settings
from rpcwheel.registry.backends import open_backend
from rpcwheel.timer import ManualTimer

HOST = "shop-orders.default"
POLICY = RegistryPolicy(timeout=WAIT_S, snapshot=False)
SETTINGS = {"balancer_policy": BalancerPolicy(pick_timeout=WAIT_S), "registry_policy": POLICY}
OFTEN = "interval=0.02"
SELDOM = "interval=1e6"

NO_SUCH_NAME = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
NO_SERVER = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")


class FakeResolver:
    """Answers for some hosts in place of `socket.getaddrinfo`."""

    def __init__(self) -> None:
        self.answers = {HOST: []}
        self.count = 0
        self._real = socket.getaddrinfo

    def __call__(self, host, port, *args, **kwargs):
        if host not in self.answers:
            return self._real(host, port, *args, **kwargs)
        self.count += 1
        answer = self.answers[host]
        if isinstance(answer, Exception):
            raise answer
        if callable(answer):
            answer = answer()
        return [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (one, port, 0, 2))
            if ":" in one
            else (socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port))
            for one in answer
        ]


@pytest.fixture
def resolver(monkeypatch):
    fake = FakeResolver()
    monkeypatch.setattr(socket, "getaddrinfo", fake)
    return fake


@pytest.fixture
def pods(make_shop):
    """Start three servers with one port, at addresses of their own; gives them and the port."""
    port, shops = 0, {}
    for host in ("127.0.0.1", "127.0.0.2", "127.0.0.3"):
        shop = make_shop(host)
        port = shop.server.add_insecure_port(f"{host}:{port}")
        shop.server.start()
        shops[host] = shop
    return shops, port


@pytest.fixture
def backend(closed_later):
    """Open a backend that is closed with the test."""

    def open_one(url, timer=None, timeout_s=WAIT_S):
        return closed_later(open_backend(url, Settings(15.0, timeout_s, timer)))

    return open_one


def who(channel, times=6):
    ask = channel.unary_unary(WHO)
    return {ask(b"", timeout=WAIT_S).decode() for _ in range(times)}


def url(port=50051, *options):
    return f"headless://{HOST}:{port}" + (f"?{'&'.join(options)}" if options else "")


# Addresses


def test_each_address_is_one_instance_of_the_only_service(resolver, backend):
    resolver.answers[HOST] = ["10.0.0.7", "fd00::7", "10.0.0.7", "fe80::1"]
    headless = backend(url())
    view = headless.lookup(HOST)
    found = [ServiceInstance.decoded(one) for one in view.records.values()]
    assert [one.id for one in found] == ["10.0.0.7:50051", "[fd00::7]:50051", "[fe80::1%2]:50051"]
    assert list(view.records) == [one.id for one in found]
    assert {(one.service, one.protocol, one.port) for one in found} == {(HOST, "grpc", 50051)}
    assert headless.services() == [HOST]
    with pytest.raises(RegistryRefused, match="has one service, 'shop-orders"):
        headless.lookup("shop.Orders")


# Failures of the resolver


def test_a_channel_follows_the_addresses_and_keeps_them_while_a_resolution_fails(resolver, pods):
    _, port = pods
    resolver.answers[HOST] = ["127.0.0.1"]
    balancer = SETTINGS["balancer_policy"]
    with (
        rpcwheel.open_registry(url(port, OFTEN), registry_policy=POLICY) as registry,
        rpcwheel.insecure_channel(HOST, registry=registry, balancer_policy=balancer) as channel,
    ):
        assert channel.name == HOST
        assert who(channel) == {"127.0.0.1"}
        resolver.answers[HOST] = NO_SERVER
        assert wait_until(lambda: not registry.up)
        assert [one.host for one in registry.lookup(HOST).instances] == ["127.0.0.1"]
        assert who(channel) == {"127.0.0.1"}
        resolver.answers[HOST] = ["127.0.0.1", "127.0.0.2"]
        assert wait_until(lambda: who(channel) == {"127.0.0.1", "127.0.0.2"})
        assert registry.up


def test_a_name_that_never_had_usable_addresses_makes_the_registry_unavailable(resolver, backend):
    for answer, said in (
        (NO_SUCH_NAME, r"'shop-orders.*' can't be resolved: "),
        (NO_SERVER, r"'shop-orders.*' can't be resolved: "),
        (UnicodeError("label too long"), r"'shop-orders.*' can't be resolved: "),
        (["0.0.0.0"], "an address to listen on"),
    ):
        resolver.answers[HOST] = answer
        with pytest.raises(RegistryUnavailable, match=said):
            backend(url()).lookup(HOST)


def _details(channel):
    with pytest.raises(grpc.RpcError) as caught:
        who(channel)
    return caught.value.details()


def test_a_name_that_no_longer_exists_is_an_empty_service(resolver, backend):
    resolver.answers[HOST] = ["10.0.0.7"]
    headless = backend(url())
    assert headless.lookup(HOST).records
    resolver.answers[HOST] = NO_SERVER
    with pytest.raises(RegistryUnavailable):
        headless.lookup(HOST)
    resolver.answers[HOST] = NO_SUCH_NAME
    assert not headless.lookup(HOST).records
    assert headless.services() == []


def test_an_address_that_no_server_can_have_is_skipped_with_an_event(resolver, events):
    resolver.answers[HOST] = ["10.0.0.1", "0.0.0.0", "::", "10.0.0.2"]
    with rpcwheel.open_registry(url(), registry_policy=POLICY) as registry:
        found = registry.lookup(HOST).instances
    assert [one.host for one in found] == ["10.0.0.1", "10.0.0.2"]
    skipped = wait_until(lambda: events.of(RecordSkipped))
    assert {event.key for event in skipped} == {"0.0.0.0:50051", "[::]:50051"}
    assert all("an address to listen on" in str(event.error) for event in skipped)


def test_a_resolver_that_hangs_delays_no_caller_and_is_asked_once(resolver, backend):
    go_on = threading.Event()

    def answer():
        go_on.wait(WAIT_S)
        return ["10.0.0.7"]

    resolver.answers[HOST] = answer
    headless = backend(url(), timeout_s=0.05)
    for _ in range(3):
        with pytest.raises(RegistryUnavailable, match=r"has not answered within 0\.05 s"):
            headless.lookup(HOST)
    assert resolver.count == 1
    go_on.set()

    def found():
        try:
            return headless.lookup(HOST).records
        except RegistryUnavailable:
            return None

    assert wait_until(found)


# Servers that can't be reached


def test_addresses_are_resolved_again_when_a_server_is_lost(world, resolver, pods):
    shops, port = pods
    timer = ManualTimer()
    resolver.answers[HOST] = ["127.0.0.1", "127.0.0.2"]
    target = url(port, SELDOM)
    channel = world.keep(world.do(world.api.insecure_channel, target, timer=timer, **SETTINGS))

    def called():
        calls = [world.call(channel, method=WHO, timeout=WAIT_S) for _ in range(6)]
        try:
            return {call.result().decode() for call in calls}
        except grpc.RpcError:  # a call on its way to the server that was stopped
            return set()

    assert wait_until(lambda: called() == {"127.0.0.1", "127.0.0.2"})
    resolver.answers[HOST] = ["127.0.0.2", "127.0.0.3"]
    timer.advance(6)
    shops["127.0.0.1"].server.stop(None).wait()
    assert wait_until(lambda: called() == {"127.0.0.2", "127.0.0.3"})


def test_addresses_are_resolved_again_when_there_are_none(resolver, pods):
    _, port = pods
    timer = ManualTimer()
    resolver.answers[HOST] = ["127.0.0.1"]
    with rpcwheel.open_registry(url(port, SELDOM), registry_policy=POLICY, timer=timer) as registry:
        assert registry.services() == [HOST]
        resolver.answers[HOST] = NO_SUCH_NAME
        balancer = SETTINGS["balancer_policy"]
        with rpcwheel.insecure_channel(
            HOST, registry=registry, balancer_policy=balancer
        ) as channel:
            assert wait_until(lambda: registry.lookup(HOST).source == "live")
            assert f"no instance of {HOST} is known: {registry.url} lists" in _details(channel)
            resolver.answers[HOST] = ["127.0.0.1"]
            timer.advance(6)
            ask = channel.unary_unary(WHO)
            assert ask(b"", timeout=WAIT_S, wait_for_ready=True) == b"127.0.0.1"


def test_refresh_resolves_at_most_every_5_seconds(resolver, backend):
    timer, watcher = ManualTimer(), RecordingWatcher()
    headless = backend(url(50051, SELDOM), timer)
    resolver.answers[HOST] = ["10.0.0.1"]
    watch = headless.watch(HOST, watcher)
    for count in (1, 2, 3):
        assert wait_until(lambda: len(watcher.news) == count)  # noqa: B023
        headless.refresh(HOST)
        timer.advance(4)
        headless.refresh(HOST)
        timer.advance(2)
        assert resolver.count == count
        resolver.answers[HOST] = [f"10.0.0.{count + 1}"]
        headless.refresh(HOST)
    watch.close()
    headless.close()
    headless.refresh(HOST)


# TLS


def test_certificates_are_those_of_the_host(resolver, make_shop, certificates):
    resolver.answers["localhost"] = ["127.0.0.2"]  # for which the certificate is not
    shop = make_shop("tls")
    port = shop.server.add_secure_port("127.0.0.2:0", certificates.server_credentials())
    shop.server.start()
    target, credentials = f"headless://localhost:{port}", certificates.channel_credentials()
    with rpcwheel.secure_channel(target, credentials, **SETTINGS) as channel:
        assert who(channel) == {"tls"}
    other = [("grpc.ssl_target_name_override", "other.example")]
    with rpcwheel.secure_channel(target, credentials, other, **SETTINGS) as channel:
        details = _details(channel)  # the second is that of grpcio 1.66
        assert "Hostname Verification Check failed" in details or "Peer name" in details


# SRV records


@pytest.fixture
def name_server(monkeypatch):
    """A name server with SRV records for `HOST`, which dnspython asks; its answer can be set."""
    pytest.importorskip("dns")
    import dns.message
    import dns.rcode
    import dns.resolver
    import dns.rrset

    server = SimpleNamespace(rcode=dns.rcode.NOERROR, records=[], asked=[])

    def serve(sock) -> None:
        while True:
            data, client = sock.recvfrom(4096)
            if not data:
                return
            query = dns.message.from_wire(data)
            server.asked.append(query.question[0].to_text())
            reply = dns.message.make_response(query)
            reply.set_rcode(server.rcode)
            if server.records:
                name = query.question[0].name
                reply.answer.append(dns.rrset.from_text_list(name, 5, "IN", "SRV", server.records))
            sock.sendto(reply.to_wire(), client)

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        asks = dns.resolver.Resolver(configure=False)
        asks.nameservers, asks.port = ["127.0.0.1"], sock.getsockname()[1]
        monkeypatch.setattr(dns.resolver, "default_resolver", asks)
        thread = threading.Thread(target=serve, args=(sock,))
        thread.start()
        yield server
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
            end.sendto(b"", sock.getsockname())
        thread.join()


def test_srv_records_tell_addresses_and_ports(resolver, backend, name_server):
    from dns import rcode

    headless = backend(f"headless://{HOST}?srv")
    resolver.answers = {"a.b": ["10.0.0.7"], "c.b": ["10.0.0.8"], "d.b": NO_SUCH_NAME}
    name_server.rcode = rcode.NXDOMAIN
    with pytest.raises(RegistryUnavailable, match=r"no SRV records _grpc\._tcp\.shop-orders"):
        headless.lookup(HOST)
    name_server.rcode = rcode.NOERROR
    name_server.records = ["0 1 50051 a.b.", "0 1 50052 c.b.", "0 1 1 d.b.", "1 1 2 a.b."]
    found = headless.lookup(HOST).records
    assert set(found) == {"10.0.0.7:50051", "10.0.0.8:50052"}
    name_server.records = ["0 1 1 d.b."]
    assert not headless.lookup(HOST).records
    assert name_server.asked[-1] == f"_grpc._tcp.{HOST}. IN SRV"
    name_server.records, name_server.rcode = [], rcode.NXDOMAIN
    assert not headless.lookup(HOST).records
    name_server.rcode = rcode.SERVFAIL
    with pytest.raises(RegistryUnavailable, match=r"_grpc\._tcp\.shop-orders"):
        headless.lookup(HOST)


def test_srv_records_need_dnspython(monkeypatch):
    monkeypatch.setitem(sys.modules, "dns", None)
    with pytest.raises(ExtraMissing, match=r"pip install 'rpcwheel\[dns\]'"):
        rpcwheel.open_registry(f"headless://{HOST}?srv=1")
