"""A retry in the background has all the time it needs: its caller has been answered long ago.

So it must not inherit the deadline of the call that its caller was serving.
"""

import asyncio
from concurrent.futures import Future

import pytest

from fixtures.failback_queues import aplay, play
from rpcwheel.call import current_deadline, deadline_scope
from rpcwheel.rpc import DEADLINE


class Look:
    """A function that fails as often as told, and notes the deadline that each try has."""

    def __init__(self, failures=1) -> None:
        self._failures = failures
        self.seen = []

    def __call__(self, *_):
        self.seen.append(current_deadline())
        if len(self.seen) <= self._failures:
            raise ConnectionError


class AsyncLook(Look):
    async def __call__(self, *_):
        await asyncio.sleep(0)
        return super().__call__()


class FutureLook(Look):
    def __call__(self, *_):
        future = Future()
        try:
            future.set_result(super().__call__())
        except ConnectionError as error:
            future.set_exception(error)
        return future


def test_a_retry_of_an_invoker_has_no_deadline_of_the_served_call(invoker):
    failback, look = invoker(), Look(failures=2)
    with deadline_scope(100) as deadline:
        failback.invoke(look)
        assert current_deadline() == deadline  # the caller's own is as it was
    play(failback)
    assert look.seen == [deadline, None, None]


def test_nor_has_one_that_returns_a_future(invoker):
    failback, look = invoker(), FutureLook(failures=2)
    with deadline_scope(100) as deadline:
        failback.invoke(look).result(10)
    play(failback)
    assert look.seen == [deadline, None, None]


async def test_nor_has_one_on_a_loop(aio_invoker):
    failback, look = aio_invoker(), AsyncLook(failures=2)
    with deadline_scope(100) as deadline:
        await failback.invoke(look)
        assert current_deadline() == deadline
    await aplay(failback)
    assert look.seen == [deadline, None, None]


def test_nor_has_one_that_was_parked(invoker):
    failback, look = invoker(), Look()
    with deadline_scope(100):
        failback.enqueue(ConnectionError(), look)
    play(failback)
    assert look.seen == [None, None]


async def test_nor_has_one_that_was_parked_on_a_loop(aio_invoker):
    failback, look = aio_invoker(), AsyncLook()
    with deadline_scope(100):
        failback.enqueue(ConnectionError(), look)
    await aplay(failback)
    assert look.seen == [None, None]


def test_nor_has_one_of_a_decorated_function(guard):
    look = Look()
    push = guard()(look)
    with deadline_scope(100) as deadline:
        push()
    play(push.failback)
    assert look.seen == [deadline, None]


async def test_nor_has_one_of_a_decorated_coroutine_function(guard):
    look = AsyncLook()

    @guard()
    async def push():
        await look()

    with deadline_scope(100) as deadline:
        await push()
    await aplay(push.failback)
    assert look.seen == [deadline, None]


def test_nor_has_the_dead_letter_hook(invoker):
    seen = []
    failback = invoker(max_attempts=2, dead_letter=lambda _: seen.append(current_deadline()))
    with deadline_scope(100):
        failback.invoke(Look(failures=9))
    play(failback)
    assert seen == [None]


async def test_nor_has_the_dead_letter_hook_on_a_loop(aio_invoker):
    seen = []

    async def keep(_):
        seen.append(current_deadline())

    failback = aio_invoker(max_attempts=2, dead_letter=keep)
    with deadline_scope(100):
        await failback.invoke(AsyncLook(failures=9))
    await aplay(failback)
    assert seen == [None]


def test_a_call_whose_deadline_has_passed_is_delivered_all_the_same(invoker):
    failback, look = invoker(), Look()
    with deadline_scope(0):
        failback.invoke(look)
    play(failback)
    assert failback.stats().redelivered == 1
    assert look.seen[0].expired()


@pytest.mark.parametrize("deadline_ns", [None, 5])
def test_what_a_retry_sets_stays_in_it(invoker, deadline_ns):
    failback, tries = invoker(), []

    def push():
        tries.append(DEADLINE.get())
        DEADLINE.set(7)
        if len(tries) < 3:
            raise ConnectionError

    token = DEADLINE.set(deadline_ns)
    try:
        failback.invoke(push)
    finally:
        DEADLINE.reset(token)
    play(failback)
    assert tries == [deadline_ns, None, None]
