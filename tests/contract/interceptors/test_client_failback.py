"""Failback through the client interceptors of `grpc`, and the queues of its calls."""

import signal
import threading

import grpc
import pytest
from tenacity import wait_fixed

from fixtures.shop import STREAM_UNARY, UNARY_STREAM, UNARY_UNARY, Fail, Hang
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.call import CallPolicy, MethodPolicy, RetryPolicy
from rpcwheel.errors import FailbackClosed
from rpcwheel.events import CallbackFailed, FailbackGaveUp, FailbackQueued
from rpcwheel.failback import FailbackPolicy
from rpcwheel.interceptors import FailbackQueues, intercept_channel

AUDIT = FailbackPolicy(retry_on="UNAVAILABLE", backoff=wait_fixed(60), default=b"later")


@pytest.fixture
def queues(timer):
    queues = FailbackQueues(timer)
    yield queues
    queues.close(0)


@pytest.fixture
def client(shop_channel, queues):
    def make(failback=AUDIT, **settings):
        policy = CallPolicy(failback=failback, **settings)
        return intercept_channel(shop_channel, policy, queues=queues)

    return make


def test_a_queued_call_is_sent_again_with_its_request_metadata_and_timeout(
    shop, client, queues, timer
):
    shop.then("UNAVAILABLE")
    metadata = (("k", "v"), ("authorization", "stale"))
    assert client().unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S, metadata=metadata) == b"later"
    assert (queues.pending, len(shop.calls)) == (1, 1)
    ((entry,),) = queues.entries().values()
    assert (entry.function, entry.attempts, entry.next_attempt_s) == (UNARY_UNARY, 1, 60.0)
    timer.advance(60.0)
    assert queues.flush(WAIT_S)
    second = shop.calls[1]
    assert second.requests == [b"x"]
    assert second.metadata["k"] == "v"
    assert "authorization" not in second.metadata
    assert second.metadata["grpc-previous-rpc-attempts"] == "1"
    assert second.time_remaining <= 1.1 * WAIT_S


def test_failback_of_a_method_switches_off_the_retries_of_all_methods(
    shop, shop_channel, queues, events
):
    shop.then("UNAVAILABLE")
    policy = CallPolicy(
        retry=RetryPolicy(retry_on="UNAVAILABLE", backoff=0),
        idempotent=True,
        methods={UNARY_UNARY: MethodPolicy(failback=AUDIT)},
    )
    client = intercept_channel(shop_channel, policy, queues=queues)
    assert client.unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S) == b"later"
    assert (queues.pending, len(shop.calls)) == (1, 1)
    assert [type(event) for event in events] == [FailbackQueued]


def test_each_redelivery_has_a_deadline_of_its_own(shop, client, queues):
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    client().unary_unary(UNARY_UNARY)(b"x")
    client(timeout=WAIT_S / 2).unary_unary(UNARY_UNARY)(b"x")
    assert queues.flush(WAIT_S)
    first, second = sorted(seen.time_remaining for seen in shop.calls[2:])
    assert first <= 0.51 * WAIT_S
    assert 0.51 * WAIT_S < second <= 60.6


def test_a_redelivery_that_fails_is_retried_after_the_backoff(shop, client, queues, timer):
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    assert list(client().unary_stream(UNARY_STREAM)(b"x")) == [b"later"]
    timer.advance(60.0)
    wait_until(lambda: len(shop.calls) == 2 and timer.pending == 1)
    timer.advance(60.0)
    wait_until(lambda: queues.pending == 0)
    attempts = [seen.metadata.get("grpc-previous-rpc-attempts") for seen in shop.calls]
    assert attempts == [None, "1", "2"]


def test_an_error_that_retry_on_does_not_name_is_the_callers(shop, client, queues):
    shop.then("NOT_FOUND")
    with pytest.raises(grpc.RpcError) as caught:
        client().unary_unary(UNARY_UNARY)(b"x")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert queues.pending == 0


@pytest.mark.parametrize(
    "failback",
    [
        FailbackPolicy(retry_on="ALREADY_EXISTS"),
        FailbackPolicy(retry_on="UNAVAILABLE", max_attempts=1),
    ],
)
@pytest.mark.parametrize("style", ["blocking", "future"])
def test_the_request_stream_is_not_read_on_for_an_error_that_is_not_queued(
    shop, client, failback, style
):
    gone = threading.Event()

    def requests():
        yield b"a"
        gone.wait(WAIT_S)

    shop.then("UNAVAILABLE")
    method = client(failback).stream_unary(STREAM_UNARY)
    with pytest.raises(grpc.RpcError) as caught:
        method(requests()) if style == "blocking" else method.future(requests()).result(WAIT_S)
    gone.set()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert not hasattr(caught.value, "__notes__")  # else it was gathered, and not known to its end


