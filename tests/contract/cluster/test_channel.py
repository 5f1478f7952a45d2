"""A ClusterChannel is a channel of grpc: its calls, its state, its end."""

import gc
import inspect
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

import rpcwheel
from fixtures.clusters import instance
from fixtures.grpc_servers import IMPATIENT
from fixtures.shop import STREAM_STREAM, STREAM_UNARY, UNARY_STREAM, UNARY_UNARY, Fail, Hang
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel import CallPolicy, Kit, RetryPolicy, intercept_channel
from rpcwheel.cluster import ClusterChannel, ClusterPolicy, sync
from rpcwheel.observe import CallbackFailed

IDLE, CONNECTING, READY, FAILING, SHUTDOWN = (
    grpc.ChannelConnectivity[name]
    for name in ("IDLE", "CONNECTING", "READY", "TRANSIENT_FAILURE", "SHUTDOWN")
)


def test_the_package_shows_the_names_for_threads():
    assert {name: getattr(rpcwheel.cluster, name) for name in sync.__all__} == {
        name: getattr(sync, name) for name in sync.__all__
    }


# Calls


class Note(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """An interceptor of somebody's, that hands all through."""

    def intercept_unary_unary(self, continuation, details, request):
        return continuation(details, request)

    intercept_unary_stream = intercept_stream_unary = intercept_stream_stream = (
        intercept_unary_unary
    )


RETRY = RetryPolicy(retry_on={"UNAVAILABLE"}, max_attempts=3, backoff=0.01)
STYLES = {
    "bare": lambda channel: channel,
    "intercepted by grpc": lambda channel: grpc.intercept_channel(channel, Note(), Note()),
    "intercepted by us": lambda channel: intercept_channel(channel, CallPolicy(retry=RETRY)),
    "by a kit": lambda channel: grpc.intercept_channel(
        channel, *Kit(timeout=WAIT_S, retry=RETRY).client_interceptors()
    ),
}


def calls_of(channel):
    """Every way to make a call of each kind, as functions of nothing."""
    unary = channel.unary_unary(UNARY_UNARY)
    pulled = channel.unary_stream(UNARY_STREAM)
    pushed = channel.stream_unary(STREAM_UNARY)
    both = channel.stream_stream(STREAM_STREAM)
    return {
        "unary": lambda: unary(b"ab", timeout=WAIT_S),
        "unary with_call": lambda: unary.with_call(b"ab", timeout=WAIT_S)[0],
        "unary future": lambda: unary.future(b"ab", timeout=WAIT_S).result(),
        "pulled": lambda: b"".join(pulled(b"ab", timeout=WAIT_S)),
        "pushed": lambda: pushed(iter([b"a", b"b"]), timeout=WAIT_S),
        "pushed with_call": lambda: pushed.with_call(iter([b"a", b"b"]), timeout=WAIT_S)[0],
        "pushed future": lambda: pushed.future(iter([b"a", b"b"]), timeout=WAIT_S).result(),
        "both": lambda: b"".join(both(iter([b"a", b"b"]), timeout=WAIT_S)),
    }


@pytest.mark.parametrize("style", STYLES)
def test_a_stub_made_before_an_update_works_after_it(shops, dead, open_cluster, style):
    channel = open_cluster(shops[0])
    calls = calls_of(STYLES[style](channel))
    for shop in shops:
        channel.update([instance(shop)])
        assert {name: call() for name, call in calls.items()} == dict.fromkeys(calls, b"ab")
        assert len(shop.calls) == len(calls)
    channel.update([instance(dead), instance(shop)])
    for _ in range(2):
        channel.unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S)
    # Nobody sees that a member is away.
    assert {name: call() for name, call in calls.items()} == dict.fromkeys(calls, b"ab")
    assert wait_until(lambda: channel.calls == 0)


def test_multi_callables_take_the_arguments_of_grpcs_own():
    with ClusterChannel("s") as channel, grpc.insecure_channel("127.0.0.1:1") as bare:
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            own, of_grpc = (getattr(one, kind)("/s/M") for one in (channel, bare))
            for name in ("__call__", "with_call", "future"):
                if hasattr(of_grpc, name):
                    theirs = inspect.signature(getattr(of_grpc, name)).parameters
                    assert list(inspect.signature(getattr(own, name)).parameters) == list(theirs)


def test_what_is_given_reaches_the_server(shops, open_cluster):
    channel = open_cluster(shops[0])
    answer, call = channel.unary_unary(
        UNARY_UNARY, lambda text: text.encode(), lambda data: data.decode()
    ).with_call("ab", WAIT_S, (("k", "v"),), None, None, grpc.Compression.Gzip)
    seen = shops[0].calls[0]
    assert (answer, call.code(), seen.requests) == ("ab", grpc.StatusCode.OK, [b"ab"])
    assert seen.metadata["k"] == "v"
    assert seen.time_remaining is not None


