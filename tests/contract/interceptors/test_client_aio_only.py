"""Calls of `grpc.aio` only: awaiting, tasks, iteration and `read`, callbacks, event loops."""

import asyncio
import gc
import weakref

import grpc
import pytest

from fixtures.aio_channels import others, read_all, refused, sent
from fixtures.client_interceptors import aio_interceptor, pass_on
from fixtures.event_loops import has_eager_tasks, uvloop
from fixtures.grpc_servers import IMPATIENT
from fixtures.grpcio import WAITING_ENDS_WITH_ITS_CHANNEL, all_channels_but
from fixtures.leaks import no_garbage_collector
from fixtures.shop import STREAM_STREAM, STREAM_UNARY, UNARY_STREAM, UNARY_UNARY, Fail, Hang, Silent
from fixtures.waiting import WAIT_S, aio_wait_until
from fixtures.worlds import KINDS, METHODS
from rpcwheel.call import CallPolicy, DeadlinePolicy, HedgingPolicy, RetryPolicy
from rpcwheel.failback import FailbackPolicy
from rpcwheel.interceptors import aio

PATIENT = RetryPolicy(retry_on="UNAVAILABLE", backoff=30.0, retry_budget=None)
HEDGED = CallPolicy(
    hedging=HedgingPolicy(delay=0, max_attempts=2, retry_budget=None), idempotent=True
)


async def test_a_call_that_is_not_awaited_is_retried(shop, own):
    async def done_callback(call):
        ended = asyncio.Event()
        call.add_done_callback(lambda _: ended.set())
        await ended.wait()

    for ask in (
        lambda call: call.code(),
        lambda call: call.details(),
        lambda call: call.trailing_metadata(),
        lambda call: aio_wait_until(call.done),
        done_callback,
    ):
        shop.reset()
        shop.then("UNAVAILABLE")
        call = own.retrying().unary_unary(UNARY_UNARY)(b"x")
        await ask(call)
        assert len(shop.calls) == 2
        assert await call.code() is grpc.StatusCode.OK


async def test_several_tasks_may_await_one_call(shop, own):
    shop.then("UNAVAILABLE")
    call = own.retrying().unary_unary(UNARY_UNARY)(b"x")
    assert await asyncio.gather(*(asyncio.wait_for(call, 9) for _ in range(3))) == [b"x"] * 3


INVOKE = "UnaryUnaryCall._invoke"
"""The coroutine of gRPC's task that waits for the core."""


async def test_hedged_attempts_that_are_overtaken_are_ended_by_the_core_of_grpc(shop, own, make):
    """If their tasks in gRPC are canceled, the core keeps 1 KB of each (docs/grpcio.md)."""
    channels = [
        own.open(HEDGED),
        own.open(HEDGED, inner=[aio_interceptor(pass_on)]),
        aio.intercept_channel(make(), HEDGED),
    ]
    for channel in channels:
        shop.reset()
        shop.then(Hang(), Hang())
        call = channel.unary_unary(UNARY_UNARY)(b"x")
        assert await aio_wait_until(lambda: len(shop.calls) == 2)
        tasks = [task for task in others() if task.get_coro().__qualname__ == INVOKE]
        assert len(tasks) == 2
        shop.calls[-1].ended.set()
        await call
        _, running = await asyncio.wait(tasks, timeout=WAIT_S)
        assert not running
        assert not any(task.cancelling() for task in tasks)


async def test_a_hedged_call_ends_if_all_other_tasks_are_canceled(shop, own):
    """`asyncio.run` does so at its end."""
    shop.then(Hang(), Hang())
    call = own.open(HEDGED).unary_unary(UNARY_UNARY)(b"x")
    assert await aio_wait_until(lambda: len(shop.calls) == 2)
    for task in others():
        task.cancel()
    assert await aio_wait_until(call.cancelled)


class Wrapped:
    """A call that forwards all but `cancel` to another, even its class."""

    def __init__(self, call):
        self.call = call
        self.is_canceled = False

    __class__ = property(lambda self: type(self.call))

    def __getattr__(self, name):
        return getattr(self.call, name)

    def __await__(self):
        return self.call.__await__()

    def cancel(self):
        self.is_canceled = self.is_canceled or not self.call.done()
        return self.call.cancel()


