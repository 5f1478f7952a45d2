"""Calls that begin while no subchannel is READY."""

import gc
import socket
import weakref

import grpc
import pytest

from fixtures.balanced_channels import First, connect, counts, instance, wait_until_lost
from fixtures.shop import UNARY_UNARY, Fail, Hang
from fixtures.waiting import WAIT_S, in_thread, wait_until
from fixtures.ways import all_at_once, hanging_call, ways_to_call
from fixtures.worlds import KINDS, Stop
from rpcwheel.balancer import RingHash
from rpcwheel.events import CallbackFailed

FAILING = grpc.ChannelConnectivity.TRANSIENT_FAILURE

NO_LIMIT = {"pick_timeout": 3600}

UNKNOWN = "no instance of test.Shop is known"


def all_of(results):
    """The result that all calls have."""
    (result,) = set(results.values())
    return result


# For instances


def test_calls_wait_until_instances_are_known(world, shops, open_balanced):
    channel = open_balanced(policy=NO_LIMIT)
    known = lambda: world.do(channel.update, [instance(shops[0])])  # noqa: E731
    assert all_of(all_at_once(world, channel, known)) == b"ab"


def test_calls_wait_no_longer_than_pick_timeout(world, open_balanced):
    channel = open_balanced(policy={"pick_timeout": 0.05})
    end = ("UNAVAILABLE", f"{UNKNOWN} yet")
    assert all_of(all_at_once(world, channel, timeout=WAIT_S)) == end
    world.do(channel.report_error, "the registry is away", wait=True)
    for kind in KINDS:
        call = world.call(channel, kind)
        assert call.error().details() == f"{UNKNOWN} yet: the registry is away"
        assert (call.initial_metadata(), call.trailing_metadata()) == ({}, {})
    at_once = open_balanced(policy={"pick_timeout": 0})
    assert all_of(all_at_once(world, at_once)) == end


def test_a_reported_error_ends_calls_that_wait_for_instances(world, shops, open_balanced):
    channel = open_balanced(policy=NO_LIMIT)
    patient = world.call(channel, wait_for_ready=True)
    report = lambda: world.do(channel.report_error, "etcd is away")  # noqa: E731
    end = ("UNAVAILABLE", f"{UNKNOWN}: etcd is away")
    assert all_of(all_at_once(world, channel, report)) == end
    world.do(channel.update, [instance(shops[0])])
    assert patient.result() == b"x"
    world.do(channel.report_error, "too late")
    assert world.call(channel).result() == b"x"


def test_with_wait_for_ready_calls_wait_for_an_instance(world, shops, open_balanced):
    channel = open_balanced(policy={"pick_timeout": 0})
    world.do(channel.update, [])
    error = world.call(channel, timeout=0.1, wait_for_ready=True).error()
    assert (error.code().name, error.details()) == ("DEADLINE_EXCEEDED", UNKNOWN)
    known = lambda: world.do(channel.update, [instance(shops[0])])  # noqa: E731
    assert all_of(all_at_once(world, channel, known, wait_for_ready=True)) == b"ab"


@pytest.mark.parametrize(
    "options", [{"timeout": 0.05}, {"timeout": 0}, {"timeout": 0.05, "wait_for_ready": True}]
)
def test_the_deadline_of_a_call_ends_its_wait(world, open_balanced, options):
    ends = all_at_once(world, open_balanced(policy={"pick_timeout": 0.9}), **options)
    assert {code for code, _ in ends.values()} == {"DEADLINE_EXCEEDED"}


def test_the_wait_counts_towards_the_timeout(world, shops, open_balanced):
    channel = open_balanced(policy=NO_LIMIT)
    call = world.call(channel, timeout=90)
    assert wait_until(lambda: call.ask("time_remaining") < 89.7)
    shops[0].then(hang := Hang())
    world.do(channel.update, [instance(shops[0])])
    assert hang.begun.wait(WAIT_S)
    assert call.ask("time_remaining") < 89.7
    assert shops[0].calls[0].time_remaining < 90 - 0.1  # gRPC rounds to tenths
    call.cancel()


