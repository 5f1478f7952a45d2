"""Subchannels of a balanced channel of grpc.aio: connections, updates, health."""

import asyncio

import grpc
import pytest

from fixtures.aio_balanced_channels import (
    call_until,
    caller,
    connect_all,
    counts,
    hanging,
    subchannel_of,
)
from fixtures.aio_channels import ANSWERS, KINDS, STYLES, Stub
from fixtures.aio_policy_channels import others, refused
from fixtures.balanced_channels import instance
from fixtures.shop import Fail, Shop
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel.balancer import BalancerPolicy, OutlierEjectionPolicy
from rpcwheel.balancer.aio import BalancedChannel
from rpcwheel.events import (
    CallbackFailed,
    StaleInstancesKept,
    SubchannelHealthy,
    SubchannelUnhealthy,
)
from rpcwheel.transport.aio import ReconnectingChannel

State = grpc.ChannelConnectivity

TASKS = 8

try:
    import uvloop
except ImportError:  # not on Windows
    uvloop = None
else:
    uvloop.new_event_loop().close()  # the first one opens a pipe that libuv keeps (signal.c)


def states(channel):
    return [one.state for one in channel.subchannels]


async def call_often(channel, count):
    """Make calls one after the other."""
    call = caller(channel)
    for _ in range(count):
        assert await call() == b"x"


# Connections


async def test_all_subchannels_connect_at_the_first_call(shops, aio_balanced):
    channel = aio_balanced(*shops)
    assert states(channel) == [State.IDLE] * 3
    await call_often(channel, 1)
    await aio_wait_until(lambda: states(channel) == [State.READY] * 3)
    await call_until(channel, lambda: all(counts(shops)))


async def test_the_channel_of_a_subchannel_can_be_reconnected(shops, aio_balanced):
    channel = aio_balanced(shops[0])
    await call_often(channel, 1)
    inner = channel.subchannels[0].channel
    assert type(inner) is ReconnectingChannel
    assert inner.reconnect("the test wants it", force=True)
    await call_often(channel, 1)
    assert inner.number == 2


@pytest.mark.parametrize("how", ["close", "drain", "close what connect made"])
async def test_a_subchannel_whose_channel_the_user_closes_gets_another(shops, aio_balanced, how):
    made = []

    def connect(one, options):
        made.append(grpc.aio.insecure_channel(one.target, options))
        return made[-1]

    channel = aio_balanced(shops[0], connect=connect)
    running = await hanging(shops[0], channel)
    match how:
        case "close":
            await channel.subchannels[0].channel.close()
        case "drain":
            channel.subchannels[0].channel.drain()
        case _:
            await made[0].close()
    await call_often(channel, 1)
    assert len(made) == 2
    if how == "drain":
        shops[0].calls[0].ended.set()
        assert await running == b"x"
    else:
        with pytest.raises(asyncio.CancelledError):
            await running
    await aio_wait_until(lambda: channel.calls == 0)


async def test_callbacks_get_each_subchannel_and_may_fail(shops, aio_balanced, events):
    begun, removed = [], []

    def on_subchannel(subchannel):
        begun.append((subchannel, subchannel.channel))
        raise RuntimeError(subchannel.id)

    def on_removed(subchannel):
        removed.append(subchannel)
        raise RuntimeError(subchannel.id)

    channel = aio_balanced(shops[0], on_subchannel=on_subchannel, on_removed=on_removed)
    await call_often(channel, 2)
    (first,) = channel.subchannels
    assert begun == [(first, first.channel)]
    channel.update([instance(shops[1])])
    assert removed == [first]
    assert [type(event) for event in events] == [CallbackFailed] * 2


# Updates


async def test_calls_go_to_the_instances_of_the_last_update(shops, aio_balanced):
    channel = aio_balanced(shops[0])
    await call_often(channel, 1)
    channel.update([instance(shops[1]), instance(shops[2])])
    await call_until(channel, lambda: all(counts(shops)))
    assert counts(shops)[0] == 1


