"""An end that is never silent: forgotten invokers, ended programs, forked children."""

import gc
import os
import subprocess
import sys
import textwrap
import threading

import pytest

from fixtures.failback_queues import Far, play
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.failback import FailbackInvoker, FailbackPolicy, aio, sync, with_failback
from rpcwheel.timer import WheelTimer


def make(timer, **settings):
    return FailbackInvoker(FailbackPolicy(**{"retry_on": ConnectionError} | settings), timer=timer)


def test_an_invoker_dropped_with_calls_pending_warns_and_they_go_on(timer):
    failback, far = make(timer, name="audit"), Far(ConnectionError())
    failback.invoke(far)
    with pytest.warns(ResourceWarning, match=r"'audit'> was dropped with 1 calls pending.*close"):
        del failback
    timer.advance(5)
    wait_until(lambda: len(far.calls) == 2)


def test_a_decorated_function_dropped_with_calls_pending_warns_too(timer):
    push = with_failback(retry_on=ConnectionError, timer=timer)(Far(ConnectionError()))
    push()
    with pytest.warns(ResourceWarning, match="1 calls pending"):
        del push


def test_an_invoker_dropped_with_nothing_pending_is_freed_in_silence(timer):
    failback = make(timer)
    failback.invoke(Far(ConnectionError()))
    play(failback)
    del failback
    gc.collect()


def test_an_invoker_that_could_not_be_made_is_freed_in_silence():
    with pytest.raises(TypeError):
        make(timer=5)
    gc.collect()


def test_an_invoker_shows_its_world_and_name(timer):
    assert repr(make(timer, name="audit")) == "<rpcwheel.failback.sync.FailbackInvoker 'audit'>"
    assert repr(make(timer)) == "<rpcwheel.failback.sync.FailbackInvoker 'failback'>"


def test_a_forked_child_starts_with_an_empty_queue_that_works():
    with WheelTimer() as timer:
        failback, far = make(timer, backoff=0.01), Far(ConnectionError())
        parked = make(timer, backoff=3600)
        parked.invoke(Far(ConnectionError()), "the parent's")
        child = os.fork()
        if child == 0:
            failback.invoke(far, "the child's")
            good = parked.pending == parked.stats().calls == 0 and failback.flush(WAIT_S)
            os._exit(0 if good and len(far.calls) == 2 and parked.close() == [] else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert parked.pending == 1
        assert [one.args for one in parked.close(drain_timeout=0)] == [("the parent's",)]


# --- The end of a program ---


def run(program, *flags):
    """Run a program of its own; returns its exit status and what it wrote to stderr."""
    code = textwrap.dedent(program)
    done = subprocess.run(
        [sys.executable, *flags, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=3 * WAIT_S,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_program_that_ends_with_calls_pending_says_so_and_ends_at_once():
    status, _, log = run("""
        from rpcwheel.failback import with_failback

        @with_failback(retry_on=ConnectionError, backoff=3600)
        def push(order):
            raise ConnectionError

        push("a"), push("b")
    """)
    assert status == 0
    assert "__main__.push: 2 call(s) not delivered, the program ended; the oldest waited" in log, (
        log
    )


def test_a_program_that_ends_while_retries_hang_says_so_and_ends_at_once():
    status, _, log = run("""
        import threading
        from rpcwheel.failback import with_failback

        tries, begun = [], threading.Event()

        @with_failback(retry_on=ConnectionError, backoff=0)
        def push():
            tries.append(1)
            if len(tries) == 1:
                raise ConnectionError
            begun.set()
            threading.Event().wait()

        push()
        begun.wait()
    """)
    assert status == 0
    assert "1 call(s) not delivered, the program ended during an attempt" in log


def test_a_program_that_ends_with_a_loop_says_what_its_loop_left():
    status, _, log = run("""
        import asyncio
        from rpcwheel.failback import with_failback

        @with_failback(retry_on=ConnectionError, backoff=3600)
        async def push():
            raise ConnectionError

        asyncio.run(push())
    """)
    assert status == 0
    assert "__main__.push: 1 call(s) not delivered, the program ended" in log


def test_a_program_that_delivered_all_ends_without_a_word():
    status, out, log = run(
        """
        from rpcwheel.failback import with_failback

        tries = []

        @with_failback(retry_on=ConnectionError, backoff=0.01)
        def push():
            tries.append(1)
            if len(tries) < 3:
                raise ConnectionError

        import logging
        logging.disable()
        push()
        assert push.failback.close() == []
        print(len(tries))
        """,
        "-X",
        "dev",
        "-W",
        "error",
    )
    assert (status, out, log) == (0, "3\n", "")


def test_a_program_that_ends_while_grpc_calls_hang_in_retries_ends_well(grpc_server):
    """A thread that comes back from gRPC's core into an interpreter that is gone could abort."""
    end = threading.Event()
    grpc_server.script.then("UNAVAILABLE", end)
    status, _, log = run(f"""
        import time
        import grpc
        from rpcwheel.failback import with_failback

        channel = grpc.insecure_channel("{grpc_server.target}")
        bare = channel.unary_unary("/test.Shop/Push")
        push = with_failback(retry_on="UNAVAILABLE", backoff=0)(bare)
        push(b"order", timeout=600)
        while push.failback.stats().attempts == 0:
            time.sleep(0.001)
        time.sleep(0.1)  # the try is in gRPC's core, or on its way there: either must end well
    """)
    end.set()
    assert status == 0, log
    assert "1 call(s) not delivered, the program ended during an attempt" in log


def test_what_is_no_policy_is_refused():
    for world in [sync, aio]:
        with pytest.raises(
            TypeError, match=r"policy must be a FailbackPolicy.* not \{'max_attempts'"
        ):
            world.FailbackInvoker({"max_attempts": 4})
