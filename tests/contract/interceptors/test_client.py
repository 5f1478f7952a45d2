"""Calls with policies: retries, deadlines, default responses, the user's own code, timers.

Rules with branches in several adapters run in each way of `fixtures.clients`, others once in each
world.
"""

import threading
from contextvars import ContextVar

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue
from tenacity import wait_fixed

from fixtures.client_interceptors import noting
from fixtures.clients import LATER, held, in_every_way, patient, ways, with_raising_interceptors
from fixtures.grpcio import WAITING_ENDS_WITH_ITS_CHANNEL
from fixtures.rpc_errors import CodeOnly
from fixtures.shop import UNARY_STREAM, Fail, Hang, Silent
from fixtures.waiting import WAIT_S, in_thread, wait_until
from rpcwheel.call import (
    DeadlinePolicy,
    DefaultResponsePolicy,
    RetryPolicy,
    deadline_scope,
)
from rpcwheel.errors import FailbackClosed
from rpcwheel.events import (
    CallSlow,
    DefaultResponseUsed,
    RetryScheduled,
    RetryStopped,
    StreamStalled,
)
from rpcwheel.failback import FailbackPolicy
from rpcwheel.timer import WheelTimer

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
DEADLINE_EXCEEDED = grpc.StatusCode.DEADLINE_EXCEEDED
CANCELLED = grpc.StatusCode.CANCELLED

TENANT = ContextVar("tenant", default=None)


def retry_after(**settings) -> RetryPolicy:
    return RetryPolicy(
        **{"retry_on": "UNAVAILABLE", "backoff": 0.0, "retry_budget": None} | settings
    )


# --- Retries ---


def test_a_call_that_the_server_ends_as_canceled_is_retried_if_a_policy_names_it(shop, client):
    """It may pass on gRPC's details of a call that it has canceled itself."""
    shop.then(Fail("CANCELLED", "Locally cancelled by application!"))
    assert client.answer(client.begin(client.open(retry=retry_after(retry_on="CANCELLED")))) == b"x"
    assert len(shop.calls) == 2


def test_a_refused_connection_is_retried_for_idempotent_methods_only(shop, client, events):
    shop.kill()
    for idempotent in (False, True):
        error = client.refused(client.open(idempotent=idempotent), timeout=WAIT_S)
        assert error.code() is UNAVAILABLE
    kinds = [RetryStopped, RetryScheduled, RetryScheduled, RetryStopped]
    wait_until(lambda: len(events) == len(kinds))
    assert [type(event) for event in events] == kinds
    shop.start()


@held
def test_a_retry_sends_the_request_as_it_was_when_the_call_began(shop, client, timer):
    shop.then("UNAVAILABLE")
    message = StringValue(value="as it was")
    channel = client.open(retry=LATER, timer=timer)
    call = client.begin(channel, message, serializer=StringValue.SerializeToString)
    wait_until(lambda: timer.pending == 1)
    message.value = "changed"
    patient(timer)
    assert StringValue.FromString(client.answer(call)).value == "as it was"


# --- Deadlines ---


def test_all_attempts_share_the_callers_deadline(shop, world, timer):
    """A backoff that would exceed it is not begun."""
    shop.then(*["UNAVAILABLE"] * 4)
    retry = retry_after(backoff=wait_fixed(40), max_attempts=9)
    call = world.call(world.retrying(shop.target, retry=retry, timer=timer), timeout=100.0)
    for _ in range(2):
        wait_until(lambda: timer.pending)
        timer.advance(40.0)
    assert call.error().code() is UNAVAILABLE
    left = [seen.time_remaining for seen in shop.calls]
    assert len(left) == 3
    assert all(one <= limit for one, limit in zip(left, (101.0, 61.0, 21.0), strict=True))


def test_an_attempt_may_have_its_own_timeout(shop, world):
    shop.then(Hang())
    channel = world.retrying(shop.target, retry=retry_after(max_attempts=100, attempt_timeout=0.3))
    assert world.call(channel, timeout=2 * WAIT_S).result() == b"x"
    assert all(seen.time_remaining < 1 for seen in shop.calls)


def test_an_infinite_deadline_is_no_limit(shop, world):
    for settings in ({}, {"retry": None}):
        channel = world.retrying(shop.target, **settings)
        with deadline_scope(float("inf")):
            call = world.call(channel)
        assert call.result() == b"x"
    assert [seen.time_remaining for seen in shop.calls] == [None, None]


@in_every_way
def test_a_call_whose_deadline_has_passed_is_not_sent(shop, client):
    no_default = DefaultResponsePolicy(on="UNAVAILABLE", default=client.default(b"safe"))
    for settings in ({}, {"retry": None}, {"default_response": no_default}):
        channel = client.open(**settings)
        with deadline_scope(0.0):
            error = client.refused(channel)
        assert error.code() is DEADLINE_EXCEEDED
        assert error.details().endswith("before the call began: its deadline has passed")
    assert shop.calls == []


