"""One call on several members: the first good answer and no loser left, or the answers of all."""

import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from fixtures.clusters import instance
from fixtures.shop import UNARY_UNARY, Fail, Hang
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel import Kit, MethodPolicy, RetryPolicy
from rpcwheel.cluster import BroadcastFailed, BroadcastInvoker, ClusterPolicy, ForkingInvoker
from rpcwheel.errors import ConfigurationError
from rpcwheel.transport import ReconnectingChannel


def forked(channel, forks=2):
    return ForkingInvoker(channel, forks).unary_unary(UNARY_UNARY)


def broadcast(channel):
    return BroadcastInvoker(channel).unary_unary(UNARY_UNARY)


def total(shops):
    return sum(len(shop.calls) for shop in shops)


@pytest.fixture
def channels(shops):
    """A channel to each server."""
    channels = [ReconnectingChannel(shop.target) for shop in shops]
    yield channels
    for channel in channels:
        channel.close()


# Forking


def test_the_first_good_answer_wins_and_the_rest_are_cancelled(shops, open_cluster):
    hangs = [Hang(), Hang()]
    shops[0].then(hangs[0])
    shops[1].then(hangs[1])
    channel = open_cluster(*shops)
    assert forked(channel, 3)(b"x", timeout=WAIT_S) == b"x"
    assert wait_until(lambda: all(one.ended.is_set() for shop in shops for one in shop.calls))
    assert wait_until(lambda: channel.calls == 0)


def test_an_answer_that_is_an_error_is_waited_past(shops, open_cluster):
    shops[0].then(Fail("NOT_FOUND"))
    shops[1].then(Fail("INTERNAL"))
    shops[2].then(hang := Hang())
    channel, got = open_cluster(*shops), []
    thread = threading.Thread(target=lambda: got.append(forked(channel, 3)(b"x", timeout=WAIT_S)))
    thread.start()
    assert hang.begun.wait(WAIT_S)
    assert wait_until(lambda: total(shops) == 3 and channel.calls == 1)
    assert got == []
    shops[2].calls[0].ended.set()
    thread.join(WAIT_S)
    assert got == [b"x"]


