"""A BalancedChannel is a channel of `grpc`: its calls, its state, its end."""

import gc
import inspect
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

import rpcwheel
from fixtures.balanced_channels import (
    caller,
    counts,
    hanging_call,
    instance,
    wait_until_ready,
)
from fixtures.grpc_servers import IMPATIENT
from fixtures.shop import STREAM_STREAM, STREAM_UNARY, UNARY_STREAM, UNARY_UNARY, Fail, Silent
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel import Kit, RetryPolicy
from rpcwheel.balancer import BalancedChannel, RingHash
from rpcwheel.events import CallbackFailed

IDLE, CONNECTING, READY, FAILING, SHUTDOWN = (
    grpc.ChannelConnectivity[name]
    for name in ("IDLE", "CONNECTING", "READY", "TRANSIENT_FAILURE", "SHUTDOWN")
)


# Calls


class PassOn(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """An interceptor that changes nothing."""

    def intercept_unary_unary(self, continuation, details, request):
        return continuation(details, request)

    intercept_unary_stream = intercept_stream_unary = intercept_stream_stream = (
        intercept_unary_unary
    )


def with_kit(channel):
    retry = RetryPolicy(retry_on={"UNAVAILABLE"}, max_attempts=3, backoff=0.01)
    return Kit(timeout=WAIT_S, retry=retry).intercept_channel(channel)


STYLES = {
    "bare": lambda channel: channel,
    "interceptors of grpc": lambda channel: grpc.intercept_channel(channel, PassOn(), PassOn()),
    "a kit": with_kit,
}


def calls_of(channel):
    """Functions that make a call of each kind in each style and return the response."""
    unary = channel.unary_unary(UNARY_UNARY)
    unary_stream = channel.unary_stream(UNARY_STREAM)
    stream_unary = channel.stream_unary(STREAM_UNARY)
    streams = channel.stream_stream(STREAM_STREAM)
    return {
        "unary": lambda: unary(b"ab", timeout=WAIT_S),
        "unary with_call": lambda: unary.with_call(b"ab", timeout=WAIT_S)[0],
        "unary future": lambda: unary.future(b"ab", timeout=WAIT_S).result(),
        "unary_stream": lambda: b"".join(unary_stream(b"ab", timeout=WAIT_S)),
        "stream_unary": lambda: stream_unary(iter([b"a", b"b"]), timeout=WAIT_S),
        "stream_unary with_call": lambda: stream_unary.with_call(
            iter([b"a", b"b"]), timeout=WAIT_S
        )[0],
        "stream_unary future": lambda: stream_unary.future(
            iter([b"a", b"b"]), timeout=WAIT_S
        ).result(),
        "stream_stream": lambda: b"".join(streams(iter([b"a", b"b"]), timeout=WAIT_S)),
    }


@pytest.mark.parametrize("style", STYLES)
def test_a_stub_made_before_an_update_works_after_it(shops, dead, open_balanced, style):
    channel = open_balanced(shops[0])
    calls = calls_of(STYLES[style](channel))
    for shop in shops:
        channel.update([instance(shop)])
        assert {name: call() for name, call in calls.items()} == dict.fromkeys(calls, b"ab")
        assert len(shop.calls) == len(calls)
    channel.update([instance(dead), instance(shops[2])])
    assert {name: call() for name, call in calls.items()} == dict.fromkeys(calls, b"ab")
    assert wait_until(lambda: channel.calls == 0)


def test_multicallables_take_the_arguments_of_grpc():
    with BalancedChannel("s") as channel, grpc.insecure_channel("127.0.0.1:1") as of_grpc:
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            ours, theirs = (getattr(one, kind)("/s/M") for one in (channel, of_grpc))
            for name in ("__call__", "with_call", "future"):
                if hasattr(theirs, name):
                    expected = inspect.signature(getattr(theirs, name)).parameters
                    assert list(inspect.signature(getattr(ours, name)).parameters) == list(expected)


def test_the_options_of_a_call_reach_the_server(shops, open_balanced):
    channel = open_balanced(shops[0])
    response, call = channel.unary_unary(
        UNARY_UNARY, lambda text: text.encode(), lambda data: data.decode()
    ).with_call("ab", WAIT_S, (("k", "v"),), None, None, grpc.Compression.Gzip)
    seen = shops[0].calls[0]
    assert (response, call.code(), seen.requests) == ("ab", grpc.StatusCode.OK, [b"ab"])
    assert seen.metadata["k"] == "v"
    assert seen.time_remaining is not None


def test_the_status_of_the_server_reaches_the_caller(shops, open_balanced):
    channel = open_balanced(shops[0])
    for code in ("NOT_FOUND", "UNAVAILABLE", "DEADLINE_EXCEEDED", "INTERNAL"):
        shops[0].then(Fail(code, "no such order", (("k", "v"),)))
        with pytest.raises(grpc.RpcError) as caught:
            caller(channel)()
        assert (caught.value.code().name, caught.value.details()) == (code, "no such order")
        assert dict(caught.value.trailing_metadata()) == {"k": "v"}
    assert channel.subchannels[0].healthy


def test_a_request_that_can_not_be_serialized_fails_as_with_grpc(shops, open_balanced):
    channel = open_balanced(shops[0])
    call = channel.unary_unary(UNARY_UNARY, lambda _: 1 / 0)
    for _ in range(6):
        with pytest.raises(grpc.RpcError) as caught:
            call(b"x", timeout=WAIT_S)
        assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert channel.subchannels[0].healthy


class Generators(grpc.UnaryStreamClientInterceptor, grpc.UnaryUnaryClientInterceptor):
    """Makes a generator of response streams, as the instrumentation of OpenTelemetry does."""

    def intercept_unary_stream(self, continuation, details, request):
        yield from continuation(details, request)

    def intercept_unary_unary(self, continuation, details, request):
        return continuation(details, request)


def test_a_response_stream_that_an_interceptor_made_a_generator_can_be_read(shops, open_balanced):
    def connect(one, options):
        return grpc.intercept_channel(grpc.insecure_channel(one.target, options), Generators())

    channel = open_balanced(connect=connect, policy={"pick_timeout": 3600})
    method = channel.unary_stream(UNARY_STREAM)
    waiting, dropped = method(b"ab"), method(b"cd")
    channel.update([instance(shops[0])])
    assert b"".join(waiting) == b"ab"
    assert next(dropped) == b"c"
    dropped.cancel()
    assert b"".join(method(b"ab")) == b"ab"
    del dropped
    assert wait_until(lambda: (gc.collect(), channel.calls == 0)[1])


# State


def test_the_state_of_a_channel_is_the_best_of_its_subchannels(shops, dead, open_balanced):
    channel = open_balanced()
    assert channel.get_state() is CONNECTING
    channel.report_error("the registry is away")
    assert channel.get_state() is FAILING
    channel.update([])
    assert channel.get_state() is FAILING
    channel.update([instance(dead), instance(shops[0])])
    assert channel.get_state() is IDLE
    caller(channel)()
    assert channel.get_state() is READY
    channel.close()
    assert channel.get_state() is SHUTDOWN


def test_get_state_may_connect(shops, dead, open_balanced):
    channel = open_balanced(dead, shops[0])
    channel.get_state(try_to_connect=True)
    assert wait_until(lambda: channel.get_state() is READY)


def test_subscribers_are_called_with_the_state_and_each_change(shops, open_balanced, timer):
    channel = open_balanced(policy={"self_preservation": False})
    states, threads = [], []

    def broken(_):
        threads.append(threading.current_thread())
        raise RuntimeError

    channel.subscribe(broken)
    channel.subscribe(states.append)
    assert wait_until(lambda: states == [CONNECTING])
    channel.update([instance(shops[0])])
    assert wait_until(lambda: states == [CONNECTING, IDLE])
    caller(channel)()
    assert wait_until(lambda: (timer.advance(0.3), states[-1] is READY)[1])
    channel.update([])
    assert wait_until(lambda: states[-1] is FAILING)
    channel.unsubscribe(states.append)
    channel.unsubscribe(print)
    channel.unsubscribe(broken)
    assert wait_until(lambda: timer.pending == 0)
    assert threading.current_thread() not in threads
    channel.close()
    channel.subscribe(print)


def test_a_subscriber_that_raises_is_reported_and_called_again(shops, open_balanced, events):
    channel = open_balanced()

    def broken(state):
        raise RuntimeError(state.name)

    channel.subscribe(broken)
    assert wait_until(lambda: len(events) == 1)
    channel.update([instance(shops[0])])
    assert wait_until(lambda: len(events) == 2)
    assert [type(event) for event in events] == [CallbackFailed, CallbackFailed]


def test_channel_ready_future_waits_for_the_first_connection(shops, dead, open_balanced):
    channel = open_balanced(dead, shops[0], timer=None)
    grpc.channel_ready_future(channel).result(timeout=WAIT_S)
    assert channel.get_state() is READY


def test_subscribers_do_not_cost_a_thread_each(shops, open_balanced):
    channel = open_balanced(*shops)
    wait_until_ready(channel)
    before = set(threading.enumerate())
    seen = [[] for _ in range(5)]
    callbacks = [one.append for one in seen]
    for callback in callbacks:
        channel.subscribe(callback)
    assert wait_until(lambda: all(seen))
    assert len(set(threading.enumerate()) - before) < len(callbacks)
    for callback in callbacks:
        channel.unsubscribe(callback)


def test_the_representation_has_name_and_state(shops, dead, open_balanced):
    channel = open_balanced(dead, shops[0])
    channel.subchannels[0].mark_unhealthy("the test")
    assert repr(channel) == (
        "<BalancedChannel 'test.Shop', 2 subchannels, 1 unhealthy, calls in flight: 0>"
    )
    assert (channel.name, channel.target) == ("test.Shop", "test.Shop")
    channel.close()
    assert repr(channel) == "<BalancedChannel 'test.Shop', closed, calls in flight: 0>"


# TLS


def test_with_credentials_only_servers_with_tls_are_called(certificates, shops, timer):
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        handler = grpc.unary_unary_rpc_method_handler(lambda request, _: request)
        handlers = grpc.method_handlers_generic_handler("test.Shop", {"UnaryUnary": handler})
        server.add_generic_rpc_handlers([handlers])
        port = server.add_secure_port("localhost:0", certificates.server_credentials())
        server.start()
        both = [instance(port, host="localhost", protocol="grpcs"), instance(shops[0])]
        credentials = certificates.channel_credentials()
        with BalancedChannel("s", both, credentials=credentials, timer=timer) as channel:
            assert [caller(channel)() for _ in range(4)] == [b"x"] * 4
            assert len(channel.subchannels) == 1
            channel.update(both[1:])
            check_refused(channel)
        with BalancedChannel("s", both, timer=timer) as channel:
            check_refused(channel)
        server.stop(None).wait()
    assert counts(shops) == [0, 0, 0]


def check_refused(channel):
    for wait_for_ready in (None, True):
        with pytest.raises(grpc.RpcError, match="secure_channel") as caught:
            caller(channel, wait_for_ready=wait_for_ready)()
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


# Heartbeats


def test_a_heartbeat_can_be_attached_to_each_subchannel(shops, open_balanced, timer):
    with rpcwheel.heartbeat.HeartbeatManager(timer=timer, interval=1.0) as manager:
        channel = open_balanced(*shops, on_subchannel=lambda one: manager.attach(one.channel))
        wait_until_ready(channel)
        assert timer.pending == 3
        channel.close()


# The end


def test_close_ends_calls_and_subchannels_and_calls_back_once(shops, open_balanced, timer):
    channel, called = open_balanced(shops[0]), []
    call = hanging_call(shops[0], channel)
    subchannel = channel.subchannels[0]
    subchannel.mark_unhealthy("the test")
    channel.on_close(lambda: called.append(call.done()))
    channel.close()
    channel.close()
    assert called == [False]
    assert call.code() is grpc.StatusCode.CANCELLED
    assert (channel.closed, channel.subchannels, subchannel.state) == (True, (), SHUTDOWN)
    assert timer.pending == 0
    channel.update([instance(shops[0])])
    channel.report_error("late")
    assert channel.subchannels == ()
    channel.on_close(lambda: called.append("late"))
    assert called == [False, "late"]


def test_a_close_callback_can_be_removed_and_may_raise(shops, open_balanced, events):
    channel, called = open_balanced(shops[0]), []
    remove = channel.on_close(lambda: called.append("removed"))
    channel.on_close(lambda: 1 / 0)
    channel.on_close(lambda: called.append("called"))
    remove()
    channel.close()
    assert called == ["called"]
    assert [type(event) for event in events] == [CallbackFailed]


def test_close_ends_calls_of_removed_subchannels(shops, open_balanced):
    channel = open_balanced(shops[0])
    call = hanging_call(shops[0], channel)
    channel.update([instance(shops[1])])
    channel.close()
    assert call.code() is grpc.StatusCode.CANCELLED


def test_calls_on_a_closed_channel_raise_as_with_grpc(shops, open_balanced):
    for used in (False, True):
        channel = open_balanced(shops[0])
        calls = calls_of(channel)
        if used:
            for call in calls.values():
                call()
        channel.close()
        for call in calls.values():
            with pytest.raises(ValueError, match="Cannot invoke RPC on closed channel"):
                call()


def test_close_ends_calls_that_wait(open_balanced):
    picks = []

    class Waiting(RingHash):
        def prepare(self, subchannels, weights):
            return lambda method, *_: picks.append(method)  # None: the call waits

    channel = open_balanced(1, lb_policy=Waiting("x-user"), policy={"pick_timeout": 3600})
    unary, stream = channel.unary_unary(UNARY_UNARY), channel.unary_stream(UNARY_STREAM)
    with ThreadPoolExecutor(1) as threads:
        blocked = threads.submit(unary, b"x")
        assert wait_until(lambda: len(picks) > 1)  # the second while it waits
        held = [unary.future(b"x"), stream(b"x")]
        channel.close()
        with pytest.raises(grpc.RpcError, match="Channel closed!") as ended:
            blocked.result(WAIT_S)
    ends = [(call.code(), call.details()) for call in (ended.value, *held)]
    assert ends == [(grpc.StatusCode.CANCELLED, "Channel closed!")] * 3


def test_a_channel_closes_at_the_end_of_a_with_block(shops, timer):
    with BalancedChannel("s", [instance(shops[0])], timer=timer) as channel:
        caller(channel)()
    assert channel.closed


def test_a_channel_that_is_dropped_unclosed_leaves_nothing(shops, timer):
    channel = BalancedChannel("s", [instance(one) for one in shops], timer=timer, options=IMPATIENT)
    wait_until_ready(channel)
    channel.subchannels[0].mark_unhealthy("the test")
    channel.subscribe(print)
    shops[0].then(silent := Silent(1))
    shops[1].then(Silent(1))
    shops[2].then(Silent(1))
    stream = channel.unary_stream(UNARY_STREAM)(b"ab")
    next(stream)
    gone = [weakref.ref(channel), *(weakref.ref(one) for one in channel.subchannels)]
    forget = channel.on_close(print)
    del channel, stream, silent
    assert wait_until(lambda: (gc.collect(), not any(one() for one in gone))[1])
    timer.advance(60)  # the health check has no subchannel any more
    forget()
    assert timer.pending == 0


# Threads


def test_calls_go_on_while_instances_change(shops, open_balanced):
    """While subchannels are made, removed, drained and marked unhealthy on another thread."""
    channel = open_balanced(*shops)
    calls, failures, over = calls_of(channel), [], threading.Event()

    def make_calls():
        while not over.is_set():
            for name, call in calls.items():
                try:
                    assert call() == b"ab"
                except Exception as error:  # noqa: BLE001
                    failures.append((name, error))

    threads = [threading.Thread(target=make_calls) for _ in range(3)]
    for thread in threads:
        thread.start()
    for round_ in range(60):
        left_out = shops[round_ % 3]
        for one in channel.subchannels:
            one.mark_unhealthy("the test")
        channel.update([instance(one) for one in shops if one is not left_out])
        channel.subchannels[0].channel.drain()
        made = sum(counts(shops))
        assert wait_until(lambda made=made: sum(counts(shops)) > made + 5 or failures)
    over.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert failures == []


@pytest.mark.parametrize("round_", range(3))
def test_calls_that_are_made_during_close_end(shops, open_balanced, round_):
    channel = open_balanced(*shops)
    calls, ends, begun = calls_of(channel), [], threading.Semaphore(0)

    def make_calls():
        call = list(calls.values())
        for number in range(1_000_000):
            if number == 5:
                begun.release()
            try:
                call[number % len(call)]()
            except ValueError as error:
                ends.append(str(error))
                return
            except (grpc.RpcError, grpc.FutureCancelledError):
                pass

    threads = [threading.Thread(target=make_calls) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert begun.acquire(timeout=WAIT_S)
    channel.close()
    for thread in threads:
        thread.join(WAIT_S)
    assert ends == ["Cannot invoke RPC on closed channel!"] * 3