def test_what_a_server_says_of_a_failure_reaches_the_caller(shops, open_cluster):
    shops[0].then(Fail("NOT_FOUND", "no such order", (("k", "v"),)))
    channel = open_cluster(shops[0])
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S)
    assert caught.value.details() == "no such order"
    assert dict(caught.value.trailing_metadata()) == {"k": "v"}


def test_what_can_not_be_sent_is_the_callers(shops, open_cluster):
    channel = open_cluster(shops[0])
    call = channel.unary_unary(UNARY_UNARY, lambda _: 1 / 0)
    with pytest.raises(grpc.RpcError) as caught:
        call(b"x", timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.INTERNAL


# Its state


def test_its_state_is_the_best_of_its_members(shops, dead, open_cluster):
    channel = open_cluster()
    assert channel.get_state() is CONNECTING
    channel.fail("nobody knows")
    assert channel.get_state() is FAILING
    channel.update([])
    assert channel.get_state() is FAILING
    channel.update([instance(dead), instance(shops[0])])
    assert channel.get_state() is IDLE
    channel.unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S)
    assert channel.get_state() is READY
    channel.close()
    assert channel.get_state() is SHUTDOWN


def test_it_connects_when_it_is_asked_to(shops, dead, open_cluster):
    channel = open_cluster(dead, shops[0])
    channel.get_state(try_to_connect=True)
    assert wait_until(lambda: channel.get_state() is READY)


def test_a_subscriber_is_told_the_state_and_each_change(shops, open_cluster, timer):
    channel, states = open_cluster(), []
    channel.subscribe(states.append)
    assert wait_until(lambda: states == [CONNECTING])
    channel.update([instance(shops[0])])
    assert wait_until(lambda: states == [CONNECTING, IDLE])
    channel.unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S)
    assert wait_until(lambda: (timer.advance(0.3), states[-1] is READY)[1])
    channel.update([])
    assert wait_until(lambda: states[-1] is FAILING)
    channel.unsubscribe(states.append)
    assert wait_until(lambda: timer.pending == 0)
    channel.unsubscribe(print)
    channel.close()
    channel.subscribe(print)


def test_who_waits_for_the_first_connection_gets_it(shops, dead, open_cluster):
    channel = open_cluster(dead, shops[0], timer=None)
    grpc.channel_ready_future(channel).result(timeout=WAIT_S)
    assert channel.get_state() is READY


def test_subscribers_cost_no_thread_each(shops, open_cluster):
    channel = open_cluster(*shops)
    channel.get_state(try_to_connect=True)
    assert wait_until(lambda: channel.get_state() is READY)
    before = set(threading.enumerate())
    told = [[] for _ in range(5)]
    callbacks = [one.append for one in told]
    for callback in callbacks:
        channel.subscribe(callback)
    assert wait_until(lambda: all(told))
    assert len(set(threading.enumerate()) - before) < len(callbacks)
    for callback in callbacks:
        channel.unsubscribe(callback)


def test_one_that_raises_goes_on_being_called_and_harms_nobody(shops, open_cluster, events):
    channel, states = open_cluster(), []

    def broken(state):
        raise RuntimeError(state.name)

    channel.subscribe(broken)
    channel.subscribe(states.append)
    assert wait_until(lambda: states)
    channel.update([instance(shops[0])])
    assert wait_until(lambda: len(states) == 2)
    assert wait_until(lambda: len(events) == 2)
    assert [type(event) for event in events] == [CallbackFailed, CallbackFailed]


def test_a_connect_that_raises_is_told_and_tried_again(shops, open_cluster, events, timer):
    failing = [RuntimeError("not yet")]

    def connect(one, options):
        if failing:
            raise failing.pop()
        return grpc.insecure_channel(one.target, options)

    channel, states = open_cluster(shops[0], connect=connect), []
    channel.subscribe(states.append, try_to_connect=True)
    assert wait_until(lambda: events)
    assert wait_until(lambda: (timer.advance(0.3), READY in states)[1])


# What it says of itself


def test_it_says_what_it_is(shops, dead, open_cluster):
    channel = open_cluster(dead, shops[0])
    channel.members[0].down("the test says so")
    assert repr(channel) == (
        "<ClusterChannel 'test.Shop', 2 members, 1 of them down, calls in flight: 0>"
    )
    assert (channel.name, channel.target) == ("test.Shop", "test.Shop")
    channel.close()
    assert repr(channel) == "<ClusterChannel 'test.Shop', closed, calls in flight: 0>"


def test_a_member_has_the_address_of_its_instance_and_its_channel_has_the_target(open_cluster):
    (member,) = open_cluster(50051).members
    assert (member.address, member.channel.target) == ("127.0.0.1:50051", "ipv4:127.0.0.1:50051")


