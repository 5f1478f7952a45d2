"""Request streams of `grpc`: a retry or delivery sends the whole stream, or is not made."""

import queue
import threading

import grpc
import pytest

from fixtures.shop import STREAM_STREAM, STREAM_UNARY, Fail, Hang
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.call import CallPolicy, RetryPolicy
from rpcwheel.failback import FailbackPolicy
from rpcwheel.interceptors import FailbackQueues, intercept_channel

STYLES = {
    "blocking": lambda channel: channel.stream_unary(STREAM_UNARY),
    "future": lambda channel: (
        lambda requests: channel.stream_unary(STREAM_UNARY).future(requests).result(WAIT_S)
    ),
    "stream": lambda channel: (
        lambda requests: b"".join(channel.stream_stream(STREAM_STREAM)(requests))
    ),
}

each_style = pytest.mark.parametrize("call_of", STYLES.values(), ids=STYLES)


@pytest.fixture
def client(shop_channel):
    """Makes channels whose calls are retried after UNAVAILABLE, at once."""

    def make(**retry):
        given = {"retry_on": "UNAVAILABLE", "backoff": 0.0, "retry_budget": None} | retry
        policy = CallPolicy(retry=RetryPolicy(**given), idempotent=True)
        return intercept_channel(shop_channel, policy)

    return make


@each_style
def test_a_retry_sends_all_messages_once_and_in_order(shop, client, call_of):
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    messages = [bytes([n]) for n in range(50)]
    assert call_of(client())(iter(messages)) == b"".join(messages)
    assert shop.calls[-1].requests == messages
    assert len(shop.calls) == 3


@each_style
def test_a_retry_sends_messages_that_arrive_after_its_begin(shop, client, call_of):
    source = queue.Queue()
    source.put(b"a")
    shop.then("UNAVAILABLE")
    got = []
    requests = iter(lambda: source.get(timeout=2 * WAIT_S), None)
    thread = threading.Thread(target=lambda: got.append(call_of(client())(requests)))
    thread.start()
    wait_until(lambda: len(shop.calls) == 2 and shop.calls[1].requests == [b"a"])
    for message in (b"b", b"c", None):  # the first attempt's thread reads the first of them
        source.put(message)
    thread.join(WAIT_S)
    assert got == [b"abc"]


@each_style
def test_a_stream_is_retried_up_to_its_limit_of_bytes(shop, client, call_of):
    messages = [b"abc", b"defg"]
    for limit, attempts in ((10_000, 2), (6, 1)):
        shop.reset()
        shop.then(Fail("UNAVAILABLE", read=True))
        call = call_of(client(replay_buffer_bytes=limit))
        if attempts == 2:
            assert call(iter(messages)) == b"abcdefg"
        else:
            with pytest.raises(grpc.RpcError) as caught:
                call(iter(messages))
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert [seen.requests for seen in shop.calls] == [messages] * attempts


@each_style
def test_an_iterator_that_raises_ends_the_call_as_in_grpc(shop, client, call_of):
    def broken():
        yield b"a"
        raise ValueError("no more")

    with pytest.raises(grpc.RpcError) as caught:
        call_of(client(retry_on={"UNKNOWN", "UNAVAILABLE"}))(broken())
    assert caught.value.code() is grpc.StatusCode.UNKNOWN
    assert caught.value.details() == "Exception iterating requests!"
    assert len(shop.calls) <= 1


def test_without_retries_a_request_stream_is_passed_to_grpc_unchanged(shop, shop_channel):
    channel = intercept_channel(shop_channel, CallPolicy(timeout=WAIT_S))
    shop.then(Hang())
    call = channel.stream_unary(STREAM_UNARY).future(iter([b"a", b"b"]))
    assert type(call).__module__ == "grpc._channel"
    call.cancel()


@each_style
def test_failback_delivers_a_whole_request_stream(shop, shop_channel, call_of):
    default = [b"later"] if call_of is STYLES["stream"] else b"later"
    policy = CallPolicy(
        failback=FailbackPolicy(retry_on="UNAVAILABLE", backoff=60.0, default=default)
    )
    with FailbackQueues() as queues:
        channel = intercept_channel(shop_channel, policy, queues=queues)
        shop.then("UNAVAILABLE")
        assert call_of(channel)(iter([b"a", b"b", b"c"])) == b"later"
        assert queues.flush(WAIT_S)
    assert shop.calls[1].requests == [b"a", b"b", b"c"]
    assert shop.calls[1].time_remaining < 61
