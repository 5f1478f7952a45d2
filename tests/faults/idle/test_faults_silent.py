"""Connections that were never used, hold a silent stream, or belong to a frozen process."""

import time
from contextlib import ExitStack, suppress

import grpc
import pytest

from fixtures.idle_worlds import CHECK, HOLD, SERVING, SLOW_S, echo, frozen_client
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.idle import peers
from rpcwheel.observe import ConnectionClosed, ConnectionIdle, ConnectionKept

pytestmark = pytest.mark.skipif(not peers.SUPPORTED, reason="sockets are found on Linux only")

IDLE_TIMEOUT = 0.6


def test_connections_that_never_sent_a_byte_are_closed(world, events):
    with world.serve(idle_timeout=None) as served, ExitStack() as stack:
        clients = [stack.enter_context(served.raw()) for _ in range(5)]
        assert wait_until(lambda: len(served.peers()) == 5)
        doomed = served.peers()
        world.limit(served, IDLE_TIMEOUT)
        assert wait_until(lambda: not served.peers())
        for client in clients:
            client.settimeout(WAIT_S)
            while client.recv(4096):  # what gRPC said, and then the end
                pass
        assert wait_until(lambda: _closed(events) == doomed)
        assert wait_until(lambda: not world.do(served.connections.snapshot))


def test_channels_that_connected_and_never_called_are_closed(world, events):
    with world.serve(idle_timeout=None) as served, ExitStack() as stack:
        channels = [stack.enter_context(served.client()) for _ in range(5)]
        for channel in channels:
            grpc.channel_ready_future(channel).result(WAIT_S)
        doomed = served.peers()
        assert len(doomed) == 5
        world.limit(served, IDLE_TIMEOUT)
        assert wait_until(lambda: not served.peers() & doomed)
        assert wait_until(lambda: _closed(events) >= doomed)
        assert [echo(channel) for channel in channels] == [b"x"] * 5


def test_a_client_that_only_asks_for_health_is_idle(world):
    with world.serve(idle_timeout=None) as served, served.client() as channel:
        echo(channel)
        (doomed,) = served.peers()
        world.limit(served, IDLE_TIMEOUT)
        check = channel.unary_unary(CHECK)
        end = time.monotonic() + WAIT_S
        while doomed in served.peers():
            with suppress(grpc.RpcError):  # the one that is under way at the end
                assert check(b"", timeout=WAIT_S) == SERVING
            time.sleep(0.2)  # more than the quiet that a closing needs
            assert time.monotonic() < end, "it is still open"


def test_silent_streams_are_ended_with_the_reason_if_the_policy_says_so(world, events):
    with (
        world.serve(idle_timeout=None, close_streams=True) as served,
        served.client() as channel,
    ):
        stream = channel.unary_stream(HOLD)(b"")
        assert next(stream) == b"open"
        (doomed,) = served.peers()
        world.limit(served, IDLE_TIMEOUT)
        with pytest.raises(grpc.RpcError) as caught:
            next(stream)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert caught.value.details() == "closed by the server: connection idle for 0.6 s"
        assert wait_until(lambda: doomed not in served.peers())
        assert wait_until(lambda: _closed(events) == {doomed})
        assert echo(channel) == b"x"


def test_streams_are_kept_however_silent_unless_the_policy_says_otherwise(world):
    with world.serve(idle_timeout=0.5) as served, served.client() as channel:
        stream = channel.unary_stream(HOLD)(b"")
        assert next(stream) == b"open"
        kept = served.peers()
        time.sleep(1.5)
        assert served.peers() == kept
        stream.cancel()
        assert wait_until(lambda: not served.peers())


@pytest.mark.parametrize("kind", ["called", "Hold", "silent"])
def test_connections_of_a_frozen_process_are_closed(world, kind, events):
    with (
        world.serve(idle_timeout=None, close_streams=True) as served,
        frozen_client(served.target, kind),
    ):
        doomed = served.peers()
        assert len(doomed) == 1
        world.limit(served, IDLE_TIMEOUT)
        assert wait_until(lambda: not served.peers())
        assert wait_until(lambda: _closed(events) == doomed)
        assert wait_until(lambda: not world.do(served.connections.snapshot))


def test_a_frozen_client_that_takes_nothing_more_is_closed_all_the_same(world):
    """Its kernel has no room any more, so the status of its stream never gets through."""
    with (
        world.serve(idle_timeout=None, close_streams=True) as served,
        frozen_client(served.target, "Flood"),
    ):
        assert served.peers()
        world.limit(served, IDLE_TIMEOUT)
        assert wait_until(lambda: not served.peers())


def test_a_call_in_flight_is_not_idle_however_long_it_takes(world):
    with world.serve(idle_timeout=0.5, close_streams=True) as served, served.client() as channel:
        assert echo(channel, b"slow") == b"slow"


def test_an_answer_that_its_client_does_not_take_is_a_call_in_flight(world):
    with world.serve(idle_timeout=None) as served, frozen_client(served.target, "big"):
        kept = served.peers()
        assert wait_until(lambda: [o.calls_open for o in served.connections.snapshot()] == [1])
        world.limit(served, 0.5)
        time.sleep(SLOW_S + 1)  # its handler has returned, and twice the timeout passed since
        assert served.connections.snapshot()[0].calls_open == 1
        assert served.peers() == kept


def test_settings_change_while_it_runs(world):
    with world.serve(idle_timeout=3600) as served, served.client() as channel:
        echo(channel)
        kept = served.peers()
        world.do(lambda: served.detector.change(idle_timeout=0.5))
        assert wait_until(lambda: not served.peers() & kept)


def test_after_close_no_connection_is_touched(world, events):
    with world.serve(idle_timeout=2.0) as served, served.client() as channel:
        echo(channel)
        world.do(lambda: (served.detector.close(), served.detector.change(idle_timeout=0.3)))
        kept = served.peers()
        time.sleep(0.8)
        assert served.peers() == kept
        assert echo(channel) == b"x"
    assert not [event for event in events if isinstance(event, ConnectionClosed)]


def test_report_tells_and_closes_nothing(world, events):
    with world.serve(idle_timeout=0.3, close="report") as served, served.client() as channel:
        echo(channel)
        (peer,) = served.peers()
        assert wait_until(lambda: [e.peer for e in events if isinstance(e, ConnectionIdle)])
        time.sleep(0.5)
        assert served.peers() == {peer}
        assert [e.peer for e in events if isinstance(e, ConnectionIdle)] == [peer]
        assert not [e for e in events if isinstance(e, ConnectionClosed | ConnectionKept)]


def _closed(events) -> set[str]:
    return {event.peer for event in events if isinstance(event, ConnectionClosed)}
