"""Heartbeats and idle detection of a kit of `grpc`."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest

from fixtures.grpc_servers import IMPATIENT
from fixtures.proxy import Proxy
from fixtures.server_process import PING
from fixtures.shop import UNARY_UNARY
from fixtures.small_servers import METHOD, small
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel import ConfigurationError, HeartbeatPolicy, Kit
from rpcwheel.balancer import BalancedChannel
from rpcwheel.events import ConnectionAlive, ConnectionClosed, ConnectionDead, IdleDetectionLimited
from rpcwheel.heartbeat import HeartbeatState, MethodProbe
from rpcwheel.idle import ConnectionTable
from rpcwheel.registry import ServiceInstance
from rpcwheel.timer import ManualTimer
from rpcwheel.transport import ReconnectingChannel


@contextmanager
def serving(kit, **options):
    """A server with all that the kit gives one."""
    interceptors = kit.server_interceptors()
    handler = grpc.unary_unary_rpc_method_handler(lambda request, _: request)
    with ThreadPoolExecutor(2, thread_name_prefix="pool") as pool:
        server = grpc.server(
            pool, interceptors=interceptors, options=kit.server_options(), **options
        )
        server.add_generic_rpc_handlers([small(handler)])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield server, port, interceptors
        finally:
            server.stop(None).wait()


def closed_after(timer, events) -> bool:
    """Let some seconds pass, and see whether a connection was closed."""
    timer.advance(5.0)
    return any(isinstance(one, ConnectionClosed) for one in events)


def answers(call) -> bool:
    try:
        return call(b"b") == b"b"
    except grpc.RpcError:
        return False


def test_closing_a_channel_ends_its_heartbeat(shop):
    with ManualTimer() as timer, Kit(heartbeat=10.0, timer=timer) as kit:
        channel = kit.channel(shop.target)
        assert channel.unary_unary(UNARY_UNARY)(b"a") == b"a"
        assert len(kit.heartbeats) == 1
        channel.close()
        assert kit.heartbeats == ()
        assert timer.pending == 0


def test_without_the_setting_channels_have_no_heartbeat(shop):
    with Kit(timeout=WAIT_S) as kit, kit.channel(shop.target, options=IMPATIENT) as channel:
        assert channel.unary_unary(UNARY_UNARY)(b"a") == b"a"
        assert kit.heartbeats == ()


def test_closing_a_kit_ends_heartbeats_and_leaves_channels_open(shop):
    with ManualTimer() as timer:
        kit = Kit(heartbeat=10.0, timer=timer)
        with kit.channel(shop.target) as channel:
            call = channel.unary_unary(UNARY_UNARY)
            assert call(b"a") == b"a"
            kit.close()
            assert kit.heartbeats == ()
            assert timer.pending == 0
            assert call(b"b") == b"b"
        with pytest.raises(RuntimeError, match="closed"):
            kit.channel(shop.target)


def intercepted(channel):
    """The channel with grpc's interceptor channel on top."""
    return grpc.intercept_channel(channel, *Kit().client_interceptors())


@pytest.mark.parametrize("make", [ReconnectingChannel, grpc.insecure_channel])
@pytest.mark.parametrize("on_top", [lambda channel: channel, intercepted], ids=["bare", "more"])
def test_an_intercepted_channel_has_one_heartbeat_until_it_is_closed(shop, make, on_top):
    with ManualTimer() as timer, Kit(heartbeat=10.0, timer=timer) as kit:
        mine = make(shop.target)
        channel = kit.intercept_channel(on_top(mine))
        other = kit.intercept_channel(mine)
        assert channel.unary_unary(UNARY_UNARY)(b"a") == b"a"
        (heartbeat,) = kit.heartbeats
        assert heartbeat.target == shop.target
        channel.close()
        assert kit.heartbeats == ()
        assert heartbeat.state is HeartbeatState.CLOSED
        other.close()


def test_closing_a_plain_channel_ends_its_heartbeat(shop):
    with ManualTimer() as timer, Kit(heartbeat=10.0, timer=timer) as kit:
        with grpc.insecure_channel(shop.target) as plain:
            kit.intercept_channel(plain)
            assert len(kit.heartbeats) == 1
        assert kit.heartbeats == ()


def test_the_death_and_return_of_a_plain_channel_are_reported(shop, events):
    with (
        Kit(heartbeat=HeartbeatPolicy(interval=0.1, timeout=0.3)) as kit,
        Proxy(shop.target) as proxy,
        kit.intercept_channel(grpc.insecure_channel(proxy.target)) as channel,
    ):
        assert channel.unary_unary(UNARY_UNARY)(b"a") == b"a"
        (heartbeat,) = kit.heartbeats
        assert wait_until(lambda: heartbeat.answered)
        proxy.blackhole()
        assert wait_until(lambda: heartbeat.state is HeartbeatState.DEAD)
        assert wait_until(lambda: any(isinstance(one, ConnectionDead) for one in events))
        proxy.heal()
        assert wait_until(lambda: heartbeat.state is HeartbeatState.ALIVE)
        assert wait_until(lambda: any(isinstance(one, ConnectionAlive) for one in events))


def test_client_interceptors_warn_once_that_heartbeat_has_no_effect(shop):
    with ManualTimer() as timer, Kit(heartbeat=10.0, timer=timer) as kit:
        with pytest.warns(RuntimeWarning, match="has no effect on this channel") as caught:
            kit.client_interceptors()
        assert [one.filename for one in caught] == [__file__]
        kit.client_interceptors()
    Kit().client_interceptors()
    Kit(heartbeat=HeartbeatPolicy(interval=None)).client_interceptors()


