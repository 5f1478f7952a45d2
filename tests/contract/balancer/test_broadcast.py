"""`BroadcastChannel`: each unary call goes to all servers at once."""

import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from fixtures.balanced_channels import instance
from fixtures.grpc_servers import IMPATIENT
from fixtures.shop import UNARY_STREAM, UNARY_UNARY, Fail, Hang
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel import Kit, MethodPolicy, RetryPolicy
from rpcwheel.balancer import BalancedChannel, BalancerPolicy, BroadcastChannel, BroadcastFailed
from rpcwheel.errors import ConfigurationError
from rpcwheel.events import CallbackFailed
from rpcwheel.transport import ReconnectingChannel


@pytest.fixture
def open_channel(timer):
    """Open balanced channels to servers or ports; without any, the instances are not known."""
    channels = []

    def open_one(*targets, **settings):
        instances = [instance(one) for one in targets] if targets else None
        settings = {"timer": timer, "options": IMPATIENT} | settings
        channels.append(BalancedChannel("test.Shop", instances, **settings))
        return channels[-1]

    yield open_one
    for one in channels:
        one.close()
    assert timer.pending == 0


@pytest.fixture
def channels(shops):
    """A channel to each server."""
    channels = [ReconnectingChannel(shop.target) for shop in shops]
    yield channels
    for channel in channels:
        channel.close()


def broadcast(channel):
    return BroadcastChannel(channel).unary_unary(UNARY_UNARY)


def counts(shops):
    return [len(shop.calls) for shop in shops]


def test_each_server_is_called_and_the_responses_are_by_address(shops, open_channel):
    channel = open_channel(*shops)
    responses = broadcast(channel)(b"x", timeout=WAIT_S, metadata=iter([("a", "b")]))
    assert responses == {shop.target: b"x" for shop in shops}
    assert [shop.count_calls(a="b") for shop in shops] == [1, 1, 1]
    assert channel.calls == 0


def test_unhealthy_and_draining_servers_are_called(shops, open_channel):
    channel = open_channel()
    channel.update([instance(shops[0]), instance(shops[1]), instance(shops[2], status="DRAINING")])
    channel.subchannels[0].mark_unhealthy("the test says so")
    broadcast(channel)(b"x", timeout=WAIT_S)
    assert counts(shops) == [1, 1, 1]


def test_instances_with_the_same_address_have_a_response_each(shops, open_channel):
    channel = open_channel()
    same = [instance(shops[0], id=name) for name in ("before", "now")]
    channel.update([*same, instance(shops[1])])
    target = shops[0].target
    names = {target, f"{target} #2", shops[1].target}
    assert broadcast(channel)(b"x", timeout=WAIT_S) == dict.fromkeys(names, b"x")
    shops[0].then(Fail("INTERNAL"))
    with pytest.raises(BroadcastFailed, match="1 of 3 servers failed") as caught:
        broadcast(channel)(b"x", timeout=WAIT_S)
    assert {*caught.value.responses, *caught.value.errors} == names


def test_all_servers_are_called_at_once(shops, open_channel):
    hangs = [Hang(), Hang(), Hang()]
    for shop, hang in zip(shops, hangs, strict=True):
        shop.then(hang)
    call = broadcast(open_channel(*shops))
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(call, b"x", timeout=WAIT_S)
        assert all(hang.begun.wait(WAIT_S) for hang in hangs)
        for shop in shops:
            shop.calls[0].ended.set()
        assert len(waiting.result(WAIT_S)) == 3


def test_a_failure_is_raised_with_the_responses_of_the_others(shops, dead, open_channel):
    shops[1].then(Fail("INTERNAL", "oops"))
    with pytest.raises(BroadcastFailed) as caught:
        broadcast(open_channel(shops[0], shops[1], dead))(b"x", timeout=WAIT_S)
    error = caught.value
    assert error.responses == {shops[0].target: b"x"}
    codes = {address: one.code().name for address, one in error.errors.items()}
    assert codes == {shops[1].target: "INTERNAL", f"127.0.0.1:{dead}": "UNAVAILABLE"}


