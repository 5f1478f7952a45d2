"""A balanced channel of grpc.aio as a channel: its state, its loop, its end."""

import asyncio
import gc
import weakref

import grpc
import pytest

import rpcwheel
from fixtures.aio_balanced_channels import (
    awaiting,
    caller,
    connect_all,
    counts,
    hanging,
    still_waits,
    subchannel_of,
)
from fixtures.aio_channels import KINDS, Stub, steps
from fixtures.aio_policy_channels import others, refused
from fixtures.balanced_channels import instance
from fixtures.grpc_servers import IMPATIENT
from fixtures.shop import UNARY_UNARY
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel.balancer import BalancerPolicy
from rpcwheel.balancer.aio import BalancedChannel
from rpcwheel.errors import ConfigurationError
from rpcwheel.events import CallbackFailed

State = grpc.ChannelConnectivity

try:
    import uvloop
except ImportError:  # not on Windows
    uvloop = None
else:
    uvloop.new_event_loop().close()  # the first one opens a pipe that libuv keeps (signal.c)

PATIENT = BalancerPolicy(pick_timeout=WAIT_S)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"name": ""}, ConfigurationError, r"name.*shop\.Orders"),
        ({"lb_policy": "nonsense"}, ConfigurationError, "lb_policy"),
        ({"instances": ["10.0.0.7:50051"]}, TypeError, r"ServiceInstance, not '10\.0\.0\.7"),
        ({"balancer_policy": {"drain_timeout": 5}}, TypeError, "must be a BalancerPolicy"),
        ({"interceptors": [5]}, TypeError, "interceptors must be"),
        ({"on_subchannel": 5}, TypeError, "on_subchannel must be callable"),
        ({"on_removed": 5}, TypeError, "on_removed must be callable"),
        ({"connect": 5}, TypeError, "connect"),
        ({"options": {"a": 1}}, TypeError, "options must be pairs"),
        ({"credentials": "secret"}, TypeError, "credentials"),
        ({"timer": 5}, TypeError, "timer"),
        (
            {"connect": print, "interceptors": ()},
            ConfigurationError,
            "not allowed together with connect",
        ),
    ],
)
async def test_wrong_arguments_are_refused(given, error, message):
    with pytest.raises(error, match=message):
        BalancedChannel(**{"name": "test.Shop"} | given)


# State


async def test_its_state_is_the_best_of_its_subchannels(shops, dead, aio_balanced):
    channel = aio_balanced()
    assert isinstance(channel, grpc.aio.Channel)
    assert channel.get_state() is State.CONNECTING
    channel.report_error("the registry is unreachable", wait=True)
    assert channel.get_state() is State.CONNECTING
    channel.report_error("the registry is unreachable")
    assert channel.get_state() is State.TRANSIENT_FAILURE
    channel.update([])
    assert channel.get_state() is State.TRANSIENT_FAILURE
    channel.update([instance(dead), instance(shops[0])])
    assert channel.get_state() is State.IDLE
    await caller(channel)()
    assert channel.get_state() is State.READY
    await channel.close()
    assert channel.get_state() is State.SHUTDOWN


async def test_channel_ready_connects_and_waits_across_updates(shops, dead, aio_balanced):
    channel = aio_balanced()
    ready = asyncio.create_task(channel.channel_ready())
    for instances in ([], [instance(dead)], [instance(dead), instance(shops[0])]):
        assert await still_waits(ready)
        channel.update(instances)
    await asyncio.wait_for(ready, WAIT_S)
    assert channel.get_state() is State.READY


async def test_channel_ready_raises_if_the_channel_is_closed(dead, aio_balanced):
    channel = aio_balanced(dead)
    ready = asyncio.create_task(channel.channel_ready())
    await steps(20)
    await channel.close()
    for waiting in (ready, channel.channel_ready()):
        with pytest.raises(grpc.aio.UsageError, match=r"Channel is closed\."):
            await asyncio.wait_for(waiting, WAIT_S)


