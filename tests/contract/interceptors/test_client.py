"""Calls through the client interceptors of `grpc`: retries, deadlines, default responses."""

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import grpc
import pytest
from tenacity import wait_fixed

from fixtures.clients import gated
from fixtures.shop import (
    IMPATIENT,
    STREAM_STREAM,
    STREAM_UNARY,
    UNARY_STREAM,
    UNARY_UNARY,
    Fail,
    Hang,
    Silent,
)
from fixtures.small_servers import METHOD
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.call import (
    CallPolicy,
    DeadlinePolicy,
    DefaultResponsePolicy,
    MethodPolicy,
    RetryPolicy,
    deadline_scope,
)
from rpcwheel.events import (
    CallbackFailed,
    CallSlow,
    DefaultResponseUsed,
    RetryScheduled,
    RetryStopped,
    add_sink,
    remove_sink,
)
from rpcwheel.failback import FailbackPolicy
from rpcwheel.interceptors import FailbackQueues, intercept_channel
from rpcwheel.timer import WheelTimer

STYLES = {
    "blocking": lambda channel: channel.unary_unary(UNARY_UNARY),
    "future": lambda channel: (
        lambda *args, **given: (
            channel.unary_unary(UNARY_UNARY).future(*args, **given).result(WAIT_S)
        )
    ),
    "stream": lambda channel: (
        lambda *args, **given: b"".join(channel.unary_stream(UNARY_STREAM)(*args, **given))
    ),
}
"""Ways to make a call with one request and wait for its end."""

each_style = pytest.mark.parametrize("call_of", STYLES.values(), ids=STYLES)


@pytest.fixture
def client(shop_channel):
    """Makes channels with policies; by default calls are retried after UNAVAILABLE, at once."""

    def make(*, timer=None, **settings):
        retry = RetryPolicy(retry_on="UNAVAILABLE", backoff=0.0, retry_budget=None)
        given = {"retry": retry, "idempotent": True} | settings
        return intercept_channel(shop_channel, CallPolicy(**given), timer=timer)

    return make


def refused(make) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        make()
    return caught.value


# --- Retries ---


@each_style
def test_attempts_carry_the_number_of_previous_attempts(shop, client, call_of):
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    assert call_of(client())(b"x") == b"x"
    previous = [seen.metadata.get("grpc-previous-rpc-attempts") for seen in shop.calls]
    assert previous == [None, "1", "2"]


def test_events_report_each_retry_and_why_there_is_no_other(shop, client, events):
    shop.then(*["UNAVAILABLE"] * 3)
    refused(lambda: client().unary_unary(UNARY_UNARY)(b"x"))
    wait_until(lambda: len(events) == 3)
    assert [type(event) for event in events] == [RetryScheduled, RetryScheduled, RetryStopped]
    assert events[-1].attempts == 3
    assert events[-1].reason == "no attempts left"


def test_a_failure_that_no_policy_names_is_grpcs_own_error(shop, client):
    shop.then("NOT_FOUND")
    error = refused(lambda: client().unary_unary(UNARY_UNARY)(b"x"))
    assert type(error).__module__ == "grpc._channel"
    assert len(shop.calls) == 1


@each_style
def test_a_method_that_is_not_idempotent_is_not_retried(shop, client, call_of):
    """Also if its details are those of gRPC without a connection."""
    shop.then(Fail("UNAVAILABLE", "failed to connect to all addresses; last error: UNKNOWN"))
    error = refused(lambda: call_of(client(idempotent=False))(b"x"))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert len(shop.calls) == 1


def test_a_refused_connection_is_retried_for_idempotent_methods_only(events):
    retry = RetryPolicy(retry_on="UNAVAILABLE", backoff=0.0, max_attempts=2)
    methods = {METHOD: MethodPolicy(idempotent=True)}
    with grpc.insecure_channel("127.0.0.1:1", options=IMPATIENT) as bare:
        channel = intercept_channel(bare, CallPolicy(retry=retry, methods=methods))
        for method in (UNARY_UNARY, METHOD):
            call = channel.unary_unary(method)
            assert refused(partial(call, b"x")).code() is grpc.StatusCode.UNAVAILABLE
            error = refused(lambda call=call: call.future(b"x").result(WAIT_S))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
    wait_until(lambda: sum(isinstance(event, RetryStopped) for event in events) == 4)
    retried = [event.method for event in events if isinstance(event, RetryScheduled)]
    assert retried == [METHOD, METHOD]


