"""Failback with threads, over a real gRPC server on real sockets. Waits are moved by hand."""

import contextvars
import threading

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue
from scenarios.failback import DEFAULT, ORDER, SCENARIOS

from fixtures.failback_queues import Far, Hang, all_wait, play
from fixtures.grpc_servers import METHOD
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.errors import ConfigurationError, FailbackFull
from rpcwheel.events import DeadLetterFailed, FailbackGaveUp
from rpcwheel.failback import FailbackInvoker, FailbackPolicy

FAR, HANG = f"{Far.__module__}.Far", f"{Hang.__module__}.Hang"
COLOUR = contextvars.ContextVar("COLOUR", default="none")


# --- The scenario table ---


@pytest.mark.parametrize("style", ["blocking", "future"])
def test_each_scenario_ends_as_the_table_says(style, invoker, grpc_server, channel):
    push = channel.unary_unary(METHOD)
    for scenario in SCENARIOS:
        script = grpc_server.script.begin(*scenario.far_side)
        failback = invoker(**{"retry_on": "UNAVAILABLE"} | scenario.settings)
        try:
            if style == "blocking":
                answer = failback.invoke(push, ORDER, timeout=WAIT_S)
            else:
                answer = failback.invoke(push.future, ORDER, timeout=WAIT_S).result(WAIT_S)
        except grpc.RpcError as error:
            answer = error.code().name
        play(failback)
        scenario.check(answer, script.received, failback.stats())


def test_a_server_that_was_killed_gets_every_call_when_it_is_back(
    invoker, timer, grpc_server, channel
):
    failback = invoker(retry_on=grpc.StatusCode.UNAVAILABLE, max_attempts=None)
    push = channel.unary_unary(METHOD)
    orders = [b"order %d" % number for number in range(20)]
    assert failback.invoke(push, b"before") == b"before"
    grpc_server.kill()
    assert [failback.invoke(push, order) for order in orders] == [DEFAULT] * 20
    timer.advance(5)
    wait_until(lambda: all_wait(failback))
    assert failback.pending == 20
    grpc_server.start()
    grpc.channel_ready_future(channel).result(WAIT_S)
    play(failback)
    assert sorted(grpc_server.script.received[1:]) == sorted(orders)
    assert failback.stats().redelivered == 20


# --- The first try ---


def test_the_first_try_runs_on_the_callers_thread(invoker):
    far = Far()
    assert invoker().invoke(far, 1, 2) == (1, 2)
    assert far.threads == [threading.current_thread()]


def test_the_default_is_given_as_the_very_object(invoker):
    default = object()
    assert invoker(default=default).invoke(Far(ConnectionError())) is default


def test_another_error_is_raised_unchanged(invoker):
    error = ValueError("no such shop")
    with pytest.raises(ValueError, match="no such shop") as caught:
        invoker().invoke(Far(error))
    assert caught.value is error
    assert error.__cause__ is error.__context__ is None
    assert caught.traceback[-1].name == "__call__"


def test_what_ends_the_program_is_not_caught(invoker):
    for error in [KeyboardInterrupt, SystemExit]:
        failback = invoker(retry_on=Exception)
        with pytest.raises(error):
            failback.invoke(Far(error()))
        assert failback.pending == 0


def test_keyword_arguments_reach_the_function_even_those_called_self_and_function(invoker):
    def push(**kwargs):
        return kwargs

    given = {"self": 1, "function": 2, "timeout": 3}
    assert invoker().invoke(push, **given) == given


def test_a_full_queue_raises_from_the_calls_error(invoker):
    failback = invoker(max_pending=1)
    failback.invoke(Far(ConnectionError()))
    error = ConnectionError("second")
    with pytest.raises(FailbackFull) as caught:
        failback.invoke(Far(error))
    assert caught.value.__cause__ is error


def test_a_full_queue_that_drops_gives_the_default(invoker):
    failback = invoker(max_pending=1, overflow="drop")
    assert [failback.invoke(Far(ConnectionError())) for _ in range(2)] == [DEFAULT] * 2
    assert failback.stats().dropped == 1


def test_a_result_to_await_is_refused_with_where_to_go(invoker):
    async def push():
        """Never awaited, and closed."""

    with pytest.raises(TypeError, match=r"make it an `async def`, or use rpcwheel.failback.aio"):
        invoker().invoke(push)


def test_a_dead_letter_hook_to_await_is_refused():
    async def hook(failed):
        """Nothing here could await it."""

    with pytest.raises(ConfigurationError, match="dead_letter is a coroutine function"):
        FailbackInvoker(FailbackPolicy(retry_on=OSError, dead_letter=hook))


