"""Failback for blocking calls, over a real gRPC server. The timer is moved by hand."""

import contextvars
import threading

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue
from scenarios.failback import DEFAULT, ORDER, SCENARIOS
from tenacity import wait_fixed

from fixtures.failback_queues import FlakyFunction, HangingFunction, all_wait, run_until_empty
from fixtures.grpc_servers import METHOD, begin_scenario, requests_of
from fixtures.interrupts import Interrupt
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.errors import ConfigurationError, FailbackClosed, FailbackFull
from rpcwheel.events import DeadLetterFailed, FailbackGaveUp, FailbackLost
from rpcwheel.failback import FailbackInvoker, FailbackPolicy
from rpcwheel.timer import WheelTimer

COLOR = contextvars.ContextVar("COLOR", default="none")
MODULE = FlakyFunction.__module__


@pytest.mark.parametrize("style", ["blocking", "future"])
def test_each_scenario(style, invoker, flaky_server, channel):
    push = channel.unary_unary(METHOD)
    for scenario in SCENARIOS:
        begin_scenario(flaky_server, scenario.statuses)
        failback = invoker(**{"retry_on": "UNAVAILABLE"} | scenario.settings)
        try:
            if style == "blocking":
                result = failback.invoke(push, ORDER, timeout=WAIT_S)
            else:
                result = failback.invoke(push.future, ORDER, timeout=WAIT_S).result(WAIT_S)
        except grpc.RpcError as error:
            result = error.code().name
        run_until_empty(failback)
        scenario.check(result, requests_of(flaky_server), failback.stats())


def test_a_restarted_server_gets_every_queued_call(invoker, timer, flaky_server, channel):
    failback = invoker(retry_on=grpc.StatusCode.UNAVAILABLE, max_attempts=None)
    push = channel.unary_unary(METHOD)
    orders = [b"order %d" % number for number in range(20)]
    assert failback.invoke(push, b"before") == b"before"
    flaky_server.stop()
    assert [failback.invoke(push, order) for order in orders] == [DEFAULT] * 20
    timer.advance(5)
    wait_until(lambda: all_wait(failback))
    assert failback.pending == 20
    flaky_server.start()
    grpc.channel_ready_future(channel).result(WAIT_S)
    run_until_empty(failback)
    assert sorted(requests_of(flaky_server)[1:]) == sorted(orders)
    assert failback.stats().redelivered == 20


# --- The first attempt ---


def test_the_first_attempt_runs_on_the_callers_thread(invoker):
    function = FlakyFunction()
    assert invoker().invoke(function, 1, 2) == (1, 2)
    assert function.threads == [threading.current_thread()]


def test_the_caller_of_a_queued_call_gets_the_default_object_itself(invoker):
    default = object()
    assert invoker(default=default).invoke(FlakyFunction(ConnectionError())) is default


def test_an_error_that_retry_on_does_not_name_is_raised_unchanged(invoker):
    error = ValueError("no such shop")
    with pytest.raises(ValueError, match="no such shop") as caught:
        invoker().invoke(FlakyFunction(error))
    assert caught.value is error
    assert error.__cause__ is error.__context__ is None
    assert caught.traceback[-1].name == "__call__"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_keyboard_interrupt_and_system_exit_are_raised(invoker, error):
    failback = invoker(retry_on=Exception)
    with pytest.raises(error):
        failback.invoke(FlakyFunction(error()))
    assert failback.pending == 0


def test_keyword_arguments_may_have_any_names(invoker):
    def push(**kwargs):
        return kwargs

    given = {"self": 1, "function": 2, "timeout": 3}
    assert invoker().invoke(push, **given) == given


def test_a_full_queue_raises_or_returns_the_default(invoker):
    raises, error = invoker(max_pending=1), ConnectionError("second")
    raises.invoke(FlakyFunction(ConnectionError()))
    with pytest.raises(FailbackFull) as caught:
        raises.invoke(FlakyFunction(error))
    assert caught.value.__cause__ is error
    drops = invoker(max_pending=1, overflow="drop")
    assert [drops.invoke(FlakyFunction(ConnectionError())) for _ in range(2)] == [DEFAULT] * 2


def test_an_awaitable_result_raises_with_what_to_use_instead(invoker):
    async def push():
        """Is closed without being awaited."""

    with pytest.raises(TypeError, match=r"make it an `async def`, or use rpcwheel.failback.aio"):
        invoker().invoke(push)


def test_a_coroutine_function_as_dead_letter_is_refused():
    async def hook(failed):
        """Would never be awaited."""

    with pytest.raises(ConfigurationError, match="dead_letter is a coroutine function"):
        FailbackInvoker(FailbackPolicy(retry_on=OSError, dead_letter=hook))


