"""The client's policies at work: what is tried again and what is not, and under which deadline."""

import signal
import threading
from functools import partial

import grpc
import pytest
from tenacity import wait_fixed

from fixtures.shop import (
    IMPATIENT,
    STREAM_UNARY,
    UNARY_STREAM,
    UNARY_UNARY,
    Hang,
    Shop,
    Silent,
)
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.deadline import DeadlinePolicy, RetryPolicy
from rpcwheel.interceptors import CallPolicy, FailsafePolicy, MethodPolicy, intercept_channel
from rpcwheel.observe import CallNotRetried, CallRetrying, CallSlow, HookFailed


@pytest.fixture
def client(shop_channel):
    """Makes channels with policies; by default calls are retried after UNAVAILABLE, at once."""

    def make(*, timer=None, **settings):
        retry = RetryPolicy(on="UNAVAILABLE", wait=0.0, budget=None)
        given = {"retry": retry, "idempotent": True} | settings
        return intercept_channel(shop_channel, CallPolicy(**given), timer=timer)

    return make


def refused(make) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        make()
    return caught.value


@pytest.mark.parametrize("style", ["blocking", "future", "stream"])
def test_the_server_is_told_how_many_tries_went_before(shop, client, style):
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    channel = client()
    match style:
        case "blocking":
            assert channel.unary_unary(UNARY_UNARY)(b"x") == b"x"
        case "future":
            assert channel.unary_unary(UNARY_UNARY).future(b"x").result(WAIT_S) == b"x"
        case "stream":
            assert list(channel.unary_stream(UNARY_STREAM)(b"x")) == [b"x"]
    told = [seen.metadata.get("grpc-previous-rpc-attempts") for seen in shop.calls]
    assert told == [None, "1", "2"]


def test_a_retry_is_made_with_all_that_the_caller_gave(shop, client):
    shop.then("UNAVAILABLE")
    client().unary_unary(UNARY_UNARY)(b"x", metadata=[("k", "v")], timeout=9.0)
    first, second = shop.calls
    assert first.metadata["k"] == second.metadata["k"] == "v"
    assert 0 < second.time_remaining <= first.time_remaining + 0.1


def test_the_events_tell_of_each_retry_and_why_there_is_no_other(shop, client, events):
    shop.then(*["UNAVAILABLE"] * 3)
    refused(lambda: client().unary_unary(UNARY_UNARY)(b"x"))
    assert [type(event) for event in events] == [CallRetrying, CallRetrying, CallNotRetried]
    assert events[-1].attempts == 3
    assert events[-1].reason == "no attempts left"


def test_a_failure_that_no_policy_names_is_the_error_of_grpc_itself(shop, client):
    shop.then("NOT_FOUND")
    error = refused(lambda: client().unary_unary(UNARY_UNARY)(b"x"))
    assert type(error).__module__ == "grpc._channel"
    assert len(shop.calls) == 1


def test_what_a_server_may_have_done_is_not_asked_for_again(shop, client):
    shop.then("UNAVAILABLE")
    error = refused(lambda: client(idempotent=False).unary_unary(UNARY_UNARY)(b"x"))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert len(shop.calls) == 1


def test_what_no_server_has_seen_is_sent_again_whatever_its_method():
    shop = Shop()
    shop.kill()
    policy = CallPolicy(retry=RetryPolicy(on="UNAVAILABLE", wait=0.05, attempts=200, budget=None))
    with grpc.insecure_channel(shop.target, options=IMPATIENT) as bare:
        future = intercept_channel(bare, policy).unary_unary(UNARY_UNARY).future(b"x")
        shop.start()
        assert future.result(WAIT_S) == b"x"
    shop.kill()


# --- The user's own code ---


def test_a_wait_object_that_raises_costs_the_retries_and_no_more(shop, client, events):
    def broken(_):
        raise RuntimeError("no idea")

    retry = RetryPolicy(on="UNAVAILABLE", wait=broken, budget=None)
    member = client(retry=retry).unary_unary(UNARY_UNARY)
    for make in (partial(member, b"x"), lambda: member.future(b"x").result(WAIT_S)):
        shop.then("UNAVAILABLE")
        assert refused(make).code() is grpc.StatusCode.UNAVAILABLE
    assert [event.hook for event in events if isinstance(event, HookFailed)] == ["retry.wait"] * 2
    assert member.future(b"x").result(WAIT_S) == b"x"


