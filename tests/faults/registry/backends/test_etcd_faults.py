"""What etcd does when things go wrong, and what a backend then finds, tells and does again."""

import time

import pytest

from fixtures.engine_etcd import EtcdEngine
from fixtures.engine_watchers import RecordingWatcher, closes, in_the_end, instance, publishes
from fixtures.engines import engine_fixture
from fixtures.proxy import TO_SERVER
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.errors import RegistryUnavailable

etcd = engine_fixture(EtcdEngine, scope="function")

SERVICE = "shop.Orders"
ONE, TWO = instance(1), instance(2)
KEY = f"/rpcwheel/v1/{SERVICE}/{ONE.id}"


@pytest.fixture
def witness() -> RecordingWatcher:
    return RecordingWatcher()


@pytest.fixture
def backend(etcd, witness, opened):
    """Has published one instance, which the witness of its own watch has seen."""
    backend = opened(etcd.url())
    backend.watch(SERVICE, witness)
    backend.publish([ONE])
    assert witness.sees(ONE)
    return backend


def test_after_a_crash_with_the_data_everything_is_there_and_the_watch_goes_on(
    etcd, backend, witness
) -> None:
    before = len(witness.news)
    etcd.kill9()
    assert witness.doubts(since=before)
    for ask in (lambda: backend.renew([ONE]), lambda: backend.publish([TWO])):
        with pytest.raises(RegistryUnavailable):
            ask()
    etcd.start()
    assert in_the_end(lambda: backend.renew([ONE])) == {}
    assert witness.sees(ONE)
    seen = {news for news in witness.news[before:] if not isinstance(news, str)}
    assert seen == {frozenset({ONE.id})}


def test_after_a_crash_without_the_data_it_is_wiped_and_can_be_published_again(
    etcd, backend, witness
) -> None:
    etcd.wipe()
    assert witness.doubts()
    assert witness.sees()
    assert in_the_end(lambda: backend.renew([ONE])) == {ONE.key: "wiped"}
    assert backend.renew([ONE]) == {ONE.key: "wiped"}
    backend.publish([ONE])
    assert backend.renew([ONE]) == {}
    assert witness.sees(ONE)


def test_a_wipe_is_told_as_such_also_to_whoever_publishes_first(etcd, backend) -> None:
    etcd.wipe()
    in_the_end(lambda: backend.publish([TWO]))
    assert backend.renew([ONE, TWO]) == {ONE.key: "wiped"}


def test_an_etcd_that_stood_still_for_longer_than_the_lease_has_ended_it(
    etcd, witness, opened
) -> None:
    backend = opened(etcd.url(), lease=2.0, timeout=0.5)
    backend.watch(SERVICE, witness)
    assert publishes(backend, witness, ONE)
    etcd.freeze()
    with pytest.raises(RegistryUnavailable):  # no answer, or gRPC's ping had none before
        backend.renew([ONE])
    assert witness.doubts()
    time.sleep(2.2)
    etcd.thaw()
    assert witness.sees()
    assert in_the_end(lambda: backend.renew([ONE])) == {ONE.key: "lease"}
    assert publishes(backend, witness, ONE)


def test_a_cut_connection_is_made_anew_and_nothing_is_lost(etcd, witness, opened) -> None:
    with etcd.proxy() as proxy:
        backend = opened(etcd.url(port=proxy.port))
        backend.watch(SERVICE, witness)
        backend.publish([ONE])
        assert witness.sees(ONE)
        proxy.reset()
        assert witness.doubts()
        assert witness.sees(ONE)
        assert in_the_end(lambda: backend.renew([ONE])) == {}


def test_a_black_hole_is_found_and_for_longer_than_the_lease_has_ended_it(
    etcd, witness, opened
) -> None:
    with etcd.proxy() as proxy:
        backend = opened(etcd.url(port=proxy.port), lease=1.0, timeout=0.3)
        backend.watch(SERVICE, witness)
        assert publishes(backend, witness, ONE)
        proxy.blackhole(new=True)
        assert witness.doubts()
        assert wait_until(lambda: not etcd.records())
        proxy.heal()
        assert in_the_end(lambda: backend.renew([ONE])) == {ONE.key: "lease"}
        assert publishes(backend, witness, ONE)


def test_what_happens_and_is_compacted_while_the_watch_is_cut_is_seen_afterwards(
    etcd, witness, opened
) -> None:
    with etcd.proxy() as proxy:
        backend = opened(etcd.url(port=proxy.port))
        publisher = opened(etcd.url())
        backend.watch(SERVICE, witness)
        publisher.publish([ONE])
        assert witness.sees(ONE)
        proxy.to("127.0.0.1:1")
        proxy.reset()
        assert witness.doubts()
        publisher.withdraw([ONE])
        publisher.publish([TWO])
        etcd.compact()
        proxy.to(f"127.0.0.1:{etcd.port}")
        assert witness.sees(TWO)
        publisher.publish([ONE])
        assert witness.sees(ONE, TWO)