async def test_calls_in_flight_on_a_removed_subchannel_go_on(shops, aio_balanced):
    channel = aio_balanced(shops[0])
    running = await hanging(shops[0], channel)
    (removed,) = channel.subchannels
    channel.update([instance(shops[1])])
    assert (removed.state, channel.calls) == (State.SHUTDOWN, 1)
    assert removed not in channel.subchannels
    await call_often(channel, 1)
    shops[0].calls[0].ended.set()
    assert await running == b"x"
    await aio_wait_until(lambda: removed.channel.closed)
    assert channel.calls == 0


async def test_after_drain_timeout_calls_end_with_the_reason(shops, aio_balanced, timer):
    channel = aio_balanced(shops[0], policy={"drain_timeout": 7})
    running = await hanging(shops[0], channel)
    channel.update([instance(shops[1])])
    timer.advance(7.1)
    error = await refused(running)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert error.details() == (f"channel drained: {shops[0].target} was removed from test.Shop")


async def test_a_removed_subchannel_does_not_connect(shops, aio_balanced, events):
    channel = aio_balanced(shops[0])
    (removed,) = channel.subchannels
    channel.update([instance(shops[1])])
    with pytest.raises(grpc.aio.UsageError, match="Channel is closed"):
        removed.channel  # noqa: B018
    removed.mark_unhealthy()
    removed.mark_healthy()
    assert (removed.state, events) == (State.SHUTDOWN, [])


async def test_an_update_within_connect_leaves_no_connection_open(shops, aio_balanced):
    made = []

    def connect(one, options):
        made.append(grpc.aio.insecure_channel(one.target, options))
        channel.update([instance(shops[1])])
        return made[-1]

    channel = aio_balanced(shops[0], connect=connect)
    await call_often(channel, 1)
    assert counts(shops) == [0, 1, 0]
    await aio_wait_until(lambda: made[0].get_state() is State.SHUTDOWN)


