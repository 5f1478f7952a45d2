"""A program gets the same from a bare channel of gRPC and from each kind of channel of rpcwheel."""

import asyncio

import grpc
import pytest

from fixtures.balanced_channels import instance
from fixtures.shop import STREAM_STREAM, UNARY_STREAM, UNARY_UNARY
from fixtures.waiting import WAIT_S, wait_until
from fixtures.worlds import AioWorld, SyncWorld, only_aio
from rpcwheel import RetryPolicy
from rpcwheel.call import CallPolicy

POLICY = CallPolicy(retry=RetryPolicy(retry_on="UNAVAILABLE", backoff=0.0), idempotent=True)


def target(port) -> str:
    return f"127.0.0.1:{port}"


def bare(world, port, options=(), **more):
    """A channel with a connection of its own: wrong metadata leaves it open (docs/grpcio.md)."""
    api = grpc if world.name == "sync" else grpc.aio
    if options is not None:
        options = [*options, ("grpc.use_local_subchannel_pool", 1)]
    return api.insecure_channel(target(port), options=options, **more)


def by_interceptors(world, port):
    ours = world.interceptors.client_interceptors(POLICY)
    if world.name == "sync":
        return grpc.intercept_channel(bare(world, port), *ours)
    return bare(world, port, interceptors=ours)


def balanced(world, port, **options):
    return world.module("balancer").BalancedChannel("test.Shop", [instance(port)], **options)


CHANNELS = {
    "bare": bare,
    "intercepted": lambda world, port, **options: world.interceptors.intercept_channel(
        bare(world, port, **options), POLICY
    ),
    "kit": lambda world, port, **options: world.api.Kit.from_policy(POLICY).channel(
        target(port), **options
    ),
    "reconnecting": lambda world, port, **options: world.module("transport").ReconnectingChannel(
        target(port), **options
    ),
    "balanced": balanced,
    "by name": lambda world, port, **options: world.api.insecure_channel(
        f"headless://{target(port)}", **options
    ),
    "kit, balanced": lambda world, port, **options: world.api.Kit.from_policy(
        POLICY
    ).intercept_channel(balanced(world, port, **options)),
}
MORE_CHANNELS = CHANNELS | {
    "interceptors": by_interceptors,
    "ring hash": lambda world, port: balanced(world, port, lb_policy="ring_hash:user"),
}
each_channel = pytest.mark.parametrize("kind", CHANNELS)

STYLES = [
    (SyncWorld, "call"),
    (SyncWorld, "future"),
    (SyncWorld, "stream"),
    (AioWorld, "call"),
    (AioWorld, "stream"),
]
each_style = pytest.mark.parametrize(("world", "style"), STYLES, indirect=["world"])


def open_channel(world, kind, port, **options):
    return world.keep(world.do(lambda: MORE_CHANNELS[kind](world, port, **options)))


def of_error(error):
    """The code of a status, or the type of another exception."""
    return error.code() if isinstance(error, grpc.RpcError) else type(error)


def outcome(world, function, *args, **options):
    """The result of a function in its world, or its error."""
    try:
        return world.do(function, *args, **options)
    except Exception as error:  # noqa: BLE001 - compared
        return of_error(error)


@each_channel
def test_channels_take_none_for_options(shop, world, kind):
    channel = open_channel(world, kind, shop.port, options=None)
    assert world.call(channel, timeout=WAIT_S).result() == b"x"


# --- Written requests without a server (grpc.aio) ---


async def writes(call):
    results = []
    for step in (call.write(b"a"), call.write(b"b"), call.done_writing(), call.read()):
        try:
            results.append(await asyncio.wait_for(step, WAIT_S))
        except Exception as error:  # noqa: BLE001 - compared
            results.append(of_error(error))
    return results


async def writes_after_the_end(call):
    await call.code()
    return await writes(call)


