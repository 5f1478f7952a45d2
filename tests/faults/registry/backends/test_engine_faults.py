"""Rules about faults that all engines share: what renewals report, and what watchers get."""

import pytest

from fixtures.engine_watchers import (
    RecordingWatcher,
    closes,
    error_of,
    in_the_end,
    instance,
    publishes,
)
from fixtures.engine_zookeeper import DubboEngine, ZookeeperEngine
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.errors import RegistryUnavailable

A, B = instance(1), instance(2)


@pytest.fixture
def engine(request):
    return request.getfixturevalue(request.param)


def listens(engine, namespace):
    """Wait until the watches of a namespace would notice the loss of their connection."""
    ask = "PUBSUB", "NUMSUB", f"{{{namespace}}}:changes"
    return engine.scheme != "redis" or wait_until(lambda: engine.ask(*ask)[1] == 1)


@pytest.mark.parametrize("engine", ["etcd", "redis", "zookeeper"], indirect=True)
def test_after_a_crash_with_the_data_records_and_watch_are_kept(engine, opened, namespace):
    url, watcher = engine.url(namespace=namespace), RecordingWatcher()
    backend, other = opened(url, lease=60, timeout=1), opened(url, lease=9, timeout=1)
    other.watch(A.service, watcher)
    in_the_end(lambda: backend.publish([A]))
    assert watcher.sees(A)
    before = len(watcher.news)
    engine.kill9()
    assert watcher.doubts(since=before)
    for ask in (lambda: backend.renew([A]), lambda: backend.publish([B])):
        with pytest.raises(RegistryUnavailable):
            ask()
    engine.start()
    assert in_the_end(lambda: backend.renew([A])) == {}
    assert watcher.sees(A)
    seen = {news for news in watcher.news[before:] if not isinstance(news, str)}
    assert seen == {frozenset({A.id})}


@pytest.mark.parametrize(
    ("engine", "loss"),
    [("etcd", "wipe"), ("redis", "flush"), ("zookeeper", "wipe"), ("dubbo", "wipe")],
    indirect=["engine"],
)
def test_after_a_loss_of_data_renew_reports_wiped_and_all_can_be_published_again(
    engine, loss, opened, namespace
):
    levels = {"interface": "com.example.shop.Orders", "application": f"app-{namespace}"}
    options = levels if isinstance(engine, DubboEngine) else {}
    url, watcher = engine.url(namespace=namespace, **options), RecordingWatcher()
    backend, other = opened(url, lease=60, timeout=1), opened(url, lease=6, timeout=1)
    other.watch(A.service, watcher)
    in_the_end(lambda: backend.publish([A, B]))
    assert watcher.sees(A, B)
    getattr(engine, loss)()
    if not isinstance(engine, ZookeeperEngine):
        assert watcher.sees()
    # kazoo alone would offer its zxid, and be refused, forever
    assert in_the_end(lambda: backend.renew([A, B])) == {A.key: "wiped", B.key: "wiped"}
    in_the_end(lambda: backend.publish([A, B]))
    assert in_the_end(lambda: backend.renew([A, B])) == {}
    assert watcher.doubts("lost its data" if loss == "flush" else "")
    assert watcher.sees(A, B)


@pytest.mark.parametrize("engine", ["etcd", "redis", "zookeeper"], indirect=True)
def test_a_reset_connection_is_replaced_and_nothing_is_lost(engine, opened, namespace):
    proxy, watcher = engine.proxy(), RecordingWatcher()
    backend = opened(engine.url(port=proxy.port, namespace=namespace))
    backend.watch(A.service, watcher)
    assert listens(engine, namespace)
    backend.publish([A])
    assert watcher.sees(A)
    proxy.reset()
    assert watcher.doubts()
    assert in_the_end(lambda: backend.renew([A])) == {}
    assert watcher.sees(A)
    in_the_end(lambda: backend.publish([B]))
    assert watcher.sees(A, B)


@pytest.mark.parametrize(
    ("engine", "lost"),
    [("etcd", "lease"), ("redis", "lease"), ("zookeeper", "session")],
    indirect=["engine"],
)
def test_a_black_hole_longer_than_the_lease_ends_it(engine, lost, opened, namespace):
    proxy, watcher = engine.proxy(), RecordingWatcher()
    url = engine.url(port=proxy.port, namespace=namespace)
    backend, beside = opened(url, lease=1, timeout=0.5), opened(engine.url(namespace=namespace))
    backend.watch(A.service, watcher)
    assert publishes(backend, watcher, A)
    proxy.blackhole(new=True)
    with pytest.raises(RegistryUnavailable):
        backend.renew([A])
    assert watcher.doubts()
    assert wait_until(lambda: not beside.lookup(A.service).records)
    proxy.heal()
    assert in_the_end(lambda: backend.renew([A])) == {A.key: lost}
    assert publishes(backend, watcher, A)


@pytest.mark.parametrize("engine", ["redis", "zookeeper"], indirect=True)
def test_a_watch_may_begin_while_the_server_is_down(engine, opened, namespace):
    backend = opened(engine.url(namespace=namespace), lease=2, timeout=1)
    watcher = RecordingWatcher()
    engine.stop()
    backend.watch(A.service, watcher)
    assert wait_until(lambda: "refused" in error_of(backend))
    assert watcher.doubts()
    engine.start()
    assert publishes(backend, watcher, A)
    assert watcher.after_doubt == watcher.news


@pytest.mark.parametrize("fault", ["dead", "deaf"])
@pytest.mark.parametrize("engine", ["etcd", "redis", "zookeeper"], indirect=True)
def test_closing_does_not_wait_for_a_server_that_does_not_answer(engine, fault, opened, namespace):
    proxy, watcher = engine.proxy(), RecordingWatcher()
    backend = opened(engine.url(port=proxy.port, namespace=namespace), timeout=4 * WAIT_S)
    backend.watch(A.service, watcher)
    backend.publish([A])
    assert watcher.sees(A)
    if fault == "dead":
        proxy.close()
        assert watcher.doubts()
    else:
        proxy.blackhole(new=True)
    assert closes(backend)


@pytest.mark.parametrize("engine", ["etcd", "redis", "zookeeper", "dubbo"], indirect=True)
def test_an_instance_belongs_to_the_backend_that_published_it_last(engine, opened, namespace):
    first, second = (opened(engine.url(namespace=namespace)) for _ in "12")
    first.publish([A])
    second.publish([A])
    assert first.renew([A]) == {A.key: "missing"}
    first.close()
    assert second.renew([A]) == {}
    assert second.lookup(A.service).records == {A.id: A.encoded()}
