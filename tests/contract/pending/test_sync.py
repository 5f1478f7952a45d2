"""Pending calls for threads: futures, callbacks, interrupted waits, and a real socket."""

import asyncio
import concurrent.futures
import gc
import os
import signal
import threading
import time
import weakref

import pytest

from fixtures.echo import EchoClient, Refused
from fixtures.timers import run_threads
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.errors import CallsClosed, CallTimeout
from rpcwheel.events import CallbackFailed, TaskFailed
from rpcwheel.pending import CallFuture, PendingCalls
from rpcwheel.timer import WheelTimer

LOST = ConnectionError("gone")


@pytest.fixture
def calls(timer):
    with PendingCalls(timer, name="orders") as calls:
        yield calls


# Futures


def test_result_returns_the_response_received_on_another_thread(calls):
    future = calls.open(7, timeout=2.0)
    assert isinstance(future, concurrent.futures.Future)
    answers = []
    run_threads(lambda: answers.append(future.result(WAIT_S)), lambda: calls.received(7, "answer"))
    assert answers == ["answer"]


def test_a_wait_that_times_out_does_not_end_the_call(calls):
    future = calls.open(7, timeout=2.0)
    for wait in (future.result, future.exception):
        with pytest.raises(TimeoutError) as raised:
            wait(0)
        assert not isinstance(raised.value, CallTimeout)
    assert calls.pending == 1
    calls.received(7, "answer")
    assert future.result(0) == "answer"


@pytest.mark.parametrize("end", ["received", "failed", "cancelled", "timed out", "lost", "closed"])
def test_as_completed_and_wait_see_each_kind_of_end(calls, timer, end):
    future = calls.open(7, timeout=2.0, connection="a")
    ends = {
        "received": lambda: calls.received(7, 1),
        "failed": lambda: calls.failed(7, LOST),
        "cancelled": future.cancel,
        "timed out": lambda: timer.advance(2),
        "lost": lambda: calls.lost("a", LOST),
        "closed": calls.close,
    }
    waiter = concurrent.futures.as_completed([future], WAIT_S)
    seen = []
    run_threads(lambda: seen.extend(waiter), ends[end])
    assert seen == [future]
    assert concurrent.futures.wait([future], 0).done == {future}


async def test_a_canceled_coroutine_cancels_the_wrapped_future(calls):
    future = calls.open(7, timeout=2.0)
    waiting = asyncio.ensure_future(asyncio.wrap_future(future))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.sleep(0)  # asyncio cancels the other future in the next iteration of the loop
    assert future.cancelled()
    assert calls.pending == 0


def test_cancel_is_idempotent(calls):
    future = calls.open(7, timeout=2.0)
    assert [future.cancel(), future.cancel()] == [True, True]
    assert calls.stats().cancelled == 1


def test_a_future_that_the_user_ended_does_not_break_the_table(calls, timer):
    ended, cancelled = calls.open(1, timeout=2.0), calls.open(2, timeout=2.0)
    ended.set_result("mine")
    cancelled.set_result("mine")
    assert not cancelled.cancel()
    calls.open(3, timeout=2.0).set_result("mine")
    calls.received(3, "yours")  # does not raise
    timer.advance(2)
    assert (ended.result(), cancelled.result()) == ("mine", "mine")
    assert (calls.pending, timer.pending) == (0, 0)


# Interrupted waits


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs signals to threads")
@pytest.mark.parametrize("wait", [CallFuture.result, CallFuture.exception])
def test_an_interrupted_wait_cancels_the_call(calls, timer, wait):
    future = calls.open(7, timeout=None, connection="a")
    main = threading.main_thread().ident

    def interrupt() -> None:
        wait_until(lambda: future._condition._waiters)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        wait(future, WAIT_S)
    thread.join()
    assert future.cancelled()
    assert (calls.pending, timer.pending) == (0, 0)