async def test_a_wrapped_attempt_that_is_overtaken_is_canceled_by_its_own_method(shop, own):
    calls = []

    async def wrap(continuation, details, request):
        calls.append(call := Wrapped(await continuation(details, request)))
        return call

    shop.then(Hang())
    channel = own.open(HEDGED, inner=[aio_interceptor(wrap)])
    assert await channel.unary_unary(UNARY_UNARY)(b"x") == b"x"
    assert sorted(call.is_canceled for call in calls) == [False, True]


async def answers(call):
    return await read_all(call) if hasattr(call, "read") else [await call]


@has_eager_tasks
async def test_calls_are_made_in_eager_tasks(shop, own):
    asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)
    channel = own.retrying()
    for kind, method in METHODS.items():
        begin, streams = getattr(channel, kind)(method), kind.startswith("stream")
        shop.then("UNAVAILABLE")
        assert await answers(begin(sent(b"x") if streams else b"x")) == [b"x"]
        if streams:
            written = begin()
            await written.write(b"x")
            await written.done_writing()
            assert await answers(written) == [b"x"]


async def test_a_message_that_arrives_just_before_message_timeout_is_received(shop, own, timer):
    going = DeadlinePolicy(message_timeout=2.0)
    call = own.retrying(timer=timer, timeout=going).stream_stream(STREAM_STREAM)()
    await call.write(b"a")
    assert await call.read() == b"a"
    reading = asyncio.ensure_future(call.read())
    await aio_wait_until(lambda: timer.pending)
    await call.write(b"b")
    await aio_wait_until(reading.done)
    timer.advance(2.0)  # no caller waits now
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF


async def test_read_and_iteration_can_not_be_mixed(channels):
    call = channels.retrying().unary_stream(UNARY_STREAM)(b"xy")
    assert await call.read() == b"x"
    if channels.name == "channel":  # grpc.aio's own call round ours lets it pass
        with pytest.raises(grpc.aio.UsageError):
            aiter(call)
    assert await call.read() == b"y"
    assert await call.read() is grpc.aio.EOF


async def test_an_intercepted_channel_has_the_interface_of_a_channel(own):
    channel = own.retrying()
    assert isinstance(channel, grpc.aio.Channel)
    idle = channel.get_state(try_to_connect=True)
    await channel.wait_for_state_change(idle)
    await channel.channel_ready()
    assert channel.get_state() is grpc.ChannelConnectivity.READY
    async with channel as same:
        assert same is channel
    assert channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN


async def test_multicallables_pass_on_all_arguments(own):
    channel = own.retrying()
    member = channel.unary_unary(
        UNARY_UNARY,
        request_serializer=str.encode,
        response_deserializer=bytes.decode,
        _registered_method=True,
    )
    assert isinstance(member, grpc.aio.UnaryUnaryMultiCallable)
    call = member("x", wait_for_ready=True, compression=grpc.Compression.Gzip, credentials=None)
    assert await call == "x"


async def test_a_call_with_only_a_deadline_is_grpcs_own(own):
    bare = own.open()
    channel = own.retrying(retry=None, timeout=WAIT_S)
    kinds = type(bare.unary_unary(UNARY_UNARY)(b"x")), type(bare.unary_stream(UNARY_STREAM)(b"x"))
    one, many = channel.unary_unary(UNARY_UNARY)(b"x"), channel.unary_stream(UNARY_STREAM)(b"x")
    assert (type(one), type(many)) == kinds
    assert await one == b"x"
    assert await read_all(many) == [b"x"]


async def test_a_successful_call_creates_no_task(own):
    bare = own.open().unary_unary(UNARY_UNARY)
    member = own.retrying(timeout=DeadlinePolicy(slow_call_threshold=9.0)).unary_unary(UNARY_UNARY)
    call = bare(b"x")
    tasks = len(others())
    await call
    call = member(b"x")
    assert len(others()) == tasks
    await call


async def test_a_retry_during_the_close_of_its_channel_is_canceled(shop, channels, timer):
    shop.then(hang := Hang(), "UNAVAILABLE")
    channel = channels.retrying(retry=PATIENT, timer=timer)
    other = channel.unary_unary(UNARY_UNARY)(b"o")
    await aio_wait_until(hang.begun.is_set)
    call = channel.unary_unary(UNARY_UNARY)(b"x")
    closing = asyncio.ensure_future(channel.close(0.1))
    await aio_wait_until(lambda: timer.pending or call.done())
    timer.advance(30)
    for one in (call, other):
        with pytest.raises(asyncio.CancelledError):
            await one
    await closing


