"""What only blocking failback has: threads, interrupts, and refused coroutine functions."""

import threading

import pytest
from google.protobuf.wrappers_pb2 import StringValue

from fixtures.failback_queues import FlakyCoroutine, FlakyFunction
from fixtures.interrupts import Interrupt
from rpcwheel.errors import ConfigurationError
from rpcwheel.events import FailbackGaveUp, FailbackLost

# --- The first attempt ---


def test_the_first_attempt_runs_on_the_callers_thread(invoker):
    function = FlakyFunction()
    assert invoker().invoke(function, 1, 2) == (1, 2)
    assert function.threads == [threading.current_thread()]


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


def test_an_awaitable_result_raises_with_what_to_use_instead(invoker):
    async def push():
        """Is closed without being awaited."""

    with pytest.raises(TypeError, match=r"make it an `async def`, or use rpcwheel.failback.aio"):
        invoker().invoke(push)


def test_a_dead_letter_with_an_asynchronous_call_is_refused(invoker):
    with pytest.raises(ConfigurationError, match="dead_letter is a coroutine function"):
        invoker(dead_letter=FlakyCoroutine())


# --- Further attempts ---


def test_further_attempts_and_dead_letter_run_on_worker_threads(invoker, run_until_empty):
    function, dead_letter = FlakyFunction(ConnectionError(), ConnectionError()), FlakyFunction()
    failback = invoker(max_attempts=2, dead_letter=dead_letter)
    failback.invoke(function, "order")
    run_until_empty(failback)
    assert function.calls == [("order",)] * 2
    for thread in (function.threads[1], *dead_letter.threads):
        assert thread.name.startswith("rpcwheel-worker-")


def test_each_further_attempt_gets_the_message_as_it_was_when_the_call_was_queued(
    invoker, run_until_empty
):
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


def test_an_awaitable_from_a_further_attempt_gives_up_the_call(invoker, events, run_until_empty):
    async def later():
        """Is closed without being awaited."""

    function = FlakyFunction(ConnectionError())
    failback = invoker()
    failback.invoke(lambda: later() if function() == () else None)
    run_until_empty(failback)
    assert isinstance(events[-1], FailbackGaveUp)
    assert "make it an `async def`" in str(events[-1].error)


# --- flush and close ---


def test_an_interrupted_close_reports_the_queued_calls(invoker, events):
    failback, function, ctrl_c = invoker(), FlakyFunction(*[ConnectionError()] * 9), Interrupt()

    def push():
        if function.calls:  # in the attempt that `close` has started
            ctrl_c.send()
        function()

    failback.invoke(push)
    with ctrl_c, pytest.raises(KeyboardInterrupt):
        failback.close(drain_timeout=float("inf"))
    assert events.of(FailbackLost)
    assert failback.pending == 0
