"""A kit of `grpc` publishes servers, and makes channels by name."""

import socket

import pytest

import rpcwheel
from fixtures.shops import SERVICE, WHO
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel import ConfigurationError, Kit, Publisher, RegistryPolicy, RetryPolicy
from rpcwheel.balancer import BalancerPolicy
from rpcwheel.heartbeat import HeartbeatState
from rpcwheel.registry import ServiceInstance

QUICK = {"port": 0, "lame_duck": 0.05}
PATIENT = BalancerPolicy(pick_timeout=WAIT_S)
"""Calls wait for instances for longer than a machine stands still."""
RETRY = RetryPolicy(retry_on={"UNAVAILABLE"}, max_attempts=4)


@pytest.fixture
def kit():
    with Kit(timeout=WAIT_S, retry=RETRY, idempotent=True, registry_policy=60.0) as kit:
        yield kit


def test_a_server_is_published_and_called_by_name(make_shop, tmp_path):
    url = f"sqlite://{tmp_path}/registry.db"
    kit = rpcwheel.Kit(timeout=WAIT_S, retry=RETRY, heartbeat=10.0, idle=180.0)
    shop = make_shop(interceptors=kit.server_interceptors(), options=kit.server_options())
    server, port = shop.server, free_port()
    with kit.serve(server, publish=url, service="shop.Orders", port=port) as published:
        assert isinstance(published, Publisher)
        assert published.wait_published(WAIT_S)
        by_name = f"{url}?service=shop.Orders"
        for channel in (
            kit.channel(by_name, balancer_policy=PATIENT),
            rpcwheel.insecure_channel(by_name, balancer_policy=PATIENT),
        ):
            with channel:
                assert channel.unary_unary(WHO)(b"", timeout=WAIT_S) == b"a"
        published.begin_stop()
        assert server.wait_for_termination(WAIT_S) is False
    kit.close()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


def test_a_call_by_name_has_the_policies_of_the_kit(kit, make_shop, memory):
    with kit.serve(make_shop().server, publish=memory, service=SERVICE, **QUICK) as published:
        assert published.wait_published(WAIT_S)
        with kit.channel(f"{memory}/{SERVICE}", balancer_policy=PATIENT) as channel:
            assert channel.unary_unary(WHO)(b"") == b"a"


def test_a_registry_of_the_kit_has_its_policy(kit, make_shop, memory):
    published = kit.serve(make_shop().server, publish=memory, service=SERVICE, **QUICK)
    assert published.registries[0].policy == RegistryPolicy(lease_ttl=60.0)
    published.stop()


def test_settings_for_channels_by_name_are_refused_for_an_address(kit, memory):
    settings = {"lb_policy": "least_request", "group": "blue", "version": "1", "zone": "eu-1"}
    with kit.channel(
        memory, service=SERVICE, balancer_policy=BalancerPolicy(pick_timeout=1), **settings
    ):
        pass
    with pytest.raises(
        ConfigurationError, match=r"lb_policy, zone: only for a service in a registry"
    ):
        kit.channel("127.0.0.1:50051", lb_policy="least_request", zone="eu-1")


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("etdc://127.0.0.1/shop.Orders", "did you mean etcd://"),
        ("memory://a", "no service is named"),
        ("http://127.0.0.1:50051", "no registry has the scheme 'http'"),
    ],
)
def test_an_invalid_url_is_refused(kit, target, said):
    with pytest.raises(ConfigurationError, match=said):
        kit.channel(target)


def test_a_closed_kit_refuses_to_make_a_channel_with_heartbeats(memory):
    kit = Kit(heartbeat=10.0)
    kit.close()
    with pytest.raises(RuntimeError, match="closed"):
        kit.channel(f"{memory}/{SERVICE}")


def test_detectors_has_the_idle_detector_of_serve_while_the_server_serves(make_shop, memory):
    with Kit(idle=180.0) as kit:
        shop = make_shop(interceptors=kit.server_interceptors())
        assert kit.detectors == ()
        with (
            kit.serve(shop.server, publish=memory, service=SERVICE, **QUICK),
            kit.channel(memory, service=SERVICE, balancer_policy=PATIENT) as channel,
        ):
            (detector,) = kit.detectors
            assert not detector.closed
            assert channel.unary_unary(WHO)(b"", timeout=WAIT_S) == b"a"
            assert any(one.calls_total for one in detector.connections())
        assert detector.closed
        assert kit.detectors == ()
        plain = make_shop()  # without the kit's interceptors nothing can be seen
        with kit.serve(plain.server, publish=memory, service=SERVICE, **QUICK):
            assert kit.detectors == ()


def test_serve_with_several_servers_needs_the_connection_table(make_shop, memory):
    with Kit(idle=180.0) as kit:
        interceptors = [kit.server_interceptors() for _ in "ab"]
        shops = [make_shop(interceptors=each) for each in interceptors]
        with pytest.raises(ConfigurationError, match="give its first interceptor"):
            kit.serve(shops[0].server, publish=memory, service=SERVICE, **QUICK)
        for shop, each in zip(shops, interceptors, strict=True):
            settings = {"connections": each[0], **QUICK}
            with kit.serve(shop.server, publish=memory, service=SERVICE, **settings):
                pass


def test_the_heartbeat_of_a_subchannel_ends_when_its_instance_is_gone(make_shop, memory):
    shop = make_shop()
    policy = PATIENT.replace(self_preservation=False)
    instance = ServiceInstance(service=SERVICE, host="127.0.0.1", port=shop.listen())
    shop.server.start()
    with rpcwheel.open_registry(memory) as registry, Kit(heartbeat=60.0) as kit:
        registry.register(instance, wait=WAIT_S)
        with kit.channel(f"{memory}/{SERVICE}", balancer_policy=policy) as channel:
            hold = channel.unary_unary(f"/{SERVICE}/Hold").future(b"", timeout=WAIT_S)
            assert shop.held.wait(WAIT_S)
            (heartbeat,) = kit.heartbeats
            registry.unregister(instance, wait=WAIT_S)
            assert wait_until(lambda: heartbeat.state is HeartbeatState.CLOSED)
            assert kit.heartbeats == ()
            shop.release.set()
            assert hold.result() == b"a"
