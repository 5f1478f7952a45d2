"""One call on several members: the first good answer and no loser left, or the answers of all."""

import threading

import grpc
import pytest

from fixtures.clusters import instance
from fixtures.shop import UNARY_STREAM, UNARY_UNARY, Fail, Hang
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel import Kit, MethodPolicy, RetryPolicy
from rpcwheel.channel import ReconnectingChannel
from rpcwheel.cluster import BroadcastFailed, BroadcastInvoker, ClusterPolicy, ForkingInvoker
from rpcwheel.errors import ConfigurationError


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
    assert hang.begun.wait(20)
    assert wait_until(lambda: total(shops) == 3 and channel.calls == 1)
    assert got == []
    shops[2].calls[0].ended.set()
    thread.join(20)
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
    assert sum(one.link is not None for one in channel.members) == 2
    call(b"x", timeout=WAIT_S)
    assert all(one.link is not None for one in channel.members)


def test_a_fork_that_found_nobody_goes_elsewhere(shops, dead, open_cluster):
    channel = open_cluster(dead, shops[0])
    call = forked(channel, 1)
    assert [call(b"x", timeout=WAIT_S) for _ in range(3)] == [b"x"] * 3
    bad = next(one for one in channel.members if one.instance.port == dead)
    assert bad.state == "DOWN"


@pytest.mark.parametrize("left_out", [{"weight": 0}, {"status": "DRAINING"}])
def test_no_fork_goes_to_who_wants_no_calls_while_others_do(shops, open_cluster, left_out):
    channel = open_cluster(shops[0])
    channel.update([instance(shops[0]), instance(shops[1], **left_out)])
    assert forked(channel)(b"x", timeout=WAIT_S) == b"x"
    assert [one.link is not None for one in channel.members].count(True) == 1
    assert not shops[1].calls


def test_more_forks_than_members_are_all_members(shops, open_cluster):
    assert forked(open_cluster(shops[0]), 9)(b"x", timeout=WAIT_S) == b"x"
    assert total(shops) == 1


def test_a_fork_waits_for_members_too(shops, open_cluster):
    channel = open_cluster(policy=ClusterPolicy(wait=0.05))
    with pytest.raises(grpc.RpcError, match="known yet"):
        forked(channel)(b"x", timeout=WAIT_S)
    threading.Timer(0.01, lambda: channel.update([instance(shops[0])])).start()
    assert forked(open_cluster(shops[0]))(b"x", timeout=WAIT_S) == b"x"


def test_the_call_of_the_winner_is_given_with_its_answer(shops, open_cluster):
    answer, call = forked(open_cluster(*shops)).with_call(b"x", timeout=WAIT_S)
    assert (answer, call.code()) == (b"x", grpc.StatusCode.OK)


def test_channels_of_ones_own_are_taken_in_turn(shops, channels):
    call = forked(channels)
    for _ in range(3):
        assert call(b"x", timeout=WAIT_S) == b"x"
    assert all(channel.traffic.last_write_ns is not None for channel in channels)


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
    assert all(hang.begun.wait(20) for hang in hangs)
    for shop in shops:
        shop.calls[0].ended.set()
    thread.join(20)
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


def test_it_may_stand_behind_interceptors(shops, open_cluster):
    class Note(grpc.UnaryUnaryClientInterceptor):
        def intercept_unary_unary(self, continuation, details, request):
            return continuation(details, request)

    channel = grpc.intercept_channel(BroadcastInvoker(open_cluster(*shops)), Note())
    assert len(channel.unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S)) == 3


# What they refuse


@pytest.mark.parametrize("view", [ForkingInvoker, BroadcastInvoker])
def test_other_kinds_of_call_are_refused_when_they_are_called(shops, open_cluster, view):
    channel = open_cluster(shops[0])
    with view(channel) as invoker:
        for kind in ("unary_stream", "stream_unary", "stream_stream"):
            method = getattr(invoker, kind)(UNARY_STREAM, None, None, _registered_method=True)
            with pytest.raises(ConfigurationError, match="is for unary calls"):
                method(b"x", timeout=1)
        with pytest.raises(ConfigurationError, match=r"\.future\(\)"):
            invoker.unary_unary(UNARY_UNARY).future(b"x")
    assert not channel.closed


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
    retry = RetryPolicy(on={"INTERNAL"}, attempts=2, wait=0.01)
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


def test_a_channel_whose_members_are_hidden_by_interceptors_is_refused_with_the_way_out(
    shops, open_cluster
):
    with Kit(timeout=WAIT_S) as kit:
        for view in (BroadcastInvoker, ForkingInvoker):
            with pytest.raises(TypeError, match=r"rpcwheel\.channel\(url\), and put .* in front"):
                view(kit.intercept_channel(open_cluster(shops[0])))


@pytest.mark.parametrize(
    ("channel", "forks", "error"),
    [
        ("127.0.0.1:1", 2, TypeError),
        (["127.0.0.1:1"], 2, TypeError),
        ([], 2, ConfigurationError),
    ],
)
def test_wrong_channels_are_refused(channel, forks, error):
    with pytest.raises(error, match="channel"):
        ForkingInvoker(channel, forks)


@pytest.mark.parametrize(("forks", "error"), [(0, ConfigurationError), ("2", TypeError)])
def test_forks_are_one_or_more(channels, forks, error):
    with pytest.raises(error, match="forks"):
        ForkingInvoker(channels, forks)


@pytest.mark.parametrize("last", [0, 1, 2])
def test_a_broadcast_that_may_wait_waits_for_all_members_at_once(shops, open_cluster, last):
    channel, got = open_cluster(*shops), []
    for shop in shops:
        shop.kill()
    call = broadcast(channel)
    options = {"timeout": 60, "wait_for_ready": True}
    thread = threading.Thread(target=lambda: got.append(call(b"x", **options)))
    thread.start()
    first = [shop for shop in shops if shop is not shops[last]]
    for shop in first:
        shop.start()
    assert wait_until(lambda: all(shop.calls for shop in first))  # one is away still
    shops[last].start()
    thread.join(60)
    assert got == [{shop.target: b"x" for shop in shops}]
