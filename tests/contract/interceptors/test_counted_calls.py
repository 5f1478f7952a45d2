"""Calls and attempts of clients are counted, each once, whatever their kind, style and end are."""

import asyncio
import functools
import gc
import threading

import grpc
import grpc.experimental
import pytest

import rpcwheel
from fixtures.call_counts import TYPES, codes_of, replace_call_counts
from fixtures.callers import (
    EVERY_CALLER,
    KINDS,
    PATH,
    AioCaller,
    AioChannelCaller,
    SyncCaller,
    SyncChannelCaller,
    open_caller,  # noqa: F401
)
from fixtures.shop import Fail, Hang, Silent, aio_shop_channel  # noqa: F401
from fixtures.small_servers import METHOD, Gate, serving
from fixtures.waiting import WAIT_S
from rpcwheel.call import CallPolicy, DefaultResponsePolicy, HedgingPolicy, RetryPolicy
from rpcwheel.failback import FailbackPolicy
from rpcwheel.interceptors import aio, sync
from rpcwheel.interceptors import client as client_module

PLAIN = CallPolicy(timeout=60.0)
RETRY = CallPolicy(
    retry=RetryPolicy(retry_on="UNAVAILABLE", backoff=0, retry_budget=None), idempotent=True
)
DEFAULT = CallPolicy(default_response=DefaultResponsePolicy(on="UNAVAILABLE", default=b"default"))
LATER = CallPolicy(failback=FailbackPolicy(retry_on="UNAVAILABLE", backoff=60.0))
HEDGING = HedgingPolicy(delay=0, max_attempts=3, retry_budget=None)

STREAMS = ["unary_stream", "stream_stream"]

POLICIES = {"plain": PLAIN, "retry": RETRY}

each_caller = pytest.mark.parametrize("caller", EVERY_CALLER)
each_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
each_caller_and_kind = pytest.mark.parametrize(
    ("caller", "kind", "policy"),
    [
        (caller, kind, (PLAIN, RETRY)[(i + j) % 2])
        for i, caller in enumerate(EVERY_CALLER)
        for j, kind in enumerate(KINDS)
    ],
)
"""Each client API with each kind of call; the policies are paired with both."""

PAIRS = [
    (SyncCaller, "unary_unary", PLAIN),
    (SyncCaller, "stream_stream", RETRY),
    (SyncChannelCaller, "unary_stream", PLAIN),
    (SyncChannelCaller, "stream_unary", RETRY),
    (AioCaller, "stream_unary", PLAIN),
    (AioCaller, "unary_stream", RETRY),
    (AioChannelCaller, "stream_stream", PLAIN),
    (AioChannelCaller, "unary_unary", RETRY),
]
"""Each client API with one response and with a stream of them, and with both policies."""

paired = pytest.mark.parametrize(("caller", "kind", "policy"), PAIRS)
paired_with_own_policy = pytest.mark.parametrize(
    ("caller", "kind"), [(caller, kind) for caller, kind, _ in PAIRS]
)


@pytest.fixture
def client_of(shop, call_counts, open_caller):  # noqa: F811
    """Opens callers of `shop` whose calls are counted."""

    def open_one(caller, policy, **given):
        return open_caller(caller, shop.target, policy, **given)

    return open_one


def check(counts, kind, calls, attempts) -> None:
    """Check the calls and attempts by status code, when all have ended."""
    assert codes_of(counts.client) == calls
    assert codes_of(counts.attempts) == attempts
    for side in (counts.client, counts.attempts):
        assert {(one.method, one.kind) for one in side.totals()} <= {(PATH[kind], TYPES[kind])}


@each_caller_and_kind
def test_calls_that_succeed_and_fail(shop, call_counts, client_of, kind, caller, policy):
    calls = client_of(caller, policy)
    for _ in range(3):
        assert calls.call(kind).code == "OK"
    shop.then(Fail("NOT_FOUND", read=True))
    calls.call(kind)
    codes = {"OK": 3, "NOT_FOUND": 1}
    check(call_counts, kind, codes, codes)


REFUSED = Fail("UNAVAILABLE", read=True)


@pytest.mark.parametrize(
    ("deeds", "policy", "timeout", "calls", "attempts"),
    [
        # grpc.aio may report INTERNAL before the status of the server.
        (["NOT_FOUND"], RETRY, WAIT_S, {"NOT_FOUND": 1}, {"NOT_FOUND": 1}),
        ([REFUSED] * 2, RETRY, WAIT_S, {"OK": 1}, {"UNAVAILABLE": 2, "OK": 1}),
        ([REFUSED], DEFAULT, WAIT_S, {"OK": 1}, {"UNAVAILABLE": 1}),
        ([REFUSED], LATER, WAIT_S, {"OK": 1}, {"UNAVAILABLE": 1, "OK": 1}),
        ([], RETRY, 0.0, {"DEADLINE_EXCEEDED": 1}, {}),
    ],
    ids=["before its requests are read", "retries", "default response", "failback", "too late"],
)
@paired_with_own_policy
def test_a_call_and_its_attempts_may_end_differently(
    shop, call_counts, client_of, kind, caller, deeds, policy, timeout, calls, attempts
):
    shop.then(*deeds)
    client = client_of(caller, policy)
    client.call(kind, timeout=timeout)
    assert client.flush()  # a delivery of failback is an attempt
    counted = call_counts, kind, calls, attempts
    if caller.world == "aio":  # the loop runs while the status of the server is awaited
        client.run(asyncio.to_thread(check, *counted))
    else:
        check(*counted)


