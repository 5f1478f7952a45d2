"""`ReconnectingChannel` behaves like a channel of gRPC, also after a reconnect."""

import grpc
import pytest
from tenacity import wait_exponential

from fixtures.grpc_servers import IMPATIENT
from fixtures.shop import UNARY_UNARY, Fail, Hang
from fixtures.waiting import WAIT_S, wait_until
from fixtures.ways import FRONTS, failure_of, hanging_call, ways_to_call
from fixtures.worlds import KINDS, RETRY
from rpcwheel.errors import ConfigurationError


@pytest.mark.parametrize("open_styled", FRONTS)
def test_a_stub_works_after_a_reconnect_on_another_connection(
    world, shop, open_reconnecting, open_styled
):
    kit = world.keep(world.api.Kit(timeout=WAIT_S, retry=RETRY))
    channel, front = open_styled(world, open_reconnecting, kit)
    ways = ways_to_call(world, front)
    for number in (1, 2, 3):
        assert {name: call() for name, call in ways.items()} == dict.fromkeys(ways, b"ab")
        assert channel.number == number
        assert world.do(channel.reconnect, force=True)
    peers, count = [seen.peer for seen in shop.calls], len(ways)
    assert len(peers) == 3 * count
    assert [len(set(peers[at : at + count])) for at in range(0, 3 * count, count)] == [1, 1, 1]
    assert len(set(peers)) == 3
    assert wait_until(lambda: channel.calls == 0)


# What it is made of


