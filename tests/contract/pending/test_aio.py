"""Pending calls for coroutines: futures of an event loop that end on any thread."""

import asyncio
import threading

import pytest

from fixtures.echo import AioEchoClient, Refused
from fixtures.timers import run_threads
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel.errors import CallsClosed, CallTimeout
from rpcwheel.pending.aio import PendingCalls
from rpcwheel.timer import AsyncWheelTimer, WheelTimer

LOST = ConnectionError("gone")


@pytest.fixture
def calls(timer):
    with PendingCalls(timer, name="orders") as calls:
        yield calls


async def test_a_call_is_a_future_of_its_loop(calls):
    future = calls.open(7, timeout=2.0)
    assert isinstance(future, asyncio.Future)
    assert future.get_loop() is asyncio.get_running_loop()
    calls.received(7, "answer")
    assert future.done()  # at once, on the loop
    assert await future == "answer"


def test_open_without_a_running_loop_raises_and_changes_nothing(calls):
    with pytest.raises(RuntimeError, match="no running event loop"):
        calls.open(7, timeout=2.0)
    assert calls.stats().opened == 0


@pytest.mark.parametrize("end", ["received", "failed", "timed out", "lost", "closed"])
async def test_a_call_that_ends_on_another_thread_wakes_its_loop(calls, timer, end):
    future = calls.open(7, timeout=2.0, connection="a")
    ends = {
        "received": lambda: calls.received(7, 1),
        "failed": lambda: calls.failed(7, LOST),
        "timed out": lambda: timer.advance(2),
        "lost": lambda: calls.lost("a", LOST),
        "closed": calls.close,
    }
    called = []
    future.add_done_callback(lambda _: called.append(threading.get_ident()))
    other = threading.Thread(target=ends[end])
    other.start()
    other.join()
    assert (future.done(), calls.pending) == (False, 0)
    await asyncio.wait([future], timeout=WAIT_S)
    error = future.exception()
    expected = {
        "received": type(None),
        "timed out": CallTimeout,
        "closed": CallsClosed,
    }
    assert isinstance(error, expected.get(end, ConnectionError))
    await asyncio.sleep(0)
    assert called == [threading.get_ident()]


async def test_canceling_the_awaiting_task_cancels_the_call(calls, timer):
    async def wait():
        await calls.open(7, timeout=None, connection="a")

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    assert calls.pending == 1
    task.cancel("enough")
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (calls.pending, timer.pending, calls.stats().cancelled) == (0, 0, 1)


async def test_wait_for_cancels_the_call(calls, timer):
    with pytest.raises(TimeoutError) as raised:
        await asyncio.wait_for(calls.open(7, timeout=60.0), 0.001)
    assert not isinstance(raised.value, CallTimeout)
    assert (calls.pending, timer.pending) == (0, 0)


async def test_a_shielded_call_stays_pending(calls):
    future = calls.open(7, timeout=2.0)
    task = asyncio.create_task(asyncio.wait_for(asyncio.shield(future), 0.001))
    with pytest.raises(TimeoutError):
        await task
    assert calls.pending == 1
    calls.received(7, 1)
    assert await future == 1


async def test_a_task_canceled_after_its_call_ended_on_another_thread_is_canceled(calls):
    async def wait():
        await calls.open(7, timeout=2.0)

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    other = threading.Thread(target=calls.received, args=(7, 1))
    other.start()
    other.join()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert calls.stats().answered == 1


async def test_a_callback_that_raises_is_reported_to_the_loop(calls):
    loop, reported, ran = asyncio.get_running_loop(), [], []
    loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))
    error = ZeroDivisionError()
    future = calls.open(7, timeout=2.0)
    future.add_done_callback(lambda _: (_ for _ in ()).throw(error))
    future.add_done_callback(ran.append)
    calls.received(7, 1)
    assert await future == 1
    await asyncio.sleep(0)
    assert (ran, reported) == ([future], [error])


async def test_a_future_that_the_user_ended_does_not_break_the_table(calls, timer):
    ended, cancelled = calls.open(1, timeout=2.0), calls.open(2, timeout=2.0)
    ended.set_result("mine")
    cancelled.set_result("mine")
    assert not cancelled.cancel()
    calls.open(3, timeout=2.0).set_result("mine")
    calls.received(3, "yours")  # does not raise
    timer.advance(2)
    assert (await ended, await cancelled) == ("mine", "mine")
    assert (calls.pending, timer.pending) == (0, 0)