# --- The queue ---


def test_entries_lists_the_queued_calls_and_can_be_read_while_an_attempt_runs(invoker, timer):
    failback, hang = invoker(), Hang(1)
    failback.invoke(hang)
    timer.advance(5)
    waiting = Far(error := ConnectionError("down"))
    failback.invoke(waiting, "secret")
    timer.advance(2)
    running, entry = failback.entries()
    assert (running.function, running.attempts, running.next_attempt_s) == (HANG, 2, None)
    assert (entry.function, entry.attempts, entry.error) == (FAR, 1, error)
    assert (entry.age_s, entry.next_attempt_s) == (2.0, 3.0)
    assert "secret" not in repr(entry)
    hang.end.set()
    assert failback.flush(WAIT_S)
    assert failback.entries() == []
    assert entry.next_attempt_s == 3.0


# --- Retries ---


def test_a_retry_runs_on_a_worker_thread(invoker):
    failback, far = invoker(), Far(ConnectionError())
    failback.invoke(far, "order")
    play(failback)
    assert far.calls == [("order",)] * 2
    assert far.threads[1].name.startswith("rpcwheel-worker-")


def test_a_retry_sees_the_callers_context_and_leaves_no_trace_in_it(invoker):
    seen = []

    def push():
        seen.append(COLOUR.get())
        COLOUR.set("spoilt")
        if len(seen) < 4:
            raise ConnectionError

    failback = invoker()
    context = contextvars.copy_context()
    context.run(COLOUR.set, "red")
    context.copy().run(failback.invoke, push)
    play(failback)
    # As it was when the call was queued, which is after its own first try.
    assert seen == ["red", "spoilt", "spoilt", "spoilt"]
    assert COLOUR.get() == "none"


def test_each_try_gets_the_message_as_it_was_when_the_call_was_queued(invoker):
    seen = []

    def push(message):
        seen.append(message.value)
        message.value += " and what this try wrote"
        if len(seen) < 3:
            raise ConnectionError

    failback, message = invoker(), StringValue(value="order")
    failback.invoke(push, message)
    message.value = "something else"
    play(failback)
    assert seen == ["order", *["order and what this try wrote"] * 2]


def test_a_call_that_hangs_does_not_hold_up_another_queue(invoker, timer):
    hanging, other, hang = invoker(), invoker(), Hang(10)
    for _ in range(10):
        hanging.invoke(hang)
    other.invoke(Far(ConnectionError()))
    timer.advance(5)
    wait_until(lambda: other.pending == 0)
    assert hanging.pending == 10
    hang.end.set()
    assert hanging.flush(WAIT_S)


def test_a_retry_that_ends_a_program_ends_only_itself(invoker, events):
    failback = invoker()
    failback.invoke(Far(ConnectionError(), SystemExit(3)))
    play(failback)
    assert isinstance(events[-1], FailbackGaveUp)
    assert isinstance(events[-1].error, SystemExit)


def test_a_retry_that_returns_something_to_await_is_given_up_with_the_remedy(invoker, events):
    async def later():
        """Never awaited, and closed."""

    far = Far(ConnectionError())
    failback = invoker()
    failback.invoke(lambda: later() if far() == () else None)
    play(failback)
    assert isinstance(events[-1], FailbackGaveUp)
    assert "make it an `async def`" in str(events[-1].error)


def test_an_abandoned_call_goes_to_the_dead_letter_hook_on_a_worker(invoker):
    letters = []
    failback = invoker(
        max_attempts=2,
        dead_letter=lambda letter: letters.append((letter, threading.current_thread())),
    )
    error = ConnectionError("last")
    failback.invoke(Far(ConnectionError("first"), error), "order")
    play(failback)
    ((letter, thread),) = letters
    assert (letter.args, letter.kwargs, letter.attempts) == (("order",), {}, 2)
    assert letter.error is error
    assert thread.name.startswith("rpcwheel-worker-")


def test_a_dead_letter_hook_that_raises_does_no_harm(invoker, events):
    for broken in [ZeroDivisionError(), SystemExit(3)]:
        failback = invoker(max_attempts=2, dead_letter=Far(broken))
        failback.invoke(Far(ConnectionError(), ConnectionError()))
        play(failback)
        assert isinstance(events[-1], DeadLetterFailed)
        assert events[-1].error is broken
        failback.invoke(far := Far(ConnectionError()))
        play(failback)
        assert len(far.calls) == 2
