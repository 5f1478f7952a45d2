"""ZooKeeper, broken as servers, networks and operators break it."""

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
from kazoo.exceptions import NoNodeError

from fixtures.engine_watchers import (
    RecordingWatcher,
    closes,
    in_the_end,
    instance,
    opened,
    publishes,
)
from fixtures.engine_zookeeper import ZookeeperEngine
from fixtures.engines import engine_fixture
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.errors import RegistryUnavailable

__all__ = ["opened"]

zookeeper = engine_fixture(ZookeeperEngine)
A, B = instance(1), instance(2)
NODE = "/rpcwheel/v1/shop.Orders/10.0.0.1:1"


@pytest.fixture(autouse=True)
def clean(request):
    """Nothing is left of the test before."""
    yield
    if "zookeeper" in request.fixturenames:
        request.getfixturevalue("zookeeper").flush()


@pytest.fixture
def watched(zookeeper, opened):
    """A backend that has published two instances, and who watches them elsewhere."""
    url, witness = zookeeper.url(), RecordingWatcher()
    backend, other = opened(url, lease=60, timeout=1), opened(url, lease=6, timeout=1)
    other.watch(A.service, witness)
    in_the_end(lambda: backend.publish([A, B]))
    assert witness.sees(A, B)
    return backend, witness


@pytest.fixture
def calm(zookeeper, opened):
    """The same, but who watches would not look by himself for two minutes."""
    backend, other, witness = (
        opened(zookeeper.url()),
        opened(zookeeper.url(), lease=30),
        RecordingWatcher(),
    )
    other.watch(A.service, witness)
    backend.publish([A, B])
    assert witness.sees(A, B)
    return backend, witness


def test_after_a_crash_the_session_goes_on_and_nothing_is_lost(zookeeper, watched):
    backend, witness = watched
    before = len(witness.news)
    zookeeper.restart()
    assert in_the_end(lambda: backend.renew([A, B])) == {}
    assert witness.doubts(since=before)
    assert witness.sees(A, B)
    seen = {news for news in witness.news[before:] if not isinstance(news, str)}
    assert seen == {frozenset({A.id, B.id})}
    told_on = {name.rpartition("-")[0] for name in witness.threads}
    assert told_on == {"rpcwheel-worker"}  # none of kazoo's


def test_after_a_wipe_all_is_told_to_be_lost_and_can_be_published_again(zookeeper, watched):
    backend, witness = watched
    zookeeper.wipe()
    # kazoo alone would offer what it has seen, and be refused, for ever
    assert in_the_end(lambda: backend.renew([A, B])) == {A.key: "wiped", B.key: "wiped"}
    in_the_end(lambda: backend.publish([A, B]))
    assert in_the_end(lambda: backend.renew([A, B])) == {}
    assert witness.doubts()
    assert witness.sees(A, B)


def test_what_was_seen_is_offered_to_each_server_once_and_then_forgotten(zookeeper, opened):
    proxy = zookeeper.proxy()
    with _rude_server() as (port, offers):
        url = zookeeper.url(port=proxy.port).replace("//", f"//127.0.0.1:{port},")
        backend = opened(url, lease=60)
        in_the_end(lambda: backend.publish([A]))
        assert in_the_end(lambda: backend.renew([A])) == {}
        offers.clear()
        proxy.close()
        assert wait_until(lambda: len(offers) > 2)
        first, *others = offers
        assert first > 0
        assert set(others) == {0}


def test_who_is_silent_is_given_twice_as_long_each_time_and_offered_the_same(zookeeper, opened):
    proxy = zookeeper.proxy()
    with _rude_server(hangs_up=False) as (port, offers):
        url = zookeeper.url(port=proxy.port).replace("//", f"//127.0.0.1:{port},")
        backend = opened(url, lease=60, timeout=0.3)
        in_the_end(lambda: backend.publish([A]))
        offers.clear()
        proxy.close()
        assert wait_until(lambda: backend._session._handler._answer_timeout_s == 4 * 0.3)
        assert wait_until(lambda: len(offers) > 2)
        first, *others = offers[:3]
        assert first > 0
        assert set(others) == {first}