async def test_stop_iteration_becomes_the_cause_of_a_runtime_error(calls):
    future = calls.open(7, timeout=2.0)
    error = StopIteration()
    calls.failed(7, error)
    with pytest.raises(RuntimeError) as raised:
        await future
    assert raised.value.__cause__ is error


def test_a_call_of_a_closed_loop_ends_without_an_error(calls, timer):
    async def open_one(key):
        return calls.open(key, timeout=2.0, connection="a")

    for key in (1, 2):
        asyncio.run(open_one(key))
    assert calls.received(1, 1)
    assert timer.advance(2) == 1
    assert calls.stats().timed_out == 1


async def test_the_table_is_an_async_context_manager(timer):
    async with PendingCalls(timer) as calls:
        future = calls.open(7, timeout=2.0)
    with pytest.raises(CallsClosed):
        await future


@pytest.mark.parametrize("kind", ["thread", "loop", "shared"])
async def test_a_real_timer_does_not_end_a_call_early(kind):
    timer = {"thread": WheelTimer, "loop": AsyncWheelTimer, "shared": lambda: None}[kind]()
    with PendingCalls(timer) as calls, pytest.raises(CallTimeout) as raised:
        await calls.open(7, timeout=0.02)
    assert raised.value.elapsed >= 0.02
    if timer is not None:
        timer.stop()


async def test_racing_threads_end_each_call_once(frequent_thread_switches):
    with WheelTimer() as timer, PendingCalls(timer) as calls:
        futures, called = [], []
        for key in range(300):
            futures.append(calls.open(key, timeout=0.02 + key / 10_000, connection="ab"[key % 2]))
            futures[-1].add_done_callback(called.append)
        won = {"received": 0, "failed": 0, "lost": 0}

        def each(name, act):
            for key in range(300):
                won[name] += act(key)

        def race():
            run_threads(
                lambda: each("received", lambda key: calls.received(key, key)),
                lambda: each("failed", lambda key: calls.failed(299 - key, LOST)),
                lambda: won.update(lost=calls.lost("a", LOST) + calls.lost("b", LOST)),
            )

        await asyncio.to_thread(race)
        cancelled = sum(future.cancel() for future in futures)
        await aio_wait_until(lambda: len(called) == 300)
        stats = calls.stats()
        assert stats.answered == won["received"]
        assert stats.failed == won["failed"] + won["lost"]
        assert stats.cancelled == cancelled
        assert sum(won.values()) + stats.timed_out + cancelled == 300
        for future in futures:
            assert future.cancelled() or future.exception() is not None or future.result() >= 0


# Over a real socket


async def test_responses_out_of_order_end_their_calls(echo_server):
    payloads = [b"hold 1", b"hold 2", b"hold 3", b"go"]
    async with await AioEchoClient.connect(echo_server.address) as client:
        assert await asyncio.gather(*map(client.call, payloads)) == payloads
        assert client.calls.stats().answered == 4


async def test_a_thousand_calls_at_once_share_one_connection(echo_server):
    payloads = [b"%d" % number for number in range(1000)]
    async with await AioEchoClient.connect(echo_server.address) as client:
        assert await asyncio.gather(*map(client.call, payloads)) == payloads


async def test_the_timeout_of_an_unanswered_request_names_the_server(echo_server, timer):
    async with await AioEchoClient.connect(echo_server.address, timer) as client:
        dropped = client.call(b"drop", timeout=2.0)
        assert await client.call(b"x") == b"x"
        timer.advance(2.0)
        with pytest.raises(CallTimeout, match=r"echo: call 0 timed out .* server slow"):
            await dropped


async def test_a_late_response_over_the_socket_is_counted(echo_server):
    async with await AioEchoClient.connect(echo_server.address) as client:
        with pytest.raises(CallTimeout):
            await client.call(b"hold", timeout=0.01)
        await client.call(b"go")
        await aio_wait_until(lambda: client.calls.stats().late == 1)


async def test_an_error_response_and_a_closed_connection_fail_the_calls(echo_server):
    async with await AioEchoClient.connect(echo_server.address) as client:
        with pytest.raises(Refused):
            await client.call(b"fail")
        futures = [client.call(b"hold"), client.call(b"drop"), client.call(b"die")]
        for error in await asyncio.gather(*futures, return_exceptions=True):
            assert isinstance(error, ConnectionError)
        assert client.calls.pending == 0