# For a connection


@pytest.mark.parametrize("how", ["an update", "a server that starts"])
def test_with_wait_for_ready_calls_wait_for_the_first_server(
    world, shops, dead, open_balanced, how
):
    shop = shops[0]
    shop.kill()
    channel = open_balanced(dead, shop, lb_policy=First(), policy={"self_preservation": False})

    def act():
        assert wait_until(lambda: world.do(channel.get_state) is FAILING)
        if how == "an update":
            world.do(channel.update, [])
            world.do(channel.update, [instance(shops[1])])
        else:
            shop.start()

    assert all_of(all_at_once(world, channel, act, wait_for_ready=True)) == b"ab"


def test_with_wait_for_ready_a_status_of_the_server_ends_a_call(world, shops, open_balanced):
    channel = open_balanced(shops[0])
    count = len(ways_to_call(world, channel))
    shops[0].then(*[Fail("NOT_FOUND", "no such order", read=True)] * count)
    ends = all_at_once(world, channel, wait_for_ready=True)
    assert all_of(ends) == ("NOT_FOUND", "no such order")
    assert counts(shops) == [count, 0, 0]


def test_a_server_that_accepts_connections_and_never_answers_gets_no_call(
    world, shops, open_balanced
):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        end = ("DEADLINE_EXCEEDED", "no connection to a server of test.Shop became ready in time")
        assert all_of(all_at_once(world, open_balanced(port), timeout=0.05)) == end
        assert all_of(all_at_once(world, open_balanced(port, shops[0]))) == b"ab"


@pytest.mark.parametrize("forced", [False, True])
def test_a_call_that_waits_sees_that_a_server_returns(world, shops, open_balanced, forced):
    channel = open_balanced(shops[0], policy=NO_LIMIT)
    connect(world, channel)
    shops[0].kill()
    if forced:
        world.do(lambda: channel.subchannels[0].channel.reconnect("the test", force=True))
    wait_until_lost(world, channel, shops[0])
    waiting = world.call(channel, "unary_stream", b"ab", wait_for_ready=True)
    shops[0].start()
    assert waiting.result() == [b"a", b"b"]


def test_many_calls_that_wait_go_to_the_owners_of_their_keys(world, shops, open_balanced):
    channel = open_balanced(lb_policy="ring_hash:user")
    waiting = [world.call(channel, metadata=(("user", str(number % 50)),)) for number in range(200)]
    world.do(channel.update, [instance(shop) for shop in shops])
    assert [call.result() for call in waiting] == [b"x"] * 200
    assert all(counts(shops))
    users = [{seen.metadata["user"] for seen in shop.calls} for shop in shops]
    assert sum(map(len, users)) == 50
    assert [one.calls for one in channel.subchannels] == [0, 0, 0]


def test_calls_wait_on_after_user_code_raised_what_is_no_exception(
    world, shops, open_balanced, events, set_limit
):
    set_limit("balancer.subchannels.RECONNECT_NS", 1)
    if world.name == "aio":
        world.loop.set_exception_handler(lambda *_: None)  # gets the exception
    errors = [Stop()]

    def connect(one, options):
        if errors:
            raise errors.pop()
        return world.grpc.insecure_channel(one.target, options)

    channel = open_balanced(connect=connect, policy=NO_LIMIT)
    call = world.call(channel, wait_for_ready=True)
    world.do(channel.update, [instance(shops[0])])
    assert call.result() == b"x"
    assert isinstance(events[0], CallbackFailed)


# What a call keeps while it waits


def test_request_and_metadata_are_those_of_the_begin(world, shops, open_balanced):
    channel = open_balanced()
    metadata, request = [("from", "caller")], bytearray(b"x")
    method = channel.unary_unary(UNARY_UNARY, request_serializer=bytes)
    call = world.begin(method, "unary_unary", (request,), metadata=metadata)
    metadata[0], request[0] = ("from", "later"), ord("y")
    world.do(channel.update, [instance(shops[0])])
    assert call.result() == b"x"
    assert shops[0].calls[0].metadata["from"] == "caller"


