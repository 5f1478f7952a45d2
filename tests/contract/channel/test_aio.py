"""A channel of grpc.aio whose connection is replaced: what becomes of it, and its end."""

import asyncio
import gc
import weakref

import grpc
import pytest

from fixtures.aio_channels import KINDS, Stub, hanging
from fixtures.aio_doors import refused
from fixtures.grpc_servers import IMPATIENT
from fixtures.shop import UNARY_UNARY, Hang
from fixtures.small_servers import METHOD, aio_serving
from fixtures.waiting import aio_wait_until
from rpcwheel.channel import _drain
from rpcwheel.channel.aio import DEFAULT_BACKOFF, ReconnectingChannel
from rpcwheel.errors import ConfigurationError
from rpcwheel.observe import ConnectionReplaced, ListenerFailed
from rpcwheel.timer import ManualTimer

SHUTDOWN = grpc.ChannelConnectivity.SHUTDOWN


def awaited(call, kind="unary_unary"):
    """A task that waits for the call's answer."""

    async def wait():
        return await (call if kind.endswith("unary") else call.read())

    return asyncio.create_task(wait())


# Replacing


async def test_a_new_connection_is_another_one_of_tcp():
    async def peer(request, context):
        return context.peer().encode()

    async with (
        aio_serving(grpc.unary_unary_rpc_method_handler(peer)) as target,
        ReconnectingChannel(target) as one,
        ReconnectingChannel(target) as other,
    ):
        first, second = (channel.unary_unary(METHOD) for channel in (one, other))
        peers = [await first(b""), await first(b""), await second(b"")]
        one.replace()
        peers += [await first(b""), await second(b"")]
    assert peers[0] == peers[1] != peers[3]
    assert peers[2] == peers[4]
    assert len(set(peers)) == 3


async def test_it_tells_what_it_is(channel, shop, events):
    await channel.channel_ready()
    call = await hanging(shop, channel)
    seen = (channel.target, channel.number, channel.calls, channel.closed)
    assert seen == (shop.target, 1, 1, False)
    assert channel.replace("rebalancing")
    assert (channel.number, channel.calls) == (2, 1)
    assert events == [ConnectionReplaced(shop.target, number=2, reason="rebalancing", calls=1)]
    call.cancel()


@pytest.mark.parametrize("kind", KINDS)
async def test_calls_in_flight_go_on_for_as_long_as_they_take(shop, channel, timer, kind):
    shop.then(hang := Hang())
    call = getattr(Stub(channel), kind)(b"x" if kind.startswith("unary") else None)
    await aio_wait_until(hang.begun.is_set)
    old = channel.links.active
    channel.replace()
    timer.advance(10**6)
    await asyncio.sleep(0.05)
    assert (channel.calls, call.done(), timer.pending) == (1, False, 0)
    shop.calls[-1].ended.set()  # the server's handler goes on, and ends the call
    if kind.startswith("stream"):
        await call.done_writing()
    await asyncio.wait([awaited(call, kind)])
    await aio_wait_until(lambda: channel.calls == 0)
    await aio_wait_until(lambda: old.channel.channel.get_state() is SHUTDOWN)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drain", [0, 0.0, 3.0])
async def test_calls_that_are_out_of_time_end_with_the_reason(shop, channel, timer, kind, drain):
    call = await hanging(shop, channel, kind)
    waiting = awaited(call, kind)
    await asyncio.sleep(0)
    channel.replace("no answer for 3 s", drain=drain)
    if drain:
        timer.advance(2.9)
        await asyncio.sleep(0.01)
        assert not call.done()
        timer.advance(0.2)
        await aio_wait_until(call.done)
    assert channel.calls == 0
    assert call.done()
    assert not call.cancelled()
    error = await refused(waiting)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert error.details() == "connection replaced: no answer for 3 s"
    assert await call.code() is grpc.StatusCode.UNAVAILABLE
    await aio_wait_until(shop.calls[-1].ended.is_set)  # the server learns of it


async def test_a_time_to_drain_that_is_not_needed_is_forgotten(shop, channel, timer):
    channel.replace(drain=5)
    assert timer.pending == 0
    await channel.unary_unary(UNARY_UNARY)(b"x")
    call = await hanging(shop, channel)
    channel.replace(drain=5)
    assert timer.pending == 1
    call.cancel()
    await aio_wait_until(lambda: timer.pending == 0)


