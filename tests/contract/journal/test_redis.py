"""The journal in Redis: failures of the server, its configuration, keys, and full memory."""

import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import redis as redis_package

from fixtures.engine_redis import RedisEngine
from fixtures.journal_calls import ROUTES, bodies_of, new_call
from fixtures.waiting import wait_until
from rpcwheel.cli import main
from rpcwheel.errors import (
    JournalFull,
    JournalOutcomeUnknown,
    JournalRefused,
    JournalUnavailable,
)
from rpcwheel.events import FailbackLost
from rpcwheel.journal import CallState, Filter
from rpcwheel.journal.backend import Dead, Delivered, Postponed


@pytest.fixture
def journal(redis, namespace, opened):
    """A journal in a namespace of its own."""
    return opened(redis.url(namespace=namespace))


@pytest.fixture
def own_journal(own_redis, namespace, opened):
    """A journal on the server that tests kill, freeze and configure."""
    return opened(own_redis.url(namespace=namespace))


# Failures of the server


def test_full_memory_refuses_new_calls_and_goes_on_with_the_stored_ones(own_redis, own_journal):
    journal = own_journal
    ids = journal.append([new_call(number) for number in range(6)])
    journal.append([new_call(6, order_key="a"), new_call(7, order_key="a")])
    own_redis.ask("CONFIG", "SET", "maxmemory", "1")
    try:
        with pytest.raises(JournalFull, match="maxmemory"):
            journal.append([new_call(8)])
        assert bodies_of(journal.take("worker", 60.0, ROUTES, 0.0)) == [0, 1, 2, 3, 4, 5, 6]
        assert journal.renew("worker", 60.0)
        results = [Delivered(ids[0]), Postponed(ids[1], 2, 0.0, "x"), Dead(ids[2], 2, "x", "x")]
        assert journal.report("worker", results[1:]) == []
        assert journal.report("worker", results[:1]) == []
        journal.release("worker")
        assert journal.retry(Filter(states=(CallState.DEAD,))) == 1
        assert journal.delete(Filter(ids=(ids[3],))) == 1
        assert bodies_of(journal.take("other", 60.0, ROUTES, 0.0)) == [4, 5, 6, 1, 2]
    finally:
        own_redis.ask("CONFIG", "SET", "maxmemory", "0")
    assert bodies_of(journal.select(Filter())) == [1, 2, 4, 5, 6, 7]


def test_a_replica_is_unavailable_and_the_commands_show_its_calls(
    own_redis, own_journal, namespace, capsys
):
    own_journal.append([new_call(1)])
    own_journal.take("died", 0.001, ROUTES, 0.0)
    own_redis.ask("REPLICAOF", "127.0.0.1", "1")
    try:
        with pytest.raises(JournalUnavailable, match=r"(?i)read.?only"):
            own_journal.append([new_call(2)])
        assert main(["journal", "stats", str(own_redis.url(namespace=namespace))]) == 0
    finally:
        own_redis.ask("REPLICAOF", "NO", "ONE")
    assert "0 waiting, 1 taken" in capsys.readouterr().out
    own_journal.append([new_call(3)])
    assert bodies_of(own_journal.select(Filter())) == [1, 3]


def test_ids_do_not_come_again_after_a_loss_of_data(own_redis, own_journal):
    before = own_journal.append([new_call(1), new_call(2)])
    own_redis.flush()
    assert own_journal.append([new_call(3)])[0] > before[-1]


# Calls whose hash is lost


@pytest.fixture
def keys(redis, namespace):
    """A function that returns the keys of the journal, without the namespace."""

    def keys():
        names = [key.decode() for key in redis.ask("KEYS", f"{namespace}:*")]
        return {name.removeprefix(f"{namespace}:") for name in names}

    return keys


@pytest.mark.parametrize("lost", [0, 2, 3, 4], ids=["unordered", "first", "second", "last"])
@pytest.mark.parametrize("taken", [False, True], ids=["waiting", "taken by a dead worker"])
def test_all_calls_but_a_lost_one_are_delivered(
    redis, journal, namespace, keys, rpcwheel_events, lost, taken
):
    ordered = [new_call(number, order_key="a") for number in (2, 3, 4)]
    ids = journal.append([new_call(0), new_call(1), *ordered])
    if taken:
        journal.take("dead", 0.001, ROUTES, 0.0)
    redis.ask("DEL", f"{namespace}:call:{ids[lost]}")
    delivered = []

    def deliver():
        calls = journal.take("worker", 60.0, ROUTES, 0.0)
        assert journal.report("worker", [Delivered(call.id) for call in calls]) == []
        delivered.extend(bodies_of(calls))
        return len(delivered) == 4

    wait_until(deliver)
    in_order = [number for number in delivered if number >= 2]
    assert in_order == sorted(in_order)
    assert {*delivered, lost} == {0, 1, 2, 3, 4}
    assert journal.take("worker", 60.0, ROUTES, 0.0) == []
    assert [(event.name, event.count) for event in rpcwheel_events.of(FailbackLost)] == [
        ("orders", 1)
    ]
    journal.release("worker")
    assert (journal.depths(), keys()) == ([], {"id", "version"})


