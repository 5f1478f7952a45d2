"""`BroadcastChannel`: each unary call goes to all servers at once."""

import grpc
import pytest

from fixtures.balanced_channels import connect, hang_all, instance
from fixtures.client_interceptors import noting
from fixtures.grpcio import BUGS_OF_INTERCEPTORS
from fixtures.shop import UNARY_STREAM, UNARY_UNARY, Fail
from fixtures.waiting import WAIT_S, in_thread, wait_until
from fixtures.ways import failure_of
from fixtures.worlds import only_sync
from rpcwheel import MethodPolicy, RetryPolicy
from rpcwheel.balancer import BroadcastChannel, BroadcastFailed
from rpcwheel.errors import ConfigurationError
from rpcwheel.events import CallbackFailed


@pytest.fixture
def channels(world, shops, timer):
    """A channel to each server, without a balancer."""
    make = world.module("transport").ReconnectingChannel
    return [world.keep(world.do(make, shop.target, timer=timer)) for shop in shops]


def broadcast(world, channel, **options):
    """Call all servers, and wait for the responses."""
    front = world.module("balancer").BroadcastChannel(channel)
    return world.do(front.unary_unary(UNARY_UNARY), b"x", **{"timeout": WAIT_S} | options)


def failure(world, channel, **options):
    with pytest.raises(BroadcastFailed) as caught:
        broadcast(world, channel, **options)
    return caught.value


def test_each_server_is_called_and_the_responses_are_by_address(world, shops, open_balanced):
    channel = open_balanced()
    same = [instance(shops[0], id=name) for name in ("before", "now")]
    draining = instance(shops[2], status="DRAINING")
    world.do(channel.update, [*same, instance(shops[1]), draining])
    world.do(channel.subchannels[0].mark_unhealthy, "the test says so")
    responses = broadcast(world, channel, metadata=(("a", "b"),))
    names = [f"{shops[0].target} #2", *(shop.target for shop in shops)]
    assert responses == dict.fromkeys(names, b"x")
    assert [shop.count_calls(a="b") for shop in shops] == [2, 1, 1]
    assert all(0 < shop.calls[0].time_remaining < 1.1 * WAIT_S for shop in shops)
    assert wait_until(lambda: channel.calls == 0)


def test_a_failure_is_raised_with_the_responses_of_the_others(world, shops, dead, open_balanced):
    shops[1].then(Fail("INTERNAL", "oops"))
    error = failure(world, open_balanced(shops[0], shops[1], dead))
    assert error.responses == {shops[0].target: b"x"}
    codes = {address: one.code().name for address, one in error.errors.items()}
    assert codes == {shops[1].target: "INTERNAL", f"127.0.0.1:{dead}": "UNAVAILABLE"}


def test_a_server_whose_connect_raises_is_one_of_the_errors(world, shops, open_balanced, events):
    def connect(one, options):
        if one.id == "a":
            raise RuntimeError("no certificate")
        return world.grpc.insecure_channel(one.target, options)

    channel = open_balanced(connect=connect)
    world.do(channel.update, [instance(1, id="a"), instance(shops[0], id="b")])
    error = failure(world, channel)
    assert "no certificate" in error.details()
    assert error.responses == {shops[0].target: b"x"}
    assert wait_until(lambda: any(isinstance(event, CallbackFailed) for event in events))


def test_failures_count_for_outlier_ejection(world, shops, open_balanced):
    channel = open_balanced(*shops)
    connect(world, channel)
    shops[0].then(*[Fail("UNAVAILABLE")] * 5)
    for _ in range(5):
        failure(world, channel)
    unhealthy = lambda: [one.address for one in channel.subchannels if not one.healthy]  # noqa: E731
    assert wait_until(lambda: unhealthy() == [shops[0].target])


# Without servers


@pytest.mark.parametrize("options", [{"timeout": None}, {"wait_for_ready": True}, {}])
def test_it_waits_until_instances_are_known(world, shops, open_balanced, options):
    channel = open_balanced()
    waiting = in_thread(broadcast, world, channel, **options)
    world.do(channel.update, [instance(shops[0])])
    assert waiting.result(WAIT_S) == {shops[0].target: b"x"}


@pytest.mark.parametrize(("limit", "code"), [(None, "UNAVAILABLE"), (0.02, "DEADLINE_EXCEEDED")])
def test_it_waits_no_longer_than_pick_timeout_or_its_deadline(world, open_balanced, limit, code):
    channel = open_balanced(policy={"pick_timeout": 0.05})
    unknown = "no instance of test.Shop is known"
    assert failure_of(lambda: broadcast(world, channel, timeout=limit)) == (code, f"{unknown} yet")
    world.do(channel.update, [])
    assert failure_of(lambda: broadcast(world, channel)) == ("UNAVAILABLE", unknown)


def test_with_wait_for_ready_it_waits_for_all_servers_at_once(world, shops, open_balanced):
    channel = open_balanced(*shops)
    for shop in shops:
        shop.kill()
    options = {"timeout": 2 * WAIT_S, "wait_for_ready": True}
    waiting = in_thread(broadcast, world, channel, **options)
    first = [shops[0], shops[2]]
    for shop in first:
        shop.start()
    assert wait_until(lambda: all(shop.calls for shop in first))  # one is still down
    shops[1].start()
    assert waiting.result(2 * WAIT_S) == {shop.target: b"x" for shop in shops}


