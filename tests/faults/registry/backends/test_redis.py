"""Redis while all is well with it: its keys, foreign records, logins and URLs."""

import json
import secrets
import socket
from functools import partial

import pytest

from fixtures.engine_redis import RedisEngine
from fixtures.engine_watchers import (
    LEASE,
    RecordingWatcher,
    instance,
    opened,
    publishes,
    tls_files,
)
from fixtures.engines import engine_fixture, free_port
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.errors import (
    ConfigurationError,
    RegistryClosed,
    RegistryRefused,
    RegistryUnavailable,
)
from rpcwheel.registry.backend import Settings
from rpcwheel.registry.backends import open_backend

__all__ = ["opened", "tls_files"]

redis = engine_fixture(RedisEngine)
A, B = instance(1), instance(2)


@pytest.fixture
def namespace():
    """One that no other test uses."""
    return f"test-{secrets.token_hex(4)}"


# What is there


def test_an_instance_is_json_in_a_hash_with_its_end_beside_it(redis, opened, namespace):
    opened(redis.url(namespace=namespace)).publish([A])
    tag = f"{{{namespace}}}"
    data = redis.ask("HGET", f"{tag}:h:shop.Orders", A.id)
    assert json.loads(data)["host"] == "10.0.0.1"
    seconds, micros = redis.ask("TIME")
    end_s = redis.ask("ZSCORE", f"{tag}:z:shop.Orders", A.id) / 1000
    assert 0 < end_s - (seconds + micros / 1e6) <= LEASE
    assert redis.ask("ZRANGE", f"{tag}:s", "0", "-1") == [b"shop.Orders"]


def test_all_keys_of_a_namespace_are_in_one_slot(redis, opened, namespace):
    opened(redis.url(namespace=namespace)).publish([A, A.changed(service="shop.Stock")])
    keys = [key for key in redis.ask("KEYS", "*") if namespace.encode() in key]
    assert len(keys) == 9
    assert {key[: len(namespace) + 2].decode() for key in keys} == {f"{{{namespace}}}"}


def test_what_nobody_looks_after_is_deleted_in_the_end(redis, opened, namespace):
    opened(redis.url(namespace=namespace), lease=2).publish([A])
    left = [redis.ask("PTTL", f"{{{namespace}}}:{kind}:shop.Orders") for kind in "hzo"]
    assert all(30_000 < ms <= 60_000 for ms in left)


def test_an_instance_whose_lease_has_ended_is_seen_to_go(redis, opened, namespace):
    witness = RecordingWatcher()
    other = opened(redis.url(namespace=namespace), lease=1.0)
    other.watch(A.service, witness)
    backend = opened(redis.url(namespace=namespace), lease=1.0)
    assert publishes(backend, witness, A)
    assert witness.sees()
    assert other.services() == []


def test_foreign_records_are_shown_beside_the_good_ones_and_not_withdrawn(redis, opened, namespace):
    backend, witness = opened(redis.url(namespace=namespace)), RecordingWatcher()
    hash_, ends = f"{{{namespace}}}:h:shop.Orders", f"{{{namespace}}}:z:shop.Orders"
    redis.ask("HSET", hash_, "junk", b"\xff\x00", "list", "[1]", A.id, "7")
    redis.ask("ZADD", ends, 1e15, "nothing")
    assert backend.renew([A]) == {A.key: "missing"}
    backend.publish([A])
    assert backend.lookup(A.service).records == {
        A.id: A.encoded(),
        "junk": b"\xff\x00",
        "list": b"[1]",
    }
    backend.withdraw([instance(id="junk"), instance(id="list")])
    assert set(backend.lookup(A.service).records) == {A.id, "junk", "list"}
    backend.watch(A.service, witness)
    assert witness.sees(A, "junk", "list")


def test_foreign_records_without_an_end_are_deleted_after_a_lease(redis, opened, namespace):
    backend = opened(redis.url(namespace=namespace), lease=1.0)
    redis.ask("HSET", f"{{{namespace}}}:h:shop.Orders", "junk", b"\xff\x00")

    def only_ours_is_left():
        backend.publish([A])
        return backend.lookup(A.service).records.keys() == {A.id}

    assert wait_until(only_ours_is_left)


def test_a_key_of_another_type_is_refused_in_clear_words(redis, opened, namespace):
    backend = opened(redis.url(namespace=namespace))
    for kind in "hzosng":
        key = f"{{{namespace}}}:{kind}" + (":shop.Orders" if kind in "hzo" else "")
        redis.ask("DEL", key)
        redis.ask("SADD", key, "x")
        with pytest.raises(RegistryRefused, match="WRONGTYPE"):
            backend.publish([A])
        redis.ask("DEL", key)
    backend.publish([A])
    assert backend.renew([A]) == {}


def test_a_watch_of_one_service_that_is_broken_does_not_hold_up_another(redis, opened, namespace):
    backend, good, bad = (
        opened(redis.url(namespace=namespace)),
        RecordingWatcher(),
        RecordingWatcher(),
    )
    redis.ask("SADD", f"{{{namespace}}}:h:shop.Stock", "x")
    backend.watch("shop.Stock", bad)
    backend.watch(A.service, good)
    assert bad.doubts()
    backend.publish([A])
    assert good.sees(A)
    assert not good.after_doubt
    redis.ask("DEL", f"{{{namespace}}}:h:shop.Stock")
    assert bad.sees()