def test_a_keyboard_interrupt_as_the_result_of_a_call_cancels_nothing(calls):
    future = calls.open(7, timeout=2.0)
    calls.failed(7, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        future.result()
    assert calls.stats().cancelled == 0


# Callbacks


def test_callbacks_run_in_order_on_the_thread_that_delivers_the_response(calls):
    future = calls.open(7, timeout=2.0)
    ran = []
    for name in "ab":
        future.add_done_callback(lambda _, name=name: ran.append((name, threading.get_ident())))
    calls.received(7, 1)
    future.add_done_callback(lambda _: ran.append(("late", threading.get_ident())))
    here = threading.get_ident()
    assert ran == [("a", here), ("b", here), ("late", here)]


@pytest.mark.parametrize("end", ["timed out", "lost", "closed"])
def test_callbacks_of_calls_without_a_response_run_on_a_worker_thread(calls, timer, end):
    future = calls.open(7, timeout=2.0, connection="a")
    ran = []
    for name in "ab":
        future.add_done_callback(
            lambda _, name=name: ran.append((name, threading.current_thread().name))
        )
    ends = {
        "timed out": lambda: timer.advance(2),
        "lost": lambda: calls.lost("a", LOST),
        "closed": calls.close,
    }
    ends[end]()
    assert wait_until(lambda: len(ran) == 2)
    assert [name for name, _ in ran] == ["a", "b"]
    assert all(thread.startswith("rpcwheel-worker") for _, thread in ran)


def test_callbacks_that_hang_delay_no_other_call(calls, timer):
    go = threading.Event()
    futures = [calls.open(key, timeout=2.0, connection="a") for key in range(10)]
    for future in futures:
        future.add_done_callback(lambda _: go.wait(WAIT_S))
    late = [calls.open(key, timeout=5.0) for key in range(10, 20)]
    timer.advance(2)
    timer.advance(3)
    try:
        assert all(isinstance(each.exception(0), CallTimeout) for each in futures + late)
    finally:
        go.set()


@pytest.mark.parametrize("end", ["received", "timed out"])
def test_a_callback_that_raises_is_reported_and_the_next_one_runs(calls, timer, events, end):
    error, ran = ZeroDivisionError(), []
    future = calls.open(7, timeout=2.0)
    future.add_done_callback(lambda _: (_ for _ in ()).throw(error))
    future.add_done_callback(ran.append)
    assert calls.received(7, 1) if end == "received" else timer.advance(2)
    assert wait_until(lambda: ran == [future])
    assert events == [CallbackFailed("orders", "done callback", error)]


def test_system_exit_in_a_callback_reaches_only_threads_of_the_user(calls, timer, events):
    def leave(_):
        raise SystemExit

    ran = []
    answered, timed_out = calls.open(1, timeout=2.0), calls.open(2, timeout=2.0)
    for future in (answered, timed_out):
        future.add_done_callback(leave)
        future.add_done_callback(ran.append)
    with pytest.raises(SystemExit):
        calls.received(1, 1)
    timer.advance(2)
    assert wait_until(lambda: ran == [timed_out])
    assert not [event for event in events if isinstance(event, TaskFailed)]
    assert answered.result() == 1


# Threads and time


def test_racing_threads_end_each_call_once(frequent_thread_switches):
    with WheelTimer() as timer, PendingCalls(timer) as calls:
        futures, called = {}, []
        for key in range(300):
            connection = "ab"[key % 2]
            futures[key] = calls.open(key, timeout=0.02 + key / 10_000, connection=connection)
            futures[key].add_done_callback(called.append)
        won = {"received": 0, "failed": 0, "cancelled": 0, "lost": 0}

        def each(name, act):
            for key in futures:
                won[name] += act(key)

        run_threads(
            lambda: each("received", lambda key: calls.received(key, key)),
            lambda: each("failed", lambda key: calls.failed(key, LOST)),
            lambda: each("cancelled", lambda key: futures[299 - key].cancel()),
            lambda: won.update(lost=calls.lost("a", LOST) + calls.lost("b", LOST)),
        )
        assert wait_until(lambda: calls.pending == 0)
        stats = calls.stats()
        assert (stats.answered, stats.cancelled) == (won["received"], won["cancelled"])
        assert stats.failed == won["failed"] + won["lost"]
        assert sum(won.values()) + stats.timed_out == 300
        assert wait_until(lambda: len(called) == 300)
        assert {id(future) for future in called} == {id(future) for future in futures.values()}
        assert timer.pending == 0


def test_calls_opened_while_others_are_lost_and_closed_all_end(frequent_thread_switches):
    with WheelTimer() as timer:
        calls, futures, going = PendingCalls(timer), [], True

        def open_some():
            try:
                for key in range(1000):
                    future = calls.open(key, timeout=60.0, connection="a")
                    futures.append(future)
            except CallsClosed:
                pass

        def lose_them():
            while going:
                calls.lost("a", LOST)

        def close():
            nonlocal going
            wait_until(lambda: len(futures) > 500)
            calls.close()
            going = False

        run_threads(open_some, lose_them, close)
        assert all(future.done() for future in futures)
        assert timer.pending == 0


class SlowKey:
    """Lets other threads run whenever it is looked up."""

    def __hash__(self):
        time.sleep(0)
        return id(self)


def test_the_table_is_consistent_while_a_hash_function_runs_other_threads(
    calls, frequent_thread_switches
):
    keys = [SlowKey() for _ in range(100)]
    futures = [calls.open(key, timeout=60.0, connection="a") for key in keys]
    won = [0, 0, 0]

    def answer(which):
        for key in keys[:80]:
            won[which] += calls.received(key, 1)

    def lose():
        won[2] = calls.lost("a", LOST)

    run_threads(lambda: answer(0), lambda: answer(1), lose)
    assert sum(won) == 100
    assert all(future.done() for future in futures)
    assert calls.stats().answered == won[0] + won[1]


def test_a_real_timer_does_not_end_a_call_early():
    with PendingCalls() as calls:  # on the shared timer
        error = calls.open(7, timeout=0.02).exception(WAIT_S)
        assert isinstance(error, CallTimeout)
        assert error.elapsed >= 0.02


def test_a_raised_error_does_not_keep_the_future_alive(calls, timer):
    future = calls.open(7, timeout=2.0)
    timer.advance(2)
    with pytest.raises(CallTimeout):
        future.result()
    seen = weakref.ref(future)
    gc.disable()
    try:
        del future
        assert seen() is None
    finally:
        gc.enable()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_can_use_the_shared_timer():
    with PendingCalls() as calls:
        calls.open(7, timeout=60.0)
        child = os.fork()
        if child == 0:
            try:
                error = PendingCalls().open(7, timeout=0.01).exception(WAIT_S)
                os._exit(0 if isinstance(error, CallTimeout) else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# Over a real socket


@pytest.fixture
def client(echo_server):
    client = EchoClient(echo_server.address)
    yield client
    client.close()


def test_responses_out_of_order_end_their_calls(client):
    payloads = [b"hold 1", b"hold 2", b"hold 3", b"go"]
    order = []
    futures = [client.call(payload) for payload in payloads]
    for future in futures:
        future.add_done_callback(order.append)
    assert [future.result(WAIT_S) for future in futures] == payloads
    assert client.calls.stats().answered == 4


def test_many_threads_share_one_socket(client):
    def work(name: int) -> None:
        for number in range(100):
            payload = b"%d %d" % (name, number)
            assert client.call(payload).result(WAIT_S) == payload

    run_threads(*(lambda name=name: work(name) for name in range(4)))
    assert client.calls.stats().answered == 400


def test_the_timeout_of_an_unanswered_request_names_the_server(echo_server, timer):
    client = EchoClient(echo_server.address, timer)
    dropped = client.call(b"drop", timeout=2.0)
    assert client.call(b"x").result(WAIT_S) == b"x"
    timer.advance(2.0)
    with pytest.raises(CallTimeout, match=r"echo: call 0 timed out .* server slow"):
        dropped.result(WAIT_S)
    client.close()


def test_a_late_response_over_the_socket_is_counted(client):
    late = client.call(b"hold", timeout=0.01)
    assert isinstance(late.exception(WAIT_S), CallTimeout)
    client.call(b"go").result(WAIT_S)
    assert wait_until(lambda: client.calls.stats().late == 1)


def test_an_error_in_the_response_fails_the_call(client):
    with pytest.raises(Refused):
        client.call(b"fail").result(WAIT_S)


def test_a_closed_connection_fails_all_calls(client):
    futures = [client.call(b"hold"), client.call(b"drop", timeout=60.0), client.call(b"die")]
    for future in futures:
        with pytest.raises(ConnectionError):
            future.result(WAIT_S)
    assert client.calls.pending == 0
