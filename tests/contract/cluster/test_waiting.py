"""While there is nobody to call, a call waits: for a change, and no longer than it may."""

import gc
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from fixtures.clusters import instance
from fixtures.shop import (
    STREAM_STREAM,
    STREAM_UNARY,
    UNARY_STREAM,
    UNARY_UNARY,
    Fail,
    Hang,
    Silent,
)
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.cluster import ClusterPolicy, ConsistentHash

WITHOUT_LIMIT = ClusterPolicy(wait=3600)


def requests():
    return iter([b"a", b"b"])


CALLS = {
    "unary": lambda channel, **given: channel.unary_unary(UNARY_UNARY)(b"ab", **given),
    "unary with_call": lambda channel, **given: channel.unary_unary(UNARY_UNARY).with_call(
        b"ab", **given
    )[0],
    "unary future": lambda channel, **given: (
        channel.unary_unary(UNARY_UNARY).future(b"ab", **given).result()
    ),
    "unary_stream": lambda channel, **given: b"".join(
        channel.unary_stream(UNARY_STREAM)(b"ab", **given)
    ),
    "stream_unary": lambda channel, **given: channel.stream_unary(STREAM_UNARY)(
        requests(), **given
    ),
    "stream_unary with_call": lambda channel, **given: channel.stream_unary(STREAM_UNARY).with_call(
        requests(), **given
    )[0],
    "stream_unary future": lambda channel, **given: (
        channel.stream_unary(STREAM_UNARY).future(requests(), **given).result()
    ),
    "stream_stream": lambda channel, **given: b"".join(
        channel.stream_stream(STREAM_STREAM)(requests(), **given)
    ),
}
"""Every way to make a call of each kind and wait for its answer."""


def failure(begin):
    with pytest.raises(grpc.RpcError) as caught:
        begin()
    return caught.value.code().name, caught.value.details()


ONE_REQUEST = {name: call for name, call in CALLS.items() if name.startswith("unary")}


def all_at_once(channel, then, calls=CALLS, **given):
    """Make every call on a thread of its own, do `then`, and give the answers or failures."""

    def end_of(call):
        begun.release()
        try:
            return call(channel, **given)
        except grpc.RpcError as error:
            return error.code().name, error.details()

    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(len(calls)) as threads:
        running = {name: threads.submit(end_of, call) for name, call in calls.items()}
        for _ in calls:
            assert begun.acquire(timeout=WAIT_S)
        then()
        return {name: call.result(WAIT_S) for name, call in running.items()}


# For an instance


def test_calls_wait_until_instances_are_known(shops, open_cluster):
    channel = open_cluster(policy=WITHOUT_LIMIT)
    answers = all_at_once(channel, lambda: channel.update([instance(shops[0])]))
    assert answers == dict.fromkeys(CALLS, b"ab")


def test_they_wait_no_longer_than_the_policy_says(open_cluster):
    channel = open_cluster(policy=ClusterPolicy(wait=0.05), timer=None)
    said = ("UNAVAILABLE", "no instance of test.Shop is known yet")
    assert all_at_once(channel, lambda: None) == dict.fromkeys(CALLS, said)


def test_they_end_when_nothing_can_be_known(open_cluster):
    channel = open_cluster(policy=WITHOUT_LIMIT)
    said = ("UNAVAILABLE", "no instance of test.Shop is known: the registry is away")
    ends = all_at_once(channel, lambda: channel.fail("the registry is away"))
    assert ends == dict.fromkeys(CALLS, said)


def test_they_end_at_once_if_there_is_no_instance(open_cluster):
    channel = open_cluster(policy=WITHOUT_LIMIT)
    channel.update([])
    said = ("UNAVAILABLE", "no instance of test.Shop is known")
    assert all_at_once(channel, lambda: None) == dict.fromkeys(CALLS, said)


def test_with_wait_for_ready_they_wait_for_an_instance_nevertheless(shops, open_cluster):
    channel = open_cluster(policy=ClusterPolicy(wait=0.01), timer=None)
    channel.update([])
    method = channel.unary_unary(UNARY_UNARY)
    said = failure(lambda: method(b"x", timeout=0.1, wait_for_ready=True))
    assert said == ("DEADLINE_EXCEEDED", "no instance of test.Shop is known")
    update = lambda: channel.update([instance(shops[0])])  # noqa: E731
    answers = all_at_once(channel, update, wait_for_ready=True)
    assert answers == dict.fromkeys(CALLS, b"ab")


