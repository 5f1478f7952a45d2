"""`SerialExecutor`."""

import threading
from unittest.mock import Mock

import pytest

from fixtures.forks import holds_in_child
from fixtures.interrupts import interrupted_at_each_call
from fixtures.timers import no_new_threads
from fixtures.waiting import WAIT_S, Gate, in_thread, wait_until
from rpcwheel._concurrency import executor
from rpcwheel._concurrency.executor import EXECUTOR, SerialExecutor
from rpcwheel.events.events import ExecutorRejected


def test_jobs_run_in_order_one_at_a_time():
    serial, seen, inside = SerialExecutor(), [], threading.Lock()

    def job(number):
        assert inside.acquire(blocking=False), "two at once"
        seen.append(number)
        inside.release()

    for number in range(500):
        serial.submit(lambda number=number: job(number))
    assert wait_until(lambda: len(seen) == 500)
    assert seen == list(range(500))


def test_a_hanging_job_delays_only_later_jobs():
    one, other, gate, seen = SerialExecutor(), SerialExecutor(), threading.Event(), []
    one.submit(lambda: gate.wait(WAIT_S))
    one.submit(lambda: seen.append("behind"))
    other.submit(lambda: seen.append("beside"))
    assert wait_until(lambda: seen == ["beside"])
    gate.set()
    assert wait_until(lambda: seen == ["beside", "behind"])


def test_submit_with_first_runs_a_job_before_the_waiting_jobs():
    serial, gate, seen = SerialExecutor(), threading.Event(), []
    serial.submit(lambda: gate.wait(WAIT_S))
    serial.submit(lambda: seen.append("second"))
    serial.submit(lambda: seen.append("first"), first=True)
    gate.set()
    assert wait_until(lambda: seen == ["first", "second"])


def test_an_interrupted_submit_leaves_the_executor_working():
    serial = SerialExecutor()
    for place in interrupted_at_each_call(lambda: serial.submit(bool)):
        done = threading.Event()
        serial.submit(done.set)
        assert done.wait(WAIT_S), place
        assert serial.wait(WAIT_S)


def test_a_submit_that_is_interrupted_when_its_run_has_begun_starts_no_second_run_beside_it():
    runs, seen, gate = [], [], Gate()

    def run(jobs):
        runs.append(threading.Thread(target=jobs, daemon=True))
        if len(runs) == 1:
            runs[0].start()
            assert gate.entered.wait(WAIT_S)
            raise KeyboardInterrupt

    serial = SerialExecutor(run=run)
    with pytest.raises(KeyboardInterrupt):
        serial.submit(gate)
    serial.submit(lambda: seen.append(gate.opened.is_set()))
    assert not serial.wait(0)
    assert (len(runs), seen) == (1, [])
    gate.opened.set()
    runs[0].join(WAIT_S)
    assert seen == [True]


def test_of_two_runs_after_an_interrupted_submit_one_runs_the_jobs():
    runs, seen, gate = [], [], Gate()

    def run(jobs):
        runs.append(jobs)
        if len(runs) == 1:
            raise KeyboardInterrupt

    serial = SerialExecutor(run=run)
    with pytest.raises(KeyboardInterrupt):
        serial.submit(gate)
    serial.submit(lambda: seen.append(gate.opened.is_set()))
    running = in_thread(runs[0])
    assert gate.entered.wait(WAIT_S)
    runs[1]()
    assert seen == []
    gate.opened.set()
    running.result(WAIT_S)
    assert seen == [True]
    assert serial.wait(0)


def test_beyond_the_limit_the_oldest_jobs_are_dropped():
    serial, gate, seen = SerialExecutor(limit=2), threading.Event(), []
    serial.submit(lambda: gate.wait(WAIT_S))
    assert wait_until(lambda: not serial._jobs)
    for number in range(5):
        serial.submit(lambda number=number: seen.append(number))
    gate.set()
    assert wait_until(lambda: seen == [3, 4])


def test_a_serial_executor_is_empty_in_a_forked_child():
    serial, gate = SerialExecutor(), Gate()
    serial.submit(gate)
    assert gate.entered.wait(WAIT_S)
    serial._changed.acquire()  # as if another thread held it

    def runs_a_job():
        done = threading.Event()
        serial.submit(done.set)
        return done.wait(WAIT_S)

    assert holds_in_child(runs_a_job)
    serial._changed.release()
    gate.opened.set()


def test_a_serial_executor_without_a_thread_gets_one_with_the_next_job(monkeypatch, events):
    """Otherwise all heartbeats of a process would end when a thread could not be started."""
    serial, seen, gate, done = SerialExecutor(), [], threading.Event(), threading.Event()
    monkeypatch.setattr(executor, "IDLE_TIMEOUT_S", 0)  # no thread waits for a job
    EXECUTOR.submit(object(), lambda: gate.wait(WAIT_S))  # which may hang
    assert wait_until(lambda: not EXECUTOR._idle)
    with no_new_threads():
        serial.submit(lambda: seen.append(1))
        serial.submit(lambda: seen.append(2))
    assert seen == []
    assert {type(event) for event in events} == {ExecutorRejected}
    serial.submit(done.set)
    assert done.wait(WAIT_S)
    assert seen == [1, 2]
    gate.set()


def test_added_jobs_run_after_start_and_wait_returns_when_all_have_run():
    jobs, seen = [], []
    serial = SerialExecutor(run=jobs.append)
    assert serial.wait(0)
    serial.start()
    serial.add(lambda: seen.append(1))
    assert (jobs, seen) == ([], [])
    serial.start()
    serial.submit(lambda: seen.append(2))
    assert (len(jobs), seen) == (1, [])
    assert not serial.wait(0)
    jobs.pop()()
    assert seen == [1, 2]
    assert serial.wait(0)


def test_jobs_after_one_that_raises_run_with_a_synchronous_run():
    serial, seen = SerialExecutor(run=lambda job: job()), []
    serial.add(Mock(side_effect=SystemExit))
    serial.add(lambda: seen.append(1))
    with pytest.raises(SystemExit):
        serial.start()
    serial.submit(lambda: seen.append(2))
    assert seen == [1, 2]