@pytest.mark.parametrize("shared", [True, False])
async def test_what_a_timer_can_not_end_another_does(shop, make, events, monkeypatch, shared):
    timer = ManualTimer()
    if not shared:
        monkeypatch.setattr(_drain, "shared_timer", lambda: timer)  # then the loop does
    channel = make(timer=timer)
    timer.stop()
    call = await hanging(shop, channel)
    assert channel.replace(drain=0.05)
    assert not call.done()
    assert events == [ConnectionReplaced(shop.target, 2, "asked for", 1)]
    assert (await refused(call)).details() == "connection replaced: asked for"


async def test_without_a_timer_the_shared_one_ends_what_is_left(shop, make):
    channel = make(timer=None)
    call = await hanging(shop, channel)
    channel.replace(drain=0.05)
    assert (await refused(call)).code() is grpc.StatusCode.UNAVAILABLE


async def test_one_that_never_worked_is_replaced_again_only_after_a_while(make, timer):
    channel = make(backoff=2.0)
    assert [channel.replace(), channel.replace()] == [True, False]
    timer.advance(2.0)
    assert [channel.replace(), channel.replace()] == [True, False]
    assert [channel.replace(force=True), channel.number] == [True, 4]
    await channel.unary_unary(UNARY_UNARY)(b"x")
    assert channel.replace()


async def test_what_connect_raises_comes_out_and_nothing_has_changed(make, shop):
    answers = [grpc.aio.insecure_channel, OSError("no way"), lambda *_: None]

    def connect(options):
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        assert ("grpc.use_local_subchannel_pool", 1) in options
        return answer(shop.target, options)

    channel = make(connect=connect, options=IMPATIENT)
    with pytest.raises(OSError, match="no way"):
        channel.replace()
    with pytest.raises(TypeError, match="connect must return a new grpc"):
        channel.replace()
    assert channel.number == 1
    assert await channel.unary_unary(UNARY_UNARY)(b"x") == b"x"


async def test_connect_must_not_give_the_same_channel_twice(make, shop):
    bare = grpc.aio.insecure_channel(shop.target)
    channel = make(connect=lambda _: bare)
    with pytest.raises(ConfigurationError, match="a new channel each time"):
        channel.replace()
    assert await channel.unary_unary(UNARY_UNARY)(b"x") == b"x"


async def test_connect_must_not_give_a_channel_that_drains(make, shop):
    bare = [grpc.aio.insecure_channel(shop.target) for _ in range(2)]
    turns = [*bare, bare[0]]
    channel = make(connect=lambda _: turns.pop(0))
    call = await hanging(shop, channel)
    channel.replace()
    with pytest.raises(ConfigurationError, match="a new channel each time"):
        channel.replace(force=True)
    call.cancel()
    await aio_wait_until(lambda: channel.calls == 0)
    assert await channel.unary_unary(UNARY_UNARY)(b"x") == b"x"


async def test_what_a_wait_object_raises_comes_out_and_nothing_has_changed(make):
    channel = make(backoff=lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        channel.replace()
    assert channel.number == 1


async def test_tls_is_as_of_any_channel(make):
    channel = make(credentials=grpc.ssl_channel_credentials())
    assert channel.replace()


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"target": 7}, TypeError),
        ({"target": ""}, ConfigurationError),
        ({"connect": 7}, TypeError),
        ({"connect": print, "interceptors": [object()]}, ConfigurationError),
        ({"options": {"a": 1}}, TypeError),
        ({"backoff": "soon"}, TypeError),
        ({"timer": 7}, TypeError),
    ],
)
async def test_what_makes_no_sense_is_refused_at_once(make, given, error):
    with pytest.raises(error):
        make(**given)


async def test_replace_refuses_what_makes_no_sense(channel):
    with pytest.raises(TypeError):
        channel.replace(7)
    with pytest.raises(TypeError):
        channel.replace(drain="soon")
    assert channel.number == 1


def test_it_is_replaced_on_a_loop_only():
    made = []

    async def use():
        made.append(ReconnectingChannel("127.0.0.1:1"))

    asyncio.run(use())
    with pytest.raises(RuntimeError, match="no running event loop"):
        made[0].replace()


