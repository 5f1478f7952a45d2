"""How a queue with threads is flushed and closed, and that no call is lost or doubled by it."""

import threading

import pytest
from tenacity import stop_after_attempt

from fixtures.failback_queues import Far, all_wait, play
from fixtures.interrupts import Interrupt
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.errors import ConfigurationError, FailbackClosed
from rpcwheel.events import FailbackGaveUp, FailbackLost
from rpcwheel.failback import FailbackInvoker, FailbackPolicy
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


def test_a_flush_ends_when_the_last_call_is_given_up():
    with WheelTimer() as real:
        failback = FailbackInvoker(FailbackPolicy(retry_on=OSError, backoff=0.01), timer=real)
        failback.invoke(Far(*[OSError()] * 9))
        assert failback.flush(WAIT_S) is True
        assert failback.stats().gave_up == 1


def test_a_bad_timeout_is_refused(invoker):
    for bad in ["5", float("nan"), True]:
        with pytest.raises((TypeError, ConfigurationError), match="timeout"):
            invoker().flush(bad)


def test_a_close_returns_what_it_could_not_deliver(invoker, events):
    failback = invoker()
    failback.invoke(Far(*[ConnectionError()] * 9), "stays")
    (left,) = failback.close(drain_timeout=0.05)
    assert left.args == ("stays",)
    assert left.reason.startswith("closed")
    assert any(isinstance(event, FailbackLost) for event in events)
    assert failback.pending == 0


def test_a_close_ends_as_soon_as_all_have_arrived(invoker):
    failback, far = invoker(), Far(ConnectionError())
    failback.invoke(far)
    assert failback.close(drain_timeout=float("inf")) == []
    assert len(far.calls) == 2


def test_a_server_that_comes_back_during_the_drain_gets_its_calls(timer):
    """No wait is then longer than half of what is left of the drain."""
    failback, far = (
        FailbackInvoker(FailbackPolicy(retry_on=OSError, backoff=3600), timer=timer),
        Far(),
    )
    far.failures = [OSError()] * 3
    failback.invoke(far)
    left = [None]
    closer = threading.Thread(target=lambda: left.extend(failback.close(drain_timeout=4 * WAIT_S)))
    closer.start()
    for tries, seconds in ((2, 2 * WAIT_S), (3, WAIT_S)):
        assert wait_until(lambda tries=tries: len(far.calls) == tries and all_wait(failback))
        timer.advance(seconds)
    closer.join(WAIT_S)
    assert (left, len(far.calls)) == ([None], 4)


@pytest.mark.parametrize(
    "limit", [{"max_attempts": 2}, {"stop": stop_after_attempt(2)}], ids=["max_attempts", "stop"]
)
def test_a_drain_retries_until_its_time_is_over_whatever_the_limit_of_retries(timer, limit):
    policy = FailbackPolicy(retry_on=OSError, backoff=1.0, **limit)
    failback, far = FailbackInvoker(policy, timer=timer), Far(*[OSError()] * 6)
    failback.invoke(far)
    left = [None]
    closer = threading.Thread(target=lambda: left.extend(failback.close(drain_timeout=4 * WAIT_S)))
    closer.start()
    for tries in range(2, 7):
        assert wait_until(lambda tries=tries: len(far.calls) == tries and all_wait(failback))
        timer.advance(1.0)
    closer.join(WAIT_S)
    assert (left, len(far.calls)) == ([None], 7)
    assert failback.stats().gave_up == 0


def test_a_drain_waits_50_ms_between_retries_beyond_the_limit_though_the_policy_waits_less(timer):
    policy = FailbackPolicy(retry_on=OSError, backoff=0.0, max_attempts=2)
    failback, far = FailbackInvoker(policy, timer=timer), Far(*[OSError()] * 2)
    failback.invoke(far)
    closer = threading.Thread(target=failback.close, args=(WAIT_S,))
    closer.start()
    assert wait_until(lambda: len(far.calls) == 2 and all_wait(failback))
    assert (timer.advance(0.049), timer.advance(0.001)) == (0, 1)
    closer.join(WAIT_S)
    assert len(far.calls) == 3


