"""Calls that begin while no subchannel is READY."""

import gc
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from fixtures.balanced_channels import (
    counts,
    instance,
    refusing_port,
    subchannel_of,
    wait_until_ready,
)
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
from rpcwheel._concurrency import executor
from rpcwheel.balancer import RingHash
from rpcwheel.events import CallbackFailed, TaskFailed

IDLE, READY, FAILING = (
    grpc.ChannelConnectivity[name] for name in ("IDLE", "READY", "TRANSIENT_FAILURE")
)

NO_LIMIT = {"pick_timeout": 3600}


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
"""Every way to make a call of each kind and wait for its response."""


def failure(begin):
    with pytest.raises(grpc.RpcError) as caught:
        begin()
    return caught.value.code().name, caught.value.details()


def all_at_once(channel, then, **given):
    """Make every call on a thread of its own, do `then`, and return the responses or failures."""

    def end_of(call):
        begun.release()
        try:
            return call(channel, **given)
        except grpc.RpcError as error:
            return error.code().name, error.details()

    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(len(CALLS)) as threads:
        running = {name: threads.submit(end_of, call) for name, call in CALLS.items()}
        for _ in CALLS:
            assert begun.acquire(timeout=WAIT_S)
        then()
        return {name: call.result(WAIT_S) for name, call in running.items()}


def nothing():
    pass


# For instances


def test_calls_wait_until_instances_are_known(shops, open_balanced):
    channel = open_balanced(policy=NO_LIMIT)
    responses = all_at_once(channel, lambda: channel.update([instance(shops[0])]))
    assert responses == dict.fromkeys(CALLS, b"ab")


def test_calls_wait_no_longer_than_pick_timeout(open_balanced):
    channel = open_balanced(policy={"pick_timeout": 0.05})
    end = ("UNAVAILABLE", "no instance of test.Shop is known yet")
    assert all_at_once(channel, nothing, timeout=WAIT_S) == dict.fromkeys(CALLS, end)
    channel.report_error("the registry is away", wait=True)
    assert failure(lambda: CALLS["unary"](channel))[1].endswith(": the registry is away")
    at_once = open_balanced(policy={"pick_timeout": 0})
    assert all_at_once(at_once, nothing) == dict.fromkeys(CALLS, end)


def test_a_reported_error_ends_calls_that_wait_for_instances(open_balanced):
    channel = open_balanced(policy=NO_LIMIT)
    end = ("UNAVAILABLE", "no instance of test.Shop is known: the registry is away")
    ends = all_at_once(channel, lambda: channel.report_error("the registry is away"))
    assert ends == dict.fromkeys(CALLS, end)


def test_calls_fail_at_once_if_there_is_no_instance(open_balanced):
    channel = open_balanced(policy=NO_LIMIT)
    end = ("UNAVAILABLE", "no instance of test.Shop is known")
    ends = all_at_once(channel, lambda: channel.update([]))
    assert ends == dict.fromkeys(CALLS, end)


def test_with_wait_for_ready_calls_wait_for_an_instance(shops, open_balanced):
    channel = open_balanced(policy={"pick_timeout": 0})
    channel.update([])
    end = failure(lambda: CALLS["unary"](channel, timeout=0.1, wait_for_ready=True))
    assert end == ("DEADLINE_EXCEEDED", "no instance of test.Shop is known")
    update = lambda: channel.update([instance(shops[0])])  # noqa: E731
    responses = all_at_once(channel, update, wait_for_ready=True)
    assert responses == dict.fromkeys(CALLS, b"ab")


def test_the_deadline_of_a_call_ends_its_wait(open_balanced):
    channel = open_balanced(policy=NO_LIMIT)
    for given in ({"timeout": 0.05}, {"timeout": 0}, {"timeout": 0.05, "wait_for_ready": True}):
        ends = all_at_once(channel, nothing, **given)
        assert {code for code, _ in ends.values()} == {"DEADLINE_EXCEEDED"}


def test_the_wait_counts_towards_the_timeout(shops, open_balanced):
    channel = open_balanced(policy=NO_LIMIT)
    call = channel.unary_unary(UNARY_UNARY).future(b"x", timeout=90)
    with ThreadPoolExecutor(1) as threads:
        blocked = threads.submit(CALLS["unary"], channel, timeout=90)
        assert wait_until(lambda: channel._pool._blocked)
        begun_s = time.monotonic()
        time.sleep(0.3)
        waited_s = time.monotonic() - begun_s
        assert call.time_remaining() <= 90 - waited_s
        channel.update([instance(shops[0])])
        assert (call.result(), blocked.result()) == (b"x", b"ab")
    for seen in shops[0].calls:
        assert seen.time_remaining < 90 - 0.1  # gRPC rounds to tenths


# For a connection


def test_calls_wait_for_the_first_connection(shops, dead, open_balanced):
    for given in ({}, {"wait_for_ready": True}):
        responses = all_at_once(open_balanced(dead, shops[0]), nothing, **given)
        assert responses == dict.fromkeys(CALLS, b"ab")


