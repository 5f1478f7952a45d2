"""Calls and attempts of clients are counted, each once, whatever their kind, style and end are.

`test_as_grpc` checks this too, for each end of a call that a channel without policies can have.
"""

import contextlib
import functools
import gc
import threading

import grpc
import grpc.experimental
import pytest

import rpcwheel
from fixtures.call_counts import TYPES, codes_of
from fixtures.client_interceptors import interceptor
from fixtures.clients import in_every_way
from fixtures.shop import UNARY_STREAM, UNARY_UNARY, Fail, Silent
from fixtures.small_servers import METHOD, serving
from fixtures.waiting import WAIT_S, Gate, wait_until
from fixtures.worlds import METHODS, RETRY
from rpcwheel.call import CallPolicy, DeadlinePolicy, DefaultResponsePolicy, HedgingPolicy
from rpcwheel.events import CallbackFailed
from rpcwheel.failback import FailbackPolicy
from rpcwheel.interceptors import intercept_channel

POLICIES = {
    "plain": {"retry": None, "timeout": 60.0},
    "retry": {"retry": RETRY, "idempotent": True},
}
each_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
each_api = pytest.mark.parametrize("api", ["channel", "interceptors"])
each_request = pytest.mark.parametrize("streamed", [False, True], ids=["message", "stream"])

HEDGING = HedgingPolicy(delay=0, max_attempts=3, retry_budget=None)


@pytest.fixture(autouse=True)
def _counting(call_counts):
    """Calls are counted from before a test opens its first channel."""


def request_of(streamed: bool):
    """The request of `Client.begin`: a message, or a stream."""
    return {"requests": iter([b"a", b"b"])} if streamed else {}


def end_of(client, channel, **options) -> None:
    """Make a call, and read its responses to the end."""
    with contextlib.suppress(grpc.RpcError):
        client.ask(channel, **options)


def check(counts, kind, calls, attempts=None) -> None:
    """Check the calls and attempts by status code, when all have ended."""
    assert codes_of(counts.client) == calls
    assert codes_of(counts.attempts) == (calls if attempts is None else attempts)
    for side in (counts.client, counts.attempts):
        methods = {(one.method, one.kind) for one in side.totals()}
        assert methods <= {(METHODS[kind], TYPES[kind])}


def kind_of(client, streamed: bool) -> str:
    return client.kind_of_stream if streamed else client.kind


@pytest.mark.parametrize(("policy", "streamed"), [("plain", True), ("retry", False)])
def test_calls_that_succeed_and_fail(shop, call_counts, client, streamed, policy):
    channel = client.open(api="interceptors", **POLICIES[policy])
    for _ in range(3):
        end_of(client, channel, **request_of(streamed))
    shop.then(Fail("NOT_FOUND", read=True))
    end_of(client, channel, **request_of(streamed))
    check(call_counts, kind_of(client, streamed), {"OK": 3, "NOT_FOUND": 1})


@pytest.mark.parametrize(
    ("settings", "timeout", "calls", "attempts"),
    [
        (
            {"default_response": DefaultResponsePolicy(on="UNAVAILABLE", default=b"default")},
            WAIT_S,
            {"OK": 1},
            {"UNAVAILABLE": 1},
        ),
        (
            {"failback": FailbackPolicy(retry_on="UNAVAILABLE", backoff=60.0)},
            WAIT_S,
            {"OK": 1},
            {"UNAVAILABLE": 1, "OK": 1},
        ),
        ({}, 0.0, {"DEADLINE_EXCEEDED": 1}, {}),
    ],
    ids=["default response", "failback", "too late"],
)
@each_request
@in_every_way
def test_a_call_and_its_attempts_may_end_differently(
    shop, call_counts, client, streamed, settings, timeout, calls, attempts
):
    shop.then(Fail("UNAVAILABLE", read=True))
    queues = client.world.do(client.world.interceptors.FailbackQueues)
    channel = client.open(queues=queues, **settings, retry=None if settings else RETRY)
    end_of(client, channel, timeout=timeout, **request_of(streamed))
    assert client.world.do(queues.close, WAIT_S) == []  # a delivery of failback is an attempt
    check(call_counts, kind_of(client, streamed), calls, attempts)


@pytest.mark.parametrize(
    ("client", "api"),
    [
        ("sync blocking", "channel"),
        ("sync future", "channel"),
        ("sync future", "interceptors"),
        ("aio unary", "channel"),
        ("aio unary", "interceptors"),
    ],
    indirect=["client"],
)
@pytest.mark.filterwarnings("ignore:.*hedges only")
def test_hedges_that_are_not_needed_are_canceled_attempts(shop, call_counts, client, api):
    shop.then(Silent(), Silent())
    assert client.ask(client.open(api=api, retry=None, hedging=HEDGING)) == b"x"
    check(call_counts, "unary_unary", {"OK": 1}, {"OK": 1, "CANCELLED": 2})