async def rolling_restart(channel, shops):
    """Restart all servers one after the other under load; return the failures."""
    stub, wrong, over = Stub(channel), [], False

    async def work(number):
        kind, style = KINDS[number % 4], list(STYLES.values())[number // 4]
        while not over:
            try:
                answer = await style(stub, kind)
                if answer != ANSWERS[kind]:
                    wrong.append(answer)
            except Exception as error:  # noqa: BLE001 - whatever it is
                wrong.append(error)

    async with asyncio.TaskGroup() as group:
        for number in range(TASKS):
            group.create_task(work(number))
        for place, old in enumerate(tuple(shops)):
            await aio_wait_until(lambda old=old: old.calls)
            removed = subchannel_of(channel, old)
            channel.update([instance(one) for one in shops if one is not old])
            await aio_wait_until(lambda removed=removed: removed.channel.closed)
            await asyncio.to_thread(old.kill)
            shops[place] = Shop()
            channel.update([instance(one) for one in shops])
        await aio_wait_until(lambda: all(shop.calls for shop in shops))
        over = True
    return wrong


@pytest.mark.parametrize("lb_policy", ["round_robin", "least_request"])
async def test_a_rolling_restart_fails_no_call(shops, aio_balanced, lb_policy):
    channel = aio_balanced(*shops, lb_policy=lb_policy)
    before = len(others())
    assert await rolling_restart(channel, shops) == []
    await aio_wait_until(lambda: channel.calls == 0)
    await aio_wait_until(lambda: len(others()) == before)


@pytest.mark.skipif(uvloop is None, reason="uvloop is not installed")
def test_a_rolling_restart_fails_no_call_on_uvloop(shops, timer):
    async def main():
        instances = [instance(shop) for shop in shops]
        policy = BalancerPolicy(pick_timeout=WAIT_S)
        async with BalancedChannel(
            "test.Shop", instances, balancer_policy=policy, timer=timer
        ) as channel:
            assert await rolling_restart(channel, shops) == []

    uvloop.run(main())


async def test_frequent_updates_under_load_fail_no_call(shops, dead, aio_balanced):
    channel = aio_balanced(*shops)
    every = [instance(one) for one in (*shops, dead)]
    failed, made, over = [], 0, False

    async def work():
        nonlocal made
        call = caller(channel)
        while not over:
            try:
                await call()
            except Exception as error:  # noqa: BLE001 - whatever it is
                failed.append(error)
            made += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(TASKS):
            group.create_task(work())
        for number in range(100):
            before = made
            await aio_wait_until(lambda before=before: made > before)
            chosen = [one for place, one in enumerate(every) if number >> place & 1 == 0]
            channel.update([*chosen, every[number % 3]])
        over = True
    assert failed == []
    await aio_wait_until(lambda: channel.calls == 0)


# Self-preservation


async def test_the_last_instances_are_kept_until_they_no_longer_answer(
    shops, aio_balanced, timer, events
):
    channel = aio_balanced(shops[0], shops[1])
    await connect_all(channel)
    channel.update([])
    assert [one.stale for one in channel.subchannels] == [True, True]
    assert [type(event) for event in events] == [StaleInstancesKept]
    await call_often(channel, 4)
    shops[0].kill()
    first = subchannel_of(channel, shops[0])
    await aio_wait_until(lambda: first.state is not State.READY)  # a call until then may fail
    await call_until(channel, lambda: first not in channel.subchannels)
    (kept,) = channel.subchannels
    channel.update([instance(shops[1])])
    assert (channel.subchannels, kept.stale) == ((kept,), False)


async def test_without_self_preservation_an_empty_update_removes_all(shops, aio_balanced):
    channel = aio_balanced(shops[0], policy={"self_preservation": False})
    await call_often(channel, 1)
    channel.update([])
    assert channel.subchannels == ()
    assert (await refused(caller(channel)())).details() == "no instance of test.Shop is known"


# Health


async def test_an_unhealthy_subchannel_gets_calls_only_if_no_other_is_ready(
    shops, aio_balanced, timer, events
):
    channel = aio_balanced(*shops[:2])
    await connect_all(channel)
    first, second = (subchannel_of(channel, shop) for shop in shops[:2])
    first.mark_unhealthy("the test wants it")
    first.mark_unhealthy("again")
    assert (first.healthy, first.unhealthy_reason, timer.pending) == (
        False,
        "the test wants it",
        1,
    )
    await call_often(channel, 4)
    assert counts(shops) == [0, 4, 0]
    second.mark_unhealthy()
    await call_often(channel, 2)
    assert counts(shops) == [1, 5, 0]
    first.mark_healthy()
    first.mark_healthy()
    await call_often(channel, 2)
    assert counts(shops) == [3, 5, 0]
    kinds = [type(event) for event in events]
    assert kinds == [SubchannelUnhealthy, SubchannelUnhealthy, SubchannelHealthy]


async def test_an_unhealthy_subchannel_is_taken_back_when_it_answers(
    shops, aio_balanced, timer, events
):
    channel = aio_balanced(shops[0], policy={"health_check_backoff": 1.0})
    await connect_all(channel)
    (subchannel,) = channel.subchannels
    subchannel.mark_unhealthy("the test wants it")
    timer.advance(1.1)  # UNIMPLEMENTED is an answer: this server has no health service
    await aio_wait_until(lambda: subchannel.healthy)
    assert [type(event) for event in events] == [SubchannelUnhealthy, SubchannelHealthy]
    assert events[1].after_s >= 1.0
    assert timer.pending == 0


class Health(grpc.GenericRpcHandler):
    """A health service that answers NOT_SERVING, or what is set."""

    answer = b"\x08\x02"

    def __init__(self):
        self.checks = 0

    def service(self, details):
        async def check(request, context):
            self.checks += 1
            return self.answer

        return grpc.unary_unary_rpc_method_handler(check)


async def test_a_server_that_answers_not_serving_stays_unhealthy(timer, aio_balanced):
    health, server = Health(), grpc.aio.server()
    server.add_generic_rpc_handlers([health])
    port = server.add_insecure_port("127.0.0.1:0")
    channel = aio_balanced(port, policy={"health_check_backoff": 1.0})
    await server.start()
    await connect_all(channel)
    (subchannel,) = channel.subchannels
    subchannel.mark_unhealthy("the test wants it")
    timer.advance(1.1)
    await aio_wait_until(lambda: health.checks == 1 and timer.pending == 1)
    assert not subchannel.healthy
    health.answer = b"\x08\x01"
    timer.advance(1.1)
    await aio_wait_until(lambda: subchannel.healthy)
    await server.stop(None)


async def test_health_checks_go_on_after_the_user_closed_the_connection(timer, shops, aio_balanced):
    health, server = Health(), grpc.aio.server()
    server.add_generic_rpc_handlers([health])
    port = server.add_insecure_port("127.0.0.1:0")
    channel = aio_balanced(port, policy={"health_check_backoff": 1.0})
    await server.start()
    await connect_all(channel)
    (subchannel,) = channel.subchannels
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def check(request, context):
        begun.set()
        await go_on.wait()
        return b"\x08\x01"

    health.service = lambda _: grpc.unary_unary_rpc_method_handler(check)
    subchannel.mark_unhealthy("the test wants it")
    timer.advance(1.1)
    await begun.wait()
    await subchannel.channel.close()
    go_on.set()
    await aio_wait_until(lambda: (timer.advance(1.1), subchannel.healthy)[1])
    await server.stop(None)


async def test_no_health_check_outlives_its_subchannel(shops, aio_balanced, timer):
    channel = aio_balanced(shops[0])
    await connect_all(channel)
    channel.subchannels[0].mark_unhealthy("the test wants it")
    assert timer.pending == 1
    channel.update([instance(shops[1])])
    assert timer.pending == 0


async def test_a_server_whose_calls_fail_is_ejected_and_taken_back(
    shops, aio_balanced, timer, events
):
    ejection = OutlierEjectionPolicy(consecutive_failures=3, base_ejection_time=10)
    channel = aio_balanced(*shops[:2], policy={"outlier_ejection": ejection})
    await connect_all(channel)
    first = subchannel_of(channel, shops[0])
    call = caller(channel)
    shops[0].then(*[Fail("UNAVAILABLE")] * 3)
    failed = 0
    while first.healthy:
        try:
            await call()
        except grpc.RpcError:
            failed += 1
    assert (failed, first.unhealthy_reason) == (3, "3 calls failed: UNAVAILABLE")
    before = counts(shops)[0]
    await call_often(channel, 4)
    assert counts(shops)[0] == before
    timer.advance(10.1)
    await aio_wait_until(lambda: first.healthy)
    await call_often(channel, 2)
    assert counts(shops)[0] == before + 1


@pytest.mark.parametrize("code", ["NOT_FOUND", "INTERNAL"])
async def test_statuses_that_are_answers_eject_no_server(shops, aio_balanced, code, events):
    channel = aio_balanced(*shops[:2])
    await connect_all(channel)
    for shop in shops[:2]:
        shop.then(*[Fail(code)] * 6)
    for _ in range(12):
        assert (await refused(caller(channel)())).code().name == code
    assert events == []


@pytest.mark.parametrize("kind", KINDS)
async def test_failures_of_each_kind_of_call_count(shops, aio_balanced, kind):
    channel = aio_balanced(*shops[:2])
    await connect_all(channel)
    stub, first = Stub(channel), subchannel_of(channel, shops[0])
    shops[0].then(*[Fail("UNAVAILABLE")] * 5)
    failed = 0
    while first.healthy:
        try:
            assert await STYLES["iterate"](stub, kind) == ANSWERS[kind]
        except grpc.aio.AioRpcError:
            failed += 1
    assert failed == 5
