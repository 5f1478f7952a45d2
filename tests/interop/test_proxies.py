"""The features of clients and servers through nginx and HAProxy.

The configurations are those of docs/operations/proxies.md.
"""

import threading

import grpc
import pytest

from fixtures.balanced_channels import POLICY, instance
from fixtures.grpc_servers import GrpcServer
from fixtures.http_proxies import Nginx
from fixtures.proxy import Proxy
from fixtures.shop import SERVICE, UNARY_UNARY, Fail, Hang, Refuse, Shop
from fixtures.waiting import WAIT_S, in_thread, wait_until
from fixtures.worlds import KINDS, METHODS, RETRY
from rpcwheel.admission import BreakerPolicy
from rpcwheel.balancer import BalancerPolicy, OutlierEjectionPolicy
from rpcwheel.call import HedgingPolicy, MethodPolicy
from rpcwheel.events import ConnectionDead, ConnectionIdle, SubchannelUnhealthy
from rpcwheel.failback import FailbackPolicy
from rpcwheel.heartbeat import HeartbeatPolicy
from rpcwheel.idle import IdlePolicy
from rpcwheel.rpc import CRITICALITY_KEY, NONCE_KEY

IDEMPOTENT = {"*": MethodPolicy(idempotent=True)}

OFTEN = ("inter 2s", "inter 100ms")
"""For HAProxy: find out sooner that a server is back."""


def channel_to(world, target, **settings):
    """A channel of a kit with these settings."""
    kit = world.keep(world.do(world.api.Kit, **settings))
    return world.keep(world.do(kit.channel, target))


def echo(world, channel, kind):
    """Call a method of the shop, which returns its request."""
    messages = (b"xyz",) if kind.startswith("unary") else (b"x", b"y", b"z")
    response = world.call(channel, kind, *messages).result()
    return b"".join(response if isinstance(response, list) else [response])


def test_metadata_deadline_and_status_of_each_kind_pass(shop, world, open_proxy):
    channel = channel_to(
        world, open_proxy(shop.target).target, timeout=WAIT_S, criticality="sheddable"
    )
    for kind in KINDS:
        assert echo(world, channel, kind) == b"xyz"
        seen = shop.calls[-1]
        assert seen.metadata[CRITICALITY_KEY] == "sheddable"
        assert 0 < seen.time_remaining < WAIT_S + 1
        trailing = (("detail-bin", b"\x00\xff"), ("in_stock", "0"))
        shop.then(Fail("NOT_FOUND", "no größer\n%", trailing, read=True))
        call = world.call(channel, kind, metadata=(("key-bin", b"\xff\x00"),))
        assert call.error().code() is grpc.StatusCode.NOT_FOUND
        assert call.details() == "no größer\n%"
        assert dict(trailing).items() <= call.trailing_metadata().items()
        assert shop.calls[-1].metadata["key-bin"] == b"\xff\x00"


def test_failed_calls_are_retried(shop, world, open_proxy):
    target = open_proxy(shop.target).target
    channel = channel_to(world, target, retry=RETRY, methods=IDEMPOTENT)
    for kind in KINDS:
        shop.then(Fail("UNAVAILABLE", read=True), Fail("UNAVAILABLE", read=True))
        assert echo(world, channel, kind) == b"xyz"
    assert len(shop.calls) == 3 * len(KINDS)


def test_the_proof_of_a_refusal_passes(shop, world, open_proxy):
    channel = channel_to(world, open_proxy(shop.target).target, retry=RETRY)
    for kind in ("unary_unary", "unary_stream"):
        shop.then(Refuse(after_ms=1))
        assert echo(world, channel, kind) == b"xyz"
    assert len({seen.metadata[NONCE_KEY] for seen in shop.calls}) == 4


def test_a_hedged_attempt_that_is_overtaken_ends_on_its_server(shop, world, open_proxy):
    target = open_proxy(shop.target).target
    hedging = HedgingPolicy(delay=0.05, max_attempts=2, retry_budget=None)
    channel = channel_to(world, target, hedging=hedging, methods=IDEMPOTENT)
    shop.then(Hang())
    assert echo(world, channel, "unary_unary") == b"xyz"
    assert len(shop.calls) == 2
    assert all(seen.ended.wait(WAIT_S) for seen in shop.calls)


def test_failback_delivers_when_the_server_is_back(shop, world, open_proxy, request):
    edit = () if "nginx" in request.node.name else (OFTEN,)
    target = open_proxy(shop.target, edit=edit).target
    failback = FailbackPolicy(
        retry_on="UNAVAILABLE", default=b"later", backoff=0.1, max_attempts=None
    )
    policies = {UNARY_UNARY: MethodPolicy(failback=failback)}
    channel = channel_to(world, target, methods=policies)
    shop.kill()
    assert echo(world, channel, "unary_unary") == b"later"
    shop.start()
    assert wait_until(lambda: [seen.requests for seen in shop.calls] == [[b"xyz"]])