def test_a_wait_object_that_hangs_holds_up_no_other_call_and_not_the_wheel(shop, client):
    end, begun = threading.Event(), threading.Event()

    def hang(_):
        begun.set()
        end.wait(WAIT_S)
        return 0.0

    channel = client(retry=RetryPolicy(on="UNAVAILABLE", wait=hang, budget=None))
    shop.then("UNAVAILABLE")
    stuck = channel.unary_unary(UNARY_UNARY).future(b"x")
    assert begun.wait(WAIT_S)
    fixed = client(retry=RetryPolicy(on="UNAVAILABLE", wait=wait_fixed(0.01), budget=None))
    shop.then("UNAVAILABLE")
    assert list(fixed.unary_stream(UNARY_STREAM)(b"x")) == [b"x"]  # by the wheel
    assert channel.unary_unary(UNARY_UNARY).future(b"y").result(WAIT_S) == b"y"
    assert not stuck.done()
    end.set()
    assert stuck.result(WAIT_S) == b"x"


def test_a_predicate_that_raises_leaves_the_failure_as_it_was(shop, client, events):
    def broken(error):
        raise RuntimeError("no idea")

    shop.then("NOT_FOUND")
    channel = client(retry=None, failsafe=FailsafePolicy(on=broken))
    error = refused(lambda: channel.unary_unary(UNARY_UNARY)(b"x"))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert [event.hook for event in events] == ["failsafe.on"]


# --- Slow calls ---


@pytest.mark.parametrize("style", ["blocking", "future", "stream", "retried"])
def test_a_slow_call_is_told_while_it_runs_and_one_that_ended_is_not(
    shop, client, timer, events, style
):
    hang = Hang()
    retry = {} if style == "retried" else {"retry": None}
    channel = client(timeout=DeadlinePolicy(slow_after=3.0), timer=timer, **retry)
    unary, stream = channel.unary_unary(UNARY_UNARY), channel.unary_stream(UNARY_STREAM)
    list(stream(b"x"))
    unary(b"x")
    unary.future(b"x").result(WAIT_S)
    wait_until(lambda: timer.pending == 0)
    shop.then(hang)
    if style == "blocking":
        thread = threading.Thread(target=lambda: refused(lambda: unary(b"x", timeout=1.0)))
        thread.start()
    else:
        call = stream(b"x") if style == "stream" else unary.future(b"x")
    assert hang.begun.wait(WAIT_S)
    timer.advance(3.0)
    wait_until(lambda: events)
    assert events == [CallSlow(hang_method(style), "client", 3.0)]
    if style == "blocking":
        thread.join()
    else:
        call.cancel()
    wait_until(lambda: timer.pending == 0)


def hang_method(style):
    return UNARY_STREAM if style == "stream" else UNARY_UNARY


def test_a_stream_that_is_watched_is_still_cancelled_when_it_is_dropped(shop, client):
    silent = Silent()
    shop.then(silent)
    channel = client(retry=None, timeout=DeadlinePolicy(slow_after=100.0))
    stream = channel.unary_stream(UNARY_STREAM)(b"x")
    assert silent.begun.wait(WAIT_S)
    del stream
    assert shop.calls[0].ended.wait(WAIT_S)


# --- Methods, and interrupts ---


def test_each_method_has_its_own_rules(shop, client):
    channel = client(
        methods={STREAM_UNARY: MethodPolicy(retry=None), UNARY_UNARY: MethodPolicy(timeout=5.0)}
    )
    channel.unary_unary(UNARY_UNARY)(b"x")
    shop.then("UNAVAILABLE")
    refused(lambda: channel.stream_unary(STREAM_UNARY)(iter([b"x"])))
    assert [seen.time_remaining is not None for seen in shop.calls] == [True, False]


def test_an_interrupt_while_a_call_waits_for_its_retry_leaves_nothing_behind(shop, client, timer):
    shop.then("UNAVAILABLE")
    retry = RetryPolicy(on="UNAVAILABLE", wait=5.0)
    channel = client(retry=retry, timeout=DeadlinePolicy(slow_after=9.0), timer=timer)

    def interrupt():
        wait_until(lambda: timer.pending == 2)  # the retry, and the watch for slow calls
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        channel.unary_unary(UNARY_UNARY)(b"x")
    thread.join()
    assert timer.pending == 0


def test_a_timer_that_is_stopped_ends_the_retries_and_no_call(shop, client, timer):
    retry = RetryPolicy(on="UNAVAILABLE", wait=5.0)
    channel = client(retry=retry, timeout=DeadlinePolicy(slow_after=9.0), timer=timer)
    timer.stop()
    member = channel.unary_unary(UNARY_UNARY)
    assert member(b"x") == b"x"
    for make in (partial(member, b"x"), lambda: member.future(b"x").result(WAIT_S)):
        shop.then("UNAVAILABLE")
        assert refused(make).code() is grpc.StatusCode.UNAVAILABLE