def test_if_all_fail_the_last_error_is_the_callers(shops, open_cluster):
    for shop in shops:
        shop.then(Fail("NOT_FOUND", "no such order"))
    with pytest.raises(grpc.RpcError, match="no such order") as caught:
        forked(open_cluster(*shops), 3)(b"x", timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_the_deadline_holds(shops, open_cluster):
    for shop in shops:
        shop.then(Hang())
    with pytest.raises(grpc.RpcError) as caught:
        forked(open_cluster(*shops), 3)(b"x", timeout=0.2)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_two_are_called_by_default_and_others_the_next_time(shops, open_cluster):
    channel = open_cluster(*shops)
    call = forked(channel)
    call(b"x", timeout=WAIT_S)
    assert sorted(one.state for one in channel.members) == ["IDLE", "UP", "UP"]
    call(b"x", timeout=WAIT_S)
    assert [one.state for one in channel.members] == ["UP"] * 3


def test_a_fork_that_found_nobody_goes_elsewhere(shops, dead, open_cluster):
    channel = open_cluster(dead, shops[0])
    call = forked(channel, 1)
    assert [call(b"x", timeout=WAIT_S) for _ in range(3)] == [b"x"] * 3
    bad = next(one for one in channel.members if one.instance.port == dead)
    assert bad.state == "DOWN"


def test_no_fork_goes_to_an_instance_that_wants_no_calls_while_others_do(shops, open_cluster):
    channel = open_cluster()
    unwanted = instance(shops[1], weight=0), instance(shops[2], status="DRAINING")
    channel.update([instance(shops[0]), *unwanted])
    assert forked(channel, 3)(b"x", timeout=WAIT_S) == b"x"
    assert [len(shop.calls) for shop in shops] == [1, 0, 0]


def test_a_fork_waits_for_instances_too(shops, open_cluster):
    with pytest.raises(grpc.RpcError, match="known yet"):
        forked(open_cluster(policy=ClusterPolicy(wait=0.05), timer=None))(b"x")
    channel = open_cluster(policy=ClusterPolicy(wait=3600))
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(forked(channel), b"x")
        channel.update([instance(shops[0])])
        assert waiting.result(WAIT_S) == b"x"


def test_the_call_of_the_winner_is_given_with_its_answer(shops, open_cluster):
    answer, call = forked(open_cluster(*shops)).with_call(b"x", timeout=WAIT_S)
    assert (answer, call.code()) == (b"x", grpc.StatusCode.OK)


def test_channels_of_ones_own_are_taken_in_turn(shops, channels):
    call = forked(channels)
    for _ in range(3):
        assert call(b"x", timeout=WAIT_S) == b"x"
    assert all(channel.activity.last_write_ns is not None for channel in channels)


def test_with_wait_for_ready_no_fork_waits_at_a_member_that_is_away(shops, dead, open_cluster):
    channel = open_cluster(dead, shops[0])
    for _ in range(3):
        assert forked(channel, 1)(b"x", timeout=WAIT_S, wait_for_ready=True) == b"x"


def test_with_wait_for_ready_it_waits_for_the_first_server_that_is_there(shops, dead, open_cluster):
    shop = shops[0]
    shop.kill()
    channel = open_cluster(dead, shop, policy=ClusterPolicy(probe=0.02), timer=None)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(forked(channel), b"x", wait_for_ready=True)
        assert wait_until(lambda: all(one.state == "DOWN" for one in channel.members))
        shop.start()
        assert waiting.result(WAIT_S) == b"x"


def test_its_deadline_ends_the_wait_for_a_connection(dead, open_cluster):
    with pytest.raises(grpc.RpcError) as caught:
        forked(open_cluster(dead))(b"x", timeout=0.3, wait_for_ready=True)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_failure_of_a_server_is_not_waited_away(shops, open_cluster):
    channel = open_cluster(shops[0])
    shops[0].then(Fail("UNAVAILABLE", "my database is away"))
    with pytest.raises(grpc.RpcError) as caught:
        forked(channel)(b"x", timeout=WAIT_S, wait_for_ready=True)
    assert caught.value.details() == "my database is away"
    assert len(shops[0].calls) == 1


# Broadcast


def test_every_member_is_called_and_the_answers_come_by_target(shops, open_cluster):
    channel = open_cluster(*shops)
    channel.members[0].down("the test says so")
    answers = broadcast(channel)(b"x", timeout=WAIT_S)
    assert answers == {shop.target: b"x" for shop in shops}
    assert [len(shop.calls) for shop in shops] == [1, 1, 1]


def test_members_at_one_address_have_an_answer_each(shops, open_cluster):
    channel = open_cluster(shops[0], shops[1])
    twins = [instance(shops[0], id=name) for name in ("before", "now")]
    channel.update([*twins, instance(shops[1])])
    target = shops[0].target
    names = {target, f"{target} #2", shops[1].target}
    assert broadcast(channel)(b"x", timeout=WAIT_S) == dict.fromkeys(names, b"x")
    shops[0].then(Fail("INTERNAL"))
    with pytest.raises(BroadcastFailed, match="1 of 3 members failed") as caught:
        broadcast(channel)(b"x", timeout=WAIT_S)
    assert {*caught.value.answers, *caught.value.errors} == names


def test_all_at_once(shops, open_cluster):
    hangs = [Hang(), Hang(), Hang()]
    for shop, hang in zip(shops, hangs, strict=True):
        shop.then(hang)
    channel, got = open_cluster(*shops), []
    thread = threading.Thread(target=lambda: got.append(broadcast(channel)(b"x", timeout=WAIT_S)))
    thread.start()
    assert all(hang.begun.wait(WAIT_S) for hang in hangs)
    for shop in shops:
        shop.calls[0].ended.set()
    thread.join(WAIT_S)
    assert len(got[0]) == 3


def test_a_failure_of_any_is_raised_with_the_answers_of_the_others(shops, dead, open_cluster):
    shops[1].then(Fail("INTERNAL", "oops"))
    with pytest.raises(BroadcastFailed) as caught:
        broadcast(open_cluster(shops[0], shops[1], dead))(b"x", timeout=WAIT_S)
    error = caught.value
    assert error.answers == {shops[0].target: b"x"}
    codes = {target: one.code().name for target, one in error.errors.items()}
    assert codes == {shops[1].target: "INTERNAL", f"127.0.0.1:{dead}": "UNAVAILABLE"}


def test_without_members_nothing_is_broadcast(open_cluster):
    channel = open_cluster()
    channel.update([])
    with pytest.raises(grpc.RpcError, match=r"no instance of test\.Shop is known"):
        broadcast(channel)(b"x", timeout=WAIT_S)


def test_channels_of_ones_own_are_known_by_their_targets(shops, channels):
    with grpc.insecure_channel(shops[0].target) as bare:
        answers = broadcast([*channels, bare])(b"x", timeout=WAIT_S)
    assert set(answers) == {*(shop.target for shop in shops), f"dns:///{shops[0].target}"} or set(
        answers
    ) == {*(shop.target for shop in shops), f"{shops[0].target} #2"}


# What stands around them


def test_the_state_is_that_of_the_channel(shops, open_cluster, channels):
    states = []
    view = ForkingInvoker(open_cluster(shops[0]))
    view.subscribe(states.append)
    assert wait_until(lambda: states)
    view.unsubscribe(states.append)
    with pytest.raises(ConfigurationError, match="subscribe to each"):
        ForkingInvoker(channels).subscribe(states.append)
    ForkingInvoker(channels).unsubscribe(states.append)


def test_policies_and_interceptors_stand_in_front_of_it(shops, open_cluster):
    retry = RetryPolicy(retry_on={"INTERNAL"}, max_attempts=2, backoff=0.01)
    methods = {UNARY_UNARY: MethodPolicy(idempotent=True)}
    with Kit(retry=retry, methods=methods, timeout=WAIT_S) as kit:
        shops[0].then(Fail("INTERNAL"))
        channel = open_cluster(*shops)
        inner = BroadcastInvoker(channel)
        for front in (
            kit.intercept_channel(inner),
            grpc.intercept_channel(inner, *kit.client_interceptors()),
        ):
            answers = front.unary_unary(UNARY_UNARY)(b"x")
            assert answers == {shop.target: b"x" for shop in shops}
            assert kit.intercept_channel(ForkingInvoker(channel)).unary_unary(UNARY_UNARY)(b"x")


def test_behind_interceptors_of_grpc_it_fails_with_all_that_it_knows(shops, open_cluster):
    shops[0].then(Fail("INTERNAL"))
    with Kit(timeout=WAIT_S) as kit:
        inner = BroadcastInvoker(open_cluster(*shops))
        front = grpc.intercept_channel(inner, *kit.client_interceptors())
        with pytest.raises(BroadcastFailed) as caught:
            front.unary_unary(UNARY_UNARY)(b"x")
    assert len(caught.value.answers) == 2


def test_a_broadcast_that_may_wait_waits_for_all_members_at_once(shops, open_cluster):
    channel, got = open_cluster(*shops), []
    for shop in shops:
        shop.kill()
    call = broadcast(channel)
    options = {"timeout": 2 * WAIT_S, "wait_for_ready": True}
    thread = threading.Thread(target=lambda: got.append(call(b"x", **options)))
    thread.start()
    first = [shop for shop in shops if shop is not shops[1]]
    for shop in first:
        shop.start()
    assert wait_until(lambda: all(shop.calls for shop in first))  # one is away still
    shops[1].start()
    thread.join(2 * WAIT_S)
    assert got == [{shop.target: b"x" for shop in shops}]


def test_who_can_not_be_connected_is_gone_past_or_one_of_the_failures(shops, open_cluster, events):
    def connect(one, options):
        if one.id == "a":
            raise RuntimeError("no certificate")
        return grpc.insecure_channel(one.target, options)

    channel = open_cluster(connect=connect)
    channel.update([instance(1, id="a"), instance(shops[0], id="b")])
    with pytest.raises(BroadcastFailed, match="no certificate") as caught:
        BroadcastInvoker(channel).unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S)
    assert caught.value.answers == {shops[0].target: b"x"}
    assert forked(channel, 2)(b"x", timeout=WAIT_S) == b"x"
    assert wait_until(lambda: events)
    assert [event.reason for event in events] == ["connect: RuntimeError('no certificate')"]
