"""The Redis backend without faults: keys, requests, foreign records, credentials and URLs."""

import json
import random
import re
import socket
from functools import partial
from pathlib import Path

import pytest

from fixtures.engine_redis import RedisEngine, field_of
from fixtures.engine_watchers import LEASE, RecordingWatcher, instance
from fixtures.waiting import wait_until
from rpcwheel.errors import (
    RegistryClosed,
    RegistryRefused,
    RegistryUnavailable,
)

A, B = instance(1), instance(2)


KINDS = ("records", "owners", "leases", "index", "versions", "began")


# Keys and records


def test_a_record_is_json_in_a_hash_and_its_lease_end_is_in_a_sorted_set(redis, opened, namespace):
    opened(redis.url(namespace=namespace)).publish([A])
    data = redis.ask("HGET", f"{{{namespace}}}:records", field_of(A))
    assert json.loads(data)["host"] == "10.0.0.1"
    seconds, micros = redis.ask("TIME")
    end_s = redis.ask("ZSCORE", f"{{{namespace}}}:leases", field_of(A)) / 1000
    assert 0 < end_s - (seconds + micros / 1e6) <= LEASE


def test_all_keys_of_a_namespace_are_in_one_slot(redis, opened, namespace):
    opened(redis.url(namespace=namespace)).publish([A, A.replace(service="shop.Stock")])
    keys = {key.decode() for key in redis.ask("KEYS", "*") if namespace.encode() in key}
    kinds = {*KINDS, f"log:{A.service}", "log:shop.Stock"}
    assert keys == {f"{{{namespace}}}:{kind}" for kind in kinds}


def test_the_keys_of_an_abandoned_namespace_expire(redis, opened, namespace):
    opened(redis.url(namespace=namespace), lease=2).publish([A])
    kinds = {*KINDS, f"log:{A.service}"} - {"began"}
    left = [redis.ask("PTTL", f"{{{namespace}}}:{kind}") for kind in kinds]
    assert all(30_000 < ms <= 60_000 for ms in left)


def test_foreign_records_are_returned_and_not_withdrawn(redis, opened, namespace):
    backend, watcher = opened(redis.url(namespace=namespace)), RecordingWatcher()
    junk = (
        f"{A.service}/junk",
        b"\xff\x00",
        f"{A.service}/list",
        "[1]",
        field_of(A),
        "7",
        "none",
        "x",
    )
    redis.ask("HSET", f"{{{namespace}}}:records", *junk)
    redis.ask("ZADD", f"{{{namespace}}}:leases", 1e15, f"{A.service}/nothing")
    assert backend.renew([A]) == {A.key: "missing"}
    backend.publish([A])
    assert backend.lookup(A.service).records == {
        A.id: A.encoded(),
        "junk": b"\xff\x00",
        "list": b"[1]",
    }
    backend.withdraw([instance(id="junk"), instance(id="list")])
    assert set(backend.lookup(A.service).records) == {A.id, "junk", "list"}
    backend.watch(A.service, watcher)
    assert watcher.sees(A, "junk", "list")


def test_foreign_records_without_a_lease_get_one(redis, opened, namespace):
    backend = opened(redis.url(namespace=namespace), lease=1.0)
    redis.ask("HSET", f"{{{namespace}}}:records", f"{A.service}/junk", b"\xff\x00")

    def only_ours_is_left():
        backend.publish([A])
        return backend.lookup(A.service).records.keys() == {A.id}

    assert wait_until(only_ours_is_left)


def test_a_key_of_another_type_raises_registry_refused(redis, opened, namespace):
    backend = opened(redis.url(namespace=namespace))
    for kind in (*KINDS, f"log:{A.service}"):
        backend.withdraw([A])
        key = f"{{{namespace}}}:{kind}"
        redis.ask("DEL", key)
        redis.ask("SADD", key, "x")
        with pytest.raises(RegistryRefused, match="WRONGTYPE"):
            backend.publish([A])
        redis.ask("DEL", key)
    backend.publish([A])
    assert backend.renew([A]) == {}


