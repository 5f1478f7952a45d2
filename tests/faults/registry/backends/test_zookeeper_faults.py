"""ZooKeeper with faults of servers, networks and operators."""

import errno
import itertools
import os
import random
import socket
import struct
import threading
import time
from contextlib import suppress
from functools import partial

import pytest
from kazoo.exceptions import NoNodeError

from fixtures.engine_watchers import (
    CheckedWatcher,
    RecordingWatcher,
    in_the_end,
    instance,
    publishes,
)
from fixtures.listeners import silent
from fixtures.timers import cannot_start
from fixtures.waiting import wait_until
from rpcwheel.errors import RegistryUnavailable

A, B = instance(1), instance(2)
NODE = "/rpcwheel/v1/shop.Orders/10.0.0.1:1"


@pytest.fixture(autouse=True)
def clean(request):
    """Delete all nodes after each test."""
    yield
    if "zookeeper" in request.fixturenames:
        request.getfixturevalue("zookeeper").flush()


@pytest.fixture
def calm(zookeeper, opened):
    """A backend that has published two instances, and a watcher in another backend.

    Their leases are so long that there is no periodic read within the test.
    """
    backend, other, watcher = (
        opened(zookeeper.url()),
        opened(zookeeper.url(), lease=30),
        RecordingWatcher(),
    )
    other.watch(A.service, watcher)
    backend.publish([A, B])
    assert watcher.sees(A, B)
    return backend, watcher


def test_after_a_server_has_closed_the_connection_the_client_sends_zxid_0(
    zookeeper, opened, listen
):
    proxy = zookeeper.proxy()
    port, offers = _server_without_answers(listen)
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


def _no_descriptor(patch):
    def socketpair():
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    patch.setattr(socket, "socketpair", socketpair)


def _no_thread(patch, number):
    """Refuse the first, second or third thread of each client of kazoo's."""
    start, begun = threading.Thread.start, itertools.count(1)

    def refuse(thread):
        if thread.name == "rpcwheel-zookeeper" and next(begun) % number == 0:
            cannot_start(thread)
        start(thread)

    patch.setattr(threading.Thread, "start", refuse)


@pytest.mark.parametrize(
    "refuse", [_no_descriptor, *(partial(_no_thread, number=number) for number in (1, 2, 3))]
)
def test_a_client_that_cannot_be_started_leaves_no_threads(zookeeper, opened, monkeypatch, refuse):
    backend, before = opened(zookeeper.url()), threading.active_count()
    with monkeypatch.context() as patch:
        refuse(patch)
        for _ in range(3):
            with pytest.raises(RegistryUnavailable, match=r"Too many open files|start new thread"):
                backend.lookup(A.service)
    assert threading.active_count() <= before
    assert not in_the_end(lambda: backend.lookup(A.service)).records


def test_a_silent_server_is_given_twice_as_long_each_time(zookeeper, opened, listen):
    proxy = zookeeper.proxy()
    port, offers = _server_without_answers(listen, hangs_up=False)
    url = zookeeper.url(port=proxy.port).replace("//", f"//127.0.0.1:{port},")
    backend = opened(url, lease=60, timeout=0.3)
    in_the_end(lambda: backend.publish([A]))
    offers.clear()
    proxy.close()
    assert wait_until(lambda: backend._session._handler._answer_timeout_s >= 4 * 0.3)
    assert wait_until(lambda: len(offers) > 2)
    first, *others = offers[:3]
    assert first > 0
    assert set(others) == {first}


def _server_without_answers(listen, *, hangs_up: bool = True) -> tuple[int, list[int]]:
    """A server that answers no connection; its port, and the zxids that clients offer."""
    offers: list[int] = []

    def talk(sock: socket.socket) -> None:
        request = sock.recv(16, socket.MSG_WAITALL)
        if len(request) == 16:
            offers.append(struct.unpack(">iiq", request)[2])
        if not hangs_up:
            silent(sock)

    return listen(talk).port, offers


def test_a_connection_without_an_answer_is_replaced_after_the_timeout(zookeeper, opened):
    proxy = zookeeper.proxy()
    proxy.blackhole(new=True)  # as a connection made while the server starts
    backend = opened(zookeeper.url(port=proxy.port), lease=60, timeout=0.3)
    with pytest.raises(RegistryUnavailable, match="no answer"):
        backend.publish([A])
    assert wait_until(lambda: proxy.accepted > 2)
    proxy.heal()
    in_the_end(lambda: backend.publish([A]))
    assert in_the_end(lambda: backend.renew([A])) == {}


