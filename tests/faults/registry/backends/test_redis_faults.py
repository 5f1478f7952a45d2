"""The Redis backend with faults of the server and the network, and changes by operators."""

import threading
import time

import pytest
from redis.exceptions import OutOfMemoryError

from fixtures.engine_redis import RedisEngine, field_of
from fixtures.engine_watchers import RecordingWatcher, in_the_end, instance, publishes
from fixtures.timers import cannot_start
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.errors import RegistryRefused, RegistryUnavailable

A, B = instance(1), instance(2)
RECORDS, LEASES = "{rpcwheel}:records", "{rpcwheel}:leases"


@pytest.fixture
def full(redis):
    """A function that brings the server to `maxmemory`. Undone after the test."""

    def fill() -> None:
        redis.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
        redis.ask("CONFIG", "SET", "maxmemory", "1")
        with pytest.raises(OutOfMemoryError):
            redis.ask("SET", "x", "y")

    yield fill
    redis.ask("CONFIG", "SET", "maxmemory", "0")


def lease_left_s(redis, instance) -> float:
    """Return the seconds until the lease of an instance ends, by the server's clock."""
    seconds, micros = redis.ask("TIME")
    return redis.ask("ZSCORE", LEASES, field_of(instance)) / 1000 - seconds - micros / 1e6


@pytest.fixture(autouse=True)
def clean(redis):
    """Deletes all keys after each test."""
    yield
    redis.flush()


def listens(redis):
    """Whether one client is subscribed to the channel of changes; waits for it."""
    return wait_until(lambda: redis.ask("PUBSUB", "NUMSUB", "{rpcwheel}:changes")[1] == 1)


@pytest.fixture
def watched(redis, opened):
    """A backend that has published two instances, and a watcher of another backend."""
    backend, other, watcher = opened(redis.url()), opened(redis.url(), lease=9), RecordingWatcher()
    other.watch(A.service, watcher)
    backend.publish([A, B])
    assert watcher.sees(A, B)
    return backend, watcher


def test_a_server_frozen_for_longer_than_the_lease_ends_it(redis, opened):
    backend, watcher = opened(redis.url(), lease=1.0, timeout=0.3), RecordingWatcher()
    backend.watch(A.service, watcher)
    assert publishes(backend, watcher, A)
    redis.freeze()
    try:
        with pytest.raises(RegistryUnavailable, match="Timeout"):
            backend.renew([A])
        assert watcher.doubts()
        time.sleep(1.0)
    finally:
        redis.thaw()
    assert in_the_end(lambda: backend.renew([A])) == {A.key: "lease"}
    assert publishes(backend, watcher, A)


def test_redis_py_does_not_repeat_a_request_without_a_reply(redis, opened):
    proxy = redis.proxy()
    backend = opened(redis.url(port=proxy.port), timeout=0.2)
    in_the_end(lambda: backend.publish([A]))
    before = proxy.accepted
    proxy.blackhole(new=True)
    with pytest.raises(RegistryUnavailable):
        backend.renew([A])
    assert proxy.accepted <= before + 1  # its own retries connect anew each time


def test_the_listener_is_started_later_if_the_system_has_no_more_threads(
    redis, opened, monkeypatch
):
    backend = opened(redis.url())
    with monkeypatch.context() as refused:
        refused.setattr(threading.Thread, "start", cannot_start)
        with pytest.raises(RegistryUnavailable, match="can't start new thread"):
            backend.watch(A.service, RecordingWatcher())
    backend.watch(A.service, RecordingWatcher())
    assert listens(redis)


def test_records_deleted_by_hand_are_reported_as_missing(redis, watched):
    backend, watcher = watched
    redis.ask("HDEL", RECORDS, field_of(A))
    assert watcher.sees(B)
    assert backend.renew([A, B]) == {A.key: "missing"}
    redis.ask("DEL", RECORDS, LEASES)
    assert watcher.sees()
    assert set(backend.renew([A, B]).values()) == {"missing"}
    backend.publish([A, B])
    assert backend.renew([A, B]) == {}
    assert watcher.sees(A, B)


def test_records_overwritten_by_hand_are_reported_as_missing(redis, watched):
    backend, _ = watched
    redis.ask("HSET", RECORDS, field_of(A), A.replace(epoch="another").encoded())
    redis.ask("HSET", RECORDS, field_of(B), "broken")
    assert set(backend.renew([A, B]).values()) == {"missing"}


def test_records_added_by_hand_are_seen_at_the_next_check(redis, opened):
    backend, watcher = opened(redis.url(), lease=9), RecordingWatcher()
    backend.watch(A.service, watcher)
    assert watcher.sees()
    redis.ask("HSET", RECORDS, field_of(A), A.encoded())
    assert watcher.sees(A)
    assert not watcher.after_doubt


def test_the_deletion_of_all_keys_of_records_by_hand_is_seen_at_the_next_check(redis, watched):
    backend, watcher = watched
    redis.ask("DEL", RECORDS, LEASES, "{rpcwheel}:index")
    assert watcher.sees()
    assert set(backend.renew([A, B]).values()) == {"missing"}
    assert not watcher.after_doubt


def test_a_record_changed_by_hand_is_seen_after_the_next_renewal(redis, watched):
    backend, watcher = watched
    heavy = A.replace(weight=7)
    redis.ask("HSET", RECORDS, field_of(A), heavy.encoded())
    assert backend.renew([A, B]) == {}
    assert wait_until(lambda: watcher.views[-1].records[A.id] == heavy.encoded())
    assert watcher.views[-1].changed == {A.id}