def test_each_method_has_its_own_policies(shop, client):
    methods = {STREAM_UNARY: MethodPolicy(retry=None), UNARY_UNARY: MethodPolicy(timeout=WAIT_S)}
    channel = client(methods=methods)
    channel.unary_unary(UNARY_UNARY)(b"x")
    shop.then("UNAVAILABLE")
    refused(lambda: channel.stream_unary(STREAM_UNARY)(iter([b"x"])))
    assert [seen.time_remaining is not None for seen in shop.calls] == [True, False]


def test_the_retry_budget_limits_retries_to_a_failing_server(shop, client):
    shop.then(*["UNAVAILABLE"] * 1000)
    retry = RetryPolicy(retry_on="UNAVAILABLE", backoff=0.0, max_attempts=5, min_retries=0)
    member = client(retry=retry).unary_unary(UNARY_UNARY)
    for _ in range(200):
        refused(partial(member, b"x"))
    assert 200 < len(shop.calls) <= 240


def test_a_retry_waits_for_the_pushback_of_the_server(shop, client, timer, events):
    shop.then(Fail("UNAVAILABLE", trailing=(("grpc-retry-pushback-ms", "7000"),)))
    future = client(timer=timer).unary_unary(UNARY_UNARY).future(b"x")
    wait_until(lambda: timer.pending and events)
    assert events[0].delay_s == 7.0
    timer.advance(6.9)
    assert timer.pending == 1
    timer.advance(0.2)
    assert future.result(WAIT_S) == b"x"


def test_a_negative_pushback_of_the_server_forbids_the_retry(shop, client, events):
    shop.then(Fail("UNAVAILABLE", trailing=(("grpc-retry-pushback-ms", "-1"),)))
    refused(lambda: client().unary_unary(UNARY_UNARY)(b"x"))
    assert len(shop.calls) == 1
    wait_until(lambda: events)
    assert events[0].reason == "the server asked for no retry"


@pytest.mark.parametrize("style", ["blocking", "future"])
def test_a_pushback_above_max_pushback_ends_the_call_at_once(shop, client, timer, events, style):
    shop.then(Fail("UNAVAILABLE", trailing=(("grpc-retry-pushback-ms", "999999999999"),)))
    method = client(timer=timer).unary_unary(UNARY_UNARY)
    refused(lambda: method(b"x") if style == "blocking" else method.future(b"x").result(WAIT_S))
    assert (len(shop.calls), timer.pending) == (1, 0)
    wait_until(lambda: events)
    assert events[0].reason == (
        "the server asked to wait 999999999.999 s, which is longer than max_pushback (300 s)"
    )


# --- Deadlines ---


def test_all_attempts_share_the_callers_deadline(shop, client, timer):
    """A backoff that would exceed it is not begun."""
    shop.then(*["UNAVAILABLE"] * 4)
    retry = RetryPolicy(retry_on="UNAVAILABLE", backoff=40.0, max_attempts=9, retry_budget=None)
    call = client(retry=retry, timer=timer).unary_unary(UNARY_UNARY).future(b"x", timeout=100.0)
    for _ in range(2):
        wait_until(lambda: timer.pending)
        timer.advance(40.0)
    assert call.exception(WAIT_S).code() is grpc.StatusCode.UNAVAILABLE
    left = [seen.time_remaining for seen in shop.calls]
    assert len(left) == 3
    assert all(one <= limit for one, limit in zip(left, (101.0, 61.0, 21.0), strict=True))


def test_an_attempt_may_have_its_own_timeout(shop, client):
    shop.then(Hang())
    retry = RetryPolicy(
        retry_on="UNAVAILABLE",
        backoff=0.0,
        max_attempts=100,
        attempt_timeout=0.3,
        retry_budget=None,
    )
    assert client(retry=retry).unary_unary(UNARY_UNARY)(b"x", timeout=2 * WAIT_S) == b"x"
    assert all(seen.time_remaining < 1 for seen in shop.calls)


def test_a_scope_limits_the_deadline_of_its_calls(shop, client):
    with deadline_scope(WAIT_S):
        client(timeout=100.0).unary_unary(UNARY_UNARY)(b"x", timeout=70.0)
    assert shop.calls[0].time_remaining < 1.1 * WAIT_S


@each_style
def test_a_call_whose_deadline_has_passed_is_not_sent(shop, client, call_of):
    for rules in ({}, {"retry": None}):
        channel = client(**rules)
        with deadline_scope(0.0):
            error = refused(lambda channel=channel: call_of(channel)(b"x"))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "its deadline has passed" in error.details()
    assert shop.calls == []


