"""Subchannels of a balanced channel: connections, updates, picking, health."""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import grpc
import pytest

from fixtures.balanced_channels import (
    caller,
    counts,
    hanging_call,
    instance,
    subchannel_of,
    wait_until_ready,
)
from fixtures.shop import (
    STREAM_STREAM,
    STREAM_UNARY,
    UNARY_STREAM,
    UNARY_UNARY,
    Fail,
    Hang,
    Shop,
    Silent,
)
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.balancer import OutlierEjectionPolicy, Picker, RingHash
from rpcwheel.events import (
    CallbackFailed,
    StaleInstancesKept,
    SubchannelHealthy,
    SubchannelUnhealthy,
)
from rpcwheel.transport import ReconnectingChannel

IDLE, CONNECTING, READY, FAILING, SHUTDOWN = (
    grpc.ChannelConnectivity[name]
    for name in ("IDLE", "CONNECTING", "READY", "TRANSIENT_FAILURE", "SHUTDOWN")
)

EVERY = {
    "unary": lambda channel: channel.unary_unary(UNARY_UNARY)(b"ab"),
    "future": lambda channel: channel.unary_unary(UNARY_UNARY).future(b"ab").result(),
    "unary_stream": lambda channel: b"".join(channel.unary_stream(UNARY_STREAM)(b"ab")),
    "stream_unary": lambda channel: channel.stream_unary(STREAM_UNARY)(iter([b"a", b"b"])),
    "stream_unary future": lambda channel: (
        channel.stream_unary(STREAM_UNARY).future(iter([b"a", b"b"])).result()
    ),
    "stream_stream": lambda channel: b"".join(
        channel.stream_stream(STREAM_STREAM)(iter([b"a", b"b"]))
    ),
}


class First(Picker):
    """Picks the first subchannel."""

    def prepare(self, subchannels, weights):
        return lambda *_: subchannels[0]


def failure(begin):
    with pytest.raises(grpc.RpcError) as caught:
        begin()
    return caught.value.code().name, caught.value.details()


# Coming and going


def test_all_subchannels_connect_at_the_first_call(shops, open_balanced):
    channel = open_balanced(*shops)
    assert [one.state for one in channel.subchannels] == [IDLE] * 3
    caller(channel)()
    assert wait_until(lambda: [one.state for one in channel.subchannels] == [READY] * 3)


def test_an_update_changes_only_the_connections_that_differ(shops, open_balanced):
    channel = open_balanced(shops[0], shops[1])
    wait_until_ready(channel)
    call = caller(channel)
    for _ in range(4):
        call()
    assert counts(shops) == [2, 2, 0]
    channel.update([instance(shops[0], weight=10), instance(shops[2])])
    wait_until_ready(channel)
    for _ in range(22):
        call()
    assert len({seen.peer for seen in shops[0].calls}) == 1
    assert len(shops[0].calls) <= 5  # weight 10, the other 100
    assert len(shops[1].calls) == 2


def test_calls_of_a_removed_subchannel_go_on(shops, open_balanced):
    removed = []
    channel = open_balanced(shops[0], on_removed=removed.append)
    call = hanging_call(shops[0], channel)
    (gone,) = channel.subchannels
    channel.update([instance(shops[1])])
    assert (gone.state, channel.calls, gone in channel.subchannels) == (SHUTDOWN, 1, False)
    assert removed == [gone]
    assert caller(channel)() == b"x"
    shops[0].calls[0].ended.set()
    assert call.result(WAIT_S) == b"x"
    assert wait_until(lambda: channel.calls == 0 and gone.channel.closed)


def test_calls_that_outlast_the_drain_timeout_end_with_the_reason(shops, open_balanced, timer):
    channel = open_balanced(shops[0], policy={"drain_timeout": 7})
    call = hanging_call(shops[0], channel)
    name = channel.subchannels[0].id
    channel.update([instance(shops[1])])
    timer.advance(7.1)
    error = call.exception(WAIT_S)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert f"channel drained: {name} was removed from test.Shop" in error.details()


def test_an_instance_that_returns_gets_another_subchannel(shops, open_balanced):
    channel = open_balanced(shops[0])
    caller(channel)()
    first = channel.subchannels[0]
    channel.update([instance(shops[1])])
    channel.update([instance(shops[0])])
    assert caller(channel)() == b"x"
    assert channel.subchannels[0] is not first
    with pytest.raises(ValueError, match="closed channel"):
        first.channel.unary_unary(UNARY_UNARY)(b"x")


