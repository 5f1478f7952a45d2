"""Measures one timer of Python in this process: `python -m benchmarks.timer.child SUBJECT`.

Speaks the protocol of `peers.py`. `RPCWHEEL_PURE=1` in the environment selects the pure form.
The loops that are measured are methods of each subject, so that no adapter is measured with them.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle, islice, repeat
from statistics import quantiles
from typing import Any

from rpcwheel.timer import (
    AsyncWheelTimer,
    DeadlineHeap,
    HashedWheel,
    HierarchicalWheel,
    ManualTimer,
    SparseWheel,
    Timeout,
    WheelTimer,
)
from rpcwheel.timer.queue import TimerQueue

QUEUES: dict[str, Callable[[], TimerQueue]] = {
    "HierarchicalWheel": HierarchicalWheel,
    "SparseWheel": SparseWheel,
    "HashedWheel": lambda: HashedWheel(tick=0.001, slots=65_536),
    "DeadlineHeap": DeadlineHeap,
}
CHUNK = 10_000  # event loops run one iteration after so many calls
THREADS = 4
CANCELS_PER_START, CANCELS_PER_ADVANCE = 10, 1_000  # of the measurement "stall"

RANDOM = random.Random(1)


def random_delays(count: int, low_ms: int, high_ms: int) -> list[float]:
    """Delays in seconds with a resolution of 1 ms."""
    return [RANDOM.randint(low_ms, high_ms) / 1e3 for _ in range(count)]


CONSTANT_S = 60.0
DELAYS_S = random_delays(100_000, 30_000, 90_000)


def nothing(_: object = None) -> None:
    """The task of all timeouts; rpcwheel passes the timeout, the others nothing."""


class Subject(ABC):
    """A timer."""

    @abstractmethod
    def pairs(self, delays: Iterable[float]) -> None:
        """For each delay, start a timeout and cancel it."""

    @abstractmethod
    def starts(self, delays: Iterable[float]) -> list[Any]:
        """Start a timeout for each delay; returns handles that have `cancel()`."""

    @abstractmethod
    def run_later(self, delay: float, task: Callable[[], object]) -> None:
        """Start a timeout with this task."""

    @abstractmethod
    def close(self) -> None:
        """Stop the timer."""

    @abstractmethod
    def backlog(self, delays: list[float]) -> None:
        """Start timeouts while no task can run; phase `backlog` when all are due."""

    def inside(self, work: Callable[[], object]) -> None:
        """Run `work` where the timer is used: an event loop's timer on its loop."""
        work()

    def wait(self, seconds: float) -> None:
        """Wait, and run tasks that become due."""
        time.sleep(seconds)

    def end_at(self, delay: float) -> Callable[[], object]:
        """Start a timeout; returns a function that waits until its task has run."""
        done = threading.Event()
        self.run_later(delay, done.set)
        return done.wait

    def fill(self, count: int) -> None:
        """Start so many timeouts with random delays."""
        self.each(self.starts, chunks(cycle(DELAYS_S), count))

    def each(self, work: Callable[[Any], object], chunks: Iterable[Any]) -> None:
        """Call `work` for each chunk; an event loop runs one iteration between two chunks."""
        for chunk in chunks:
            self.inside(partial(work, chunk))


class Own(Subject):
    """A timer of rpcwheel, through its public `new_timeout`."""

    timer: WheelTimer | AsyncWheelTimer

    def pairs(self, delays: Iterable[float]) -> None:
        new_timeout = self.timer.new_timeout
        for delay in delays:
            new_timeout(nothing, delay).cancel()

    def starts(self, delays: Iterable[float]) -> list[Timeout]:
        new_timeout = self.timer.new_timeout
        return [new_timeout(nothing, delay) for delay in delays]

    def run_later(self, delay: float, task: Callable[[], object]) -> None:
        self.timer.new_timeout(lambda _: task(), delay)

    def close(self) -> None:
        self.timer.stop()


class OwnThread(Own):
    """`WheelTimer`."""

    def __init__(self, queue: TimerQueue) -> None:
        self.timer = WheelTimer(queue)

    def backlog(self, delays: list[float]) -> None:
        gate = threading.Event()
        self.run_later(0.0, gate.wait)
        self.starts(delays)
        wait = self.end_at(1.05)
        gc.collect()
        time.sleep(1.3)
        with phase("backlog", len(delays)):
            gate.set()
            wait()


