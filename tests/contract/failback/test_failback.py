"""Failback in both worlds, over a real gRPC server. The timer is moved by hand."""

import asyncio
import contextvars
import threading

import grpc
import pytest

from fixtures.failback_invokers import DEFAULT
from fixtures.failback_queues import FLAKY, in_world
from fixtures.grpc_servers import METHOD, requests_of
from fixtures.waiting import WAIT_S, wait_until
from fixtures.worlds import AioWorld, SyncWorld
from rpcwheel.call import current_deadline, deadline_scope
from rpcwheel.errors import FailbackClosed
from rpcwheel.events import (
    DeadLetterFailed,
    FailbackGaveUp,
)
from rpcwheel.failback import FailbackStats

COLOR = contextvars.ContextVar("COLOR", default="none")


@pytest.fixture
def flaky(world):
    """Makes functions that raise the given errors one by one, then return their arguments."""
    return FLAKY[world.name]


def test_calls_of_grpc_succeed_fail_or_are_queued_and_delivered(
    world, new_failback, flaky_server, run_until_empty
):
    push = world.channel(flaky_server.target).unary_unary(METHOD)
    failback = new_failback(retry_on="UNAVAILABLE")
    assert world.do(failback.invoke, push, b"first", timeout=WAIT_S) == b"first"
    flaky_server.fail(1, "INVALID_ARGUMENT")
    with pytest.raises(grpc.RpcError) as caught:
        world.do(failback.invoke, push, b"wrong", timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    flaky_server.fail(2)
    assert world.do(failback.invoke, push, b"order", timeout=WAIT_S) == DEFAULT
    run_until_empty(failback)
    assert requests_of(flaky_server) == [b"first", b"wrong", *[b"order"] * 3]
    assert failback.stats() == FailbackStats(
        calls=3, succeeded=1, failed=1, queued_total=1, attempts=2, redelivered=1
    )


# --- The first attempt ---


def test_an_error_that_retry_on_does_not_name_is_raised_unchanged(world, new_failback, flaky):
    error = ValueError("no such shop")
    with pytest.raises(ValueError, match="no such shop") as caught:
        world.do(new_failback().invoke, flaky(error))
    assert caught.value is error
    assert error.__cause__ is error.__context__ is None
    assert caught.traceback[-1].name == "__call__"


# --- Further attempts ---


def test_each_further_attempt_runs_in_a_copy_of_the_callers_context(
    world, new_failback, run_until_empty
):
    seen = []

    def push():
        seen.append(COLOR.get())
        COLOR.set("changed")
        if len(seen) < 4:
            raise ConnectionError

    failback = new_failback()
    context = contextvars.copy_context()
    context.run(COLOR.set, "red")
    context.copy().run(world.do, failback.invoke, in_world(world, push))
    run_until_empty(failback)
    # The context is copied when the call is queued, which is after its first attempt.
    assert seen == ["red", "changed", "changed", "changed"]
    assert COLOR.get() == "none"


@pytest.mark.parametrize("is_shared", [False, True], ids=["another queue", "the same queue"])
def test_attempts_that_hang_do_not_delay_those_of_another_function(
    is_shared, world, new_failback, flaky, timer
):
    hanging, end, attempts = new_failback(), threading.Event(), []
    other = hanging if is_shared else new_failback()

    def hang():
        attempts.append(1)
        if len(attempts) <= 10:
            raise ConnectionError
        return world.wait_for(end)

    for _ in range(10):
        world.do(hanging.invoke, in_world(world, hang))
    timer.advance(5)
    wait_until(lambda: len(attempts) == 14)
    world.do(other.invoke, flaky(ConnectionError()))
    timer.advance(5)
    wait_until(lambda: other.stats().redelivered == 1)
    assert hanging.pending == 10
    end.set()
    assert world.do(hanging.flush, WAIT_S)


@pytest.mark.parametrize(
    ("world", "error"),
    [(SyncWorld, SystemExit), (AioWorld, asyncio.CancelledError)],
    ids=["sync", "aio"],
    indirect=["world"],
)
def test_an_error_that_is_no_exception_gives_up_the_call(
    world, error, new_failback, flaky, events, run_until_empty
):
    """grpc.aio raises CancelledError if the channel is closed during a call."""
    failback = new_failback(retry_on=Exception)
    world.do(failback.invoke, flaky(ConnectionError(), error()))
    run_until_empty(failback)
    assert isinstance(events[-1], FailbackGaveUp)
    assert isinstance(events[-1].error, error)


@pytest.mark.parametrize(
    ("world", "error"),
    [(SyncWorld, SystemExit(3)), (AioWorld, ZeroDivisionError())],
    ids=["sync", "aio"],
    indirect=["world"],
)
def test_the_queue_works_after_dead_letter_raised(
    world, error, new_failback, flaky, events, run_until_empty
):
    failback = new_failback(max_attempts=2, dead_letter=flaky(error))
    world.do(failback.invoke, flaky(ConnectionError(), ConnectionError()))
    run_until_empty(failback)
    assert isinstance(events[-1], DeadLetterFailed)
    assert events[-1].error is error
    world.do(failback.invoke, function := flaky(ConnectionError()))
    run_until_empty(failback)
    assert len(function.calls) == 2


# --- Deadlines: the caller got the default long ago, so a further attempt may take longer ---


def test_further_attempts_and_dead_letter_have_no_deadline(world, new_failback, run_until_empty):
    seen = []

    def note(*_):
        seen.append(current_deadline())
        if len(seen) <= 3:
            raise ConnectionError

    failback = new_failback(max_attempts=3, dead_letter=in_world(world, note))
    with deadline_scope(100) as deadline:
        world.do(failback.invoke, in_world(world, note))
        assert current_deadline() == deadline  # the caller's own is unchanged
    run_until_empty(failback)
    assert seen == [deadline, None, None, None]


# --- flush and close ---


def test_flush_starts_every_queued_call_and_waits_until_all_are_delivered(
    world, new_failback, flaky
):
    failback, function = new_failback(), flaky(*[ConnectionError()] * 3)
    assert world.do(failback.flush, 0) is True
    for number in range(3):
        world.do(failback.invoke, function, number)
    assert world.do(failback.flush) is True
    assert sorted(function.calls[3:]) == [(0,), (1,), (2,)]


def test_flush_returns_false_if_calls_are_pending_after_its_timeout(world, new_failback, flaky):
    failback = new_failback()
    world.do(failback.invoke, flaky(*[ConnectionError()] * 9))
    assert world.do(failback.flush, 0.05) is False
    assert failback.pending == 1


def test_close_ends_as_soon_as_all_calls_are_delivered(world, new_failback, flaky):
    failback, function = new_failback(), flaky(ConnectionError())
    world.do(failback.invoke, function)
    assert world.do(failback.close, drain_timeout=float("inf")) == []
    assert len(function.calls) == 2


@pytest.mark.parametrize("method", ["flush", "close"])
def test_an_attempt_that_waits_for_its_own_queue_gets_an_error(
    world, new_failback, events, method, run_until_empty
):
    failback, attempts = new_failback(), []

    def push():
        attempts.append(1)
        if len(attempts) == 1:
            raise ConnectionError
        return getattr(failback, method)()

    world.do(failback.invoke, in_world(world, push))
    run_until_empty(failback)
    assert isinstance(events[-1], FailbackGaveUp)
    assert "would wait for itself" in str(events[-1].error)


def test_the_end_of_the_with_block_closes_the_queue(world, new_failback, flaky):
    failback, prefix = new_failback(), "__" if world.name == "sync" else "__a"
    assert world.do(getattr(failback, f"{prefix}enter__")) is failback
    world.do(failback.invoke, function := flaky(ConnectionError()))
    world.do(getattr(failback, f"{prefix}exit__"), None, None, None)
    assert len(function.calls) == 2
    with pytest.raises(FailbackClosed):
        world.do(failback.invoke, flaky(ConnectionError()))