def test_a_call_whose_deadline_has_passed_ends_with_the_default_response(shop, client, events):
    default = DefaultResponsePolicy(on="DEADLINE_EXCEEDED", default=client.default(b"no"))
    assert client.ask(client.open(default_response=default), timeout=0) == b"no"
    assert shop.calls == []
    wait_until(lambda: events)
    assert [type(event) for event in events] == [DefaultResponseUsed]


def test_time_remaining_is_that_of_the_whole_call(shop, world, timer):
    shop.then("UNAVAILABLE")
    call = world.call(world.retrying(shop.target, retry=LATER, timer=timer), timeout=60.0)
    wait_until(lambda: timer.pending == 1)
    remaining = call.ask("time_remaining")
    timer.advance(4.0)
    if world.name == "sync":  # grpc.aio's own is of the loop
        assert (remaining, call.ask("time_remaining")) == (60.0, 56.0)
    assert 0 < remaining <= 60.0
    call.cancel()
    assert world.call(world.retrying(shop.target)).ask("time_remaining") is None


# --- Default responses ---


@held
def test_a_default_response_names_its_source(shop, client, events):
    shop.then(Fail("NOT_FOUND", "gone", (("k", "v"),)))
    default = DefaultResponsePolicy(on="NOT_FOUND", default=client.default(b"1", b"2"))
    call = client.begin(client.open(default_response=default))
    assert client.answer(call) == b"12"
    assert call.code() is grpc.StatusCode.OK
    assert call.details() == "default response after NOT_FOUND: gone"
    assert tuple(call.ask("trailing_metadata")) == (
        ("k", "v"),
        ("rpcwheel-answer", "default-response"),
    )
    wait_until(lambda: events)
    assert [type(event) for event in events] == [DefaultResponseUsed]


@pytest.mark.parametrize("code", ["UNAVAILABLE", "NOT_FOUND"])
def test_after_its_first_message_a_stream_gets_no_retry_and_no_default(shop, world, code):
    shop.then(Fail(code, after=1, read=True))
    default = DefaultResponsePolicy(on=code, default=(b"n",))
    channel = world.retrying(shop.target, default_response=default)
    call = world.call(channel, "stream_stream", open_requests=True)
    call.write(b"x")
    assert call.read() == b"x"
    call.done_writing()
    assert call.error().code().name == code
    assert len(shop.calls) == 1


# --- Response streams ---


def test_message_timeout_ends_a_stalled_stream_with_the_reason(shop, world, timer, events):
    shop.then(silent := Silent(after=1))
    policy = DeadlinePolicy(message_timeout=3.0)
    call = world.call(
        world.retrying(shop.target, timeout=policy, timer=timer), "unary_stream", b"xyz"
    )
    assert call.read() == b"x"
    timer.advance(100.0)  # no caller waits for a message
    assert silent.begun.wait(WAIT_S)
    ending = in_thread(call.error)
    wait_until(lambda: timer.pending == 1)
    timer.advance(3.0)
    error = ending.result(WAIT_S)
    assert error.code() is call.code() is DEADLINE_EXCEEDED
    assert error.details() == "no message for 3 s (message_timeout)"
    assert not call.cancelled()
    assert shop.calls[0].ended.wait(WAIT_S)
    wait_until(lambda: StreamStalled(UNARY_STREAM, 3.0) in events)


def test_a_stream_that_stalls_before_its_first_message_is_retried(shop, world, timer):
    shop.then(silent := Silent())
    policy = DeadlinePolicy(message_timeout=3.0)
    retry = retry_after(retry_on="DEADLINE_EXCEEDED")
    channel = world.retrying(shop.target, timeout=policy, retry=retry, timer=timer)
    call = world.call(channel, "unary_stream")
    reading = in_thread(call.result)
    assert silent.begun.wait(WAIT_S)
    wait_until(lambda: timer.pending == 1)
    timer.advance(3.0)
    assert reading.result(WAIT_S) == [b"x"]
    assert len(shop.calls) == 2


@ways("sync stream", "aio stream")
def test_a_stream_whose_initial_metadata_was_received_is_not_retried(shop, client):
    shop.then(Hang(code="UNAVAILABLE", initial=(("version", "2"),)))
    call = client.begin(client.open(retry=retry_after()))
    assert call.initial_metadata() == {"version": "2"}
    shop.calls[0].ended.set()
    assert call.code() is UNAVAILABLE
    assert len(shop.calls) == 1


def test_initial_metadata_of_a_stream_is_available_before_its_end(shop, world):
    shop.then(Silent(after=1))
    call = world.call(world.retrying(shop.target), "unary_stream", b"xy")
    assert call.initial_metadata() == {}
    assert not call.done()
    assert call.read() == b"x"
    call.cancel()


