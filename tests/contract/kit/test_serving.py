"""A kit publishes servers, and makes channels by name."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from fixtures.shops import SERVICE, WHO
from fixtures.waiting import WAIT_S
from rpcwheel import ConfigurationError, Kit, RegistryPolicy, RetryPolicy
from rpcwheel.balancer import BalancerPolicy
from rpcwheel.events import IdleDetectionLimited

QUICK = {"port": 0, "lame_duck": 0.05}
PATIENT = BalancerPolicy(pick_timeout=WAIT_S)
"""Calls wait for instances for longer than a machine stands still."""
RETRY = RetryPolicy(retry_on={"UNAVAILABLE"}, max_attempts=4)


@contextmanager
def entered(world, make, *args, **options):
    """The block of a context manager of the world."""
    manager = world.do(make, *args, **options)
    prefix = "__" if world.name == "sync" else "__a"
    yield world.do(getattr(manager, f"{prefix}enter__"))
    world.do(getattr(manager, f"{prefix}exit__"), None, None, None)


@pytest.fixture
def server(make_world_shop):
    """Makes servers of a kit that return `a`."""
    return lambda kit: (
        make_world_shop(interceptors=kit.server_interceptors(), options=kit.server_options()).server
    )


def test_a_server_is_published_called_by_name_and_stopped_in_order(world, server, tmp_path):
    url = f"sqlite://{tmp_path}/registry.db"
    settings = {"heartbeat": 10.0, "idle": 180.0, "registry_policy": 60.0}
    kit = world.keep(world.api.Kit(timeout=WAIT_S, retry=RETRY, **settings))
    served = server(kit)
    with entered(world, kit.serve, served, publish=url, service=SERVICE, **QUICK) as published:
        assert isinstance(published, world.api.Publisher)
        assert published.registries[0].policy == RegistryPolicy(lease_ttl=60.0)
        assert world.do(published.wait_published, WAIT_S)
        (detector,) = kit.detectors
        by_name = f"{url}?service={SERVICE}"
        for make in (kit.channel, world.api.insecure_channel):
            channel = world.keep(world.do(make, by_name, balancer_policy=PATIENT))
            assert world.call(channel, method=WHO, timeout=WAIT_S).result() == b"a"
        assert any(one.calls_total for one in world.do(detector.connections))
        world.do(published.begin_stop)
        assert world.do(served.wait_for_termination, WAIT_S) is False
    assert detector.closed
    assert kit.detectors == ()


def test_channels_by_name_have_settings_of_the_balancer(world, memory):
    kit = world.keep(world.api.Kit())
    settings = {"lb_policy": "least_request", "group": "blue", "version": "1", "zone": "eu-1"}
    policy = BalancerPolicy(pick_timeout=1)
    world.keep(world.do(kit.channel, memory, service=SERVICE, balancer_policy=policy, **settings))


def test_a_server_without_the_interceptors_of_the_kit_is_reported_as_without_an_idle_detector(
    world, tmp_path, events
):
    kit = world.keep(world.api.Kit(idle=180.0))
    server = world.do(world.grpc.server, ThreadPoolExecutor(1))
    url = f"sqlite://{tmp_path}/registry.db"
    with entered(world, kit.serve, server, publish=url, service=SERVICE, **QUICK):
        assert kit.detectors == ()
        (limited,) = events.of(IdleDetectionLimited)
        assert "interceptors=kit.server_interceptors()" in limited.reason


def test_a_server_that_has_an_idle_detector_is_not_reported_as_without_one(
    world, server, tmp_path, events
):
    kit = world.keep(world.api.Kit(idle=180.0))
    served = server(kit)
    world.do(kit.detect_idle, served)
    url = f"sqlite://{tmp_path}/registry.db"
    with entered(world, kit.serve, served, publish=url, service=SERVICE, **QUICK):
        assert len(kit.detectors) == 1
    assert events.of(IdleDetectionLimited) == []


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
