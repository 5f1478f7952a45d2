"""Members come and go while calls run, are down and come back; the picker chooses among them."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from fixtures.clusters import instance
from fixtures.grpc_servers import IMPATIENT
from fixtures.shop import UNARY_STREAM, UNARY_UNARY, Fail, Hang, Shop
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.cluster import ClusterPolicy, ConsistentHash
from rpcwheel.observe import CallbackFailed
from rpcwheel.observe.events import MemberDown, MemberUp
from rpcwheel.transport import ReconnectingChannel

PROBED = ClusterPolicy(probe=1.0)


def call_of(channel):
    method = channel.unary_unary(UNARY_UNARY)
    return lambda: method(b"x", timeout=WAIT_S)


def counts(shops):
    return [len(shop.calls) for shop in shops]


def hanging(shop, channel):
    """A call that this server does not answer."""
    shop.then(hang := Hang())
    running = channel.unary_unary(UNARY_UNARY).future(b"x")
    assert hang.begun.wait(WAIT_S)
    return running


# Coming and going


def test_a_member_has_no_connection_before_it_is_called(shops, open_cluster):
    channel = open_cluster(*shops)
    assert [one.state for one in channel.members] == ["IDLE"] * 3
    call_of(channel)()
    assert sorted(one.state for one in channel.members) == ["IDLE", "IDLE", "UP"]


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
    channel = open_cluster(shops[0])
    running = hanging(shops[0], channel)
    gone = channel.members[0]
    channel.update([instance(shops[1])])
    assert (gone.state, channel.calls, gone in channel.members) == ("DRAINING", 1, False)
    assert call_of(channel)() == b"x"
    shops[0].calls[0].ended.set()
    assert running.result(WAIT_S) == b"x"
    assert wait_until(lambda: (gone.state, channel.calls) == ("CLOSED", 0))


def test_when_their_time_is_over_they_end_with_the_reason(shops, open_cluster, timer):
    channel = open_cluster(shops[0], policy=ClusterPolicy(drain=7))
    running = hanging(shops[0], channel)
    name = channel.members[0].id
    channel.update([])
    timer.advance(7.1)
    error = running.exception(WAIT_S)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert f"channel drained: {name} is gone from test.Shop" in error.details()


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
    told, gate = [], threading.Barrier(4)

    def connect(one, options):
        gate.wait(WAIT_S)
        return grpc.insecure_channel(one.target, options)

    channel = open_cluster(shops[0], connect=connect, on_member=told.append)
    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(call_of(channel)) for _ in range(4)]
        assert [call.result(WAIT_S) for call in calls] == [b"x"] * 4
    assert told == [channel.members[0]]
    assert len({seen.peer for seen in shops[0].calls}) == 1


def test_who_is_told_of_members_may_fail(shops, open_cluster, events):
    def on_member(member):
        raise RuntimeError(member.id)

    channel = open_cluster(shops[0], on_member=on_member)
    assert call_of(channel)() == b"x"
    assert [type(event) for event in events] == [CallbackFailed]


def test_what_connect_raises_is_the_callers(shops, open_cluster):
    def connect(one, options):
        raise RuntimeError("no way")

    channel = open_cluster(shops[0], connect=connect)
    with pytest.raises(RuntimeError, match="no way"):
        call_of(channel)()


def test_a_rolling_restart_fails_no_call(shops, open_cluster):
    """Withdrawn, drained, killed, started elsewhere, published: as a publisher does it."""
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
    for place in (0, 1, 2, 0):
        assert wait_until(lambda place=place: shops[place].calls)
        old = shops[place]
        gone = next(one for one in channel.members if one.instance.port == old.port)
        channel.update([instance(one) for one in shops if one is not old])
        assert wait_until(lambda gone=gone: gone.state == "CLOSED")
        old.kill()
        shops[place] = Shop()
        channel.update([instance(one) for one in shops])
    over.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert failures == []


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
    assert inner.reconnect("the test says so")
    assert call_of(channel)() == b"x"
    assert inner.number == 2


# Who is called


def test_calls_are_spread_in_turn(shops, open_cluster):
    channel = open_cluster(*shops)
    unary, stream = channel.unary_unary(UNARY_UNARY), channel.unary_stream(UNARY_STREAM)
    for _ in range(6):
        unary(b"x", timeout=WAIT_S)
    assert counts(shops) == [2, 2, 2]
    for _ in range(6):
        list(stream(b"x", timeout=WAIT_S))
    assert counts(shops) == [4, 4, 4]


@pytest.mark.parametrize(
    ("first", "others"),
    [
        ({"weight": 0}, {}),
        ({"status": "DRAINING"}, {}),
        ({"zone": "far"}, {"zone": "near"}),
    ],
)
def test_instances_that_want_no_calls_get_none_until_the_others_are_down(
    shops, open_cluster, first, others
):
    channel = open_cluster(policy=ClusterPolicy(zone="near"))
    channel.update([instance(shops[0], **first), *(instance(one, **others) for one in shops[1:])])
    for _ in range(6):
        call_of(channel)()
    assert counts(shops) == [0, 3, 3]
    for member in channel.members:
        if member.instance.port != shops[0].port:
            member.down("the test says so")
    for _ in range(2):
        call_of(channel)()
    assert len(shops[0].calls) == 2


def test_a_key_in_the_metadata_goes_to_one_member(shops, open_cluster):
    channel = open_cluster(*shops, balance="consistent_hash:x-user")
    method = channel.unary_unary(UNARY_UNARY)
    for _ in range(6):
        method(b"x", timeout=WAIT_S, metadata=(("x-user", "7"),))
    assert sorted(counts(shops)) == [0, 0, 6]


def test_a_key_may_be_of_the_request(shops, open_cluster):
    channel = open_cluster(*shops, balance=ConsistentHash(lambda _, request, __: request))
    for _ in range(5):
        channel.unary_unary(UNARY_UNARY)(b"ab", timeout=WAIT_S)
        list(channel.unary_stream(UNARY_STREAM)(b"ab", timeout=WAIT_S))
    assert sorted(counts(shops)) == [0, 0, 10]


def test_busy_members_get_fewer_calls(shops, open_cluster):
    channel = open_cluster(*shops, balance="least_active")
    for shop in shops:
        shop.then(Hang())
    method = channel.unary_unary(UNARY_UNARY)
    running = [method.future(b"x") for _ in range(3)]
    assert wait_until(lambda: counts(shops) == [1, 1, 1])
    shops[1].calls[0].ended.set()
    for number in range(5):
        assert wait_until(lambda: channel.calls == 2)
        method(b"x", timeout=WAIT_S)
        assert counts(shops) == [1, 2 + number, 1]
    for call in running:
        call.cancel()


def test_a_young_member_gets_more_and_more_calls(shops, open_cluster, timer):
    channel = open_cluster(policy=ClusterPolicy(warmup=1000))
    channel.update([instance(shops[0]), instance(shops[1], started_at=time.time())])
    call = call_of(channel)
    for _ in range(50):
        call()
    assert len(shops[1].calls) <= 5

    def both_get_as_many():
        timer.advance(100)
        before = counts(shops)
        for _ in range(20):
            call()
        old, young, _ = (
            after - earlier for after, earlier in zip(counts(shops), before, strict=True)
        )
        return abs(old - young) <= 2

    assert wait_until(both_get_as_many)


# Down and up


def test_a_member_that_is_down_is_called_no_more(shops, dead, open_cluster, events):
    channel = open_cluster(dead, shops[0])
    call = call_of(channel)
    for _ in range(10):
        assert call() == b"x"
    bad = next(one for one in channel.members if one.instance.port == dead)
    assert (bad.state, bad.reason) == ("DOWN", "no connection")
    assert wait_until(lambda: events)
    assert events == [MemberDown("test.Shop", f"127.0.0.1:{dead}", "no connection")]


def test_it_is_called_again_once_it_answers_a_probe(shops, open_cluster, timer, events):
    channel = open_cluster(shops[0], shops[1], policy=PROBED)
    call = call_of(channel)
    for _ in range(2):
        call()
    shops[0].kill()
    member = next(one for one in channel.members if one.instance.port == shops[0].port)
    ready = grpc.ChannelConnectivity.READY
    assert wait_until(lambda: member.channel.get_state() is not ready)
    for _ in range(4):
        assert call() == b"x"
    assert member.state == "DOWN"
    shops[0].start()
    # UNIMPLEMENTED is an answer: this server has no health service.
    assert wait_until(lambda: (timer.advance(1.1), member.state != "DOWN")[1])
    assert wait_until(lambda: len(events) == 2)
    assert [type(event) for event in events] == [MemberDown, MemberUp]
    assert events[1].after_s >= 1.0
    before = len(shops[0].calls)
    for _ in range(4):
        call()
    assert len(shops[0].calls) == before + 2


class Sick(grpc.GenericRpcHandler):
    """Says NOT_SERVING until it is well, and echoes all else."""

    answer = b"\x08\x02"

    def service(self, details):
        if details.method.startswith("/grpc.health"):
            return grpc.unary_unary_rpc_method_handler(lambda *_: self.answer)
        return grpc.unary_unary_rpc_method_handler(lambda request, _: request)


def test_a_member_that_answers_that_it_does_not_serve_stays_down(timer, open_cluster):
    sick = Sick()
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool, handlers=[sick])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        channel = open_cluster(port, policy=PROBED)
        (member,) = channel.members
        member.down("the test says so")
        for probes in (1, 2):
            timer.advance(1.1)
            assert wait_until(lambda probes=probes: member.probes == probes)
            assert wait_until(lambda: timer.pending == 1)
            assert member.state == "DOWN"
        sick.answer = b"\x08\x01"
        timer.advance(1.1)
        assert wait_until(lambda: member.state != "DOWN")
        server.stop(None).wait()


def test_if_all_are_down_they_are_called_and_an_answer_brings_one_back(shops, open_cluster, events):
    channel = open_cluster(shops[0], shops[1])
    shops[0].then(Fail("NOT_FOUND"))
    shops[1].then(Fail("NOT_FOUND"))
    for member in channel.members:
        member.down("the test says so")
    with pytest.raises(grpc.RpcError, match="scripted"):
        call_of(channel)()
    assert sorted(one.state for one in channel.members) == ["DOWN", "UP"]
    assert wait_until(lambda: len(events) == 3)
    assert [type(event) for event in events] == [MemberDown, MemberDown, MemberUp]


def test_what_a_server_itself_says_is_the_callers_and_it_stays_up(shops, open_cluster, events):
    channel = open_cluster(shops[0])
    for code in ("NOT_FOUND", "UNAVAILABLE", "DEADLINE_EXCEEDED", "INTERNAL"):
        shops[0].then(Fail(code, "my database is away"))
        with pytest.raises(grpc.RpcError, match="my database is away") as caught:
            call_of(channel)()
        assert caught.value.code().name == code
    assert ([one.state for one in channel.members], events) == (["UP"], [])


def test_it_can_be_said_that_a_member_is_up(shops, open_cluster, timer, events):
    channel = open_cluster(shops[0])
    member = channel.members[0]
    member.down("the test says so")
    member.down("again")
    assert (member.state, member.reason, timer.pending) == ("DOWN", "the test says so", 1)
    member.up()
    member.up()
    assert (member.state, timer.pending) == ("IDLE", 0)
    assert [type(event) for event in events] == [MemberDown, MemberUp]


def test_who_was_published_by_a_new_process_is_asked_at_once(shops, open_cluster, timer):
    channel = open_cluster()
    channel.update([instance(shops[0], epoch="a"), instance(shops[1])])
    member = next(one for one in channel.members if one.instance.port == shops[0].port)
    member.down("the test says so")
    channel.update([instance(shops[0], epoch="b"), instance(shops[1])])
    assert wait_until(lambda: member.state == "UP")  # no time has passed
    assert timer.pending == 0


def test_no_probe_outlives_its_member(dead, shops, open_cluster, timer):
    channel = open_cluster(dead, shops[0])
    call = call_of(channel)
    call(), call()
    assert timer.pending == 1
    channel.update([instance(shops[0])])
    assert timer.pending == 0


def test_a_wait_object_that_raises_is_told_and_stands_for_a_second(
    shops, open_cluster, timer, events
):
    def wait(_):
        raise RuntimeError("no")

    channel = open_cluster(shops[0], policy=ClusterPolicy(probe=wait))
    channel.members[0].down("the test says so")
    assert wait_until(lambda: len(events) == 2)
    assert [type(event) for event in events] == [MemberDown, CallbackFailed]
    timer.advance(1.1)
    assert wait_until(lambda: channel.members[0].state == "UP")
