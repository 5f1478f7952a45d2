"""Members come and go while calls run, and none of these fails for it."""

import threading
import time

import grpc
import pytest

from fixtures.clusters import instance
from fixtures.grpc_servers import IMPATIENT
from fixtures.shop import UNARY_UNARY, Hang, Shop
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.channel import ReconnectingChannel
from rpcwheel.cluster import ClusterPolicy
from rpcwheel.observe import ListenerFailed


def call_of(channel):
    method = channel.unary_unary(UNARY_UNARY)
    return lambda: method(b"x", timeout=WAIT_S)


def counts(shops):
    return [len(shop.calls) for shop in shops]


# Coming and going


def test_a_member_has_no_channel_before_it_is_called(shops, open_cluster):
    channel = open_cluster(*shops)
    assert [one.state for one in channel.members] == ["IDLE"] * 3
    call_of(channel)()
    assert sorted(one.state for one in channel.members) == ["IDLE", "IDLE", "UP"]
    assert sum(one.link is not None for one in channel.members) == 1


def test_new_instances_are_called_and_those_that_are_gone_are_not(shops, open_cluster):
    channel = open_cluster(shops[0])
    call = call_of(channel)
    call()
    channel.update([instance(shops[1]), instance(shops[2])])
    for _ in range(6):
        call()
    assert counts(shops) == [1, 3, 3]


def test_an_update_leaves_the_connections_of_others_alone(shops, open_cluster):
    channel = open_cluster(shops[0], shops[1])
    call = call_of(channel)
    for _ in range(4):
        call()
    channel.update([instance(shops[0], weight=10), instance(shops[2])])
    for _ in range(22):
        call()
    assert len({seen.peer for seen in shops[0].calls}) == 1
    assert len(shops[0].calls) <= 5  # weight 10 beside 100


def test_calls_on_a_member_that_is_gone_end_in_peace(shops, open_cluster):
    shops[0].then(hang := Hang())
    channel = open_cluster(shops[0])
    running = channel.unary_unary(UNARY_UNARY).future(b"x", timeout=WAIT_S)
    assert hang.begun.wait(20)
    gone = channel.members[0]
    channel.update([instance(shops[1])])
    assert (gone.state, channel.calls, gone in channel.members) == ("DRAINING", 1, False)
    assert call_of(channel)() == b"x"
    shops[0].calls[0].ended.set()
    assert running.result(20) == b"x"
    assert wait_until(lambda: gone.state == "CLOSED")
    assert channel.calls == 0


def test_when_their_time_is_over_they_end_with_the_reason(shops, open_cluster, timer):
    shops[0].then(hang := Hang())
    channel = open_cluster(shops[0], policy=ClusterPolicy(drain=7))
    running = channel.unary_unary(UNARY_UNARY).future(b"x", timeout=WAIT_S)
    assert hang.begun.wait(20)
    name = channel.members[0].id
    channel.update([])
    timer.advance(7.1)
    error = running.exception(20)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert f"channel retired: {name} is gone from test.Shop" in error.details()


def test_an_instance_that_comes_back_is_another_member(shops, open_cluster):
    channel = open_cluster(shops[0])
    call_of(channel)()
    first = channel.members[0]
    channel.update([])
    channel.update([instance(shops[0])])
    assert call_of(channel)() == b"x"
    assert channel.members[0] is not first
    with pytest.raises(ValueError, match="closed channel"):
        first.channel.unary_unary(UNARY_UNARY)(b"x")


def test_a_member_that_was_never_called_can_not_be_connected_once_it_is_gone(shops, open_cluster):
    channel = open_cluster(shops[0])
    member = channel.members[0]
    channel.update([])
    with pytest.raises(ValueError, match="closed channel"):
        member.channel  # noqa: B018
    assert member.state == "CLOSED"


def test_a_member_whose_channel_somebody_closed_gets_another(shops, open_cluster):
    channel = open_cluster(shops[0])
    call = call_of(channel)
    call()
    channel.members[0].channel.close()
    assert call() == b"x"


