"""Functions that return futures: grpc's over real sockets, and ones completed by the test."""

import contextvars
import threading
from concurrent.futures import CancelledError, Future

import pytest
from google.protobuf.wrappers_pb2 import StringValue
from scenarios.failback import DEFAULT

from fixtures.failback_queues import Far, Hang, play
from fixtures.grpc_servers import METHOD
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.errors import FailbackFull


def test_a_future_is_answered_by_a_future(invoker):
    inner = Future()
    outer = invoker().invoke(lambda: inner)
    assert isinstance(outer, Future)
    assert not outer.done()
    inner.set_result("answer")
    assert outer.result(WAIT_S) == "answer"


def test_a_future_that_fails_is_answered_with_the_default_and_called_again(invoker, timer):
    answers = [Future(), Future()]
    failback, left = invoker(), list(answers)
    outer = failback.invoke(lambda: left.pop(0))
    answers[0].set_exception(ConnectionError())
    assert outer.result(WAIT_S) == DEFAULT
    timer.advance(5)
    wait_until(lambda: not left)
    assert failback.pending == 1
    answers[1].set_result("arrived")
    assert failback.flush(WAIT_S)
    assert failback.stats().redelivered == 1


def test_a_future_that_fails_otherwise_is_answered_with_that_error(invoker):
    for error in [ValueError(), SystemExit(3)]:
        inner = Future()
        outer = invoker().invoke(lambda inner=inner: inner)
        inner.set_exception(error)
        assert outer.exception(WAIT_S) is error


def test_a_future_that_finds_the_queue_full_is_answered_with_that(invoker):
    failback, inner, error = invoker(max_pending=1), Future(), ConnectionError()
    failback.invoke(Far(ConnectionError()))
    outer = failback.invoke(lambda: inner)
    inner.set_exception(error)
    assert isinstance(outer.exception(WAIT_S), FailbackFull)
    assert outer.exception().__cause__ is error


def test_what_the_caller_does_to_a_message_while_its_future_is_open_is_not_seen(invoker):
    seen, answers = [], [Future(), Future()]

    def push(message):
        seen.append(message.value)
        return answers[len(seen) - 1]

    failback, message = invoker(), StringValue(value="order")
    context = contextvars.copy_context()
    outer = context.run(failback.invoke, push, message)
    message.value = "something else"
    answers[0].set_exception(ConnectionError())
    answers[1].set_result(None)
    assert outer.result(WAIT_S) == DEFAULT
    play(failback)
    assert seen == ["order", "order"]


def test_cancelling_the_future_cancels_the_call_and_nothing_is_retried(
    invoker, grpc_server, channel
):
    never = threading.Event()
    grpc_server.script.then(never)
    failback, inner = invoker(retry_on=Exception), []

    def push():
        inner.append(channel.unary_unary(METHOD).future(b"order"))
        return inner[0]

    outer = failback.invoke(push)
    wait_until(lambda: grpc_server.script.received)
    assert outer.cancel()
    wait_until(inner[0].done)
    never.set()
    assert inner[0].cancelled()
    with pytest.raises(CancelledError):
        outer.result(WAIT_S)
    wait_until(lambda: failback.stats().calls == 1)
    assert failback.stats().failed == 1
    assert failback.pending == 0


def test_a_call_that_was_cancelled_beneath_is_cancelled_above(invoker):
    failback, inner = invoker(retry_on=Exception), Future()
    outer = failback.invoke(lambda: inner)
    inner.cancel()
    with pytest.raises(CancelledError):
        outer.result(WAIT_S)
    assert failback.pending == 0


def test_nothing_of_the_users_runs_on_the_thread_that_completes_a_call(
    invoker, grpc_server, channel
):
    threads = []

    def note(*_):
        threads.append(threading.current_thread().name)
        return True

    grpc_server.script.then(*["UNAVAILABLE"] * 2)
    failback = invoker(retry_on=note, max_attempts=2, dead_letter=note)
    outer = failback.invoke(channel.unary_unary(METHOD).future, b"order")
    assert outer.result(WAIT_S) == DEFAULT
    play(failback)
    wait_until(lambda: len(threads) == 3)
    assert all(name.startswith("rpcwheel-worker-") for name in threads)


def test_whoever_completes_a_future_runs_nothing_of_the_users(invoker, timer):
    threads, answers = [], [Future(), Future()]

    def note(*_):
        threads.append(threading.current_thread().name)
        return True

    left = list(answers)
    failback = invoker(retry_on=note, max_attempts=2, dead_letter=note)
    outer = failback.invoke(lambda: left.pop(0))
    outer.add_done_callback(note)
    answers[0].set_exception(ConnectionError())  # on this thread
    assert outer.result(WAIT_S) == DEFAULT
    timer.advance(5)
    wait_until(lambda: answers[1]._done_callbacks)
    answers[1].set_exception(ConnectionError())
    assert failback.flush(WAIT_S)
    wait_until(lambda: len(threads) == 4)
    assert all(name.startswith("rpcwheel-worker-") for name in threads)


def test_a_hanging_retry_does_not_hold_up_the_futures_of_its_queue(invoker, timer):
    failback, hang = invoker(), Hang(8)
    for _ in range(8):
        failback.invoke(hang)
    timer.advance(5)
    inner = Future()
    outer = failback.invoke(lambda: inner)
    inner.set_result("answer")
    assert outer.result(WAIT_S) == "answer"
    hang.end.set()
    assert failback.flush(WAIT_S)
