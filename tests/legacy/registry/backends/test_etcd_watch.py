import secrets
import threading
from collections.abc import Callable
from contextlib import closing

import pytest

from fixtures.engine_etcd import EtcdEngine
from fixtures.engine_watchers import RecordingWatcher, instance
from fixtures.engines import engine_fixture
from fixtures.waiting import wait_until
from rpcwheel.durations import NEVER
from rpcwheel.errors import TooManyTimeouts
from rpcwheel.instance import ServiceInstance
from rpcwheel.observe.events import RegistryFailed
from rpcwheel.registry.backend import RegistryBackend, Settings
from rpcwheel.registry.backends import open_backend
from rpcwheel.registry.backends.etcd_client import messages
from rpcwheel.registry.backends.etcd_watch import by_id, end_of, heard
from rpcwheel.registry.backends.etcd_watch_core import Change, Heard
from rpcwheel.timer import WheelTimer

etcd = engine_fixture(EtcdEngine)

SERVICE = "shop.Orders"


@pytest.fixture
def make(etcd: EtcdEngine, opened) -> Callable[[], RegistryBackend]:
    """Makes backends in a namespace of the test's own, which are closed in the end."""
    namespace = secrets.token_hex(4)
    return lambda: opened(etcd.url(namespace=namespace))


def of(service: str) -> ServiceInstance:
    return instance().changed(service=service)


def test_all_watches_of_a_backend_share_one_thread_and_one_stream(make) -> None:
    backend, publisher = make(), make()
    watchers = {f"shop.{number}": RecordingWatcher() for number in range(20)}
    watches = [backend.watch(name, witness) for name, witness in watchers.items()]
    assert all(witness.sees() for witness in watchers.values())
    threads = [each.name for each in threading.enumerate() if "etcd" in each.name]
    assert threads == ["rpcwheel-etcd-watch"]
    publisher.publish([of(name) for name in watchers])
    for watch in watches[10:]:
        watch.close()
    assert all(watchers[f"shop.{number}"].sees(instance()) for number in range(10))
    assert not any(witness.after_doubt for witness in watchers.values())


def test_a_backend_without_watches_has_no_stream_and_begins_again_with_the_next_one(make) -> None:
    backend, publisher = make(), make()
    publisher.publish([instance()])
    for _ in range(3):
        witness = RecordingWatcher()
        watch = backend.watch(SERVICE, witness)
        assert witness.sees(instance())
        watch.close()
        assert not witness.after_doubt


# Time


def test_the_timer_drives_the_probes_and_nothing_of_it_is_left(etcd, timer) -> None:
    namespace = secrets.token_hex(4)
    with etcd.proxy() as proxy:
        url = etcd.url(port=proxy.port, namespace=namespace)
        with closing(open_backend(url, Settings(15.0, 3.0, timer))) as backend:
            witness = RecordingWatcher()
            backend.watch(SERVICE, witness)
            assert witness.sees()
            core = backend._watches._core
            for _ in range(3):
                timer.advance(5.0)
                assert wait_until(lambda: core._answer_ns == NEVER)  # the probe was answered
            proxy.blackhole()
            timer.advance(5.0)
            timer.advance(2.9)
            assert not witness.after_doubt
            timer.advance(0.2)
            assert witness.doubts()
            assert witness.after_doubt == [f"{backend.url}: no answer in 3 s"]
            assert wait_until(lambda: timer.pending == 1)  # the wait for another stream
            timer.advance(0.3)
            assert witness.sees()
    assert timer.pending == 0


def test_a_timer_that_was_stopped_hurts_nobody(etcd, make, timer) -> None:
    timer.stop()
    url = etcd.url(namespace=secrets.token_hex(4))
    with closing(open_backend(url, Settings(2.0, 1.0, timer))) as backend:
        witness = RecordingWatcher()
        backend.watch(SERVICE, witness)
        assert witness.sees()
        backend.publish([instance()])
        assert witness.sees(instance())


def test_a_timer_that_is_full_keeps_no_watch_from_coming_back(make, etcd, events) -> None:
    publisher = make()
    with WheelTimer(max_pending=1) as timer, etcd.proxy() as proxy:
        timer.new_timeout(print, 1000)
        url = etcd.url(port=proxy.port, namespace=publisher.url.namespace)
        with closing(open_backend(url, Settings(2.0, 1.0, timer))) as backend:
            witness = RecordingWatcher()
            backend.watch(SERVICE, witness)
            assert witness.sees()
            proxy.reset()
            assert witness.doubts()
            publisher.publish([instance()])
            assert witness.sees(instance())
    failed = [event.error for event in events if isinstance(event, RegistryFailed)]
    assert [type(error) for error in failed] == [TooManyTimeouts]


# Words


def test_a_range_ends_where_the_next_prefix_would_begin() -> None:
    assert end_of(b"/shop/") == b"/shop0"
    assert b"/shop/\xff" < end_of(b"/shop/") <= b"/shop0"


def test_what_follows_the_prefix_is_the_id_though_it_is_no_text() -> None:
    assert by_id({b"/s/a": b"1", b"/s/\xff": b"2"}, b"/s/") == {"a": b"1", "\\xff": b"2"}


def test_an_answer_in_our_words_has_what_was_changed_and_what_was_deleted() -> None:
    made = messages()
    put = made.Event(kv=made.KeyValue(key=b"a", value=b"1", mod_revision=4))
    deleted = made.Event(type=1, kv=made.KeyValue(key=b"b", mod_revision=5))
    answer = made.WatchResponse(
        header=made.ResponseHeader(revision=5), watch_id=3, events=[put, deleted]
    )
    assert heard(answer) == Heard(3, 5, changes=(Change(b"a", b"1", 4), Change(b"b", None, 5)))
    denied = made.WatchResponse(watch_id=-1, created=True, canceled=True, cancel_reason="no")
    assert heard(denied) == Heard(-1, 0, created=True, canceled=True, reason="no")