def test_a_removed_subchannel_that_was_never_used_does_not_connect(shops, open_balanced):
    channel = open_balanced(shops[0])
    (unused,) = channel.subchannels
    channel.update([instance(shops[1])])
    with pytest.raises(ValueError, match="closed channel"):
        unused.channel  # noqa: B018
    assert unused.state is SHUTDOWN


def test_a_rolling_restart_fails_no_call(shops, open_balanced):
    """Each server is withdrawn, drained and stopped; another one is started and published."""
    channel = open_balanced(*shops)
    call, failures, over = caller(channel), [], threading.Event()

    def make_calls():
        while not over.is_set():
            try:
                assert call() == b"x"
            except Exception as error:  # noqa: BLE001
                failures.append(error)

    threads = [threading.Thread(target=make_calls) for _ in range(3)]
    for thread in threads:
        thread.start()
    for place in (0, 1, 2, 0):
        old = shops[place]
        assert wait_until(lambda old=old: old.calls)
        gone = subchannel_of(channel, old)
        channel.update([instance(one) for one in shops if one is not old])
        assert wait_until(lambda gone=gone: gone.channel.closed)
        old.kill()
        shops[place] = Shop()
        channel.update([instance(one) for one in shops])
    over.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert failures == []


# Connections


def test_subchannels_have_the_address_of_their_instance_and_a_replaceable_connection(
    shops, open_balanced
):
    channel = open_balanced(shops[0])
    (one,) = channel.subchannels
    assert (one.address, one.channel.target) == (shops[0].target, f"ipv4:{shops[0].target}")
    caller(channel)()
    assert type(one.channel) is ReconnectingChannel
    assert one.channel.reconnect("the test")
    assert caller(channel)() == b"x"
    assert one.channel.number == 2


def test_first_calls_on_several_threads_share_one_connection(shops, open_balanced):
    entered, gate = threading.Semaphore(0), threading.Event()

    def connect(one, options):
        entered.release()
        assert gate.wait(WAIT_S)
        return grpc.insecure_channel(one.target, options)

    made = []
    channel = open_balanced(shops[0], connect=connect, on_subchannel=made.append)
    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(caller(channel)) for _ in range(4)]
        assert entered.acquire(timeout=WAIT_S)
        gate.set()
        assert [call.result(WAIT_S) for call in calls] == [b"x"] * 4
    assert made == list(channel.subchannels)
    assert len({seen.peer for seen in shops[0].calls}) == 1


def test_callbacks_for_subchannels_may_raise(shops, open_balanced, events):
    def broken(subchannel):
        raise RuntimeError(subchannel.id)

    channel = open_balanced(shops[0], on_subchannel=broken, on_removed=broken)
    assert caller(channel)() == b"x"
    channel.update([instance(shops[1])])
    assert caller(channel)() == b"x"
    assert [type(event) for event in events] == [CallbackFailed] * 3


@pytest.mark.parametrize("end", ["close", "drain"])
def test_a_subchannel_whose_channel_the_user_ends_gets_another(shops, open_balanced, end):
    for begin in EVERY.values():
        shops[0].then(silent := Silent(1))
        channel = open_balanced(shops[0])
        stream = channel.unary_stream(UNARY_STREAM)(b"ab")
        assert silent.begun.wait(WAIT_S)
        before = channel.subchannels[0].channel
        getattr(before, end)()
        assert begin(channel) == b"ab"
        assert channel.subchannels[0].channel is not before
        assert before.closed is (end == "close")
        assert wait_until(stream.done) if before.closed else not stream.done()
        channel.close()
        assert before.closed
        assert stream.code() is grpc.StatusCode.CANCELLED


def test_a_subchannel_whose_own_channel_the_user_closes_gets_another(shops, open_balanced):
    made = []

    def connect(one, options):
        made.append(grpc.insecure_channel(one.target, options))
        return made[-1]

    channel = open_balanced(shops[0], connect=connect)
    for begin in EVERY.values():
        assert begin(channel) == b"ab"
        made[-1].close()
    assert caller(channel)() == b"x"
    assert len(made) == len(EVERY) + 1


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_a_server_for_which_connect_raises_is_passed_over(shops, open_balanced, events, error):
    def connect(one, options):
        if one.id == "a":
            raise error("no certificate for a")
        return grpc.insecure_channel(one.target, options)

    channel = open_balanced(connect=connect)
    channel.update([instance(1, id="a"), instance(shops[0], id="b")])
    for begin in EVERY.values():
        assert begin(channel) == b"ab"
    assert all(type(event) is CallbackFailed for event in events)
    channel.update([instance(1, id="a")])
    reason = f"connect raised {error.__name__}('no certificate for a')"
    for begin in EVERY.values():
        assert failure(lambda begin=begin: begin(channel)) == (
            "UNAVAILABLE",
            f"the only server of test.Shop can't be reached: 127.0.0.1:1: {reason}",
        )


