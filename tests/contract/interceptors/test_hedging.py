"""Hedged calls of `grpc`: further attempts while the first one runs (gRFC A6)."""

import threading
import time

import grpc
import pytest

from fixtures.shop import UNARY_UNARY, Fail, Hang
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.call import CallPolicy, DefaultResponsePolicy, HedgingPolicy, MethodPolicy
from rpcwheel.events import HedgeSent
from rpcwheel.failback import FailbackPolicy
from rpcwheel.interceptors import FailbackQueues, client_interceptors, intercept_channel

HEDGING = HedgingPolicy(delay=5.0, max_attempts=3, retry_budget=None)


@pytest.fixture
def client(shop_channel, timer):
    """Makes channels with policies; by default calls are hedged."""

    def make(*, queues=None, **settings):
        given = {"hedging": HEDGING, "idempotent": True} | settings
        return intercept_channel(shop_channel, CallPolicy(**given), timer=timer, queues=queues)

    return make


class Blocking:
    """A blocking call on its own thread."""

    def __init__(self, channel, **given):
        self._result = self._error = None
        self._method = channel.unary_unary(UNARY_UNARY)
        self._given = given
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        try:
            self._result = self._method(b"x", **self._given)
        except grpc.RpcError as error:
            self._error = error

    def result(self, timeout):
        self._thread.join(timeout)
        if self._error is not None:
            raise self._error
        return self._result


def future(channel, **given):
    return channel.unary_unary(UNARY_UNARY).future(b"x", **given)


each_style = pytest.mark.parametrize("begin", [Blocking, future])


def hedge(timer):
    """Advance the timer until the next attempt is due."""
    wait_until(lambda: timer.pending)
    timer.advance(5.0)


@each_style
def test_a_slow_call_is_sent_again_and_the_first_success_is_the_callers(
    shop, client, timer, events, begin
):
    slow = Hang()
    shop.then(slow)
    call = begin(client())
    assert slow.begun.wait(WAIT_S)
    hedge(timer)
    assert call.result(WAIT_S) == b"x"
    first, second = shop.calls
    assert first.ended.wait(WAIT_S)  # it was canceled
    assert "x-retry-attempt" not in first.metadata
    assert second.metadata["x-retry-attempt"] == "1"
    assert timer.pending == 0
    wait_until(lambda: HedgeSent(UNARY_UNARY, 2) in events)


@each_style
def test_a_fast_call_is_sent_once(shop, client, timer, begin):
    call = begin(client())
    assert call.result(WAIT_S) == b"x"
    wait_until(lambda: timer.pending == 0)
    timer.advance(60)
    assert len(shop.calls) == 1


@each_style
def test_after_a_non_fatal_failure_the_next_attempt_is_sent_at_once(shop, client, begin):
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    call = begin(client())
    assert call.result(WAIT_S) == b"x"
    assert len(shop.calls) == 3


@each_style
def test_a_fatal_failure_ends_the_call_and_cancels_the_others(shop, client, timer, begin):
    slow = Hang()
    shop.then(slow, "INTERNAL")
    call = begin(client())
    assert slow.begun.wait(WAIT_S)
    hedge(timer)
    with pytest.raises(grpc.RpcError) as caught:
        call.result(WAIT_S)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert shop.calls[0].ended.wait(WAIT_S)
    assert len(shop.calls) == 2


@each_style
def test_if_all_attempts_fail_the_caller_gets_the_last_failure(shop, client, begin):
    shop.then("UNAVAILABLE", "UNAVAILABLE", Fail("UNAVAILABLE", "the third"))
    call = begin(client())
    with pytest.raises(grpc.RpcError) as caught:
        call.result(WAIT_S)
    assert caught.value.details() == "the third"
    assert len(shop.calls) == 3


def test_a_negative_pushback_ends_hedging(shop, client):
    shop.then(Fail("UNAVAILABLE", trailing=(("grpc-retry-pushback-ms", "-1"),)))
    assert future(client()).exception(WAIT_S).code() is grpc.StatusCode.UNAVAILABLE
    assert len(shop.calls) == 1


def test_a_server_may_ask_for_a_delay_before_the_next_attempt(shop, client, timer):
    shop.then(Fail("UNAVAILABLE", trailing=(("grpc-retry-pushback-ms", "60000"),)))
    call = future(client(hedging=HEDGING.model_copy(update={"delay": 1e6})))
    waited_s = 0
    while not call.done():  # it has failed at some moment that cannot be seen
        time.sleep(0.001)
        timer.advance(1)
        waited_s += 1
    assert waited_s >= 60
    assert call.result(WAIT_S) == b"x"
    assert len(shop.calls) == 2


def test_attempts_over_the_budget_are_not_sent(shop, client, timer):
    none_left = HedgingPolicy(delay=0, max_attempts=5, retry_budget=0.0, min_retries=2)
    shop.then("UNAVAILABLE", "UNAVAILABLE", "UNAVAILABLE")
    error = future(client(hedging=none_left)).exception(WAIT_S)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert len(shop.calls) == 3


def test_a_method_that_is_not_idempotent_is_not_hedged(shop, client, timer):
    slow = Hang()
    shop.then(slow)
    call = future(client(idempotent=False))
    assert slow.begun.wait(WAIT_S)
    assert timer.pending == 0
    call.cancel()