def test_a_predicate_that_raises_leaves_the_error_unchanged(shop, client, events):
    def broken(error):
        raise RuntimeError("no idea")

    shop.then("NOT_FOUND")
    with pytest.raises(grpc.RpcError):
        client(FailbackPolicy(retry_on=broken)).unary_unary(UNARY_UNARY)(b"x")
    wait_until(lambda: events)
    assert [type(event) for event in events] == [CallbackFailed]


# --- Queues ---


def test_a_policy_has_one_queue_with_its_name_or_its_pattern(queues):
    named, other = (
        FailbackPolicy(retry_on="UNAVAILABLE", name="audit"),
        FailbackPolicy(retry_on="UNAVAILABLE"),
    )
    one = queues.queue_for(named, "/a/*")
    assert queues.queue_for(named, "/b/*") is one
    assert queues.queue_for(other, "/a/*") is queues.queue_for(other, "/b/*") is not one
    queues.queue_for(FailbackPolicy(retry_on="UNAVAILABLE"), "/a/*")  # equal, but another
    assert list(queues.stats()) == ["audit", "/a/*", "/a/* (2)"]


def test_a_queue_has_the_first_pattern_of_its_policy_whichever_call_fails_first(
    shop, shop_channel, queues
):
    twice = FailbackPolicy(retry_on="UNAVAILABLE", backoff=60.0)
    methods = {
        "/test.Shop/*Stream": MethodPolicy(failback=twice),
        "/test.Shop/Stream*": MethodPolicy(failback=twice),
        UNARY_UNARY: MethodPolicy(idempotent=True),
    }
    channel = intercept_channel(
        shop_channel, CallPolicy(failback=AUDIT, methods=methods), queues=queues
    )
    shop.then(*["UNAVAILABLE"] * 3)
    channel.stream_unary(STREAM_UNARY)(iter([b"x"]))
    list(channel.unary_stream(UNARY_STREAM)(b"x"))
    channel.unary_unary(UNARY_UNARY)(b"x")
    queued = {name: stats.queued_total for name, stats in queues.stats().items()}
    assert queued == {"/test.Shop/*Stream": 2, "*": 1}


def test_close_returns_the_calls_that_were_not_delivered(shop, client, queues):
    shop.then(*["UNAVAILABLE"] * 2)
    client().unary_unary(UNARY_UNARY)(b"x")
    client(FailbackPolicy(retry_on="UNAVAILABLE", name="b")).stream_unary(STREAM_UNARY)(
        iter([b"y"])
    )
    assert queues.pending == 2
    assert "pending=2" in repr(queues)
    failed = queues.close(drain_timeout=0)
    assert [(call.function, call.args) for call in failed] == [
        (UNARY_UNARY, (b"x",)),
        (STREAM_UNARY, (b"y",)),
    ]
    assert queues.close() == []


def test_a_queued_call_whose_channel_was_closed_is_given_up_with_a_reason(shop, queues, events):
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    received = []
    policy = CallPolicy(failback=AUDIT.model_copy(update={"dead_letter": received.append}))
    with grpc.insecure_channel(shop.target) as bare:
        channel = intercept_channel(bare, policy, queues=queues)
        channel.unary_unary(UNARY_UNARY)(b"x")
        list(channel.unary_stream(UNARY_STREAM)(b"x"))
    assert queues.flush(WAIT_S)
    wait_until(lambda: sum(isinstance(event, FailbackGaveUp) for event in events) == 2)
    reasons = {event.reason for event in events if isinstance(event, FailbackGaveUp)}
    assert reasons == {failed.reason for failed in received}
    assert [reason.partition(";")[0] for reason in reasons] == ["its channel was closed"]


def test_close_does_not_return_calls_that_were_given_up_before(shop, client, queues):
    shop.then("UNAVAILABLE", "NOT_FOUND")
    client().unary_unary(UNARY_UNARY)(b"x")
    assert queues.flush(WAIT_S)
    (stats,) = queues.stats().values()
    assert (queues.close(), stats.gave_up) == ([], 1)


def test_close_delivers_the_queued_calls(shop, client, queues):
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    client().unary_unary(UNARY_UNARY)(b"x")
    client(FailbackPolicy(retry_on="UNAVAILABLE")).unary_unary(UNARY_UNARY)(b"y")
    assert queues.close(WAIT_S) == []
    assert {seen.requests[0] for seen in shop.calls[2:]} == {b"x", b"y"}


def test_a_call_that_fails_after_close_raises_failback_closed(shop, client, queues):
    queues.close()
    shop.then("UNAVAILABLE")
    with pytest.raises(FailbackClosed) as caught:
        client().unary_unary(UNARY_UNARY)(b"x")
    assert caught.value.__cause__.code() is grpc.StatusCode.UNAVAILABLE


