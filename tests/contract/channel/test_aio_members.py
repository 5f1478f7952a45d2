"""The members of a stub: calls of each kind and style go to the connection that is active."""

import asyncio
import gc
import weakref

import grpc
import pytest

from fixtures.aio_channels import ANSWERS, KINDS, STYLES, Stub, hanging
from fixtures.aio_doors import others, refused
from fixtures.grpcio import BUGS_OF_INTERCEPTORS
from fixtures.shop import UNARY_STREAM, UNARY_UNARY, Fail, Hang, Silent
from fixtures.waiting import aio_wait_until
from rpcwheel import RetryPolicy, aio
from rpcwheel.channel import core


class Foreign(grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation, details, request):
        return await continuation(details, request)


class ForeignStream(grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(self, continuation, details, request):
        return await continuation(details, request)


KIT = aio.Kit(timeout=9.0, retry=RetryPolicy(on="UNAVAILABLE"))

WAYS = {
    "plain": lambda made: made(),
    "with interceptors": lambda made: made(interceptors=[Foreign(), ForeignStream()]),
    "below a kit": lambda made: KIT.intercept_channel(made()),
    "with a kit's interceptors": lambda made: made(interceptors=KIT.client_interceptors()),
}
"""What stubs are made of."""


@pytest.fixture(params=WAYS.values(), ids=WAYS.keys())
def both(request, make):
    """What stubs are made of, and the channel below."""
    made = []

    def noting(**given):
        made.append(make(**given))
        return made[0]

    return request.param(noting), made[0]


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES.keys())
@pytest.mark.parametrize("kind", KINDS)
async def test_a_stub_made_before_a_replacement_works_after_it(both, kind, style):
    outer, channel = both
    stub = Stub(outer)
    for number in (1, 2, 3):
        assert channel.number == number
        assert await style(stub, kind) == ANSWERS[kind]
        await aio_wait_until(lambda: channel.calls == 0)
        assert channel.replace()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_in_flight_is_counted_until_its_end(shop, channel, kind):
    shop.then(hang := Hang())
    call = getattr(Stub(channel), kind)(b"" if kind.startswith("unary") else None)
    await aio_wait_until(hang.begun.is_set)
    assert channel.calls == 1
    call.cancel()
    await aio_wait_until(lambda: channel.calls == 0)
    assert call.cancelled()


async def test_a_call_that_nobody_awaits_runs_to_its_end_and_is_counted_down(channel):
    channel.unary_unary(UNARY_UNARY)(b"x")
    assert channel.calls == 1
    await aio_wait_until(lambda: channel.calls == 0)


@pytest.mark.parametrize("reads", ["not begun", "read", "iterated"])
@pytest.mark.parametrize("drains", [False, True])
async def test_a_stream_that_its_caller_has_forgotten_is_cancelled(shop, channel, drains, reads):
    shop.then(silent := Silent(after=1))
    call = channel.unary_stream(UNARY_STREAM)(b"ab")
    if reads == "read":
        assert await call.read() == b"a"
    elif reads == "iterated":
        async for _ in call:
            break
    await aio_wait_until(silent.begun.is_set)
    if drains:
        assert channel.replace()
    gone = weakref.ref(call)
    del call
    gc.collect()
    await aio_wait_until(lambda: (gc.collect(), gone())[1] is None)
    await aio_wait_until(lambda: channel.calls == 0)
    await aio_wait_until(shop.calls[-1].ended.is_set)


async def test_a_call_costs_no_task_of_its_own(shop, channel, make):
    bare = grpc.aio.insecure_channel(shop.target)
    counts = []
    for one in (bare, channel):
        shop.then(Hang(), Hang())
        before = len(others())
        calls = [one.unary_unary(UNARY_UNARY)(b"x"), one.unary_stream(UNARY_STREAM)(b"x")]
        await asyncio.sleep(0.05)
        counts.append(len(others()) - before)
        for call in calls:
            call.cancel()
        await aio_wait_until(lambda before=before: len(others()) == before)
    await bare.close()
    assert counts[1] == counts[0] > 0


async def test_a_failure_is_told_as_on_a_bare_channel(shop, channel):
    for code in ("NOT_FOUND", "UNAVAILABLE"):
        shop.then(Fail(code, "no such thing", trailing=(("why", "so"),)))
        error = await refused(channel.unary_unary(UNARY_UNARY)(b"x"))
        assert (error.code().name, error.details()) == (code, "no such thing")
        assert ("why", "so") in tuple(error.trailing_metadata())
    assert channel.calls == 0


