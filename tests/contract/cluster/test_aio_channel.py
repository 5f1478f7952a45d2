"""A ClusterChannel of grpc.aio is one of its channels: its state, what it says, its end."""

import asyncio
import gc
import weakref

import grpc
import pytest

from fixtures.aio_channels import steps
from fixtures.aio_clusters import begun, caller, hanging, states
from fixtures.aio_doors import others, refused
from fixtures.clusters import instance
from fixtures.grpc_servers import IMPATIENT
from fixtures.shop import UNARY_UNARY
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel import aio
from rpcwheel.cluster import ClusterPolicy, sync
from rpcwheel.cluster import aio as cluster_aio
from rpcwheel.cluster.aio import ClusterChannel
from rpcwheel.observe import CallbackFailed

State = grpc.ChannelConnectivity


def test_the_names_are_those_of_the_package_for_threads():
    assert cluster_aio.__all__ == sync.__all__
    assert not any(getattr(cluster_aio, name) is getattr(sync, name) for name in sync.__all__)


async def test_its_state_is_the_best_of_its_members(shops, dead, aio_cluster):
    channel = aio_cluster()
    assert isinstance(channel, grpc.aio.Channel)
    assert channel.get_state() is State.CONNECTING
    channel.fail("nobody knows")
    assert channel.get_state() is State.TRANSIENT_FAILURE
    channel.update([])
    assert channel.get_state() is State.TRANSIENT_FAILURE
    channel.update([instance(dead), instance(shops[0])])
    assert channel.get_state() is State.IDLE
    await caller(channel)()
    assert channel.get_state() is State.READY
    await channel.close()
    assert channel.get_state() is State.SHUTDOWN


async def test_a_change_while_it_is_looked_at_is_not_missed(shops, aio_cluster):
    """A connection is made on grpc's own threads, between any two steps of ours."""

    def connect(one, options):
        channel, looks = grpc.aio.insecure_channel(one.target, options), []

        def get_state(*_, **__):
            looks.append(True)
            return State.CONNECTING if len(looks) <= connect.looks else State.READY

        async def wait_for_state_change(last):
            if last is State.READY:
                await asyncio.Event().wait()

        channel.get_state, channel.wait_for_state_change = get_state, wait_for_state_change
        return channel

    for connect.looks in range(1, 9):
        channel = aio_cluster(shops[0], connect=connect)
        await asyncio.wait_for(channel.channel_ready(), WAIT_S)


async def test_one_that_comes_as_another_fails_connects_though_the_whole_is_as_before(
    shops, dead, aio_cluster
):
    failed = asyncio.Event()

    def connect(one, options):
        channel = grpc.aio.insecure_channel(one.target, options)
        if one.port == dead:
            channel.get_state = lambda *_, **__: (
                State.TRANSIENT_FAILURE if failed.is_set() else State.IDLE
            )
            channel.wait_for_state_change = lambda _: failed.wait()
        return channel

    channel = aio_cluster(dead, connect=connect)
    ready = asyncio.create_task(channel.channel_ready())
    await steps(20)
    failed.set()
    channel.update([instance(dead), instance(shops[0])])
    assert channel.get_state() is State.IDLE
    await asyncio.wait_for(ready, WAIT_S)


async def test_connections_that_hide_their_state_are_looked_at_now_and_then(shops, aio_cluster):
    looks = []

    def hidden(*_, **__):
        looks.append(True)
        raise NotImplementedError

    def connect(one, options):
        channel = grpc.aio.insecure_channel(one.target, options)
        channel.get_state = hidden
        return channel

    channel = aio_cluster(shops[0], connect=connect)
    assert channel.members[0].channel is not None
    watching = asyncio.create_task(channel.wait_for_state_change(State.READY))
    await aio_wait_until(lambda: len(looks) >= 2)
    channel.update([])
    await watching


async def test_being_ready_is_waited_for_across_updates(shops, dead, aio_cluster):
    channel = aio_cluster()
    ready = asyncio.create_task(channel.channel_ready())
    for instances in ([], [instance(dead)], [instance(dead), instance(shops[0])]):
        await steps(20)
        assert not ready.done()
        channel.update(instances)
    await asyncio.wait_for(ready, WAIT_S)