@contextmanager
def _rude_server(*, hangs_up: bool = True) -> Iterator[tuple[int, list[int]]]:
    """It answers nobody; its port, and which zxids it was offered."""
    offers: list[int] = []

    def listen() -> None:
        with ExitStack() as kept:
            while True:
                try:
                    connection = kept.enter_context(server.accept()[0])
                except OSError:
                    return
                request = connection.recv(16, socket.MSG_WAITALL)
                if len(request) == 16:
                    offers.append(struct.unpack(">iiq", request)[2])
                if hangs_up:
                    connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        try:
            yield server.getsockname()[1], offers
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_a_connection_that_gets_no_answer_is_made_again_after_the_timeout(zookeeper, opened):
    proxy = zookeeper.proxy()
    proxy.blackhole(new=True)  # as one that is made in the moment in which a server starts
    backend = opened(zookeeper.url(port=proxy.port), lease=60, timeout=0.3)
    with pytest.raises(RegistryUnavailable, match="no answer"):
        backend.publish([A])
    assert wait_until(lambda: proxy.accepted > 2)
    proxy.heal()
    in_the_end(lambda: backend.publish([A]))
    assert backend.renew([A]) == {}


def test_a_silent_server_is_left_for_another_although_requests_go_on(zookeeper, opened):
    """kazoo sends no pings while requests are sent."""
    proxies = zookeeper.proxy(), zookeeper.proxy()
    hosts = ",".join(f"127.0.0.1:{proxy.port}" for proxy in proxies)
    backend = opened(f"zookeeper://{hosts}", lease=60, timeout=0.5)
    in_the_end(lambda: backend.publish([A]))
    for proxy in proxies:  # one of them is the one in use
        proxy.blackhole(new=True)
        assert in_the_end(lambda: backend.lookup(A.service)).records == {A.id: A.encoded()}
        proxy.heal()
    assert in_the_end(lambda: backend.renew([A])) == {}  # the same session


def test_after_a_server_stood_still_for_longer_than_the_session_all_comes_back(zookeeper, opened):
    url, witness = zookeeper.url(), RecordingWatcher()
    backend, other = opened(url, lease=1, timeout=0.5), opened(url, lease=2, timeout=3)
    other.watch(A.service, witness)
    assert publishes(backend, witness, A)
    zookeeper.freeze()
    try:
        assert witness.doubts()
        with pytest.raises(RegistryUnavailable):
            backend.renew([A])
        time.sleep(0.5)
    finally:
        zookeeper.thaw()
    # who is first after the pause, the server's clock or the client, is a matter of luck
    assert in_the_end(lambda: backend.renew([A])) in ({}, {A.key: "session"})
    assert publishes(backend, witness, A)


def test_a_connection_that_is_cut_is_made_again_in_the_same_session(zookeeper, opened):
    proxy, witness = zookeeper.proxy(), RecordingWatcher()
    backend = opened(zookeeper.url(port=proxy.port))
    backend.watch(A.service, witness)
    backend.publish([A])
    assert witness.sees(A)
    proxy.reset()
    assert witness.doubts()
    assert in_the_end(lambda: backend.renew([A])) == {}
    assert witness.sees(A)


def test_a_black_hole_for_longer_than_the_session_costs_it_and_no_more(zookeeper, opened):
    proxy, witness = zookeeper.proxy(), RecordingWatcher()
    backend = opened(zookeeper.url(port=proxy.port), lease=1, timeout=0.5)
    backend.watch(A.service, witness)
    assert publishes(backend, witness, A)
    proxy.blackhole(new=True)
    with pytest.raises(RegistryUnavailable):
        backend.renew([A])
    beside = opened(zookeeper.url())
    assert wait_until(lambda: not beside.lookup(A.service).records)
    proxy.heal()
    assert in_the_end(lambda: backend.renew([A])) == {A.key: "session"}
    assert publishes(backend, witness, A)