def test_close_returns_what_is_queued_at_the_end_of_the_drain_and_dead_letter_does_not_get_it(
    invoker,
):
    dead = []
    failback = invoker(max_attempts=2, dead_letter=dead.append)
    failback.invoke(Far(*[ConnectionError()] * 9), "order")
    (left,) = failback.close(drain_timeout=0.05)
    assert left.args == ("order",)
    assert left.reason.startswith("closed")
    assert dead == []
    assert failback.stats().lost == 1


@pytest.mark.parametrize("has_hook", [False, True])
def test_an_error_that_on_does_not_name_ends_a_call_also_during_the_drain(invoker, has_hook):
    dead = []
    failback = invoker(dead_letter=dead.append if has_hook else None)
    failback.invoke(Far(ConnectionError(), ValueError()), "order")
    left = failback.close(drain_timeout=float("inf"))
    assert [one.args for one in (dead if has_hook else left)] == [("order",)]
    assert len(dead) + len(left) == 1


def test_after_close_a_call_whose_policy_has_no_retries_raises_its_own_error(invoker):
    failback = invoker(max_attempts=1)
    failback.close()
    with pytest.raises(ConnectionError):
        failback.invoke(Far(ConnectionError()))


def test_a_call_that_hangs_is_returned_and_its_end_changes_nothing(invoker, timer):
    end, far = threading.Event(), Far(ConnectionError())

    def hang():
        far()
        end.wait(WAIT_S)

    failback = invoker()
    failback.invoke(hang)
    timer.advance(5)
    wait_until(lambda: len(far.calls) == 2)
    (left,) = failback.close(drain_timeout=0.05)
    assert left.reason == "closed during an attempt, which may still succeed"
    end.set()
    wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith("rpcwheel-f")])
    assert failback.stats().lost == 1


def test_after_close_a_good_call_works_and_a_failing_one_raises_from_its_error(invoker):
    failback, error = invoker(), ConnectionError("late")
    failback.close()
    assert failback.invoke(Far(), 1) == (1,)
    with pytest.raises(FailbackClosed) as caught:
        failback.invoke(Far(error))
    assert caught.value.__cause__ is error
    with pytest.raises(ValueError, match="mine"):
        failback.invoke(Far(ValueError("mine")))


def test_a_close_that_is_interrupted_still_reports(invoker, events):
    failback, far, ctrl_c = invoker(), Far(*[ConnectionError()] * 9), Interrupt()

    def push():
        if far.calls:  # the try that `close` has begun
            ctrl_c.send()
        far()

    failback.invoke(push)
    with ctrl_c, pytest.raises(KeyboardInterrupt):
        failback.close(drain_timeout=float("inf"))
    assert any(isinstance(event, FailbackLost) for event in events)
    assert failback.pending == 0


def test_a_close_that_is_interrupted_as_it_begins_reports_too(invoker, events, monkeypatch):
    failback = invoker()
    failback.invoke(Far(ConnectionError()))

    def interrupted(entry):
        raise KeyboardInterrupt

    monkeypatch.setattr(failback._queue, "start_attempt", interrupted)
    with pytest.raises(KeyboardInterrupt):
        failback.close(drain_timeout=WAIT_S)
    assert any(isinstance(event, FailbackLost) for event in events)
    assert failback.pending == 0


def test_closing_again_returns_nothing_at_once(invoker):
    failback = invoker()
    failback.invoke(Far(*[ConnectionError()] * 9))
    assert len(failback.close(drain_timeout=0)) == 1
    assert failback.close() == []


def test_leaving_the_with_statement_closes(timer):
    with FailbackInvoker(FailbackPolicy(retry_on=OSError), timer=timer) as failback:
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
    assert isinstance(events[-1], FailbackGaveUp)
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
        policy = FailbackPolicy(retry_on=ConnectionError, backoff=0.002, max_pending=10_000)
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
        assert failback.close(drain_timeout=WAIT_S) == []
    assert sorted(arrived) == list(range(2_000))
    stats = failback.stats()
    assert stats.calls == stats.succeeded + stats.redelivered == 2_000
    assert stats.attempts == 500 * (1 + 2 + 3)
