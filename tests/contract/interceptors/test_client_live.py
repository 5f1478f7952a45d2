"""Response streams, and calls among other interceptors: what a try may be behind them."""

import logging
import threading
from contextvars import ContextVar
from functools import partial

import grpc
import pytest

from fixtures.clients import LATER, answer, begin, both, gated, patient
from fixtures.shop import STREAM_STREAM, UNARY_STREAM, UNARY_UNARY, Fail, Silent
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.deadline import DeadlinePolicy, RetryPolicy
from rpcwheel.errors import FailbackFull
from rpcwheel.failback import FailbackPolicy
from rpcwheel.interceptors import (
    CallPolicy,
    FailsafePolicy,
    Queues,
    client_interceptors,
    intercept_channel,
)
from rpcwheel.observe import HookFailed, StreamSilent


@pytest.fixture
def client(shop_channel, timer):
    """Makes channels with policies; by default calls are retried after five manual seconds."""

    def make(**settings):
        given = {"retry": LATER, "idempotent": True} | settings
        return intercept_channel(shop_channel, CallPolicy(**given), timer=timer)

    return make


# --- Streams ---


def test_a_stream_is_never_begun_again_after_its_first_message(shop, client):
    shop.then(Fail("UNAVAILABLE", after=1, read=True))
    rest = threading.Event()
    stream = client().stream_stream(STREAM_STREAM)(gated(b"x", rest))
    assert next(stream) == b"x"
    rest.set()
    with pytest.raises(grpc.RpcError) as caught:
        next(stream)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert len(shop.calls) == 1


class Slow(grpc.UnaryStreamClientInterceptor):
    """Hands on a message some time after its call has failed."""

    def intercept_unary_stream(self, continuation, details, request):
        call = continuation(details, request)
        read, failed = type(call).__next__, threading.Event()

        class Late(type(call)):
            def __next__(self):
                message = read(self)
                self.add_done_callback(lambda _: failed.set())
                assert failed.wait(WAIT_S)
                threading.Event().wait(0.1)  # for whoever decides what follows
                return message

        call.__class__ = Late
        return call


def test_a_message_that_was_read_is_handed_on_though_its_call_failed_meanwhile(
    shop, shop_channel, timer
):
    shop.then(Fail("UNAVAILABLE", after=1))
    policy = CallPolicy(retry=RetryPolicy(on="UNAVAILABLE", wait=0.0), idempotent=True)
    ours = client_interceptors(policy, timer=timer)
    channel = grpc.intercept_channel(shop_channel, *ours, Slow())
    stream = channel.unary_stream(UNARY_STREAM)(b"xyz")
    assert next(stream) == b"x"
    with pytest.raises(grpc.RpcError) as caught:
        next(stream)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert len(shop.calls) == 1


def test_a_stream_that_is_silent_is_cancelled_and_says_why(shop, client, timer, events):
    silent = Silent(after=1)
    shop.then(silent)
    channel = client(timeout=DeadlinePolicy(message_timeout=3.0))
    stream = channel.unary_stream(UNARY_STREAM)(b"xyz")
    assert next(stream) == b"x"
    timer.advance(100.0)  # nobody waits for a message
    assert silent.begun.wait(WAIT_S)
    errors = []
    thread = threading.Thread(target=lambda: errors.append(caught(partial(next, stream))))
    thread.start()
    wait_until(lambda: timer.pending == 1)
    timer.advance(3.0)
    thread.join(WAIT_S)
    assert errors[0].code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert errors[0].details() == "no message for 3 s (message_timeout)"
    assert stream.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert not stream.cancelled()
    assert shop.calls[0].ended.wait(WAIT_S)
    assert StreamSilent(UNARY_STREAM, 3.0) in events


def test_a_stream_that_is_silent_from_the_start_is_tried_again(shop, client, timer):
    silent = Silent()
    shop.then(silent)
    retry = RetryPolicy(on="DEADLINE_EXCEEDED", wait=0.0, budget=None)
    channel = client(retry=retry, timeout=DeadlinePolicy(message_timeout=3.0))
    stream = channel.unary_stream(UNARY_STREAM)(b"x")
    got = []
    thread = threading.Thread(target=lambda: got.extend(stream))
    thread.start()
    assert silent.begun.wait(WAIT_S)
    wait_until(lambda: timer.pending == 1)
    timer.advance(3.0)
    thread.join(WAIT_S)
    assert got == [b"x"]
    assert len(shop.calls) == 2