def test_after_all_keys_were_deleted_each_is_missing_and_can_be_published_again(
    etcd, backend, witness
) -> None:
    backend.publish([TWO])
    etcd.flush()
    assert witness.sees()
    assert backend.renew([ONE, TWO]) == {ONE.key: "missing", TWO.key: "missing"}
    backend.publish([ONE, TWO])
    assert backend.renew([ONE, TWO]) == {}
    assert witness.sees(ONE, TWO)
    assert not witness.after_doubt


def test_a_key_that_an_operator_has_deleted_is_missing_alone(etcd, backend, witness) -> None:
    backend.publish([TWO])
    assert etcd.delete(KEY)
    assert witness.sees(TWO)
    assert backend.renew([ONE, TWO]) == {ONE.key: "missing"}
    backend.publish([ONE])
    assert witness.sees(ONE, TWO)


def test_a_lease_that_an_operator_has_revoked_is_lost(etcd, backend, witness) -> None:
    etcd.revoke(etcd.lease_of(KEY))
    assert witness.sees()
    assert backend.renew([ONE]) == {ONE.key: "lease"}
    backend.publish([ONE])
    assert backend.renew([ONE]) == {}
    assert witness.sees(ONE)


def test_publishing_finds_a_lost_lease_by_itself_and_the_others_are_told_why(
    etcd, backend, witness
) -> None:
    etcd.revoke(etcd.lease_of(KEY))
    backend.publish([TWO])
    assert witness.sees(TWO)
    assert backend.renew([ONE, TWO]) == {ONE.key: "lease"}


def test_a_key_that_another_process_has_taken_is_missing_and_is_not_withdrawn(
    etcd, backend, opened
) -> None:
    successor = opened(etcd.url())
    theirs = ONE.changed(epoch="another process")
    successor.publish([theirs])
    assert backend.renew([ONE]) == {ONE.key: "missing"}
    backend.withdraw([ONE])
    assert successor.renew([theirs]) == {}
    assert etcd.records() == {KEY: theirs.encoded()}


def test_records_of_others_that_nobody_can_read_hurt_nothing(etcd, backend, witness) -> None:
    etcd.put(f"/rpcwheel/v1/{SERVICE}/foreign", b"\xff\x00")
    etcd.put(f"/rpcwheel/v1/{SERVICE}-v2/foreign", b"\xff\x00")
    etcd.put("/rpcwheel", b"")
    assert witness.sees(ONE, "foreign")
    assert backend.renew([ONE]) == {}
    assert backend.services() == [SERVICE, f"{SERVICE}-v2"]
    backend.withdraw([ONE])
    assert witness.sees("foreign")


def test_a_publishing_that_arrives_after_its_withdrawal_leaves_no_ghost(etcd, opened) -> None:
    with etcd.proxy() as proxy:
        backend = opened(etcd.url(port=proxy.port), lease=20.0, timeout=0.3)
        backend.publish([TWO])
        proxy.half_open(TO_SERVER)
        with pytest.raises(RegistryUnavailable):
            backend.publish([ONE])
        in_the_end(lambda: backend.withdraw([ONE]))
        lease = etcd.lease_of(KEY.replace(ONE.id, TWO.id))
        etcd.put(KEY, ONE.encoded(), lease)  # as the held back request does, if it is quick enough
        proxy.heal()
        backend.renew([TWO])
        assert KEY not in etcd.records()


def test_a_publishing_that_arrives_after_a_later_one_is_put_right(etcd, opened) -> None:
    with etcd.proxy() as proxy:
        backend = opened(etcd.url(port=proxy.port), lease=20.0, timeout=0.3)
        backend.publish([TWO])
        proxy.half_open(TO_SERVER)
        with pytest.raises(RegistryUnavailable):
            backend.publish([ONE])
        draining = ONE.changed(status="DRAINING")
        in_the_end(lambda: backend.publish([draining]))
        etcd.put(KEY, ONE.encoded(), etcd.lease_of(KEY))  # as above
        assert backend.renew([draining, TWO]) == {}
        assert etcd.records()[KEY] == draining.encoded()


@pytest.mark.parametrize("fault", ["kill9", "freeze"])
def test_closing_does_not_wait_for_an_etcd_that_does_not_answer(etcd, opened, fault) -> None:
    backend, witness = opened(etcd.url(), timeout=4 * WAIT_S), RecordingWatcher()
    backend.watch(SERVICE, witness)
    backend.publish([ONE])
    assert witness.sees(ONE)
    getattr(etcd, fault)()
    assert closes(backend)