def test_connect_is_called_again_after_it_raised(shops, open_balanced, events):
    failures = [RuntimeError("not yet")]

    def connect(one, options):
        if failures:
            raise failures.pop()
        return grpc.insecure_channel(one.target, options)

    channel = open_balanced(shops[0], connect=connect)
    assert caller(channel, wait_for_ready=True)() == b"x"
    assert [event.callback for event in events] == [f"connect {channel.subchannels[0].id}"]


def test_connect_must_not_return_a_channel_of_grpc_aio(open_balanced):
    channel = open_balanced(1, connect=lambda one, options: object())
    code, details = failure(caller(channel))
    assert code == "UNAVAILABLE"
    assert "connect must return a new grpc.Channel" in details


# Picking


def test_calls_are_spread_in_turn(shops, open_balanced):
    channel = open_balanced(*shops)
    wait_until_ready(channel)
    unary, stream = channel.unary_unary(UNARY_UNARY), channel.unary_stream(UNARY_STREAM)
    for _ in range(6):
        unary(b"x", timeout=WAIT_S)
    assert counts(shops) == [2, 2, 2]
    for _ in range(6):
        list(stream(b"x", timeout=WAIT_S))
    assert counts(shops) == [4, 4, 4]


@pytest.mark.parametrize(
    ("first", "others"),
    [
        ({"weight": 0}, {}),
        ({"status": "DRAINING"}, {}),
        ({"zone": "far"}, {"zone": "near"}),
    ],
)
def test_instances_of_a_lower_level_get_calls_when_the_others_fail(
    shops, open_balanced, first, others
):
    channel = open_balanced(policy={"zone": "near"})
    channel.update([instance(shops[0], **first), *(instance(one, **others) for one in shops[1:])])
    wait_until_ready(channel)
    for _ in range(6):
        caller(channel)()
    assert counts(shops) == [0, 3, 3]
    for shop in shops[1:]:
        shop.kill()
    assert wait_until(lambda: subchannel_of(channel, shops[1]).state is not READY)
    assert wait_until(lambda: subchannel_of(channel, shops[2]).state is not READY)
    for _ in range(2):
        caller(channel)()
    assert len(shops[0].calls) == 2


def test_a_key_in_the_metadata_goes_to_one_server(shops, open_balanced):
    channel = open_balanced(*shops, lb_policy="ring_hash:x-user")
    for _ in range(6):
        caller(channel, metadata=(("x-user", "7"),))()
    assert sorted(counts(shops)) == [0, 0, 6]
    states = sorted(one.state.name for one in channel.subchannels)
    assert states == ["IDLE", "IDLE", "READY"]  # others connect when they are picked


def test_a_key_may_be_taken_from_the_request(shops, open_balanced):
    channel = open_balanced(*shops, lb_policy=RingHash(lambda _, request, __: request))
    for _ in range(5):
        channel.unary_unary(UNARY_UNARY)(b"ab", timeout=WAIT_S)
        list(channel.unary_stream(UNARY_STREAM)(b"ab", timeout=WAIT_S))
    assert sorted(counts(shops)) == [0, 0, 10]


def test_the_keys_of_a_server_move_while_it_is_away_and_come_back(shops, open_balanced):
    channel = open_balanced(*shops, lb_policy="ring_hash:x-user")
    call = caller(channel, metadata=(("x-user", "7"),))
    call()
    owner = next(shop for shop in shops if shop.calls)
    owner.kill()
    assert wait_until(lambda: subchannel_of(channel, owner).state is not READY)
    for _ in range(3):
        assert call() == b"x"
    assert sorted(counts(shops)) == [0, 1, 3]
    owner.start()
    assert wait_until(lambda: (call(), len(owner.calls) > 1)[1])


