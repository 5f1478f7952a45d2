"""etcd crashes, freezes or loses data, leases or keys: what renewals report and watchers get."""

import time

import pytest

from fixtures.engine_etcd import EtcdEngine
from fixtures.engine_watchers import RecordingWatcher, in_the_end, instance, publishes
from fixtures.engines import engine_fixture
from fixtures.proxy import TO_SERVER
from rpcwheel.errors import RegistryUnavailable

etcd = engine_fixture(EtcdEngine, scope="function")

SERVICE = "shop.Orders"
ONE, TWO = instance(1), instance(2)
KEY = f"/rpcwheel/v1/{SERVICE}/{ONE.id}"
KEY_OF_TWO = f"/rpcwheel/v1/{SERVICE}/{TWO.id}"


@pytest.fixture
def watcher() -> RecordingWatcher:
    return RecordingWatcher()


@pytest.fixture
def backend(etcd, watcher, opened):
    """A backend that has published one instance, which its own watcher has got."""
    backend = opened(etcd.url())
    backend.watch(SERVICE, watcher)
    backend.publish([ONE])
    assert watcher.sees(ONE)
    return backend


def test_renew_reports_wiped_also_after_a_publish(etcd, backend) -> None:
    etcd.wipe()
    assert in_the_end(lambda: backend.renew([ONE])) == {ONE.key: "wiped"}
    assert backend.renew([ONE]) == {ONE.key: "wiped"}
    backend.publish([TWO])
    assert backend.renew([ONE, TWO]) == {ONE.key: "wiped"}


def test_the_lease_is_lost_after_etcd_was_frozen_for_longer(etcd, watcher, opened) -> None:
    backend = opened(etcd.url(), lease=2.0, timeout=0.5)
    backend.watch(SERVICE, watcher)
    assert publishes(backend, watcher, ONE)
    etcd.freeze()
    with pytest.raises(RegistryUnavailable):  # no answer, or gRPC's ping had none before
        backend.renew([ONE])
    assert watcher.doubts()
    time.sleep(2.2)
    etcd.thaw()
    assert watcher.sees()
    assert in_the_end(lambda: backend.renew([ONE])) == {ONE.key: "lease"}
    assert publishes(backend, watcher, ONE)


def test_changes_that_were_compacted_while_the_watch_was_cut_are_not_missed(
    etcd, watcher, opened
) -> None:
    with etcd.proxy() as proxy:
        backend = opened(etcd.url(port=proxy.port))
        publisher = opened(etcd.url())
        backend.watch(SERVICE, watcher)
        publisher.publish([ONE])
        assert watcher.sees(ONE)
        proxy.to("127.0.0.1:1")
        proxy.reset()
        assert watcher.doubts()
        publisher.withdraw([ONE])
        publisher.publish([TWO])
        etcd.compact()
        proxy.to(f"127.0.0.1:{etcd.port}")
        assert watcher.sees(TWO)
        publisher.publish([ONE])
        assert watcher.sees(ONE, TWO)


def test_only_the_key_that_an_operator_deleted_is_missing(etcd, backend, watcher) -> None:
    backend.publish([TWO])
    assert etcd.delete(KEY)
    assert watcher.sees(TWO)
    assert backend.renew([ONE, TWO]) == {ONE.key: "missing"}
    backend.publish([ONE])
    assert watcher.sees(ONE, TWO)


def test_a_lease_that_an_operator_has_revoked_is_lost(etcd, backend, watcher) -> None:
    etcd.revoke(etcd.lease_of(KEY))
    assert watcher.sees()
    assert backend.renew([ONE]) == {ONE.key: "lease"}
    backend.publish([ONE])
    assert backend.renew([ONE]) == {}
    assert watcher.sees(ONE)


def test_publish_gets_a_new_lease_and_renew_reports_the_lost_one(etcd, backend, watcher) -> None:
    etcd.revoke(etcd.lease_of(KEY))
    backend.publish([TWO])
    assert watcher.sees(TWO)
    assert backend.renew([ONE, TWO]) == {ONE.key: "lease"}


def test_a_publish_applied_after_its_withdrawal_is_undone_by_renew(etcd, opened) -> None:
    with etcd.proxy() as proxy:
        backend = opened(etcd.url(port=proxy.port), lease=60.0)
        backend.publish([TWO])
        proxy.half_open(TO_SERVER)
        with pytest.raises(RegistryUnavailable):
            backend.publish([ONE])
        in_the_end(lambda: backend.withdraw([ONE]))
        lease = etcd.lease_of(KEY_OF_TWO)
        etcd.put(KEY, ONE.encoded(), lease)  # as the request does that waits in the proxy
        proxy.heal()
        assert backend.renew([TWO]) == {}
        assert list(etcd.records()) == [KEY_OF_TWO]
        assert etcd.leases() == [etcd.lease_of(KEY_OF_TWO)]


def test_a_publish_applied_after_a_later_one_is_corrected_by_renew(etcd, opened) -> None:
    with etcd.proxy() as proxy:
        backend = opened(etcd.url(port=proxy.port), lease=60.0)
        backend.publish([TWO])
        proxy.half_open(TO_SERVER)
        with pytest.raises(RegistryUnavailable):
            backend.publish([ONE])
        draining = ONE.replace(status="DRAINING")
        in_the_end(lambda: backend.publish([draining]))
        etcd.put(KEY, ONE.encoded(), etcd.lease_of(KEY_OF_TWO))  # as above
        proxy.heal()
        assert backend.renew([draining, TWO]) == {}
        assert etcd.records()[KEY] == draining.encoded()
        assert len(etcd.leases()) == 1