def test_the_default_backoff_is_full_jitter_up_to_a_minute():
    assert (DEFAULT_BACKOFF.multiplier, DEFAULT_BACKOFF.max, DEFAULT_BACKOFF.min) == (1, 60, 0)


# Its end


@pytest.mark.parametrize("grace", [None, 0.05])
async def test_close_ends_the_calls_on_all_connections_as_grpc_does(shop, channel, timer, grace):
    calls = []
    for drain in (None, 60.0, None):
        calls.append(await hanging(shop, channel))
        channel.replace(drain=drain, force=True)
    waiting = [awaited(call) for call in calls]
    await asyncio.sleep(0)
    assert timer.pending == 1
    await channel.close(grace)
    for task in waiting:
        with pytest.raises(asyncio.CancelledError):
            await task
    seen = (channel.closed, channel.calls, timer.pending, channel.get_state(), channel.replace())
    assert seen == (True, 0, 0, SHUTDOWN, False)
    await channel.close()


async def test_the_grace_of_close_is_for_all_connections(shop, channel):
    calls = [await hanging(shop, channel)]
    channel.replace()
    calls.append(await hanging(shop, channel))
    closing = asyncio.create_task(channel.close(30))
    await asyncio.sleep(0.05)
    assert not closing.done()
    with pytest.raises(grpc.aio.UsageError):
        channel.unary_unary(UNARY_UNARY)(b"x")
    for seen in shop.calls:
        seen.ended.set()
    await closing
    assert [call.done() and not call.cancelled() for call in calls] == [True, True]


async def test_a_close_that_is_cancelled_ends_all_at_once(shop, channel):
    calls = [await hanging(shop, channel)]
    channel.replace()
    calls.append(await hanging(shop, channel))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(channel.close(60), 0.05)
    await aio_wait_until(lambda: all(call.cancelled() for call in calls))
    await aio_wait_until(lambda: (channel.calls, channel.get_state()) == (0, SHUTDOWN))


async def test_a_second_close_has_the_last_word_on_the_grace(shop, channel):
    call = await hanging(shop, channel)
    first = asyncio.create_task(channel.close(60))
    await asyncio.sleep(0)
    await channel.close()
    await asyncio.wait_for(first, 20)
    assert call.cancelled()


async def test_a_grace_that_makes_no_sense_changes_nothing(shop, channel):
    call = await hanging(shop, channel)
    with pytest.raises(ConfigurationError, match="grace must be 0 seconds or more"):
        await channel.close(-1)
    assert not channel.closed
    call.cancel()


async def test_whatever_a_callback_raises_the_channel_is_closed(shop, channel):
    call = await hanging(shop, channel)

    def callback():
        raise GeneratorExit

    channel.on_close(callback)
    with pytest.raises(GeneratorExit):
        await channel.close()
    assert call.cancelled()


async def test_who_asked_is_told_of_the_close_once(channel, events):
    told = []
    channel.on_close(lambda: 1 / 0)
    channel.on_close(lambda: told.append(1))
    forget = channel.on_close(lambda: told.append("never"))
    forget()
    forget()
    await channel.close()
    await channel.close()
    assert told == [1]
    channel.on_close(lambda: told.append(2))
    assert told == [1, 2]
    (event,) = events
    assert isinstance(event, ListenerFailed)


async def test_what_forgets_a_callback_keeps_no_channel_alive(shop):
    channel = ReconnectingChannel(shop.target)
    forget, gone = channel.on_close(print), weakref.ref(channel)
    del channel
    await aio_wait_until(lambda: (gc.collect(), gone())[1] is None)
    forget()


async def test_one_that_is_dropped_is_gone_though_the_timer_holds_a_drain(shop, timer):
    async def dropped():
        # On its own: before 1.83 grpc.aio asks for the variables of all that waits when it closes a
        # channel, and Python up to 3.12 keeps those answers.
        channel = ReconnectingChannel(shop.target, timer=timer)
        call = await hanging(shop, channel)
        channel.replace(drain=600)
        call.cancel()
        await asyncio.sleep(0.05)  # not `until`: a lambda would hold the channel
        assert channel.calls == 0
        return weakref.ref(channel)

    gone = await dropped()
    await aio_wait_until(lambda: (gc.collect(), gone())[1] is None)