@all_channels_but(interceptors=WAITING_ENDS_WITH_ITS_CHANNEL)
async def test_a_call_that_fails_during_the_close_of_its_channel_is_not_retried(
    shop, channels, timer
):
    shop.then(hang := Hang())
    retry = RetryPolicy(retry_on={"UNAVAILABLE", "CANCELLED"}, backoff=30.0, retry_budget=None)
    channel = channels.retrying(retry=retry, timer=timer)
    call = channel.unary_unary(UNARY_UNARY)(b"x")
    await aio_wait_until(hang.begun.is_set)
    closing = asyncio.ensure_future(channel.close(0.5))
    await asyncio.sleep(0)
    shop.kill()
    await closing
    shop.start()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not timer.pending


@pytest.mark.parametrize("where", ["attempt", "backoff"])
@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream"])
async def test_canceling_a_task_that_waits_for_a_response_cancels_the_call(
    shop, own, timer, kind, where
):
    is_stream = kind == "unary_stream"
    silent = Silent(after=1 if is_stream else 0)
    shop.then(silent if where == "attempt" else "UNAVAILABLE")
    channel = own.retrying(retry=PATIENT, timer=timer)
    call = getattr(channel, kind)(METHODS[kind])(b"xy")
    if is_stream and where == "attempt":
        assert await call.read() == b"x"
    waiting = asyncio.ensure_future(call.read() if is_stream else asyncio.wait_for(call, WAIT_S))
    await asyncio.sleep(0)  # it waits
    await aio_wait_until(silent.begun.is_set if where == "attempt" else lambda: timer.pending)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await aio_wait_until(call.cancelled)
    assert await call.code() is grpc.StatusCode.CANCELLED
    assert not timer.pending
    await aio_wait_until(shop.calls[0].ended.is_set)
    assert len(shop.calls) == 1


async def test_a_stream_that_is_dropped_between_two_attempts_ends_at_once(shop, own, timer):
    shop.then("UNAVAILABLE")
    slow = DeadlinePolicy(slow_call_threshold=9.0)
    channel = own.retrying(retry=PATIENT, timeout=slow, timer=timer)
    call = channel.unary_stream(UNARY_STREAM)(b"x")
    await aio_wait_until(lambda: timer.pending == 2)
    with no_garbage_collector():
        del call
        assert timer.pending == 0


async def test_a_unary_call_that_is_dropped_between_two_attempts_is_retried(shop, own, timer):
    shop.then("UNAVAILABLE")
    own.retrying(retry=PATIENT, timer=timer).unary_unary(UNARY_UNARY)(b"x")
    await aio_wait_until(lambda: timer.pending)
    gc.collect()
    timer.advance(30.0)
    await aio_wait_until(lambda: len(shop.calls) == 2)


@pytest.mark.parametrize("channels", ["interceptors"], indirect=True)
async def test_a_retry_that_is_canceled_before_its_task_runs_leaves_no_coroutine(
    shop, channels, timer
):
    shop.then("UNAVAILABLE")
    call = channels.retrying(retry=PATIENT, timer=timer).unary_unary(UNARY_UNARY)(b"x")
    await aio_wait_until(lambda: timer.pending)
    timer.advance(30.0)
    await asyncio.sleep(0)  # the task of the retry was created
    assert call.cancel()  # pytest reports a coroutine that was never awaited
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_canceling_a_task_that_waits_for_the_status_does_not_cancel_the_call(shop, own):
    shop.then(hang := Hang())
    call = own.retrying().unary_unary(UNARY_UNARY)(b"x")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(call.code(), 0.01)
    await aio_wait_until(hang.begun.is_set)
    assert not call.done()
    assert call.cancel()
    assert not call.cancel()


async def test_wait_for_connection_continues_over_a_retry(shop, own):
    shop.then("UNAVAILABLE")
    call = own.retrying().unary_unary(UNARY_UNARY)(b"x")
    await call.wait_for_connection()
    assert await call == b"x"
    shop.then("NOT_FOUND")
    await refused(own.retrying().unary_unary(UNARY_UNARY)(b"x").wait_for_connection())