def test_busy_servers_get_fewer_calls(shops, open_balanced):
    channel = open_balanced(*shops, lb_policy="least_request")
    wait_until_ready(channel)
    call = channel.unary_unary(UNARY_UNARY).future
    for shop in shops:
        shop.then(Hang())
    waiting = []
    while not all(counts(shops)):
        waiting.append(call(b"x"))
        assert wait_until(lambda: sum(counts(shops)) == len(waiting))
    shops[1].calls[0].ended.set()
    assert wait_until(lambda: channel.calls == 2)
    before = len(shops[1].calls)
    for _ in range(20):  # of 8 that are drawn at random, one is nearly always the idle one
        call(b"x").result(WAIT_S)
        assert wait_until(lambda: channel.calls == 2)
    assert len(shops[1].calls) >= before + 12
    for one in waiting:
        one.cancel()


def test_with_slow_start_a_young_server_gets_more_and_more_calls(shops, open_balanced, timer):
    channel = open_balanced(policy={"slow_start": 1000})
    channel.update([instance(shops[0]), instance(shops[1], started_at=time.time())])
    wait_until_ready(channel)
    call = caller(channel)
    for _ in range(50):
        call()
    assert len(shops[1].calls) <= 5

    def both_get_as_many():
        timer.advance(100)
        before = counts(shops)
        for _ in range(20):
            call()
        old, young, _ = (
            after - earlier for after, earlier in zip(counts(shops), before, strict=True)
        )
        return abs(old - young) <= 2

    assert wait_until(both_get_as_many)


# Servers that fail


def test_no_call_fails_because_a_server_can_not_be_reached(shops, dead, open_balanced):
    for begin in EVERY.values():
        channel = open_balanced(dead, shops[0])
        assert [begin(channel) for _ in range(3)] == [b"ab"] * 3


def test_no_call_fails_because_a_server_has_stopped_since(shops, open_balanced):
    channel = open_balanced(*shops[:2])
    wait_until_ready(channel)
    shops[0].kill()
    assert wait_until(lambda: subchannel_of(channel, shops[0]).state is not READY)
    for begin in EVERY.values():
        assert [begin(channel) for _ in range(4)] == [b"ab"] * 4
    assert counts(shops) == [0, 24, 0]
    shops[0].start()
    assert wait_until(lambda: (caller(channel)(), shops[0].calls)[1])


def test_a_call_whose_connection_breaks_is_not_repeated(shops, open_balanced):
    shops = shops[:2]
    for name in ("unary", "future", "unary_stream"):
        channel = open_balanced(*shops)
        for shop in shops:
            shop.then(Hang())
        with ThreadPoolExecutor(1) as threads:
            running = threads.submit(failure, partial(EVERY[name], channel))
            assert wait_until(lambda: sum(counts(shops)) == 1)
            called = next(shop for shop in shops if shop.calls)
            called.kill()
            assert running.result(WAIT_S)[0] in {"UNAVAILABLE", "CANCELLED"}
        assert sum(counts(shops)) == 1
        channel.close()
        called.start()
        for shop in shops:
            shop.reset()


def test_a_failed_call_is_not_repeated_while_other_subchannels_connect(shops, open_balanced):
    """Other calls make gRPC reconnect, so the state does not show whether a call was sent."""
    shops = shops[:2]
    channel = open_balanced(*shops)
    wait_until_ready(channel)
    method = channel.unary_unary(UNARY_UNARY)
    hangs = [Hang() for _ in range(6)]
    shops[0].then(*hangs)
    over = threading.Event()

    def call(request):
        with contextlib.suppress(grpc.RpcError):
            method(request, timeout=WAIT_S)

    def call_on():
        while not over.is_set():
            call(b"other")

    threads = [threading.Thread(target=call, args=(b"mine-%d" % one,)) for one in range(12)]
    threads += [threading.Thread(target=call_on) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert all(hang.begun.wait(WAIT_S) for hang in hangs)
    shops[0].kill()
    over.set()
    for thread in threads:
        thread.join(2 * WAIT_S)
    done = [{seen.requests[0] for seen in shop.calls} - {b"other"} for shop in shops]
    assert all(done)
    assert not done[0] & done[1]


def test_if_no_server_can_be_reached_calls_fail_with_the_reason(dead, open_balanced):
    channel = open_balanced(dead)
    begins = f"the only server of test.Shop can't be reached: 127.0.0.1:{dead}: "

    def has_reason():  # not if the probe that asks for it took too long
        code, details = failure(caller(channel))
        assert code == "UNAVAILABLE"
        return details.startswith(begins) and "Connection refused" in details

    assert wait_until(has_reason)


# Health


class Health(grpc.GenericRpcHandler):
    """Answers health checks with this response, and returns any other request."""

    response = b"\x08\x02"  # NOT_SERVING

    def __init__(self):
        self.checks = 0

    def service(self, details):
        if details.method.startswith("/grpc.health"):
            self.checks += 1
            return grpc.unary_unary_rpc_method_handler(lambda *_: self.response)
        return grpc.unary_unary_rpc_method_handler(lambda request, _: request)


@pytest.fixture
def health():
    """The handler of a server at `health.port`."""
    health = Health()
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool, handlers=[health])
        health.port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield health
        server.stop(None).wait()


