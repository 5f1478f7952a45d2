"""A call of grpc.aio that is answered by others: what it shows while they come and go.

In use, beside a bare channel's calls: `interceptors/test_aio_contract.py` and its neighbours.
"""

import asyncio
import gc
import weakref

import grpc
import pytest

from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel._grpc.aio_finished import failed_call, finished_call
from rpcwheel._grpc.aio_relay import (
    AwaitedRelay,
    ReadRelay,
    Relay,
    Signal,
    WrittenRelay,
    cancels_of_task,
)
from rpcwheel.events import CallbackFailed
from rpcwheel.rpc import Kind

OK = grpc.StatusCode.OK


class Conductor:
    """Notes what the relay tells; what follows a failed try is the test's matter."""

    kind = Kind.UNARY_UNARY
    method = "/test.Shop/UnaryUnary"
    requests = None

    def __init__(self, kind: Kind = Kind.UNARY_UNARY) -> None:
        self.kind = kind
        self.failures = []
        self.ends = 0

    def failed(self, relay, call, error):
        self.failures.append((call, error))

    def finished(self):
        self.ends += 1

    def time_remaining(self):
        return 7.0

    def listen(self, relay, call):
        return None


class Conducted(Relay):
    """A relay that asks a `Conductor`."""

    def __init__(self, conductor: Conductor) -> None:
        self._conductor = conductor
        self.kind = conductor.kind
        self.method = conductor.method

    def _attempt_failed(self, call, error):
        self._conductor.failed(self, call, error)

    def _release(self):
        self._conductor.finished()

    def time_remaining(self):
        return self._conductor.time_remaining()

    def _listen(self, call):
        return self._conductor.listen(self, call)


class ConductedUnary(Conducted, AwaitedRelay, grpc.aio.UnaryUnaryCall):
    pass


class ConductedStreamUnary(Conducted, WrittenRelay, AwaitedRelay, grpc.aio.StreamUnaryCall):
    pass


class ConductedStreams(Conducted, WrittenRelay, ReadRelay, grpc.aio.StreamStreamCall):
    pass


def relay_of(kind):
    return {
        Kind.UNARY_UNARY: ConductedUnary,
        Kind.STREAM_UNARY: ConductedStreamUnary,
        Kind.STREAM_STREAM: ConductedStreams,
    }[kind]


class Going(grpc.aio.UnaryUnaryCall):
    """A try that runs until it is told how it ended."""

    def __init__(self) -> None:
        self.end = None
        self.asked = 0
        self._ended = asyncio.Event()
        self._callbacks = []

    def ends(self, call) -> None:
        self.end = call
        self._ended.set()
        for callback in self._callbacks:
            callback(self)

    def again(self) -> None:
        for callback in self._callbacks:
            callback(self)

    def __await__(self):
        yield from self._ended.wait().__await__()
        return (yield from self.end.__await__())

    def done(self):
        return self.end is not None

    def cancel(self):
        self.ends(finished_call(Kind.UNARY_UNARY, grpc.StatusCode.CANCELLED, "by the test"))
        return True

    def add_done_callback(self, callback):
        self._callbacks.append(callback)

    def cancelled(self):
        return self.done() and self.end.cancelled()

    def time_remaining(self):
        return None

    async def _asked(self, name):
        await self._ended.wait()
        return await getattr(self.end, name)()

    async def code(self):
        return await self._asked("code")

    async def details(self):
        return await self._asked("details")

    async def initial_metadata(self):
        return await self._asked("initial_metadata")

    async def trailing_metadata(self):
        return await self._asked("trailing_metadata")

    async def wait_for_connection(self):
        await self._ended.wait()


def good(result=b"x", kind=Kind.UNARY_UNARY):
    return finished_call(kind, OK, "", result=result)


def bad(code="UNAVAILABLE", kind=Kind.UNARY_UNARY):
    return finished_call(kind, grpc.StatusCode[code], "gone")


@pytest.fixture
def conductor():
    return Conductor()


@pytest.fixture
def relay(conductor):
    return relay_of(Kind.UNARY_UNARY)(conductor)


async def test_a_try_that_ends_well_is_the_end(relay, conductor):
    relay.begin(going := Going())
    assert not relay.done()
    assert relay.time_remaining() == 7.0
    going.ends(good())
    assert (relay.done(), relay.cancelled(), conductor.ends) == (True, False, 1)
    assert await relay == b"x"
    assert (await relay.code(), conductor.failures) == (OK, [])


