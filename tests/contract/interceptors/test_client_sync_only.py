"""Calls of `grpc` only: threads that block, futures, dropped calls, callbacks on other threads."""

import gc
import signal
import threading
import weakref

import grpc
import pytest

from fixtures.client_interceptors import interceptor
from fixtures.clients import LATER, SYNC_WAYS, patient, ways
from fixtures.grpc_servers import IMPATIENT
from fixtures.leaks import no_garbage_collector
from fixtures.shop import STREAM_STREAM, UNARY_STREAM, UNARY_UNARY, Fail, Hang, Silent
from fixtures.waiting import WAIT_S, Gate, in_thread, wait_until
from fixtures.worlds import METHODS, RETRY, SyncWorld, only_sync
from rpcwheel.call import CallPolicy, DeadlinePolicy, DefaultResponsePolicy, HedgingPolicy
from rpcwheel.events import CallbackFailed, CallSlow, add_sink, remove_sink
from rpcwheel.failback import FailbackPolicy
from rpcwheel.interceptors import FailbackQueues, client_interceptors, intercept_channel
from rpcwheel.transport import ReconnectingChannel

both = pytest.mark.parametrize(
    ("world", "kind"),
    [(SyncWorld, "unary_unary"), (SyncWorld, "unary_stream")],
    indirect=["world"],
    ids=["future", "stream"],
)


@pytest.fixture
def channel(world, shop, timer):
    """A channel whose calls are retried after five manual seconds."""
    return world.retrying(shop.target, retry=LATER, timer=timer)


@only_sync
def test_a_backoff_that_blocks_delays_neither_other_calls_nor_the_timer(
    world, shop, channel, timer
):
    gate = Gate()

    def hang(_):
        gate()
        return 0.0

    hanging = world.retrying(shop.target, retry=RETRY.replace(backoff=hang), timer=timer)
    shop.then("UNAVAILABLE")
    stuck = world.call(hanging)
    assert gate.entered.wait(WAIT_S)
    shop.then("UNAVAILABLE")
    stream = world.call(channel, "unary_stream")
    patient(timer)
    assert stream.result() == [b"x"]
    assert world.call(hanging).result() == b"x"
    assert not stuck.done()
    gate.opened.set()
    assert stuck.result() == b"x"


def test_done_callbacks_that_block_do_not_delay_calls_through_two_interceptors(shop, shop_channel):
    policy = CallPolicy(timeout=WAIT_S, retry=RETRY, idempotent=True)
    with pytest.warns(RuntimeWarning, match="3 x 3 = 9"):
        channel = intercept_channel(intercept_channel(shop_channel, policy), policy)
    opened, here = threading.Event(), threading.get_ident()

    def hang(_):
        if threading.get_ident() != here:  # where it runs if the call has ended before it is added
            opened.wait(2 * WAIT_S)

    shop.then(*["NOT_FOUND"] * 6)
    calls = [channel.unary_unary(UNARY_UNARY).future(b"x") for _ in range(6)]
    for call in calls:
        call.add_done_callback(hang)
    try:
        assert [call.exception(WAIT_S).code().name for call in calls] == ["NOT_FOUND"] * 6
        assert channel.unary_unary(UNARY_UNARY).future(b"x").result(WAIT_S) == b"x"
    finally:
        opened.set()


def test_a_sink_that_blocks_does_not_block_the_timer(shop, shop_channel, timer):
    blocked, opened, woken = threading.Event(), threading.Event(), []

    def block(event):
        if isinstance(event, CallSlow):
            blocked.set()
            woken.append(opened.wait(WAIT_S))

    policy = CallPolicy(timeout=DeadlinePolicy(slow_call_threshold=2.0))
    shop.then(hang := Hang())
    call = intercept_channel(shop_channel, policy, timer=timer).unary_unary(UNARY_UNARY).future(b"")
    assert hang.begun.wait(WAIT_S)
    add_sink(block)
    try:
        timer.advance(3)  # would return only when the sink has waited in vain
        assert blocked.wait(WAIT_S)
        opened.set()
        wait_until(lambda: woken)
        assert woken == [True]
    finally:
        opened.set()
        remove_sink(block)
        call.cancel()


@only_sync
def test_an_interrupt_during_the_wait_for_a_retry_leaves_no_timeout(world, shop, timer, set_limit):
    set_limit("call.sync_call.TIMER_CHECK_INTERVAL_S", 0.05)
    shop.then("UNAVAILABLE")
    slow = DeadlinePolicy(slow_call_threshold=9.0)
    channel = world.retrying(shop.target, retry=LATER, timeout=slow, timer=timer)

    def interrupt():
        wait_until(lambda: timer.pending == 2)  # the retry, and the watch for slow calls
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    interrupting = in_thread(interrupt)
    with pytest.raises(KeyboardInterrupt):
        channel.unary_unary(UNARY_UNARY)(b"x")
    interrupting.result(WAIT_S)
    assert timer.pending == 0