CHECKED = {"health_check_backoff": 1.0}


def test_an_unhealthy_server_gets_calls_again_when_its_health_check_reports_serving(
    health, shops, open_balanced, timer, events
):
    channel = open_balanced(health, shops[0], policy=CHECKED)
    wait_until_ready(channel)
    one = subchannel_of(channel, health)
    one.mark_unhealthy("the test")
    for checks in (1, 2):
        timer.advance(1.1)
        assert wait_until(lambda checks=checks: one.checks == checks)
        assert wait_until(lambda: timer.pending == 1)
    assert (one.healthy, health.checks) == (False, 2)
    for _ in range(4):
        caller(channel)()
    assert counts(shops) == [4, 0, 0]
    health.response = b"\x08\x01"
    timer.advance(1.1)
    assert wait_until(lambda: one.healthy and len(events) == 2)
    unhealthy, healthy = events
    assert unhealthy == SubchannelUnhealthy("test.Shop", one.id, "the test")
    assert (type(healthy), healthy.subchannel) == (SubchannelHealthy, one.id)
    assert 3.3 <= healthy.after_s < 4
    for _ in range(4):
        caller(channel)()
    assert counts(shops) == [6, 0, 0]


def test_a_server_without_the_health_service_answers_too(shops, open_balanced, timer):
    channel = open_balanced(shops[0], policy=CHECKED)
    wait_until_ready(channel)
    (one,) = channel.subchannels
    one.mark_unhealthy("the test")
    timer.advance(1.1)
    assert wait_until(lambda: one.healthy)


def test_an_unhealthy_server_is_connected_and_checked_without_calls(shops, open_balanced, timer):
    channel = open_balanced(shops[0], policy=CHECKED)
    (one,) = channel.subchannels
    one.mark_unhealthy("the test")
    assert one.state is IDLE
    assert wait_until(lambda: (timer.advance(1.1), one.healthy)[1])


def test_if_all_are_unhealthy_they_get_calls(shops, open_balanced):
    channel = open_balanced(*shops[:2])
    wait_until_ready(channel)
    for one in channel.subchannels:
        one.mark_unhealthy("the test")
    for _ in range(4):
        caller(channel)()
    assert counts(shops) == [2, 2, 0]


def test_a_subchannel_can_be_marked_healthy(shops, open_balanced, timer, events):
    channel = open_balanced(shops[0])
    (one,) = channel.subchannels
    one.mark_unhealthy("the test")
    one.mark_unhealthy("again")
    assert (one.healthy, one.unhealthy_reason, timer.pending) == (False, "the test", 1)
    one.mark_healthy()
    one.mark_healthy()
    assert (one.healthy, one.unhealthy_reason, timer.pending) == (True, "", 0)
    assert [type(event) for event in events] == [SubchannelUnhealthy, SubchannelHealthy]


def test_an_unhealthy_server_published_by_another_process_is_checked_at_once(
    shops, open_balanced, timer
):
    channel = open_balanced()
    channel.update([instance(shops[0], epoch="a"), instance(shops[1])])
    wait_until_ready(channel)
    one = subchannel_of(channel, shops[0])
    one.mark_unhealthy("the test")
    channel.update([instance(shops[0], epoch="b"), instance(shops[1])])
    assert wait_until(lambda: one.healthy and timer.pending == 0)  # no time has passed


def test_a_wait_object_that_raises_is_reported_and_a_second_is_used(
    shops, open_balanced, timer, events
):
    def wait(_):
        raise RuntimeError("no")

    channel = open_balanced(shops[0], policy={"health_check_backoff": wait})
    wait_until_ready(channel)
    (one,) = channel.subchannels
    one.mark_unhealthy("the test")
    assert [type(event) for event in events] == [SubchannelUnhealthy, CallbackFailed]
    timer.advance(1.1)
    assert wait_until(lambda: one.healthy)