def test_calls_to_servers_that_have_failed_end_at_once(open_balanced):
    with refusing_port() as first, refusing_port() as second:
        channel = open_balanced(first, second, policy=NO_LIMIT)
        ends = all_at_once(channel, nothing)
    for code, details in ends.values():
        assert code == "UNAVAILABLE"
        assert details.startswith("none of 2 servers of test.Shop can be reached")


def test_with_wait_for_ready_calls_wait_for_the_first_server_that_starts(
    shops, dead, open_balanced
):
    shop = shops[0]
    shop.kill()
    channel = open_balanced(dead, shop, policy={"pick_timeout": 0})

    def start():
        assert wait_until(lambda: all(one.state is FAILING for one in channel.subchannels))
        shop.start()

    responses = all_at_once(channel, start, wait_for_ready=True)
    assert responses == dict.fromkeys(CALLS, b"ab")


def test_the_deadline_of_a_call_with_wait_for_ready_ends_its_wait_for_a_server(dead, open_balanced):
    channel = open_balanced(dead)
    assert wait_until(
        lambda: (channel.get_state(try_to_connect=True), channel.get_state() is FAILING)[1]
    )
    ends = all_at_once(channel, nothing, timeout=0.3, wait_for_ready=True)
    assert {code for code, _ in ends.values()} == {"DEADLINE_EXCEEDED"}


def test_with_wait_for_ready_a_status_of_the_server_ends_a_call(shops, open_balanced):
    channel = open_balanced(shops[0])
    shops[0].then(*[Fail("UNAVAILABLE", "my database is away")] * len(CALLS))
    ends = all_at_once(channel, nothing, wait_for_ready=True)
    assert ends == dict.fromkeys(CALLS, ("UNAVAILABLE", "my database is away"))
    assert counts(shops) == [len(CALLS), 0, 0]


def test_a_server_that_accepts_connections_and_never_answers_gets_no_call(shops, open_balanced):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        alone = open_balanced(port)
        end = ("DEADLINE_EXCEEDED", "no connection to a server of test.Shop became ready in time")
        assert all_at_once(alone, nothing, timeout=0.05) == dict.fromkeys(CALLS, end)
        channel = open_balanced(port, shops[0])
        assert all_at_once(channel, nothing) == dict.fromkeys(CALLS, b"ab")


def test_calls_wait_on_while_the_instances_change(shops, dead, open_balanced):
    channel = open_balanced(dead, policy={"self_preservation": False})

    def change():
        assert wait_until(lambda: channel.get_state() is FAILING)
        channel.update([])
        channel.update([instance(shops[0])])

    responses = all_at_once(channel, change, wait_for_ready=True)
    assert responses == dict.fromkeys(CALLS, b"ab")


def test_a_call_waits_for_the_owner_of_its_key(shops, open_balanced):
    channel = open_balanced(*shops, lb_policy="ring_hash:x-user", policy=NO_LIMIT)
    given = {"metadata": (("x-user", "7"),)}
    assert all_at_once(channel, nothing, **given) == dict.fromkeys(CALLS, b"ab")
    assert sorted(counts(shops)) == [0, 0, len(CALLS)]


def test_states_are_read_less_often_the_longer_a_call_waits(open_balanced):
    read_at = []

    class Counting(RingHash):
        def prepare(self, subchannels, weights):
            def pick(*_):
                read_at.append(time.monotonic())

            return pick

    channel = open_balanced(1, lb_policy=Counting("x-user"), policy=NO_LIMIT)
    call = channel.unary_unary(UNARY_UNARY).future(b"x")
    assert wait_until(lambda: len(read_at) >= 60)
    assert read_at[59] - read_at[0] > 0.5  # 0.05 s apart in the end
    call.cancel()


# Calls that the caller holds

HELD = pytest.mark.parametrize("kind", ["future", "stream"])


def begin(channel, kind, **options):
    if kind == "future":
        return channel.unary_unary(UNARY_UNARY).future(b"ab", **options)
    return channel.unary_stream(UNARY_STREAM)(b"ab", **options)


def response(call, kind):
    return call.result(WAIT_S) if kind == "future" else b"".join(call)


@HELD
def test_a_future_or_stream_is_returned_at_once_and_begins_later(shops, open_balanced, kind):
    channel, called = open_balanced(policy=NO_LIMIT), []
    call = begin(channel, kind)
    assert not call.done()
    assert call.is_active()
    call.add_done_callback(called.append)
    assert call.add_callback(lambda: called.append(None))
    call.add_done_callback("no function".join)
    channel.update([instance(shops[0])])
    assert response(call, kind) == b"ab"
    assert call.code() is grpc.StatusCode.OK
    assert wait_until(lambda: len(called) == 2)
    assert call in called
    assert not call.add_callback(print)


@HELD
def test_a_future_or_stream_ends_with_its_wait(open_balanced, kind):
    call = begin(open_balanced(policy={"pick_timeout": 0.05}), kind)
    end = (grpc.StatusCode.UNAVAILABLE, "no instance of test.Shop is known yet")
    assert (call.code(), call.details()) == end
    assert call.initial_metadata() == call.trailing_metadata() == ()