def test_hedging_without_delay_sends_all_attempts_at_once(shop, client):
    hangs = [Hang(), Hang()]
    shop.then(*hangs)
    forking = HedgingPolicy(delay=0, max_attempts=3)
    assert future(client(hedging=forking)).result(WAIT_S) == b"x"
    wait_until(lambda: len(shop.calls) == 3)


def test_canceling_a_hedged_call_cancels_all_its_attempts(shop, client, timer):
    hangs = [Hang(), Hang()]
    shop.then(*hangs)
    call = future(client())
    assert hangs[0].begun.wait(WAIT_S)
    hedge(timer)
    assert hangs[1].begun.wait(WAIT_S)
    assert call.cancel()
    assert (call.cancelled(), call.code()) == (True, grpc.StatusCode.CANCELLED)
    assert all(seen.ended.wait(WAIT_S) for seen in shop.calls)
    wait_until(lambda: timer.pending == 0)


def test_dropping_a_hedged_call_cancels_all_its_attempts(shop, client, timer):
    slow = Hang()
    shop.then(slow)
    call = future(client())
    assert slow.begun.wait(WAIT_S)
    del call
    assert shop.calls[0].ended.wait(WAIT_S)
    wait_until(lambda: timer.pending == 0)


def test_the_deadline_of_the_call_ends_all_its_attempts(shop, client):
    shop.then(Hang(), Hang())
    forking = HedgingPolicy(delay=0, max_attempts=2)
    error = future(client(hedging=forking), timeout=0.2).exception(WAIT_S)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert all(seen.ended.wait(WAIT_S) for seen in shop.calls)


def test_a_hedged_call_that_fails_for_good_is_answered_with_the_default(shop, client):
    shop.then("UNAVAILABLE", "UNAVAILABLE", "UNAVAILABLE")
    default = DefaultResponsePolicy(on="UNAVAILABLE", default=b"none")
    assert future(client(default_response=default)).result(WAIT_S) == b"none"


def test_a_hedged_call_that_fails_for_good_is_queued_by_failback(shop, client, timer):
    shop.then("UNAVAILABLE", "UNAVAILABLE", "UNAVAILABLE")
    failback = FailbackPolicy(retry_on="UNAVAILABLE", default=b"later")
    with FailbackQueues(timer) as queues:
        channel = client(failback=failback, queues=queues)
        assert future(channel).result(WAIT_S) == b"later"
        assert queues.pending == 1
        assert queues.flush(WAIT_S)
    assert len(shop.calls) == 4


def test_the_metadata_is_that_of_the_attempt_that_won(shop, client, timer):
    slow = Hang()
    shop.then(slow)
    call = future(client())
    assert slow.begun.wait(WAIT_S)
    hedge(timer)
    assert call.initial_metadata() == call.trailing_metadata() == ()
    assert (call.code(), call.done()) == (grpc.StatusCode.OK, True)


def test_a_future_through_an_interceptor_is_hedged(shop, shop_channel, timer):
    slow = Hang()
    shop.then(slow)
    policy = CallPolicy(hedging=HEDGING, methods={"*": MethodPolicy(idempotent=True)})
    with pytest.warns(match="hedges only calls of .future\\(\\)"):
        interceptors = client_interceptors(policy, timer=timer)
    call = future(grpc.intercept_channel(shop_channel, *interceptors))
    assert slow.begun.wait(WAIT_S)
    hedge(timer)
    assert call.result(WAIT_S) == b"x"


def test_attempts_that_fail_at_the_same_moment_are_queued_once(shop, client, timer):
    at_once = HedgingPolicy(delay=0, max_attempts=4, retry_budget=None)
    failback = FailbackPolicy(retry_on="UNAVAILABLE", default=b"later", max_pending=1000)
    with FailbackQueues(timer) as queues:
        channel = client(hedging=at_once, failback=failback, queues=queues)
        calls = 30
        shop.then(*["UNAVAILABLE"] * (4 * calls))
        for _ in range(calls):
            assert future(channel).result(WAIT_S) == b"later"
        assert queues.pending == calls
        shop.reset()
        assert queues.flush(WAIT_S)


def test_a_call_that_waits_for_a_stopped_timer_ends_with_the_last_failure(shop, client, timer):
    shop.then(Fail("UNAVAILABLE", trailing=(("grpc-retry-pushback-ms", "60000"),)))
    timer.stop()
    ended = threading.Event()
    call = future(client())
    call.add_done_callback(lambda _: ended.set())
    assert ended.wait(WAIT_S)
    assert call.code() is grpc.StatusCode.UNAVAILABLE


def test_closing_the_channel_ends_a_call_that_waits_for_its_next_attempt(shop, client, timer):
    shop.then(Fail("UNAVAILABLE", trailing=(("grpc-retry-pushback-ms", "60000"),)))
    channel = client()
    call = future(channel)
    wait_until(lambda: shop.calls and shop.calls[0].ended.is_set())
    channel.close()
    # UNAVAILABLE if the failure of the attempt is read only now.
    assert call.code() in {grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE}
    wait_until(lambda: timer.pending == 0)