# --- The queue ---


def test_entries_lists_the_queued_calls_and_can_be_read_while_an_attempt_runs(invoker, timer):
    failback, hanging = invoker(backoff=wait_fixed(5)), HangingFunction(1)
    failback.invoke(hanging)
    timer.advance(5)
    failback.invoke(FlakyFunction(error := ConnectionError("down")), "secret")
    timer.advance(2)
    running, entry = failback.entries()
    assert (running.function, running.attempts) == (f"{MODULE}.HangingFunction", 2)
    assert running.next_attempt_s is None
    assert (entry.function, entry.attempts, entry.error) == (f"{MODULE}.FlakyFunction", 1, error)
    assert (entry.age_s, entry.next_attempt_s) == (2.0, 3.0)
    assert "secret" not in repr(entry)
    hanging.end.set()
    assert failback.flush(WAIT_S)
    assert failback.entries() == []
    assert entry.next_attempt_s == 3.0


# --- Further attempts ---


def test_a_further_attempt_runs_on_a_worker_thread(invoker):
    failback, function = invoker(), FlakyFunction(ConnectionError())
    failback.invoke(function, "order")
    run_until_empty(failback)
    assert function.calls == [("order",)] * 2
    assert function.threads[1].name.startswith("rpcwheel-worker-")


def test_each_further_attempt_runs_in_a_copy_of_the_callers_context(invoker):
    seen = []

    def push():
        seen.append(COLOR.get())
        COLOR.set("changed")
        if len(seen) < 4:
            raise ConnectionError

    failback = invoker()
    context = contextvars.copy_context()
    context.run(COLOR.set, "red")
    context.copy().run(failback.invoke, push)
    run_until_empty(failback)
    # The context is copied when the call is queued, which is after its first attempt.
    assert seen == ["red", "changed", "changed", "changed"]
    assert COLOR.get() == "none"


def test_each_further_attempt_gets_the_message_as_it_was_when_the_call_was_queued(invoker):
    seen = []

    def push(message):
        seen.append(message.value)
        message.value += " and what this attempt wrote"
        if len(seen) < 3:
            raise ConnectionError

    failback, message = invoker(), StringValue(value="order")
    failback.invoke(push, message)
    message.value = "something else"
    run_until_empty(failback)
    assert seen == ["order", *["order and what this attempt wrote"] * 2]


def test_attempts_that_hang_do_not_delay_another_queue(invoker, timer):
    hanging, other, function = invoker(), invoker(), HangingFunction(10)
    for _ in range(10):
        hanging.invoke(function)
    other.invoke(FlakyFunction(ConnectionError()))
    timer.advance(5)
    wait_until(lambda: other.pending == 0)
    assert hanging.pending == 10
    function.end.set()
    assert hanging.flush(WAIT_S)


def test_system_exit_in_a_further_attempt_gives_up_the_call(invoker, events):
    failback = invoker()
    failback.invoke(FlakyFunction(ConnectionError(), SystemExit(3)))
    run_until_empty(failback)
    assert isinstance(events[-1], FailbackGaveUp)
    assert isinstance(events[-1].error, SystemExit)


def test_an_awaitable_from_a_further_attempt_gives_up_the_call(invoker, events):
    async def later():
        """Is closed without being awaited."""

    function = FlakyFunction(ConnectionError())
    failback = invoker()
    failback.invoke(lambda: later() if function() == () else None)
    run_until_empty(failback)
    assert isinstance(events[-1], FailbackGaveUp)
    assert "make it an `async def`" in str(events[-1].error)


def test_dead_letter_gets_a_call_that_is_given_up_on_a_worker_thread(invoker):
    received = []
    failback = invoker(
        max_attempts=2,
        dead_letter=lambda failed: received.append((failed, threading.current_thread())),
    )
    error = ConnectionError("last")
    failback.invoke(FlakyFunction(ConnectionError("first"), error), "order")
    run_until_empty(failback)
    ((failed, thread),) = received
    assert (failed.args, failed.kwargs, failed.attempts) == (("order",), {}, 2)
    assert failed.error is error
    assert thread.name.startswith("rpcwheel-worker-")


@pytest.mark.parametrize("error", [ZeroDivisionError(), SystemExit(3)])
def test_the_queue_works_after_dead_letter_raised(invoker, events, error):
    failback = invoker(max_attempts=2, dead_letter=FlakyFunction(error))
    failback.invoke(FlakyFunction(ConnectionError(), ConnectionError()))
    run_until_empty(failback)
    assert isinstance(events[-1], DeadLetterFailed)
    assert events[-1].error is error
    failback.invoke(function := FlakyFunction(ConnectionError()))
    run_until_empty(failback)
    assert len(function.calls) == 2


