"""etcd while all is well with it: its keys and leases, and the end of a provider."""

import secrets
import threading
import time
from collections.abc import Callable

import pytest

from fixtures.engine_etcd import EtcdEngine
from fixtures.engine_watchers import Witness, instance
from fixtures.engines import engine_fixture
from fixtures.waiting import wait_until
from rpcwheel.errors import RegistryClosed
from rpcwheel.instance import ServiceInstance
from rpcwheel.registry.provider import Provider
from rpcwheel.registry.providers import etcd as module

etcd = engine_fixture(EtcdEngine)

SERVICE = "shop.Orders"


@pytest.fixture
def make(etcd: EtcdEngine, opened) -> Callable[..., Provider]:
    """Makes providers in a namespace of the test's own, which are closed in the end."""
    namespace = secrets.token_hex(4)
    return lambda url="": opened(url or etcd.url(namespace=namespace))


def of(service: str, port: int = 1) -> ServiceInstance:
    return instance(port).changed(service=service)


# Keys


def test_a_record_is_a_key_below_its_service_with_the_one_lease_of_the_provider(etcd, make) -> None:
    provider = make()
    provider.publish([instance(1), of("shop.Carts", 2)])
    keys = [
        f"/{provider.url.namespace}/v1/shop.Carts/10.0.0.1:2",
        f"/{provider.url.namespace}/v1/shop.Orders/10.0.0.1:1",
    ]
    assert [key for key in etcd.records() if provider.url.namespace in key] == keys
    assert len({etcd.lease_of(key) for key in keys} - {0}) == 1
    provider.close()
    assert not [key for key in etcd.records() if provider.url.namespace in key]


def test_a_service_is_not_another_one_whose_name_begins_with_its_own(make) -> None:
    provider = make()
    witness, other = Witness(), Witness()
    provider.watch("shop", witness)
    provider.watch("shop-v2", other)
    provider.publish([of("shop-v2", 1), of("shop.v2", 2)])
    assert other.sees(instance(1))
    assert provider.lookup("shop").records == {}
    assert witness.sees()
    assert provider.services() == ["shop-v2", "shop.v2"]


def test_what_others_have_put_below_our_prefix_is_shown_as_it_is_and_kept(etcd, make) -> None:
    provider = make()
    root = f"/{provider.url.namespace}/v1"
    witness = Witness()
    provider.watch(SERVICE, witness)
    etcd.put(f"{root}/{SERVICE}/mine", b"\xff no json")
    etcd.put(f"{root}/{SERVICE}/a/b", b"{}")
    etcd.put(f"{root}/no-service", b"")
    assert provider.lookup(SERVICE).records == {"mine": b"\xff no json", "a/b": b"{}"}
    assert witness.sees("a/b", "mine")
    assert provider.services() == [SERVICE]
    theirs = instance(1, id="mine")
    provider.withdraw([theirs])
    assert "mine" in provider.lookup(SERVICE).records
    provider.publish([theirs])
    assert provider.lookup(SERVICE).records["mine"] == theirs.encoded()


def test_more_than_one_transaction_takes_are_published_renewed_and_withdrawn(make) -> None:
    provider = make()
    large = [instance(n, metadata={"n": "é" * 8000}) for n in range(1, module.MOST_OPERATIONS + 3)]
    assert sum(len(each.encoded()) for each in large) > 4 * module.MOST_BYTES
    provider.publish(large)
    assert provider.renew(large) == {}
    assert len(provider.lookup(SERVICE).records) == len(large)
    provider.withdraw(large)
    assert provider.lookup(SERVICE).records == {}


def test_one_that_was_published_with_another_epoch_is_missing(make) -> None:
    provider = make()
    provider.publish([instance(1, epoch="old")])
    new = instance(1, epoch="new")
    assert provider.renew([new]) == {new.key: "missing"}


# The end


def test_what_is_published_after_a_while_without_anything_has_a_whole_lease(etcd, opened) -> None:
    provider = opened(etcd.url(namespace=secrets.token_hex(4)), lease=4.0)
    provider.publish([instance(1)])
    key = f"/{provider.url.namespace}/v1/{SERVICE}/10.0.0.1:2"
    provider.withdraw([instance(1)])
    time.sleep(2.2)
    before = time.monotonic()
    provider.publish([instance(2)])
    lease = etcd.lease_of(key)
    left_s = int(etcd.ask("lease/timetolive", ID=lease)["TTL"]) if lease else 0
    assert left_s >= 3 - (time.monotonic() - before)  # etcd rounds it down


def test_a_closed_provider_leaves_no_thread(make) -> None:
    for _ in range(2):  # the first starts what lasts: the shared timer
        before = threading.active_count()
        provider = make()
        provider.watch(SERVICE, Witness())
        provider.publish([instance()])
        provider.close()
    assert wait_until(lambda: threading.active_count() <= before)


def test_a_closed_provider_takes_nothing_more(make) -> None:
    provider = make()
    provider.close()
    for act in (
        lambda: provider.publish([instance()]),
        lambda: provider.withdraw([]),
        lambda: provider.renew([]),
        lambda: provider.lookup(SERVICE),
        provider.services,
        lambda: provider.watch(SERVICE, Witness()),
    ):
        with pytest.raises(RegistryClosed):
            act()
