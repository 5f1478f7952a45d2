"""The watch stream of an etcd backend: threads, timers and streams."""

import threading
from contextlib import closing

from fixtures.engine_watchers import RecordingWatcher, instance
from fixtures.waiting import wait_until
from rpcwheel.errors import TooManyTimeouts
from rpcwheel.events.events import RegistryFailed
from rpcwheel.registry.backend import Settings
from rpcwheel.registry.backends import open_backend
from rpcwheel.timer import WheelTimer

SERVICE = "shop.Orders"


def test_all_watches_of_a_backend_share_one_thread(make) -> None:
    backend, publisher = make(), make()
    watchers = {f"shop.{number}": RecordingWatcher() for number in range(20)}
    watches = [backend.watch(name, watcher) for name, watcher in watchers.items()]
    assert all(watcher.sees() for watcher in watchers.values())
    threads = [each.name for each in threading.enumerate() if "etcd" in each.name]
    assert threads == ["rpcwheel-etcd-watch"]
    publisher.publish([instance(service=name) for name in watchers])
    for watch in watches[10:]:
        watch.close()
    assert all(watchers[f"shop.{number}"].sees(instance()) for number in range(10))
    assert not any(watcher.after_doubt for watcher in watchers.values())


def test_a_watch_can_be_added_after_the_last_one_was_closed(make) -> None:
    backend, publisher = make(), make()
    publisher.publish([instance()])
    for _ in range(3):
        watcher = RecordingWatcher()
        watch = backend.watch(SERVICE, watcher)
        assert watcher.sees(instance())
        watch.close()
        assert not watcher.after_doubt


def test_a_view_has_the_ids_that_changed(make, etcd) -> None:
    backend, publisher = make(), make()
    watcher = RecordingWatcher()
    backend.watch(SERVICE, watcher)
    assert watcher.sees()
    publisher.publish([instance(1), instance(2)])
    assert watcher.sees(instance(1), instance(2))
    publisher.publish([instance(2, weight=7)])
    publisher.withdraw([instance(1)])
    assert watcher.sees(instance(2))
    etcd.put(f"/{backend.url.namespace}/v1/{SERVICE}/other", b"{}")
    assert watcher.sees(instance(2), "other")
    first, *later = watcher.views
    assert first.changed is None
    seen = dict(first.records)
    for view in later:
        ids = {*seen, *view.records}
        assert view.changed == {one for one in ids if seen.get(one) != view.records.get(one)}
        seen = dict(view.records)
    assert later[-1].changed == {"other"}


def test_a_probe_without_a_response_is_detected_by_the_given_timer(etcd, timer, namespace) -> None:
    with etcd.proxy() as proxy:
        url = etcd.url(port=proxy.port, namespace=namespace)
        with closing(open_backend(url, Settings(15.0, 10.0, timer))) as backend:
            watcher = RecordingWatcher()
            backend.watch(SERVICE, watcher)
            assert watcher.sees()
            proxy.blackhole()
            assert wait_until(lambda: (timer.advance(5.0), watcher.after_doubt)[1])
            assert watcher.after_doubt[0] == f"{backend.url}: no answer in 10 s"
            proxy.heal()
            assert wait_until(lambda: (timer.advance(5.0), watcher.has_seen())[1])
    assert timer.pending == 0


def test_a_full_timer_does_not_stop_the_watch(make, etcd, events) -> None:
    publisher = make()
    with WheelTimer(max_pending=1) as timer, etcd.proxy() as proxy:
        timer.new_timeout(print, 1000)
        url = etcd.url(port=proxy.port, namespace=publisher.url.namespace)
        with closing(open_backend(url, Settings(2.0, 1.0, timer))) as backend:
            watcher = RecordingWatcher()
            backend.watch(SERVICE, watcher)
            assert watcher.sees()
            proxy.reset()
            assert watcher.doubts()
            publisher.publish([instance()])
            assert watcher.sees(instance())
    failed = {type(event.error) for event in events if isinstance(event, RegistryFailed)}
    assert failed == {TooManyTimeouts}