class OnLoop(Subject):
    """A timer of an event loop. The loop runs only in the methods of this class."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop

    def inside(self, work: Callable[[], object]) -> None:
        async def main() -> None:
            work()

        self.loop.run_until_complete(main())

    def wait(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def end_at(self, delay: float) -> Callable[[], object]:
        done: asyncio.Future[None] = self.loop.create_future()
        self.inside(lambda: self.run_later(delay, lambda: done.set_result(None)))
        return lambda: self.loop.run_until_complete(done)

    def backlog(self, delays: list[float]) -> None:
        async def main() -> None:
            done: asyncio.Future[None] = self.loop.create_future()
            self.starts(delays)
            self.run_later(1.05, partial(done.set_result, None))
            gc.collect()
            time.sleep(1.3)  # noqa: ASYNC251 - the loop must not run before all are due
            with phase("backlog", len(delays)):
                await done

        self.loop.run_until_complete(main())

    def close(self) -> None:
        self.loop.close()


class OwnLoop(Own, OnLoop):
    """`AsyncWheelTimer`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        OnLoop.__init__(self, loop)
        self.inside(lambda: setattr(self, "timer", AsyncWheelTimer()))

    def close(self) -> None:
        self.timer.stop()
        self.loop.close()


class LoopTimers(OnLoop):
    """`loop.call_later` of asyncio or uvloop."""

    def pairs(self, delays: Iterable[float]) -> None:
        call_later = self.loop.call_later
        for delay in delays:
            call_later(delay, nothing).cancel()

    def starts(self, delays: Iterable[float]) -> list[asyncio.TimerHandle]:
        call_later = self.loop.call_later
        return [call_later(delay, nothing) for delay in delays]

    def run_later(self, delay: float, task: Callable[[], object]) -> None:
        self.loop.call_later(delay, task)


class ThreadingTimers(Subject):
    """`threading.Timer`: a thread for each timeout."""

    def __init__(self) -> None:
        self._started: list[threading.Timer] = []

    def pairs(self, delays: Iterable[float]) -> None:
        for handle in self.starts(delays):
            handle.cancel()

    def starts(self, delays: Iterable[float]) -> list[threading.Timer]:
        timers = [threading.Timer(delay, nothing) for delay in delays]
        for timer in timers:
            timer.start()
        self._started += timers
        return timers

    def run_later(self, delay: float, task: Callable[[], object]) -> None:
        threading.Timer(delay, task).start()

    def backlog(self, delays: list[float]) -> None:
        raise NotImplementedError("each timeout has its own thread")

    def close(self) -> None:
        for timer in self._started:
            timer.cancel()
            timer.join()


def make(name: str) -> Subject:
    """A new timer without timeouts."""
    if name in QUEUES:
        return OwnThread(QUEUES[name]())
    if name == "threading.Timer":
        return ThreadingTimers()
    loop = _uvloop() if "uvloop" in name else asyncio.new_event_loop()
    return OwnLoop(loop) if name.startswith("Async") else LoopTimers(loop)


def _uvloop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()


# --- Measurements: each makes a phase, or prints values ----------------------


