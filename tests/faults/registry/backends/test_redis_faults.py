"""Redis, broken as servers, networks and operators break it."""

import time

import pytest
from redis.exceptions import OutOfMemoryError

from fixtures.engine_redis import RedisEngine
from fixtures.engine_watchers import (
    RecordingWatcher,
    closes,
    in_the_end,
    instance,
    opened,
    publishes,
)
from fixtures.engines import engine_fixture
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.errors import RegistryRefused, RegistryUnavailable

__all__ = ["opened"]

redis = engine_fixture(RedisEngine)
A, B = instance(1), instance(2)
RECORDS, LEASES = "{rpcwheel}:records", "{rpcwheel}:leases"


def field(instance) -> str:
    """Its name in the hashes and sorted sets of a namespace."""
    return f"{instance.service}/{instance.id}"


@pytest.fixture
def full(redis):
    """Makes the server refuse whatever needs memory; not any more afterwards."""

    def fill() -> None:
        redis.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
        redis.ask("CONFIG", "SET", "maxmemory", "1")
        with pytest.raises(OutOfMemoryError):
            redis.ask("SET", "x", "y")

    yield fill
    redis.ask("CONFIG", "SET", "maxmemory", "0")


def lease_left_s(redis, instance) -> float:
    """Until the lease of an instance ends, by the server's clock."""
    seconds, micros = redis.ask("TIME")
    return redis.ask("ZSCORE", LEASES, field(instance)) / 1000 - seconds - micros / 1e6


@pytest.fixture(autouse=True)
def clean(redis):
    """Nothing is left of the test before."""
    yield
    redis.flush()


def listens(redis):
    """Whether a backend does, to what is published; waits for it."""
    return wait_until(lambda: redis.ask("PUBSUB", "NUMSUB", "{rpcwheel}:changes")[1] == 1)


@pytest.fixture
def watched(redis, opened):
    """A backend that has published two instances, and who watches them elsewhere."""
    backend, other, witness = opened(redis.url()), opened(redis.url(), lease=2), RecordingWatcher()
    other.watch(A.service, witness)
    backend.publish([A, B])
    assert witness.sees(A, B)
    return backend, witness


def test_after_a_crash_what_was_kept_on_disk_is_there(redis, watched):
    backend, witness = watched
    redis.restart()
    assert in_the_end(lambda: backend.renew([A, B])) == {}
    assert witness.doubts()
    assert witness.sees(A, B)


def test_after_a_wipe_all_is_told_to_be_lost_and_can_be_published_again(redis, watched):
    backend, witness = watched
    redis.wipe()
    assert in_the_end(lambda: backend.renew([A, B])) == {A.key: "wiped", B.key: "wiped"}
    backend.publish([A, B])
    assert backend.renew([A, B]) == {}
    assert witness.doubts()
    assert witness.sees(A, B)


def test_a_flush_that_breaks_no_connection_is_a_loss_of_memory_too(redis, watched):
    backend, witness = watched
    redis.flush()
    assert witness.sees()
    assert witness.doubts("lost its data")
    assert set(backend.renew([A, B]).values()) == {"wiped"}
    backend.publish([A, B])
    assert backend.renew([A, B]) == {}
    assert witness.sees(A, B)


def test_a_server_that_stood_still_for_longer_than_the_lease_has_ended_it(redis, opened):
    backend, witness = opened(redis.url(), lease=1.0, timeout=0.3), RecordingWatcher()
    backend.watch(A.service, witness)
    assert publishes(backend, witness, A)
    redis.freeze()
    try:
        with pytest.raises(RegistryUnavailable, match="Timeout"):
            backend.renew([A])
        assert witness.doubts()
        time.sleep(1.0)
    finally:
        redis.thaw()
    assert in_the_end(lambda: backend.renew([A])) == {A.key: "lease"}
    assert publishes(backend, witness, A)


def test_a_request_without_an_answer_is_not_repeated_by_redis_py(redis, opened):
    proxy = redis.proxy()
    backend = opened(redis.url(port=proxy.port), timeout=0.2)
    in_the_end(lambda: backend.publish([A]))
    before = proxy.accepted
    proxy.blackhole(new=True)
    with pytest.raises(RegistryUnavailable):
        backend.renew([A])
    assert proxy.accepted <= before + 1  # its own retries connect anew each time


def test_a_connection_that_is_cut_costs_nothing(redis, opened):
    proxy, witness = redis.proxy(), RecordingWatcher()
    backend = opened(redis.url(port=proxy.port))
    backend.watch(A.service, witness)
    assert listens(redis)
    backend.publish([A])
    assert witness.sees(A)
    proxy.reset()
    assert witness.doubts()
    assert in_the_end(lambda: backend.renew([A])) == {}
    assert witness.sees(A)
    in_the_end(lambda: backend.publish([B]))
    assert witness.sees(A, B)


