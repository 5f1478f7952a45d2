"""Request streams: sent again whole or not at all, whichever thread is in the user's iterator."""

import itertools
import queue
import threading

import grpc
import pytest

from fixtures.shop import STREAM_UNARY
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.call import CallPolicy
from rpcwheel.call.replay import OVERHEAD
from rpcwheel.call.sync_requests import RequestStream
from rpcwheel.failback import FailbackPolicy
from rpcwheel.interceptors import FailbackQueues, intercept_channel


def from_queue(source):
    """Messages as they come, until None: a generator that blocks."""
    return iter(lambda: source.get(timeout=WAIT_S), None)


def test_failback_does_not_queue_a_stream_that_does_not_end_in_time(
    shop, shop_channel, monkeypatch
):
    monkeypatch.setattr("rpcwheel.call.sync_requests.READ_TIMEOUT_S", 0.05)
    policy = CallPolicy(failback=FailbackPolicy(retry_on="UNAVAILABLE"))
    source = queue.Queue()
    source.put(b"a")
    with FailbackQueues() as queues:
        channel = intercept_channel(shop_channel, policy, queues=queues)
        shop.then("UNAVAILABLE")
        with pytest.raises(grpc.RpcError) as caught:
            channel.stream_unary(STREAM_UNARY)(from_queue(source))
        assert "not all requests are known" in caught.value.__notes__[0]
        assert queues.pending == 0
    source.put(None)  # whoever reads lets go


# --- The feed alone ---


def test_only_the_current_attempt_gets_messages():
    feed = RequestStream(iter([b"a", b"b"]), 1000)
    first = feed.for_attempt()
    assert next(first) == b"a"
    second = feed.for_attempt()
    assert list(first) == []
    assert list(second) == [b"a", b"b"]


def test_a_message_read_by_an_earlier_attempt_goes_to_the_current_one():
    source = queue.Queue()
    feed = RequestStream(from_queue(source), 3 + OVERHEAD)
    old = feed.for_attempt()
    source.put(b"ab")
    assert next(old) == b"ab"
    got = []
    reader = threading.Thread(target=lambda: got.extend(old))
    reader.start()
    wait_until(lambda: feed._reading)
    live = feed.for_attempt()
    source.put(b"cd")  # too much to keep; `live` has sent nothing yet
    source.put(None)
    assert list(live) == [b"ab", b"cd"]
    reader.join(WAIT_S)
    assert got == []
    assert not feed.replayable


def test_a_thread_that_waits_for_another_reader_returns_at_the_end():
    source = queue.Queue()
    feed = RequestStream(from_queue(source), 1000)
    ends = []
    for sender in (feed.for_attempt(), feed.for_attempt()):
        thread = threading.Thread(target=lambda sender=sender: ends.append(list(sender)))
        thread.start()
        if not feed._reading:
            wait_until(lambda: feed._reading or ends)
    feed.close()
    source.put(b"late")
    wait_until(lambda: len(ends) == 2)
    assert ends == [[], []]


def test_many_attempts_lose_no_message():
    messages = [bytes([n]) for n in range(200)]
    feed = RequestStream(iter(messages), 100_000)
    for count in (3, 50, 0, 199):
        assert list(itertools.islice(feed.for_attempt(), count)) == messages[:count]
    assert list(feed.for_attempt()) == messages
    assert feed.read_rest("key") == messages
