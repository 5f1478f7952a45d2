"""`ReconnectingChannel` of grpc.aio behaves like a channel of gRPC, also after a reconnect."""

import asyncio
import gc
import weakref

import grpc
import pytest

from fixtures.aio_channels import ANSWERS, KINDS, STYLES, Stub, hanging
from fixtures.aio_policy_channels import others, refused
from fixtures.grpc_servers import IMPATIENT
from fixtures.grpcio import BUGS_OF_INTERCEPTORS
from fixtures.shop import UNARY_STREAM, UNARY_UNARY, Fail, Hang, Silent
from fixtures.small_servers import METHOD, aio_serving
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel import RetryPolicy, aio
from rpcwheel.errors import ConfigurationError
from rpcwheel.events import ConnectionReplaced
from rpcwheel.transport.aio import DEFAULT_BACKOFF, ReconnectingChannel

MADE_BY_CLIENTS = {
    "CANCELLED",
    "DEADLINE_EXCEEDED",
    "INTERNAL",
    "RESOURCE_EXHAUSTED",
    "UNAUTHENTICATED",
    "UNAVAILABLE",
    "UNKNOWN",
}
"""Statuses that gRPC may set without a server."""


class Foreign(grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation, details, request):
        return await continuation(details, request)


class ForeignStream(grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(self, continuation, details, request):
        return await continuation(details, request)


KIT = aio.Kit(timeout=WAIT_S, retry=RetryPolicy(retry_on="UNAVAILABLE"))

WAYS = {
    "plain": lambda made: made(),
    "with interceptors": lambda made: made(interceptors=[Foreign(), ForeignStream()]),
    "below a kit": lambda made: KIT.intercept_channel(made()),
    "with a kit's interceptors": lambda made: made(interceptors=KIT.client_interceptors()),
}
"""A channel for stubs."""


@pytest.fixture(params=WAYS.values(), ids=WAYS.keys())
def both(request, make):
    """A channel for stubs, and the channel below it."""
    made = []

    def noting(**given):
        made.append(make(**given))
        return made[0]

    return request.param(noting), made[0]


# Calls


async def test_a_stub_works_after_a_reconnect(both):
    outer, channel = both
    stub = Stub(outer)
    for number, style in enumerate(STYLES.values(), 1):
        assert channel.number == number
        assert {kind: await style(stub, kind) for kind in KINDS} == ANSWERS
        await aio_wait_until(lambda: channel.calls == 0)
        assert channel.reconnect()


async def test_a_reconnect_makes_a_new_tcp_connection():
    async def peer(request, context):
        return context.peer().encode()

    async with (
        aio_serving(grpc.unary_unary_rpc_method_handler(peer)) as target,
        ReconnectingChannel(target) as one,
        ReconnectingChannel(target) as other,
    ):
        first, second = (channel.unary_unary(METHOD) for channel in (one, other))
        peers = [await first(b""), await first(b""), await second(b"")]
        one.reconnect()
        peers += [await first(b""), await second(b"")]
    assert peers[0] == peers[1] != peers[3]
    assert peers[2] == peers[4]
    assert len(set(peers)) == 3


async def test_calls_in_flight_are_counted(shop, channel):
    calls = [await hanging(shop, channel, kind) for kind in KINDS]
    assert channel.calls == len(KINDS)
    for call in calls:
        call.cancel()
    await aio_wait_until(lambda: channel.calls == 0)
    assert all(call.cancelled() for call in calls)


async def test_a_call_that_is_not_awaited_runs_and_is_counted_until_its_end(channel):
    channel.unary_unary(UNARY_UNARY)(b"x")
    assert channel.calls == 1
    await aio_wait_until(lambda: channel.calls == 0)


@pytest.mark.parametrize(
    ("reads", "drains"), [("not begun", True), ("read", False), ("iterated", True)]
)
async def test_a_dropped_stream_is_canceled(shop, channel, drains, reads):
    shop.then(silent := Silent(after=1))
    call = channel.unary_stream(UNARY_STREAM)(b"ab")
    if reads == "read":
        assert await call.read() == b"a"
    elif reads == "iterated":
        async for _ in call:
            break
    await aio_wait_until(silent.begun.is_set)
    if drains:
        assert channel.reconnect()
    gone = weakref.ref(call)
    del call
    gc.collect()
    await aio_wait_until(lambda: (gc.collect(), gone())[1] is None)
    await aio_wait_until(lambda: channel.calls == 0)
    await aio_wait_until(shop.calls[-1].ended.is_set)


async def test_a_call_needs_no_task(shop, channel):
    bare, bare_tasks = grpc.aio.insecure_channel(shop.target), 0
    for one in (bare, channel):
        shop.then(*(hangs := [Hang(), Hang()]))
        before = len(others())
        calls = [one.unary_unary(UNARY_UNARY)(b"x"), one.unary_stream(UNARY_STREAM)(b"x")]
        await aio_wait_until(lambda hangs=hangs: all(hang.begun.is_set() for hang in hangs))
        if one is bare:
            bare_tasks = len(others()) - before
        else:
            await aio_wait_until(lambda most=before + bare_tasks: len(others()) <= most)
        for call in calls:
            call.cancel()
        await aio_wait_until(lambda before=before: len(others()) == before)
    await bare.close()


async def test_a_failure_is_reported_as_on_a_channel_of_grpc(shop, channel):
    for code in ("NOT_FOUND", "UNAVAILABLE"):
        shop.then(Fail(code, "no such thing", trailing=(("why", "so"),)))
        error = await refused(channel.unary_unary(UNARY_UNARY)(b"x"))
        assert (error.code().name, error.details()) == (code, "no such thing")
        assert ("why", "so") in tuple(error.trailing_metadata())
    assert channel.calls == 0


@BUGS_OF_INTERCEPTORS
async def test_a_call_that_an_interceptor_does_not_start_is_not_counted(make):
    class Broken(grpc.aio.UnaryUnaryClientInterceptor):
        async def intercept_unary_unary(self, continuation, details, request):
            raise KeyError("a bug")

    channel = make(interceptors=[Broken()])
    member = channel.unary_unary(UNARY_UNARY)
    with pytest.raises(KeyError):
        await member(b"awaited")
    assert channel.calls == 0
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda *_: None)  # a callback of grpc.aio raises
    member(b"forgotten")
    await aio_wait_until(lambda: (gc.collect(), channel.calls)[1] == 0)