def test_a_lost_call_is_removed_by_the_request_that_meets_it(
    redis, journal, namespace, keys, rpcwheel_events
):
    ids = journal.append([new_call(number, order_key="a") for number in range(8)])
    for _ in range(3):
        (taken,) = journal.take("worker", 60.0, ROUTES, 0.0)
        journal.report("worker", [Dead(taken.id, 2, "", "")])

    def lose(number):
        redis.ask("DEL", f"{namespace}:call:{ids[number]}")

    def losses():
        return sum(event.count for event in rpcwheel_events.of(FailbackLost))

    lose(0)  # a dead letter
    assert bodies_of(journal.select(Filter())) == [1, 2, 3, 4, 5, 6, 7]
    assert journal.retry(Filter(ids=(ids[0],))) == 0
    assert (losses(), [depth.dead for depth in journal.depths()]) == (1, [2])
    lose(1)
    assert journal.delete(Filter(states=(CallState.DEAD,))) == 1
    assert (losses(), [depth.dead for depth in journal.depths()]) == (2, [0])
    for number, result in ((3, Postponed(ids[3], 2, 0.0, "")), (4, Dead(ids[4], 2, "", ""))):
        assert bodies_of(journal.take("worker", 60.0, ROUTES, 0.0)) == [number]
        lose(number)
        assert journal.report("worker", [result]) == []
        assert losses() == number
    assert bodies_of(journal.take("worker", 60.0, ROUTES, 0.0)) == [5]
    lose(5)
    assert journal.report("worker", [Delivered(ids[5])]) == []  # it is not lost
    assert bodies_of(journal.take("worker", 60.0, ROUTES, 0.0)) == [6]
    lose(6)
    journal.release("worker")
    assert losses() == 5
    assert bodies_of(journal.take("worker", 60.0, ROUTES, 0.0)) == [7]
    lose(7)
    assert journal.delete(Filter(target="other")) == 0
    assert losses() == 6
    journal.release("worker")
    assert keys() == {"id", "version"}


def test_a_long_row_of_lost_calls_is_removed_at_once(redis, journal, namespace, rpcwheel_events):
    ids = journal.append([new_call(number) for number in range(3000)])
    redis.ask("DEL", *(f"{namespace}:call:{number}" for number in ids[:2999]))
    assert bodies_of(journal.take("worker", 60.0, [replace(ROUTES[0], limit=2)], 0.0)) == [2999]
    assert sum(event.count for event in rpcwheel_events.of(FailbackLost)) == 2999


# Configuration and rights


@pytest.mark.parametrize(("policy", "renews"), [("allkeys-lru", True), ("volatile-ttl", False)])
def test_a_server_that_deletes_keys_is_refused(own_redis, own_journal, policy, renews):
    refused = f"{policy}.*: set maxmemory-policy to noeviction"
    if renews:  # when it looks again
        own_journal.append([new_call(1)])
        own_journal.take("worker", 60.0, ROUTES, 0.0)
    own_redis.ask("CONFIG", "SET", "maxmemory-policy", policy)
    try:
        if renews:
            with pytest.raises(JournalRefused, match=refused):
                own_journal.renew("worker", 60.0)
        with pytest.raises(JournalRefused, match=refused):
            own_journal.append([new_call(2)])
    finally:
        own_redis.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
    own_journal.append([new_call(3)])
    assert own_journal.renew("worker", 60.0) is renews


def test_a_server_without_append_only_file_is_logged(opened, caplog):
    with RedisEngine() as engine:  # one that is not killed soon, before it has the file again
        journal = opened(engine.url())
        engine.ask("CONFIG", "SET", "appendonly", "no")
        journal.append([new_call(1)])
        journal.renew("worker", 60.0)
    (record,) = caplog.records
    assert "appendonly is off: a restart of the server loses calls" in record.getMessage()


def test_a_wrong_password_is_refused_and_not_shown(opened):
    with RedisEngine("--requirepass", "sesame") as engine:
        journal = opened(engine.url(user=":hunter2"))
        with pytest.raises(JournalRefused, match="look at the user, the password") as refused:
            journal.append([new_call(1)])
        assert "hunter2" not in str(refused.value)
        with pytest.raises(JournalRefused, match="look at the user, the password"):
            opened(engine.url()).depths()
        opened(engine.url(user=":sesame")).append([new_call(1)])