def instance_of(shop):
    return ServiceInstance(service="shop", host="127.0.0.1", port=shop.port)


def test_each_subchannel_of_a_balanced_channel_has_a_heartbeat(shop):
    with (
        ManualTimer() as timer,
        Kit(heartbeat=10.0, timer=timer) as kit,
        BalancedChannel("shop", [instance_of(shop)], timer=timer) as balanced,
    ):
        channels = [kit.intercept_channel(balanced)]
        assert channels[0].unary_unary(UNARY_UNARY)(b"a") == b"a"
        (subchannel,) = balanced.subchannels
        (heartbeat,) = kit.heartbeats
        assert heartbeat.target == subchannel.instance.target
        with Kit(heartbeat=10.0, timer=timer) as another:
            another.intercept_channel(balanced)  # its subchannel has a channel by now
            assert len(another.heartbeats) == 1
        balanced.update([])
        with pytest.raises(RuntimeError, match="this kit is closed"):
            another.intercept_channel(balanced)


def test_a_closed_kit_refuses_to_probe_another_channel(shop):
    kit = Kit(heartbeat=10.0)
    kit.close()
    with grpc.insecure_channel(shop.target) as plain, pytest.raises(RuntimeError, match="closed"):
        kit.intercept_channel(plain)


def test_a_heartbeat_uses_the_probe_of_its_channel(shop):
    probe = MethodProbe(UNARY_UNARY)
    with (
        ManualTimer() as timer,
        Kit(heartbeat=10.0, timer=timer) as kit,
        kit.channel(shop.target, probe=probe) as channel,
    ):
        assert channel.unary_unary(UNARY_UNARY)(b"a") == b"a"
        (heartbeat,) = kit.heartbeats
        heartbeat.beat()
        wait_until(lambda: heartbeat.answered)
        assert [seen.method for seen in shop.calls] == [UNARY_UNARY] * 2


def test_a_probe_without_a_heartbeat_is_refused():
    with Kit() as kit, pytest.raises(ConfigurationError, match=r"Kit\(heartbeat=10\.0\)"):
        kit.channel("127.0.0.1:1", probe=MethodProbe(PING))


def test_close_reports_servers_without_detect_idle(events):
    with Kit(idle=60.0) as kit:
        kit.server_interceptors()
    (limited,) = (one for one in events if isinstance(one, IdleDetectionLimited))
    assert "detect_idle(server) was not called for 1 of its servers" in limited.reason


def test_server_options_override_those_of_the_heartbeat():
    kit = Kit(heartbeat=10.0)
    options = dict(kit.server_options(keepalive=30.0, connection_age=3600.0))
    assert options["grpc.keepalive_time_ms"] == 30_000
    assert options["grpc.http2.ping_timeout_ms"] == 20_000
    assert options["grpc.max_connection_age_ms"] == 3_600_000


def test_an_invalid_target_is_refused_and_gets_no_heartbeat():
    with Kit(heartbeat=10.0) as kit:
        with pytest.raises(TypeError, match="target must be a string"):
            kit.channel(50051)
        assert kit.heartbeats == ()


def test_an_idle_connection_is_closed_and_its_client_reconnects(events):
    with (
        ManualTimer() as timer,
        Kit(idle=60.0, timer=timer) as kit,
        serving(kit) as (server, port, _),
    ):
        detector = kit.detect_idle(server, port)
        with grpc.insecure_channel(f"127.0.0.1:{port}", options=IMPATIENT) as channel:
            call = channel.unary_unary(METHOD)
            assert call(b"a") == b"a"
            wait_until(lambda: closed_after(timer, events))
            assert wait_until(lambda: answers(call))  # the news takes a moment to the client
        assert not detector.closed
    assert detector.closed


def test_each_server_has_its_own_connection_table():
    with Kit(idle=60.0) as kit, serving(kit) as one, serving(kit) as other:
        with pytest.raises(ConfigurationError, match=r"2 servers .*connections=interceptors"):
            kit.detect_idle(one[0], one[1])
        detector = kit.detect_idle(one[0], one[1], connections=one[2][0])
        other_detector = kit.detect_idle(other[0], other[1])
        assert kit.detectors == (detector, other_detector)
        detector.close()
        assert kit.detectors == (other_detector,)
        with pytest.raises(ConfigurationError, match="no server waits for a detector"):
            kit.detect_idle(other[0], other[1])


def test_detect_idle_without_the_setting_is_refused():
    with Kit(timeout=2.0) as kit:
        assert not any(isinstance(one, ConnectionTable) for one in kit.server_interceptors())
        server = grpc.server(ThreadPoolExecutor(1))
        with pytest.raises(ConfigurationError, match=r"no `idle`.*Kit\(idle=180\.0\)"):
            kit.detect_idle(server, 50051)
        server.stop(None)


def test_server_options_follow_the_heartbeat():
    for heartbeat, keepalive, answer in (
        (None, 60_000, 20_000),
        (10.0, 10_000, 20_000),
        (HeartbeatPolicy(interval=0.5, timeout=2.0), 1_000, 1_500),
        (HeartbeatPolicy(interval=None), 60_000, 20_000),
    ):
        options = dict(Kit(heartbeat=heartbeat).server_options())
        assert options["grpc.keepalive_time_ms"] == keepalive
        assert options["grpc.http2.ping_timeout_ms"] == answer