def test_the_deadline_applies_to_each_call(shops, open_channel):
    shops[0].then(Hang())
    with pytest.raises(BroadcastFailed) as caught:
        broadcast(open_channel(shops[0]))(b"x", timeout=0.2)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_server_whose_connect_raises_is_one_of_the_errors(shops, open_channel, events):
    def connect(one, options):
        if one.id == "a":
            raise RuntimeError("no certificate")
        return grpc.insecure_channel(one.target, options)

    channel = open_channel(connect=connect)
    channel.update([instance(1, id="a"), instance(shops[0], id="b")])
    with pytest.raises(BroadcastFailed, match="no certificate") as caught:
        broadcast(channel)(b"x", timeout=WAIT_S)
    assert caught.value.responses == {shops[0].target: b"x"}
    wait_until(lambda: any(isinstance(event, CallbackFailed) for event in events))


def test_a_server_whose_channel_is_closed_meanwhile_is_one_of_the_errors(shops, open_channel):
    channel = open_channel(
        *shops[:2], on_subchannel=lambda one: one is first and one.channel.close()
    )
    first = channel.subchannels[0]
    with pytest.raises(BroadcastFailed) as caught:
        broadcast(channel)(b"x", timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert list(caught.value.errors) == [first.address]


def test_failures_count_for_outlier_ejection(shops, open_channel):
    channel = open_channel(*shops)
    shops[0].then(*[Fail("UNAVAILABLE")] * 10_000)

    def unhealthy_after_a_failure():
        with pytest.raises(BroadcastFailed):
            broadcast(channel)(b"x", timeout=WAIT_S)
        return [one.address for one in channel.subchannels if not one.healthy]

    assert wait_until(unhealthy_after_a_failure)
    assert unhealthy_after_a_failure() == [shops[0].target]


# Without servers


def test_without_instances_it_fails_as_a_call_of_the_channel_does(open_channel):
    channel = open_channel()
    channel.update([])
    with pytest.raises(grpc.RpcError, match=r"no instance of test\.Shop is known") as caught:
        broadcast(channel)(b"x", timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("options", [{}, {"wait_for_ready": True}, {"timeout": WAIT_S}])
def test_it_waits_until_instances_are_known(shops, open_channel, options):
    channel = open_channel(balancer_policy=BalancerPolicy(pick_timeout=WAIT_S))
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(broadcast(channel), b"x", **options)
        channel.update([instance(shops[0])])
        assert waiting.result(WAIT_S) == {shops[0].target: b"x"}


def test_it_waits_no_longer_than_pick_timeout(open_channel):
    with pytest.raises(grpc.RpcError, match="known yet") as caught:
        broadcast(open_channel(balancer_policy=BalancerPolicy(pick_timeout=0.05)))(b"x")
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_with_wait_for_ready_it_waits_for_all_servers_at_once(shops, open_channel):
    channel = open_channel(*shops)
    for shop in shops:
        shop.kill()
    call = broadcast(channel)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(call, b"x", timeout=2 * WAIT_S, wait_for_ready=True)
        first = [shops[0], shops[2]]
        for shop in first:
            shop.start()
        wait_until(lambda: all(shop.calls for shop in first))  # one is still down
        shops[1].start()
        assert waiting.result(2 * WAIT_S) == {shop.target: b"x" for shop in shops}


def test_a_call_on_a_closed_channel_raises(open_channel, shops):
    channel = open_channel(shops[0])
    channel.close()
    with pytest.raises(ValueError, match="closed channel"):
        broadcast(channel)(b"x")


# Several channels


def test_responses_of_channels_are_by_target(shops, channels):
    with grpc.insecure_channel(shops[0].target) as bare:
        responses = broadcast([*channels, bare])(b"x", timeout=WAIT_S)
    *names, last = responses
    assert names == [shop.target for shop in shops]
    assert last in {f"dns:///{shops[0].target}", f"{shops[0].target} #2"}  # by version of grpcio


def test_an_exception_of_an_interceptor_is_the_error_of_its_server(shops, channels):
    class Broken(grpc.UnaryUnaryClientInterceptor):
        def intercept_unary_unary(self, continuation, details, request):
            raise KeyError("a bug")

    broken = grpc.intercept_channel(channels[0], Broken())
    with pytest.raises(BroadcastFailed, match="KeyError: 'a bug'") as caught:
        broadcast([broken, channels[1]])(b"x", timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.UNKNOWN
    assert caught.value.responses == {shops[1].target: b"x"}


def test_a_channel_that_is_closed_meanwhile_is_one_of_the_errors(shops, channels):
    hangs = [Hang(), Hang(), Hang()]
    for shop, hang in zip(shops, hangs, strict=True):
        shop.then(hang)
    call, got = broadcast(channels), []

    def run():
        with pytest.raises(BroadcastFailed) as caught:
            call(b"x", timeout=WAIT_S)
        got.append(caught.value)

    thread = threading.Thread(target=run)
    thread.start()
    assert all(hang.begun.wait(WAIT_S) for hang in hangs)
    channels[0].close()
    for shop in shops[1:]:
        shop.calls[0].ended.set()
    thread.join(WAIT_S)
    assert got[0].code() is grpc.StatusCode.CANCELLED
    assert len(got[0].responses) == 2


# The channel


def test_the_state_is_that_of_the_balanced_channel(shops, open_channel, channels):
    states = []
    channel = BroadcastChannel(open_channel(shops[0]))
    channel.subscribe(states.append)
    wait_until(lambda: states)
    channel.unsubscribe(states.append)
    with pytest.raises(ConfigurationError, match="has its own state"):
        BroadcastChannel(channels).subscribe(states.append)
    BroadcastChannel(channels).unsubscribe(states.append)


def test_streams_and_futures_are_refused(shops, open_channel):
    channel = BroadcastChannel(open_channel(shops[0]))
    stream = channel.unary_stream(UNARY_STREAM)  # stubs make all multicallables
    with pytest.raises(ConfigurationError, match="for unary calls"):
        stream(b"x")
    with pytest.raises(ConfigurationError, match="its calls block"):
        channel.unary_unary(UNARY_UNARY).future(b"x")


def test_close_leaves_the_balanced_channel_open(shops, open_channel):
    channel = open_channel(shops[0])
    with BroadcastChannel(channel):
        pass
    assert not channel.closed


def test_other_arguments_than_channels_are_refused(shops, open_channel):
    for wrong in (None, "127.0.0.1:50051", [open_channel(shops[0]), None]):
        with pytest.raises(TypeError, match=r"must be a rpcwheel\.BalancedChannel, or a list"):
            BroadcastChannel(wrong)
    with pytest.raises(ConfigurationError, match="empty list"):
        BroadcastChannel([])
    with Kit() as kit, pytest.raises(TypeError, match="apply them to the result"):
        BroadcastChannel(kit.intercept_channel(open_channel(shops[0])))


def test_policies_and_interceptors_in_front_of_it(shops, open_channel):
    retry = RetryPolicy(retry_on={"INTERNAL"}, max_attempts=2, backoff=0.01)
    methods = {UNARY_UNARY: MethodPolicy(idempotent=True)}
    with Kit(retry=retry, methods=methods, timeout=WAIT_S) as kit:
        channel = BroadcastChannel(open_channel(*shops))
        for front in (
            kit.intercept_channel(channel),
            grpc.intercept_channel(channel, *kit.client_interceptors()),
        ):
            shops[0].then(Fail("INTERNAL"))
            responses = front.unary_unary(UNARY_UNARY)(b"x")
            assert responses == {shop.target: b"x" for shop in shops}


def test_behind_interceptors_of_grpc_it_raises_broadcast_failed(shops, open_channel):
    shops[0].then(Fail("INTERNAL"))
    with Kit(timeout=WAIT_S) as kit:
        channel = BroadcastChannel(open_channel(*shops))
        front = grpc.intercept_channel(channel, *kit.client_interceptors())
        with pytest.raises(BroadcastFailed) as caught:
            front.unary_unary(UNARY_UNARY)(b"x")
    assert len(caught.value.responses) == 2
