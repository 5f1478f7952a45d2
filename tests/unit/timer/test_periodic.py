"""`PeriodicTask` and `RetryTask`: times, exceptions, cancellation."""

import asyncio
import contextlib
import itertools
import random
import threading

import pytest
import tenacity

from fixtures.timers import RefusingExecutor
from fixtures.waiting import WAIT_S, aio_wait_until, wait_until
from rpcwheel.errors import TimerStopped, TooManyTimeouts
from rpcwheel.timer import (
    AsyncWheelTimer,
    DeadlineHeap,
    HashedWheel,
    ManualTimer,
    PeriodicTask,
    RetryTask,
    WheelTimer,
)


@pytest.fixture
def failures():
    return []


@pytest.fixture
def timer(failures):
    with ManualTimer(DeadlineHeap()) as timer:
        timer._on_error = lambda timeout, error: failures.append(error)
        yield timer


class Job:
    """Records when it ran; returns or raises the given values, in order."""

    def __init__(self, timer, *answers) -> None:
        self.timer, self.answers, self.at = timer, list(answers), []

    def __call__(self):
        self.at.append(self.timer.now)
        answer = self.answers.pop(0) if self.answers else None
        if callable(answer):
            answer = answer()
        if isinstance(answer, BaseException):
            raise answer
        return answer


def test_a_periodic_task_continues_after_exceptions_which_are_reported(timer, failures):
    errors = [ValueError("boom"), SystemExit(), KeyboardInterrupt()]
    job = Job(timer, *errors, None)
    task = PeriodicTask(timer, 1.0, job).start()
    for _ in range(4):
        with contextlib.suppress(SystemExit, KeyboardInterrupt):  # raised by `advance`
            timer.advance(1)
        timer.advance(0)
    assert len(job.at) == 4
    assert failures == errors
    assert task.state == "armed"
    task.cancel()


@pytest.mark.usefixtures("frequent_thread_switches")
def test_cancel_by_another_thread_leaves_no_pending_timeout():
    with WheelTimer() as timer:
        for _ in range(150):
            ran = []
            task = PeriodicTask(timer, 0.0002, lambda ran=ran: ran.append(1), initial_delay=0)
            task.start()
            assert wait_until(lambda ran=ran: ran)
            assert task.cancel()
        done = threading.Event()
        timer.new_timeout(lambda timeout: done.set(), 0.01)
        assert done.wait(WAIT_S)
        assert timer.pending == 0


def test_an_invalid_delay_returned_by_a_run_is_reported_and_the_interval_is_used(timer, failures):
    job = Job(timer, "soon", float("nan"), True, object())
    task = PeriodicTask(timer, 1.0, job).start()
    timer.advance(5)
    assert job.at == [1, 2, 3, 4, 5]
    assert len(failures) == 4
    assert all("the delay that run() returned" in str(failure) for failure in failures)
    task.cancel()


def test_an_interval_of_one_tick_runs_at_each_tick():
    """In Dubbo, a delay equal to the tick takes two ticks."""
    for offset in (0.0, 2.0, 4.999):
        with ManualTimer(HashedWheel(tick=5.0, slots=4)) as timer:
            timer.advance(offset)
            job = Job(timer)
            task = PeriodicTask(timer, 5.0, job).start()
            timer.advance(60)
            assert {round(b - a, 9) for a, b in itertools.pairwise(job.at)} == {5.0}
            task.cancel()


def test_jitter_is_within_its_share_of_the_interval(timer):
    random.seed(7)
    delays = []
    for _ in range(300):
        task = PeriodicTask(timer, 10.0, print, jitter=0.3).start()
        delays.append(task._timeout.deadline - timer.now)
        task.cancel()
    assert 7 <= min(delays) < 8
    assert 12 < max(delays) <= 13
    job = Job(timer)
    task = PeriodicTask(timer, 10.0, job, jitter=0.3).start()
    timer.advance(10_000)
    assert len(job.at) == pytest.approx(1000, abs=2)  # the deviations are not added
    gaps = {b - a for a, b in itertools.pairwise(job.at)}
    assert len(gaps) > 900
    assert 4 <= min(gaps) <= max(gaps) <= 16
    task.cancel()


def test_jitter_is_chosen_when_the_task_is_started(timer):
    """A task that is made before a fork begins in each process at another time."""
    tasks = [PeriodicTask(timer, 10.0, print, jitter=0.3) for _ in range(2)]
    delays = []
    for task in tasks:
        random.seed(7)  # as a fork does, by another number
        delays.append(task.start()._timeout.deadline - timer.now)
        task.cancel()
    assert delays[0] == delays[1]


def test_there_is_no_jitter_by_default_and_none_on_initial_delay(timer):
    for jitter in ({}, {"jitter": 1.0}):
        task = PeriodicTask(timer, 10.0, print, initial_delay=4.0, **jitter).start()
        assert task._timeout.deadline - timer.now == 4.0
        task.cancel()


def test_a_periodic_task_ends_without_an_error_when_its_timer_stops(failures):
    timer = ManualTimer(DeadlineHeap())
    timer._on_error = lambda timeout, error: failures.append(error)

    def stop():
        timer._running, before = False, timer._running  # as another thread would
        timer.stop()
        timer._running = before

    task = PeriodicTask(timer, 1.0, stop).start()
    timer.advance(3)
    assert (task.state, failures, timer.pending) == ("cancelled", [], 0)
    with pytest.raises(TimerStopped):
        PeriodicTask(timer, 1.0, stop).start()