def caught(give):
    with pytest.raises(grpc.RpcError) as found:
        give()
    return found.value


def test_a_streams_first_metadata_come_before_its_first_message(shop, client):
    stream = client().stream_stream(STREAM_STREAM)(iter([b"a"]))
    assert stream.initial_metadata() == ()
    assert list(stream) == [b"a"]


def test_a_single_threaded_stream_works_with_every_policy(shop):
    option = (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1)
    for settings in ({"timeout": DeadlinePolicy(timeout=9.0, slow_after=8.0)}, {"retry": LATER}):
        with grpc.insecure_channel(shop.target, options=[option]) as bare:
            channel = intercept_channel(bare, CallPolicy(**settings, idempotent=True))
            stream = channel.unary_stream(UNARY_STREAM)(b"ab")
            with pytest.raises(grpc.experimental.UsageError):
                stream.code()
            assert list(stream) == [b"a", b"b"]
            assert stream.code() is grpc.StatusCode.OK


# --- Failback of what is held ---


@both
def test_a_full_failback_queue_is_the_calls_error(shop, shop_channel, style):
    policy = CallPolicy(failback=FailbackPolicy(on="UNAVAILABLE", wait=60.0, max_pending=1))
    with Queues() as queues:
        channel = intercept_channel(shop_channel, policy, queues=queues)
        shop.then("UNAVAILABLE")
        begin(channel, style).code()
        shop.then("UNAVAILABLE")
        call = begin(channel, style)
        assert call.code() is grpc.StatusCode.UNAVAILABLE
        error = ended_of(call, style)
        assert isinstance(error, FailbackFull)
        assert isinstance(error.__cause__, grpc.RpcError)
        queues.close(0)


def ended_of(call, style):
    try:
        answer(call, style)
    except Exception as error:  # noqa: BLE001
        return error
    return None


# --- Among other interceptors ---


