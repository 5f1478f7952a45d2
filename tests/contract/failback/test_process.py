"""Queued calls when an invoker is dropped, a process forks or a process exits."""

import os

import pytest

from fixtures.failback_queues import FlakyFunction
from fixtures.programs import run_program
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.failback import FailbackInvoker, FailbackPolicy
from rpcwheel.timer import WheelTimer


def make(timer, **settings):
    return FailbackInvoker(FailbackPolicy(**{"retry_on": ConnectionError} | settings), timer=timer)


def test_an_invoker_that_is_dropped_with_pending_calls_warns_and_they_are_retried(timer):
    failback, function = make(timer, name="audit"), FlakyFunction(ConnectionError())
    failback.invoke(function)
    with pytest.warns(ResourceWarning, match=r"'audit'> was dropped with 1 calls pending.*close"):
        del failback
    timer.advance(5)
    wait_until(lambda: len(function.calls) == 2)


def test_a_forked_child_has_an_empty_queue_that_works():
    with WheelTimer() as timer:
        failback, function = make(timer, backoff=0.01), FlakyFunction(ConnectionError())
        queued = make(timer, backoff=3600)
        queued.invoke(FlakyFunction(ConnectionError()), "the parent's")
        child = os.fork()
        if child == 0:
            failback.invoke(function, "the child's")
            good = queued.pending == queued.stats().calls == 0 and failback.flush(WAIT_S)
            os._exit(0 if good and len(function.calls) == 2 and queued.close() == [] else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert queued.pending == 1
        assert [one.args for one in queued.close(drain_timeout=0)] == [("the parent's",)]


# --- Process exit ---


def test_calls_that_wait_or_hang_are_logged_at_exit_and_do_not_delay_it(flaky_server):
    """A thread that comes back from gRPC's core into an interpreter that is gone could abort."""
    flaky_server.fail(1)
    flaky_server.freeze()
    _, log = run_program(f"""
        import asyncio, atexit, threading, time
        import grpc
        from rpcwheel.failback import with_failback

        attempts, begun = [], threading.Event()

        @with_failback(retry_on=ConnectionError, backoff=3600)
        def wait(order):
            raise ConnectionError

        @with_failback(retry_on=ConnectionError, backoff=3600)
        async def wait_on_a_loop():
            raise ConnectionError

        @with_failback(retry_on=ConnectionError, backoff=3600)
        def close_at_exit():
            raise ConnectionError

        @with_failback(retry_on=ConnectionError, backoff=0)
        def hang():
            attempts.append(1)
            if len(attempts) == 1:
                raise ConnectionError
            begun.set()
            threading.Event().wait()

        wait("a"), wait("b"), close_at_exit(), hang()
        asyncio.run(wait_on_a_loop())
        begun.wait()
        atexit.register(close_at_exit.failback.close, 0)

        channel = grpc.insecure_channel("{flaky_server.target}")
        bare = channel.unary_unary("/test.Shop/Push")
        push = with_failback(retry_on="UNAVAILABLE", backoff=0, name="push")(bare)
        push(b"order", timeout=600)
        while push.failback.stats().attempts == 0:
            time.sleep(0.001)
        time.sleep(0.1)  # the attempt is in gRPC's core, or on its way there: either must end well
    """)
    ended = "not delivered, the program ended before close()"
    assert f"__main__.wait: 2 calls {ended}; the oldest waited" in log, log
    assert f"__main__.wait_on_a_loop: 1 call {ended};" in log
    assert f"__main__.hang: 1 call {ended}, during an attempt" in log
    assert f"push: 1 call {ended}, during an attempt" in log
    closed = "not delivered, closed after the main thread had ended"
    assert f"__main__.close_at_exit: 1 call {closed}; the oldest" in log
