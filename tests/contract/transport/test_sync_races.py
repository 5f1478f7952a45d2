"""Calls, reconnects and `close` on many threads: each call is sent once, nothing is left."""

import threading
from functools import partial

import grpc
import pytest

from fixtures.client_interceptors import interceptor
from fixtures.leaks import descriptors, wait_until_none
from fixtures.shop import UNARY_UNARY
from fixtures.timers import run_threads
from fixtures.waiting import WAIT_S, wait_until
from fixtures.ways import sync_ways
from fixtures.worlds import KINDS
from rpcwheel.events import ConnectionReplaced
from rpcwheel.transport import ReconnectingChannel

ENDED = {
    ("UNAVAILABLE", "connection replaced: race"),
    ("UNAVAILABLE", "Stream removed (connection replaced: race)"),
}
"""Our text, or that of gRPC's core for a call that has just started."""

CLOSED = {
    "Cannot invoke RPC on closed channel!",
    ("CANCELLED", "Channel closed!"),
    ("CANCELLED", "Stream removed (Channel closed!)"),
}


@pytest.fixture
def channel(shop, timer):
    def others():
        """Threads, without those of the server's pool."""
        return {one for one in threading.enumerate() if not one.name.startswith("grpc-server")}

    before, threads = descriptors(), others()
    with ReconnectingChannel(shop.target, backoff=0, timer=timer) as channel:
        yield channel
    assert wait_until(lambda: channel.calls == 0)
    assert not wait_until_none(lambda: sorted(descriptors() - before))
    assert not wait_until_none(lambda: list(others() - threads))
    assert timer.pending == 0


def state_of(channel):
    """The state of a channel of gRPC, or of the one below it."""
    while not hasattr(channel, "check_connectivity_state"):  # the channel of gRPC's core
        channel = channel._channel
    try:
        number = channel.check_connectivity_state(False)
    except ValueError:  # "Channel closed!"
        return grpc.ChannelConnectivity.SHUTDOWN
    return next(state for state in grpc.ChannelConnectivity if state.value[0] == number)


def end_of(call):
    """The result for the caller."""
    try:
        return call()
    except grpc.RpcError as error:
        return error.code().name, error.details()
    except ValueError as error:
        return str(error)


def intercepted(channel, before):
    """A channel of gRPC whose interceptor calls `before`."""

    def act(continuation, details, request):
        before()
        return continuation(details, request)

    return grpc.intercept_channel(channel, interceptor(act, *KINDS))


class Wrapped(grpc.Channel):
    """A channel of another library: calls `before`, and raises what the calls of gRPC raise."""

    def __init__(self, channel, before) -> None:
        self._channel, self._before = channel, before
        for kind in KINDS:
            setattr(self, kind, partial(self._multicallable, getattr(channel, kind)))

    unary_unary = unary_stream = stream_unary = stream_stream = None
    subscribe = unsubscribe = __enter__ = __exit__ = None

    def _multicallable(self, make, *args, **options):
        method = make(*args, **options)

        def wrapped(call):
            return lambda *args, **options: self._before() or call(*args, **options)

        begin = wrapped(method)
        for name in {"future", "with_call"} & set(dir(method)):
            setattr(begin, name, wrapped(getattr(method, name)))
        return begin

    def close(self) -> None:
        self._channel.close()


def open_closing(shop, wrap=None):
    """A channel, a function that closes its first connection, and the list of its connections.

    With `wrap`, each call closes the first connection when it is about to start.
    """
    made = []

    def connect(options):
        made.append(grpc.insecure_channel(shop.target, options))
        return wrap(made[-1], close_first) if wrap else made[-1]

    def close_first():
        if len(made) == 1:
            channel.reconnect("race", force=True, drain_timeout=0)
            assert wait_until(lambda: state_of(made[0]) is grpc.ChannelConnectivity.SHUTDOWN)

    channel = ReconnectingChannel("shop", connect=connect)
    return channel, close_first, made


def test_a_call_whose_connection_closes_at_its_start_uses_the_next_one(shop):
    for way in range(4):  # grpc serializes messages of a request stream after the call's start
        channel, close_first, made = open_closing(shop)
        with channel:
            ways = sync_ways(channel, lambda text, close=close_first: close() or text)
            assert list(ways.values())[way]() == b"ab"
        assert (len(shop.calls), len(made)) == (way + 1, 2)


@pytest.mark.parametrize("wrap", [intercepted, Wrapped])
def test_interceptors_of_a_connection_that_closes_are_not_run_again(shop, wrap):
    """They may have sent the call before."""
    for way in range(8):
        with open_closing(shop, wrap)[0] as channel:
            assert end_of(list(sync_ways(channel).values())[way]) in ENDED
    assert shop.calls == []