def test_picks_are_as_for_calls(shops, open_cluster):
    channel = open_cluster(*shops)
    assert {one.id for one in channel.pick(2)} < {one.id for one in channel.members}
    assert len(channel.pick(9)) == 3


def test_over_tls_a_member_is_called_with_credentials(certificates, timer):
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        handler = grpc.unary_unary_rpc_method_handler(lambda request, _: request)
        handlers = grpc.method_handlers_generic_handler("test.Shop", {"UnaryUnary": handler})
        server.add_generic_rpc_handlers([handlers])
        port = server.add_secure_port("localhost:0", certificates.server_credentials())
        server.start()
        one = instance(port, host="localhost", protocol="grpcs")
        settings = {"credentials": certificates.channel_credentials(), "timer": timer}
        with ClusterChannel("s", [one], **settings) as channel:
            assert channel.unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S) == b"x"
        unknown = ClusterChannel("s", [one], timer=timer)  # grpc's own roots don't know it
        with unknown, pytest.raises(grpc.RpcError):
            unknown.unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S)
        server.stop(None).wait()


def test_a_channel_of_grpc_aio_is_no_connection_for_threads(shops, open_cluster):
    def connect(one, options):
        return object()

    channel = open_cluster(shops[0], connect=connect)
    with pytest.raises(TypeError, match="connect must return"):
        channel.unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S)


def test_heartbeats_can_be_put_on_each_member(shops, open_cluster, timer):
    with rpcwheel.HeartbeatManager(timer=timer, interval=1.0) as manager:
        channel = open_cluster(*shops, on_member=lambda member: manager.attach(member.channel))
        for _ in range(3):
            channel.unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S)
        assert timer.pending == 3
        channel.close()


# Its end


def hanging(shop, channel):
    """A call that this server does not answer."""
    shop.then(hang := Hang())
    running = channel.unary_unary(UNARY_UNARY).future(b"x")
    assert hang.begun.wait(WAIT_S)
    return running


def test_closing_ends_calls_and_members_and_tells_listeners_once(shops, open_cluster, timer):
    channel, told = open_cluster(shops[0]), []
    running = hanging(shops[0], channel)
    member = channel.members[0]
    member.down("the test says so")
    channel.on_close(lambda: told.append(running.done()))
    channel.close()
    channel.close()
    assert told == [False]
    assert running.code() is grpc.StatusCode.CANCELLED
    assert (channel.closed, channel.members, member.state, timer.pending) == (True, (), "CLOSED", 0)
    channel.on_close(lambda: told.append("late"))
    assert told == [False, "late"]


def test_who_is_told_of_the_end_can_have_itself_forgotten_and_may_fail(shops, open_cluster, events):
    channel, told = open_cluster(shops[0]), []
    forget = channel.on_close(lambda: told.append("forgotten"))
    channel.on_close(lambda: 1 / 0)
    channel.on_close(lambda: told.append("told"))
    forget()
    channel.close()
    assert told == ["told"]
    assert [type(event) for event in events] == [CallbackFailed]


def test_members_that_drain_are_closed_with_the_rest(shops, open_cluster):
    channel = open_cluster(shops[0])
    running = hanging(shops[0], channel)
    channel.update([])
    channel.close()
    assert running.code() is grpc.StatusCode.CANCELLED


def test_on_a_closed_channel_calls_raise_as_on_one_of_grpc(open_cluster):
    channel = open_cluster()
    channel.close()
    for call in calls_of(channel).values():
        with pytest.raises(ValueError, match="Cannot invoke RPC on closed channel"):
            call()


def test_waiting_calls_are_told_when_the_channel_is_closed(open_cluster):
    channel = open_cluster(policy=ClusterPolicy(wait=3600))
    held = channel.unary_unary(UNARY_UNARY).future(b"x")
    with ThreadPoolExecutor(1) as threads:
        blocked = threads.submit(channel.unary_unary(UNARY_UNARY), b"x")
        channel.close()
        with pytest.raises(ValueError, match="closed channel"):
            blocked.result(WAIT_S)
    assert (held.code(), held.cancelled()) == (grpc.StatusCode.CANCELLED, True)


def test_it_closes_at_the_end_of_a_with(shops, timer):
    with ClusterChannel("s", [instance(shops[0])], timer=timer) as channel:
        channel.unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S)
    assert channel.closed


def test_one_that_is_dropped_is_gone(shops, timer):
    channel = ClusterChannel("s", [instance(one) for one in shops], timer=timer, options=IMPATIENT)
    channel.unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S)
    channel.members[0].down("the test says so")
    gone = [weakref.ref(channel), weakref.ref(channel.members[0])]
    forget = channel.on_close(print)
    del channel
    assert wait_until(lambda: (gc.collect(), [one() for one in gone])[1] == [None, None])
    timer.advance(60)  # what waits for a probe finds nobody
    forget()
    assert timer.pending == 0