async def test_a_call_that_raises_at_its_start_is_not_counted(channel):
    with pytest.raises(TypeError):
        channel.unary_unary(UNARY_UNARY)(b"x", wrong=True)
    with pytest.raises(TypeError):
        channel.unary_unary()
    await channel.close()
    with pytest.raises(grpc.aio.UsageError, match=r"Channel is closed\."):
        channel.unary_unary(UNARY_UNARY)(b"x")
    assert channel.calls == 0


async def test_time_remaining_of_a_call(shop, channel):
    shop.then(Hang())
    call = channel.unary_unary(UNARY_UNARY)(b"x", timeout=500)
    assert 400 < call.time_remaining() <= 500
    call.cancel()
    assert channel.unary_unary(UNARY_UNARY)(b"x").time_remaining() is None


async def test_serializers_are_used_and_without_them_messages_are_bytes(channel):
    member = channel.unary_unary(UNARY_UNARY, str.encode, bytes.decode)
    assert await member("text") == "text"
    registered = channel.unary_unary(UNARY_UNARY, str.encode, bytes.decode, True)
    assert await registered("text") == "text"
    generated = channel.unary_unary(
        UNARY_UNARY,
        request_serializer=str.encode,
        response_deserializer=bytes.decode,
        _registered_method=True,
    )
    assert await generated("text") == "text"
    named = channel.unary_unary(UNARY_UNARY, _registered_method=True)
    assert await named(b"bytes") == b"bytes"


# Activity


async def test_messages_stamp_the_activity_of_the_active_connection(channel, timer):
    activity = channel.activity
    assert (activity.last_read_ns, activity.last_write_ns, activity.last_use_ns) == (
        None,
        None,
        None,
    )
    timer.advance(5)
    await channel.unary_unary(UNARY_UNARY)(b"x")
    assert activity.last_read_ns == activity.last_write_ns == activity.last_use_ns == 5 * 10**9
    channel.reconnect()
    assert channel.activity is not activity
    assert channel.activity.last_use_ns is None


async def test_a_response_stamps_the_activity_after_other_calls_on_the_call_object(channel, timer):
    for number, question in enumerate(("code", "initial_metadata", "add_done_callback"), start=1):
        channel.reconnect(force=True)
        call = channel.unary_unary(UNARY_UNARY)(b"x")
        timer.advance(5)
        if question == "add_done_callback":
            call.add_done_callback(lambda _: None)
        else:
            await getattr(call, question)()
        assert await call == b"x"
        activity = channel.activity
        assert activity.last_read_ns == activity.last_use_ns == 5 * 10**9 * number


async def test_a_canceled_call_is_not_a_read(shop, channel):
    call = await hanging(shop, channel)
    call.add_done_callback(lambda _: None)
    assert call.cancel()
    assert channel.activity.last_read_ns is None


async def test_the_start_of_a_request_stream_is_use_before_the_first_request(shop, channel):
    shop.then(Hang())
    call = Stub(channel).stream_stream()
    assert channel.activity.last_use_ns is not None
    assert channel.activity.last_read_ns is None
    call.cancel()