@BUGS_OF_INTERCEPTORS
async def test_a_call_of_which_an_interceptor_makes_nothing_is_not_counted_for_ever(make):
    class Broken(grpc.aio.UnaryUnaryClientInterceptor):
        async def intercept_unary_unary(self, continuation, details, request):
            raise KeyError("a bug")

    channel = make(interceptors=[Broken()])
    member = channel.unary_unary(UNARY_UNARY)
    with pytest.raises(KeyError):
        await member(b"awaited")
    assert channel.calls == 0
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda *_: None)  # grpc.aio's own callback breaks
    member(b"forgotten")
    await aio_wait_until(lambda: (gc.collect(), channel.calls)[1] == 0)


async def test_what_begins_no_call_is_not_counted(channel):
    with pytest.raises(TypeError):
        channel.unary_unary(UNARY_UNARY)(b"x", wrong=True)
    with pytest.raises(TypeError):
        channel.unary_unary()
    await channel.close()
    with pytest.raises(grpc.aio.UsageError, match=r"Channel is closed\."):
        channel.unary_unary(UNARY_UNARY)(b"x")
    assert channel.calls == 0


async def test_the_time_that_a_call_has_left_is_told(shop, channel):
    shop.then(Hang())
    call = channel.unary_unary(UNARY_UNARY)(b"x", timeout=500)
    assert 400 < call.time_remaining() <= 500
    call.cancel()
    assert channel.unary_unary(UNARY_UNARY)(b"x").time_remaining() is None


# Traffic


async def test_messages_stamp_the_traffic_of_the_active_connection(channel, timer):
    traffic = channel.traffic
    assert (traffic.last_read_ns, traffic.last_write_ns, traffic.last_use_ns) == (None, None, None)
    timer.advance(5)
    await channel.unary_unary(UNARY_UNARY)(b"x")
    assert traffic.last_read_ns == traffic.last_write_ns == traffic.last_use_ns == 5 * 10**9
    channel.replace()
    assert channel.traffic is not traffic
    assert channel.traffic.last_use_ns is None


@pytest.mark.parametrize("question", ["code", "initial_metadata", "add_done_callback"])
async def test_an_answer_stamps_it_too_if_more_was_asked_before(channel, timer, question):
    call = channel.unary_unary(UNARY_UNARY)(b"x")
    timer.advance(5)
    if question == "add_done_callback":
        call.add_done_callback(lambda _: None)
    else:
        await getattr(call, question)()
    assert await call == b"x"
    assert channel.traffic.last_read_ns == channel.traffic.last_use_ns == 5 * 10**9


async def test_a_call_that_is_cancelled_is_no_sign_of_life(shop, channel):
    call = await hanging(shop, channel)
    call.add_done_callback(lambda _: None)
    assert call.cancel()
    assert channel.traffic.last_read_ns is None


async def test_the_begin_of_a_request_stream_is_use_before_there_is_a_request(shop, channel):
    shop.then(Hang())
    call = Stub(channel).stream_stream()
    assert channel.traffic.last_use_ns is not None
    assert channel.traffic.last_read_ns is None
    call.cancel()


@pytest.mark.parametrize("code", [code.name for code in grpc.StatusCode if code.name != "OK"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_status_that_only_a_server_gives_is_a_sign_of_life(
    shop,
    channel,
    kind,
    code,
):
    shop.then(Fail(code, read=True))
    for style in STYLES.values():
        with pytest.raises(grpc.aio.AioRpcError):
            await style(Stub(channel), kind)
        break
    assert (channel.traffic.last_read_ns is not None) is (code in core.ANSWERS)


async def test_a_failure_on_this_side_is_no_sign_of_life(make):
    channel = make(options=[("grpc.max_send_message_length", 10)])
    error = await refused(channel.unary_unary(UNARY_UNARY)(b"x" * 100))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert channel.traffic.last_read_ns is None


async def test_serializers_are_kept_and_a_call_without_them_is_of_bytes(channel):
    member = channel.unary_unary(UNARY_UNARY, str.encode, bytes.decode)
    assert await member("text") == "text"
    registered = channel.unary_unary(UNARY_UNARY, str.encode, bytes.decode, True)
    assert await registered("text") == "text"
    named = channel.unary_unary(UNARY_UNARY, _registered_method=True)
    assert await named(b"bytes") == b"bytes"


# For the heartbeat


async def test_a_heartbeats_call_is_neither_use_nor_in_flight(shop, channel, timer):
    ping = channel.heartbeat_call(UNARY_UNARY)
    call = ping(b"hello", timeout=9)
    assert channel.calls == 0
    assert await call == b"hello"
    assert channel.traffic.last_use_ns is None
    assert channel.traffic.last_read_ns is None


async def test_a_heartbeat_goes_to_the_connection_of_the_moment(shop, channel):
    ping = channel.heartbeat_call(UNARY_UNARY)
    assert await ping(b"1") == b"1"
    shop.then(hang := Hang())
    call = ping(b"2")
    await aio_wait_until(hang.begun.is_set)
    channel.replace("silent")
    error = await refused(call)
    assert (error.code().name, error.details()) == ("UNAVAILABLE", "connection replaced: silent")
    assert await ping(b"3") == b"3"
