"""`KeyedExecutor`."""

import itertools
import threading
import weakref
from functools import partial
from unittest.mock import Mock

import pytest

from fixtures.exiting_process import STARTS_THREADS
from fixtures.forks import holds_in_child
from fixtures.interrupts import interrupted_at_each_call
from fixtures.programs import run_program
from fixtures.timers import cannot_start, inherit_contexts, no_new_threads, run_threads
from fixtures.waiting import WAIT_S, Gate, wait_until
from rpcwheel._concurrency import executor
from rpcwheel._concurrency.executor import EXECUTOR, KeyedExecutor
from rpcwheel.call.deadline import current_deadline, deadline_scope
from rpcwheel.events import ExecutorRejected, TaskFailed
from rpcwheel.timer import ManualTimer, WheelTimer, shared_timer

NUMBERS = itertools.count(1)


@pytest.fixture
def pool():
    return KeyedExecutor(f"rpcwheel-test-{next(NUMBERS)}", shared_threads=2)


def threads_of(pool):
    """The threads of an executor. `submit` starts a thread at once or never."""
    return [one for one in threading.enumerate() if one.name.startswith(f"{pool._name}-")]


@pytest.fixture
def hang():
    """Make jobs that hang until they are opened, at the latest at the end."""
    gates = []

    def new():
        gates.append(Gate())
        return gates[-1]

    yield new
    for gate in gates:
        gate.opened.set()


def run(pool, key="key"):
    """Submit a job, and return the event of its run."""
    done = threading.Event()
    pool.submit(key, done.set)
    return done


def test_a_job_runs_on_a_named_daemon_thread():
    pool, seen = KeyedExecutor("rpcwheel-named"), []
    done = threading.Event()
    pool.submit("key", lambda: (seen.append(threading.current_thread()), done.set()))
    assert done.wait(WAIT_S)
    (thread,) = seen
    assert thread.name == "rpcwheel-named-1"
    assert thread.daemon


def test_an_interrupted_submit_leaves_the_executor_working(pool):
    for place in interrupted_at_each_call(lambda: pool.submit("key", bool)):
        assert run(pool).wait(WAIT_S), place


def test_a_job_whose_thread_was_interrupted_starts_with_a_later_job(monkeypatch):
    pool, first = KeyedExecutor("rpcwheel-test", shared_threads=1), threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            pool.submit("key", first.set)
    assert run(pool).wait(WAIT_S)
    assert first.is_set()


def test_jobs_of_a_key_start_in_order_on_one_thread(hang):
    pool, first, order = KeyedExecutor("rpcwheel-test", shared_threads=1), hang(), []
    pool.submit("key", first)
    for number in range(5):
        pool.submit("key", lambda number=number: order.append(number))
    done = run(pool)
    assert order == []
    first.opened.set()
    assert done.wait(WAIT_S)
    assert order == [0, 1, 2, 3, 4]


def test_hanging_jobs_of_a_key_do_not_delay_another_key(pool, hang):
    for _ in range(5):
        pool.submit("hanging", hang())
    assert run(pool, "other").wait(WAIT_S)
    assert run(pool, "third").wait(WAIT_S)


def test_a_key_gets_at_most_the_shared_threads(pool, hang):
    jobs = [hang() for _ in range(4)]
    for job in jobs:
        pool.submit("key", job)
    assert jobs[1].entered.wait(WAIT_S)
    assert len(threads_of(pool)) == 2
    jobs[0].opened.set()
    assert jobs[2].entered.wait(WAIT_S)
    assert len(threads_of(pool)) == 2
    assert not jobs[3].entered.is_set()


def test_a_waiting_job_gets_the_thread_of_another_key(pool, hang):
    jobs = [hang() for _ in range(2)]
    for job in jobs:
        pool.submit("hanging", job)
        assert job.entered.wait(WAIT_S)
    other, waiting = hang(), hang()
    pool.submit("other", other)
    assert other.entered.wait(WAIT_S)
    pool.submit("other", waiting)
    assert len(threads_of(pool)) == 3
    jobs[0].opened.set()  # two are still busy: the shared threads
    assert wait_until(lambda: len(threads_of(pool)) == 2)  # the third has ended
    assert not waiting.entered.is_set()
    jobs[1].opened.set()
    assert waiting.entered.wait(WAIT_S)