async def test_only_a_status_that_no_client_sets_is_a_read(shop, channel):
    read, stub = {}, Stub(channel)
    codes = [code.name for code in grpc.StatusCode if code is not grpc.StatusCode.OK]
    for number, code in enumerate(codes * len(KINDS)):
        channel.reconnect(force=True)
        shop.then(Fail(code, read=True))
        kind = KINDS[(number + number // len(codes)) % len(KINDS)]
        error = await refused(STYLES["iterate"](stub, kind))
        assert error.code().name == code
        read.setdefault(code, set()).add(channel.activity.last_read_ns is not None)
    assert read == {code: {code not in MADE_BY_CLIENTS} for code in codes}


async def test_a_failure_in_the_client_is_not_a_read(make):
    channel = make(options=[("grpc.max_send_message_length", 10)])
    error = await refused(channel.unary_unary(UNARY_UNARY)(b"x" * 100))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert channel.activity.last_read_ns is None


# For the heartbeat


async def test_a_heartbeat_is_neither_use_nor_a_call_in_flight(shop, channel, timer):
    ping = channel.heartbeat_call(UNARY_UNARY)
    call = ping(b"hello", timeout=9)
    assert channel.calls == 0
    assert await call == b"hello"
    assert channel.activity.last_use_ns is None
    assert channel.activity.last_read_ns is None


async def test_a_heartbeat_uses_the_active_connection(shop, channel):
    ping = channel.heartbeat_call(UNARY_UNARY)
    assert await ping(b"1") == b"1"
    shop.then(hang := Hang())
    call = ping(b"2")
    await aio_wait_until(hang.begun.is_set)
    channel.reconnect("silent")
    error = await refused(call)
    assert (error.code().name, error.details()) == ("UNAVAILABLE", "connection replaced: silent")
    assert await ping(b"3") == b"3"


# Replacing


async def test_repr_of_the_channel(channel, shop, events):
    await channel.channel_ready()
    call = await hanging(shop, channel)
    seen = (channel.target, channel.number, channel.calls, channel.closed)
    assert seen == (shop.target, 1, 1, False)
    assert channel.reconnect("rebalancing")
    assert (channel.number, channel.calls) == (2, 1)
    assert events == [ConnectionReplaced(shop.target, number=2, reason="rebalancing", calls=1)]
    call.cancel()


async def test_the_backoff_delays_reconnects_of_connections_that_never_answered(make, timer):
    channel = make(backoff=2.0)
    assert [channel.reconnect(), channel.reconnect()] == [True, False]
    timer.advance(2.0)
    assert [channel.reconnect(), channel.reconnect()] == [True, False]
    assert [channel.reconnect(force=True), channel.number] == [True, 4]
    await channel.unary_unary(UNARY_UNARY)(b"x")
    assert channel.reconnect()


async def test_an_exception_of_connect_is_raised_and_changes_nothing(make, shop):
    answers = [grpc.aio.insecure_channel, OSError("no way"), lambda *_: None]

    def connect(options):
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        assert ("grpc.use_local_subchannel_pool", 1) in options
        return answer(shop.target, options)

    channel = make(connect=connect, options=IMPATIENT)
    with pytest.raises(OSError, match="no way"):
        channel.reconnect()
    with pytest.raises(TypeError, match="connect must return a new grpc"):
        channel.reconnect()
    assert channel.number == 1
    assert await channel.unary_unary(UNARY_UNARY)(b"x") == b"x"


async def test_connect_must_return_a_new_channel(make, shop):
    bare = grpc.aio.insecure_channel(shop.target)
    channel = make(connect=lambda _: bare)
    with pytest.raises(ConfigurationError, match="a new channel each time"):
        channel.reconnect()
    assert await channel.unary_unary(UNARY_UNARY)(b"x") == b"x"


async def test_connect_must_not_return_a_channel_that_drains(make, shop):
    bare = [grpc.aio.insecure_channel(shop.target) for _ in range(2)]
    turns = [*bare, bare[0]]
    channel = make(connect=lambda _: turns.pop(0))
    call = await hanging(shop, channel)
    channel.reconnect()
    with pytest.raises(ConfigurationError, match="a new channel each time"):
        channel.reconnect(force=True)
    call.cancel()
    await aio_wait_until(lambda: channel.calls == 0)
    assert await channel.unary_unary(UNARY_UNARY)(b"x") == b"x"


async def test_an_exception_of_a_wait_object_is_raised_and_changes_nothing(make):
    channel = make(backoff=lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        channel.reconnect()
    assert channel.number == 1


async def test_tls_credentials(make):
    channel = make(credentials=grpc.ssl_channel_credentials())
    assert channel.reconnect()


def test_reconnect_needs_a_running_loop():
    made = []

    async def use():
        made.append(ReconnectingChannel("127.0.0.1:1"))

    asyncio.run(use())
    with pytest.raises(RuntimeError, match="no running event loop"):
        made[0].reconnect()


def test_the_default_backoff_is_a_second_at_first_and_a_minute_at_last():
    assert (DEFAULT_BACKOFF.initial, DEFAULT_BACKOFF.max, DEFAULT_BACKOFF.jitter) == (1, 60, 0.5)
