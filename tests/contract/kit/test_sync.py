"""A kit of `grpc` in calls to a real server."""

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from fixtures.grpc_servers import IMPATIENT
from fixtures.shop import SERVICE, UNARY_UNARY
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel import (
    DefaultResponsePolicy,
    FailbackPolicy,
    Kit,
    MethodPolicy,
    RetryPolicy,
    WheelTimer,
    current_deadline,
)
from rpcwheel.errors import FailbackClosed

RETRY = RetryPolicy(retry_on="UNAVAILABLE", backoff=0)
SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [{"service": SERVICE}],
            "timeout": "60s",
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.001s",
                "maxBackoff": "0.01s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}
QUICK = FailbackPolicy(retry_on="UNAVAILABLE", backoff=0.01, max_attempts=None)
PATIENT = FailbackPolicy(retry_on="UNAVAILABLE", backoff=60)


def by_interceptors(kit, channel):
    return grpc.intercept_channel(channel, *kit.client_interceptors())


@pytest.fixture(params=[by_interceptors, Kit.intercept_channel], ids=["interceptors", "channel"])
def through(request):
    """Either way to put a kit before a channel."""
    return request.param


def test_the_deadline_is_the_earlier_of_policy_and_caller(shop, shop_channel, through):
    with Kit(timeout=2 * WAIT_S) as kit:
        call = through(kit, shop_channel).unary_unary(UNARY_UNARY)
        for timeout in (None, WAIT_S, 500.0):
            assert call(b"a", timeout=timeout) == b"a"
    left = [seen.time_remaining for seen in shop.calls]
    assert all(1.1 * WAIT_S < one < 2.1 * WAIT_S for one in (left[0], left[2]))  # it is rounded up
    assert 0.0 < left[1] < 1.1 * WAIT_S


def test_calls_of_idempotent_methods_are_retried(shop, shop_channel, through):
    with Kit(retry=RETRY, methods={UNARY_UNARY: MethodPolicy(idempotent=True)}) as kit:
        call = through(kit, shop_channel).unary_unary(UNARY_UNARY)
        shop.then("UNAVAILABLE", "UNAVAILABLE")
        assert call(b"a") == b"a"
    assert len(shop.calls) == 3


def test_calls_are_retried_as_a_service_config_says(shop, shop_channel):
    with Kit.from_service_config(SERVICE_CONFIG) as kit:
        shop.then("UNAVAILABLE", "UNAVAILABLE")
        assert kit.intercept_channel(shop_channel).unary_unary(UNARY_UNARY)(b"a") == b"a"
    assert len(shop.calls) == 3
    assert 0 < shop.calls[0].time_remaining < 61  # gRPC rounds it up


def test_a_failed_call_gets_the_default_response(shop, shop_channel):
    with Kit(default_response=DefaultResponsePolicy(on="INTERNAL", default=b"sorry")) as kit:
        call = kit.intercept_channel(shop_channel).unary_unary(UNARY_UNARY)
        shop.then("INTERNAL")
        assert call(b"a") == b"sorry"


def test_a_queued_call_is_delivered_and_counted(shop, shop_channel):
    with Kit(failback=QUICK) as kit:
        call = kit.intercept_channel(shop_channel).unary_unary(UNARY_UNARY)
        shop.then("UNAVAILABLE", "UNAVAILABLE")
        assert call(b"a") is None
        assert wait_until(lambda: kit.pending == 0)
        assert kit.flush(WAIT_S)
        assert kit.stats()["*"].redelivered == 1
    assert [seen.requests for seen in shop.calls] == [[b"a"]] * 3


def test_close_returns_undelivered_calls_once(shop, shop_channel):
    kit = Kit(failback=PATIENT)
    call = kit.intercept_channel(shop_channel).unary_unary(UNARY_UNARY)
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    assert call(b"a") is None
    assert kit.pending == 1
    assert [entry.function for entry in kit.entries()["*"]] == [UNARY_UNARY]
    undelivered = kit.close(drain_timeout=0)
    assert [failed.attempts for failed in undelivered] == [1]
    assert kit.close() == []
    with pytest.raises(FailbackClosed):
        call(b"b")
    assert call(b"c") == b"c"


