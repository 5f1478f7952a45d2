"""Concurrent threads, finalizers and signal handlers: timeouts end once, wake-ups are not lost."""

import gc
import itertools
import os
import random
import threading
import time
from collections import Counter

import pytest

from fixtures.programs import run_program
from fixtures.timers import QUEUES, TimerMaker, run_threads
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.telemetry import components
from rpcwheel.timer import AsyncWheelTimer, TimerStopped, WheelTimer, shared_timer, sync

pytestmark = pytest.mark.usefixtures("frequent_thread_switches")

ROUNDS = 800


class Record:
    """The end of each timeout. `list.append` is atomic; nothing else is shared."""

    def __init__(self) -> None:
        self.fired: list[int] = []
        self.cancelled: list[int] = []
        self.started: list[object] = []

    def task(self, number: int):
        return lambda timeout: self.fired.append(number)

    def settle(self, timer: WheelTimer, undelivered: list) -> None:
        """Check that each timeout ended in exactly one way, and that the stats agree."""
        left = [timeout for timeout in self.started if timeout in undelivered]
        ends = Counter(self.fired) + Counter(self.cancelled)
        assert not [number for number, count in ends.items() if count > 1], "ended twice"
        assert len(ends) + len(undelivered) == len(self.started), "never ended"
        assert len(left) == len(undelivered)
        stats = timer.stats()
        assert stats.pending == 0
        assert stats.started == len(self.started)
        assert stats.fired == len(self.fired)
        assert stats.cancelled == len(self.cancelled) + len(undelivered)
        for timeout in self.started:
            assert timeout.expired() != timeout.cancelled()
        queue = timer._timer_state.queue
        queue.check()
        assert len(queue) == 0


def churn(timer: WheelTimer, record: Record, seed: int, shared: list) -> None:
    """Start, reschedule and cancel timeouts, also those of other threads."""
    dice = random.Random(seed)
    for step in range(ROUNDS):
        number = seed * 1_000_000 + step
        timeout = timer.new_timeout(record.task(number), dice.choice([0, 0.001, 0.003, 0.02, 60.0]))
        record.started.append(timeout)
        shared.append((number, timeout))
        for _ in range(2):
            other, chosen = shared[dice.randrange(len(shared))]
            if dice.random() < 0.5:
                chosen.reschedule(dice.choice([0, 0.0005, 0.002, 0.01, 30.0, float("inf")]))
            elif chosen.cancel():
                record.cancelled.append(other)


@pytest.fixture(params=[*QUEUES, "on a loop"])
def timer(request):
    """A timer on a thread with each queue, and one on a loop."""
    on_loop = request.param == "on a loop"
    maker = TimerMaker(AsyncWheelTimer if on_loop else WheelTimer)
    yield maker(None if on_loop else QUEUES[request.param]())[0]
    maker.close()


def test_all_timeouts_of_four_threads_fire(timer):
    record, shared = Record(), []
    run_threads(*(lambda seed=s: churn(timer, record, seed, shared) for s in range(5, 9)))
    for number, timeout in shared:
        if timeout.deadline - time.monotonic() > 1 and timeout.cancel():
            record.cancelled.append(number)
    assert wait_until(lambda: timer.pending == 0)
    record.settle(timer, timer.stop())


def test_stop_during_concurrent_use_loses_no_timeout(make_queue):
    for round_ in range(6):
        timer, record, shared = WheelTimer(make_queue()), Record(), []

        def bustle(seed, timer=timer, record=record, shared=shared):
            try:
                churn(timer, record, seed, shared)
            except TimerStopped:
                return

        undelivered = []

        def stop(timer=timer, undelivered=undelivered, round_=round_):
            time.sleep(0.005 * round_)
            undelivered += timer.stop()

        run_threads(lambda: bustle(1), lambda: bustle(2), lambda: bustle(3), stop)
        record.settle(timer, undelivered)


numbers = itertools.count(10**9)


class Canceller:
    """Cancels another timeout when it is freed."""

    def __init__(self, timer, record, number, victim) -> None:
        self.say = (timer, record, number, victim)

    def __call__(self, timeout):
        self.say[1].fired.append(self.say[2])

    def __del__(self) -> None:
        timer, record, _, victim = self.say
        if victim is not None and victim[1].cancel():
            record.cancelled.append(victim[0])
        if timer.stopped or random.random() < 0.9:
            return
        try:
            started = timer.new_timeout(record.task(next(numbers)), 0.001)
        except TimerStopped:
            return
        record.started.append(started)


def test_finalizers_may_cancel_and_start_timeouts_during_concurrent_use(make_queue):
    timer, record = WheelTimer(make_queue()), Record()
    before = gc.get_threshold()
    gc.set_threshold(5, 2, 2)

    def work(seed: int) -> None:
        dice, last = random.Random(seed), None
        for step in range(400):
            number = -(seed * 100_000 + step)
            task = Canceller(timer, record, number, last)
            task.circle = task  # only the garbage collector frees it, at any time
            timeout = timer.new_timeout(task, dice.choice([0, 0.001, 0.002, 60.0]))
            record.started.append(timeout)
            last = (number, timeout)
            if dice.random() < 0.5 and timeout.cancel():
                record.cancelled.append(number)

    try:
        run_threads(*(lambda seed=s: work(seed) for s in (1, 2, 3, 4)))
        undelivered = timer.stop()
    finally:
        gc.set_threshold(*before)
    record.settle(timer, undelivered)
    record.started.clear()
    undelivered.clear()
    gc.collect()


