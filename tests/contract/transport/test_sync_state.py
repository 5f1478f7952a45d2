"""`get_state` and `subscribe` of channels of grpc across reconnects."""

import asyncio
import gc
import itertools
import threading
import time

import grpc
import pytest

from fixtures.client_interceptors import interceptor
from fixtures.grpc_servers import IMPATIENT
from fixtures.shop import UNARY_UNARY, Hang
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.events import CallbackFailed
from rpcwheel.transport import ReconnectingChannel

IDLE, CONNECTING, READY, FAILING, SHUTDOWN = (
    grpc.ChannelConnectivity[name]
    for name in ("IDLE", "CONNECTING", "READY", "TRANSIENT_FAILURE", "SHUTDOWN")
)


@pytest.fixture
def channel(shop, timer):
    with ReconnectingChannel(shop.target, options=IMPATIENT, timer=timer) as channel:
        yield channel


def threads_since(before):
    """Threads of the client, as the server's pool grows by itself."""
    return [
        one
        for one in threading.enumerate()
        if one not in before and not one.name.startswith("grpc-server")
    ]


class Switched:
    """A name for a server that accepts new connections when `up`."""

    def __init__(self, shop) -> None:
        self.shop = shop
        self.up = True

    def connect(self, options):
        target = self.shop.target if self.up else "127.0.0.1:1"
        return grpc.insecure_channel(target, [*options, *IMPATIENT])


# Subscribed


def test_a_subscriber_gets_each_state_in_order_across_reconnects(channel):
    states = []
    channel.subscribe(states.append, try_to_connect=True)
    for number in range(1, 5):  # each connection starts as IDLE
        assert wait_until(lambda n=number: states[-1:] == [READY] and states.count(IDLE) == n)
        channel.reconnect(force=True)
    for before, after in itertools.pairwise(states):
        assert before is not after
        assert (before, after) not in {(READY, CONNECTING), (CONNECTING, IDLE)}


def test_states_of_an_old_connection_are_not_reported(shop):
    at = Switched(shop)
    with ReconnectingChannel("shop", connect=at.connect) as channel:
        states = []
        channel.subscribe(states.append, try_to_connect=True)
        assert wait_until(lambda: states[-1:] == [READY])
        shop.then(hang := Hang())
        running = channel.unary_unary(UNARY_UNARY).future(b"x")
        assert hang.begun.wait(WAIT_S)
        at.up = False
        channel.reconnect()
        assert wait_until(lambda: states[-1] is FAILING)
        assert states.count(READY) == 1  # the old connection is always READY
        assert (running.done(), channel.calls) == (False, 1)
        running.cancel()


def test_a_subscription_without_try_to_connect_does_not_connect(shop, channel):
    states = []
    channel.subscribe(states.append)
    assert wait_until(lambda: states == [IDLE])
    channel.reconnect()
    channel.subscribe(states.append)
    assert wait_until(lambda: states == [IDLE, IDLE])
    assert channel.get_state() is IDLE
    channel.subscribe(states.append, try_to_connect=True)
    assert wait_until(lambda: states.count(READY) == 3)


class Refusing:
    """A name for a server on whose channels gRPC starts no thread for a subscription if `full`."""

    def __init__(self, shop) -> None:
        self.shop = shop
        self.full = False
        self.connecting = []
        """Whether each subscription is one with `try_to_connect`."""

    def connect(self, options):
        channel = grpc.insecure_channel(self.shop.target, options)
        accepts = channel.subscribe

        def subscribe(callback, try_to_connect):
            if self.full:
                raise RuntimeError("can't start new thread")
            self.connecting.append(try_to_connect)
            accepts(callback, try_to_connect)

        channel.subscribe = subscribe
        return channel


def test_subscribers_get_states_while_grpc_refuses_another_one(shop):
    at, states = Refusing(shop), []
    with ReconnectingChannel(shop.target, connect=at.connect) as channel:
        channel.subscribe(states.append)
        assert wait_until(lambda: states == [IDLE])
        at.full = True
        with pytest.raises(RuntimeError, match="can't start"):
            channel.subscribe(print, try_to_connect=True)
        channel.get_state(try_to_connect=True)
        assert wait_until(lambda: states[-1] is READY)


def test_a_refused_subscription_does_not_connect_for_a_later_one(shop):
    at, states = Refusing(shop), []
    with ReconnectingChannel(shop.target, connect=at.connect) as channel:
        at.full = True
        with pytest.raises(RuntimeError, match="can't start"):
            channel.subscribe(print, try_to_connect=True)
        at.full = False
        channel.subscribe(states.append)
        assert wait_until(lambda: states == [IDLE])
    assert at.connecting == [False]