async def test_what_follows_a_failed_try_is_the_conductors_matter(relay, conductor):
    relay.begin(going := Going())
    going.ends(bad())
    assert [call for call, _ in conductor.failures] == [going]
    assert not relay.done()
    relay.pause()
    waiting = asyncio.ensure_future(relay.code())
    await asyncio.sleep(0)
    relay.begin(good())
    assert await waiting is OK
    assert conductor.ends == 1


async def test_who_awaits_a_failed_try_gets_the_next_ones_answer(relay, conductor):
    relay.begin(going := Going())
    waiting = asyncio.ensure_future(asyncio.wait_for(relay, 9))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    going.ends(bad())
    await aio_wait_until(lambda: conductor.failures)
    relay.pause()
    relay.begin(good(b"second"))
    assert await waiting == b"second"


async def test_only_the_first_end_counts(relay, conductor):
    relay.finish(good(b"first"))
    relay.finish(good(b"second"))
    assert (await relay, conductor.ends) == (b"first", 1)


async def test_an_older_try_says_nothing_any_more(relay, conductor):
    relay.begin(old := Going())
    relay.begin(new := Going())
    old.ends(good(b"old"))
    assert (relay.done(), conductor.failures) == (False, [])
    new.ends(good(b"new"))
    assert await relay == b"new"


async def test_callbacks_are_called_with_the_relay_once_at_the_end(relay, events):
    told = []
    relay.add_done_callback(lambda _: 1 / 0)
    relay.add_done_callback(told.append)
    relay.begin(going := Going())
    going.ends(bad())
    assert told == []
    relay.finish(good())
    relay.add_done_callback(told.append)
    assert told == [relay, relay]
    (event,) = events
    assert isinstance(event, CallbackFailed)


async def test_to_cancel_between_two_tries_ends_it(relay, conductor):
    relay.pause()
    assert relay.cancel()
    assert (relay.cancelled(), conductor.ends, relay.cancel()) == (True, 1, False)
    with pytest.raises(asyncio.CancelledError):
        await relay


async def test_to_cancel_while_a_try_runs_cancels_the_try(relay):
    relay.begin(going := Going())
    assert relay.cancel()
    assert going.cancelled()


async def test_a_try_that_fails_with_no_status_is_told_as_it_is(relay, conductor):
    relay.begin(failed_call(Kind.UNARY_UNARY, KeyError("a bug")))
    ((_, error),) = conductor.failures
    assert error is None  # the conductor asks the call


@pytest.mark.parametrize("failed", [False, True])
async def test_a_finished_call_is_let_go_by_its_tries(conductor, failed):
    """grpc.aio's calls keep their callbacks, and are in cycles that nobody collects."""
    relay = relay_of(Kind.UNARY_UNARY)(conductor)
    relay.begin(going := Going())
    going.ends(bad() if failed else good())
    conductor.failures.clear()
    gone = weakref.ref(relay)
    del relay
    gc.collect()
    assert gone() is None


async def test_a_status_made_up_by_grpc_waits_for_the_servers_own():
    conductor = Conductor(Kind.STREAM_UNARY)
    relay = relay_of(Kind.STREAM_UNARY)(conductor)
    relay.begin(going := Going())
    made_up = grpc.StatusCode.INTERNAL
    going.ends(finished_call(Kind.STREAM_UNARY, made_up, "Internal error from Core"))
    assert conductor.failures == []
    going.end = bad(kind=Kind.STREAM_UNARY)
    going.again()
    ((call, _),) = conductor.failures
    assert await call.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_made_up_status_that_stays_is_told_in_the_end():
    conductor = Conductor(Kind.STREAM_UNARY)
    relay = relay_of(Kind.STREAM_UNARY)(conductor)
    relay.begin(going := Going())
    going.ends(
        finished_call(Kind.STREAM_UNARY, grpc.StatusCode.INTERNAL, "Internal error from Core")
    )
    await aio_wait_until(lambda: conductor.failures)
    relay.finish(going)


class Unwritten(Going):
    """A try whose requests could not be written: it has a status, and cancels who awaits it."""

    def __await__(self):
        yield from self._ended.wait().__await__()
        raise asyncio.CancelledError


async def test_who_awaits_a_try_that_could_not_be_written_gets_its_status():
    for finishes_first in (False, True):
        conductor = Conductor(Kind.STREAM_UNARY)
        relay = relay_of(Kind.STREAM_UNARY)(conductor)
        relay.begin(going := Unwritten())
        waiting = awaiting(relay)
        await asyncio.sleep(0)
        failure = bad(kind=Kind.STREAM_UNARY)
        going.ends(failure)
        if finishes_first:
            relay.finish(failure, source=going)
        else:
            asyncio.get_running_loop().call_later(0.01, relay.finish, failure, going)
        with pytest.raises(grpc.aio.AioRpcError, match="gone"):
            await waiting


