"""Futures and response streams of `grpc`: cancellation, message_timeout, other interceptors."""

import gc
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue

from fixtures.clients import LATER, answer, begin, both, gated, patient
from fixtures.shop import STREAM_STREAM, UNARY_STREAM, UNARY_UNARY, Fail, Hang, Silent
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.call import CallPolicy, DeadlinePolicy, DefaultResponsePolicy, RetryPolicy
from rpcwheel.errors import FailbackFull
from rpcwheel.events import CallbackFailed, StreamStalled
from rpcwheel.failback import FailbackPolicy
from rpcwheel.interceptors import FailbackQueues, client_interceptors, intercept_channel


@pytest.fixture
def client(shop_channel, timer):
    """Makes channels with policies; by default calls are retried after five manual seconds."""

    def make(**settings):
        given = {"retry": LATER, "idempotent": True} | settings
        return intercept_channel(shop_channel, CallPolicy(**given), timer=timer)

    return make


# --- Streams ---


class Slow(grpc.UnaryStreamClientInterceptor):
    """Returns a message after its call has failed."""

    def intercept_unary_stream(self, continuation, details, request):
        call = continuation(details, request)
        read, failed = type(call).__next__, threading.Event()

        class Late(type(call)):
            def __next__(self):
                message = read(self)
                self.add_done_callback(lambda _: failed.set())
                assert failed.wait(WAIT_S)
                threading.Event().wait(0.1)  # time for the decision about the next attempt
                return message

        call.__class__ = Late
        return call


def test_a_message_that_was_read_is_returned_although_the_attempt_has_failed(
    shop, shop_channel, timer
):
    shop.then(Fail("UNAVAILABLE", after=1))
    policy = CallPolicy(retry=RetryPolicy(retry_on="UNAVAILABLE", backoff=0.0), idempotent=True)
    ours = client_interceptors(policy, timer=timer)
    channel = grpc.intercept_channel(shop_channel, *ours, Slow())
    stream = channel.unary_stream(UNARY_STREAM)(b"xyz")
    assert next(stream) == b"x"
    with pytest.raises(grpc.RpcError) as caught:
        next(stream)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert len(shop.calls) == 1


def test_message_timeout_ends_a_stalled_stream_with_the_reason(shop, client, timer, events):
    silent = Silent(after=1)
    shop.then(silent)
    channel = client(timeout=DeadlinePolicy(message_timeout=3.0))
    stream = channel.unary_stream(UNARY_STREAM)(b"xyz")
    assert next(stream) == b"x"
    timer.advance(100.0)  # no caller waits for a message
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
    wait_until(lambda: StreamStalled(UNARY_STREAM, 3.0) in events)


def test_a_stream_that_stalls_before_its_first_message_is_retried(shop, client, timer):
    silent = Silent()
    shop.then(silent)
    retry = RetryPolicy(retry_on="DEADLINE_EXCEEDED", backoff=0.0, retry_budget=None)
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


def test_initial_metadata_of_a_stream_is_available_before_its_first_message(shop, client):
    stream = client().stream_stream(STREAM_STREAM)(iter([b"a"]))
    assert stream.initial_metadata() == ()
    assert list(stream) == [b"a"]


def test_a_single_threaded_stream_works_with_every_policy(shop):
    option = (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1)
    for settings in (
        {"timeout": DeadlinePolicy(timeout=WAIT_S, slow_call_threshold=WAIT_S / 2)},
        {"retry": LATER},
    ):
        with grpc.insecure_channel(shop.target, options=[option]) as bare:
            channel = intercept_channel(bare, CallPolicy(**settings, idempotent=True))
            stream = channel.unary_stream(UNARY_STREAM)(b"ab")
            with pytest.raises(grpc.experimental.UsageError):
                stream.code()
            assert list(stream) == [b"a", b"b"]
            assert stream.code() is grpc.StatusCode.OK


# --- Failback of what is held ---


@both
def test_a_full_failback_queue_is_the_error_of_the_call(shop, shop_channel, style):
    policy = CallPolicy(
        failback=FailbackPolicy(retry_on="UNAVAILABLE", backoff=60.0, max_pending=1)
    )
    with FailbackQueues() as queues:
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