def test_changes_are_seen_without_messages(redis, opened):
    backend, watcher = opened(redis.url(), lease=3.0), RecordingWatcher()
    backend.watch(A.service, watcher)
    backend._listener.close(WAIT_S)
    other = opened(redis.url())
    other.publish([A, B])
    assert watcher.sees(A, B)
    other.withdraw([A])
    assert watcher.sees(B)


def test_the_listener_connects_again_after_its_connection_was_killed(redis, opened):
    backend, watcher = opened(redis.url(), lease=6 * WAIT_S), RecordingWatcher()
    backend.watch(A.service, watcher)
    assert watcher.sees()
    assert listens(redis)
    redis.ask("CLIENT", "KILL", "TYPE", "pubsub")
    assert watcher.doubts()
    assert listens(redis)
    opened(redis.url()).publish([A])
    assert watcher.sees(A)  # before the next look, after a third of the lease


def test_the_listener_gives_up_a_silent_connection(redis, opened):
    proxy, watcher = redis.proxy(), RecordingWatcher()
    backend = opened(redis.url(port=proxy.port), lease=0.6, timeout=1.0)
    backend.watch(A.service, watcher)
    assert listens(redis)
    before = proxy.accepted
    proxy.blackhole()  # the connections that are there, and no new ones
    assert wait_until(lambda: proxy.accepted >= before + 2)
    assert watcher.doubts()
    assert watcher.sees()


# A server at maxmemory


def test_a_full_server_renews_leases(redis, opened, full):
    backend = opened(redis.url())
    backend.publish([A, B])
    redis.ask("ZADD", LEASES, int(redis.ask("ZSCORE", LEASES, field_of(A))) - 20_000, field_of(A))
    assert lease_left_s(redis, A) <= 10
    full()
    assert backend.renew([A, B]) == {}
    assert lease_left_s(redis, A) > 10
    assert set(backend.lookup(A.service).records) == {A.id, B.id}


def test_a_full_server_accepts_a_new_status_of_a_listed_instance(redis, opened, full):
    backend = opened(redis.url())
    backend.publish([A, B])
    full()
    draining = A.replace(status="DRAINING")
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
    redis.ask("ZREM", LEASES, field_of(B))
    redis.ask("HDEL", RECORDS, field_of(B))
    write = f"redis.call('HDEL', 'x', ''); redis.call('ZADD', '{LEASES}', 1, '{field_of(B)}')"
    redis.ask("EVAL", write, 0)
    assert set(backend.lookup(A.service).records) == {instance(3).id}


def test_a_server_that_refuses_renewals_removes_no_ended_lease(redis, opened):
    backend, watcher = opened(redis.url()), RecordingWatcher()
    other = opened(redis.url(), lease=1.0)
    backend.publish([A, B])
    other.watch(A.service, watcher)
    assert watcher.sees(A, B)
    redis.ask("ACL", "SETUSER", "default", "-zadd")
    try:
        # Its lease ends now, by another command than the one that is refused: before, the watcher
        # would have removed it.
        redis.ask("ZINCRBY", LEASES, "-1e15", field_of(A))
        for ask in (lambda: backend.renew([A, B]), lambda: backend.lookup(A.service)):
            with pytest.raises(RegistryRefused):
                ask()
        assert watcher.doubts()
        assert redis.ask("HEXISTS", RECORDS, field_of(A))
    finally:
        redis.ask("ACL", "SETUSER", "default", "+zadd")
    assert watcher.sees(B)


# A clock that was set back


def set_clock_back(redis, *instances) -> None:
    """Move the ends of leases by an hour, as if the clock had been set back by that since."""
    for one in instances:
        redis.ask(
            "ZADD", LEASES, redis.ask("ZSCORE", LEASES, field_of(one)) + 3_600_000, field_of(one)
        )


def test_a_dead_instance_is_removed_after_a_lease_although_the_clock_was_set_back(redis, opened):
    backend, other = opened(redis.url(), lease=1.0), opened(redis.url())
    backend.publish([A])
    set_clock_back(redis, A)
    assert wait_until(lambda: not other.lookup(A.service).records)
    assert other.services() == []


def test_a_longer_lease_of_another_process_is_not_shortened(redis, opened):
    backend, other = opened(redis.url(), lease=600), opened(redis.url(), lease=1.0)
    backend.publish([A, B])
    set_clock_back(redis, B)
    assert set(other.lookup(A.service).records) == {A.id, B.id}
    assert 500 < lease_left_s(redis, A) <= 600
    assert 500 < lease_left_s(redis, B) <= 600


# A node of a cluster


def test_a_cluster_node_is_reported_as_not_supported(opened):
    said = "Redis Cluster is not supported: give the URL of a Redis server outside a cluster"
    with RedisEngine("--cluster-enabled", "yes") as one, RedisEngine(*one.flags) as two:
        backend, watcher = opened(one.url()), RecordingWatcher()
        backend.watch(A.service, watcher)
        assert watcher.doubts(said)
        with pytest.raises(RegistryRefused, match=said):
            backend.publish([A])  # no node holds the keys yet
        slot = one.ask("CLUSTER", "KEYSLOT", RECORDS)
        one.ask("CLUSTER", "ADDSLOTSRANGE", "0", str(slot - 1), str(slot + 1), "16383")
        two.ask("CLUSTER", "ADDSLOTS", str(slot))
        one.ask("CLUSTER", "MEET", two.host, str(two.port))
        assert wait_until(lambda: b"cluster_state:ok" in one.ask("CLUSTER", "INFO"))
        with pytest.raises(RegistryRefused, match=f"slot {slot} is at .*{two.port}.*{said}"):
            backend.publish([A])