class Slow(grpc.Channel):
    """Creates a multicallable when `goes_on` is set, and notes its state then."""

    def __init__(self, inner) -> None:
        self._channel = inner
        self.making, self.goes_on, self.states = threading.Event(), threading.Event(), []

    def unary_unary(self, *args, **options):
        self.making.set()
        assert self.goes_on.wait(WAIT_S)
        self.states.append(state_of(self._channel))
        return self._channel.unary_unary(*args, **options)

    unary_stream = stream_unary = stream_stream = None
    subscribe = unsubscribe = __enter__ = __exit__ = None

    def close(self) -> None:
        self._channel.close()


def test_a_channel_is_not_closed_while_a_multicallable_is_created(shop):
    """`_registered_method` on a closed channel of grpcio 1.85 crashes the process."""
    made = []

    def connect(options):
        made.append(Slow(grpc.insecure_channel(shop.target, options)))
        return made[-1]

    with ReconnectingChannel("shop", connect=connect) as channel:

        def replace():
            assert made[0].making.wait(WAIT_S)
            channel.reconnect(drain_timeout=0)
            made[1].goes_on.set()
            made[0].goes_on.set()

        run_threads(replace, lambda: end_of(lambda: channel.unary_unary(UNARY_UNARY)(b"x")))
        assert made[0].states == [grpc.ChannelConnectivity.IDLE]
        shutdown = grpc.ChannelConnectivity.SHUTDOWN
        assert wait_until(lambda: state_of(made[0]) is shutdown)


def test_concurrent_reconnects_replace_a_connection_once(shop, timer, events):
    gate, answers, connected = threading.Barrier(8), [], []

    def connect(options):
        if connected:
            gate.wait(WAIT_S)  # after all have read the backoff
        connected.append(grpc.insecure_channel(shop.target, options))
        return connected[-1]

    with ReconnectingChannel("shop", connect=connect, timer=timer) as channel:
        channel.unary_unary(UNARY_UNARY)(b"x")
        run_threads(*[lambda: answers.append(channel.reconnect())] * 8)
        assert sorted(answers) == [False] * 7 + [True]
        assert (channel.number, len(events)) == (2, 1)


# A thread of grpc's that begins to poll for the state of a channel just closed raises.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("drain", [None, 0])
def test_close_during_calls_and_reconnects_closes_everything(
    channel, drain, events, frequent_thread_switches
):
    """Until then only calls on connections that are not drained fail, with UNAVAILABLE."""
    before, after = set(), set()

    def replace():
        while channel.reconnect("race", drain_timeout=drain, force=True):
            pass
        assert channel.closed

    def call():
        for _ in iter(lambda: channel.closed, True):
            for one in sync_ways(channel).values():
                end = end_of(one)
                (after if channel.closed else before).add(end)

    def close():
        assert wait_until(lambda: channel.number > 20)
        channel.close()

    def subscribe():
        reported = []
        while not channel.closed:
            channel.subscribe(reported.append, try_to_connect=True)
            channel.unsubscribe(reported.append)

    run_threads(replace, replace, call, call, close, close, subscribe)
    assert before <= {b"ab", *(ENDED if drain == 0 else ())}
    assert after <= {b"ab", *ENDED, *CLOSED}
    assert not channel.reconnect(force=True)
    assert channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN
    numbers = [event.number for event in events.of(ConnectionReplaced)]
    assert sorted(numbers) == [*range(2, channel.number + 1)]


@pytest.mark.parametrize("closes", [False, True])
def test_connect_that_hangs_delays_neither_calls_nor_close(shop, closes):
    hangs, goes_on, made = threading.Event(), threading.Event(), []

    def connect(options):
        if made:
            hangs.set()
            assert goes_on.wait(WAIT_S)
        made.append(grpc.insecure_channel(shop.target, options))
        return made[-1]

    with ReconnectingChannel("shop", connect=connect) as channel:
        call = channel.unary_unary(UNARY_UNARY)

        def meanwhile():
            assert hangs.wait(WAIT_S)
            assert call(b"x") == b"x"
            assert channel.number == 1
            if closes:
                channel.close()
            goes_on.set()

        answers = []
        run_threads(lambda: answers.append(channel.reconnect()), meanwhile)
        assert answers == [not closes]
        if not closes:
            assert (call(b"y"), channel.number) == (b"y", 2)
    for inner in made:  # also the one that was too late; a worker thread closes replaced ones
        assert wait_until(lambda: is_closed(inner))  # noqa: B023


def is_closed(channel):
    try:
        channel.unary_unary(UNARY_UNARY)(b"x")
    except ValueError as error:
        return "closed" in str(error) or "replaced" in str(error)
    except grpc.RpcError:
        return False  # it is being closed
    return False


def test_a_subscribed_channel_reconnects_without_an_error_in_grpcs_thread(channel, capfd):
    """gRPC's thread raises if its channel is closed while it polls (grpc #18995)."""
    reported = []
    channel.subscribe(reported.append, try_to_connect=True)
    for _ in range(30):
        channel.reconnect(force=True)
        channel.unary_unary(UNARY_UNARY)(b"x")
    channel.close()
    assert wait_until(lambda: channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN)
    assert capfd.readouterr().err == ""