@each_caller
def test_hedges_that_are_not_needed_are_canceled_attempts(shop, call_counts, client_of, caller):
    shop.then(Hang(), Hang())
    policy = CallPolicy(hedging=HEDGING, idempotent=True)
    if caller is SyncCaller:  # hedges calls of `.future()` only
        with pytest.warns(UserWarning, match="hedges only"):
            calls = client_of(caller, policy)
        done = calls.future("unary_unary", lambda _: None)
    else:
        done = client_of(caller, policy).call("unary_unary")
    assert done.code == "OK"
    check(call_counts, "unary_unary", {"OK": 1}, {"OK": 1, "CANCELLED": 2})


@each_policy
@pytest.mark.parametrize("caller", [SyncCaller, SyncChannelCaller])
@pytest.mark.parametrize("kind", ["unary_unary", "stream_unary"])
def test_a_future(shop, call_counts, client_of, kind, caller, policy):
    calls = client_of(caller, policy)
    assert calls.future(kind, lambda _: None).code == "OK"
    shop.then(Fail("ABORTED", read=True))
    assert calls.future(kind, lambda _: None).code == "ABORTED"
    check(call_counts, kind, {"OK": 1, "ABORTED": 1}, {"OK": 1, "ABORTED": 1})


class Delaying(grpc.UnaryUnaryClientInterceptor):
    """An inner interceptor that delays the callbacks after its own."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def intercept_unary_unary(self, continuation, details, request):
        call = continuation(details, request)
        call.add_callback(functools.partial(self.go_on.wait, WAIT_S))
        return call


def test_a_future_that_is_dropped_as_soon_as_its_result_is_known(call_counts):
    gate, inner = Gate(), Delaying()
    served = serving(grpc.unary_unary_rpc_method_handler(gate))
    with served as target, grpc.insecure_channel(target) as bare:
        channel = sync.intercept_channel(grpc.intercept_channel(bare, inner), PLAIN)
        call = channel.unary_unary(METHOD).future(b"x", timeout=WAIT_S)
        gate.opened.set()  # not before: the callback of the interceptor must be the first
        assert call.result() == b"x"
        del call
        inner.go_on.set()
        assert codes_of(call_counts.client) == codes_of(call_counts.attempts) == {"OK": 1}


@paired
def test_a_call_that_its_caller_cancels(shop, call_counts, client_of, kind, caller, policy):
    hang = Hang()
    shop.then(hang)
    client_of(caller, policy).cancel(kind, lambda: hang.begun.wait(WAIT_S))
    check(call_counts, kind, {"CANCELLED": 1}, {"CANCELLED": 1})


@pytest.mark.parametrize(
    ("caller", "policy"),
    [
        *((caller, RETRY) for caller in EVERY_CALLER),
        *((caller, PLAIN) for caller in (SyncCaller, SyncChannelCaller)),  # else gRPC's own call,
    ],  # which grpc.aio 1.85 does not cancel
)
@pytest.mark.parametrize("kind", STREAMS)
def test_a_response_stream_that_its_caller_drops_is_canceled(
    shop, call_counts, client_of, kind, caller, policy
):
    shop.then(Silent(after=1))
    calls = client_of(caller, policy)
    calls.drop(kind)
    gc.collect()
    if caller.world == "aio":
        calls.run(asyncio.sleep(0))
    assert shop.calls[0].ended.wait(WAIT_S)
    check(call_counts, kind, {"CANCELLED": 1}, {"CANCELLED": 1})


def test_a_call_with_call_options(shop, call_counts, client):
    shop.then("UNAVAILABLE")
    channel = client.open()
    with rpcwheel.call_options(retry=None):
        client.refused(channel)
    check(call_counts, client.kind, {"UNAVAILABLE": 1}, {"UNAVAILABLE": 1})


@pytest.mark.parametrize("settings", [{}, {"retry": None, "timeout": 60.0}])
def test_a_call_on_a_closed_channel_is_canceled(call_counts, client, settings):
    channel = client.open(api="channel", **settings)
    client.world.do(channel.close)
    with pytest.raises(client.world.closed_error):
        client.ask(channel)
    check(call_counts, client.kind, {"CANCELLED": 1}, {"CANCELLED": 1})


class Raising(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """An inner interceptor that raises."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def _raise(self, continuation, details, request):
        raise self._error

    intercept_unary_unary = intercept_unary_stream = _raise