def test_a_black_hole_for_longer_than_the_lease_costs_it_and_no_more(redis, opened):
    proxy, witness = redis.proxy(), RecordingWatcher()
    backend, beside = (
        opened(redis.url(port=proxy.port), lease=1.0, timeout=0.3),
        opened(redis.url()),
    )
    backend.watch(A.service, witness)
    assert publishes(backend, witness, A)
    proxy.blackhole(new=True)
    with pytest.raises(RegistryUnavailable):
        backend.renew([A])
    assert witness.doubts()
    assert wait_until(lambda: not beside.lookup(A.service).records)
    proxy.heal()
    assert in_the_end(lambda: backend.renew([A])) == {A.key: "lease"}
    assert publishes(backend, witness, A)


def test_what_an_operator_deletes_is_missing(redis, watched):
    backend, witness = watched
    redis.ask("HDEL", RECORDS, field(A))
    assert witness.sees(B)
    assert backend.renew([A, B]) == {A.key: "missing"}
    redis.ask("DEL", RECORDS, LEASES)
    assert witness.sees()
    assert set(backend.renew([A, B]).values()) == {"missing"}
    backend.publish([A, B])
    assert backend.renew([A, B]) == {}
    assert witness.sees(A, B)


def test_what_is_written_over_ours_is_missing(redis, watched):
    backend, _ = watched
    redis.ask("HSET", RECORDS, field(A), A.changed(epoch="another").encoded())
    redis.ask("HSET", RECORDS, field(B), "broken")
    assert set(backend.renew([A, B]).values()) == {"missing"}


def test_records_added_by_hand_are_seen_at_the_next_check(redis, opened):
    backend, witness = opened(redis.url(), lease=3.0), RecordingWatcher()
    backend.watch(A.service, witness)
    assert witness.sees()
    redis.ask("HSET", RECORDS, field(A), A.encoded())
    assert witness.sees(A)
    assert not witness.after_doubt


def test_the_deletion_of_all_keys_of_records_by_hand_is_seen_at_the_next_check(redis, watched):
    backend, witness = watched
    redis.ask("DEL", RECORDS, LEASES, "{rpcwheel}:index")
    assert witness.sees()
    assert set(backend.renew([A, B]).values()) == {"missing"}
    assert not witness.after_doubt


def test_a_record_changed_by_hand_is_seen_after_the_next_renewal(redis, watched):
    backend, witness = watched
    heavy = A.changed(weight=7)
    redis.ask("HSET", RECORDS, field(A), heavy.encoded())
    assert backend.renew([A, B]) == {}
    assert wait_until(lambda: witness.views[-1].records[A.id] == heavy.encoded())
    assert witness.views[-1].changed == {A.id}


def test_changes_are_seen_without_messages(redis, opened):
    backend, witness = opened(redis.url(), lease=3.0), RecordingWatcher()
    backend.watch(A.service, witness)
    backend._listener.close(WAIT_S)
    other = opened(redis.url())
    other.publish([A, B])
    assert witness.sees(A, B)
    other.withdraw([A])
    assert witness.sees(B)


def test_a_listener_that_was_cut_off_listens_again(redis, opened):
    backend, witness = opened(redis.url(), lease=6 * WAIT_S), RecordingWatcher()
    backend.watch(A.service, witness)
    assert witness.sees()
    assert listens(redis)
    redis.ask("CLIENT", "KILL", "TYPE", "pubsub")
    assert witness.doubts()
    assert listens(redis)
    opened(redis.url()).publish([A])
    assert witness.sees(A)  # before the next look, after a third of the lease


def test_a_listener_in_a_black_hole_gives_its_connection_up(redis, opened):
    proxy, witness = redis.proxy(), RecordingWatcher()
    backend = opened(redis.url(port=proxy.port), lease=0.6, timeout=1.0)
    backend.watch(A.service, witness)
    assert listens(redis)
    before = proxy.accepted
    proxy.blackhole()  # the connections that are there, and no new ones
    assert wait_until(lambda: proxy.accepted >= before + 2)
    assert witness.doubts()
    assert witness.sees()


def test_a_watch_begins_while_the_server_is_down_and_sees_it_come(redis, opened):
    backend, witness = opened(redis.url(), lease=2), RecordingWatcher()
    redis.stop()
    backend.watch(A.service, witness)
    with pytest.raises(RegistryUnavailable, match="refused"):
        backend.publish([A])
    assert witness.doubts()
    redis.start()
    assert publishes(backend, witness, A)
    assert witness.after_doubt == witness.news


@pytest.mark.parametrize("fault", ["kill9", "freeze"])
def test_closing_does_not_wait_for_a_server_that_does_not_answer(fault, redis, opened):
    backend, witness = opened(redis.url(), timeout=4 * WAIT_S), RecordingWatcher()
    backend.watch(A.service, witness)
    backend.publish([A])
    assert witness.sees(A)
    getattr(redis, fault)()
    try:
        assert closes(backend)
    finally:
        redis.start() if fault == "kill9" else redis.thaw()


# A server that is full