def test_the_stale_node_of_a_dead_session_does_not_take_its_successor_with_it(zookeeper, opened):
    proxy = zookeeper.proxy()
    dead = opened(zookeeper.url(port=proxy.port), lease=3)
    with zookeeper.operator() as operator:
        stale = _owner_when_published(dead, operator)
        proxy.blackhole(new=True)
        successor, again = opened(zookeeper.url()), A.changed(epoch="another", weight=7)
        successor.publish([again])
        assert wait_until(lambda: f"0x{stale:x}" not in operator.command(b"dump"))
        assert operator.get(NODE)[1].ephemeralOwner != stale
    assert successor.renew([again]) == {}
    assert successor.lookup(A.service).records == {A.id: again.encoded()}
    proxy.heal()
    assert in_the_end(lambda: dead.renew([A]))[A.key] in {"missing", "session"}
    dead.withdraw([A])
    assert successor.renew([again]) == {}


def _owner_when_published(backend, operator):
    """The session that A is of, though it may end before one looks."""
    while True:
        in_the_end(lambda: backend.publish([A]))
        with suppress(NoNodeError):
            return operator.get(NODE)[1].ephemeralOwner


def test_what_an_operator_deletes_is_missing(zookeeper, calm):
    backend, witness = calm
    with zookeeper.operator() as operator:
        operator.delete(NODE)
    assert witness.sees(B)
    assert backend.renew([A, B]) == {A.key: "missing"}
    backend.publish([A])
    assert witness.sees(A, B)


def test_a_watch_goes_on_when_the_parents_vanish_and_come_back(zookeeper, calm):
    backend, witness = calm
    for port in (1, 2):
        zookeeper.flush()
        assert witness.sees()
        assert set(backend.renew([A, B]).values()) == {"missing"}
        again = [instance(port, weight=5)]
        backend.publish(again)
        assert witness.sees(*again)
    assert witness.after_doubt == []


def test_what_an_operator_writes_over_ours_is_seen_and_missing(zookeeper, calm):
    backend, witness = calm
    with zookeeper.operator() as operator:
        operator.set(NODE, b"broken")
    assert wait_until(lambda: witness.views[-1].records[A.id] == b"broken")
    assert backend.renew([A, B]) == {A.key: "missing"}
    backend.publish([A])
    assert wait_until(lambda: witness.views[-1].records[A.id] == A.encoded())


def test_a_watch_begins_while_the_server_is_down_and_sees_it_come(zookeeper, opened):
    backend, witness = opened(zookeeper.url(), timeout=1), RecordingWatcher()
    zookeeper.stop()
    backend.watch(A.service, witness)
    with pytest.raises(RegistryUnavailable, match="refused"):
        backend.publish([A])
    assert witness.doubts()
    zookeeper.start()
    in_the_end(lambda: backend.publish([A]))
    assert witness.sees(A)
    assert witness.after_doubt == witness.news


def test_a_client_that_had_no_contact_for_long_is_replaced(zookeeper, opened):
    proxy = zookeeper.proxy()
    backend = opened(zookeeper.url(port=proxy.port), lease=0.5, timeout=0.5)
    in_the_end(lambda: backend.publish([A]))
    before = backend._session._client
    proxy.blackhole(new=True)

    def replaced():
        with pytest.raises(RegistryUnavailable):
            backend.renew([A])
        return backend._session._client is not before

    assert wait_until(replaced)
    proxy.heal()
    assert in_the_end(lambda: backend.renew([A])) == {A.key: "session"}
    assert not before.connected


@pytest.mark.parametrize("fault", ["dead", "deaf"])
def test_closing_does_not_wait_for_a_server_that_does_not_answer(fault, zookeeper, opened):
    proxy, witness = zookeeper.proxy(), RecordingWatcher()
    backend = opened(zookeeper.url(port=proxy.port), timeout=4 * WAIT_S)
    backend.watch(A.service, witness)
    backend.publish([A])
    assert witness.sees(A)
    if fault == "dead":
        proxy.close()
        assert witness.doubts()
    else:
        proxy.blackhole(new=True)
    assert closes(backend)
