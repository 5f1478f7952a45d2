"""A call of `grpc.aio` that forwards to its attempts, which begin and end while it is awaited.

With calls of gRPC in use: `contract/interceptors/test_as_grpc.py` and its neighbors.
"""

import asyncio
import gc
import threading
import weakref
from contextlib import aclosing

import grpc
import pytest

from fixtures.aio_channels import read_all, refused
from fixtures.leaks import no_garbage_collector
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel._grpc import aio_relay
from rpcwheel._grpc.aio_finished import failed_call, finished_call
from rpcwheel._grpc.aio_relay import (
    AwaitedRelay,
    ReadRelay,
    Relay,
    Signal,
    WrittenRelay,
    cancel_count,
    failure_of,
)
from rpcwheel._grpc.calls import CANCELLED_HERE
from rpcwheel.events import CallbackFailed
from rpcwheel.rpc import Kind

OK = grpc.StatusCode.OK
MADE_UP = "Internal error from Core"


class RecordingRelay(Relay):
    """A relay that records failed attempts and its end; the test decides what follows."""

    kind = Kind.UNARY_UNARY
    method = "/test.Shop/UnaryUnary"

    def __init__(self):
        self.failures = []
        self.ends = 0

    def _attempt_failed(self, call, error):
        self.failures.append((call, error))

    def _release(self):
        self.ends += 1

    def time_remaining(self):
        return None


class UnaryRelay(RecordingRelay, AwaitedRelay, grpc.aio.UnaryUnaryCall):
    pass


class StreamUnaryRelay(RecordingRelay, WrittenRelay, AwaitedRelay, grpc.aio.StreamUnaryCall):
    kind = Kind.STREAM_UNARY


class StreamStreamRelay(RecordingRelay, WrittenRelay, ReadRelay, grpc.aio.StreamStreamCall):
    kind = Kind.STREAM_STREAM

    def _attempt_failed(self, call, error):
        self.finish_failed(call, error)


class RunningAttempt:
    """An attempt that runs until the test ends it."""

    def __init__(self):
        self.end = None
        self._ended = asyncio.Event()
        self._callbacks = []

    def end_as(self, call):
        self.end = call
        self._ended.set()
        self.call_back()

    def call_back(self):
        for callback in self._callbacks:
            callback(self)

    def __await__(self):
        yield from self._ended.wait().__await__()
        return (yield from self.end.__await__())

    def done(self):
        return self.end is not None

    def cancel(self):
        self.end_as(finished_call(Kind.UNARY_UNARY, grpc.StatusCode.CANCELLED, "by the test"))
        return True

    def add_done_callback(self, callback):
        self._callbacks.append(callback)

    def cancelled(self):
        return self.done() and self.end.cancelled()

    def __getattr__(self, name):
        """The methods that wait for the status or the metadata."""
        if name.startswith("_"):
            raise AttributeError(name)

        async def of_end():
            await self._ended.wait()
            return await getattr(self.end, name)()

        return of_end


class UnwrittenAttempt(RunningAttempt):
    """An attempt whose requests could not be written: its `await` is canceled, yet it has a status.

    So grpc.aio 1.85 behaves.
    """

    def __await__(self):
        yield from self._ended.wait().__await__()
        raise asyncio.CancelledError


class StreamedAttempt(RunningAttempt):
    """An attempt whose iteration raises its first status."""

    async def __aiter__(self):
        await self._ended.wait()
        raise failure_of(self.end)
        yield  # makes it a generator


class SilentAttempt(RunningAttempt):
    """An attempt that sends the messages that are put into a queue; None is the end."""

    def __init__(self):
        super().__init__()
        self.messages = asyncio.Queue()

    async def __aiter__(self):
        while (message := await self.messages.get()) is not None:
            yield message


class UnreportedAttempt(UnwrittenAttempt):
    """An attempt whose `await` ends before its done-callbacks are called."""

    cancels = 0

    def cancel(self):
        self.cancels += 1
        self._ended.set()
        return True


def success(result=b"x"):
    return finished_call(Kind.UNARY_UNARY, OK, "", result=result)


def failure(code="UNAVAILABLE", details="gone", kind=Kind.UNARY_UNARY):
    return finished_call(kind, grpc.StatusCode[code], details)


async def awaiting(relay):
    """A task that awaits a call."""

    async def wait():
        return await relay

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    return task


@pytest.fixture
def relay():
    return UnaryRelay()


