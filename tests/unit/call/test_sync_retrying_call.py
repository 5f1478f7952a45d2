"""The attempts of one call of `.future()`, or of a response stream, of `grpc`."""

import grpc
import pytest

from fixtures.interrupts import interrupted_at_each_call
from fixtures.timers import run_threads
from rpcwheel._grpc.calls import Details
from rpcwheel._grpc.finished import FinishedError
from rpcwheel.call import CallPolicy, HedgingPolicy
from rpcwheel.call.client_state import ClientState
from rpcwheel.call.sync_call import ClientCall
from rpcwheel.call.sync_retrying_call import CallAttempts, StreamAttempts
from rpcwheel.failback import FailbackPolicy
from rpcwheel.rpc import Kind

DETAILS = Details("/shop.Orders/Get", None, None, None, None, None)


class Attempt:
    """An attempt that runs until the test ends it."""

    error = None
    callback = None

    def add_done_callback(self, callback):
        self.callback = callback

    def exception(self):
        return self.error

    def cancel(self):
        return False

    def end(self, error=None):
        self.error = error
        self.callback(self)


class LateWorkers(CallAttempts):
    """Attempts whose jobs run when an attempt has succeeded, before the call has its result."""

    def __init__(self, call):
        super().__init__(call)
        self.jobs = []

    def _run_on_worker(self, job):
        self.jobs.append(job)

    def _finish(self, final):
        jobs, self.jobs = self.jobs, []
        for job in jobs:
            job()
        return super()._finish(final)


class Queue:
    """A failback queue that counts its calls."""

    calls = 0

    def enqueue(self, *_):
        self.calls += 1
        return "queued"


def test_a_stream_that_has_ended_keeps_nothing_of_further_reads():
    state = ClientState(CallPolicy(), timer=None, queue_of=lambda *_: None)
    call = ClientCall(state, Kind.UNARY_STREAM, lambda *_: None, DETAILS, b"x")
    attempts = StreamAttempts(call)
    attempts.cancel()
    with pytest.raises(grpc.RpcError):
        attempts.next_message()
    assert attempts._readers == []


def test_other_threads_use_a_call_after_a_wait_that_was_interrupted():
    state = ClientState(CallPolicy(), timer=None, queue_of=lambda *_: None)
    attempts = CallAttempts(ClientCall(state, Kind.UNARY_UNARY, lambda *_: None, DETAILS, b"x"))
    attempts.cancel()
    for _ in interrupted_at_each_call(lambda: attempts.wait(0)):
        run_threads(attempts.cancel)


def test_a_hedged_call_that_succeeds_is_not_queued_after_a_fatal_failure():
    hedging = HedgingPolicy(delay=0.0, max_attempts=2, retry_budget=None)
    failback = FailbackPolicy(retry_on="INTERNAL")
    policy = CallPolicy(idempotent=True, hedging=hedging, failback=failback)
    queue, first, second = Queue(), Attempt(), Attempt()
    state = ClientState(policy, timer=None, queue_of=lambda *_: queue)
    call = ClientCall(state, Kind.UNARY_UNARY, lambda *_: second, DETAILS, b"x")
    call.hedge()
    attempts = LateWorkers(call)
    attempts.start(first)
    first.end(FinishedError(grpc.StatusCode.INTERNAL, "a defect"))
    second.end()
    assert attempts.final is second
    assert queue.calls == 0