def test_connect_creates_the_channel_of_each_connection(world, shop, open_reconnecting):
    made = []

    def connect(options):
        made.append(options)
        return world.grpc.insecure_channel(shop.target, options=options)

    options = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 0)]
    channel = open_reconnecting(target="shop", options=options, connect=connect)
    ways = ways_to_call(world, channel)
    for _ in range(2):
        assert {call() for call in ways.values()} == {b"ab"}
        world.do(channel.reconnect)
    assert wait_until(lambda: channel.calls == 0)
    assert made == [[("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]] * 3
    assert made[0] is not made[1]
    assert channel.target == "shop"


def test_what_connect_does_wrong_is_raised_and_changes_nothing(
    world, shop, open_reconnecting, events
):
    def new(options):
        return world.grpc.insecure_channel(shop.target, options=options)

    def fail(options):
        raise OSError("no such host")

    def connect(options):
        return steps.pop(0)(options)

    steps = [new, fail, lambda _: None, new]
    channel = open_reconnecting(connect=connect)
    world.call(channel).result()
    with pytest.raises(OSError, match="no such host"):
        world.do(channel.reconnect)
    with pytest.raises(
        TypeError, match=r"connect must return a new grpc(\.aio)?\.Channel, not None"
    ):
        world.do(channel.reconnect)
    assert (world.call(channel).result(), channel.number, events) == (b"x", 1, [])
    assert len({seen.peer for seen in shop.calls}) == 1
    assert world.do(channel.reconnect)


def test_connect_must_return_a_new_channel(world, shop, open_reconnecting):
    first, second = (
        world.do(world.grpc.insecure_channel, shop.target, options=IMPATIENT) for _ in range(2)
    )
    steps = [first, first, second, first]
    channel = open_reconnecting(connect=lambda _: steps.pop(0))
    call = hanging_call(world, shop, channel)
    with pytest.raises(ConfigurationError, match="new channel each time"):
        world.do(channel.reconnect)
    assert world.do(channel.reconnect, force=True)
    with pytest.raises(ConfigurationError, match="new channel each time"):  # the first drains
        world.do(channel.reconnect, force=True)
    shop.calls[0].ended.set()
    assert call.result() == b"x"
    assert wait_until(lambda: channel.calls == 0)
    assert world.call(channel).result() == b"x"


def test_the_backoff_delays_reconnects_of_connections_that_never_answered(
    world, open_reconnecting, timer, events
):
    backoff = wait_exponential(multiplier=1, max=60)
    channel = open_reconnecting(backoff=backoff)
    reconnect = lambda **given: world.do(channel.reconnect, **given)  # noqa: E731
    assert [reconnect() for _ in range(3)] == [True, False, False]
    timer.advance(2)
    assert [reconnect(), reconnect()] == [True, False]
    assert reconnect(force=True)
    world.call(channel).result()
    assert reconnect()  # it has worked since
    assert [event.number for event in events] == [2, 3, 4, 5]


INVALID = [
    ("reconnect", {"drain_timeout": "1"}, TypeError, "drain_timeout must be seconds"),
    ("reconnect", {"drain_timeout": -1}, ConfigurationError, "drain_timeout must be 0 seconds or"),
    ("reconnect", {"drain_timeout": float("nan")}, ConfigurationError, "drain_timeout is NaN"),
    ("reconnect", {"reason": 7}, TypeError, "reason must be a string"),
    ("drain", {"drain_timeout": -1}, ConfigurationError, "drain_timeout must be 0 seconds or more"),
    ("drain", {"reason": 7}, TypeError, "reason must be a string"),
]


def test_invalid_arguments_of_methods_change_nothing(world, reconnecting):
    in_aio = [("close", {"grace": -1}, ConfigurationError, "grace must be 0 seconds or more")]
    for name, given, error, message in INVALID + in_aio * (world.name == "aio"):
        with pytest.raises(error, match=message):
            world.do(getattr(reconnecting, name), **given)
    state = reconnecting.number, reconnecting.closed, reconnecting.accepts_calls
    assert state == (1, False, True)


def test_the_state_is_that_of_the_active_connection(world, reconnecting):
    def state():
        return world.do(reconnecting.get_state).name, world.do(reconnecting.is_idle)

    assert state() == ("IDLE", True)
    world.call(reconnecting).result()
    assert state() == ("READY", False)
    world.do(reconnecting.reconnect)
    assert state() == ("IDLE", True)
    assert world.do(reconnecting.get_state, try_to_connect=True).name == "IDLE"
    for _ in range(2):  # the request to connect applies to the next connection
        world.do(reconnecting.reconnect, force=True)
    assert wait_until(lambda: state() == ("READY", False))
    world.do(reconnecting.reconnect, force=True)
    assert state() == ("IDLE", True)  # the last one was READY
    world.do(reconnecting.close)
    assert state() == ("SHUTDOWN", False)


# What was read and written


def test_messages_stamp_the_activity_of_their_connection(world, shop, reconnecting, timer):
    old = reconnecting.activity
    assert (old.last_read_ns, old.last_write_ns, old.last_use_ns) == (None, None, None)
    timer.advance(1)
    stream = world.call(reconnecting, "stream_stream", open_requests=True)
    if world.name == "aio":  # `grpc` knows of the first request before
        assert (old.last_use_ns, old.last_read_ns) == (10**9, None)
    stream.write(b"x")
    assert stream.read() == b"x"
    assert old.last_read_ns == old.last_write_ns == old.last_use_ns == 10**9
    timer.advance(1)
    world.do(reconnecting.reconnect)
    stream.write(b"y")
    assert stream.read() == b"y"
    assert old.last_read_ns == old.last_write_ns == 2 * 10**9
    assert reconnecting.activity is not old
    assert reconnecting.activity.last_use_ns is None
    stream.done_writing()
    assert stream.read() is None


STATUS_IS_SEEN = {
    "sync": ("unary", "unary with_call", "stream_unary", "stream_unary with_call"),
    "aio": tuple(f"{kind} iterate" for kind in KINDS),
}
"""The ways to call in which the channel sees the status; in `grpc`, those that block."""


def test_only_a_status_that_no_client_sets_is_a_read(world, shop, reconnecting):
    ways = ways_to_call(world, reconnecting)
    for name in STATUS_IS_SEEN[world.name]:
        for code, is_read in (("NOT_FOUND", True), ("UNAVAILABLE", False), ("CANCELLED", False)):
            world.do(reconnecting.reconnect, force=True)
            shop.then(Fail(code, read=True))
            assert failure_of(ways[name])[0] == code
            assert (reconnecting.activity.last_read_ns is not None) is is_read
            assert reconnecting.activity.last_write_ns is not None


def test_a_heartbeat_is_neither_use_nor_a_call_in_flight(world, shop, reconnecting):
    beat = reconnecting.heartbeat_call(UNARY_UNARY)
    assert world.do(beat, b"x") == b"x"
    shop.then(hang := Hang())
    call = world.begin(beat, "unary_unary", (b"x",))
    assert hang.begun.wait(WAIT_S)
    assert reconnecting.calls == 0
    assert world.do(reconnecting.reconnect, "silent", drain_timeout=None)  # closed at once
    error = call.error()
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "connection replaced: silent" in error.details()
    assert world.do(beat, b"x", timeout=9) == b"x"
    activity = reconnecting.activity
    assert (activity.last_use_ns, activity.last_read_ns) == (None, None)
    assert len({seen.peer for seen in shop.calls}) == 2
    world.do(reconnecting.close)
    with pytest.raises(world.closed_error, match="closed"):
        world.do(beat, b"x")