class Outer(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Reads the code of each call, as metrics do."""

    def __init__(self) -> None:
        self.codes = []

    def intercept_unary_unary(self, continuation, details, request):
        call = continuation(details, request)
        self.codes.append(call.code())
        return call

    intercept_unary_stream = intercept_unary_unary


@pytest.mark.parametrize(
    ("make", "wrapped"),
    [
        (lambda channel: channel.unary_unary(UNARY_UNARY)(b"x"), False),
        (lambda channel: channel.unary_unary(UNARY_UNARY).with_call(b"x"), True),
        (lambda channel: channel.unary_unary(UNARY_UNARY).future(b"x").result(WAIT_S), True),
        (lambda channel: list(channel.unary_stream(UNARY_STREAM)(b"x")), False),
        (lambda channel: list(channel.unary_stream(UNARY_STREAM)(b"x")), True),
    ],
    ids=["blocking", "with_call-wrapped", "future-wrapped", "stream", "stream-wrapped"],
)
def test_a_call_that_cannot_be_queued_fails_with_an_rpc_error(shop, client, queues, make, wrapped):
    queues.close()
    shop.then(Fail("UNAVAILABLE", "gone", (("k", "v"),)))
    channel, outer = client(), Outer()
    with pytest.raises(grpc.RpcError) as caught:
        make(grpc.intercept_channel(channel, outer) if wrapped else channel)
    error = caught.value
    assert isinstance(error, FailbackClosed)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert ("k", "v") in error.trailing_metadata()
    assert str(error) == error.details()
    assert "was not queued" in str(error)
    assert outer.codes == [grpc.StatusCode.UNAVAILABLE] * wrapped


def test_the_end_of_a_with_statement_closes_the_queues(shop, shop_channel):
    with FailbackQueues() as queues:
        channel = intercept_channel(shop_channel, CallPolicy(failback=AUDIT), queues=queues)
        shop.then("UNAVAILABLE")
        channel.unary_unary(UNARY_UNARY)(b"x")
    assert len(shop.calls) == 2


def test_a_request_is_kept_as_it_was_when_the_call_failed(shop, shop_channel, queues):
    channel = intercept_channel(shop_channel, CallPolicy(failback=AUDIT), queues=queues)
    member = channel.unary_unary(UNARY_UNARY, request_serializer=bytes)
    shop.then("UNAVAILABLE")
    request = [1, 2]
    member(request)
    request.append(3)
    assert queues.flush(WAIT_S)
    assert shop.calls[1].requests == [b"\x01\x02"]


class Interrupted(Exception):
    """The exception of a program's own handler for Ctrl-C."""


def test_flush_of_several_queues_can_be_interrupted(shop, shop_channel, queues):
    def interrupt(*_):
        raise Interrupted

    other = FailbackPolicy(retry_on="UNAVAILABLE", backoff=60.0, name="other")
    methods = {UNARY_STREAM: {"failback": other}}
    channel = intercept_channel(
        shop_channel, CallPolicy(failback=AUDIT, methods=methods), queues=queues
    )
    shop.then(*["UNAVAILABLE"] * 4)
    channel.unary_unary(UNARY_UNARY)(b"x")
    list(channel.unary_stream(UNARY_STREAM)(b"x"))
    before = signal.signal(signal.SIGUSR1, interrupt)

    def ring():
        wait_until(lambda: len(shop.calls) >= 4)  # both retries are on their way, or have failed
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    bell = threading.Thread(target=ring)
    try:
        bell.start()
        with pytest.raises(Interrupted):
            queues.flush()  # the retries fail too, so flush would never end
    finally:
        bell.join()
        signal.signal(signal.SIGUSR1, before)
    assert queues.pending == 2


def test_close_drains_all_queues_at_the_same_time(shop, shop_channel, queues):
    policies = {
        f"/test.Shop/{kind}": {"failback": FailbackPolicy(retry_on="UNAVAILABLE", backoff=60.0)}
        for kind in ("UnaryUnary", "StreamUnary", "UnaryStream")
    }
    channel = intercept_channel(shop_channel, CallPolicy(methods=policies), queues=queues)
    hangs = [Hang() for _ in range(3)]
    shop.then(*["UNAVAILABLE"] * 3, *hangs)
    channel.unary_unary(UNARY_UNARY)(b"x")
    channel.stream_unary(STREAM_UNARY)(iter([b"x"]))
    list(channel.unary_stream(UNARY_STREAM)(b"x"))

    def release():
        if all(hang.begun.wait(WAIT_S) for hang in hangs):
            for seen in shop.calls:
                seen.ended.set()  # the server answers

    thread = threading.Thread(target=release)
    thread.start()
    assert queues.close(drain_timeout=WAIT_S) == []
    thread.join()