class Foreign(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Notes calls, and their ends by a done callback, as tracing does."""

    def __init__(self) -> None:
        self.made = self.ended = 0

    def intercept_unary_unary(self, continuation, details, request):
        self.made += 1
        call = continuation(details, request)
        call.add_done_callback(self._end)
        return call

    intercept_unary_stream = intercept_unary_unary

    def _end(self, call) -> None:
        self.ended += 1
        logging.getLogger("tests").debug("%s", call.code())


@both
@pytest.mark.parametrize("stacked", [1, 2])
def test_interceptors_outside_see_a_call_and_those_inside_its_tries(
    shop, shop_channel, style, stacked
):
    shop.then("UNAVAILABLE")
    outside, inside = Foreign(), Foreign()
    policy = CallPolicy(retry=RetryPolicy(on="UNAVAILABLE", wait=0.01), idempotent=True)
    ours = [one for _ in range(stacked) for one in client_interceptors(policy)]
    channel = grpc.intercept_channel(shop_channel, outside, *ours, inside)
    assert answer(begin(channel, style), style) == b"x"
    wait_until(lambda: (outside.ended, inside.ended) == (1, 2))
    assert (outside.made, inside.made) == (1, 2)
    assert channel.unary_unary(UNARY_UNARY)(b"y") == b"y"


def test_a_generator_of_an_interceptor_inside_is_handed_through_and_told_once(
    shop, shop_channel, events
):
    class Generating(grpc.UnaryStreamClientInterceptor):
        def intercept_unary_stream(self, continuation, details, request):
            yield from continuation(details, request)

    ours = client_interceptors(CallPolicy(retry=LATER, idempotent=True))
    channel = grpc.intercept_channel(shop_channel, *ours, Generating())
    for _ in range(2):
        assert list(channel.unary_stream(UNARY_STREAM)(b"ab")) == [b"a", b"b"]
    (event,) = [one for one in events if isinstance(one, HookFailed)]
    assert (event.method, event.hook) == (UNARY_STREAM, "interceptor inside")
    assert "no retry" in str(event.error)


def test_a_bug_in_an_interceptor_inside_is_passed_on_unchanged(shop, shop_channel):
    class Broken(grpc.UnaryUnaryClientInterceptor):
        def intercept_unary_unary(self, continuation, details, request):
            raise ValueError("a bug")

    codes = {"INTERNAL", "UNKNOWN", "UNAVAILABLE"}
    failsafe = FailsafePolicy(on=Exception, default=b"none")
    policy = CallPolicy(retry=RetryPolicy(on=codes), idempotent=True, failsafe=failsafe)
    channel = grpc.intercept_channel(shop_channel, *client_interceptors(policy), Broken())
    with pytest.raises(ValueError, match="a bug"):
        channel.unary_unary(UNARY_UNARY)(b"x")
    with pytest.raises(ValueError, match="a bug"):
        channel.unary_unary(UNARY_UNARY).future(b"x").result(WAIT_S)


class Wrapped:
    """A stream as some interceptors wrap it; its first message waits until it is told."""

    def __init__(self, call, begun, gate) -> None:
        self._call, self._begun, self._gate = call, begun, gate

    def __getattr__(self, name):
        return getattr(self._call, name)

    def __next__(self):
        self._begun.set()
        self._gate.wait(WAIT_S)
        try:
            return next(self._call)
        except grpc.RpcError:
            return b"stale"


def test_a_message_of_a_try_that_was_given_up_is_nobodys(shop, shop_channel, timer):
    begun, gate, rest, made = threading.Event(), threading.Event(), threading.Event(), []

    class Wrapping(grpc.StreamStreamClientInterceptor):
        def intercept_stream_stream(self, continuation, details, request):
            made.append(Wrapped(continuation(details, request), begun, gate))
            return made[-1]

    ours = client_interceptors(CallPolicy(retry=LATER, idempotent=True), timer=timer)
    channel = grpc.intercept_channel(shop_channel, *ours, Wrapping())
    shop.then(Fail("UNAVAILABLE", read=True))
    stream = channel.stream_stream(STREAM_STREAM)(gated(b"x", rest))
    got = []
    thread = threading.Thread(target=lambda: got.append(next(stream)))
    thread.start()
    assert begun.wait(WAIT_S)
    rest.set()
    patient(timer)
    wait_until(lambda: len(made) == 2)
    gate.set()
    thread.join(WAIT_S)
    assert got == [b"x"]
    stream.cancel()


@both
def test_a_try_that_is_made_while_its_call_is_cancelled_is_cancelled_too(
    shop, shop_channel, timer, style
):
    held, made = [], []

    class Cancelling(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
        def intercept_unary_unary(self, continuation, details, request):
            if made:
                held[0].cancel()
            made.append(continuation(details, request))
            return made[-1]

        intercept_unary_stream = intercept_unary_unary

    ours = client_interceptors(CallPolicy(retry=LATER, idempotent=True), timer=timer)
    channel = grpc.intercept_channel(shop_channel, *ours, Cancelling())
    shop.then("UNAVAILABLE", Silent())
    held.append(begin(channel, style))
    patient(timer)
    wait_until(lambda: len(made) == 2 and made[1].cancelled())
    assert held[0].cancelled()


@both
def test_a_retry_is_made_in_the_callers_context(shop, shop_channel, timer, style):
    tenant, seen = ContextVar("tenant"), []

    class Looking(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
        def intercept_unary_unary(self, continuation, details, request):
            seen.append(tenant.get(None))
            return continuation(details, request)

        intercept_unary_stream = intercept_unary_unary

    ours = client_interceptors(CallPolicy(retry=LATER, idempotent=True), timer=timer)
    channel = grpc.intercept_channel(shop_channel, *ours, Looking())
    shop.then("UNAVAILABLE")
    token = tenant.set("shop")
    call = begin(channel, style)
    patient(timer)
    assert answer(call, style) == b"x"
    assert seen == ["shop", "shop"]
    tenant.reset(token)


class Quiet:
    """A stream of some interceptor's that never tells its end."""

    def __init__(self) -> None:
        self._messages = iter([b"a"])

    def __next__(self):
        return next(self._messages)

    def done(self):
        return False

    def add_done_callback(self, _):
        pass


def test_a_stream_that_never_tells_its_end_ends_when_it_was_read(shop_channel):
    class Quieting(grpc.UnaryStreamClientInterceptor):
        def intercept_unary_stream(self, continuation, details, request):
            return Quiet()

    ours = client_interceptors(CallPolicy(retry=LATER, idempotent=True))
    channel = grpc.intercept_channel(shop_channel, *ours, Quieting())
    stream = channel.unary_stream(UNARY_STREAM)(b"x")
    assert list(stream) == [b"a"]
    assert stream.done()