# --- flush and close ---


def test_flush_starts_every_queued_call_and_waits_until_all_are_delivered(invoker):
    failback, function = invoker(), FlakyFunction(*[ConnectionError()] * 3)
    assert failback.flush(0) is True
    for number in range(3):
        failback.invoke(function, number)
    assert failback.flush() is True
    assert sorted(function.calls[3:]) == [(0,), (1,), (2,)]


def test_flush_returns_false_if_calls_are_pending_after_its_timeout(invoker):
    failback = invoker()
    failback.invoke(FlakyFunction(*[ConnectionError()] * 9))
    assert failback.flush(0.05) is False
    assert failback.pending == 1


def test_flush_refuses_a_timeout_that_is_no_time(invoker):
    for bad in ["5", float("nan"), True]:
        with pytest.raises((TypeError, ConfigurationError), match="timeout"):
            invoker().flush(bad)


def test_close_returns_and_reports_what_it_could_not_deliver_once(invoker, events):
    failback = invoker()
    failback.invoke(FlakyFunction(*[ConnectionError()] * 9), "stays")
    (left,) = failback.close(drain_timeout=0.05)
    assert left.args == ("stays",)
    assert left.reason.startswith("closed")
    assert isinstance(events[-1], FailbackLost)
    assert failback.pending == 0
    assert failback.close() == []


def test_close_ends_as_soon_as_all_calls_are_delivered(invoker):
    failback, function = invoker(), FlakyFunction(ConnectionError())
    failback.invoke(function)
    assert failback.close(drain_timeout=float("inf")) == []
    assert len(function.calls) == 2


def test_after_close_only_calls_that_would_be_queued_raise_failback_closed(invoker):
    failback, error = invoker(), ConnectionError("late")
    failback.close()
    assert failback.invoke(FlakyFunction(), 1) == (1,)
    with pytest.raises(FailbackClosed) as caught:
        failback.invoke(FlakyFunction(error))
    assert caught.value.__cause__ is error
    with pytest.raises(ValueError, match="mine"):
        failback.invoke(FlakyFunction(ValueError("mine")))


def test_an_interrupted_close_reports_the_queued_calls(invoker, events):
    failback, function, ctrl_c = invoker(), FlakyFunction(*[ConnectionError()] * 9), Interrupt()

    def push():
        if function.calls:  # in the attempt that `close` has started
            ctrl_c.send()
        function()

    failback.invoke(push)
    with ctrl_c, pytest.raises(KeyboardInterrupt):
        failback.close(drain_timeout=float("inf"))
    assert any(isinstance(event, FailbackLost) for event in events)
    assert failback.pending == 0


def test_the_end_of_a_with_statement_closes_the_queue(timer):
    with FailbackInvoker(FailbackPolicy(retry_on=OSError), timer=timer) as failback:
        function = FlakyFunction(OSError())
        failback.invoke(function)
    assert len(function.calls) == 2
    with pytest.raises(FailbackClosed):
        failback.invoke(FlakyFunction(OSError()))


@pytest.mark.parametrize("method", ["flush", "close"])
def test_an_attempt_that_waits_for_its_own_queue_gets_an_error(invoker, events, method):
    failback, function = invoker(), FlakyFunction(ConnectionError())

    def push():
        function()
        getattr(failback, method)()

    failback.invoke(push)
    run_until_empty(failback)
    assert isinstance(events[-1], FailbackGaveUp)
    assert "would wait for itself" in str(events[-1].error)


def test_calls_of_many_threads_are_each_delivered_once():
    failures, lock, delivered = {}, threading.Lock(), []

    def push(order):
        with lock:
            failures[order] = failures.get(order, 0) + 1
            if failures[order] <= order % 2:
                raise ConnectionError
            delivered.append(order)

    with WheelTimer() as timer:
        policy = FailbackPolicy(retry_on=ConnectionError, backoff=0.002, max_pending=10_000)
        failback = FailbackInvoker(policy, timer=timer)

        def call(orders):
            for order in orders:
                failback.invoke(push, order)

        threads = [threading.Thread(target=call, args=(range(n, 2_000, 4),)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failback.close(drain_timeout=WAIT_S) == []
    assert sorted(delivered) == list(range(2_000))
    stats = failback.stats()
    assert stats.calls == stats.succeeded + stats.redelivered == 2_000
    assert stats.attempts == 1_000