async def test_who_waits_to_be_ready_learns_of_the_end(dead, aio_cluster):
    channel = aio_cluster(dead)
    ready = asyncio.create_task(channel.channel_ready())
    await steps(20)
    await channel.close()
    with pytest.raises(grpc.aio.UsageError, match=r"Channel is closed\."):
        await asyncio.wait_for(ready, WAIT_S)


async def test_a_change_of_state_is_waited_for_and_nothing_is_left(shops, aio_cluster):
    channel = aio_cluster(shops[0], shops[1])
    await caller(channel)()
    before = len(others())
    changed = asyncio.create_task(channel.wait_for_state_change(State.READY))
    await steps(20)
    assert not changed.done()
    await asyncio.to_thread(shops[0].kill)
    await asyncio.to_thread(shops[1].kill)
    await asyncio.wait_for(changed, WAIT_S)
    await asyncio.wait_for(channel.wait_for_state_change(State.READY), WAIT_S)
    given_up = asyncio.create_task(channel.wait_for_state_change(State.IDLE))
    await asyncio.sleep(0)
    given_up.cancel()
    await aio_wait_until(lambda: len(others()) == before)


async def test_it_says_what_it_is(shops, dead, aio_cluster):
    channel = aio_cluster(dead, shops[0])
    channel.members[0].down("the test says so")
    assert repr(channel) == (
        "<ClusterChannel of grpc.aio 'test.Shop', 2 members, 1 of them down, calls in flight: 0>"
    )
    assert (channel.name, channel.target) == ("test.Shop", "test.Shop")
    await channel.close()
    assert repr(channel) == ("<ClusterChannel of grpc.aio 'test.Shop', closed, calls in flight: 0>")


async def test_a_member_has_the_address_of_its_instance_and_its_channel_has_the_target(aio_cluster):
    (member,) = aio_cluster(50051).members
    assert (member.address, member.channel.target) == ("127.0.0.1:50051", "ipv4:127.0.0.1:50051")


async def test_it_closes_at_the_end_of_a_with(shops, timer):
    async with ClusterChannel("s", [instance(shops[0])], timer=timer) as channel:
        assert await caller(channel)() == b"x"
    assert channel.closed


def test_it_may_be_made_and_told_its_members_before_there_is_a_loop(shops, timer):
    made = ClusterChannel("s", [instance(shops[0])], timer=timer)
    waiting = ClusterChannel("s", timer=timer)
    waiting.update([instance(shops[1])])
    assert (len(made.members), len(waiting.members)) == (1, 0)

    async def call():
        async with made, waiting:
            return [await caller(channel)() for channel in (made, waiting)]

    assert asyncio.run(call()) == [b"x", b"x"]


async def test_other_threads_may_tell_its_members(shops, aio_cluster):
    channel = aio_cluster()
    call = begun(caller(channel)())
    await asyncio.sleep(0)
    await asyncio.to_thread(channel.update, [instance(shops[0])])
    assert await call == b"x"
    for number in range(50):  # the last one counts
        await asyncio.to_thread(channel.update, [instance(shops[number % 3])])
    await aio_wait_until(lambda: [one.address for one in channel.members] == [shops[1].target])
    unknown = aio_cluster()
    await asyncio.to_thread(unknown.fail, "nobody knows")
    assert "nobody knows" in (await refused(caller(unknown)())).details()
    with pytest.raises(TypeError, match="ServiceInstance"):  # there, at once
        await asyncio.to_thread(channel.update, [None])


async def test_over_tls_a_member_is_called_with_credentials(certificates, timer):
    async def echo(request, context):
        return request

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(echo)
    handlers = grpc.method_handlers_generic_handler("test.Shop", {"UnaryUnary": handler})
    server.add_generic_rpc_handlers([handlers])
    port = server.add_secure_port("localhost:0", certificates.server_credentials())
    await server.start()
    one = instance(port, host="localhost", protocol="grpcs")
    settings = {"credentials": certificates.channel_credentials(), "timer": timer}
    async with ClusterChannel("s", [one], **settings) as channel:
        assert await caller(channel)() == b"x"
    async with ClusterChannel("s", [one], timer=timer) as unknown:  # grpc's roots don't know it
        await refused(caller(unknown)())
    await server.stop(None)


