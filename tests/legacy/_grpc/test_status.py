"""What the errors of real calls of both worlds say."""

import asyncio

import grpc
import pytest

from fixtures.grpc_servers import IMPATIENT
from fixtures.shop import STREAM_STREAM, STREAM_UNARY, UNARY_STREAM, UNARY_UNARY, Fail, Hang
from fixtures.waiting import WAIT_S
from rpcwheel._grpc.calls import is_channel_closed
from rpcwheel.call.retry import FORBID_NS, result_of
from rpcwheel.rpc import AttemptResult

PUSHBACK = "grpc-retry-pushback-ms"
NO_CONNECTION = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: ..."


def failure(target):
    with (
        grpc.insecure_channel(target, options=IMPATIENT) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        make(channel, UNARY_UNARY)
    return caught.value


def make(channel, method):
    """Make a call of the method's kind, and read it to its end."""
    kind = method.rpartition("/")[2]
    if kind == "UnaryStream":
        list(channel.unary_stream(method)(b"ab", timeout=WAIT_S))
    elif kind == "StreamUnary":
        channel.stream_unary(method)(iter([b"a"]), timeout=WAIT_S)
    elif kind == "StreamStream":
        list(channel.stream_stream(method)(iter([b"a"]), timeout=WAIT_S))
    else:
        channel.unary_unary(method)(b"a", timeout=WAIT_S)


async def aio_failure(target):
    async with grpc.aio.insecure_channel(target, options=IMPATIENT) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            await channel.unary_unary(UNARY_UNARY)(b"a", timeout=WAIT_S)
    return caught.value


async def test_a_real_server_asks_for_a_wait_in_both_worlds(shop):
    for sent, asked_ns in [("250", 250_000_000), ("-1", FORBID_NS), ("9" * 5000, FORBID_NS)]:
        shop.then(*[Fail("UNAVAILABLE", trailing=((PUSHBACK, sent),))] * 2)
        here, there = failure(shop.target), await aio_failure(shop.target)
        assert result_of(here).pushback_ns == asked_ns
        assert result_of(there).pushback_ns == asked_ns


def test_the_text_of_a_relayed_failure_is_that_of_a_call_that_was_not_sent(shop):
    """So no retry relies on it: the server has executed this call (grpcio 1.85)."""
    shop.then(Fail("UNAVAILABLE", NO_CONNECTION))
    error = failure(shop.target)
    assert error.details() == NO_CONNECTION
    assert result_of(error) == AttemptResult("UNAVAILABLE", error=error)


def test_a_finished_call_tells_the_same_as_its_error(shop, shop_channel):
    shop.then(Fail("ABORTED", "again", ((PUSHBACK, "5"),)))
    call = shop_channel.unary_unary(UNARY_UNARY).future(b"a", timeout=WAIT_S)
    assert call.exception() is not None
    assert result_of(call) == AttemptResult("ABORTED", error=call, pushback_ns=5_000_000)


# --- Channels that were closed ---


def raised_by(make, *args):
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any, it is looked at
        make(*args)
    return caught.value


def begin_future(channel, _):
    channel.unary_unary(UNARY_UNARY).future(b"a")


@pytest.mark.parametrize("method", [UNARY_UNARY, UNARY_STREAM, STREAM_UNARY, STREAM_STREAM])
@pytest.mark.parametrize("begin", [make, begin_future])
def test_a_channel_that_is_closed_is_known_by_what_it_says(shop, method, begin):
    channel = grpc.insecure_channel(shop.target)
    channel.close()
    assert is_channel_closed(raised_by(begin, channel, method))


def test_a_channel_closed_under_a_call_is_known_by_what_it_says(shop):
    hang = Hang()
    shop.then(hang)
    channel = grpc.insecure_channel(shop.target)
    call = channel.unary_unary(UNARY_UNARY).future(b"a")
    assert hang.begun.wait(WAIT_S)
    channel.close()
    assert is_channel_closed(raised_by(call.result))


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream", "stream_unary", "stream_stream"])
async def test_a_channel_of_grpc_aio_that_is_closed_is_known_by_what_it_says(shop, kind):
    channel = grpc.aio.insecure_channel(shop.target)
    member = getattr(channel, kind)(UNARY_UNARY)
    await channel.close()
    assert is_channel_closed(raised_by(member, b"a" if kind.startswith("unary") else [b"a"]))


async def test_a_call_of_grpc_aio_whose_channel_is_closed_raises_no_more_than_cancelled(shop):
    """Hence the reason of failback that only guesses; with a text it could be sure."""
    hang = Hang()
    shop.then(hang)
    channel = grpc.aio.insecure_channel(shop.target)
    call = channel.unary_unary(UNARY_UNARY)(b"a")
    assert await asyncio.to_thread(hang.begun.wait, WAIT_S)
    await channel.close()
    with pytest.raises(asyncio.CancelledError) as caught:
        await call
    assert caught.value.args == ()