def test_a_thread_is_reused_and_ends_when_idle(pool, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(executor, "IDLE_TIMEOUT_S", 3 * WAIT_S)
        for _ in range(20):
            assert run(pool).wait(WAIT_S)
            assert wait_until(lambda: pool._idle)
        assert len(threads_of(pool)) == 1
    assert run(pool).wait(WAIT_S)
    assert wait_until(lambda: not threads_of(pool))
    assert run(pool).wait(WAIT_S)


def test_one_idle_thread_does_not_count_for_two_jobs(pool, hang, monkeypatch):
    monkeypatch.setattr(executor, "IDLE_TIMEOUT_S", 3 * WAIT_S)
    assert run(pool).wait(WAIT_S)
    assert wait_until(lambda: pool._idle)
    with pool._changed:  # both are submitted before the thread wakes up
        pool.submit("hanging", hang())
        done = run(pool, "other")
    assert done.wait(WAIT_S)
    monkeypatch.setattr(executor, "IDLE_TIMEOUT_S", 0)
    assert run(pool).wait(WAIT_S)


@pytest.mark.parametrize("error", [ValueError("boom"), SystemExit(3)])
def test_an_exception_of_a_job_is_an_event_and_later_jobs_run(events, error):
    pool = KeyedExecutor("rpcwheel-test", shared_threads=1)
    pool.submit("key", Mock(side_effect=error))
    assert run(pool).wait(WAIT_S)
    assert [event.error for event in events if isinstance(event, TaskFailed)] == [error]


def test_an_idle_thread_keeps_no_job_alive(pool, monkeypatch):
    class Payload:
        pass

    monkeypatch.setattr(executor, "IDLE_TIMEOUT_S", 3 * WAIT_S)
    payload = Payload()
    gone = weakref.ref(payload)
    done = threading.Event()
    pool.submit("key", lambda payload=payload: done.set())
    del payload
    assert done.wait(WAIT_S)
    assert wait_until(lambda: gone() is None)
    assert threads_of(pool)
    monkeypatch.setattr(executor, "IDLE_TIMEOUT_S", 0)
    assert run(pool).wait(WAIT_S)  # the thread ends after this one


def test_submit_does_not_wait_for_the_new_thread(pool, monkeypatch):
    go, begins, in_time = threading.Event(), threading.Thread._bootstrap, []

    def late(thread):
        if thread.name.startswith("rpcwheel-test"):
            in_time.append(go.wait(WAIT_S))
        begins(thread)

    monkeypatch.setattr(threading.Thread, "_bootstrap", late)
    done = run(pool)
    assert len(threads_of(pool)) == 1
    go.set()
    assert done.wait(WAIT_S)
    assert in_time == [True]


@STARTS_THREADS
def test_the_exit_waits_until_new_threads_run():
    """One that began later would use memory that the interpreter has freed."""
    output, _ = run_program(
        """
        import atexit, threading, time

        @atexit.register  # before the import, so that it runs last
        def submit_at_the_end():
            print("submit", flush=True)
            EXECUTOR.submit("last", bool)
            print("end")

        from rpcwheel._concurrency.executor import EXECUTOR

        def late(thread, begins=threading.Thread._bootstrap):
            time.sleep(0.2)
            print("begun", flush=True)
            begins(thread)

        threading.Thread._bootstrap = late
        EXECUTOR.submit("first", threading.Event().wait)
        """
    )
    assert output.split() == ["begun", "submit", "begun", "end"]


def test_a_child_forked_while_a_thread_starts_can_run_jobs(pool, monkeypatch):
    go, begins = threading.Event(), threading.Thread._bootstrap

    def late(thread):
        if thread.name.startswith("rpcwheel-test"):
            go.wait(WAIT_S)
        begins(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "_bootstrap", late)
        done = run(pool)
        assert holds_in_child(lambda: run(EXECUTOR).wait(WAIT_S) and len(threading.enumerate()) < 3)
    go.set()
    assert done.wait(WAIT_S)


def test_a_process_can_exit_while_threads_start():
    program = "from rpcwheel._concurrency.executor import KeyedExecutor as Pool; [{}]"
    submits = "Pool().submit('key', bool) for _ in range(20)"
    run_program(program.format(submits))


def test_a_job_whose_thread_cannot_start_waits_for_another_thread(pool, events):
    with no_new_threads():
        first = run(pool)
    assert not first.is_set()
    assert [type(event) for event in events] == [ExecutorRejected]
    assert run(pool).wait(WAIT_S)
    assert first.wait(WAIT_S)


def test_a_job_whose_thread_cannot_start_takes_a_free_thread_while_others_hang(pool, hang):
    jobs = [hang() for _ in range(3)]
    for key, job in zip(("hanging", "hanging", "other"), jobs, strict=True):
        pool.submit(key, job)
        assert job.entered.wait(WAIT_S)
    with no_new_threads():
        done = run(pool, "refused")
    jobs[2].opened.set()
    assert done.wait(WAIT_S / 2)  # before the jobs that hang have ended


def test_refused_jobs_of_a_key_start_in_order():
    pool, order = KeyedExecutor("rpcwheel-test", shared_threads=1), []
    with no_new_threads():
        for number in range(3):
            pool.submit("key", lambda number=number: order.append(number))
    assert run(pool).wait(WAIT_S)
    assert order == [0, 1, 2]


def test_the_timer_starts_the_threads_that_were_refused(pool, events):
    timer = ManualTimer()
    pool.timer = lambda: timer
    with no_new_threads():
        first, second, other = run(pool), run(pool), run(pool, "other")
        timer.advance(executor.RETRY_S)
        assert timer.pending == 1
    assert len(events) == 4  # one for each job, and one at the second attempt
    timer.advance(executor.RETRY_S)
    assert first.wait(WAIT_S)
    assert second.wait(WAIT_S)
    assert other.wait(WAIT_S)
    assert timer.pending == 0


def test_a_refused_thread_of_the_timer_does_not_break_submit(pool, events):
    with WheelTimer() as timer:
        pool.timer = lambda: timer
        with no_new_threads():
            first = run(pool)
        assert [type(event) for event in events] == [ExecutorRejected]
        assert run(pool).wait(WAIT_S)
        assert first.wait(WAIT_S)


def test_the_shared_timer_starts_the_threads_of_the_process(monkeypatch, events):
    monkeypatch.setattr(executor, "RETRY_S", 0.01)
    shared_timer().new_timeout(bool, 0)  # starts its thread
    wait_until(lambda: not EXECUTOR._idle)  # a thread of an earlier test would take the job
    with monkeypatch.context() as patch:
        patch.setattr(executor._Thread, "start", cannot_start)
        done = threading.Event()
        EXECUTOR.submit(done, done.set)
    assert done.wait(WAIT_S)
    assert ExecutorRejected in map(type, events)


def test_each_job_of_concurrent_threads_runs_once(pool):
    counts = [0] * 4_000
    left = threading.Semaphore(0)

    def submit(part):
        for index in part:
            pool.submit(index % 7, lambda index=index: (add(index), left.release()))

    def add(index):
        counts[index] += 1

    run_threads(*(partial(submit, range(start, len(counts), 4)) for start in range(4)))
    for _ in counts:
        assert left.acquire(timeout=WAIT_S)
    assert set(counts) == {1}


def test_a_forked_child_starts_without_threads_and_jobs(hang):
    job = hang()
    EXECUTOR.submit("key", job)
    assert job.entered.wait(WAIT_S)
    with EXECUTOR._changed:  # held at the fork, as another thread might hold it
        assert holds_in_child(lambda: run(EXECUTOR).wait(WAIT_S))


def test_jobs_have_an_empty_context_although_a_worker_thread_may_inherit_one(monkeypatch, pool):
    inherit_contexts(monkeypatch)
    deadlines, ran = [], threading.Event()

    def job():
        deadlines.append(current_deadline())
        ran.set()

    with deadline_scope(60.0):
        pool.submit("key", job)
    assert ran.wait(WAIT_S)
    assert deadlines == [None]