def test_threads_that_call_a_new_member_at_once_share_one_channel(shops, open_cluster):
    made, told, gate = [], [], threading.Event()

    def connect(one, options):
        made.append(one)
        gate.wait(20)
        return grpc.insecure_channel(one.target, options)

    channel = open_cluster(shops[0], connect=connect, on_member=told.append)
    threads = [threading.Thread(target=call_of(channel)) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert wait_until(lambda: len(made) == 4)
    gate.set()
    for thread in threads:
        thread.join(20)
    assert told == [channel.members[0]]
    assert len({seen.peer for seen in shops[0].calls}) == 1


def test_who_is_told_of_members_may_fail(shops, open_cluster, events):
    def on_member(member):
        raise RuntimeError(member.id)

    channel = open_cluster(shops[0], on_member=on_member)
    assert call_of(channel)() == b"x"
    assert [type(event) for event in events] == [ListenerFailed]


def test_what_connect_raises_is_the_callers(shops, open_cluster):
    def connect(one, options):
        raise RuntimeError("no way")

    channel = open_cluster(shops[0], connect=connect)
    with pytest.raises(RuntimeError, match="no way"):
        call_of(channel)()


# Growing weights


def test_a_young_member_gets_more_and_more_calls(shops, open_cluster, timer):
    channel = open_cluster(policy=ClusterPolicy(warmup=100))
    channel.update([instance(shops[0]), instance(shops[1], started_at=time.time())])
    call = call_of(channel)
    for _ in range(50):
        call()
    assert len(shops[1].calls) <= 2
    timer.advance(101)
    assert wait_until(lambda: not channel._fleet._timeouts)  # a worker has looked
    before = len(shops[1].calls)
    for _ in range(20):
        call()
    assert len(shops[1].calls) == pytest.approx(before + 10, abs=1)


# The end


def test_closing_ends_calls_probes_and_members(shops, dead, open_cluster, timer):
    shops[0].then(hang := Hang())
    channel = open_cluster(shops[0])
    running = channel.unary_unary(UNARY_UNARY).future(b"x", timeout=WAIT_S)
    assert hang.begun.wait(20)
    member = channel.members[0]
    member.down("the test says so")
    told = []
    channel.on_close(lambda: told.append(running.done()))
    channel.close()
    channel.close()
    assert told == [False]
    assert running.code() is grpc.StatusCode.CANCELLED
    assert (channel.closed, channel.members, member.state, timer.pending) == (True, (), "CLOSED", 0)
    channel.on_close(lambda: told.append("late"))
    assert told == [False, "late"]


def test_who_is_told_of_the_end_can_have_itself_forgotten_and_may_fail(shops, open_cluster, events):
    channel, told = open_cluster(shops[0]), []
    forget = channel.on_close(lambda: told.append("forgotten"))
    channel.on_close(lambda: 1 / 0)
    channel.on_close(lambda: told.append("told"))
    forget()
    channel.close()
    assert told == ["told"]
    assert [type(event) for event in events] == [ListenerFailed]


def test_members_that_drain_are_closed_with_the_rest(shops, open_cluster):
    shops[0].then(hang := Hang())
    channel = open_cluster(shops[0])
    running = channel.unary_unary(UNARY_UNARY).future(b"x", timeout=WAIT_S)
    assert hang.begun.wait(20)
    channel.update([])
    channel.close()
    assert running.code() is grpc.StatusCode.CANCELLED


def test_a_rolling_restart_fails_no_call(open_cluster):
    """Withdrawn, drained, killed, started elsewhere, published: as a publisher does it."""
    shops = [Shop(), Shop()]
    channel = open_cluster(*shops)
    call, failures, over = call_of(channel), [], threading.Event()

    def load():
        while not over.is_set():
            try:
                assert call() == b"x"
            except Exception as error:  # noqa: BLE001
                failures.append(error)

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    for place in (0, 1, 0, 1):
        assert wait_until(lambda place=place: shops[place].calls)
        old = shops[place]
        channel.update([instance(one) for one in shops if one is not old])
        assert wait_until(lambda: not channel._fleet.roster.leaving)
        old.kill()
        shops[place] = Shop()
        channel.update([instance(one) for one in shops])
    over.set()
    for thread in threads:
        thread.join(20)
    assert failures == []
    for shop in shops:
        shop.kill()


def test_the_options_of_a_member_keep_grpc_from_waiting_for_minutes(shops, open_cluster):
    seen = []

    def connect(one, options):
        seen.append(dict(options))
        return grpc.insecure_channel(one.target, options)

    call_of(open_cluster(shops[0], connect=connect, options=()))()
    call_of(open_cluster(shops[0], connect=connect, options=IMPATIENT))()
    assert [one["grpc.max_reconnect_backoff_ms"] for one in seen] == [3_000, 50]


def test_the_channel_of_a_member_is_one_whose_connection_can_be_replaced(shops, open_cluster):
    channel = open_cluster(shops[0])
    call_of(channel)()
    inner = channel.members[0].channel
    assert type(inner) is ReconnectingChannel
    assert inner.replace("the test says so")
    assert call_of(channel)() == b"x"
    assert inner.number == 2
