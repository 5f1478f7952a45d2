"""A call that its caller holds waits for members and goes on to another one, unseen."""

import gc
import threading
import time

import grpc
import pytest

from fixtures.clusters import instance
from fixtures.shop import UNARY_STREAM, UNARY_UNARY, Hang, Silent
from fixtures.waiting import wait_until
from rpcwheel._grpc.held import HeldCall
from rpcwheel.cluster import ClusterPolicy

PATIENT = ClusterPolicy(wait=3600)


def begin(channel, name="future", **options):
    options = {"timeout": 20} | options
    if name == "future":
        return channel.unary_unary(UNARY_UNARY).future(b"ab", **options)
    return channel.unary_stream(UNARY_STREAM)(b"ab", **options)


def answer(call, name):
    return call.result() if name == "future" else b"".join(call)


BOTH = pytest.mark.parametrize("name", ["future", "stream"])


@BOTH
def test_it_is_given_at_once_and_begins_when_members_are_known(shops, open_cluster, timer, name):
    channel = open_cluster(policy=PATIENT)
    began = time.monotonic()
    call = begin(channel, name)
    assert time.monotonic() - began < 5
    assert not call.done()
    assert timer.pending == 1
    channel.update([instance(shops[0])])
    assert answer(call, name) == b"ab"
    assert (call.code(), timer.pending) == (grpc.StatusCode.OK, 0)


@BOTH
def test_it_goes_past_those_that_are_away(shops, dead, open_cluster, name):
    for _ in range(4):
        channel = open_cluster(dead, shops[0])
        assert [answer(begin(channel, name), name) for _ in range(2)] == [b"ab", b"ab"]


@BOTH
def test_on_a_connected_member_it_is_grpcs_own(shops, open_cluster, name):
    channel = open_cluster(shops[0])
    first = begin(channel, name)
    assert isinstance(first, HeldCall)
    answer(first, name)
    second = begin(channel, name)
    assert not isinstance(second, HeldCall)
    answer(second, name)


@BOTH
def test_it_waits_no_longer_than_the_policy_says(open_cluster, timer, name):
    call = begin(open_cluster(policy=ClusterPolicy(wait=7)), name)
    timer.advance(7.1)
    assert (call.code(), call.details()) == (
        grpc.StatusCode.UNAVAILABLE,
        "no instance of test.Shop is known yet",
    )


@BOTH
def test_it_ends_when_nothing_can_be_known_or_there_is_nobody(open_cluster, timer, name):
    channel = open_cluster(policy=PATIENT)
    call = begin(channel, name)
    channel.fail("the registry is away")
    assert call.details() == "no instance of test.Shop is known: the registry is away"
    channel.update([])
    assert begin(channel, name).code() is grpc.StatusCode.UNAVAILABLE
    waits = begin(channel, name, wait_for_ready=True)
    assert not waits.done()
    waits.cancel()
    assert timer.pending == 0


@BOTH
def test_it_ends_with_its_channel(open_cluster, timer, name):
    channel = open_cluster(policy=PATIENT)
    call = begin(channel, name)
    channel.close()
    assert (call.code(), call.cancelled()) == (grpc.StatusCode.CANCELLED, True)
    assert timer.pending == 0


@BOTH
def test_it_can_be_cancelled_while_it_waits(shops, open_cluster, timer, name):
    channel = open_cluster(policy=PATIENT)
    call = begin(channel, name)
    assert call.cancel()
    assert not call.cancel()
    assert (call.cancelled(), call.code()) == (True, grpc.StatusCode.CANCELLED)
    assert timer.pending == 0
    channel.update([instance(shops[0])])
    assert shops[0].calls == []


@BOTH
def test_it_can_be_cancelled_while_it_runs(shops, open_cluster, name):
    shops[0].then(hang := Hang() if name == "future" else Silent())
    channel = open_cluster(shops[0])
    call = begin(channel, name)
    assert hang.begun.wait(20)
    assert call.cancel()
    assert call.code() is grpc.StatusCode.CANCELLED
    assert wait_until(lambda: channel.calls == 0)


@BOTH
def test_one_that_is_dropped_is_cancelled(shops, open_cluster, timer, name):
    channel = open_cluster(policy=PATIENT)
    begin(channel, name)
    gc.collect()
    assert timer.pending == 0
    channel.update([instance(shops[0])])
    shops[0].then(hang := Hang() if name == "future" else Silent())
    call = begin(channel, name)
    assert hang.begun.wait(20)
    del call
    gc.collect()
    assert wait_until(lambda: channel.calls == 0)
    assert wait_until(shops[0].calls[0].ended.is_set)


@BOTH
def test_its_end_is_told_once_on_a_worker(shops, open_cluster, name):
    channel, told = open_cluster(policy=PATIENT), []
    call = begin(channel, name)
    call.add_done_callback(lambda one: told.append((one, threading.current_thread().name)))
    assert call.add_callback(lambda: told.append(None))
    call.add_done_callback("no function".join)
    channel.update([instance(shops[0])])
    assert answer(call, name) == b"ab"
    assert wait_until(lambda: len(told) == 2)
    assert any(one and one[0] is call and "worker" in one[1] for one in told)
    assert not call.add_callback(print)


def test_its_first_metadata_may_be_waited_for(shops, dead, open_cluster):
    for _ in range(3):
        call = begin(open_cluster(dead, shops[0]))
        assert call.initial_metadata() == ()
        assert call.result() == b"ab"


def test_its_time_is_counted_from_its_begin(shops, open_cluster):
    channel = open_cluster(policy=PATIENT)
    call = begin(channel)
    time.sleep(0.5)
    assert call.time_remaining() <= 19.5
    channel.update([instance(shops[0])])
    call.result()
    assert shops[0].calls[0].time_remaining <= 19.6


def test_waiting_for_a_result_may_have_an_end(open_cluster):
    call = begin(open_cluster(policy=PATIENT))
    with pytest.raises(grpc.FutureTimeoutError):
        call.result(timeout=0.01)


def test_what_connect_raises_is_the_callers(open_cluster):
    def connect(one, options):
        raise RuntimeError("no way")

    channel = open_cluster(policy=PATIENT, connect=connect)
    call = begin(channel)
    channel.update([instance(1)])
    with pytest.raises(RuntimeError, match="no way"):
        call.result(20)
    with pytest.raises(RuntimeError, match="no way"):
        begin(channel)


def test_a_stream_that_is_made_to_be_read_by_one_thread_is_grpcs_own_from_its_first_try(
    shops, open_cluster
):
    options = [(grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1)]
    channel = open_cluster(shops[0], options=options)
    for _ in range(2):
        assert b"".join(begin(channel, "stream")) == b"ab"
    assert wait_until(lambda: gc.collect() is None or channel.calls == 0)