async def test_a_change_of_the_state_is_awaited_and_leaves_no_task(shops, aio_balanced):
    channel = aio_balanced(*shops[:2])
    await connect_all(channel)
    before = len(others())
    changed = asyncio.create_task(channel.wait_for_state_change(State.READY))
    assert await still_waits(changed)
    shops[0].kill()
    shops[1].kill()
    await asyncio.wait_for(changed, WAIT_S)
    await asyncio.wait_for(channel.wait_for_state_change(State.READY), WAIT_S)
    canceled = asyncio.create_task(channel.wait_for_state_change(State.SHUTDOWN))
    await asyncio.sleep(0)
    canceled.cancel()
    await aio_wait_until(lambda: len(others()) <= before)


async def test_subchannels_that_hide_their_state_count_as_ready(shops, aio_balanced, events):
    def hidden(*_, **__):
        raise NotImplementedError

    def connect(one, options):
        channel = grpc.aio.insecure_channel(one.target, options)
        channel.get_state = hidden
        return channel

    channel = aio_balanced(shops[0], connect=connect)
    assert await caller(channel)() == b"x"
    assert channel.get_state() is State.READY
    await channel.channel_ready()
    assert events == []


async def test_repr_and_names(shops, dead, aio_balanced):
    channel = aio_balanced(dead, shops[0])
    subchannel_of(channel, dead).mark_unhealthy("the test wants it")
    assert repr(channel) == (
        "<BalancedChannel of grpc.aio 'test.Shop', 2 subchannels, 1 unhealthy, calls in flight: 0>"
    )
    assert (channel.name, channel.target) == ("test.Shop", "test.Shop")
    (subchannel,) = aio_balanced(50051).subchannels
    assert (subchannel.address, subchannel.channel.target) == (
        "127.0.0.1:50051",
        "ipv4:127.0.0.1:50051",
    )
    await channel.close()
    assert repr(channel) == "<BalancedChannel of grpc.aio 'test.Shop', closed, calls in flight: 0>"


# Connections


async def test_compression_and_connect_are_used(shops, aio_balanced):
    compressed = aio_balanced(shops[0], compression=grpc.Compression.Gzip)
    own = aio_balanced(shops[0], connect=lambda one, options: grpc.aio.insecure_channel(one.target))
    for channel in (compressed, own):
        assert await caller(channel)() == b"x"


async def test_errors_of_connect_are_in_the_status_of_calls(shops, aio_balanced, events):
    def connect(one, options):
        if one.port == shops[1].port:
            return object()  # such as a channel of grpc
        raise RuntimeError("no way")

    channel = aio_balanced(*shops[:2], connect=connect)
    error = await refused(caller(channel)())
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert error.details().startswith("none of 2 servers of test.Shop can be reached: ")
    assert "connect raised RuntimeError('no way')" in error.details()
    assert "connect must return a new grpc.aio.Channel" in error.details()
    assert {type(event) for event in events} == {CallbackFailed}
    with pytest.raises(RuntimeError, match="no way"):
        subchannel_of(channel, shops[0]).channel  # noqa: B018


async def test_credentials_select_the_instances_with_tls(certificates, aio_balanced, dead):
    async def echo(request, context):
        return request

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(echo)
    handlers = grpc.method_handlers_generic_handler("test.Shop", {"UnaryUnary": handler})
    server.add_generic_rpc_handlers([handlers])
    port = server.add_secure_port("localhost:0", certificates.server_credentials())
    await server.start()
    both = [instance(port, host="localhost", protocol="grpcs"), instance(dead)]
    secure = aio_balanced(credentials=certificates.channel_credentials())
    secure.update(both)
    assert await caller(secure)() == b"x"
    assert [one.instance.port for one in secure.subchannels] == [port]
    unknown = aio_balanced(credentials=grpc.ssl_channel_credentials())  # with grpc's roots
    unknown.update(both)
    assert (await refused(caller(unknown)())).code() is grpc.StatusCode.UNAVAILABLE
    plain = aio_balanced()
    plain.update(both)
    for wait_for_ready in (False, True):
        error = await refused(caller(plain)(wait_for_ready=wait_for_ready))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    await server.stop(None)


async def test_heartbeats_can_be_attached_to_each_subchannel(shops, aio_balanced, timer):
    manager = rpcwheel.heartbeat.aio.HeartbeatManager(timer=timer, interval=1.0)
    channel = aio_balanced(*shops, on_subchannel=lambda one: manager.attach(one.channel))
    await connect_all(channel)
    assert timer.pending == 3
    await channel.close()
    await aio_wait_until(lambda: timer.pending == 0)
    manager.close()


