"""What only pending calls for threads have: futures to wait for, and callbacks on threads."""

import concurrent.futures
import signal
import threading
import weakref

import pytest

from fixtures.leaks import no_garbage_collector
from fixtures.pending_worlds import ends_of
from fixtures.timers import run_threads
from fixtures.waiting import WAIT_S, in_thread, wait_until
from rpcwheel.errors import CallTimeout
from rpcwheel.events import CallbackFailed, TaskFailed
from rpcwheel.pending import CallFuture, PendingCalls


@pytest.fixture
def calls(timer):
    with PendingCalls(timer, name="orders") as calls:
        yield calls


# Futures


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
    ends = ends_of(calls, timer) | {"cancelled": future.cancel}
    waiter = concurrent.futures.as_completed([future], WAIT_S)
    seen = []
    run_threads(lambda: seen.extend(waiter), ends[end])
    assert seen == [future]
    assert concurrent.futures.wait([future], 0).done == {future}


# Interrupted waits


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs signals to threads")
@pytest.mark.parametrize("wait", [CallFuture.result, CallFuture.exception])
def test_an_interrupted_wait_cancels_the_call(calls, timer, wait):
    future = calls.open(7, timeout=None, connection="a")
    main = threading.main_thread().ident

    def interrupt() -> None:
        wait_until(lambda: future._condition._waiters)
        signal.pthread_kill(main, signal.SIGINT)

    interrupting = in_thread(interrupt)
    with pytest.raises(KeyboardInterrupt):
        wait(future, WAIT_S)
    interrupting.result(WAIT_S)
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
    ends_of(calls, timer)[end]()
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
    assert not events.of(TaskFailed)
    assert answered.result() == 1


def test_a_raised_error_does_not_keep_the_future_alive(calls, timer):
    future = calls.open(7, timeout=2.0)
    timer.advance(2)
    with pytest.raises(CallTimeout):
        future.result()
    seen = weakref.ref(future)
    with no_garbage_collector():
        del future
        assert seen() is None