# Outlier ejection


@pytest.mark.parametrize("name", EVERY)
def test_a_server_whose_calls_fail_is_ejected_and_taken_back(
    shops, open_balanced, timer, events, name
):
    channel = open_balanced(*shops[:2], policy={"outlier_ejection": 3})
    wait_until_ready(channel)
    shops[0].then(*[Fail("UNAVAILABLE", "overloaded")] * 10_000)
    one = subchannel_of(channel, shops[0])
    ends = set()
    while not timer.pending:  # the health check of a server that is ejected
        try:
            ends.add(EVERY[name](channel))
        except grpc.RpcError as error:
            ends.add(error.details())
    assert ends == {"overloaded", b"ab"}
    assert one.unhealthy_reason == "3 calls failed: UNAVAILABLE"
    shops[0].reset()
    assert [EVERY[name](channel) for _ in range(4)] == [b"ab"] * 4
    assert not shops[0].calls
    timer.advance(10.1)
    assert wait_until(lambda: one.healthy)
    assert wait_until(lambda: (EVERY[name](channel), shops[0].calls)[1])


def test_calls_that_meet_their_deadline_eject_a_server(shops, open_balanced, timer):
    policy = {"outlier_ejection": OutlierEjectionPolicy(consecutive_failures=5)}
    channel = open_balanced(lb_policy=First(), policy=policy)
    channel.update([instance(shops[0], id="a"), instance(shops[1], id="b")])
    wait_until_ready(channel)
    frozen = channel.subchannels[0]
    shops[0].then(*[Hang()] * 100)
    while frozen.healthy:
        assert failure(caller(channel, timeout=0.05))[0] == "DEADLINE_EXCEEDED"
    assert wait_until(lambda: timer.pending == 1)  # its health check
    assert frozen.unhealthy_reason == "5 calls failed: DEADLINE_EXCEEDED"
    for _ in range(4):
        assert caller(channel)() == b"x"
    assert counts(shops)[1:] == [4, 0]


# Self-preservation


def test_if_all_instances_disappear_the_servers_that_answer_are_kept(
    shops, dead, open_balanced, events
):
    channel = open_balanced(*shops[:2], dead)
    wait_until_ready(channel, *shops[:2])
    subchannel_of(channel, dead).channel.get_state(try_to_connect=True)
    assert wait_until(lambda: subchannel_of(channel, dead).state is FAILING)
    channel.update([])
    assert wait_until(lambda: len(channel.subchannels) == 2)
    assert [one.stale for one in channel.subchannels] == [True, True]
    assert isinstance(events[0], StaleInstancesKept)
    for _ in range(4):
        assert caller(channel)() == b"x"
    killed = subchannel_of(channel, shops[0])
    shops[0].kill()
    assert wait_until(lambda: killed.state is not READY)  # a call until then may fail
    assert wait_until(lambda: (caller(channel)(), len(channel.subchannels) == 1)[1])
    shops[1].kill()
    unknown = ("UNAVAILABLE", "no instance of test.Shop is known")
    assert wait_until(lambda: failure(caller(channel)) == unknown)
    assert channel.subchannels == ()


def test_a_server_that_is_published_again_is_no_longer_stale(shops, open_balanced, timer):
    channel = open_balanced(shops[0])
    wait_until_ready(channel)
    kept = channel.subchannels
    channel.update([])
    assert kept[0].stale
    channel.update([instance(shops[0])])
    assert (channel.subchannels, kept[0].stale, kept[0].state) == (kept, False, READY)
    assert wait_until(lambda: timer.pending == 0)


# Subsets


def test_a_channel_connects_to_a_subset_of_very_many_instances(shops, open_balanced):
    many = [instance(shop, id=f"{number}") for number in range(700) for shop in shops]
    channel = open_balanced(policy={"subset_size": 4})
    channel.update(many)
    assert caller(channel)() == b"x"
    assert len(channel.subchannels) == 4
    assert wait_until(lambda: all(one.state is READY for one in channel.subchannels))


def test_a_picker_that_prepares_no_function_is_named_in_the_error_of_its_calls(
    shops, open_balanced
):
    class Mute(RingHash):
        def prepare(self, subchannels, weights):
            return None

    channel = open_balanced(*shops, lb_policy=Mute("x-user"))
    with pytest.raises(TypeError, match=r"Mute.prepare\(\) must return a function pick"):
        channel.unary_unary(UNARY_UNARY)(b"x")
