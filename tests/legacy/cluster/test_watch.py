"""The state of a channel of many members is told to its subscribers, without a thread for each."""

import threading

import grpc

from fixtures.clusters import instance
from fixtures.shop import UNARY_UNARY
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.observe import ListenerFailed

READY = grpc.ChannelConnectivity.READY
IDLE = grpc.ChannelConnectivity.IDLE
CONNECTING = grpc.ChannelConnectivity.CONNECTING
FAILING = grpc.ChannelConnectivity.TRANSIENT_FAILURE


def test_a_subscriber_is_told_the_state_and_each_change(shops, open_cluster, timer):
    channel, states = open_cluster(), []
    channel.subscribe(states.append)
    assert wait_until(lambda: states == [CONNECTING])
    channel.update([instance(shops[0])])
    assert wait_until(lambda: states == [CONNECTING, IDLE])
    channel.unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S)
    timer.advance(0.3)
    assert wait_until(lambda: states == [CONNECTING, IDLE, READY])
    channel.update([])
    assert wait_until(lambda: states[-1] is FAILING)
    channel.unsubscribe(states.append)
    assert wait_until(lambda: timer.pending == 0)


def test_who_waits_for_the_first_connection_gets_it(shops, dead, open_cluster):
    channel = open_cluster(dead, shops[0], timer=None)
    grpc.channel_ready_future(channel).result(timeout=WAIT_S)
    assert channel.get_state() is READY


def test_subscribers_cost_no_thread(shops, open_cluster, timer):
    channel = open_cluster(*shops)
    channel.get_state(try_to_connect=True)
    assert wait_until(lambda: channel.get_state() is READY)
    before = threading.active_count()
    told = [[] for _ in range(5)]
    callbacks = [one.append for one in told]
    for callback in callbacks:
        channel.subscribe(callback)
    assert wait_until(lambda: all(told))
    assert threading.active_count() <= before + 1  # a worker, at most
    for callback in callbacks:
        channel.unsubscribe(callback)


def test_one_that_raises_goes_on_being_called_and_harms_nobody(shops, open_cluster, events):
    channel, states = open_cluster(), []

    def broken(state):
        raise RuntimeError(state.name)

    channel.subscribe(broken)
    channel.subscribe(states.append)
    assert wait_until(lambda: states)
    channel.update([instance(shops[0])])
    assert wait_until(lambda: len(states) == 2)
    assert [type(event) for event in events] == [ListenerFailed, ListenerFailed]


def test_what_connect_raises_is_told_and_looked_at_again(shops, open_cluster, events, timer):
    failing = [RuntimeError("not yet")]

    def connect(one, options):
        if failing:
            raise failing.pop()
        return grpc.insecure_channel(one.target, options)

    channel, states = open_cluster(shops[0], connect=connect), []
    channel.subscribe(states.append, try_to_connect=True)
    assert wait_until(lambda: events)
    for _ in range(20):
        timer.advance(0.3)
        if wait_until(lambda: READY in states or timer.pending) and READY in states:
            break
    assert READY in states


def test_unknown_subscribers_and_late_ones_are_no_error(open_cluster):
    channel = open_cluster()
    channel.unsubscribe(print)
    channel.close()
    channel.subscribe(print)