# Attempts


async def test_the_failure_of_a_call_is_the_error_of_its_last_attempt(relay):
    error = grpc.RpcError()
    relay.finish(failed_call(Kind.UNARY_UNARY, error))
    assert failure_of(relay) is error


async def test_only_the_first_end_counts(relay):
    relay.finish(success(b"first"))
    relay.finish(success(b"second"))
    assert (await relay, relay.ends) == (b"first", 1)


async def test_the_end_of_an_earlier_attempt_is_ignored(relay):
    relay.begin(earlier := RunningAttempt())
    relay.begin(later := RunningAttempt())
    earlier.end_as(success(b"earlier"))
    assert (relay.done(), relay.failures) == (False, [])
    later.end_as(success(b"later"))
    assert await relay == b"later"


async def test_done_callbacks_are_called_once_and_one_that_raises_is_reported(relay, events):
    called = []
    relay.add_done_callback(lambda _: 1 / 0)
    relay.add_done_callback(called.append)
    relay.begin(attempt := RunningAttempt())
    attempt.end_as(failure())
    assert called == []
    relay.finish(success())
    relay.add_done_callback(called.append)
    assert called == [relay, relay]
    (event,) = events
    assert isinstance(event, CallbackFailed)


@pytest.mark.parametrize("failed", [False, True])
async def test_a_finished_attempt_does_not_keep_the_call_alive(failed):
    """Calls of grpc.aio keep their callbacks, and are in cycles that are not collected."""
    relay = UnaryRelay()
    relay.begin(attempt := RunningAttempt())
    attempt.end_as(failure() if failed else success())
    alive = weakref.ref(relay)
    del relay
    gc.collect()
    assert alive() is None


# Cancellation


async def test_a_call_ends_although_the_coroutine_that_awaits_it_was_closed(relay):
    """As that of a task that its program drops."""

    async def wait():
        await relay

    relay.begin(attempt := RunningAttempt())
    waiting = wait()
    waiting.send(None)
    waiting.close()
    attempt.end_as(success())
    assert relay.done()


async def test_end_cancels_the_running_attempt_and_gives_the_caller_another_end(relay):
    relay.begin(attempt := UnreportedAttempt())
    task = await awaiting(relay)
    relay.end(failure())
    assert (relay.done(), relay.cancelled(), relay.ends, attempt.cancels) == (True, False, 1, 1)
    with pytest.raises(grpc.aio.AioRpcError, match="gone"):
        await task
    relay.end(failure("NOT_FOUND"))
    assert await relay.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_task_that_is_canceled_while_end_cancels_the_attempt_is_canceled(relay):
    relay.begin(UnreportedAttempt())
    task = await awaiting(relay)
    relay.end(failure())
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_a_response_that_has_arrived_precedes_end(relay):
    relay.begin(attempt := RunningAttempt())
    task = await awaiting(relay)
    attempt.end_as(success(b"in time"))
    relay.end(failure())
    assert await task == b"in time"
    assert await relay.code() is OK


async def test_a_response_that_arrives_after_end_is_dropped(relay):
    relay.begin(attempt := RunningAttempt())
    task = await awaiting(relay)
    attempt.cancel = lambda: attempt.end_as(success(b"too late"))
    relay.end(failure())
    with pytest.raises(grpc.aio.AioRpcError, match="gone"):
        await task


# Response streams


async def test_a_second_task_that_iterates_a_call_is_refused_and_does_not_end_it():
    relay = StreamStreamRelay()
    relay.begin(attempt := SilentAttempt())
    reading = asyncio.create_task(anext(aiter(relay)))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match=r"anext\(\): .* already running"):
        await anext(aiter(relay))
    await attempt.messages.put(b"a")
    assert await reading == b"a"
    await attempt.messages.put(b"b")
    assert await anext(aiter(relay)) == b"b"


async def test_an_iteration_that_was_left_can_be_continued_and_ends_once():
    relay = StreamStreamRelay()
    relay.begin(attempt := SilentAttempt())
    for message in (b"a", b"b"):
        await attempt.messages.put(message)
        async for each in relay:
            assert each == message
            break
    await attempt.messages.put(None)
    assert [each async for each in relay] == []
    assert [each async for each in relay] == []