# --- Slow calls ---


@pytest.mark.parametrize(
    ("client", "settings"),
    [
        ("sync blocking", {"retry": None}),
        ("sync blocking by interceptors", {}),
        ("sync future", {"retry": None}),
        ("sync future", {}),
        ("sync stream", {"retry": None}),
        ("aio unary", {"retry": None}),
        ("aio unary", {}),
        ("aio stream", {}),
    ],
    indirect=["client"],
)
def test_a_slow_call_is_reported_while_it_runs(shop, client, timer, events, settings):
    slow = DeadlinePolicy(slow_call_threshold=3.0)
    channel = client.open(timeout=slow, timer=timer, **settings)
    client.ask(channel)
    wait_until(lambda: timer.pending == 0)
    shop.then(hang := Hang())
    call = client.begin(channel)
    assert hang.begun.wait(WAIT_S)
    timer.advance(3.0)
    wait_until(lambda: events)
    assert events == [CallSlow(client.method, "client", 3.0)]
    shop.calls[-1].ended.set()  # the server goes on
    assert client.answer(call) == b"x"
    wait_until(lambda: timer.pending == 0)


# --- What ends while a call waits for its retry ---


def test_with_a_stopped_timer_calls_are_not_retried(shop, client, timer):
    half_s = WAIT_S / 2
    policy = DeadlinePolicy(timeout=WAIT_S, slow_call_threshold=half_s, message_timeout=half_s)
    channel = client.open(retry=retry_after(backoff=5.0), timeout=policy, timer=timer)
    timer.stop()
    assert client.ask(channel) == b"x"
    shop.then("UNAVAILABLE")
    assert client.refused(channel).code() is UNAVAILABLE


@ways("sync blocking", "sync future", "sync stream", "aio unary")
def test_a_call_ends_if_its_timer_is_stopped_before_the_retry(shop, client, events, set_limit):
    for module in ("sync_call", "sync_retrying_call", "aio_call"):
        set_limit(f"call.{module}.TIMER_CHECK_INTERVAL_S", 0.05)
    set_limit("call.aio_call.TIMER_GRACE_S", 0.05)
    timer = WheelTimer()
    shop.then(Fail("UNAVAILABLE", "gone"))
    call = client.begin(client.open(retry=retry_after(backoff=3 * WAIT_S), timer=timer))
    wait_until(lambda: timer.pending)
    timer.stop()
    assert call.error().details() == "gone"
    assert len(shop.calls) == 1
    wait_until(lambda: len(events) == 2)
    assert events[1].reason == "its timer was stopped or takes no more timeouts"


@ways("sync blocking", "sync future", "aio stream")
def test_a_call_ends_while_a_task_blocks_the_timer_of_its_retry(shop, client, set_limit):
    # Only a future ends at the next check of the timer, the others at their deadline.
    interval_s = 0.05 if client.style == "future" else 2 * WAIT_S
    for module in ("sync_call", "sync_retrying_call"):
        set_limit(f"call.{module}.TIMER_CHECK_INTERVAL_S", interval_s)
    set_limit("call.aio_call.TIMER_GRACE_S", interval_s)
    shop.then("UNAVAILABLE", Hang())
    free = threading.Event()
    with WheelTimer() as busy:
        busy.new_timeout(lambda _: free.wait(), 0.0)
        channel = client.open(retry=retry_after(backoff=0.1), timer=busy)
        try:
            error = client.refused(channel, timeout=0.3)
        finally:
            free.set()
    assert error.code() in {DEADLINE_EXCEEDED, UNAVAILABLE}


@pytest.mark.parametrize(
    ("client", "api"),
    [
        ("sync blocking", "channel"),
        ("sync future", "channel"),
        ("sync stream", "channel"),
        pytest.param("aio unary", "interceptors", marks=WAITING_ENDS_WITH_ITS_CHANNEL),
        ("aio unary", "channel"),
        ("aio stream", "channel"),
    ],
    indirect=["client"],
)
def test_closing_the_channel_ends_a_call_between_two_attempts(shop, client, timer, api):
    shop.then("UNAVAILABLE")
    channel = client.open(api=api, retry=LATER, timer=timer)
    call = client.begin(channel)
    wait_until(lambda: timer.pending == 1)
    client.world.do(channel.close)
    assert call.code() is CANCELLED
    wait_until(lambda: timer.pending == 0)
    assert len(shop.calls) == 1


