"""Redis, broken as servers, networks and operators break it."""

import time

import pytest

from fixtures.engine_redis import RedisEngine
from fixtures.engine_watchers import Witness, closes, in_the_end, instance, opened, publishes
from fixtures.engines import engine_fixture
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.errors import RegistryUnavailable

__all__ = ["opened"]

redis = engine_fixture(RedisEngine)
A, B = instance(1), instance(2)
HASH, ENDS = "{rpcwheel}:h:shop.Orders", "{rpcwheel}:z:shop.Orders"


@pytest.fixture(autouse=True)
def clean(redis):
    """Nothing is left of the test before."""
    yield
    redis.flush()


def listens(redis):
    """Whether a provider does, to what is published; waits for it."""
    return wait_until(lambda: redis.ask("PUBSUB", "NUMSUB", "{rpcwheel}:c")[1] == 1)


@pytest.fixture
def watched(redis, opened):
    """A provider that has published two instances, and who watches them elsewhere."""
    provider, other, witness = opened(redis.url()), opened(redis.url(), lease=2), Witness()
    other.watch(A.service, witness)
    provider.publish([A, B])
    assert witness.sees(A, B)
    return provider, witness


def test_after_a_crash_what_was_kept_on_disk_is_there(redis, watched):
    provider, witness = watched
    redis.restart()
    assert in_the_end(lambda: provider.renew([A, B])) == {}
    assert witness.doubts()
    assert witness.sees(A, B)


def test_after_a_wipe_all_is_told_to_be_lost_and_can_be_published_again(redis, watched):
    provider, witness = watched
    redis.wipe()
    assert in_the_end(lambda: provider.renew([A, B])) == {A.key: "wiped", B.key: "wiped"}
    provider.publish([A, B])
    assert provider.renew([A, B]) == {}
    assert witness.doubts()
    assert witness.sees(A, B)


def test_a_flush_that_breaks_no_connection_is_a_loss_of_memory_too(redis, watched):
    provider, witness = watched
    redis.flush()
    assert witness.sees()
    assert witness.doubts("lost its memory")
    assert set(provider.renew([A, B]).values()) == {"wiped"}
    provider.publish([A, B])
    assert provider.renew([A, B]) == {}
    assert witness.sees(A, B)


def test_a_server_that_stood_still_for_longer_than_the_lease_has_ended_it(redis, opened):
    provider, witness = opened(redis.url(), lease=1.0, timeout=0.3), Witness()
    provider.watch(A.service, witness)
    assert publishes(provider, witness, A)
    redis.freeze()
    try:
        with pytest.raises(RegistryUnavailable, match="Timeout"):
            provider.renew([A])
        assert witness.doubts()
        time.sleep(1.0)
    finally:
        redis.thaw()
    assert in_the_end(lambda: provider.renew([A])) == {A.key: "lease"}
    assert publishes(provider, witness, A)


def test_a_request_without_an_answer_is_not_repeated_by_redis_py(redis, opened):
    proxy = redis.proxy()
    provider = opened(redis.url(port=proxy.port), timeout=0.2)
    in_the_end(lambda: provider.publish([A]))
    before = proxy.accepted
    proxy.blackhole(new=True)
    with pytest.raises(RegistryUnavailable):
        provider.renew([A])
    assert proxy.accepted <= before + 1  # its own retries connect anew each time


def test_a_connection_that_is_cut_costs_nothing(redis, opened):
    proxy, witness = redis.proxy(), Witness()
    provider = opened(redis.url(port=proxy.port))
    provider.watch(A.service, witness)
    assert listens(redis)
    provider.publish([A])
    assert witness.sees(A)
    proxy.reset()
    assert witness.doubts()
    assert in_the_end(lambda: provider.renew([A])) == {}
    assert witness.sees(A)
    in_the_end(lambda: provider.publish([B]))
    assert witness.sees(A, B)