@each_style
def test_a_call_whose_deadline_has_passed_ends_with_the_default_response(shop, client, call_of):
    default = (b"no",) if call_of is STYLES["stream"] else b"no"
    channel = client(
        default_response=DefaultResponsePolicy(on="DEADLINE_EXCEEDED", default=default)
    )
    assert call_of(channel)(b"x", timeout=0) == b"no"
    assert shop.calls == []


def test_failback_delivers_a_call_whose_deadline_has_passed(shop, shop_channel):
    with FailbackQueues() as queues:
        failback = FailbackPolicy(retry_on="DEADLINE_EXCEEDED", backoff=0.01, default=b"queued")
        channel = intercept_channel(shop_channel, CallPolicy(failback=failback), queues=queues)
        assert channel.unary_unary(UNARY_UNARY)(b"x", timeout=0) == b"queued"
        assert queues.flush(WAIT_S)
    assert [seen.requests for seen in shop.calls] == [[b"x"]]


def test_failback_waits_at_most_its_limit_for_the_end_of_a_request_stream(
    shop, shop_channel, monkeypatch
):
    """If the requests do not end, the caller gets the failure."""
    monkeypatch.setattr("rpcwheel.call.sync_requests.READ_TIMEOUT_S", 0.05)
    opened = threading.Event()

    def endless():
        yield b"1"
        opened.wait(WAIT_S)

    with FailbackQueues() as queues:
        failback = FailbackPolicy(retry_on="UNAVAILABLE", backoff=0.01, default=b"queued")
        channel = intercept_channel(shop_channel, CallPolicy(failback=failback), queues=queues)
        shop.then("UNAVAILABLE", "UNAVAILABLE")
        try:
            future = channel.stream_unary(STREAM_UNARY).future(endless())
            messages = channel.stream_stream(STREAM_STREAM)(endless())
            for make in (lambda: future.result(WAIT_S), lambda: list(messages)):
                assert refused(make).code() is grpc.StatusCode.UNAVAILABLE
        finally:
            opened.set()


# --- Default responses ---


def test_a_default_response_names_its_source(shop, client, events):
    shop.then("NOT_FOUND")
    channel = client(default_response=DefaultResponsePolicy(on="NOT_FOUND", default=b"none"))
    answer, call = channel.unary_unary(UNARY_UNARY).with_call(b"x")
    assert answer == b"none"
    assert call.code() is grpc.StatusCode.OK
    assert call.details().startswith("default response after NOT_FOUND: scripted")
    assert call.trailing_metadata()[-1] == ("rpcwheel-answer", "default-response")
    wait_until(lambda: events)
    assert [type(event) for event in events] == [DefaultResponseUsed]


def test_a_default_response_comes_after_the_retries(shop, client):
    shop.then(*["UNAVAILABLE"] * 3)
    channel = client(default_response=DefaultResponsePolicy(on="UNAVAILABLE", default=(b"n",)))
    assert list(channel.unary_stream(UNARY_STREAM)(b"x")) == [b"n"]
    assert len(shop.calls) == 3


def test_after_its_first_message_a_stream_gets_no_retry_and_no_default(shop, client):
    shop.then(Fail("UNAVAILABLE", after=1, read=True))
    channel = client(default_response=DefaultResponsePolicy(on="UNAVAILABLE", default=(b"n",)))
    rest = threading.Event()
    stream = channel.stream_stream(STREAM_STREAM)(gated(b"x", rest))
    assert next(stream) == b"x"
    rest.set()
    assert refused(lambda: next(stream)).code() is grpc.StatusCode.UNAVAILABLE
    assert len(shop.calls) == 1


# --- The user's own code ---


def test_a_backoff_that_raises_ends_the_retries(shop, client, events):
    def broken(_):
        raise RuntimeError("no idea")

    retry = RetryPolicy(retry_on="UNAVAILABLE", backoff=broken, retry_budget=None)
    member = client(retry=retry).unary_unary(UNARY_UNARY)
    for make in (partial(member, b"x"), lambda: member.future(b"x").result(WAIT_S)):
        shop.then("UNAVAILABLE")
        assert refused(make).code() is grpc.StatusCode.UNAVAILABLE
    wait_until(lambda: sum(isinstance(event, CallbackFailed) for event in events) == 2)
    assert {event.callback for event in events if isinstance(event, CallbackFailed)} == {
        "retry.backoff"
    }
    assert member.future(b"x").result(WAIT_S) == b"x"