def test_a_full_server_renews_leases(redis, opened, full):
    backend = opened(redis.url())
    backend.publish([A, B])
    redis.ask("ZADD", LEASES, int(redis.ask("ZSCORE", LEASES, field(A))) - 20_000, field(A))
    assert lease_left_s(redis, A) <= 10
    full()
    assert backend.renew([A, B]) == {}
    assert lease_left_s(redis, A) > 10
    assert set(backend.lookup(A.service).records) == {A.id, B.id}


def test_a_full_server_accepts_a_new_status_of_a_listed_instance(redis, opened, full):
    backend = opened(redis.url())
    backend.publish([A, B])
    full()
    draining = A.changed(status="DRAINING")
    backend.publish([draining])
    assert backend.lookup(A.service).records == {A.id: draining.encoded(), B.id: B.encoded()}


def test_a_full_server_refuses_new_instances_until_it_has_memory_again(redis, opened, full):
    backend = opened(redis.url())
    backend.publish([A])
    full()
    with pytest.raises(RegistryUnavailable, match="raise maxmemory"):
        backend.publish([B])
    assert backend.renew([A]) == {}
    assert set(backend.lookup(A.service).records) == {A.id}
    redis.ask("CONFIG", "SET", "maxmemory", "0")
    backend.publish([B])
    assert set(backend.lookup(A.service).records) == {A.id, B.id}


def test_a_full_server_withdraws_instances_and_removes_those_whose_lease_has_ended(
    redis, opened, full
):
    backend = opened(redis.url())
    backend.publish([A, B, instance(3)])
    full()
    backend.withdraw([A])
    redis.ask("ZREM", LEASES, field(B))
    redis.ask("HDEL", RECORDS, field(B))
    write = f"redis.call('HDEL', 'x', ''); redis.call('ZADD', '{LEASES}', 1, '{field(B)}')"
    redis.ask("EVAL", write, 0)
    assert set(backend.lookup(A.service).records) == {instance(3).id}


def test_a_server_that_refuses_renewals_does_not_remove_what_was_not_renewed(redis, opened):
    backend, witness = opened(redis.url()), RecordingWatcher()
    other = opened(redis.url(), lease=1.0)
    backend.publish([A, B])
    other.watch(A.service, witness)
    assert witness.sees(A, B)
    redis.ask("ZADD", LEASES, "1", field(A))  # its lease has ended
    redis.ask("ACL", "SETUSER", "default", "-zadd")
    try:
        for ask in (lambda: backend.renew([A, B]), lambda: backend.lookup(A.service)):
            with pytest.raises(RegistryRefused):
                ask()
        assert witness.doubts()
        assert redis.ask("HEXISTS", RECORDS, field(A))
    finally:
        redis.ask("ACL", "SETUSER", "default", "+zadd")
    assert witness.sees(B)


# A clock that is set back


def set_clock_back(redis, *instances) -> None:
    """Let the leases of these end an hour later, as if the clock were an hour behind since."""
    for one in instances:
        redis.ask("ZADD", LEASES, redis.ask("ZSCORE", LEASES, field(one)) + 3_600_000, field(one))


def test_a_dead_instance_is_removed_after_a_lease_although_the_clock_was_set_back(redis, opened):
    backend, other = opened(redis.url(), lease=1.0), opened(redis.url())
    backend.publish([A])
    set_clock_back(redis, A)
    assert wait_until(lambda: not other.lookup(A.service).records)
    assert other.services() == []


def test_a_lease_that_is_longer_than_that_of_the_client_is_not_cut(redis, opened):
    backend, other = opened(redis.url(), lease=600), opened(redis.url(), lease=1.0)
    backend.publish([A, B])
    set_clock_back(redis, B)
    assert set(other.lookup(A.service).records) == {A.id, B.id}
    assert 500 < lease_left_s(redis, A) <= 600
    assert 500 < lease_left_s(redis, B) <= 600


# A node of a cluster


def test_a_node_of_a_cluster_says_that_clusters_are_not_supported(opened):
    if reason := RedisEngine.available():
        pytest.skip(reason)
    said = "Redis Cluster is not supported: give the URL of a Redis server outside a cluster"
    with RedisEngine("--cluster-enabled", "yes") as one, RedisEngine(*one.flags) as two:
        backend, witness = opened(one.url()), RecordingWatcher()
        backend.watch(A.service, witness)
        assert witness.doubts(said)
        with pytest.raises(RegistryUnavailable, match=said):
            backend.publish([A])  # no node holds the keys yet
        slot = one.ask("CLUSTER", "KEYSLOT", RECORDS)
        one.ask("CLUSTER", "ADDSLOTSRANGE", "0", str(slot - 1), str(slot + 1), "16383")
        two.ask("CLUSTER", "ADDSLOTS", str(slot))
        one.ask("CLUSTER", "MEET", two.host, str(two.port))
        assert wait_until(lambda: b"cluster_state:ok" in one.ask("CLUSTER", "INFO"))
        with pytest.raises(RegistryRefused, match=f"slot {slot} is at .*{two.port}.*{said}"):
            backend.publish([A])