@ways(*SYNC_WAYS)
def test_closing_the_inner_channel_between_two_attempts_cancels_the_call(shop, client, timer):
    plain = grpc.insecure_channel(shop.target, options=IMPATIENT)
    default = DefaultResponsePolicy(on=grpc.RpcError, default=client.default(b"no"))
    policy = CallPolicy(retry=LATER, idempotent=True, default_response=default)
    channel = intercept_channel(plain, policy, timer=timer)
    shop.then("UNAVAILABLE")
    call = client.begin(channel)
    wait_until(lambda: timer.pending == 1)
    plain.close()
    timer.advance(5)
    assert call.code() is grpc.StatusCode.CANCELLED


def slow(has_read):
    """An interceptor that returns a message after its call has failed, and sets an event before."""

    def delay(continuation, details, request):
        call = continuation(details, request)
        read, failed = type(call).__next__, threading.Event()

        class Late(type(call)):
            def __next__(self):
                message = read(self)
                has_read.set()
                self.add_done_callback(lambda _: failed.set())
                assert failed.wait(WAIT_S)
                threading.Event().wait(0.1)  # time for the decision about the next attempt
                return message

        call.__class__ = Late
        return call

    return interceptor(delay, "unary_stream")


def test_a_message_that_was_read_is_returned_although_the_attempt_has_failed(
    shop, shop_channel, timer
):
    shop.then(Fail("UNAVAILABLE", after=1))
    policy = CallPolicy(retry=RETRY, idempotent=True)
    ours = client_interceptors(policy, timer=timer)
    channel = grpc.intercept_channel(shop_channel, *ours, slow(threading.Event()))
    stream = channel.unary_stream(UNARY_STREAM)(b"xyz")
    assert next(stream) == b"x"
    with pytest.raises(grpc.RpcError) as caught:
        next(stream)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert len(shop.calls) == 1


def test_a_message_that_was_read_is_returned_once_although_the_attempt_has_timed_out(
    shop, shop_channel, timer
):
    shop.then(Silent(after=1))
    stalls = DeadlinePolicy(message_timeout=3.0)
    retry = RETRY.replace(retry_on="DEADLINE_EXCEEDED")
    ours = client_interceptors(
        CallPolicy(timeout=stalls, retry=retry, idempotent=True), timer=timer
    )
    channel = grpc.intercept_channel(shop_channel, *ours, slow(has_read := threading.Event()))
    stream = channel.unary_stream(UNARY_STREAM)(b"xyz")
    reading = in_thread(next, stream)
    assert has_read.wait(WAIT_S)
    timer.advance(3.0)
    assert reading.result(WAIT_S) == b"x"
    with pytest.raises(grpc.RpcError) as caught:
        next(stream)
    assert caught.value.details() == "no message for 3 s (message_timeout)"
    assert len(shop.calls) == 1


def gated(message, rest):
    """Requests: one message; the stream ends when `rest` is set."""
    yield message
    rest.wait(WAIT_S)


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

    def wrap(continuation, details, request):
        made.append(call := Wrapped(continuation(details, request), begun, gate))
        return call

    ours = client_interceptors(CallPolicy(retry=LATER, idempotent=True), timer=timer)
    channel = grpc.intercept_channel(shop_channel, *ours, interceptor(wrap, "stream_stream"))
    shop.then(Fail("UNAVAILABLE", read=True))
    stream = channel.stream_stream(STREAM_STREAM)(gated(b"x", rest))
    reading = in_thread(next, stream)
    assert begun.wait(WAIT_S)
    rest.set()
    patient(timer)
    wait_until(lambda: len(made) == 2)
    gate.set()
    assert reading.result(WAIT_S) == b"x"
    stream.cancel()


@both
def test_an_attempt_that_begins_while_its_call_is_canceled_is_canceled(
    world, shop, shop_channel, timer, kind
):
    held, made = [], []

    def cancel(continuation, details, request):
        if made:
            held[0].cancel()
        made.append(call := continuation(details, request))
        return call

    ours = client_interceptors(CallPolicy(retry=LATER, idempotent=True), timer=timer)
    inner = interceptor(cancel, "unary_unary", "unary_stream")
    channel = grpc.intercept_channel(shop_channel, *ours, inner)
    shop.then("UNAVAILABLE", Silent())
    held.append(world.call(channel, kind))
    patient(timer)
    wait_until(lambda: len(made) == 2 and made[1].cancelled())
    assert held[0].cancelled()


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
    ours = client_interceptors(CallPolicy(retry=LATER, idempotent=True))
    inner = interceptor(lambda *_: Quiet(), "unary_stream")
    channel = grpc.intercept_channel(shop_channel, *ours, inner)
    stream = channel.unary_stream(UNARY_STREAM)(b"x")
    assert list(stream) == [b"a"]
    assert stream.done()