# Its loop, and other threads


def test_it_may_be_made_and_updated_before_there_is_a_loop(shops, timer):
    given = {"timer": timer, "balancer_policy": PATIENT, "options": IMPATIENT}
    made = BalancedChannel("test.Shop", [instance(shops[0])], **given)
    waiting = BalancedChannel("test.Shop", **given)
    waiting.update([instance(shops[2])])
    waiting.update([instance(shops[1])])
    made.subchannels[0].mark_unhealthy("the test wants it")
    assert (len(made.subchannels), len(waiting.subchannels)) == (1, 1)

    async def call():
        async with made, waiting:
            return [await caller(channel)() for channel in (made, waiting)]

    assert asyncio.run(call()) == [b"x", b"x"]
    assert (counts(shops), timer.pending) == ([1, 1, 0], 0)


async def test_other_threads_may_update_it(shops, aio_balanced):
    channel = aio_balanced()
    call = awaiting(caller(channel)())
    await asyncio.sleep(0)
    await asyncio.to_thread(channel.update, [instance(shops[0])])
    assert await call == b"x"
    for number in range(50):
        await asyncio.to_thread(channel.update, [instance(shops[number % 3])])
    assert [one.address for one in channel.subchannels] == [shops[1].target]
    assert await caller(channel)() == b"x"
    unknown = aio_balanced()
    call = awaiting(caller(unknown)())
    await asyncio.sleep(0)
    await asyncio.to_thread(unknown.report_error, "the registry is unreachable")
    assert "the registry is unreachable" in (await refused(call)).details()
    before = channel.subchannels
    with pytest.raises(TypeError, match="ServiceInstance"):
        await asyncio.to_thread(channel.update, [instance(shops[0]), None])
    assert channel.subchannels is before


async def test_other_threads_may_mark_subchannels(shops, aio_balanced):
    channel = aio_balanced(*shops[:2])
    await connect_all(channel)
    first, second = channel.subchannels

    def mark():
        for _ in range(200):
            first.mark_unhealthy()
            second.mark_unhealthy()
            first.mark_healthy()
            second.mark_healthy()

    marking = asyncio.create_task(asyncio.to_thread(mark))
    call = caller(channel)
    while not marking.done():
        assert await call() == b"x"
    await marking
    assert (first.healthy, second.healthy) == (True, True)


@pytest.mark.skipif(uvloop is None, reason="uvloop is not installed")
def test_calls_of_each_kind_and_their_end_on_uvloop(shops, timer):
    async def main():
        channel = BalancedChannel("test.Shop", timer=timer, balancer_policy=PATIENT)
        stub = Stub(channel)
        waiting = [awaiting(stub.unary_unary(b"ab")), awaiting(stub.stream_unary([b"a", b"b"]))]
        reading = awaiting(stub.unary_stream(b"ab").read())
        await asyncio.to_thread(channel.update, [instance(shop) for shop in shops])
        assert await asyncio.gather(*waiting, reading) == [b"ab", b"ab", b"a"]
        await channel.channel_ready()
        running = await hanging(shops[0], subchannel_of(channel, shops[0]).channel)
        await channel.close(0.01)
        with pytest.raises(asyncio.CancelledError):
            await running

    uvloop.run(main())


# Closing


async def test_it_is_closed_at_the_end_of_async_with(shops, timer):
    async with BalancedChannel(
        "s", [instance(shops[0])], timer=timer, balancer_policy=PATIENT
    ) as channel:
        assert await caller(channel)() == b"x"
    assert channel.closed


@pytest.mark.parametrize("grace", [None, 0.05])
async def test_closing_cancels_calls_and_runs_callbacks_once(shops, aio_balanced, timer, grace):
    channel, called = aio_balanced(shops[0]), []
    running = await hanging(shops[0], channel)
    subchannel = channel.subchannels[0]
    subchannel.mark_unhealthy("the test wants it")
    assert timer.pending == 1
    channel.on_close(lambda: called.append(running.done()))
    await channel.close(grace)
    await channel.close()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (channel.closed, channel.subchannels, subchannel.state) == (True, (), State.SHUTDOWN)
    assert (called, timer.pending) == ([False], 0)
    stub = Stub(channel)
    for kind in KINDS:
        with pytest.raises(grpc.aio.UsageError, match=r"Channel is closed\."):
            getattr(stub, kind)(b"x")
    channel.on_close(lambda: called.append("late"))
    assert called == [False, "late"]


