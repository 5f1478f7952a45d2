"""A further attempt does not have the deadline of the call that its caller is serving.

The caller got the default long ago, so an attempt in the background may take longer.
"""

import asyncio
from concurrent.futures import Future

from fixtures.failback_queues import aio_run_until_empty, run_until_empty
from rpcwheel.call import current_deadline, deadline_scope
from rpcwheel.rpc import DEADLINE


class Recorder:
    """A function that fails a given number of times, and records the deadline of each attempt."""

    def __init__(self, failures) -> None:
        self._failures = failures
        self.seen = []

    def __call__(self, *_):
        self.seen.append(current_deadline())
        if len(self.seen) <= self._failures:
            raise ConnectionError


class FutureRecorder(Recorder):
    def __call__(self, *_):
        future = Future()
        try:
            future.set_result(super().__call__())
        except ConnectionError as error:
            future.set_exception(error)
        return future


class CoroutineRecorder(Recorder):
    async def __call__(self, *_):
        await asyncio.sleep(0)
        return super().__call__()


def test_a_further_attempt_has_no_deadline(invoker):
    failback, function = invoker(), Recorder(failures=2)
    with deadline_scope(100) as deadline:
        failback.invoke(function)
        assert current_deadline() == deadline  # the caller's own is unchanged
    run_until_empty(failback)
    assert function.seen == [deadline, None, None]


def test_a_further_attempt_that_returns_a_future_has_no_deadline(invoker):
    failback, function = invoker(), FutureRecorder(failures=2)
    with deadline_scope(100) as deadline:
        failback.invoke(function).result(10)
    run_until_empty(failback)
    assert function.seen == [deadline, None, None]


async def test_a_further_attempt_on_a_loop_has_no_deadline(aio_invoker):
    failback, function = aio_invoker(), CoroutineRecorder(failures=2)
    with deadline_scope(100) as deadline:
        await failback.invoke(function)
        assert current_deadline() == deadline
    await aio_run_until_empty(failback)
    assert function.seen == [deadline, None, None]


def test_dead_letter_has_no_deadline(invoker):
    seen = []
    failback = invoker(max_attempts=2, dead_letter=lambda _: seen.append(current_deadline()))
    with deadline_scope(100):
        failback.invoke(FutureRecorder(failures=9)).result(10)
    run_until_empty(failback)
    assert seen == [None]


async def test_dead_letter_on_a_loop_has_no_deadline(aio_invoker):
    seen = []

    async def keep(_):
        seen.append(current_deadline())

    failback = aio_invoker(max_attempts=2, dead_letter=keep)
    with deadline_scope(100):
        await failback.invoke(CoroutineRecorder(failures=9))
    await aio_run_until_empty(failback)
    assert seen == [None]


def test_a_call_whose_deadline_has_passed_is_delivered(invoker):
    failback, function = invoker(), Recorder(failures=1)
    with deadline_scope(0):
        failback.invoke(function)
    run_until_empty(failback)
    assert failback.stats().redelivered == 1
    assert function.seen[0].expired()


def test_a_deadline_that_an_attempt_sets_does_not_reach_the_next_one(invoker):
    failback, seen = invoker(), []

    def push():
        seen.append(DEADLINE.get())
        DEADLINE.set(7)
        if len(seen) < 3:
            raise ConnectionError

    token = DEADLINE.set(5)
    try:
        failback.invoke(push)
    finally:
        DEADLINE.reset(token)
    run_until_empty(failback)
    assert seen == [5, None, None]