async def test_an_iterator_that_is_closed_has_no_more_messages():
    relay = StreamStreamRelay()
    relay.begin(attempt := SilentAttempt())
    await attempt.messages.put(b"a")
    async with aclosing(aiter(relay)) as messages:
        assert await anext(messages) == b"a"
        reading = asyncio.create_task(anext(messages))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match=r"aclose\(\): .* already running"):
            await messages.aclose()
        await attempt.messages.put(b"b")
        assert await reading == b"b"
    assert await anext(messages, None) is None
    assert not relay.done()


@pytest.mark.parametrize("in_cycle", [False, True])
async def test_a_stream_that_is_dropped_on_another_thread_is_canceled_on_its_loop(in_cycle):
    relays, threads = [StreamStreamRelay()], []
    relays[0].add_done_callback(lambda _: threads.append(threading.get_ident()))
    attempt = SilentAttempt()
    attempt.add_done_callback(lambda _: threads.append(threading.get_ident()))
    relays[0].begin(attempt)
    if in_cycle:
        relays[0].cycle = relays[0]
    with no_garbage_collector():
        await asyncio.to_thread(lambda: (relays.clear(), gc.collect()))
    assert attempt.cancelled()
    assert threads == [threading.get_ident()] * 2


@pytest.mark.parametrize("in_cycle", [False, True])
async def test_a_stream_that_is_dropped_is_canceled_and_reported(in_cycle):
    """Python clears weak references before it frees a reference cycle."""
    relay, codes = StreamStreamRelay(), []
    relay.add_done_callback(lambda call: codes.append(call.final))
    relay.begin(attempt := SilentAttempt())
    if in_cycle:
        relay.cycle = relay
    with no_garbage_collector():
        del relay
        assert attempt.cancelled() is not in_cycle
    gc.collect()
    assert attempt.cancelled()
    assert [await end.code() for end in codes] == [grpc.StatusCode.CANCELLED]


async def test_a_task_that_waits_for_the_status_needs_no_other_reference():
    attempt, codes = SilentAttempt(), []

    async def wait():
        relay = StreamStreamRelay()
        relay.begin(attempt)
        codes.append(await relay.code())

    asyncio.get_running_loop().create_task(wait())
    await asyncio.sleep(0)
    gc.collect()
    attempt.end_as(failure("NOT_FOUND", kind=Kind.STREAM_STREAM))
    await aio_wait_until(lambda: codes)
    assert codes == [grpc.StatusCode.NOT_FOUND]


# Request streams


async def test_a_status_made_up_by_grpc_is_replaced_by_the_servers_own():
    relay = StreamUnaryRelay()
    relay.begin(attempt := RunningAttempt())
    attempt.end_as(failure("INTERNAL", MADE_UP, Kind.STREAM_UNARY))
    assert relay.failures == []
    attempt.end = failure(kind=Kind.STREAM_UNARY)
    attempt.call_back()
    ((call, _),) = relay.failures
    assert await call.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_call_that_is_dropped_while_it_waits_for_the_servers_own_status_ends():
    relay = StreamUnaryRelay()
    relay.begin(attempt := RunningAttempt())
    attempt.end_as(failure("INTERNAL", MADE_UP, Kind.STREAM_UNARY))
    attempt.end, failures = failure(kind=Kind.STREAM_UNARY), relay.failures
    del relay, attempt
    gc.collect()
    await aio_wait_until(lambda: failures)


async def test_a_stream_that_is_dropped_while_it_waits_for_that_status_is_canceled():
    relay, codes = StreamStreamRelay(), []
    relay.add_done_callback(lambda call: codes.append(call.final))
    relay.begin(attempt := RunningAttempt())
    attempt.end_as(failure("INTERNAL", MADE_UP, Kind.STREAM_STREAM))
    del relay
    assert [await end.code() for end in codes] == [grpc.StatusCode.CANCELLED]


@pytest.mark.parametrize("code", ["UNAVAILABLE", "INTERNAL"])
async def test_a_stream_waits_for_the_servers_own_status_without_a_callback(code, monkeypatch):
    """It ends with the status that was made up if no other comes (`INTERNAL`)."""
    monkeypatch.setattr(aio_relay, "STATUS_CHECK_DELAYS_S", (0.0, 0.0))
    relay = StreamStreamRelay()
    relay.begin(attempt := StreamedAttempt())
    reading = asyncio.create_task(read_all(relay))
    await asyncio.sleep(0)
    attempt.end_as(failure("INTERNAL", MADE_UP, Kind.STREAM_STREAM))
    if code != "INTERNAL":
        attempt.end = failure(code, kind=Kind.STREAM_STREAM)
    assert (await refused(reading)).code().name == code


