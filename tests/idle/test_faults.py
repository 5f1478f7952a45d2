"""Idle connections of real servers lose their sockets, and no others do; of either world.

Times are a hundredth of those in production, and each wait has a wide margin.
"""

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import grpc
import pytest

from fixtures.idle_worlds import echo, has_ipv6
from fixtures.leaks import descriptors
from fixtures.timers import eventually
from rpcwheel.idle import peers
from rpcwheel.observe import ConnectionClosed, ConnectionIdle

pytestmark = pytest.mark.skipif(not peers.SUPPORTED, reason="sockets are found on Linux only")

KINDS = (ConnectionIdle, ConnectionClosed)

IDLE_TIMEOUT = 2.0
"""Seconds. Between the calls of a busy client pass 0.3."""


@contextmanager
def calling(channels, pause: float):
    """Threads that call on each channel every `pause` seconds; gives their errors."""
    over, errors = threading.Event(), []

    def call_all(mine) -> None:
        while not over.wait(pause):
            for channel in mine:
                try:
                    echo(channel)
                except grpc.RpcError as error:
                    errors.append(error)

    with ThreadPoolExecutor(4) as pool:
        for first in range(4):
            pool.submit(call_all, channels[first::4])
        try:
            yield errors
        finally:
            over.set()


@pytest.mark.parametrize(
    ("count", "transport"),
    [(200, "IPv4"), (40, "TLS"), (40, "IPv6")],
    ids=["200", "40 with TLS", "40 with IPv6"],
)
def test_exactly_the_idle_connections_are_closed(world, count, transport, certificates, events):
    if transport == "IPv6" and not has_ipv6():
        pytest.skip("this machine has no ::1")
    settings = {
        "host": "[::1]" if transport == "IPv6" else "127.0.0.1",
        "certificates": certificates if transport == "TLS" else None,
    }
    with (
        world.serve(**settings, idle_timeout=IDLE_TIMEOUT) as served,
        ExitStack() as channels,
    ):
        busy, idle = (
            [channels.enter_context(served.client()) for _ in range(count // 2)] for _ in range(2)
        )
        for channel in busy:
            echo(channel)
        with calling(busy, 0.3) as errors:
            kept, before = served.peers(), descriptors()
            for channel in idle:
                echo(channel)
            began = time.monotonic()
            doomed = served.peers() - kept
            assert len(doomed) == len(idle)
            assert eventually(lambda: served.peers() == kept)
            took = time.monotonic() - began
            time.sleep(IDLE_TIMEOUT / 3)  # another look, which finds nothing
            assert served.peers() == kept
            assert eventually(lambda: descriptors() == before)
            told = [
                event for event in events if isinstance(event, ConnectionIdle | ConnectionClosed)
            ]
            assert [echo(channel, b"again") for channel in idle] == [b"again"] * len(idle)
        assert errors == []
    assert took < 2 * IDLE_TIMEOUT + 3
    assert Counter((type(event), event.peer) for event in told) == Counter(
        (kind, peer) for kind in KINDS for peer in doomed
    )
    assert all(event.idle_s > IDLE_TIMEOUT for event in told)
    assert {event.reason for event in told} == {"connection idle for 2 s"}