async def test_the_error_has_the_attributes_of_grpcs_own(shop, own):
    shop.then(*[Fail("UNAVAILABLE", "gone", (("k", "v"),))] * 3)
    call = own.retrying().unary_unary(UNARY_UNARY)(b"x")
    error = await refused(call)
    assert tuple(error.trailing_metadata()) == (("k", "v"),)
    assert await call.debug_error_string() == error.debug_error_string()


@pytest.mark.skipif(uvloop is None, reason="uvloop is not installed")
def test_calls_work_on_uvloop(shop):
    policy = CallPolicy(
        timeout=DeadlinePolicy(
            timeout=WAIT_S, message_timeout=WAIT_S / 2, slow_call_threshold=WAIT_S / 2
        ),
        retry=RetryPolicy(retry_on="UNAVAILABLE", backoff=0.01),
        idempotent=True,
    )

    async def main():
        shop.then("UNAVAILABLE")
        bare = grpc.aio.insecure_channel(shop.target, options=IMPATIENT)
        async with aio.intercept_channel(bare, policy) as channel:
            assert await channel.unary_unary(UNARY_UNARY)(b"x") == b"x"
            assert await read_all(channel.stream_stream(STREAM_STREAM)(sent(b"x"))) == [b"x"]

    uvloop.run(main())


async def test_only_requests_that_may_be_sent_again_are_copied(own):
    copied = []

    class Dear:
        def __deepcopy__(self, memo):
            copied.append(self)
            return self

    once = {"retry": None, "timeout": DeadlinePolicy(slow_call_threshold=9.0)}
    for settings, copies in (once, 0), ({}, 1):
        channel = own.retrying(**settings)
        member = channel.unary_unary(UNARY_UNARY, request_serializer=lambda _: b"x")
        assert await member(Dear()) == b"x"
        assert len(copied) == copies


async def ended(multicallable, kind):
    """Make a call to its end; return weak references to it and to its error."""
    call = multicallable(b"x" if kind.startswith("unary") else iter([b"x"]))
    try:
        await (call if kind.endswith("unary") else read_all(call))
    except grpc.RpcError as error:
        return weakref.ref(call), weakref.ref(error)
    return (weakref.ref(call),)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"retry": None, "throttle": 1.1}, id="not sent"),
        pytest.param({}, id="retries"),
        pytest.param({"retry": None, "hedging": HEDGED.hedging}, id="hedging"),
        pytest.param(
            {"retry": None, "failback": FailbackPolicy(retry_on="UNAVAILABLE")}, id="refused"
        ),
    ],
)
async def test_failed_calls_are_freed_without_the_collector(shop, channels, settings):
    """In a cycle it would keep the request, which may be large, while a server is down."""
    queues = aio.FailbackQueues()
    await queues.close()
    channel = channels.retrying(**settings, queues=queues)
    shop.then(*["UNAVAILABLE"] * 80)
    with no_garbage_collector():
        for kind in KINDS * 6:
            left = await ended(getattr(channel, kind)(METHODS[kind]), kind)
            assert await aio_wait_until(lambda left=left: not any(each() for each in left))


async def test_a_call_is_freed_without_the_collector(shop, channels):
    with no_garbage_collector():
        (left,) = await ended(channels.retrying().unary_unary(UNARY_UNARY), "unary_unary")
        assert await aio_wait_until(lambda: left() is None)


async def test_a_call_whose_task_is_canceled_is_freed_without_the_collector(shop, channels):
    """As by `asyncio.wait_for`. In a cycle it would keep the request."""
    shop.then(Hang())
    multicallable = channels.retrying().unary_unary(UNARY_UNARY)
    calls = []

    async def wait():
        call = multicallable(b"x")
        calls.append(weakref.ref(call))
        await call

    with no_garbage_collector():
        task = asyncio.create_task(wait())
        assert await aio_wait_until(lambda: shop.calls)
        task.cancel()
        await asyncio.wait([task])
        del task
        assert await aio_wait_until(lambda: calls[0]() is None)


async def test_a_call_that_ends_while_its_requests_are_ended_keeps_its_status(shop, channels):
    shop.kill()
    call = channels.retrying().stream_unary(STREAM_UNARY)(iter(()))
    assert (await refused(call)).code() is grpc.StatusCode.UNAVAILABLE