@both
def test_a_call_dropped_by_a_full_queue_says_so_in_its_details(shop, shop_channel, style):
    failback = FailbackPolicy(
        retry_on="UNAVAILABLE", backoff=60.0, max_pending=1, overflow="drop", default=b"later"
    )
    with FailbackQueues() as queues:
        channel = intercept_channel(shop_channel, CallPolicy(failback=failback), queues=queues)
        shop.then("UNAVAILABLE", "UNAVAILABLE")
        begin(channel, style).code()
        call = begin(channel, style)
        assert call.code() is grpc.StatusCode.OK
        assert call.details().startswith("dropped by failback after UNAVAILABLE: scripted")
        assert call.trailing_metadata()[-1] == ("rpcwheel-answer", "failback-dropped")
        queues.close(0)


def ended_of(call, style):
    try:
        answer(call, style)
    except Exception as error:  # noqa: BLE001
        return error
    return None


# --- Among other interceptors ---


class Foreign(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Records calls, and their ends by done-callbacks, as tracing does."""

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


@pytest.mark.parametrize(("style", "stacked"), [("future", 1), ("stream", 2)])
def test_outer_interceptors_see_one_call_and_inner_ones_each_attempt(
    shop, shop_channel, style, stacked
):
    shop.then("UNAVAILABLE")
    outside, inside = Foreign(), Foreign()
    policy = CallPolicy(retry=RetryPolicy(retry_on="UNAVAILABLE", backoff=0.01), idempotent=True)
    ours = [one for _ in range(stacked) for one in client_interceptors(policy)]
    channel = grpc.intercept_channel(shop_channel, outside, *ours, inside)
    assert answer(begin(channel, style), style) == b"x"
    wait_until(lambda: (outside.ended, inside.ended) == (1, 2))
    assert (outside.made, inside.made) == (1, 2)
    assert channel.unary_unary(UNARY_UNARY)(b"y") == b"y"


def test_a_generator_of_an_inner_interceptor_is_passed_on_and_reported_once(
    shop, shop_channel, events
):
    class Generating(grpc.UnaryStreamClientInterceptor):
        def intercept_unary_stream(self, continuation, details, request):
            yield from continuation(details, request)

    ours = client_interceptors(CallPolicy(retry=LATER, idempotent=True))
    channel = grpc.intercept_channel(shop_channel, *ours, Generating())
    for _ in range(2):
        assert list(channel.unary_stream(UNARY_STREAM)(b"ab")) == [b"a", b"b"]
    wait_until(lambda: any(isinstance(one, CallbackFailed) for one in events))
    (event,) = [one for one in events if isinstance(one, CallbackFailed)]
    assert (event.subject, event.callback) == (UNARY_STREAM, "inner interceptor")
    assert "no retry" in str(event.error)


class ErrorOfAnotherLibrary(ValueError):
    """It has gRPC's codes, but is not a `grpc.RpcError`."""

    def code(self):
        return grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("error", [ValueError, ErrorOfAnotherLibrary])
def test_an_exception_of_an_inner_interceptor_is_raised_to_the_caller(shop, shop_channel, error):
    class Broken(grpc.UnaryUnaryClientInterceptor):
        def intercept_unary_unary(self, continuation, details, request):
            raise error("a bug")

    codes = {"INTERNAL", "UNKNOWN", "UNAVAILABLE"}
    default_response = DefaultResponsePolicy(on=Exception, default=b"none")
    policy = CallPolicy(
        retry=RetryPolicy(retry_on=codes), idempotent=True, default_response=default_response
    )
    channel = grpc.intercept_channel(shop_channel, *client_interceptors(policy), Broken())
    with pytest.raises(ValueError, match="a bug"):
        channel.unary_unary(UNARY_UNARY)(b"x")
    with pytest.raises(ValueError, match="a bug"):
        channel.unary_unary(UNARY_UNARY).future(b"x").result(WAIT_S)


class Wrapped:
    """A stream wrapped by an interceptor; the test releases its first message."""

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


def test_a_message_of_an_abandoned_attempt_is_dropped(shop, shop_channel, timer):
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
def test_an_attempt_that_begins_while_its_call_is_canceled_is_canceled(
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
    """A stream of an interceptor that never reports its end."""

    def __init__(self) -> None:
        self._messages = iter([b"a"])

    def __next__(self):
        return next(self._messages)

    def done(self):
        return False

    def add_done_callback(self, _):
        pass


def test_a_stream_that_does_not_report_its_end_ends_when_it_was_read(shop_channel):
    class Quieting(grpc.UnaryStreamClientInterceptor):
        def intercept_unary_stream(self, continuation, details, request):
            return Quiet()

    ours = client_interceptors(CallPolicy(retry=LATER, idempotent=True))
    channel = grpc.intercept_channel(shop_channel, *ours, Quieting())
    stream = channel.unary_stream(UNARY_STREAM)(b"x")
    assert list(stream) == [b"a"]
    assert stream.done()


# --- What is sent ---


def begin_with(channel, style, message):
    """Begin a future or stream with a protobuf message."""
    given = {"request_serializer": StringValue.SerializeToString}
    if style == "future":
        return channel.unary_unary(UNARY_UNARY, **given).future(message)
    return channel.unary_stream(UNARY_STREAM, **given)(message)


@both
def test_a_retry_sends_the_request_as_it_was_when_the_call_began(shop, client, timer, style):
    shop.then("UNAVAILABLE")
    message = StringValue(value="first")
    call = begin_with(client(), style, message)
    message.value = "spoilt"
    patient(timer)
    assert StringValue.FromString(answer(call, style)).value == "first"


@both
def test_failback_delivers_the_request_as_it_was_when_the_call_began(shop, shop_channel, style):
    shop.then("UNAVAILABLE")
    with FailbackQueues() as queues:
        policy = CallPolicy(failback=FailbackPolicy(retry_on="UNAVAILABLE", backoff=0.01))
        channel = intercept_channel(shop_channel, policy, queues=queues)
        message = StringValue(value="first")
        call = begin_with(channel, style, message)
        message.value = "spoilt"
        assert call.code() is grpc.StatusCode.OK
        assert queues.flush(WAIT_S)
    assert StringValue.FromString(shop.calls[1].requests[0]).value == "first"


# --- Cancelling ---


@both
def test_a_call_can_be_canceled_between_two_attempts(shop, client, timer, style):
    shop.then("UNAVAILABLE")
    call = begin(client(), style)
    called = []
    call.add_done_callback(called.append)
    wait_until(lambda: timer.pending == 1)
    assert call.running()
    assert call.is_active()
    assert call.cancel()
    assert (call.cancelled(), call.done(), call.cancel()) == (True, True, False)
    assert call.code() is grpc.StatusCode.CANCELLED
    with pytest.raises(grpc.FutureCancelledError):
        call.result()
    wait_until(lambda: timer.pending == 0)  # the worker may be just about to wait
    wait_until(lambda: called == [call])
    assert len(shop.calls) == 1


@both
def test_closing_the_channel_ends_a_call_between_two_attempts(shop, client, timer, style):
    shop.then("UNAVAILABLE")
    channel = client()
    call = begin(channel, style)
    wait_until(lambda: timer.pending == 1)
    channel.close()
    assert call.code() is grpc.StatusCode.CANCELLED
    wait_until(lambda: timer.pending == 0)
    assert len(shop.calls) == 1


def test_closing_the_channel_ends_a_blocking_call_between_two_attempts(shop, client, timer):
    shop.then("UNAVAILABLE")
    channel = client()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(channel.unary_unary(UNARY_UNARY), b"x")
        wait_until(lambda: timer.pending == 1)
        channel.close()
        assert call.exception(WAIT_S).code() is grpc.StatusCode.CANCELLED
    assert timer.pending == 0


@both
def test_a_call_can_be_canceled_in_its_second_attempt(shop, client, timer, style):
    hang = Hang()
    shop.then("UNAVAILABLE", hang)
    call = begin(client(), style)
    patient(timer)
    assert hang.begun.wait(WAIT_S)
    assert call.cancel()
    assert shop.calls[1].ended.wait(WAIT_S)
    assert call.details() == "Locally cancelled by application!"


def test_canceling_wakes_a_thread_that_waits_for_the_result(shop, client, timer):
    shop.then("UNAVAILABLE")
    call = begin(client(), "future")
    wait_until(lambda: timer.pending == 1)
    ends = []
    waits = [
        threading.Thread(target=lambda give=give: ends.append(ended_by(give)))
        for give in (call.result, call.exception, call.traceback, call.code)
    ]
    for thread in waits:
        thread.start()
    call.cancel()
    for thread in waits:
        thread.join(WAIT_S)
    assert sorted(map(str, ends)) == sorted(["FutureCancelledError"] * 3 + ["StatusCode.CANCELLED"])


def test_canceling_wakes_a_thread_that_waits_for_a_message(shop, client, timer):
    shop.then("UNAVAILABLE")
    call = begin(client(), "stream")
    wait_until(lambda: timer.pending == 1)
    ends = []
    thread = threading.Thread(target=lambda: ends.append(ended_by(partial(next, call))))
    thread.start()
    call.cancel()
    thread.join(WAIT_S)
    assert ends == ["FinishedError"]


def ended_by(give):
    try:
        return give()
    except (grpc.FutureCancelledError, grpc.RpcError) as error:
        return type(error).__name__


def test_a_timeout_of_result_does_not_end_the_call(shop, client, timer):
    shop.then("UNAVAILABLE")
    call = begin(client(), "future")
    for give in (call.result, call.exception, call.traceback):
        with pytest.raises(grpc.FutureTimeoutError):
            give(timeout=0.01)
    patient(timer)
    assert call.result(WAIT_S) == b"x"


def test_time_remaining_is_that_of_the_whole_call(shop, client, timer):
    shop.then("UNAVAILABLE")
    call = begin(client(timeout=60.0), "future")
    wait_until(lambda: timer.pending == 1)
    assert call.time_remaining() == 60.0
    timer.advance(4.0)
    assert call.time_remaining() == 56.0
    call.cancel()
    assert begin(client(), "future").time_remaining() is None


# --- Dropping ---


@both
def test_a_dropped_call_is_canceled(shop, client, style):
    hang = Hang()
    shop.then(hang)
    call = begin(client(), style)
    assert hang.begun.wait(WAIT_S)
    del call
    assert shop.calls[0].ended.wait(WAIT_S)


@both
def test_a_call_dropped_between_two_attempts_is_not_retried(shop, client, timer, style):
    shop.then("UNAVAILABLE")
    call = begin(client(), style)
    wait_until(lambda: timer.pending == 1)
    del call
    gc.collect()
    wait_until(lambda: timer.pending == 0)
    assert len(shop.calls) == 1


def test_a_stream_dropped_before_its_end_is_canceled(shop, client):
    shop.then(Silent(after=1))
    for message in client().unary_stream(UNARY_STREAM)(b"xyz"):
        assert message == b"x"
        break
    assert shop.calls[0].ended.wait(WAIT_S)


# --- Callbacks ---


@both
def test_a_callback_that_raises_or_blocks_affects_neither_channel_nor_calls(
    shop, client, timer, events, style
):
    end, threads = threading.Event(), []

    def hang(*_):
        threads.append(threading.current_thread().name)
        end.wait(WAIT_S)

    def broken(*_):
        raise RuntimeError("a hook")

    channel = client()
    shop.then("UNAVAILABLE")
    call = begin(channel, style)
    for hook in (broken, hang):
        call.add_done_callback(hook)
        assert call.add_callback(hook)
    patient(timer)
    assert answer(call, style) == b"x"
    for _ in range(3):  # the channel's thread lives, and so does the wheel
        shop.then("UNAVAILABLE")
        call = begin(channel, "future")
        patient(timer)
        assert answer(call, "future") == b"x"
    wait_until(lambda: threads)
    end.set()
    wait_until(lambda: len(threads) == 2)
    assert all(name.startswith("rpcwheel-worker") for name in threads)
    wait_until(lambda: sum(isinstance(event, CallbackFailed) for event in events) == 2)
    assert {one.callback for one in events if isinstance(one, CallbackFailed)} == {"done callback"}


def test_a_callback_that_is_added_after_the_end_is_called_at_once(shop, client):
    call = begin(client(), "future")
    call.result(WAIT_S)
    called = []
    call.add_done_callback(called.append)
    assert called == [call]
    assert not call.add_callback(called.clear)