def test_a_service_that_cannot_be_read_does_not_delay_another(redis, opened, namespace):
    backend = opened(redis.url(namespace=namespace))
    good, bad = RecordingWatcher(), RecordingWatcher()
    redis.ask("SADD", f"{{{namespace}}}:log:shop.Stock", "x")
    backend.watch("shop.Stock", bad)
    backend.watch(A.service, good)
    assert bad.doubts()
    backend.publish([A])
    assert good.sees(A)
    assert not good.after_doubt
    redis.ask("DEL", f"{{{namespace}}}:log:shop.Stock")
    assert bad.sees()


# The cost of requests


def calls(redis, command: str) -> int:
    """Return how often the server has run a command since `CONFIG RESETSTAT`, also in scripts."""
    stats = redis.ask("INFO", "commandstats").get(f"cmdstat_{command}", {"calls": 0})
    return stats["calls"]


def of_services(count: int):
    """Return one instance of each of `count` services."""
    return [A.replace(service=f"shop.Service{number}") for number in range(count)]


def test_all_instances_of_a_process_are_renewed_by_one_script(redis, opened, namespace):
    backend, many = opened(redis.url(namespace=namespace)), of_services(500)
    backend.publish(many)
    backend.renew(many)  # the server has the script from now on
    redis.ask("CONFIG", "RESETSTAT")
    assert backend.renew(many) == {}
    assert calls(redis, "evalsha") == 1


def test_services_that_do_not_change_are_not_read(redis, opened, namespace):
    backend, many = opened(redis.url(namespace=namespace), lease=0.6), of_services(20)
    watchers = [RecordingWatcher() for _ in many]
    opened(redis.url(namespace=namespace)).publish(many)
    for one, watcher in zip(many, watchers, strict=True):
        backend.watch(one.service, watcher)
    assert all(watcher.sees(A) for watcher in watchers)

    def only_checks_are_made():
        redis.ask("CONFIG", "RESETSTAT")
        assert wait_until(lambda: calls(redis, "evalsha") >= 10)
        return calls(redis, "zlexcount") == 0  # which READ calls

    assert wait_until(only_checks_are_made)


def test_an_update_says_which_records_have_changed(redis, opened, namespace):
    backend, watcher = opened(redis.url(namespace=namespace)), RecordingWatcher()
    many = [instance(port) for port in range(1, 2101)]  # more than one call in a script takes
    backend.publish(many)
    backend.watch(A.service, watcher)
    assert watcher.sees(*many)
    heavy = A.replace(weight=7)
    backend.publish([heavy])
    assert wait_until(lambda: watcher.views[-1].records[A.id] == heavy.encoded())
    assert watcher.views[-1].changed == {A.id}
    backend.withdraw([B])
    assert wait_until(lambda: B.id not in watcher.views[-1].records)
    assert watcher.views[-1].changed == {B.id}
    assert len(watcher.views[-1].records) == len(many) - 1


def test_a_service_is_read_in_full_if_the_log_of_its_changes_is_too_short(redis, opened, namespace):
    backend = opened(redis.url(namespace=namespace))
    backend.publish([A, B])
    known = backend.lookup(A.service)
    backend.publish([A.replace(weight=7)])
    redis.ask("DEL", f"{{{namespace}}}:log:{A.service}")
    backend.publish([B.replace(weight=7)])
    view = backend._read(A.service, known)
    assert view.changed is None
    assert view.records == backend.lookup(A.service).records


@pytest.mark.parametrize("seed", range(3))
def test_updates_after_random_changes_are_equal_to_full_reads(redis, opened, namespace, seed):
    chance, prefix = random.Random(seed), f"{{{namespace}}}:"
    backends = [opened(redis.url(namespace=namespace)) for _ in range(2)]
    reader = opened(redis.url(namespace=namespace))
    known, updates = reader.lookup(A.service), 0

    def some():
        ports = chance.sample(range(1, 30), chance.randrange(1, 6))
        return [instance(port, weight=chance.randrange(100)) for port in ports]

    changes = {
        8: lambda: chance.choice(backends).publish(some()),
        4: lambda: chance.choice(backends).withdraw(some()),
        3: lambda: chance.choice(backends).publish([A.replace(service="shop.Stock")]),
        2: lambda: redis.ask("HDEL", f"{prefix}records", *map(field_of, some())),
        1: lambda: redis.ask("DEL", f"{prefix}log:{A.service}"),
    }
    for _ in range(200):
        chance.choices(list(changes.values()), list(changes))[0]()
        if chance.random() < 0.5:
            continue
        view, all_of_it = reader._load(A.service, known)[1], reader.lookup(A.service)
        assert (view.records, view.revision) == (all_of_it.records, all_of_it.revision)
        if view is not known and view.changed is not None:
            updates += 1
            before, after = known.records.items(), view.records.items()
            assert view.changed == {key for key, _ in before ^ after}
        known = view
    assert updates > 10  # the log was long enough for these