def test_close_returns_the_calls_that_were_queued_when_the_timer_was_stopped(shop, shop_channel):
    timer = WheelTimer()
    kit = Kit(failback=PATIENT, timer=timer)
    call = kit.intercept_channel(shop_channel).unary_unary(UNARY_UNARY)
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    assert call(b"a") is None
    timer.stop()
    assert wait_until(lambda: not kit.pending)
    with pytest.raises(FailbackClosed, match="timer was stopped") as caught:
        call(b"b")
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert [failed.reason for failed in kit.close()] == ["its timer was stopped"]


def test_the_end_of_the_with_block_delivers_queued_calls_and_closes(shop, shop_channel):
    with Kit(failback=PATIENT) as kit:
        call = kit.intercept_channel(shop_channel).unary_unary(UNARY_UNARY)
        shop.then("UNAVAILABLE")
        assert call(b"a") is None
    assert kit.pending == 0
    assert [seen.requests for seen in shop.calls] == [[b"a"]] * 2
    shop.then("UNAVAILABLE")
    with pytest.raises(FailbackClosed):
        call(b"b")


def test_the_channels_of_a_kit_share_its_queues(shop, shop_channel):
    with Kit(failback=PATIENT) as kit:
        shop.then("UNAVAILABLE", "UNAVAILABLE")
        for channel in (by_interceptors(kit, shop_channel), kit.intercept_channel(shop_channel)):
            assert channel.unary_unary(UNARY_UNARY)(b"a") is None
        assert kit.pending == 2
        assert kit.flush(WAIT_S)


def test_each_channel_has_its_own_retry_budget(shop, shop_channel):
    retry = RetryPolicy(
        retry_on="UNAVAILABLE", backoff=0, max_attempts=2, retry_budget=0.0, min_retries=1
    )
    with Kit(retry=retry, idempotent=True) as kit:
        one, other = (by_interceptors(kit, shop_channel).unary_unary(UNARY_UNARY) for _ in "ab")
        shop.then(*["UNAVAILABLE"] * 3)
        with pytest.raises(grpc.RpcError):
            one(b"a")
        with pytest.raises(grpc.RpcError):  # its one retry is spent
            one(b"b")
        shop.then("UNAVAILABLE")
        assert other(b"c") == b"c"
    assert len(shop.calls) == 5


def test_a_handler_propagates_its_deadline(shop, shop_channel):
    with Kit(timeout=2 * WAIT_S) as kit, ThreadPoolExecutor(2) as pool:
        onward = kit.intercept_channel(shop_channel).unary_unary(UNARY_UNARY)
        seen = []

        def serve(request, context):
            seen.append(current_deadline())
            return onward(request)

        server = grpc.server(pool, interceptors=kit.server_interceptors())
        handler = grpc.unary_unary_rpc_method_handler(serve)
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("test.Front", {"Call": handler})]
        )
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with grpc.insecure_channel(f"127.0.0.1:{port}", options=IMPATIENT) as channel:
            assert channel.unary_unary("/test.Front/Call")(b"a", timeout=WAIT_S) == b"a"
            assert channel.unary_unary("/test.Front/Call")(b"b") == b"b"
        server.stop(None).wait()
    assert seen[0].remaining() < 1.1 * WAIT_S
    assert 0 < shop.calls[0].time_remaining < 1.1 * WAIT_S
    assert 1.1 * WAIT_S < shop.calls[1].time_remaining < 2.1 * WAIT_S


def test_a_kit_uses_the_timer_that_it_was_given(shop, shop_channel, timer):
    kit = Kit(failback=PATIENT, timer=timer)
    call = kit.intercept_channel(shop_channel).unary_unary(UNARY_UNARY)
    shop.then("UNAVAILABLE")
    assert call(b"a") is None
    assert timer.pending == 1
    timer.advance(60)
    assert wait_until(lambda: kit.pending == 0)
    assert kit.close() == []
    assert len(shop.calls) == 2
