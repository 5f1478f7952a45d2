"""Failback for functions that return futures: gRPC's own, and futures completed by the test."""

import contextvars
import threading
from concurrent.futures import CancelledError, Future

import pytest
from google.protobuf.wrappers_pb2 import StringValue

from fixtures.failback_invokers import DEFAULT
from fixtures.failback_queues import FlakyFunction
from fixtures.grpc_servers import METHOD, requests_of
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.errors import FailbackFull


def test_a_call_of_grpc_is_delivered(invoker, flaky_server, channel, run_until_empty):
    flaky_server.fail(2)
    failback, push = invoker(retry_on="UNAVAILABLE"), channel.unary_unary(METHOD).future
    assert failback.invoke(push, b"order", timeout=WAIT_S).result(WAIT_S) == DEFAULT
    run_until_empty(failback)
    assert requests_of(flaky_server) == [b"order"] * 3
    assert failback.stats().redelivered == 1


@pytest.mark.parametrize("error", [ValueError(), SystemExit(3)])
def test_an_error_that_retry_on_does_not_name_is_the_futures(invoker, error):
    inner = Future()
    outer = invoker().invoke(lambda: inner)
    inner.set_exception(error)
    assert outer.exception(WAIT_S) is error


def test_a_future_whose_call_finds_the_queue_full_fails(invoker):
    failback, inner, error = invoker(max_pending=1), Future(), ConnectionError()
    failback.invoke(FlakyFunction(ConnectionError()))
    outer = failback.invoke(lambda: inner)
    inner.set_exception(error)
    assert isinstance(outer.exception(WAIT_S), FailbackFull)
    assert outer.exception().__cause__ is error


def test_a_message_is_kept_as_it_was_when_the_function_returned_its_future(
    invoker, run_until_empty
):
    seen, futures = [], [Future(), Future()]

    def push(message):
        seen.append(message.value)
        return futures[len(seen) - 1]

    failback, message = invoker(), StringValue(value="order")
    context = contextvars.copy_context()
    outer = context.run(failback.invoke, push, message)
    message.value = "something else"
    futures[0].set_exception(ConnectionError())
    futures[1].set_result(None)
    assert outer.result(WAIT_S) == DEFAULT
    run_until_empty(failback)
    assert seen == ["order", "order"]


def test_canceling_the_future_cancels_the_call_which_is_not_retried(invoker, flaky_server, channel):
    flaky_server.freeze()
    failback, inner = invoker(retry_on=Exception), []

    def push():
        inner.append(channel.unary_unary(METHOD).future(b"order"))
        return inner[0]

    outer = failback.invoke(push)
    wait_until(lambda: flaky_server.calls)
    assert outer.cancel()
    wait_until(inner[0].done)
    assert inner[0].cancelled()
    with pytest.raises(CancelledError):
        outer.result(WAIT_S)
    wait_until(lambda: failback.stats().calls == 1)
    assert (failback.stats().failed, failback.pending) == (1, 0)


def test_the_future_is_canceled_if_the_call_is_canceled_otherwise(invoker):
    failback, inner = invoker(retry_on=Exception), Future()
    outer = failback.invoke(lambda: inner)
    inner.cancel()
    with pytest.raises(CancelledError):
        outer.result(WAIT_S)
    assert failback.pending == 0


class FollowedFuture(Future):
    """A future that notes when it has a done-callback."""

    def __init__(self):
        super().__init__()
        self.followed = threading.Event()

    def add_done_callback(self, function):
        super().add_done_callback(function)
        self.followed.set()


def test_user_code_never_runs_on_the_thread_that_completes_the_future(invoker, timer):
    threads, futures = [], [Future(), FollowedFuture()]

    def note(*_):
        threads.append(threading.current_thread().name)
        return True

    left = list(futures)
    failback = invoker(retry_on=note, max_attempts=2, dead_letter=note)
    outer = failback.invoke(lambda: left.pop(0))
    outer.add_done_callback(note)
    futures[0].set_exception(ConnectionError())  # on this thread
    assert outer.result(WAIT_S) == DEFAULT
    timer.advance(5)
    assert futures[1].followed.wait(WAIT_S)
    futures[1].set_exception(ConnectionError())
    assert failback.flush(WAIT_S)
    wait_until(lambda: len(threads) == 4)
    assert all(name.startswith("rpcwheel-worker-") for name in threads)


def test_attempts_that_hang_do_not_delay_the_futures_of_their_queue(invoker, timer):
    failback, end, inner = invoker(), threading.Event(), Future()
    fails = FlakyFunction(*[ConnectionError()] * 8)

    def hang():
        if fails.errors:
            fails()
        end.wait(WAIT_S)

    for _ in range(8):
        failback.invoke(hang)
    timer.advance(5)
    outer = failback.invoke(lambda: inner)
    inner.set_result("response")
    assert outer.result(WAIT_S) == "response"
    end.set()
    assert failback.flush(WAIT_S)