def test_publishing_again_what_is_there_is_no_change(redis, opened, namespace):
    backend = opened(redis.url(namespace=namespace))
    backend.publish([A])
    revision = backend.lookup(A.service).revision
    backend.publish([A])
    assert backend.lookup(A.service).revision == revision


# Scripts, databases and owners


def test_scripts_are_loaded_again_after_script_flush(redis, opened, namespace):
    backend = opened(redis.url(namespace=namespace))
    backend.publish([A])
    redis.ask("SCRIPT", "FLUSH")
    assert backend.renew([A]) == {}


def test_another_database_is_another_registry(redis, opened, namespace):
    backend = opened(redis.url(namespace=namespace, db="3"))
    backend.publish([A])
    assert opened(redis.url(namespace=namespace, db="3")).lookup(A.service).records
    assert not opened(redis.url(namespace=namespace)).lookup(A.service).records


# Credentials and TLS


@pytest.fixture(scope="module")
def guarded():
    """A server that requires credentials."""
    with RedisEngine("--requirepass", "sesame") as engine:
        engine.login = {"password": "sesame"}
        page = Path(__file__).parents[4].joinpath("docs/registries.md").read_text("utf-8")
        rights = re.search(r"`(~\{rpcwheel\}:\* [^`]+)`", page)[1].split()
        engine.ask("ACL", "SETUSER", "ann", "on", ">open up", *rights, "+select")
        engine.ask("ACL", "SETUSER", "bob", "on", ">bob", "~other:*", "+@all")
        yield engine


def test_a_password_or_a_user_with_the_documented_rights_can_do_everything(guarded, opened):
    def has_pinged():
        return b"cmd=ping" in guarded.ask("CLIENT", "LIST")

    watcher, other = RecordingWatcher(), RecordingWatcher()
    opened(guarded.url(user=":sesame", db="2")).watch(A.service, other)
    opened(guarded.url(user="ann:open up", db="2"), lease=0.5).watch(A.service, watcher)
    wait_until(has_pinged)
    backend = opened(guarded.url(user="ann:open up", db="2"))
    backend.publish([A])
    assert backend.services() == [A.service]
    assert backend.lookup(A.service).records
    assert not backend.renew([A])
    assert watcher.sees(A)
    assert other.sees(A)
    backend.withdraw([A])
    assert watcher.sees()
    assert other.sees()
    assert not watcher.after_doubt


def test_wrong_credentials_or_missing_rights_raise_registry_refused(guarded, opened):
    for user in ("", ":zebra", "ann:zebra", "bob:bob"):
        backend, watcher = opened(guarded.url(user=user)), RecordingWatcher()
        asks = (
            partial(backend.publish, [A]),
            partial(backend.withdraw, [A]),
            partial(backend.renew, [A]),
            partial(backend.lookup, A.service),
            backend.services,
        )
        for ask in asks:
            with pytest.raises(RegistryRefused, match="look at the user") as refused:
                ask()
            assert "zebra" not in str(refused.value)
        backend.watch(A.service, watcher)
        assert watcher.doubts()


def test_a_server_that_does_not_answer_raises_registry_unavailable(opened):
    with socket.create_server(("127.0.0.1", 0)) as server:  # takes connections, and says nothing
        backend = opened(f"redis://127.0.0.1:{server.getsockname()[1]}", timeout=0.3)
        with pytest.raises(RegistryUnavailable):
            backend.lookup(A.service)


# Closing


def test_closing_during_a_request_raises_registry_closed(redis, opened, namespace):
    backend = opened(redis.url(namespace=namespace))

    def ask():
        backend.close()
        raise ValueError("I/O operation on closed file.")  # as redis-py 8 has it then

    with pytest.raises(RegistryClosed):
        backend._ask(ask)