async def test_compression_and_connect_are_used(shops, aio_cluster):
    squeezed = aio_cluster(shops[0], compression=grpc.Compression.Gzip)
    own = aio_cluster(shops[0], connect=lambda one, options: grpc.aio.insecure_channel(one.target))
    for channel in (squeezed, own):
        assert await caller(channel)() == b"x"


async def test_a_channel_of_threads_is_no_connection_on_a_loop(shops, aio_cluster):
    channel = aio_cluster(shops[0], connect=lambda one, options: object())
    with pytest.raises(TypeError, match="connect must return"):
        caller(channel)()


async def test_heartbeats_can_be_put_on_each_member(shops, aio_cluster, timer):
    manager = aio.HeartbeatManager(timer=timer, interval=1.0)
    channel = aio_cluster(*shops, on_member=lambda member: manager.attach(member.channel))
    for _ in range(3):
        await caller(channel)()
    assert (timer.pending, states(channel)) == (3, ["UP"] * 3)
    await channel.close()
    await aio_wait_until(lambda: timer.pending == 0)
    manager.close()


# Its end


@pytest.mark.parametrize("grace", [None, 0.05])
async def test_closing_ends_calls_and_members_and_tells_listeners_once(shops, aio_cluster, grace):
    channel, told = aio_cluster(shops[0]), []
    running = await hanging(shops[0], channel)
    member = channel.members[0]
    member.down("the test says so")
    channel.on_close(lambda: told.append(running.done()))
    await channel.close(grace)
    await channel.close()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (channel.closed, channel.members, member.state, told) == (True, (), "CLOSED", [False])
    for kind in ("unary_unary", "stream_unary"):
        with pytest.raises(grpc.aio.UsageError, match=r"Channel is closed\."):
            getattr(channel, kind)(UNARY_UNARY)(b"x")
    channel.on_close(lambda: told.append("late"))
    assert told == [False, "late"]


async def test_closing_cancels_who_waits_for_members(aio_cluster, timer):
    channel = aio_cluster()
    waiting = begun(caller(channel)())
    await asyncio.sleep(0)
    await channel.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert timer.pending == 0


async def test_closing_ends_a_probe_that_waits_for_an_answer(dead, aio_cluster, timer):
    channel = aio_cluster(dead, policy=ClusterPolicy(probe=1.0, probe_timeout=500))
    await refused(caller(channel)())
    timer.advance(1.1)
    await aio_wait_until(lambda: timer.pending == 0)
    await steps()
    await asyncio.wait_for(channel.close(), WAIT_S)


async def test_members_that_drain_are_closed_with_the_rest(shops, aio_cluster):
    channel = aio_cluster(shops[0])
    running = await hanging(shops[0], channel)
    channel.update([])
    await channel.close()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_close_that_is_cancelled_ends_all_at_once(shops, aio_cluster):
    channel = aio_cluster(shops[0])
    running = await hanging(shops[0], channel)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(channel.close(60), 0.05)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(running, WAIT_S)


async def test_who_is_told_of_the_end_can_have_itself_forgotten_and_may_fail(
    shops, aio_cluster, events
):
    channel, told = aio_cluster(shops[0]), []
    forget = channel.on_close(lambda: told.append("forgotten"))
    channel.on_close(lambda: 1 / 0)
    channel.on_close(lambda: told.append("told"))
    forget()
    forget()
    await channel.close()
    assert told == ["told"]
    assert [type(event) for event in events] == [CallbackFailed]


async def test_one_that_is_dropped_is_gone(shops, timer):
    channel = ClusterChannel("s", [instance(one) for one in shops], timer=timer, options=IMPATIENT)
    await channel.unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S)
    channel.members[0].down("the test says so")
    forget = channel.on_close(print)
    gone = [weakref.ref(channel), weakref.ref(channel.members[0])]
    del channel
    await aio_wait_until(lambda: (gc.collect(), [one() for one in gone])[1] == [None, None])
    timer.advance(60)  # what waits for a probe finds nobody
    forget()
    assert timer.pending == 0