async def test_who_awaits_a_try_that_could_not_be_written_may_be_cancelled():
    relay = relay_of(Kind.STREAM_UNARY)(Conductor(Kind.STREAM_UNARY))
    relay.begin(going := Unwritten())
    waiting = awaiting(relay)
    await asyncio.sleep(0)
    going.ends(bad(kind=Kind.STREAM_UNARY))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()


# FinishedCall over a try that runs


class Hung(Going):
    """A try that says that it ended only when it is looked at: what it raises comes first."""

    def cancel(self):
        self.cancels = getattr(self, "cancels", 0) + 1
        self._ended.set()
        return True

    def __await__(self):
        yield from self._ended.wait().__await__()
        raise asyncio.CancelledError


def awaiting(relay):
    async def wait():
        return await relay

    return asyncio.create_task(wait())


async def test_an_end_over_a_try_that_runs_gives_it_up(relay, conductor):
    relay.begin(hung := Hung())
    waiting = awaiting(relay)
    await asyncio.sleep(0)
    relay.end(bad())
    assert (relay.done(), relay.cancelled(), conductor.ends, hung.cancels) == (True, False, 1, 1)
    with pytest.raises(grpc.aio.AioRpcError, match="gone"):
        await waiting
    relay.end(bad("NOT_FOUND"))
    assert await relay.code() is grpc.StatusCode.UNAVAILABLE


async def test_who_is_cancelled_while_a_try_is_given_up_is_cancelled(relay):
    relay.begin(Hung())
    waiting = awaiting(relay)
    await asyncio.sleep(0)
    relay.end(bad())
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()


async def test_an_answer_that_is_there_but_not_yet_fetched_goes_before_an_end(relay):
    relay.begin(going := Going())
    waiting = awaiting(relay)
    await asyncio.sleep(0)
    going.ends(good(b"in time"))
    relay.end(bad())
    assert await waiting == b"in time"
    assert await relay.code() is OK


async def test_what_a_try_gives_after_the_end_is_not_the_answer(relay):
    relay.begin(going := Going())
    waiting = awaiting(relay)
    await asyncio.sleep(0)
    going.cancel = lambda: going.ends(good(b"too late"))
    relay.end(bad())
    with pytest.raises(grpc.aio.AioRpcError, match="gone"):
        await waiting


async def test_who_writes_to_a_try_that_is_cancelled_before_it_is_on_its_way_learns_of_it(shop):
    """A bare call of grpc.aio 1.85 would hang here; `test_canaries_aio.py` has the canary."""
    async with grpc.aio.insecure_channel(shop.target) as channel:
        conductor = Conductor(Kind.STREAM_STREAM)
        conductor.failed = lambda relay, call, _: relay.finish(call)
        relay = relay_of(Kind.STREAM_STREAM)(conductor)
        relay.begin(channel.stream_stream("/test.Shop/StreamStream")())
        writing = asyncio.create_task(relay.write(b"x"))
        await asyncio.sleep(0)
        relay.cancel()
        await asyncio.wait([writing], timeout=WAIT_S)
        assert writing.cancelled()


# Signals, and who cancels


async def test_a_signal_that_is_given_before_anybody_waits_is_not_missed():
    signal = Signal()
    first, second = signal.waiter(), signal.waiter()
    signal.forget(second)
    signal.give()
    signal.give()
    signal.forget(first)
    await first
    assert not second.done()


async def test_a_task_that_goes_on_after_it_was_cancelled_has_been_so_once():
    counts = [cancels_of_task()]

    async def clean_up():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            counts.append(cancels_of_task())

    task = asyncio.create_task(clean_up())
    await asyncio.sleep(0)
    task.cancel()
    await task
    asyncio.get_running_loop().call_soon(lambda: counts.append(cancels_of_task()))  # no task
    await asyncio.sleep(0)
    assert counts == [0, 1, 0]


async def test_a_channel_can_be_closed_while_somebody_waits_for_a_relay(relay):
    waiting = asyncio.create_task(relay.code())  # `self` of its frame: grpcio before 1.83 looks
    await asyncio.sleep(0)
    await grpc.aio.insecure_channel("127.0.0.1:1").close()
    assert not hasattr(grpc.aio.Call, "_channel")
    assert relay._channel is None  # what it asks there, first
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