@each_policy
@pytest.mark.parametrize(
    ("error", "code"), [(ZeroDivisionError(), "UNKNOWN"), (KeyboardInterrupt(), "CANCELLED")]
)
def test_an_exception_without_a_status(shop_channel, call_counts, policy, error, code):
    inner = grpc.intercept_channel(shop_channel, Raising(error))
    method = sync.intercept_channel(inner, policy).unary_unary(PATH["unary_unary"])
    with pytest.raises(type(error)):
        method(b"x", timeout=WAIT_S)
    check(call_counts, "unary_unary", {code: 1}, {code: 1})


class Generator(grpc.UnaryStreamClientInterceptor):
    """An inner interceptor that returns a generator in place of a call."""

    def intercept_unary_stream(self, continuation, details, request):
        yield from continuation(details, request)


@each_policy
def test_a_generator_of_an_inner_interceptor(shop, shop_channel, call_counts, policy):
    inner = grpc.intercept_channel(shop_channel, Generator())
    method = sync.intercept_channel(inner, policy).unary_stream(PATH["unary_stream"])
    assert list(method(b"abc", timeout=WAIT_S)) == [b"a", b"b", b"c"]
    shop.then(Fail("ABORTED", after=1))
    with pytest.raises(grpc.RpcError):
        list(method(b"abc", timeout=WAIT_S))
    assert next(method(b"abc", timeout=WAIT_S)) == b"a"  # and drop it
    codes = {"OK": 1, "ABORTED": 1, "CANCELLED": 1}
    check(call_counts, "unary_stream", codes, codes)


SINGLE_THREADED = [(grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1)]


@each_policy
def test_a_single_threaded_stream(shop, call_counts, policy):
    with grpc.insecure_channel(shop.target, options=SINGLE_THREADED) as bare:
        method = sync.intercept_channel(bare, policy).unary_stream(PATH["unary_stream"])
        assert list(method(b"abc", timeout=WAIT_S)) == [b"a", b"b", b"c"]
        shop.then(Fail("ABORTED"))
        with pytest.raises(grpc.RpcError):
            list(method(b"abc", timeout=WAIT_S))
        shop.then(Silent(after=1))
        assert next(method(b"abc", timeout=WAIT_S)) == b"a"  # and drop it
        gc.collect()
        codes = {"OK": 1, "ABORTED": 1, "CANCELLED": 1}
        check(call_counts, "unary_stream", codes, codes)


@pytest.mark.parametrize(
    ("caller", "place", "kind"),
    [
        (SyncCaller, "outer", "unary_unary"),
        (SyncCaller, "inner", "stream_stream"),
        (SyncChannelCaller, "outer", "unary_stream"),
        (SyncChannelCaller, "inner", "unary_unary"),
        (AioCaller, "outer", "stream_unary"),
        (AioCaller, "inner", "unary_stream"),
        (AioChannelCaller, "inner", "stream_stream"),  # none can be outside
    ],
)
def test_with_the_interceptors_of_opentelemetry(shop, call_counts, client_of, kind, caller, place):
    pytest.importorskip("opentelemetry.instrumentation.grpc")
    from fixtures.foreign_opentelemetry import Theirs

    calls = client_of(caller, PLAIN, **{place: Theirs()})
    assert calls.call(kind).code == "OK"
    shop.then(Fail("NOT_FOUND", read=True))
    calls.call(kind)
    check(call_counts, kind, {"OK": 1, "NOT_FOUND": 1}, {"OK": 1, "NOT_FOUND": 1})


# --- Without metrics ---


@pytest.fixture
def no_counts():
    replaced = replace_call_counts(None)
    yield
    replace_call_counts(replaced)


def test_without_metrics_nothing_is_wrapped(no_counts, shop_channel):
    method = sync.intercept_channel(shop_channel, PLAIN).unary_unary(PATH["unary_unary"])
    assert type(method) is client_module._UnaryUnary
    assert type(method._below) is type(shop_channel.unary_unary(PATH["unary_unary"]))
    (interceptor,) = sync.client_interceptors(PLAIN)
    assert type(interceptor) is client_module.ClientInterceptor


async def test_without_metrics_nothing_of_aio_is_wrapped(
    no_counts,
    aio_shop_channel,  # noqa: F811
):
    method = aio.intercept_channel(aio_shop_channel, PLAIN).unary_unary(PATH["unary_unary"])
    assert type(method).__name__ == "_InterceptedMulticallable_UNARY_UNARY"
    assert type(method._call) is type(aio_shop_channel.unary_unary(PATH["unary_unary"]))
    for interceptor in aio.client_interceptors(PLAIN):
        assert not [name for name in vars(interceptor) if name.startswith("intercept")]