def test_their_own_deadline_ends_the_wait(open_cluster):
    channel = open_cluster(policy=WITHOUT_LIMIT, timer=None)
    ends = all_at_once(channel, lambda: None, timeout=0.05)
    assert {code for code, _ in ends.values()} == {"DEADLINE_EXCEEDED"}


def test_the_time_that_they_waited_is_taken_from_their_timeout(shops, open_cluster):
    channel = open_cluster(policy=WITHOUT_LIMIT)
    call = channel.unary_unary(UNARY_UNARY).future(b"x", timeout=90)
    begun = time.monotonic()
    time.sleep(0.3)
    waited = time.monotonic() - begun
    assert call.time_remaining() <= 90 - waited
    channel.update([instance(shops[0])])
    call.result()
    assert shops[0].calls[0].time_remaining <= 90 - waited + 0.15  # gRPC rounds to tenths


# A call that its caller holds

HELD = pytest.mark.parametrize("kind", ["future", "stream"])


def begin(channel, kind, **options):
    if kind == "future":
        return channel.unary_unary(UNARY_UNARY).future(b"ab", **options)
    return channel.unary_stream(UNARY_STREAM)(b"ab", **options)


def answer(call, kind):
    return call.result(WAIT_S) if kind == "future" else b"".join(call)


@HELD
def test_a_held_call_is_given_at_once_and_begins_when_instances_are_known(
    shops, open_cluster, timer, kind
):
    channel, told = open_cluster(policy=WITHOUT_LIMIT), []
    call = begin(channel, kind)
    assert not call.done()
    assert timer.pending == 1
    call.add_done_callback(told.append)
    assert call.add_callback(lambda: told.append(None))
    call.add_done_callback("no function".join)
    channel.update([instance(shops[0])])
    assert answer(call, kind) == b"ab"
    assert (call.code(), timer.pending) == (grpc.StatusCode.OK, 0)
    assert wait_until(lambda: len(told) == 2)
    assert call in told
    assert not call.add_callback(print)


@HELD
def test_a_held_call_ends_with_its_wait_or_its_channel(open_cluster, timer, kind):
    call = begin(open_cluster(policy=ClusterPolicy(wait=7)), kind)
    timer.advance(7.1)
    said = (grpc.StatusCode.UNAVAILABLE, "no instance of test.Shop is known yet")
    assert (call.code(), call.details()) == said
    channel = open_cluster(policy=WITHOUT_LIMIT)
    call = begin(channel, kind)
    channel.close()
    assert (call.code(), call.cancelled()) == (grpc.StatusCode.CANCELLED, True)
    assert timer.pending == 0


@HELD
def test_a_held_call_can_be_cancelled_while_it_waits_and_while_it_runs(
    shops, open_cluster, timer, kind
):
    channel = open_cluster(policy=WITHOUT_LIMIT)
    call = begin(channel, kind)
    assert call.cancel()
    assert not call.cancel()
    assert (call.cancelled(), call.code()) == (True, grpc.StatusCode.CANCELLED)
    assert timer.pending == 0
    shops[0].then(hang := Hang() if kind == "future" else Silent())
    call = begin(channel, kind)
    channel.update([instance(shops[0])])
    assert hang.begun.wait(WAIT_S)
    assert call.cancel()
    assert call.code() is grpc.StatusCode.CANCELLED
    assert wait_until(lambda: channel.calls == 0)
    assert len(shops[0].calls) == 1


@HELD
def test_a_held_call_that_is_dropped_is_cancelled(shops, open_cluster, timer, kind):
    channel = open_cluster(policy=WITHOUT_LIMIT)
    begin(channel, kind)
    assert wait_until(lambda: (gc.collect(), timer.pending == 0)[1])
    shops[0].then(hang := Hang() if kind == "future" else Silent())
    channel.update([instance(shops[0])])
    call = begin(channel, kind)
    assert hang.begun.wait(WAIT_S)
    del call
    assert wait_until(lambda: (gc.collect(), channel.calls == 0)[1])
    assert wait_until(shops[0].calls[0].ended.is_set)


def test_waiting_for_a_result_may_have_an_end(open_cluster):
    call = begin(open_cluster(policy=WITHOUT_LIMIT), "future")
    with pytest.raises(grpc.FutureTimeoutError):
        call.result(timeout=0.01)