@only_aio
@each_channel
def test_writes_without_a_server_end_as_with_grpc(world, dead, kind):
    channel = open_channel(world, kind, dead)
    for program, options, code in (
        (writes, {}, grpc.StatusCode.UNAVAILABLE),
        (writes, {"timeout": 0, "wait_for_ready": True}, grpc.StatusCode.DEADLINE_EXCEEDED),
        (writes_after_the_end, {}, grpc.StatusCode.UNAVAILABLE),
    ):
        first = code if program is writes else asyncio.InvalidStateError
        call = channel.stream_stream(STREAM_STREAM)
        results = world.do(lambda: program(call(**options)))  # noqa: B023 - called now
        if options and not isinstance(world.loop, asyncio.BaseEventLoop):  # uvloop
            assert results[0] in {code, asyncio.InvalidStateError}  # it may have ended before
            first = results[0]
        assert results == [first, asyncio.InvalidStateError, None, code]


@only_aio
@each_channel
def test_nothing_can_be_written_while_done_writing_waits_for_a_server(world, dead, kind):
    channel = open_channel(world, kind, dead)

    async def program():
        call = channel.stream_stream(STREAM_STREAM)(wait_for_ready=True)
        ending = asyncio.create_task(call.done_writing())
        await asyncio.sleep(0)
        with pytest.raises(asyncio.InvalidStateError):
            await call.write(b"lost")
        ending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ending
        assert call.cancelled()

    world.do(program)


# --- Arguments ---


def broken(_):
    raise KeyError


WRONG = [
    {"metadata": 42},
    {"metadata": [("a",)]},
    {"metadata": [("a", 5)]},
    {"metadata": [("a-bin", "text")]},
    {"request": "text"},
    {"request": "text", "serializer": broken},
    {"credentials": grpc.access_token_call_credentials("secret")},
]
RIGHT = {"metadata": [("a", b"b"), ("a-bin", b"c"), ("d", None)]}


def first_message(channel, style, *, request=b"x", serializer=None, **options):
    """A response of a call, in a style; awaitable in aio."""
    if style == "stream":
        call = channel.unary_stream(UNARY_STREAM, serializer)(request, **options)
        return call.read() if isinstance(channel, grpc.aio.Channel) else next(call)
    method = channel.unary_unary(UNARY_UNARY, serializer)
    if style == "future":
        return method.future(request, **options).result()
    return method(request, **options)


@each_channel
@each_style
def test_wrong_arguments_without_a_server_raise_as_with_grpc(world, style, dead, kind):
    def ends(kind):
        channel = open_channel(world, kind, dead)
        rows = (RIGHT, *WRONG)
        results = [outcome(world, first_message, channel, style, **row) for row in rows]
        if kind in ("reconnecting", "balanced", "by name"):
            assert wait_until(lambda: channel.calls == 0)
        return results

    expected = ends("bare")
    assert expected[0] is grpc.StatusCode.UNAVAILABLE
    if world.name == "sync":
        assert expected[1:3] == [TypeError, ValueError]
        assert expected[6] is grpc.StatusCode.INTERNAL
    else:
        assert expected[-1] is grpc.aio.UsageError
    assert ends(kind) == expected


@pytest.mark.parametrize(
    ("world", "style", "kind"),
    [
        (*STYLES[style], kind)
        for number, kind in enumerate(MORE_CHANNELS)
        for style in (number % 3, 3 + number % 2)  # one of grpc, and one of grpc.aio
    ],
    indirect=["world"],
)
def test_each_attempt_sends_the_metadata_of_an_iterator(world, style, shop, kind):
    shop.then("UNAVAILABLE")
    channel = open_channel(world, kind, shop.port)
    outcome(world, first_message, channel, style, metadata=iter([("user", "a")]))
    assert {seen.metadata.get("user") for seen in shop.calls} == {"a"}


# --- A closed channel ---


@only_aio
@each_channel
def test_a_closed_channel_refuses_to_wait_for_another_state(world, dead, kind):
    channel = open_channel(world, kind, dead)
    world.do(channel.close)
    for state in (grpc.ChannelConnectivity.SHUTDOWN, grpc.ChannelConnectivity.IDLE):
        assert outcome(world, channel.wait_for_state_change, state) is grpc.aio.UsageError
