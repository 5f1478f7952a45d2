"""Pending calls in both worlds: threads that race, and real timers."""

import time
from collections import Counter

import pytest

from fixtures.pending_worlds import LOST, outcome
from fixtures.timers import run_threads
from fixtures.waiting import wait_until
from rpcwheel.errors import CallsClosed, CallTimeout
from rpcwheel.pending import sync
from rpcwheel.timer import WheelTimer


def test_a_future_that_the_user_ended_does_not_break_the_table(world, timer):
    with world.module.PendingCalls(timer) as calls:

        def open_and_end(key):
            future = calls.open(key, timeout=2.0)
            future.set_result("mine")
            return future

        futures = [world.do(open_and_end, key) for key in range(3)]
        assert not world.do(futures[1].cancel)
        world.do(calls.received, 2, "yours")  # does not raise
        world.do(timer.advance, 2)
        assert [future.result() for future in futures] == ["mine"] * 3
        assert (calls.pending, timer.pending) == (0, 0)


class SlowKey(int):
    """A number that lets other threads run whenever it is looked up."""

    def __hash__(self):
        time.sleep(0)
        return int(self)


def test_racing_threads_end_each_call_once(world, frequent_thread_switches):
    with WheelTimer() as timer, world.module.PendingCalls(timer) as calls:
        futures, called, won = {}, [], Counter()

        def open_all():
            for key in map(SlowKey, range(300)):
                connection = "ab"[key % 2]
                futures[key] = calls.open(key, timeout=0.02 + key / 10_000, connection=connection)
                futures[key].add_done_callback(called.append)

        def each(name, act):
            for key in futures:
                won[name] += act(key)

        world.do(open_all)
        world.race(
            lambda: each("cancelled", lambda key: futures[299 - key].cancel()),
            lambda: each("received", lambda key: calls.received(key, key)),
            lambda: each("failed", lambda key: calls.failed(key, LOST)),
            lambda: won.update(lost=calls.lost("a", LOST) + calls.lost("b", LOST)),
        )
        assert wait_until(lambda: world.do(lambda: len(called) == 300))
        stats = calls.stats()
        assert (stats.answered, stats.cancelled) == (won["received"], won["cancelled"])
        assert stats.failed == won["failed"] + won["lost"]
        assert won.total() + stats.timed_out == 300
        assert {id(future) for future in called} == {id(future) for future in futures.values()}
        for future in futures.values():
            outcome(future)  # asyncio reports exceptions that were never retrieved
        assert (calls.pending, timer.pending) == (0, 0)


@pytest.mark.parametrize("make_timer", [WheelTimer, lambda: None], ids=["thread", "shared"])
def test_a_real_timer_does_not_end_a_call_early(world, make_timer):
    timer = make_timer()
    with world.module.PendingCalls(timer) as calls:
        future = world.do(calls.open, 7, timeout=0.02)
        world.wait([future])
        assert isinstance(outcome(future), CallTimeout)
        assert outcome(future).elapsed >= 0.02
    if timer is not None:
        timer.stop()


def test_close_ends_calls_that_are_opened_and_lost_meanwhile(frequent_thread_switches):
    with WheelTimer() as timer:
        calls, futures, going = sync.PendingCalls(timer), [], True

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