async def test_calls_end_within_the_grace(shops, aio_balanced):
    channel = aio_balanced(shops[0])
    running = await hanging(shops[0], channel)
    closing = asyncio.create_task(channel.close(WAIT_S))
    assert await still_waits(closing)
    assert channel.closed
    with pytest.raises(grpc.aio.UsageError):
        caller(channel)()
    shops[0].calls[0].ended.set()
    assert await running == b"x"
    await closing


async def test_a_waiting_call_begins_and_ends_within_the_grace(shops, aio_balanced):
    channel = aio_balanced()
    waiting = awaiting(caller(channel)())
    await asyncio.sleep(0)
    closing = asyncio.create_task(channel.close(WAIT_S))
    assert await still_waits(closing)
    channel.update([instance(shops[0])])
    assert await waiting == b"x"
    await closing


@pytest.mark.parametrize("grace", [None, 0.05])
async def test_waiting_calls_are_canceled_after_the_grace(aio_balanced, grace):
    channel = aio_balanced()
    stub = Stub(channel)
    waiting = [stub.unary_unary(b"x"), stub.unary_stream(b"x"), stub.stream_unary()]
    await asyncio.sleep(0)
    await channel.close(grace)
    assert [call.cancelled() for call in waiting] == [True] * 3
    assert channel.calls == 0


async def test_a_second_close_without_a_grace_ends_the_first(shops, aio_balanced):
    channel = aio_balanced(shops[0])
    running = await hanging(shops[0], channel)
    waiting = caller(aio_balanced())()
    closing = asyncio.create_task(channel.close(1000))
    await steps()
    await channel.close()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.wait_for(closing, WAIT_S)
    waiting.cancel()


@pytest.mark.parametrize("begun", [True, False])
async def test_canceling_close_cancels_the_calls(shops, aio_balanced, begun):
    channel = aio_balanced(*shops[:1] if begun else ())
    running = await hanging(shops[0], channel) if begun else awaiting(caller(channel)())
    await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await channel.close(1000)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(running, WAIT_S)


async def test_a_negative_grace_is_refused(aio_balanced):
    channel = aio_balanced(50051)
    with pytest.raises(ConfigurationError, match="grace must be 0 seconds or more"):
        await channel.close(-1)
    assert not channel.closed


async def test_closing_ends_subchannels_that_drain(shops, aio_balanced):
    channel = aio_balanced(shops[0])
    running = await hanging(shops[0], channel)
    channel.update([instance(shops[1])])
    await channel.close()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_closing_ends_a_health_check_that_runs(shops, aio_balanced):
    channel = aio_balanced(shops[0], policy={"health_check_timeout": 500})
    await connect_all(channel)
    shops[0].kill()
    channel.update([])  # checks with wait_for_ready whether it still answers
    await steps()
    await asyncio.wait_for(channel.close(), WAIT_S)


async def test_a_close_callback_may_be_removed_and_may_fail(shops, aio_balanced, events):
    channel, called = aio_balanced(shops[0]), []
    remove = channel.on_close(lambda: called.append("removed"))
    channel.on_close(lambda: 1 / 0)
    channel.on_close(lambda: called.append("called"))
    remove()
    remove()
    await channel.close()
    assert called == ["called"]
    assert [type(event) for event in events] == [CallbackFailed]


async def test_a_dropped_channel_is_collected(shops, timer):
    given = {"timer": timer, "options": IMPATIENT, "balancer_policy": PATIENT}
    channel = BalancedChannel("s", [instance(one) for one in shops], **given)
    await channel.unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S)
    channel.subchannels[0].mark_unhealthy("the test wants it")
    remove = channel.on_close(print)
    gone = [weakref.ref(channel), weakref.ref(channel.subchannels[0])]
    del channel
    await aio_wait_until(lambda: (gc.collect(), [one() for one in gone])[1] == [None, None])
    timer.advance(60)  # the health check finds no channel
    remove()
    assert timer.pending == 0
