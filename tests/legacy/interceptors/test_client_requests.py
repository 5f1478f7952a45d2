"""Request streams: sent again whole or not at all, whichever thread is in the user's iterator."""

import itertools
import queue
import threading

import grpc
import pytest

from fixtures.shop import STREAM_STREAM, STREAM_UNARY, Fail, Hang
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.deadline import RetryPolicy
from rpcwheel.failback import FailbackPolicy
from rpcwheel.interceptors import CallPolicy, Queues, intercept_channel
from rpcwheel.interceptors._client_requests import Feed
from rpcwheel.interceptors.replay import OVERHEAD


def from_queue(source):
    """Messages as they come, until None: a generator that blocks."""
    return iter(lambda: source.get(timeout=WAIT_S), None)


def member(shop_channel, style, **retry):
    given = {"on": "UNAVAILABLE", "wait": 0.0, "budget": None} | retry
    policy = CallPolicy(retry=RetryPolicy(**given), idempotent=True)
    channel = intercept_channel(shop_channel, policy)
    one, many = channel.stream_unary(STREAM_UNARY), channel.stream_stream(STREAM_STREAM)
    return {
        "blocking": one,
        "future": lambda requests: one.future(requests).result(WAIT_S),
        "stream": lambda requests: b"".join(many(requests)),
    }[style]


styles = pytest.mark.parametrize("style", ["blocking", "future", "stream"])


@styles
def test_a_retry_sends_all_messages_once_and_in_order(shop, shop_channel, style):
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    messages = [bytes([n]) for n in range(50)]
    assert member(shop_channel, style)(iter(messages)) == b"".join(messages)
    assert shop.calls[-1].requests == messages
    assert len(shop.calls) == 3


@styles
def test_a_retry_goes_on_with_messages_that_come_after_it_began(shop, shop_channel, style):
    source = queue.Queue()
    source.put(b"a")
    shop.then(Fail("UNAVAILABLE"))
    got = []
    call = member(shop_channel, style)
    thread = threading.Thread(target=lambda: got.append(call(from_queue(source))))
    thread.start()
    wait_until(lambda: len(shop.calls) == 2 and shop.calls[1].requests == [b"a"])
    for message in (b"b", b"c", None):  # the first of them is read by the first try's thread
        source.put(message)
    thread.join(WAIT_S)
    assert got == [b"abc"]


@styles
@pytest.mark.parametrize(("limit", "tries"), [(7 + 2 * OVERHEAD, 2), (6 + 2 * OVERHEAD, 1)])
def test_a_stream_that_outgrew_its_limit_is_not_sent_again(shop, shop_channel, style, limit, tries):
    shop.then(Fail("UNAVAILABLE", read=True))
    call = member(shop_channel, style, replay_bytes=limit)
    messages = iter([b"abc", b"defg"])
    if tries == 1:
        with pytest.raises(grpc.RpcError):
            call(messages)
    else:
        assert call(messages) == b"abcdefg"
    assert [seen.requests for seen in shop.calls] == [[b"abc", b"defg"]] * tries


@styles
def test_an_iterator_that_raises_ends_the_call_as_grpc_does(shop, shop_channel, style):
    def broken():
        yield b"a"
        raise ValueError("no more")

    with pytest.raises(grpc.RpcError) as caught:
        member(shop_channel, style, on={"UNKNOWN", "UNAVAILABLE"})(broken())
    assert caught.value.code() is grpc.StatusCode.UNKNOWN
    assert caught.value.details() == "Exception iterating requests!"
    assert len(shop.calls) <= 1


def test_nothing_is_kept_of_requests_that_no_policy_may_send_again(shop, shop_channel):
    channel = intercept_channel(shop_channel, CallPolicy(timeout=10.0))
    messages = iter([b"a", b"b"])
    hang = Hang()
    shop.then(hang)
    call = channel.stream_unary(STREAM_UNARY).future(messages)
    assert type(call).__module__ == "grpc._channel"
    call.cancel()