def calls(subject: Subject, pending: int, count: int) -> None:
    """Pairs with one delay and with random delays, starts, and cancels of what was started."""
    subject.fill(pending)
    constant = list(chunks(repeat(CONSTANT_S), count))
    varied = list(chunks(cycle(DELAYS_S), count))
    gc.collect()
    subject.each(subject.pairs, constant[: len(constant) // 4 + 1])
    with phase("pair", count):
        subject.each(subject.pairs, constant)
    with phase("varied", count):
        subject.each(subject.pairs, varied)
    handles: list[list[Any]] = []
    with phase("start", count):
        subject.each(lambda delays: handles.append(subject.starts(delays)), varied)
    with phase("cancel", count):
        subject.each(cancel, handles)


def backlog(subject: Subject, _: int, count: int) -> None:
    """Timeouts with random delays, all of which are due when the phase begins."""
    subject.backlog(random_delays(count, 1, 1_000))


def ontime(subject: Subject, _: int, count: int) -> None:
    """Timeouts with random delays of 1 s and more, a hundred for each millisecond."""
    last_ms = 1_000 + count // 100
    subject.each(subject.starts, list(chunks(random_delays(count, 1_000, last_ms), count)))
    wait = subject.end_at((last_ms + 10) / 1e3)
    with phase("ontime", count):
        wait()


def pending(subject: Subject, count: int, milliseconds: int) -> None:
    """Memory, collections, and a time without due timeouts: before the first start, and after."""
    with phase("empty", 1):
        subject.wait(milliseconds / 1e3)
    with phase("memory", count):
        subject.fill(count)
    with phase("gc", 1):
        gc.collect()
    subject.wait(0.1)
    with phase("idle", 1):
        subject.wait(milliseconds / 1e3)


def lateness(subject: Subject, _: int, count: int) -> None:
    """How late tasks start, with random delays of 1 to 100 ms."""
    late: list[float] = []

    def start(delays: Iterable[float]) -> None:
        for delay in delays:
            due = time.monotonic() + delay
            subject.run_later(delay, partial(note, due))

    def note(due: float) -> None:
        late.append(time.monotonic() - due)

    subject.each(start, [random_delays(count, 1, 100)])
    while len(late) < count:
        subject.wait(0.1)
    cuts = quantiles(late, n=100)
    for name, value in (("p50_us", cuts[49]), ("p99_us", cuts[98]), ("least_us", min(late))):
        print(f"value {name} {value * 1e6}")


def threads(subject: Subject, pending: int, count: int) -> None:
    """Pairs with one delay of four threads at once."""
    subject.fill(pending)
    workers = [
        threading.Thread(target=subject.pairs, args=([CONSTANT_S] * (count // THREADS),))
        for _ in range(THREADS)
    ]
    with phase("threads", count // THREADS * THREADS):
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()


def stall(name: str, count: int) -> None:
    """The longest single call, in CPU time of the thread, while all pending timeouts are canceled.

    Between cancels, timeouts are started, and the timer is advanced without due timeouts (or the
    event loop runs one iteration). The cyclic garbage collector is off. Interrupts and page faults
    do not affect the same call twice, so the smallest maximum of several runs is the result.
    """
    runs = []
    for _ in range(3):
        gc.collect()
        gc.disable()
        runs.append(_stall(name, count))
        gc.enable()
    for kind in runs[0]:
        print(f"value {kind}_us {min(run[kind] for run in runs) / 1e3}")


def _stall(name: str, count: int) -> dict[str, int]:
    start: Callable[[float], Any]
    if name in QUEUES:
        manual = ManualTimer(QUEUES[name]())
        start = partial(manual.new_timeout, nothing)
        advance: Callable[[], object] = partial(manual.advance, 0.001)
    else:
        timer = make(name)
        start = lambda delay: timer.starts([delay])[0]  # noqa: E731
        advance = partial(timer.inside, nothing)
    longest = {"cancel": 0, "start": 0, "advance": 0}

    def timed(kind: str, call: Callable[..., object], *args: object) -> None:
        before = time.thread_time_ns()
        call(*args)
        longest[kind] = max(longest[kind], time.thread_time_ns() - before)

    handles = [start(delay) for delay in islice(cycle(DELAYS_S), count)]
    for index, (handle, delay) in enumerate(zip(handles, cycle(DELAYS_S), strict=False)):
        timed("cancel", handle.cancel)
        if index % CANCELS_PER_START == 0:
            timed("start", start, delay)
        if index % CANCELS_PER_ADVANCE == 0:
            timed("advance", advance)
    return longest


# --- Protocol ----------------------------------------------------------------


def chunks(values: Iterable[Any], count: int) -> Iterator[list[Any]]:
    """The first `count` values, in lists of at most `CHUNK`."""
    values = iter(values)
    for done in range(0, count, CHUNK):
        yield list(islice(values, min(CHUNK, count - done)))


def cancel(handles: Iterable[Any]) -> None:
    """Cancel all."""
    for handle in handles:
        handle.cancel()


@contextmanager
def phase(name: str, count: int) -> Iterator[None]:
    """The reader measures what this process uses in the block."""
    pause("begin")
    yield
    pause(f"end {name} {count}")


def pause(text: str) -> None:
    """Print a line, and wait for the answer."""
    print(text, flush=True)
    sys.stdin.readline()


MEASURES: dict[str, Callable[[Subject, int, int], None]] = {
    measure.__name__: measure for measure in (calls, backlog, ontime, pending, lateness, threads)
}


def main(name: str) -> None:
    """Carry out the requests on stdin."""
    logging.getLogger("rpcwheel").setLevel(logging.CRITICAL)  # a task of `backlog` is slow
    while line := sys.stdin.readline():
        measure, pending_count, count = line.split()
        if measure == "stall":
            stall(name, int(count))
            print("ok", flush=True)
        else:
            subject = make(name)
            MEASURES[measure](subject, int(pending_count), int(count))
            print("ok", flush=True)
            subject.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
