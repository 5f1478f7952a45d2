"""How a queue with threads is flushed and closed, and that no call is lost or doubled by it."""

import os
import signal
import threading
import time

import pytest

from fixtures.failback_queues import Far, play
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.errors import ConfigurationError, FailbackClosed
from rpcwheel.failback import FailbackInvoker, FailbackPolicy
from rpcwheel.observe import CallAbandoned, CallsUndelivered
from rpcwheel.timer import WheelTimer


def test_a_flush_tries_at_once_and_waits_until_all_have_arrived(invoker):
    failback, far = invoker(), Far(*[ConnectionError()] * 3)
    for number in range(3):
        failback.invoke(far, number)
    assert failback.flush() is True
    assert sorted(far.calls[3:]) == [(0,), (1,), (2,)]


def test_a_flush_of_nothing_is_true_at_once(invoker):
    assert invoker().flush(0) is True


def test_a_flush_that_runs_out_of_time_says_so(invoker):
    failback = invoker()
    failback.invoke(Far(*[ConnectionError()] * 9))
    assert failback.flush(0.05) is False
    assert failback.pending == 1
    assert failback._ledger.book._waiters == []


def test_a_flush_ends_when_the_last_call_is_given_up(timer):
    with WheelTimer() as real:
        failback = FailbackInvoker(FailbackPolicy(on=OSError, wait=0.01), timer=real)
        failback.invoke(Far(*[OSError()] * 9))
        assert failback.flush(WAIT_S) is True
        assert failback.stats().abandoned == 1


@pytest.mark.parametrize("bad", ["5", float("nan"), True])
def test_a_bad_timeout_is_refused(invoker, bad):
    with pytest.raises((TypeError, ConfigurationError), match="timeout"):
        invoker().flush(bad)


def test_a_close_delivers_what_it_can_and_returns_the_rest(invoker, events):
    failback, far = invoker(), Far(ConnectionError())
    stays = Far(*[ConnectionError()] * 9)
    failback.invoke(far, "goes")
    failback.invoke(stays, "stays")
    (left,) = failback.close(drain=0.5)
    assert (left.args, left.reason) == (("stays",), "closed")
    assert far.calls == [("goes",)] * 2
    assert any(isinstance(event, CallsUndelivered) for event in events)
    assert failback.pending == 0


def test_a_close_ends_as_soon_as_all_have_arrived(invoker):
    failback = invoker()
    failback.invoke(Far(ConnectionError()))
    began = time.monotonic()
    assert failback.close(drain=60) == []
    assert time.monotonic() - began < WAIT_S


def test_a_server_that_comes_back_during_the_drain_gets_its_calls():
    with WheelTimer() as timer:
        failback = FailbackInvoker(FailbackPolicy(on=OSError, wait=60), timer=timer)
        far = Far(*[OSError()] * 3)
        failback.invoke(far)
        assert failback.close(drain=2.0) == []
        assert len(far.calls) == 4


def test_a_call_that_hangs_is_returned_and_its_end_changes_nothing(invoker, timer):
    end, far = threading.Event(), Far(ConnectionError())

    def hang():
        far()
        end.wait(WAIT_S)

    failback = invoker()
    failback.invoke(hang)
    timer.advance(5)
    wait_until(lambda: len(far.calls) == 2)
    (left,) = failback.close(drain=0.05)
    assert left.reason == "closed in the middle of a try, which may still arrive"
    end.set()
    wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith("rpcwheel-f")])
    assert failback.stats().undelivered == 1


def test_after_close_a_good_call_works_and_a_failing_one_raises_from_its_error(invoker):
    failback, error = invoker(), ConnectionError("late")
    failback.close()
    assert failback.invoke(Far(), 1) == (1,)
    with pytest.raises(FailbackClosed) as caught:
        failback.invoke(Far(error))
    assert caught.value.__cause__ is error
    with pytest.raises(ValueError, match="mine"):
        failback.invoke(Far(ValueError("mine")))


@pytest.fixture
def interrupt():
    """Sends what Ctrl-C sends, a moment later."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    yield timer.start
    timer.join()
    signal.signal(signal.SIGINT, before)


def test_a_close_that_is_interrupted_still_reports(invoker, events, interrupt):
    failback = invoker()
    failback.invoke(Far(*[ConnectionError()] * 9))
    interrupt()
    with pytest.raises(KeyboardInterrupt):
        failback.close(drain=60)
    assert any(isinstance(event, CallsUndelivered) for event in events)
    assert failback.pending == 0


def test_closing_again_returns_nothing_at_once(invoker):
    failback = invoker()
    failback.invoke(Far(*[ConnectionError()] * 9))
    assert len(failback.close(drain=0)) == 1
    assert failback.close() == []


def test_leaving_the_with_statement_closes(timer):
    with FailbackInvoker(FailbackPolicy(on=OSError), timer=timer) as failback:
        far = Far(OSError())
        failback.invoke(far)
    assert len(far.calls) == 2
    with pytest.raises(FailbackClosed):
        failback.invoke(Far(OSError()))


@pytest.mark.parametrize("wait", ["flush", "close"])
def test_a_retried_function_that_waits_for_its_own_queue_is_told(invoker, events, wait):
    failback, far = invoker(), Far(ConnectionError())

    def push():
        far()
        getattr(failback, wait)()

    failback.invoke(push)
    play(failback)
    assert isinstance(events[-1], CallAbandoned)
    assert "would wait for itself" in str(events[-1].error)


def test_many_threads_lose_no_call_and_deliver_none_twice():
    fails, lock, arrived = {}, threading.Lock(), []

    def push(order):
        with lock:
            fails[order] = fails.get(order, 0) + 1
            if fails[order] <= order % 4:
                raise ConnectionError
            arrived.append(order)

    with WheelTimer() as timer:
        policy = FailbackPolicy(on=ConnectionError, wait=0.002, max_pending=10_000)
        failback = FailbackInvoker(policy, timer=timer)

        def call(part):
            for order in part:
                failback.invoke(push, order)

        parts = [range(start, 2_000, 4) for start in range(4)]
        threads = [threading.Thread(target=call, args=(part,)) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failback.close(drain=WAIT_S) == []
    assert sorted(arrived) == list(range(2_000))
    stats = failback.stats()
    assert stats.calls == stats.delivered_inline + stats.delivered_later == 2_000
    assert stats.retried == 500 * (1 + 2 + 3)
