"""What only a balanced channel of `grpc` has: subscriptions, futures, calls on many threads."""

import gc
import inspect
import threading
from functools import partial

import grpc
import pytest

from fixtures.balanced_channels import connect, instance
from fixtures.client_interceptors import interceptor
from fixtures.shop import UNARY_STREAM, UNARY_UNARY
from fixtures.waiting import WAIT_S, in_thread, wait_until
from fixtures.ways import failure_of
from fixtures.worlds import KINDS, only_sync
from rpcwheel.balancer import BalancedChannel, RingHash
from rpcwheel.errors import TimerStopped
from rpcwheel.events import CallbackFailed, ExecutorRejected

CONNECTING, IDLE, READY, FAILING = (
    grpc.ChannelConnectivity[name] for name in ("CONNECTING", "IDLE", "READY", "TRANSIENT_FAILURE")
)

pytestmark = [only_sync, pytest.mark.usefixtures("world")]


def test_multicallables_take_the_arguments_of_grpc():
    with BalancedChannel("s") as channel, grpc.insecure_channel("127.0.0.1:1") as of_grpc:
        for kind in KINDS:
            ours, theirs = (getattr(one, kind)("/s/M") for one in (channel, of_grpc))
            for name in ("__call__", "with_call", "future"):
                if hasattr(theirs, name):
                    expected = inspect.signature(getattr(theirs, name)).parameters
                    assert list(inspect.signature(getattr(ours, name)).parameters) == list(expected)
    assert channel.closed  # at the end of its block


def test_a_request_that_can_not_be_serialized_does_not_wait(open_balanced):
    channel = open_balanced()  # without instances
    for method in (channel.unary_unary, channel.unary_stream):
        begin = method(UNARY_UNARY, lambda _: 1 / 0)
        begin = getattr(begin, "future", begin)
        assert failure_of(partial(begin, b"x"))[0] == "INTERNAL"  # raised at once, as by grpc
    assert channel.calls == 0


def generate(continuation, details, request):
    """Make a generator of a response stream, as the instrumentation of OpenTelemetry does."""
    yield from continuation(details, request)


def test_a_response_stream_that_an_interceptor_made_a_generator_can_be_read(shops, open_balanced):
    def connect(one, options):
        bare = grpc.insecure_channel(one.target, options)
        return grpc.intercept_channel(bare, interceptor(generate, "unary_stream"))

    channel = open_balanced(connect=connect)
    method = channel.unary_stream(UNARY_STREAM)
    waiting, dropped = method(b"ab"), method(b"cd")
    channel.update([instance(shops[0])])
    assert b"".join(waiting) == b"ab"
    assert next(dropped) == b"c"
    dropped.cancel()
    assert b"".join(method(b"ab")) == b"ab"
    del dropped
    assert wait_until(lambda: (gc.collect(), channel.calls == 0)[1])


def test_subscribers_are_called_with_the_state_and_each_change(shops, open_balanced, timer, events):
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
    channel.unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S)
    assert wait_until(lambda: (timer.advance(0.3), states[-1] is READY)[1])
    channel.update([])
    assert wait_until(lambda: states[-1] is FAILING)
    assert wait_until(lambda: len(threads) >= 4)  # it is called again after it raised
    channel.unsubscribe(states.append)
    channel.unsubscribe(print)
    channel.unsubscribe(broken)
    assert wait_until(lambda: timer.pending == 0)
    assert threading.current_thread() not in threads
    assert {type(event) for event in events} == {CallbackFailed}
    channel.subscribe(states.append)
    assert wait_until(lambda: timer.pending)
    channel.close()
    assert timer.pending == 0
    channel.subscribe(print)


def test_a_subscription_whose_timer_takes_no_timeout_is_reported(timer, events):
    timer.stop()
    with BalancedChannel("s", timer=timer) as channel:
        channel.subscribe(print)
        assert wait_until(lambda: events)
    rejected = events[0]
    assert isinstance(rejected, ExecutorRejected)
    assert (rejected.timer, rejected.task) == ("manual-timer", "read of the state of s")
    assert isinstance(rejected.error, TimerStopped)


def test_subscribers_do_not_cost_a_thread_each(world, shops, open_balanced):
    channel = open_balanced(*shops)
    connect(world, channel)
    before = set(threading.enumerate())
    seen = [[] for _ in range(5)]
    callbacks = [one.append for one in seen]
    for callback in callbacks:
        channel.subscribe(callback)
    assert wait_until(lambda: all(seen))
    assert len(set(threading.enumerate()) - before) < len(callbacks)
    for callback in callbacks:
        channel.unsubscribe(callback)


def test_close_ends_blocked_calls(open_balanced):
    picks = []

    class Waiting(RingHash):
        def prepare(self, subchannels, weights):
            return lambda method, *_: picks.append(method)  # None: the call waits

    channel = open_balanced(1, lb_policy=Waiting("x-user"))
    unary, stream = channel.unary_unary(UNARY_UNARY), channel.unary_stream(UNARY_STREAM)
    blocked = in_thread(unary, b"x")
    assert wait_until(lambda: len(picks) > 2)  # the third while it waits
    held = [unary.future(b"x"), stream(b"x")]
    channel.close()
    with pytest.raises(grpc.RpcError, match="Channel closed!") as ended:
        blocked.result(WAIT_S)
    ends = [(call.code(), call.details()) for call in (ended.value, *held)]
    assert ends == [(grpc.StatusCode.CANCELLED, "Channel closed!")] * 3


def test_first_calls_on_several_threads_share_one_connection(shops, open_balanced):
    entered, gate = threading.Semaphore(0), threading.Event()

    def connect(one, options):
        entered.release()
        assert gate.wait(WAIT_S)
        return grpc.insecure_channel(one.target, options)

    made = []
    channel = open_balanced(shops[0], connect=connect, on_subchannel=made.append)
    call = channel.unary_unary(UNARY_UNARY)
    calls = [in_thread(call, b"x", timeout=WAIT_S) for _ in range(4)]
    assert entered.acquire(timeout=WAIT_S)
    gate.set()
    assert [call.result(WAIT_S) for call in calls] == [b"x"] * 4
    assert made == list(channel.subchannels)
    assert len({seen.peer for seen in shops[0].calls}) == 1