def test_a_backoff_that_blocks_delays_neither_other_calls_nor_the_timer(shop, client):
    end, begun = threading.Event(), threading.Event()

    def hang(_):
        begun.set()
        end.wait(2 * WAIT_S)
        return 0.0

    channel = client(retry=RetryPolicy(retry_on="UNAVAILABLE", backoff=hang, retry_budget=None))
    shop.then("UNAVAILABLE")
    stuck = channel.unary_unary(UNARY_UNARY).future(b"x")
    assert begun.wait(WAIT_S)
    fixed = client(
        retry=RetryPolicy(retry_on="UNAVAILABLE", backoff=wait_fixed(0.01), retry_budget=None)
    )
    shop.then("UNAVAILABLE")
    assert list(fixed.unary_stream(UNARY_STREAM)(b"x")) == [b"x"]  # by the timer
    assert channel.unary_unary(UNARY_UNARY).future(b"y").result(WAIT_S) == b"y"
    assert not stuck.done()
    end.set()
    assert stuck.result(WAIT_S) == b"x"


def test_a_predicate_that_raises_leaves_the_failure(shop, client, events):
    def broken(error):
        raise RuntimeError("no idea")

    shop.then("NOT_FOUND")
    channel = client(retry=None, default_response=DefaultResponsePolicy(on=broken))
    error = refused(lambda: channel.unary_unary(UNARY_UNARY)(b"x"))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    wait_until(lambda: events)
    assert [event.callback for event in events] == ["default_response.on"]


def test_done_callbacks_that_block_do_not_delay_calls_through_two_interceptors(shop, shop_channel):
    retry = RetryPolicy(retry_on="UNAVAILABLE", backoff=0.0, retry_budget=None)
    policy = CallPolicy(timeout=WAIT_S, retry=retry, idempotent=True)
    with pytest.warns(RuntimeWarning, match="3 x 3 = 9"):
        channel = intercept_channel(intercept_channel(shop_channel, policy), policy)
    opened, here = threading.Event(), threading.get_ident()

    def hang(_):
        if threading.get_ident() != here:  # where it runs if the call has ended before it is added
            opened.wait(2 * WAIT_S)

    shop.then(*["NOT_FOUND"] * 6)
    calls = [channel.unary_unary(UNARY_UNARY).future(b"x") for _ in range(6)]
    for call in calls:
        call.add_done_callback(hang)
    try:
        assert [call.exception(WAIT_S).code().name for call in calls] == ["NOT_FOUND"] * 6
        assert channel.unary_unary(UNARY_UNARY).future(b"x").result(WAIT_S) == b"x"
    finally:
        opened.set()


def test_a_sink_that_blocks_does_not_block_the_timer(shop, shop_channel, timer):
    blocked, opened, woken = threading.Event(), threading.Event(), []

    def block(event):
        if isinstance(event, CallSlow):
            blocked.set()
            woken.append(opened.wait(WAIT_S))

    policy = CallPolicy(timeout=DeadlinePolicy(slow_call_threshold=2.0))
    hang = Hang()
    shop.then(hang)
    call = intercept_channel(shop_channel, policy, timer=timer).unary_unary(UNARY_UNARY).future(b"")
    assert hang.begun.wait(WAIT_S)
    add_sink(block)
    try:
        timer.advance(3)  # would return only when the sink has waited in vain
        assert blocked.wait(WAIT_S)
        opened.set()
        wait_until(lambda: woken)
        assert woken == [True]
    finally:
        opened.set()
        remove_sink(block)
        call.cancel()


# --- Slow calls ---


@pytest.mark.parametrize("style", ["blocking", "future", "stream", "retried"])
def test_a_slow_call_is_reported_while_it_runs(shop, client, timer, events, style):
    hang = Hang()
    retry = {} if style == "retried" else {"retry": None}
    channel = client(timeout=DeadlinePolicy(slow_call_threshold=3.0), timer=timer, **retry)
    unary, stream = channel.unary_unary(UNARY_UNARY), channel.unary_stream(UNARY_STREAM)
    list(stream(b"x"))
    unary(b"x")
    unary.future(b"x").result(WAIT_S)
    wait_until(lambda: timer.pending == 0)
    shop.then(hang)
    if style == "blocking":
        thread = threading.Thread(target=unary, args=(b"x",))
        thread.start()
    else:
        call = stream(b"x") if style == "stream" else unary.future(b"x")
    assert hang.begun.wait(WAIT_S)
    timer.advance(3.0)
    wait_until(lambda: events)
    method = UNARY_STREAM if style == "stream" else UNARY_UNARY
    assert events == [CallSlow(method, "client", 3.0)]
    if style == "blocking":
        shop.calls[-1].ended.set()  # the server goes on
        thread.join()
    else:
        call.cancel()
    wait_until(lambda: timer.pending == 0)