def test_a_connection_whose_calls_are_not_answered_is_replaced(shop, world, open_proxy, events):
    with Proxy(shop.target) as network:
        target = open_proxy(network.target).target
        network.blackhole(new=True)
        heartbeat = HeartbeatPolicy(interval=0.1, timeout=0.3)
        channel = channel_to(world, target, heartbeat=heartbeat)
        call = world.call(channel, "unary_unary", timeout=WAIT_S)
        assert "no answer to heartbeats" in call.error().details()
        assert any(isinstance(event, ConnectionDead) for event in events)
        network.heal()
        retrying = channel_to(world, target, timeout=WAIT_S, retry=RETRY.replace(max_attempts=9))
        assert echo(world, retrying, "unary_unary") == b"xyz"


def test_no_call_fails_while_the_proxy_is_reloaded(shop, world, open_proxy, request):
    limit = ("client_body_timeout 1h;", "client_body_timeout 1h; keepalive_requests 10;")
    proxy = open_proxy(shop.target, edit=(limit,) if "nginx" in request.node.name else ())
    channel = channel_to(world, proxy.target, timeout=WAIT_S)
    reloaded = threading.Event()

    def call_until_reloaded():
        done = 0
        while not reloaded.is_set():
            assert echo(world, channel, "unary_unary") == b"xyz"
            done += 1
        return done

    callers = [in_thread(call_until_reloaded) for _ in range(3)]
    try:
        for _ in range(2):
            count = len(shop.calls)
            assert wait_until(lambda count=count: len(shop.calls) > count + 20)
            proxy.reload()
    finally:
        reloaded.set()
    assert sum(caller.result(WAIT_S) for caller in callers) == len(shop.calls)


def test_connections_of_a_proxy_that_are_idle_are_closed(world, open_proxy, events):
    policy = IdlePolicy(idle_timeout=0.2, check_interval=0.05)
    kit = world.keep(world.do(world.api.Kit, idle=policy))
    echoes = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
    service = grpc.method_handlers_generic_handler(SERVICE, {"UnaryUnary": echoes})
    with GrpcServer(service, world=world, interceptors=kit.server_interceptors()) as server:
        world.do(kit.detect_idle, server.server, ports=server.port)
        target = open_proxy(server.target).target
        # A call that the proxy sends at the moment of the end may fail.
        channel = channel_to(world, target, retry=RETRY, methods=IDEMPOTENT)
        for number in (1, 2):
            assert echo(world, channel, "unary_unary") == b"xyz"
            assert wait_until(
                lambda number=number: (
                    number <= sum(isinstance(event, ConnectionIdle) for event in events)
                )
            )


def test_calls_pass_over_tls(shop, world, open_proxy, certificates):
    proxy = open_proxy(shop.target, certificates=certificates)
    kit = world.keep(world.do(world.api.Kit))
    credentials = certificates.channel_credentials()
    channel = world.do(kit.channel, f"localhost:{proxy.port}", credentials=credentials)
    world.keep(channel)
    for kind in KINDS:
        assert echo(world, channel, kind) == b"xyz"


def test_a_proxy_without_servers_is_ejected(shop, world, open_proxy, events, request):
    edit = () if "nginx" in request.node.name else (OFTEN,)
    ejection = OutlierEjectionPolicy(consecutive_failures=2)
    policy = BalancerPolicy(outlier_ejection=ejection, **POLICY)
    with Shop() as lost:
        proxies = [open_proxy(lost.target, edit=edit), open_proxy(shop.target)]
        kit = world.keep(world.do(world.api.Kit, retry=RETRY, methods=IDEMPOTENT))
        create = world.module("balancer").BalancedChannel
        balanced = world.keep(world.do(create, SERVICE, balancer_policy=policy))
        channel = world.do(kit.intercept_channel, balanced)
        instances = [instance(proxy, id=str(proxy.port)) for proxy in proxies]
        world.do(balanced.update, instances)
        assert wait_until(lambda: echo(world, channel, "unary_unary") and lost.calls and shop.calls)
        lost.kill()
        assert wait_until(
            lambda: (
                echo(world, channel, "unary_unary") == b"xyz"
                and any(isinstance(event, SubchannelUnhealthy) for event in events)
            )
        )


@pytest.fixture
def nginx(shop, tmp_path):
    """Starts an nginx in front of the shop, with a changed configuration."""
    Nginx.needed()
    opened = []

    def open_(*edit):
        opened.append(Nginx(tmp_path, shop.target, edit=edit))
        return opened[-1].target

    yield open_
    for proxy in opened:
        proxy.close()


def test_requests_that_are_too_large_for_nginx_open_no_breaker(world, nginx):
    target = nginx(("client_max_body_size 0;", "client_max_body_size 1k;"))
    breaker = BreakerPolicy(minimum_calls=2, window_calls=2)
    channel = channel_to(world, target, breaker=breaker)
    for _ in range(4):
        error = world.call(channel, "unary_unary", b"x" * 2000).error()
        assert error.details() == "Received http2 header with status: 413"
    assert echo(world, channel, "unary_unary") == b"xyz"


def test_calls_of_each_kind_end_with_unavailable_if_nginx_has_no_server(shop, world, nginx):
    channel = channel_to(world, nginx())
    shop.kill()
    for kind in METHODS:
        for _ in range(10):
            error = world.call(channel, kind).error()
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert error.details() == "no answer of a server to nginx"