def test_earlier_deadlines_of_four_threads_lose_no_wake_up(timer):
    far = timer.new_timeout(print, 3600.0)

    def wait_often() -> None:
        for step in range(150):
            fired, delay = threading.Event(), random.choice([0, 0.0005, 0.002])
            timeout = timer.new_timeout(
                lambda _, fired=fired: fired.set(), 3600.0 if step % 2 else delay
            )
            if step % 2:
                assert timeout.reschedule(delay)
            assert fired.wait(WAIT_S), "a wake-up was lost"

    run_threads(*[wait_often] * 4)
    assert far.cancel()


def test_the_first_task_of_a_timer_cannot_stop_it():
    for _ in range(200):
        timer, seen = WheelTimer(), []

        def task(timeout, timer=timer, seen=seen):
            try:
                timer.stop()
            except RuntimeError as error:
                seen.append(error)
            else:
                seen.append("stopped itself")

        timer.new_timeout(task, 0)
        assert wait_until(lambda seen=seen: seen)
        timer.stop()
        assert isinstance(seen[0], RuntimeError), seen


def test_stop_during_the_first_new_timeout_waits_for_its_task():
    for _ in range(100):
        timer, ended = WheelTimer(), []

        def task(timeout, ended=ended):
            time.sleep(0.002)
            ended.append(True)

        def start(timer=timer, task=task, ended=ended):
            try:
                timer.new_timeout(task, 0)
            except TimerStopped:
                ended.append("refused")

        undelivered = []
        run_threads(start, lambda timer=timer, got=undelivered: got.extend(timer.stop()))
        assert ended or undelivered, "a task ran on after stop() had returned"
        timer.stop()


def test_stops_from_many_threads_return_each_timeout_once(make_queue):
    timer = WheelTimer(make_queue())
    started = [timer.new_timeout(print, 60.0 + n) for n in range(500)]
    returned = []
    run_threads(*[lambda: returned.extend(timer.stop())] * 4)
    assert sorted(map(id, returned)) == sorted(map(id, started))


def test_concurrent_threads_get_the_same_shared_timer(monkeypatch):
    monkeypatch.setattr(sync._shared, "timer", None)  # as in a process without a shared timer
    got = []
    run_threads(*[lambda: got.append(shared_timer())] * 8)
    assert len(set(map(id, got))) == 1


def test_timers_can_be_created_by_concurrent_threads():
    keep = []

    def make() -> None:
        for _ in range(100):
            timer = WheelTimer()
            timer.stop()
            keep.append(timer)

    run_threads(*[make] * 4)
    assert not [
        timer for timer in components.of_kind("timer") if not timer.stopped and timer in keep
    ]


def test_a_signal_handler_may_start_and_cancel_timeouts_at_any_time():
    script = """
        import signal
        from rpcwheel.timer import WheelTimer
        from fixtures.timers import QUEUES
        from fixtures.waiting import wait_until

        for make in QUEUES.values():
            timer = WheelTimer(make())
            fired, mine, others = [], [], []

            def handle(*_):
                kept = timer.new_timeout(fired.append, 0.001)
                others.append(kept)
                dropped = timer.new_timeout(fired.append, 0.5)
                others.append(dropped)
                assert dropped.cancel()

            signal.signal(signal.SIGALRM, handle)
            signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
            while len(others) < 400:
                mine.append(timer.new_timeout(fired.append, 0.0015))
                if len(mine) % 2:
                    mine[-1].cancel()
                mine[-1].reschedule(0.001)
            signal.setitimer(signal.ITIMER_REAL, 0)
            wait_until(lambda: not timer.pending)
            assert timer.stop() == []
            timer._timer_state.queue.check()
            assert sorted(map(id, fired)) == sorted(id(t) for t in mine + others if t.expired())
            assert timer.stats().started == len(mine) + len(others)
        print("fine")
    """
    assert run_program(script)[0] == "fine\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_no_pending_timeouts_and_the_parent_keeps_its_own():
    script = """
        import logging, os, random, sys, threading, time
        from rpcwheel.timer import WheelTimer, shared_timer
        from fixtures.timers import QUEUES
        from fixtures.waiting import WAIT_S

        logging.disable()  # a fork while a line is written may leave the lock of stderr locked
        sys.setswitchinterval(1e-5)
        for make in QUEUES.values():
            timer, over = WheelTimer(make()), False

            def bustle():
                while not over:
                    while timer.pending > 500:
                        time.sleep(0.0001)
                    timer.new_timeout(lambda t: None, random.choice([0, 0.001, 0.01])).cancel()
                    timer.new_timeout(lambda t: None, random.choice([0, 0.001, 0.01]))

            def fires(timer):
                fired = threading.Event()
                timer.new_timeout(lambda t: fired.set(), 0.001)
                return fired.wait(WAIT_S)

            kept = timer.new_timeout(lambda t: os._exit(9), 3600.0)
            threads = [threading.Thread(target=bustle, daemon=True) for _ in range(2)]
            for thread in threads:
                thread.start()
            shared_timer().new_timeout(print, 3600.0)
            for _ in range(6):
                child = os.fork()
                if not child:
                    timer._timer_state.queue.check()
                    fine = (timer.pending == 0 and kept.cancelled() and fires(timer)
                            and shared_timer().pending == 0 and fires(shared_timer())
                            and timer.stop() == [])
                    os._exit(0 if fine else 1)
                _, status = os.waitpid(child, 0)
                assert status == 0, status
                time.sleep(0.002)
            over = True
            for thread in threads:
                thread.join()
            assert fires(timer)
            undelivered = timer.stop()
            assert kept in undelivered
        print("fine")
    """
    assert run_program(script)[0] == "fine\n"