def test_a_client_leaves_a_silent_server_although_it_sends_requests(zookeeper, opened):
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


def test_after_a_server_was_frozen_for_longer_than_the_session_all_comes_back(zookeeper, opened):
    url, watcher = zookeeper.url(), RecordingWatcher()
    backend, other = opened(url, lease=1, timeout=0.5), opened(url, lease=2, timeout=3)
    other.watch(A.service, watcher)
    assert publishes(backend, watcher, A)
    zookeeper.freeze()
    try:
        assert watcher.doubts()
        with pytest.raises(RegistryUnavailable):
            backend.renew([A])
        time.sleep(0.5)
    finally:
        zookeeper.thaw()
    # depends on whether the server ends the session before the client's ping arrives
    assert in_the_end(lambda: backend.renew([A])) in ({}, {A.key: "session"})
    assert publishes(backend, watcher, A)


def test_the_end_of_a_dead_session_does_not_delete_the_node_of_its_successor(zookeeper, opened):
    proxy = zookeeper.proxy()
    dead = opened(zookeeper.url(port=proxy.port), lease=3)
    with zookeeper.operator() as operator:
        stale = _owner_when_published(dead, operator)
        proxy.blackhole(new=True)
        successor, again = opened(zookeeper.url()), A.replace(epoch="another", weight=7)
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
    """Publish A, and return its session; again if the session ends in between."""
    while True:
        in_the_end(lambda: backend.publish([A]))
        with suppress(NoNodeError):
            return operator.get(NODE)[1].ephemeralOwner


def test_a_node_deleted_by_an_operator_is_missing(zookeeper, calm):
    backend, watcher = calm
    with zookeeper.operator() as operator:
        operator.delete(NODE)
    assert watcher.sees(B)
    assert backend.renew([A, B]) == {A.key: "missing"}
    backend.publish([A])
    assert watcher.sees(A, B)


def test_a_watch_continues_when_the_parents_are_deleted_and_created_again(zookeeper, calm):
    backend, watcher = calm
    for port in (1, 2):
        zookeeper.flush()
        assert watcher.sees()
        assert set(backend.renew([A, B]).values()) == {"missing"}
        again = [instance(port, weight=5)]
        backend.publish(again)
        assert watcher.sees(*again)
    assert watcher.after_doubt == []


def test_a_node_overwritten_by_an_operator_is_seen_and_missing(zookeeper, calm):
    backend, watcher = calm
    with zookeeper.operator() as operator:
        operator.set(NODE, b"broken")
    assert wait_until(lambda: watcher.views[-1].records[A.id] == b"broken")
    assert backend.renew([A, B]) == {A.key: "missing"}
    backend.publish([A])
    assert wait_until(lambda: watcher.views[-1].records[A.id] == A.encoded())


def test_a_client_without_contact_for_two_leases_is_replaced(zookeeper, opened):
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


def test_watches_and_renewals_are_right_after_any_sequence_of_changes(zookeeper, opened):
    proxies = zookeeper.proxy(), zookeeper.proxy()
    backend, other = (opened(zookeeper.url(port=proxy.port), lease=300) for proxy in proxies)
    other.watch(A.service, watcher := CheckedWatcher())
    rng, published = random.Random(1), {}

    def publish():
        one = instance(rng.randrange(1, 30), weight=rng.randrange(1000))
        published[one.key] = one
        in_the_end(lambda: backend.publish([one]))

    def withdraw():
        if published:
            one = published.pop(rng.choice(list(published)))
            in_the_end(lambda: backend.withdraw([one]))

    def interfere():
        if published:
            one = rng.choice(list(published.values()))
            path = NODE.replace(A.id, one.id)
            operator.delete(path) if rng.random() < 0.5 else operator.set(path, b"junk")
            everything = list(published.values())
            assert wait_until(lambda: one.key in in_the_end(lambda: backend.renew(everything)))
            in_the_end(lambda: backend.publish([one]))

    def renew():
        assert in_the_end(lambda: backend.renew(list(published.values()))) == {}

    def reset():
        rng.choice(proxies).reset()

    def compare():
        records = {one.id: one.encoded() for one in published.values()}
        assert wait_until(lambda: watcher.views and watcher.views[-1].records == records)

    steps = {publish: 40, withdraw: 20, interfere: 15, renew: 15, reset: 4, compare: 6}
    with zookeeper.operator() as operator:
        for step in rng.choices(list(steps), list(steps.values()), k=400):
            step()
        compare()
    assert watcher.wrong == []
    called_on = {name.rpartition("-")[0] for name in watcher.threads}
    assert called_on == {"rpcwheel-worker"}  # not kazoo's