def test_a_black_hole_for_longer_than_the_lease_costs_it_and_no_more(redis, opened):
    proxy, witness = redis.proxy(), Witness()
    provider, beside = (
        opened(redis.url(port=proxy.port), lease=1.0, timeout=0.3),
        opened(redis.url()),
    )
    provider.watch(A.service, witness)
    assert publishes(provider, witness, A)
    proxy.blackhole(new=True)
    with pytest.raises(RegistryUnavailable):
        provider.renew([A])
    assert witness.doubts()
    assert wait_until(lambda: not beside.lookup(A.service).records)
    proxy.heal()
    assert in_the_end(lambda: provider.renew([A])) == {A.key: "lease"}
    assert publishes(provider, witness, A)


def test_what_an_operator_deletes_is_missing(redis, watched):
    provider, witness = watched
    redis.ask("HDEL", HASH, A.id)
    assert witness.sees(B)
    assert provider.renew([A, B]) == {A.key: "missing"}
    redis.ask("DEL", HASH, ENDS)
    assert witness.sees()
    assert set(provider.renew([A, B]).values()) == {"missing"}
    provider.publish([A, B])
    assert provider.renew([A, B]) == {}
    assert witness.sees(A, B)


def test_what_is_written_over_ours_is_missing(redis, watched):
    provider, _ = watched
    redis.ask("HSET", HASH, A.id, A.changed(epoch="another").encoded())
    redis.ask("HSET", HASH, B.id, "broken")
    assert set(provider.renew([A, B]).values()) == {"missing"}


def test_a_change_whose_message_was_lost_is_found_by_the_next_look(redis, opened):
    provider, witness = opened(redis.url(), lease=3.0), Witness()
    provider.watch(A.service, witness)
    assert witness.sees()
    seconds, _ = redis.ask("TIME")
    redis.ask("ZADD", ENDS, (seconds + 60) * 1000, A.id)  # as REGISTER does, but without PUBLISH
    redis.ask("HSET", HASH, A.id, A.encoded())
    assert witness.sees(A)
    assert not witness.after_doubt


def test_a_listener_that_was_cut_off_listens_again(redis, opened):
    provider, witness = opened(redis.url(), lease=6 * WAIT_S), Witness()
    provider.watch(A.service, witness)
    assert witness.sees()
    assert listens(redis)
    redis.ask("CLIENT", "KILL", "TYPE", "pubsub")
    assert witness.doubts()
    assert listens(redis)
    opened(redis.url()).publish([A])
    assert witness.sees(A)  # before the next look, after a third of the lease


def test_a_listener_in_a_black_hole_gives_its_connection_up(redis, opened):
    proxy, witness = redis.proxy(), Witness()
    provider = opened(redis.url(port=proxy.port), lease=0.6, timeout=1.0)
    provider.watch(A.service, witness)
    assert listens(redis)
    before = proxy.accepted
    proxy.blackhole()  # the connections that are there, and no new ones
    assert wait_until(lambda: proxy.accepted >= before + 2)
    assert witness.doubts()
    assert witness.sees()


def test_a_watch_begins_while_the_server_is_down_and_sees_it_come(redis, opened):
    provider, witness = opened(redis.url(), lease=2), Witness()
    redis.stop()
    provider.watch(A.service, witness)
    with pytest.raises(RegistryUnavailable, match="refused"):
        provider.publish([A])
    assert witness.doubts()
    redis.start()
    assert publishes(provider, witness, A)
    assert witness.after_doubt == witness.news


@pytest.mark.parametrize("fault", ["kill9", "freeze"])
def test_closing_does_not_wait_for_a_server_that_does_not_answer(fault, redis, opened):
    provider, witness = opened(redis.url(), timeout=4 * WAIT_S), Witness()
    provider.watch(A.service, witness)
    provider.publish([A])
    assert witness.sees(A)
    getattr(redis, fault)()
    try:
        assert closes(provider)
    finally:
        redis.start() if fault == "kill9" else redis.thaw()