def test_what_a_key_raises_for_a_call_that_waited_is_that_callers_alone(shops, open_cluster, timer):
    def key(method, request, metadata):
        if metadata:
            raise ValueError("no user")
        return request

    channel = open_cluster(balance=ConsistentHash(key), policy=WITHOUT_LIMIT)
    bad = begin(channel, "future", metadata=(("key", "x"),))
    good = begin(channel, "future")
    channel.update([instance(shops[0])])
    assert answer(good, "future") == b"ab"
    with pytest.raises(ValueError, match="no user"):
        bad.result(WAIT_S)
    assert bad.code() is grpc.StatusCode.INTERNAL
    assert timer.pending == 0


def test_a_picker_is_not_asked_under_the_lock_of_the_channel(shops, open_cluster):
    free = []

    def key(*_):
        thread = threading.Thread(target=lambda: free.append(channel.pick(0) == ()))
        thread.start()
        thread.join(WAIT_S)
        return "k"

    channel = open_cluster(balance=ConsistentHash(key), policy=WITHOUT_LIMIT)
    held = begin(channel, "future")
    with ThreadPoolExecutor(1) as threads:
        blocked = threads.submit(channel.unary_unary(UNARY_UNARY), b"y")
        channel.update([instance(shops[0])])
        assert (held.result(WAIT_S), blocked.result(WAIT_S)) == (b"ab", b"y")
    assert free
    assert all(free)


# For a connection


def test_with_wait_for_ready_no_call_waits_at_a_member_that_is_away(shops, dead, open_cluster):
    channel = open_cluster(dead, shops[0])
    for _ in range(2):
        answers = all_at_once(channel, lambda: None, wait_for_ready=True)
        assert answers == dict.fromkeys(CALLS, b"ab")


def test_with_wait_for_ready_calls_wait_for_the_first_server_that_is_there(
    shops, dead, open_cluster
):
    shop = shops[0]
    shop.kill()
    channel = open_cluster(dead, shop, policy=ClusterPolicy(probe=0.02), timer=None)

    def start():
        assert wait_until(lambda: all(one.state == "DOWN" for one in channel.members))
        shop.start()

    # Not those with a stream of requests: gRPC may have read some when the server came up, and then
    # the call ends with the failure of the connection that was tried before.
    answers = all_at_once(channel, start, ONE_REQUEST, wait_for_ready=True)
    assert answers == dict.fromkeys(ONE_REQUEST, b"ab")


def test_their_deadline_ends_the_wait_for_a_connection(dead, open_cluster):
    ends = all_at_once(
        open_cluster(dead, timer=None), lambda: None, timeout=0.3, wait_for_ready=True
    )
    assert {code for code, _ in ends.values()} <= {"DEADLINE_EXCEEDED", "UNAVAILABLE"}
    assert ends["unary"][0] == "DEADLINE_EXCEEDED"


def test_with_wait_for_ready_a_status_of_a_server_is_not_waited_away(shops, open_cluster):
    channel = open_cluster(shops[0])
    for kind in ("future", "stream"):
        shops[0].then(Fail("UNAVAILABLE", "my database is away"))
        call = begin(channel, kind, wait_for_ready=True)
        assert call.details() == "my database is away"
    assert len(shops[0].calls) == 2


def test_a_held_call_waits_on_where_the_last_instance_goes_meanwhile(
    shops, dead, open_cluster, timer
):
    channel = open_cluster(dead, policy=ClusterPolicy(probe=3600.0))
    calls = {kind: begin(channel, kind, wait_for_ready=True) for kind in ("future", "stream")}
    assert wait_until(lambda: channel.members[0].state == "DOWN")
    channel.update([])
    timer.advance(10)
    channel.update([instance(shops[0])])
    assert {kind: answer(call, kind) for kind, call in calls.items()} == dict.fromkeys(calls, b"ab")


def test_short_timeouts_find_a_host_that_never_answers(open_cluster, timer, events):
    """One call of little time does not prove that there is no connection; many do."""
    with socket.create_server(("127.0.0.1", 0)) as slow:  # which never says that it is there
        channel = open_cluster(slow.getsockname()[1], policy=ClusterPolicy(probe=1000))
        for state in ("UP", "UP", "DOWN"):
            timer.advance(0.6)
            said = failure(lambda: channel.unary_unary(UNARY_UNARY)(b"x", timeout=0.1))
            assert said[0] == "DEADLINE_EXCEEDED"
            assert wait_until(lambda state=state: channel.members[0].state == state)
    assert wait_until(lambda: events)
    assert [event.reason for event in events] == ["DEADLINE_EXCEEDED: no connection"]
