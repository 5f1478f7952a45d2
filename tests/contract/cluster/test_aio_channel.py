"""What the channel of many members for grpc.aio says of itself, and what it refuses."""

import asyncio
import time

import grpc
import pytest

from fixtures.aio_clusters import caller, states
from fixtures.aio_doors import others, refused
from fixtures.clusters import instance
from fixtures.waiting import aio_wait_until
from rpcwheel import aio
from rpcwheel.cluster import ClusterPolicy
from rpcwheel.cluster.aio import ClusterChannel
from rpcwheel.errors import ConfigurationError

State = grpc.ChannelConnectivity


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


async def test_it_connects_when_it_is_asked_to(shops, dead, aio_cluster):
    channel = aio_cluster(dead, shops[0])
    await asyncio.wait_for(channel.channel_ready(), 20)
    assert channel.get_state() is State.READY
    await asyncio.wait_for(channel.channel_ready(), 20)


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
        await asyncio.wait_for(channel.channel_ready(), 5)


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
    await asyncio.sleep(0.02)
    failed.set()
    channel.update([instance(dead), instance(shops[0])])
    assert channel.get_state() is State.IDLE
    await asyncio.wait_for(ready, 20)


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
    watching, began = (
        asyncio.create_task(channel.wait_for_state_change(State.READY)),
        time.monotonic(),
    )
    await asyncio.sleep(0.1)
    assert 0 < len(looks) < 9 * (time.monotonic() - began) / 0.1
    channel.update([])
    await watching


async def test_being_ready_is_waited_for_across_updates(shops, dead, aio_cluster):
    channel = aio_cluster()
    ready = asyncio.create_task(channel.channel_ready())
    for instances in ([], [instance(dead)], [instance(dead), instance(shops[0])]):
        await asyncio.sleep(0.02)
        assert not ready.done()
        channel.update(instances)
    await asyncio.wait_for(ready, 20)


async def test_who_waits_to_be_ready_learns_of_the_end(dead, aio_cluster):
    channel = aio_cluster(dead)
    ready = asyncio.create_task(channel.channel_ready())
    await asyncio.sleep(0.02)
    await channel.close()
    with pytest.raises(grpc.aio.UsageError, match=r"Channel is closed\."):
        await asyncio.wait_for(ready, 20)


async def test_a_change_of_state_is_waited_for_and_nothing_is_left(shops, aio_cluster):
    channel = aio_cluster(shops[0], shops[1])
    await caller(channel)()
    before = len(others())
    changed = asyncio.create_task(channel.wait_for_state_change(State.READY))
    await asyncio.sleep(0.02)
    assert not changed.done()
    await asyncio.to_thread(shops[0].kill)
    await asyncio.to_thread(shops[1].kill)
    await asyncio.wait_for(changed, 20)
    await asyncio.wait_for(channel.wait_for_state_change(State.READY), 20)
    given_up = asyncio.create_task(channel.wait_for_state_change(State.IDLE))
    await asyncio.sleep(0)
    given_up.cancel()
    await aio_wait_until(lambda: len(others()) == before)


async def test_the_first_connection_is_a_change_of_state(shops, aio_cluster):
    channel = aio_cluster(shops[0])
    changed = asyncio.create_task(channel.wait_for_state_change(State.IDLE))
    await asyncio.sleep(0.01)
    assert not changed.done()
    await caller(channel)()
    await asyncio.wait_for(changed, 20)


async def test_it_says_what_it_is(shops, dead, aio_cluster):
    channel = aio_cluster(dead, shops[0])
    channel.members[0].down("the test says so")
    assert repr(channel) == (
        "<ClusterChannel of grpc.aio 'test.Shop', 2 members, 1 of them down, calls in flight: 0>"
    )
    assert (channel.name, channel.target) == ("test.Shop", "test.Shop")
    await channel.close()
    assert repr(channel) == ("<ClusterChannel of grpc.aio 'test.Shop', closed, calls in flight: 0>")


async def test_picks_are_as_for_calls(shops, aio_cluster):
    channel = aio_cluster(*shops)
    assert {one.id for one in channel.pick(2)} < {one.id for one in channel.members}
    assert len(channel.pick(9)) == 3
    assert aio_cluster().pick(1) == ()


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
    call = asyncio.ensure_future(_awaited(caller(channel)()))
    await asyncio.sleep(0)
    await asyncio.to_thread(channel.update, [instance(shops[0])])
    assert await call == b"x"
    for number in range(50):  # the last one counts
        await asyncio.to_thread(channel.update, [instance(shops[number % 3])])
    await aio_wait_until(lambda: [one.target for one in channel.members] == [shops[1].target])
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


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"balance": "nonsense"}, ConfigurationError, "balance"),
        ({"balance": 5}, TypeError, "balance"),
        ({"instances": ["10.0.0.7:50051"]}, TypeError, "ServiceInstance"),
        ({"policy": {"drain": 5}}, TypeError, "ClusterPolicy"),
        ({"on_member": 5}, TypeError, "on_member"),
        ({"connect": 5}, TypeError, "connect"),
        ({"options": 5}, TypeError, "options"),
        ({"credentials": "secret"}, TypeError, "credentials"),
        ({"timer": 5}, TypeError, "timer"),
        (
            {"connect": print, "compression": grpc.Compression.Gzip},
            ConfigurationError,
            "compression: not together with connect",
        ),
        ({"policy": ClusterPolicy(probe="often")}, TypeError, "wait"),
        ({"name": ""}, ConfigurationError, "name"),
        ({"name": 5}, TypeError, "name"),
    ],
)
async def test_what_makes_no_sense_is_said_at_once(settings, error, said):
    with pytest.raises(error, match=said):
        ClusterChannel(**{"name": "test.Shop"} | settings)


async def test_a_wrong_update_changes_nothing(shops, aio_cluster):
    channel = aio_cluster(shops[0])
    before = channel.members
    with pytest.raises(TypeError, match="ServiceInstance"):
        channel.update([instance(shops[1]), None])
    assert channel.members is before


async def test_a_channel_of_threads_is_no_connection_on_a_loop(shops, aio_cluster):
    channel = aio_cluster(shops[0], connect=lambda one, options: object())
    with pytest.raises(TypeError, match="connect must return"):
        caller(channel)()


async def test_a_grace_that_makes_no_sense_changes_nothing(shops, aio_cluster):
    channel = aio_cluster(shops[0])
    with pytest.raises(ConfigurationError, match="grace must be 0 seconds or more"):
        await channel.close(-1)
    assert await caller(channel)() == b"x"


async def test_heartbeats_can_be_put_on_each_member(shops, aio_cluster, timer):
    manager = aio.HeartbeatManager(timer=timer, interval=1.0)
    channel = aio_cluster(*shops, on_member=lambda member: manager.attach(member.channel))
    for _ in range(3):
        await caller(channel)()
    assert (timer.pending, states(channel)) == (3, ["UP"] * 3)
    await channel.close()
    await aio_wait_until(lambda: timer.pending == 0)
    manager.close()


async def _awaited(call):
    return await call
