"""Request streams of `grpc` that several attempts may send."""

import itertools
import queue
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import grpc

from fixtures.counted_messages import CountedMessage
from fixtures.interrupts import interrupted_at_each_call
from fixtures.timers import no_new_threads, run_threads
from fixtures.waiting import WAIT_S, in_thread, wait_until
from rpcwheel._concurrency.executor import SHARED_THREADS
from rpcwheel._grpc.calls import Details
from rpcwheel._grpc.finished import FinishedError
from rpcwheel.call import RetryPolicy
from rpcwheel.call.client_state import ClientState
from rpcwheel.call.policy import CallPolicy
from rpcwheel.call.replay import OVERHEAD
from rpcwheel.call.sync_call import ClientCall
from rpcwheel.call.sync_requests import RequestStream
from rpcwheel.rpc import Kind


def from_queue(source):
    """An iterator that blocks until the queue has a message; None ends it."""
    return iter(lambda: source.get(timeout=WAIT_S), None)


def test_only_the_current_attempt_gets_messages():
    requests = RequestStream(iter([b"a", b"b"]), 1000)
    first = requests.for_attempt()
    assert next(first) == b"a"
    second = requests.for_attempt()
    assert list(first) == []
    assert list(second) == [b"a", b"b"]


def test_other_threads_read_requests_after_a_method_that_was_interrupted():
    """Else gRPC's thread that sends the requests would wait forever."""

    def use():
        requests.for_attempt()
        requests.close()

    requests = RequestStream(iter([b"a"]), 1000)
    for _ in interrupted_at_each_call(use):
        run_threads(requests.close)


def test_a_message_read_by_an_earlier_attempt_goes_to_the_current_one():
    source = queue.Queue()
    requests = RequestStream(from_queue(source), 3 + OVERHEAD)
    old = requests.for_attempt()
    source.put(b"ab")
    assert next(old) == b"ab"
    reading = in_thread(list, old)
    wait_until(lambda: requests._reading)
    current = requests.for_attempt()
    source.put(b"cd")  # too much to keep; `current` has sent nothing yet
    source.put(None)
    assert list(current) == [b"ab", b"cd"]
    assert reading.result(WAIT_S) == []
    assert not requests.buffer.replayable


def test_a_thread_that_waits_for_another_reader_returns_at_the_end():
    source = queue.Queue()
    requests = RequestStream(from_queue(source), 1000)
    ends = []
    for sender in (requests.for_attempt(), requests.for_attempt()):
        thread = threading.Thread(target=lambda sender=sender: ends.append(list(sender)))
        thread.start()
        if not requests._reading:
            wait_until(lambda: requests._reading or ends)
    requests.close()
    source.put(b"late")
    wait_until(lambda: len(ends) == 2)
    assert ends == [[], []]


def test_many_attempts_lose_no_message():
    messages = [bytes([n]) for n in range(200)]
    requests = RequestStream(iter(messages), 100_000)
    for count in (3, 50, 0, 199):
        assert list(itertools.islice(requests.for_attempt(), count)) == messages[:count]
    assert list(requests.for_attempt()) == messages
    assert requests.read_rest() == messages


def test_iterators_that_wait_for_data_do_not_prevent_others_from_being_read():
    sources = [queue.Queue() for _ in range(2 * SHARED_THREADS)]
    streams = [RequestStream(from_queue(source), 1000) for source in sources]
    with ThreadPoolExecutor(len(streams)) as threads:
        reads = [threads.submit(stream.read_rest) for stream in streams]
        wait_until(lambda: all(stream._reading for stream in streams))
        for source in sources:
            source.put(None)
        assert [read.result() for read in reads] == [[] for _ in streams]


def test_a_closed_stream_keeps_no_messages_while_its_iterator_waits(set_limit):
    source, copies = queue.Queue(), weakref.WeakSet()
    requests = RequestStream(from_queue(source), 1000)
    source.put(CountedMessage(copies))
    next(requests.for_attempt())
    set_limit("call.failed_calls.READ_TIMEOUT_S", 0.001)
    assert requests.read_rest() is None
    requests.close()
    wait_until(lambda: not copies)
    source.put(CountedMessage(copies))
    source.put(None)
    wait_until(lambda: not requests._reading)
    assert not copies


def test_requests_are_not_read_if_no_thread_can_be_started():
    with no_new_threads():
        assert RequestStream(iter([b"a"]), 1000).read_rest() is None


def test_requests_whose_iterator_raises_are_not_all_known():
    def broken():
        yield b"a"
        raise ValueError("no more")

    assert RequestStream(broken(), 1000).read_rest() is None


def test_a_call_whose_buffer_overflows_during_the_decision_is_not_retried(events):
    sent = []

    def start(_, requests):
        sent.append(requests)
        next(requests)
        return FinishedError(grpc.StatusCode.UNAVAILABLE, "down")

    def read_more(_):
        """The thread of the first attempt, which still reads requests."""
        next(sent[0])
        return 0

    retry = RetryPolicy(retry_on="UNAVAILABLE", backoff=read_more, replay_buffer_bytes=100)
    policy = CallPolicy(idempotent=True, retry=retry)
    state = ClientState(policy, timer=None, queue_of=lambda *_: None)
    details = Details("/shop.Orders/Push", None, None, None, None, None)
    requests = iter([b"a", b"x" * 1000])
    ended = ClientCall(state, Kind.STREAM_UNARY, start, details, requests).run()
    assert ended.code() is grpc.StatusCode.UNAVAILABLE
    assert len(sent) == 1
    assert "not buffered" in events[-1].reason