def test_max_pending_applies_to_the_start_but_not_to_later_submissions(failures):
    ran = []

    def fill():
        ran.append(1)
        if len(ran) == 1:
            timer.new_timeout(print, 60.0)

    with WheelTimer(max_pending=1, on_error=lambda t, error: failures.append(error)) as timer:
        task = PeriodicTask(timer, 0.001, fill).start()
        assert wait_until(lambda: len(ran) > 2)
        other = PeriodicTask(timer, 1.0, fill)
        with pytest.raises(TooManyTimeouts):
            other.start()
        assert other.state == "idle"
        assert task.cancel()
        with pytest.raises(TooManyTimeouts):
            timer.new_timeout(print, 60.0)
    assert failures == []


async def test_the_next_run_of_a_coroutine_function_follows_the_end_of_the_last():
    ran, errors, at_once = [], [], []
    async with AsyncWheelTimer(on_error=lambda t, error: errors.append(error)) as timer:

        async def run():
            at_once.append(len(at_once) + 1)
            await asyncio.sleep(0.003)
            ran.append(at_once.copy())
            at_once.clear()
            if len(ran) == 2:
                raise ValueError("boom")

        task = PeriodicTask(timer, 0.001, run, initial_delay=0).start()
        await aio_wait_until(lambda: len(ran) >= 5)
        assert all(overlap == [1] for overlap in ran)
        assert [str(error) for error in errors] == ["boom"]
        assert task.cancel()
        await asyncio.sleep(0.02)
        assert timer.pending == 0


def test_a_retry_task_runs_until_it_succeeds(timer, failures):
    error = ValueError("no")
    job = Job(timer, error, error, "yes")
    task = RetryTask(timer, job, backoff=tenacity.wait_fixed(2))
    assert (task.state, task.attempts, task.last_error) == ("idle", 0, None)
    task.start()
    timer.advance(0)
    assert (task.state, task.attempts, task.last_error) == ("armed", 1, error)
    timer.advance(60)
    assert job.at == [0, 2, 4]
    assert (task.state, task.attempts, task.last_error) == ("done", 3, None)
    assert (failures, timer.pending, task.cancel()) == ([], 0, False)


def test_a_retry_task_ends_after_max_attempts_and_reports_the_last_error(timer, failures):
    errors = [ValueError(n) for n in range(5)]
    job = Job(timer, *errors)
    task = RetryTask(
        timer, job, max_attempts=3, backoff=tenacity.wait_fixed(1), initial_delay=0.5
    ).start()
    timer.advance(60)
    assert job.at == [0.5, 1.5, 2.5]
    assert failures == [errors[2]]
    assert (task.state, task.attempts, task.last_error) == ("done", 3, errors[2])


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_a_retry_task_raises_what_is_no_exception_and_continues(timer, failures, error):
    job = Job(timer, error(), ValueError(), "yes")
    task = RetryTask(timer, job, backoff=tenacity.wait_fixed(2)).start()
    with pytest.raises(error):
        timer.advance(0)
    assert [type(failure) for failure in failures] == [error]
    timer.advance(60)
    assert job.at == [0, 2, 4]
    assert (task.state, task.attempts, len(failures)) == ("done", 3, 1)


async def test_a_canceled_coroutine_is_a_failed_attempt_of_a_retry_task():
    began = asyncio.Event()

    async def run():
        began.set()
        await asyncio.sleep(WAIT_S)

    async with AsyncWheelTimer() as timer:
        task = RetryTask(timer, run).start()
        await began.wait()
        (running,) = timer._tasks
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert (task.state, task.attempts) == ("armed", 1)
        assert task.cancel()


def test_a_retry_task_takes_wait_and_stop_objects_of_tenacity(timer, failures):
    job = Job(timer, *[ValueError(n) for n in range(20)])
    RetryTask(
        timer,
        job,
        backoff=tenacity.wait_exponential(multiplier=1, min=1, max=8),
        stop=tenacity.stop_after_delay(20),
    ).start()
    timer.advance(200)
    assert job.at == [0, 1, 3, 7, 15, 23]
    assert len(failures) == 1


def test_a_retry_task_waits_five_seconds_by_default_and_can_be_cancelled(timer):
    job = Job(timer, *[ValueError(n) for n in range(30)])
    task = RetryTask(timer, job).start()
    timer.advance(60)
    assert task.cancel()
    assert all(2.5 <= later - earlier <= 5 for earlier, later in itertools.pairwise(job.at))
    before = len(job.at)
    timer.advance(60)
    assert (len(job.at), task.state, timer.pending) == (before, "cancelled", 0)


def broken(state):
    """A wait object that raises."""
    raise ZeroDivisionError


def test_a_wait_object_that_raises_after_a_refusal_ends_the_retry_task_and_is_reported():
    full, failures = RefusingExecutor(OSError("full")), []
    with WheelTimer(executor=full, on_error=lambda _, error: failures.append(error)) as timer:
        task = RetryTask(timer, print, backoff=broken).start()
        assert wait_until(lambda: failures)
        assert [type(error) for error in failures] == [ZeroDivisionError]
        assert (task.state, timer.pending) == ("done", 0)


def test_a_wait_object_that_raises_ends_the_retry_task_and_is_reported(timer, failures):
    task = RetryTask(timer, Job(timer, ValueError()), backoff=broken).start()
    timer.advance(10)
    assert [type(error) for error in failures] == [ZeroDivisionError]
    assert (task.state, timer.pending) == ("done", 0)