@styles
def test_failback_keeps_a_stream_whole(shop, shop_channel, style):
    policy = CallPolicy(failback=FailbackPolicy(on="UNAVAILABLE", wait=60.0, default=b""))
    with Queues() as queues:
        channel = intercept_channel(shop_channel, policy, queues=queues)
        one, many = channel.stream_unary(STREAM_UNARY), channel.stream_stream(STREAM_STREAM)
        shop.then("UNAVAILABLE")
        requests = iter([b"a", b"b", b"c"])
        match style:
            case "blocking":
                assert one(requests) == b""
            case "future":
                assert one.future(requests).result(WAIT_S) == b""
            case "stream":
                assert list(many(requests)) == [b""]
        assert queues.flush(WAIT_S)
    assert shop.calls[1].requests == [b"a", b"b", b"c"]
    assert shop.calls[1].time_remaining < 61


def test_the_end_of_a_call_lets_go_of_those_who_wait_for_its_requests(shop, shop_channel):
    source = queue.Queue()
    hang = Hang()
    shop.then("UNAVAILABLE", hang)  # the first try's thread reads, the second one's waits for it
    policy = CallPolicy(retry=RetryPolicy(on="UNAVAILABLE", wait=0.0), idempotent=True)
    channel = intercept_channel(shop_channel, policy)
    call = channel.stream_unary(STREAM_UNARY).future(from_queue(source))
    assert hang.begun.wait(WAIT_S)
    feed = call._course.outgoing.feed
    assert feed._live is not None
    call.cancel()
    assert feed._live is None
    source.put(None)


def test_failback_does_not_take_a_stream_whose_end_does_not_come(shop, shop_channel, monkeypatch):
    monkeypatch.setattr("rpcwheel.interceptors._client_requests.GATHER_S", 0.05)
    policy = CallPolicy(failback=FailbackPolicy(on="UNAVAILABLE"))
    source = queue.Queue()
    source.put(b"a")
    with Queues() as queues:
        channel = intercept_channel(shop_channel, policy, queues=queues)
        shop.then("UNAVAILABLE")
        with pytest.raises(grpc.RpcError) as caught:
            channel.stream_unary(STREAM_UNARY)(from_queue(source))
        assert "its requests are not all known" in caught.value.__notes__[0]
        assert queues.pending == 0
    source.put(None)  # whoever reads lets go


# --- The feed alone ---


def test_only_the_live_try_gets_messages():
    feed = Feed(iter([b"a", b"b"]), 1000)
    first = feed.sender()
    assert next(first) == b"a"
    second = feed.sender()
    assert list(first) == []
    assert list(second) == [b"a", b"b"]


def test_what_an_old_try_reads_is_sent_by_the_live_one_even_beyond_the_limit():
    source = queue.Queue()
    feed = Feed(from_queue(source), 3 + OVERHEAD)
    old = feed.sender()
    source.put(b"ab")
    assert next(old) == b"ab"
    got = []
    reader = threading.Thread(target=lambda: got.extend(old))
    reader.start()
    wait_until(lambda: feed._reading)
    live = feed.sender()
    source.put(b"cd")  # too much to keep; `live` has sent nothing yet
    source.put(None)
    assert list(live) == [b"ab", b"cd"]
    reader.join(WAIT_S)
    assert got == []
    assert not feed.replayable


def test_a_thread_that_waits_for_another_ones_reading_is_let_go_at_the_end():
    source = queue.Queue()
    feed = Feed(from_queue(source), 1000)
    ends = []
    for sender in (feed.sender(), feed.sender()):
        thread = threading.Thread(target=lambda sender=sender: ends.append(list(sender)))
        thread.start()
        if not feed._reading:
            wait_until(lambda: feed._reading or ends)
    feed.close()
    source.put(b"late")
    wait_until(lambda: len(ends) == 2)
    assert ends == [[], []]


def test_many_tries_one_after_the_other_lose_nothing():
    messages = [bytes([n]) for n in range(200)]
    feed = Feed(iter(messages), 100_000)
    for count in (3, 50, 0, 199):
        assert list(itertools.islice(feed.sender(), count)) == messages[:count]
    assert list(feed.sender()) == messages
    assert feed.gather("key") == messages