@pytest.mark.parametrize(
    ("kind", "names", "expected"),
    [
        ("unary_unary", ("result", "exception", "traceback"), "FutureCancelledError"),
        ("unary_unary", ("code",), "StatusCode.CANCELLED"),
        ("unary_stream", ("__next__",), "FinishedError"),
    ],
)
@only_sync
def test_canceling_wakes_threads_that_wait(world, shop, channel, timer, kind, names, expected):
    shop.then("UNAVAILABLE")
    call = world.call(channel, kind).grpc_call
    wait_until(lambda: timer.pending == 1)
    ends = [in_thread(ended_by, getattr(call, name)) for name in names]
    call.cancel()
    assert [str(end.result(WAIT_S)) for end in ends] == [expected] * len(names)


def ended_by(give):
    try:
        return give()
    except (grpc.FutureCancelledError, grpc.RpcError) as error:
        return type(error).__name__


@only_sync
def test_a_timeout_of_result_does_not_end_the_call(world, shop, channel, timer):
    shop.then("UNAVAILABLE")
    call = world.call(channel).grpc_call
    for give in (call.result, call.exception, call.traceback):
        with pytest.raises(grpc.FutureTimeoutError):
            give(timeout=0.01)
    patient(timer)
    assert call.result(WAIT_S) == b"x"


@both
def test_a_call_dropped_between_two_attempts_is_not_retried(world, shop, channel, timer, kind):
    shop.then("UNAVAILABLE")
    call = world.call(channel, kind)
    wait_until(lambda: timer.pending == 1)
    del call
    gc.collect()
    wait_until(lambda: timer.pending == 0)
    assert len(shop.calls) == 1


def test_the_attempts_of_a_response_stream_are_freed_without_the_collector(shop, shop_channel):
    """Attempts in a cycle live until the interpreter ends, where their finalizers can hang."""
    attempts = []

    def note(continuation, details, request):
        attempts.append(weakref.ref(attempt := continuation(details, request)))
        return attempt

    inner = grpc.intercept_channel(shop_channel, interceptor(note, "unary_stream"))
    channel = intercept_channel(inner, CallPolicy(retry=RETRY, idempotent=True))
    shop.then("UNAVAILABLE")
    with no_garbage_collector():
        assert list(channel.unary_stream(UNARY_STREAM)(b"x")) == [b"x"]
        assert len(attempts) == 2
        assert wait_until(lambda: not any(attempt() for attempt in attempts))


@both
def test_a_callback_that_raises_or_blocks_affects_neither_channel_nor_calls(
    world, shop, channel, timer, events, kind
):
    end, threads = threading.Event(), []

    def hang(*_):
        threads.append(threading.current_thread().name)
        end.wait(WAIT_S)

    def broken(*_):
        raise RuntimeError("a hook")

    shop.then("UNAVAILABLE")
    call = world.call(channel, kind)
    for hook in (broken, hang):
        call.on_done(hook)
        assert call.grpc_call.add_callback(hook)
    patient(timer)
    assert call.result() in (b"x", [b"x"])
    for _ in range(3):  # the channel's thread lives, and so does the wheel
        shop.then("UNAVAILABLE")
        call = world.call(channel)
        patient(timer)
        assert call.result() == b"x"
    wait_until(lambda: threads)
    end.set()
    wait_until(lambda: len(threads) == 2)
    assert all(name.startswith("rpcwheel-worker") for name in threads)
    wait_until(lambda: sum(isinstance(event, CallbackFailed) for event in events) == 2)
    assert {one.callback for one in events.of(CallbackFailed)} == {"done callback"}


@pytest.mark.parametrize("kind", ["unary_unary", "stream_unary"])
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"retry": None}, id="one attempt"),
        pytest.param({}, id="retries"),
        pytest.param({"retry": None, "hedging": HedgingPolicy(delay=30.0)}, id="hedging"),
        pytest.param(
            {"retry": None, "failback": FailbackPolicy(retry_on="UNAVAILABLE")}, id="refused"
        ),
    ],
)
def test_the_error_of_a_blocking_call_is_freed_without_the_collector(shop, kind, settings):
    """In a cycle it would keep the request, which may be large, while a server is down."""

    def refused():
        shop.then(*["UNAVAILABLE"] * 3)
        request = b"x" if kind == "unary_unary" else iter([b"x"])
        try:
            return getattr(channel, kind)(METHODS[kind])(request)
        except grpc.RpcError as error:
            return weakref.ref(error)

    policy = CallPolicy(**{"retry": RETRY, "idempotent": True} | settings)
    queues = FailbackQueues()
    queues.close()
    with ReconnectingChannel(shop.target) as inner, no_garbage_collector():
        channel = intercept_channel(inner, policy, queues=queues)
        assert refused()() is None