def test_a_user_with_the_documented_rights_can_do_everything(own_redis, opened):
    page = Path(__file__).parents[3].joinpath("docs/guides/journals.md").read_text("utf-8")
    rights = re.search(r"`(~rpcwheel-journal:\* [^`]+)`", page)[1].split()
    own_redis.ask("SCRIPT", "FLUSH")
    own_redis.ask("ACL", "SETUSER", "shop", "reset", "on", ">sesame", *rights)
    journal = opened(own_redis.url(user="shop:sesame"))
    journal.append([new_call(1), new_call(2), new_call(3, order_key="a")])
    first, second, _ = (call.id for call in journal.take("worker", 60.0, ROUTES, 0.0))
    assert journal.renew("worker", 60.0)
    results = [Delivered(first), Dead(second, 2, "error", "reason")]
    assert journal.report("worker", results) == []
    journal.release("worker")
    assert journal.routes() == [("orders", "10.0.0.1:443")]
    assert [(depth.waiting, depth.dead) for depth in journal.depths()] == [(1, 1)]
    assert journal.retry(Filter()) == 2
    assert len(journal.select(Filter())) == 2
    assert journal.delete(Filter()) == 2


def test_a_call_is_not_stored_if_the_server_accepts_no_connection(own_redis, opened):
    with closing(redis_package.Redis(own_redis.host, own_redis.port)) as other:
        most = other.config_get("maxclients")["maxclients"]
        other.config_set("maxclients", 1)
        try:
            with pytest.raises(JournalUnavailable, match="max number of clients") as refused:
                opened(own_redis.url()).append([new_call(1)])
        finally:
            other.config_set("maxclients", most)
        assert not isinstance(refused.value, JournalOutcomeUnknown)


def test_keys_of_another_program_are_refused(redis, namespace, opened):
    redis.ask("SET", f"{namespace}:version", "v2")
    with pytest.raises(JournalRefused, match="another program"):
        opened(redis.url(namespace=namespace)).append([new_call(1)])


def test_a_journal_over_tls(tls_files, opened):
    root, chain, key = map(str, tls_files)
    with RedisEngine(tls=tls_files) as engine:
        url = engine.url(ca=root, cert=chain, key=key).replace("redis://", "rediss://")
        journal = opened(url)
        journal.append([new_call(1)])
        assert bodies_of(journal.select(Filter())) == [1]
        with pytest.raises(JournalRefused, match="the TLS handshake failed"):
            opened(engine.url().replace("redis://", "rediss://")).routes()


def test_a_cluster_is_refused(opened):
    refused = pytest.raises(JournalRefused, match="Redis Cluster is not supported")
    with RedisEngine("--cluster-enabled", "yes") as engine, refused:
        opened(engine.url()).append([new_call(1)])


# Keys


def test_no_keys_remain_when_all_calls_are_gone(journal, keys):
    calls = [new_call(number, order_key=f"{number % 2}") for number in range(6)]
    ids = journal.append([*calls, new_call(7), new_call(8), new_call(9, target="b")])
    taken = [one.id for one in journal.take("worker", 60.0, ROUTES, 0.0)]
    assert taken == [ids[0], ids[1], ids[6], ids[7]]
    journal.report("worker", [Dead(ids[0], 2, "", ""), Delivered(ids[6]), Delivered(ids[1])])
    journal.release("worker")
    journal.retry(Filter())
    journal.delete(Filter())
    assert keys() == {"id", "version"}


def test_long_scans_are_done_in_parts(journal, set_limit):
    set_limit("journal.redis.CHUNK", 7)
    ids = journal.append(
        [
            new_call(number, target=f"{number % 20}", delay_s=0.0 if number % 3 else 60.0)
            for number in range(100)
        ]
    )
    assert [one.id for one in journal.select(Filter(), limit=1000)] == ids
    assert [one.id for one in journal.select(Filter(), after=ids[9], limit=50)] == ids[10:60]
    assert [one.id for one in journal.select(Filter(target="7"), limit=3)] == ids[7:50:20]
    assert [one.id for one in journal.select(Filter(ids=tuple(ids[5:95])), limit=30)] == ids[5:35]
    assert sorted(journal.routes()) == sorted(("orders", f"{number}") for number in range(20))
    assert [one.waiting for one in journal.depths()] == [5] * 20
    assert journal.retry(Filter(target="3")) == 5
    assert journal.delete(Filter(ids=tuple(ids[:30]))) == 30
    assert journal.delete(Filter()) == 70
    assert journal.depths() == []