def test_scripts_that_the_server_has_forgotten_are_sent_again(redis, opened, namespace):
    backend = opened(redis.url(namespace=namespace))
    backend.publish([A])
    redis.ask("SCRIPT", "FLUSH")
    assert backend.renew([A]) == {}


def test_another_database_is_another_registry(redis, opened, namespace):
    backend = opened(redis.url(namespace=namespace, db="3"))
    backend.publish([A])
    assert opened(redis.url(namespace=namespace, db="3")).lookup(A.service).records
    assert not opened(redis.url(namespace=namespace)).lookup(A.service).records


def test_what_another_registry_of_this_process_has_taken_is_its_own(redis, opened, namespace):
    first, second = (opened(redis.url(namespace=namespace)) for _ in "12")
    first.publish([A])
    second.publish([A])
    assert first.renew([A]) == {A.key: "missing"}
    first.close()
    assert second.renew([A]) == {}
    assert second.lookup(A.service).records == {A.id: A.encoded()}


# Who may, and where it is


@pytest.fixture(scope="module")
def guarded():
    """A server that lets only its users in."""
    if reason := RedisEngine.available():
        pytest.skip(reason)
    with RedisEngine("--requirepass", "sesame") as engine:
        engine.login = {"password": "sesame"}
        rights = ["~{rpcwheel}:*", "&{rpcwheel}:*", "+@all", "-@admin", "-@dangerous"]
        engine.ask("ACL", "SETUSER", "ann", "on", ">open up", *rights)
        engine.ask("ACL", "SETUSER", "bob", "on", ">bob", "~other:*", "+@all")
        yield engine


def test_the_password_of_all_or_a_user_with_rights_is_let_in(guarded, opened):
    witness = RecordingWatcher()
    opened(guarded.url(user=":sesame")).watch(A.service, witness)
    backend = opened(guarded.url(user="ann:open up"))
    backend.publish([A])
    assert backend.services() == [A.service]
    assert witness.sees(A)
    assert not witness.after_doubt


def test_who_may_not_is_refused_in_clear_words(guarded, opened):
    for user in ("", ":zebra", "ann:zebra", "bob:bob"):
        backend, witness = opened(guarded.url(user=user)), RecordingWatcher()
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
        backend.watch(A.service, witness)
        assert witness.doubts()


def test_tls_shows_and_wants_certificates(opened, tls_files):
    if reason := RedisEngine.available():
        pytest.skip(reason)
    root, chain, key = map(str, tls_files)
    with RedisEngine(tls=tls_files) as engine:
        witness = RecordingWatcher()
        url = engine.url(ca=root, cert=chain, key=key).replace("redis:", "rediss:")
        backend = opened(url)
        backend.watch(A.service, witness)
        backend.publish([A])
        assert witness.sees(A)
        with pytest.raises(RegistryRefused, match="CERTIFICATE_VERIFY_FAILED"):
            opened(engine.url(tls="true")).lookup(A.service)
        with pytest.raises(RegistryUnavailable):
            opened(engine.url()).lookup(A.service)
        backend.close()


def test_where_nobody_listens_the_error_says_so_at_once(opened):
    with pytest.raises(RegistryUnavailable, match="refused"):
        opened(f"redis://127.0.0.1:{free_port()}", timeout=WAIT_S).publish([A])


def test_who_is_no_redis_is_unavailable(opened):
    with socket.create_server(("127.0.0.1", 0)) as server:  # takes connections, and says nothing
        backend = opened(f"redis://127.0.0.1:{server.getsockname()[1]}", timeout=0.3)
        with pytest.raises(RegistryUnavailable):
            backend.lookup(A.service)


def test_a_url_that_makes_no_sense_is_refused_at_once():
    refused_urls = {
        "redis://": "must name one host",
        "redis://10.0.0.1,10.0.0.2": "must name one host",
        "redis://127.0.0.1?db=x": "a number from 0",
        "redis://127.0.0.1?dbs=1": "did you mean 'db'",
        "redis://127.0.0.1?ca=root.pem": "add tls=true",
        "rediss://127.0.0.1?key=x.pem": "cert and key go together",
    }
    for url, said in refused_urls.items():
        with pytest.raises(ConfigurationError, match=said):
            open_backend(url, Settings(2.0, 1.0))


# Its life


def test_a_backend_that_was_closed_says_so(redis, opened, namespace):
    backend = opened(redis.url(namespace=namespace))
    backend.close()
    for ask in (
        lambda: backend.publish([A]),
        lambda: backend.watch(A.service, RecordingWatcher()),
    ):
        with pytest.raises(RegistryClosed):
            ask()


def test_what_is_closed_under_the_hands_of_a_request_is_told_as_closed(redis, opened, namespace):
    backend = opened(redis.url(namespace=namespace))

    def ask():
        backend.close()
        raise ValueError("I/O operation on closed file.")  # as redis-py 8 has it then

    with pytest.raises(RegistryClosed):
        backend._asked(ask)