def test_a_call_on_a_closed_channel_raises(world, open_balanced):
    channel = open_balanced(1)
    world.do(channel.close)
    with pytest.raises(world.closed_error, match="closed"):
        broadcast(world, channel)


# Several channels


def test_responses_of_channels_are_by_target(world, shops, channels):
    bare = world.channel(shops[0].target)
    *names, last = broadcast(world, [*channels, bare])
    assert names == [shop.target for shop in shops]
    # A channel of grpc.aio hides its target; that of grpc names it depending on its version.
    assert last in {"channel", f"dns:///{shops[0].target}", f"{shops[0].target} #2"}
    assert broadcast(world, [channels[0]] * 2).keys() == {names[0], f"{names[0]} #2"}


@BUGS_OF_INTERCEPTORS
def test_an_exception_of_an_interceptor_is_the_error_of_its_server(world, shops, channels):
    def fail(_):
        raise KeyError("a bug")

    broken = world.channel(shops[0].target, interceptors=noting(world, fail))
    error = failure(world, [broken, channels[1]])
    assert "KeyError: 'a bug'" in error.details()
    assert error.code() is grpc.StatusCode.UNKNOWN
    assert error.responses == {shops[1].target: b"x"}


def test_a_channel_that_is_closed_meanwhile_is_one_of_the_errors(world, shops, channels):
    hangs = hang_all(shops)
    waiting = in_thread(failure, world, channels)
    assert all(hang.begun.wait(WAIT_S) for hang in hangs)
    world.do(channels[0].close)
    for shop in shops[1:]:
        shop.calls[0].ended.set()
    error = waiting.result(WAIT_S)
    assert error.code() is grpc.StatusCode.CANCELLED
    assert len(error.responses) == 2


# The channel


def test_streams_are_refused(world, open_balanced):
    channel = world.module("balancer").BroadcastChannel(open_balanced(1))
    stream = channel.unary_stream(UNARY_STREAM)  # stubs make all multicallables
    with pytest.raises(ConfigurationError, match="for unary calls"):
        world.do(stream, b"x")


def test_close_leaves_the_balanced_channel_open(world, open_balanced):
    channel = open_balanced(1)
    world.do(world.module("balancer").BroadcastChannel(channel).close)
    assert not channel.closed


def test_a_channel_with_policies_is_refused(world, open_balanced):
    kit = world.keep(world.api.Kit())
    with pytest.raises(TypeError, match="apply them to the result"):
        world.module("balancer").BroadcastChannel(world.do(kit.intercept_channel, open_balanced(1)))


def test_policies_apply_to_a_broadcast(world, shops, open_balanced):
    retry = RetryPolicy(retry_on={"INTERNAL"}, max_attempts=2, backoff=0.01)
    methods = {UNARY_UNARY: MethodPolicy(idempotent=True)}
    kit = world.keep(world.api.Kit(retry=retry, methods=methods, timeout=WAIT_S))
    channel = world.module("balancer").BroadcastChannel(open_balanced(*shops))
    fronts = [world.do(kit.intercept_channel, channel)]
    if world.name == "sync":
        fronts.append(grpc.intercept_channel(channel, *kit.client_interceptors()))
    for front in fronts:
        shops[0].then(Fail("INTERNAL"))
        responses = world.do(front.unary_unary(UNARY_UNARY), b"x")
        assert responses == {shop.target: b"x" for shop in shops}
        shops[0].then(*[Fail("INTERNAL")] * 2)
        with pytest.raises(BroadcastFailed) as caught:
            world.do(front.unary_unary(UNARY_UNARY), b"x")
        assert len(caught.value.responses) == 2


# Only in one world


@only_sync
class TestSyncOnly:
    """Futures and subscriptions."""

    def test_futures_are_refused(self, open_balanced):
        channel = BroadcastChannel(open_balanced(1))
        with pytest.raises(ConfigurationError, match="its calls block"):
            channel.unary_unary(UNARY_UNARY).future(b"x")

    def test_a_server_whose_channel_a_callback_closes_is_one_of_the_errors(
        self, world, shops, open_balanced
    ):
        def on_subchannel(one):
            if one is first:
                one.channel.close()

        channel = open_balanced(*shops[:2], on_subchannel=on_subchannel)
        first = channel.subchannels[0]
        error = failure(world, channel)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert list(error.errors) == [first.address]

    def test_the_state_is_that_of_the_balanced_channel(self, open_balanced):
        states, balanced = [], open_balanced(1)
        channel, several = BroadcastChannel(balanced), BroadcastChannel([balanced])
        channel.subscribe(states.append)
        assert wait_until(lambda: states)
        channel.unsubscribe(states.append)
        with pytest.raises(ConfigurationError, match="has its own state"):
            several.subscribe(states.append)
        several.unsubscribe(states.append)