@HELD
def test_a_future_or_stream_can_be_canceled_while_it_waits_and_while_it_runs(
    shops, open_balanced, kind
):
    channel = open_balanced(policy=NO_LIMIT)
    call = begin(channel, kind)
    assert call.cancel()
    assert not call.cancel()
    assert (call.cancelled(), call.code()) == (True, grpc.StatusCode.CANCELLED)
    shops[0].then(hang := Hang() if kind == "future" else Silent())
    call = begin(channel, kind)
    channel.update([instance(shops[0])])
    assert hang.begun.wait(WAIT_S)
    assert call.cancel()
    assert call.code() is grpc.StatusCode.CANCELLED
    assert wait_until(lambda: channel.calls == 0)
    assert len(shops[0].calls) == 1


@HELD
def test_a_dropped_future_or_stream_is_canceled(shops, open_balanced, kind):
    channel = open_balanced(policy=NO_LIMIT)
    begin(channel, kind)
    gc.collect()
    shops[0].then(hang := Hang() if kind == "future" else Silent())
    channel.update([instance(shops[0])])
    wait_until_ready(channel)
    call = begin(channel, kind)
    assert hang.begun.wait(WAIT_S)
    del call
    assert wait_until(lambda: (gc.collect(), channel.calls == 0)[1])
    assert wait_until(shops[0].calls[0].ended.is_set)
    assert len(shops[0].calls) == 1


def test_the_wait_for_a_result_may_have_a_timeout(open_balanced):
    call = begin(open_balanced(policy=NO_LIMIT), "future")
    with pytest.raises(grpc.FutureTimeoutError):
        call.result(timeout=0.01)


def test_an_exception_of_a_key_function_ends_only_its_call(shops, open_balanced):
    def key(method, request, metadata):
        if metadata:
            raise ValueError("no user")
        return request

    channel = open_balanced(lb_policy=RingHash(key), policy=NO_LIMIT)
    bad = begin(channel, "future", metadata=(("key", "x"),))
    good = begin(channel, "future")
    with ThreadPoolExecutor(1) as threads:
        blocked = threads.submit(CALLS["unary"], channel, metadata=(("key", "x"),))
        channel.update([instance(shops[0])])
        assert response(good, "future") == b"ab"
        for call in (bad, blocked):
            with pytest.raises(ValueError, match="no user"):
                call.result(WAIT_S)
    assert bad.code() is grpc.StatusCode.INTERNAL


def test_a_picker_runs_without_the_lock_of_the_channel(shops, open_balanced):
    free = []

    def key(*_):
        thread = threading.Thread(target=lambda: free.append(channel.update([instance(shops[0])])))
        thread.start()
        thread.join(WAIT_S)
        return "k"

    channel = open_balanced(lb_policy=RingHash(key), policy=NO_LIMIT)
    held = begin(channel, "future")
    with ThreadPoolExecutor(1) as threads:
        blocked = threads.submit(CALLS["unary"], channel)
        channel.update([instance(shops[0])])
        assert (held.result(WAIT_S), blocked.result(WAIT_S)) == (b"ab", b"ab")
    assert free


def test_a_callback_may_call_the_channel(shops, open_balanced):
    """User code runs without the lock of the channel, so it may make calls that wait."""
    made = []

    def on_subchannel(subchannel):
        made.append(channel.unary_unary(UNARY_UNARY).future(b"x"))
        subchannel.mark_unhealthy("the test")
        subchannel.mark_healthy()
        channel.update([instance(shops[0]), instance(shops[1])])

    channel = open_balanced(shops[0], on_subchannel=on_subchannel)
    assert CALLS["unary"](channel) == b"ab"
    assert wait_until(lambda: len(made) == 2)
    assert [call.result(WAIT_S) for call in made] == [b"x", b"x"]


def test_a_call_that_waits_sees_that_a_server_returns(shops, open_balanced):
    channel = open_balanced(shops[0], policy=NO_LIMIT)
    wait_until_ready(channel)
    shops[0].kill()
    assert wait_until(lambda: subchannel_of(channel, shops[0]).state is not READY)
    held = begin(channel, "stream", wait_for_ready=True)
    shops[0].start()
    assert response(held, "stream") == b"ab"


# If something is missing


def test_blocked_calls_need_no_worker(shops, open_balanced, monkeypatch):
    def start(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(executor._Thread, "start", start)
    assert CALLS["unary"](open_balanced(shops[0])) == b"ab"


def test_calls_wait_on_after_user_code_raised_system_exit(shops, open_balanced, events):
    errors = [SystemExit()]

    def connect(one, options):
        if errors:
            raise errors.pop()
        return grpc.insecure_channel(one.target, options)

    channel = open_balanced(connect=connect)
    call = begin(channel, "future", wait_for_ready=True)
    channel.update([instance(shops[0])])
    assert call.result(WAIT_S) == b"ab"
    assert [type(event) for event in events] == [CallbackFailed, TaskFailed]