def test_grpcs_polling_thread_runs_only_while_there_is_a_subscription(channel):
    states, more = [], []
    before = set(threading.enumerate())
    channel.subscribe(states.append)
    channel.subscribe(more.append)
    assert wait_until(lambda: states and more)
    assert wait_until(
        lambda: len(threads_since(before)) == 1
    )  # worker threads end, gRPC's thread does not
    channel.unsubscribe(states.append)
    channel.unsubscribe(states.append)
    channel.unsubscribe(print)
    channel.get_state(try_to_connect=True)
    assert wait_until(lambda: more[-1] is READY)
    assert states == [IDLE]
    channel.unsubscribe(more.append)
    assert wait_until(lambda: not threads_since(before))


def test_subscribers_are_called_one_at_a_time_and_not_on_grpcs_thread(channel):
    threads, inside, overlaps, states = set(), [], [], []

    def callback(state):
        threads.add(threading.current_thread().name.split("-")[0])
        overlaps.extend(inside)
        inside.append(1)
        time.sleep(0.002)
        inside.pop()
        states.append(state)

    for _ in range(4):
        channel.subscribe(callback, try_to_connect=True)
    for _ in range(4):
        channel.reconnect(force=True)
    assert wait_until(lambda: states[-4:] == [READY] * 4)
    assert (threads, overlaps) == ({"rpcwheel"}, [])


def test_the_other_subscribers_are_called_although_one_raises(channel, events):
    states, errors = [], {KeyError, SystemExit, asyncio.CancelledError, KeyboardInterrupt}

    def raising(error):
        def callback(_):
            raise error

        return callback

    for error in errors:
        channel.subscribe(raising(error))
    assert wait_until(lambda: len(events) == len(errors))
    channel.subscribe(states.append, try_to_connect=True)
    assert wait_until(lambda: states[-1:] == [READY])
    assert wait_until(lambda: len(events) >= 2 * len(errors))  # they are called again
    assert {type(event) for event in events} == {CallbackFailed}
    assert {type(event.error) for event in events} == errors


def test_a_subscriber_may_unsubscribe_and_close_the_channel(channel):
    states = []

    def callback(state):
        states.append(state)
        channel.unsubscribe(callback)
        channel.close()

    channel.subscribe(callback)
    assert wait_until(lambda: channel.closed)
    channel.subscribe(states.append)
    channel.unsubscribe(states.append)
    assert states == [IDLE]


def test_a_subscribed_channel_that_is_dropped_leaves_no_thread(shop):
    before = set(threading.enumerate())
    states = []
    channel = ReconnectingChannel(shop.target)
    channel.subscribe(states.append, try_to_connect=True)
    assert wait_until(lambda: states[-1:] == [READY])
    assert threads_since(before)
    del channel
    assert wait_until(lambda: not threads_since(before))
    gc.collect()


class Deaf(type(grpc.insecure_channel("127.0.0.1:1"))):
    def subscribe(self, callback, try_to_connect=None):
        raise NotImplementedError


def test_a_connection_that_cannot_be_watched_is_reported_and_used(shop, events, caplog):
    kinds = [grpc.insecure_channel, lambda *given: Deaf(*given, None, None), grpc.insecure_channel]
    with ReconnectingChannel("x", connect=lambda o: kinds.pop(0)(shop.target, o)) as channel:
        states, call = [], channel.unary_unary(UNARY_UNARY)
        channel.subscribe(states.append, try_to_connect=True)
        assert wait_until(lambda: states[-1:] == [READY])
        assert channel.reconnect()
        assert call(b"x") == b"x"
        assert channel.reconnect()
        assert wait_until(lambda: states.count(READY) == 2)
    failed = [event.error for event in events.of(CallbackFailed)]
    assert {type(error) for error in failed} == {NotImplementedError}
    caplog.clear()  # the frames of errors keep the server's sockets


# Ready


def test_channel_ready_future_waits_across_reconnects(shop):
    at = Switched(shop)
    at.up = False
    with ReconnectingChannel("shop", connect=at.connect, backoff=0) as channel:
        ready = grpc.channel_ready_future(grpc.intercept_channel(channel, interceptor(print)))
        assert wait_until(lambda: channel.get_state() is FAILING)
        channel.reconnect()
        assert not ready.done()
        at.up = True
        channel.reconnect()
        assert ready.result(WAIT_S) is None
        assert channel.get_state() is READY