@held
def test_a_call_can_be_canceled_between_two_attempts(shop, client, timer):
    shop.then("UNAVAILABLE")
    call = client.begin(client.open(retry=LATER, timer=timer))
    called = []
    call.on_done(called.append)
    wait_until(lambda: timer.pending == 1)
    assert not call.done()
    assert call.cancel()
    assert (call.cancelled(), call.done(), call.cancel()) == (True, True, False)
    assert call.code() is CANCELLED
    ends = {"stream": grpc.RpcError} if client.world.name == "sync" else {}
    with pytest.raises(ends.get(client.style, client.world.canceled_error)):
        call.result()
    wait_until(lambda: timer.pending == 0)  # the worker may be just about to wait
    wait_until(lambda: called == [call.grpc_call])
    assert call.details() == "Locally cancelled by application!"
    assert len(shop.calls) == 1


@held
def test_a_call_can_be_canceled_in_its_second_attempt(shop, client, timer):
    shop.then("UNAVAILABLE", hang := Hang())
    call = client.begin(client.open(retry=LATER, timer=timer))
    patient(timer)
    assert hang.begun.wait(WAIT_S)
    assert call.cancel()
    assert shop.calls[1].ended.wait(WAIT_S)
    assert call.details() == "Locally cancelled by application!"


# --- Among other interceptors ---


class ErrorOfAnotherLibrary(ValueError):
    """It has gRPC's codes, but is not a `grpc.RpcError`."""

    def code(self):
        return UNAVAILABLE


@pytest.mark.parametrize("api", ["channel", "interceptors"])
@with_raising_interceptors
def test_an_exception_of_an_inner_interceptor_is_raised_to_the_caller(shop, client, api):
    attempts = []

    def fail(details):
        attempts.append(details)
        raise error("a bug")

    default = DefaultResponsePolicy(on=Exception, default=client.default(b"none"))
    retry = retry_after(retry_on={"INTERNAL", "UNKNOWN", "UNAVAILABLE"})
    inner = noting(client.world, fail)
    channel = client.open(api=api, inner=inner, retry=retry, default_response=default)
    for error in (ValueError, ErrorOfAnotherLibrary):  # noqa: B007 - `fail` raises it
        attempts.clear()
        with pytest.raises(ValueError, match="a bug"):
            client.ask(channel)
        assert len(attempts) == 1
    assert not shop.calls


class WrongMetadata(CodeOnly):
    """Its trailing metadata does not consist of pairs."""

    def trailing_metadata(self):
        return {"key": "value"}


class WrongMetadataOfAio(grpc.aio.AioRpcError):
    """The metadata of an error of gRPC's own class does not consist of pairs."""

    def __init__(self, code):
        super().__init__(code, {"key": "value"}, {"key": "value"}, "a bug")


class RaisesItself(CodeOnly):
    def details(self):
        raise LookupError


@with_raising_interceptors
def test_policies_answer_an_incomplete_error_of_an_inner_interceptor(shop, client):
    attempts = []

    def fail(details):
        attempts.append(details)
        raise error(UNAVAILABLE)

    inner, failback = noting(client.world, fail), FailbackPolicy(retry_on="UNAVAILABLE")
    default = DefaultResponsePolicy(on="UNAVAILABLE", default=client.default(b"none"))
    answering = client.open(inner=inner, default_response=default)
    queues = client.world.do(client.world.interceptors.FailbackQueues)
    client.world.do(queues.close)
    queueing = client.open(inner=inner, failback=failback, queues=queues)
    errors = (CodeOnly, WrongMetadata, WrongMetadataOfAio, RaisesItself)
    for error in errors:  # noqa: B007 - `fail` raises it
        attempts.clear()
        assert client.ask(answering) == b"none"
        assert len(attempts) == 3
        refused = client.refused(queueing)
        assert isinstance(refused, FailbackClosed)
        assert refused.code() is UNAVAILABLE


@held
def test_a_retry_is_made_in_the_callers_context(shop, client, timer):
    seen = []

    shop.then("UNAVAILABLE")
    channel = client.open(
        inner=noting(client.world, lambda _: seen.append(TENANT.get())), retry=LATER, timer=timer
    )
    token = TENANT.set("shop")
    call = client.begin(channel)
    TENANT.reset(token)
    patient(timer)
    assert client.answer(call) == b"x"
    assert seen == ["shop", "shop"]


@in_every_way
def test_wait_for_ready_of_the_policy_applies_to_calls_that_do_not_set_it(client):
    seen, gzip = [], grpc.Compression.Gzip

    def note(details):  # grpc.aio does not pass on `compression` to interceptors
        seen.append((details.wait_for_ready, getattr(details, "compression", gzip)))

    for settings in ({}, {"retry": None}):
        channel = client.open(wait_for_ready=True, inner=noting(client.world, note), **settings)
        client.ask(channel, compression=gzip)
        client.ask(channel, wait_for_ready=False, compression=gzip)
    assert seen == [(True, gzip), (False, gzip)] * 2