def test_an_error_of_a_key_function_is_raised_by_its_call_only(world, shops, open_balanced):
    def key(_, request, __):
        return {b"good": "good"}[request]

    channel = open_balanced(lb_policy=RingHash(key), policy=NO_LIMIT)
    calls = [world.call(channel, "unary_unary", one) for one in (b"bad", b"good") * 2]
    method = channel.unary_unary(UNARY_UNARY)
    blocked = in_thread(world.do, method, b"bad")
    world.do(channel.update, [instance(shops[0])])
    for one in (calls[0], calls[2], blocked):
        with pytest.raises(KeyError, match="bad"):
            one.result()
    assert (calls[1].result(), calls[3].result()) == (b"good", b"good")
    code = {"sync": "INTERNAL", "aio": "UNKNOWN"}[world.name]
    assert calls[0].code().name == code
    connect(world, channel)
    for _ in range(2):  # also without a wait
        with pytest.raises(KeyError, match="bad"):
            world.do(method, b"bad")
    assert channel.calls == 0


def test_user_code_runs_without_the_lock_of_the_channel(world, shops, open_balanced):
    """Functions for keys, and callbacks, may wait for a thread that updates the channel."""
    made = []

    def update_on_a_thread(*_):
        instances = [instance(shops[0]), instance(shops[1])]
        made.append(in_thread(channel.update, instances).result(WAIT_S))
        return "k"

    def on_subchannel(subchannel):
        subchannel.mark_unhealthy("the test")
        subchannel.mark_healthy()
        update_on_a_thread()

    key = RingHash(update_on_a_thread)
    channel = open_balanced(lb_policy=key, on_subchannel=on_subchannel, policy=NO_LIMIT)
    waiting = world.call(channel)
    world.do(channel.update, [instance(shops[0])])
    assert waiting.result() == b"x"
    assert all_of(all_at_once(world, channel)) == b"ab"
    assert len(made) > 8


# Its end


def test_a_call_can_be_canceled_while_it_waits_and_while_it_runs(world, shops, open_balanced):
    channel = open_balanced(policy=NO_LIMIT)
    for kind in KINDS:
        ended = []
        call = world.call(channel, kind)
        call.on_done(ended.append)
        assert call.cancel()
        assert not call.cancel()
        assert (call.cancelled(), call.done()) == (True, True)
        assert call.code() is grpc.StatusCode.CANCELLED
        assert wait_until(lambda ended=ended, call=call: ended == [call.grpc_call])
    world.do(channel.update, [instance(shops[0])])
    for kind in KINDS:
        running = hanging_call(world, shops[0], channel, kind)
        assert running.cancel()
        assert running.code() is grpc.StatusCode.CANCELLED
    assert wait_until(lambda: channel.calls == 0)
    assert counts(shops) == [len(KINDS), 0, 0]


def test_a_response_stream_that_is_dropped_while_it_waits_is_not_begun(world, shops, open_balanced):
    channel = open_balanced(policy=NO_LIMIT)
    call = world.call(channel, "unary_stream", b"ab")
    gone = weakref.ref(call.grpc_call)
    del call
    assert wait_until(lambda: (gc.collect(), gone())[1] is None)
    kept = world.call(channel)
    world.do(channel.update, [instance(shops[0])])
    assert kept.result() == b"x"
    assert [seen.method for seen in shops[0].calls] == [UNARY_UNARY]


def test_wrong_arguments_of_one_call_do_not_disturb_others(world, shops, open_balanced):
    channel = open_balanced(policy=NO_LIMIT)
    good = world.call(channel)
    with pytest.raises(TypeError):
        world.call(channel, timeout="soon")
    if world.name == "aio":
        with pytest.raises(grpc.aio.UsageError, match="Call credentials"):
            world.call(channel, credentials="secret")
    world.do(channel.update, [instance(shops[0])])
    assert good.result() == b"x"