def test_a_dropped_stream_with_slow_call_threshold_is_canceled(shop, client):
    silent = Silent()
    shop.then(silent)
    channel = client(retry=None, timeout=DeadlinePolicy(slow_call_threshold=100.0))
    stream = channel.unary_stream(UNARY_STREAM)(b"x")
    assert silent.begun.wait(WAIT_S)
    del stream
    assert shop.calls[0].ended.wait(WAIT_S)


# --- What ends while a call waits for its retry ---


def test_an_interrupt_during_the_wait_for_a_retry_leaves_no_timeout(shop, client, timer):
    shop.then("UNAVAILABLE")
    retry = RetryPolicy(retry_on="UNAVAILABLE", backoff=5.0)
    channel = client(retry=retry, timeout=DeadlinePolicy(slow_call_threshold=9.0), timer=timer)

    def interrupt():
        wait_until(lambda: timer.pending == 2)  # the retry, and the watch for slow calls
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        channel.unary_unary(UNARY_UNARY)(b"x")
    thread.join()
    assert timer.pending == 0


def test_with_a_stopped_timer_calls_are_not_retried(shop, client, timer):
    retry = RetryPolicy(retry_on="UNAVAILABLE", backoff=5.0)
    channel = client(retry=retry, timeout=DeadlinePolicy(slow_call_threshold=9.0), timer=timer)
    timer.stop()
    member = channel.unary_unary(UNARY_UNARY)
    assert member(b"x") == b"x"
    for make in (partial(member, b"x"), lambda: member.future(b"x").result(WAIT_S)):
        shop.then("UNAVAILABLE")
        assert refused(make).code() is grpc.StatusCode.UNAVAILABLE


def test_a_call_ends_if_its_timer_is_stopped_before_the_retry(shop, client, events):
    timer = WheelTimer()
    channel = client(retry=RetryPolicy(retry_on="UNAVAILABLE", backoff=3 * WAIT_S), timer=timer)
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    future = channel.unary_unary(UNARY_UNARY).future(b"x")
    messages = channel.unary_stream(UNARY_STREAM)(b"x")
    wait_until(lambda: len(events) == 2)
    timer.stop()
    with ThreadPoolExecutor() as pool:  # each waits until it has looked at the timer
        ends = [pool.submit(future.exception), pool.submit(refused, lambda: list(messages))]
        assert {end.result(WAIT_S).code().name for end in ends} == {"UNAVAILABLE"}


@each_style
def test_a_call_ends_while_a_task_blocks_the_timer_of_its_retry(shop, client, call_of):
    shop.then("UNAVAILABLE", Hang())
    free = threading.Event()
    with WheelTimer() as busy, ThreadPoolExecutor() as pool:
        busy.new_timeout(lambda _: free.wait(), 0.0)
        call = call_of(client(retry=RetryPolicy(retry_on="UNAVAILABLE", backoff=0.01), timer=busy))
        try:
            ended = pool.submit(refused, lambda: call(b"x", timeout=0.3)).result(WAIT_S)
        finally:
            free.set()
    assert ended.code() in {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE}


@each_style
def test_closing_the_inner_channel_between_two_attempts_cancels_the_call(shop, timer, call_of):
    plain = grpc.insecure_channel(shop.target, options=IMPATIENT)
    default_response = DefaultResponsePolicy(on=grpc.RpcError, default=b"no")
    retry = RetryPolicy(retry_on="UNAVAILABLE", backoff=9.0)
    policy = CallPolicy(retry=retry, idempotent=True, default_response=default_response)
    channel = intercept_channel(plain, policy, timer=timer)
    shop.then("UNAVAILABLE")
    codes = []
    thread = threading.Thread(
        target=lambda: codes.append(refused(lambda: call_of(channel)(b"x")).code())
    )
    thread.start()
    wait_until(lambda: timer.pending == 1)
    plain.close()
    timer.advance(9)
    thread.join(WAIT_S)
    assert codes == [grpc.StatusCode.CANCELLED]