@pytest.mark.parametrize(
    ("code", "details", "raises"),
    [
        ("CANCELLED", CANCELLED_HERE, asyncio.CancelledError),
        ("UNAVAILABLE", "gone", grpc.aio.AioRpcError),
    ],
)
async def test_a_status_made_up_by_grpc_does_not_replace_the_end_of_a_call(code, details, raises):
    relay = StreamUnaryRelay()
    relay.begin(attempt := RunningAttempt())
    attempt.end_as(failure(code, details, Kind.STREAM_UNARY))
    relay.finish_failed(attempt, failure_of(attempt.end))
    attempt.end = failure("INTERNAL", MADE_UP, Kind.STREAM_UNARY)
    assert (await relay.code(), await relay.details()) == (grpc.StatusCode[code], details)
    assert relay.cancelled() is (code == "CANCELLED")
    with pytest.raises(raises):
        await relay


@pytest.mark.parametrize("finishes_first", [False, True])
async def test_a_caller_whose_requests_could_not_be_written_gets_the_status(finishes_first):
    relay = StreamUnaryRelay()
    relay.begin(attempt := UnwrittenAttempt())
    task = await awaiting(relay)
    end = failure(kind=Kind.STREAM_UNARY)
    attempt.end_as(end)
    if finishes_first:
        relay.finish(end, source=attempt)
    else:
        asyncio.get_running_loop().call_later(0.01, relay.finish, end, attempt)
    with pytest.raises(grpc.aio.AioRpcError, match="gone"):
        await task


async def test_a_task_that_waits_for_that_status_may_be_canceled():
    relay = StreamUnaryRelay()
    relay.begin(attempt := UnwrittenAttempt())
    task = await awaiting(relay)
    attempt.end_as(failure(kind=Kind.STREAM_UNARY))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_a_write_ends_if_its_attempt_is_canceled_before_metadata_was_sent(shop):
    """A bare call of grpc.aio 1.85 would hang here; `test_canaries_aio.py` has the canary."""
    async with grpc.aio.insecure_channel(shop.target) as channel:
        relay = StreamStreamRelay()
        relay.begin(channel.stream_stream("/test.Shop/StreamStream")())
        writing = asyncio.create_task(relay.write(b"x"))
        await asyncio.sleep(0)
        relay.cancel()
        await asyncio.wait([writing], timeout=WAIT_S)
        assert writing.cancelled()


# Errors of interceptors


async def test_an_attempt_that_raised_no_status_is_reported_as_failed(relay):
    relay.begin(call := failed_call(Kind.UNARY_UNARY, KeyError("a bug")))
    ((failed, error),) = relay.failures
    assert (failed, type(error)) == (call, KeyError)


@pytest.mark.parametrize(
    ("details", "error"),
    [(CANCELLED_HERE, asyncio.CancelledError), ("not now", grpc.aio.AioRpcError)],
)
async def test_the_details_tell_who_canceled_a_call_that_is_not_grpcs_own(details, error):
    attempt = RunningAttempt()
    attempt.end_as(failure("CANCELLED", details))
    assert type(failure_of(attempt)) is error


# Signals and tasks


async def test_notify_completes_the_futures_of_the_tasks_that_wait():
    signal = Signal()
    first, second = signal.waiter(), signal.waiter()
    signal.forget(second)
    signal.notify()
    signal.notify()
    signal.forget(first)
    await first
    assert not second.done()


async def test_cancels_of_task_counts_how_often_the_running_task_was_canceled():
    counts = [cancel_count()]

    async def clean_up():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            counts.append(cancel_count())

    task = asyncio.create_task(clean_up())
    await asyncio.sleep(0)
    task.cancel()
    await task
    asyncio.get_running_loop().call_soon(lambda: counts.append(cancel_count()))  # no task
    await asyncio.sleep(0)
    assert counts == [0, 1, 0]


async def test_a_channel_can_be_closed_while_a_task_waits_for_a_relay(relay):
    """Before grpcio 1.83 `close` reads `_channel` of each call that it finds in a task's frame."""
    waiting = asyncio.create_task(relay.code())
    await asyncio.sleep(0)
    await grpc.aio.insecure_channel("127.0.0.1:1").close()
    assert not hasattr(grpc.aio.Call, "_channel")
    assert relay._channel is None
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