def test_a_future_that_is_dropped_as_soon_as_its_result_is_known(call_counts):
    gate, go_on = Gate(), threading.Event()

    def delay_later_callbacks(continuation, details, request):
        call = continuation(details, request)
        call.add_callback(functools.partial(go_on.wait, WAIT_S))
        return call

    served = serving(grpc.unary_unary_rpc_method_handler(gate))
    with served as target, grpc.insecure_channel(target) as bare:
        inner = grpc.intercept_channel(bare, interceptor(delay_later_callbacks))
        channel = intercept_channel(inner, CallPolicy(timeout=60.0))
        call = channel.unary_unary(METHOD).future(b"x", timeout=WAIT_S)
        gate.opened.set()  # not before: the callback of the interceptor must be the first
        assert call.result() == b"x"
        del call
        go_on.set()
        assert codes_of(call_counts.client) == codes_of(call_counts.attempts) == {"OK": 1}


@pytest.mark.parametrize(
    ("client", "policy"),
    [
        ("sync future", {}),
        ("sync stream", {}),
        ("sync stream", POLICIES["plain"]),
        ("sync stream", {"retry": None, "timeout": DeadlinePolicy(slow_call_threshold=60.0)}),
        ("aio stream", {}),  # without any policy it is gRPC's own, which is not canceled since 1.83
        ("aio stream", {"retry": None, "concurrency": 1}),
    ],
    indirect=["client"],
)
@each_api
@each_request
def test_a_call_that_its_caller_drops_is_canceled(shop, call_counts, client, streamed, api, policy):
    shop.then(silent := Silent(after=1))
    call = client.begin(client.open(api=api, **policy), **request_of(streamed))
    assert silent.begun.wait(WAIT_S)
    if client.style == "stream":
        assert call.read() is not None
    del call
    client.world.do(gc.collect)
    assert shop.calls[0].ended.wait(WAIT_S)
    check(call_counts, kind_of(client, streamed), {"CANCELLED": 1})


def test_a_call_with_call_options(shop, call_counts, client):
    shop.then("UNAVAILABLE")
    channel = client.open()
    with rpcwheel.call_options(retry=None):
        client.refused(channel)
    check(call_counts, client.kind, {"UNAVAILABLE": 1})


@each_policy
def test_a_call_on_a_closed_channel_is_canceled(call_counts, client, policy):
    channel = client.open(api="channel", **policy)
    client.world.do(channel.close)
    with pytest.raises(client.world.closed_error):
        client.ask(channel)
    check(call_counts, client.kind, {"CANCELLED": 1})


@each_policy
@pytest.mark.parametrize(
    ("error", "code"), [(ZeroDivisionError(), "UNKNOWN"), (KeyboardInterrupt(), "CANCELLED")]
)
def test_an_exception_without_a_status(shop_channel, call_counts, policy, error, code):
    def fail(*_):
        raise error

    inner = grpc.intercept_channel(shop_channel, interceptor(fail))
    method = intercept_channel(inner, CallPolicy(**policy)).unary_unary(UNARY_UNARY)
    with pytest.raises(type(error)):
        method(b"x", timeout=WAIT_S)
    check(call_counts, "unary_unary", {code: 1})


def read_fail_and_drop(shop, method):
    """Make a call that succeeds, one that fails, and one that is dropped."""
    assert list(method(b"abc", timeout=WAIT_S)) == [b"a", b"b", b"c"]
    shop.then(Fail("ABORTED"), Silent(after=1))
    with pytest.raises(grpc.RpcError):
        list(method(b"abc", timeout=WAIT_S))
    assert next(method(b"abc", timeout=WAIT_S)) == b"a"
    gc.collect()
    return {"OK": 1, "ABORTED": 1, "CANCELLED": 1}


@each_policy
def test_a_generator_of_an_inner_interceptor_is_passed_on_and_reported_once(
    shop, shop_channel, call_counts, events, policy
):
    """Only if calls are retried, which a generator can not be."""

    def generate(continuation, details, request):
        yield from continuation(details, request)

    inner = grpc.intercept_channel(shop_channel, interceptor(generate, "unary_stream"))
    method = intercept_channel(inner, CallPolicy(**policy)).unary_stream(UNARY_STREAM)
    check(call_counts, "unary_stream", read_fail_and_drop(shop, method))
    if policy["retry"] is not None:
        wait_until(lambda: events.of(CallbackFailed))
        (event,) = events.of(CallbackFailed)
        assert (event.subject, event.callback) == (UNARY_STREAM, "inner interceptor")
        assert "no retry" in str(event.error)


@each_policy
def test_a_single_threaded_stream(shop, call_counts, timer, policy):
    option = (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1)
    slow = {"timeout": DeadlinePolicy(timeout=WAIT_S, slow_call_threshold=WAIT_S / 2)}
    with grpc.insecure_channel(shop.target, options=[option]) as bare:
        channel = intercept_channel(bare, CallPolicy(**policy | slow), timer=timer)
        method = channel.unary_stream(UNARY_STREAM)
        codes = read_fail_and_drop(shop, method)
        check(call_counts, "unary_stream", codes)
        wait_until(lambda: timer.pending == 0)  # no call is watched any more
        stream = method(b"ab")
        with pytest.raises(grpc.experimental.UsageError):
            stream.code()
        assert list(stream) == [b"a", b"b"]
        assert stream.code() is grpc.StatusCode.OK
