"""etcd without faults: keys, leases, and close."""

import time

from fixtures.engine_watchers import RecordingWatcher, instance
from rpcwheel.registry.backends import etcd as module

SERVICE = "shop.Orders"


# Keys


def test_all_records_of_a_backend_have_one_lease(etcd, make) -> None:
    backend = make()
    backend.publish([instance(1), instance(2, "shop.Carts")])
    keys = [
        f"/{backend.url.namespace}/v1/shop.Carts/10.0.0.1:2",
        f"/{backend.url.namespace}/v1/shop.Orders/10.0.0.1:1",
    ]
    assert [key for key in etcd.records() if backend.url.namespace in key] == keys
    assert len({etcd.lease_of(key) for key in keys} - {0}) == 1
    backend.close()
    assert not [key for key in etcd.records() if backend.url.namespace in key]


def test_records_of_others_are_passed_on_unchanged_and_kept(etcd, make) -> None:
    backend = make()
    root = f"/{backend.url.namespace}/v1"
    watcher = RecordingWatcher()
    backend.watch(SERVICE, watcher)
    etcd.put(f"{root}/{SERVICE}/mine", b"\xff no json")
    etcd.put(f"{root}/{SERVICE}/a/b", b"{}")
    etcd.put(f"{root}/no-service", b"")
    assert backend.lookup(SERVICE).records == {"mine": b"\xff no json", "a/b": b"{}"}
    assert watcher.sees("a/b", "mine")
    assert backend.services() == [SERVICE]
    theirs = instance(1, id="mine")
    backend.withdraw([theirs])
    assert "mine" in backend.lookup(SERVICE).records
    backend.publish([theirs])
    assert backend.lookup(SERVICE).records["mine"] == theirs.encoded()


def test_more_records_than_fit_in_one_transaction(make) -> None:
    backend = make()
    large = [instance(n, metadata={"n": "é" * 8000}) for n in range(1, module.MAX_OPERATIONS + 3)]
    assert sum(len(each.encoded()) for each in large) > 4 * module.MAX_BYTES
    backend.publish(large)
    assert backend.renew(large) == {}
    assert len(backend.lookup(SERVICE).records) == len(large)
    backend.withdraw(large)
    assert backend.lookup(SERVICE).records == {}


def test_a_record_with_another_epoch_is_missing(make) -> None:
    backend = make()
    backend.publish([instance(1, epoch="old")])
    new = instance(1, epoch="new")
    assert backend.renew([new]) == {new.key: "missing"}


# The end


def test_records_overwritten_under_their_lease_are_missing(etcd, make) -> None:
    backend, one, two, three = make(), instance(1), instance(2), instance(3)
    backend.publish([one, two, three])
    root = f"/{backend.url.namespace}/v1/{SERVICE}"
    lease = etcd.lease_of(f"{root}/{one.id}")
    etcd.put(f"{root}/{one.id}", one.replace(epoch="another").encoded(), lease)
    etcd.put(f"{root}/{two.id}", b"broken", lease)
    etcd.put(f"{root}/{three.id}", three.replace(weight=7).encoded(), lease)
    for _ in range(2):
        assert backend.renew([one, two, three]) == {one.key: "missing", two.key: "missing"}
    backend.publish([one, two])
    assert backend.renew([one, two, three]) == {}


def test_a_publish_renews_a_lease_that_was_not_renewed_for_a_while(etcd, opened, namespace) -> None:
    backend = opened(etcd.url(namespace=namespace), lease=4.0)
    backend.publish([instance(1)])
    key = f"/{backend.url.namespace}/v1/{SERVICE}/10.0.0.1:2"
    backend.withdraw([instance(1)])
    time.sleep(2.2)
    before = time.monotonic()
    backend.publish([instance(2)])
    lease = etcd.lease_of(key)
    left_s = int(etcd.ask("lease/timetolive", ID=lease)["TTL"]) if lease else 0
    assert left_s >= 3 - (time.monotonic() - before)  # etcd rounds it down
