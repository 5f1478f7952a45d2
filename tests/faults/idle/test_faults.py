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
from fixtures.waiting import wait_until
from rpcwheel.idle import peers
from rpcwheel.observe import ConnectionClosed, ConnectionIdle

pytestmark = pytest.mark.skipif(not peers.SUPPORTED, reason="sockets are found on Linux only")

KINDS = (ConnectionIdle, ConnectionClosed)

IDLE_TIMEOUT = 2.0
"""Seconds. Between the calls of a busy client pass 0.3, and what the others' calls take."""


class Busy:
    """Threads that call on each channel again and again."""

    def __init__(self, channels, pause: float) -> None:
        self.errors: list[grpc.RpcError] = []
        self.longest = 0.0
        """At most so many seconds a channel was left alone."""
        self._channels, self._pause = channels, pause
        self._over = threading.Event()

    def _call_all(self, channels) -> None:
        before = time.monotonic()
        while not self._over.wait(self._pause):
            began = time.monotonic()
            for channel in channels:
                try:
                    echo(channel)
                except grpc.RpcError as error:
                    self.errors.append(error)
            self.longest = max(self.longest, time.monotonic() - before)
            before = began

    @contextmanager
    def run(self):
        with ThreadPoolExecutor(4) as pool:
            for first in range(4):
                pool.submit(self._call_all, self._channels[first::4])
            try:
                yield
            finally:
                self._over.set()


def said(events):
    return [event for event in events if isinstance(event, KINDS)]


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
        world.serve(**settings, idle_timeout=None) as served,
        ExitStack() as channels,
    ):
        several = [channels.enter_context(served.client()) for _ in range(count)]
        busy, idle = several[: count // 5], several[count // 5 :]
        for channel in busy:
            echo(channel)
        calls = Busy(busy, pause=0.3)
        with calls.run():
            kept, before = served.peers(), descriptors()
            for channel in idle:
                echo(channel)
            doomed = served.peers() - kept
            assert len(doomed) == len(idle)
            world.limit(served, IDLE_TIMEOUT)
            spared = wait_until(lambda: served.peers() == kept)
            if calls.longest > IDLE_TIMEOUT:
                pytest.skip("the machine was too busy for busy clients")
            assert spared
            assert wait_until(lambda: len(said(events)) == len(KINDS) * len(doomed))
            time.sleep(IDLE_TIMEOUT / 3)  # another look, which finds nothing
            assert served.peers() == kept
            assert wait_until(lambda: descriptors() == before)
            told = said(events)
            assert [echo(channel, b"again") for channel in idle] == [b"again"] * len(idle)
        assert calls.errors == []
    assert Counter((type(event), event.peer) for event in told) == Counter(
        (kind, peer) for kind in KINDS for peer in doomed
    )
    assert all(event.idle_s > IDLE_TIMEOUT for event in told)
    assert {event.reason for event in told} == {"connection idle for 2 s"}
