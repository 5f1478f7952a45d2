"""A member may be said to be down or up, on any thread."""

import asyncio

from fixtures.aio_clusters import caller, states
from fixtures.waiting import aio_wait_until
from rpcwheel.channel.aio import ReconnectingChannel
from rpcwheel.observe.events import MemberDown, MemberUp


async def test_it_is_called_again_when_it_is_said_to_be_up(shops, aio_cluster, timer, events):
    channel = aio_cluster(shops[0])
    member = channel.members[0]
    member.down("the test says so")
    member.down("again")
    assert (member.state, member.reason, timer.pending) == ("DOWN", "the test says so", 1)
    member.up()
    member.up()
    assert (member.state, timer.pending) == ("IDLE", 0)
    assert [type(event) for event in events] == [MemberDown, MemberUp]


async def test_other_threads_may_say_so(shops, aio_cluster):
    channel = aio_cluster(shops[0])
    await asyncio.to_thread(channel.members[0].down)
    await aio_wait_until(lambda: states(channel) == ["DOWN"])
    await asyncio.to_thread(channel.members[0].up)
    await aio_wait_until(lambda: states(channel) == ["IDLE"])


async def test_it_has_a_channel_of_its_own_once_that_is_wanted(shops, aio_cluster):
    channel = aio_cluster(shops[0])
    member = channel.members[0]
    assert (member.calls, member.link, member.target) == (0, None, shops[0].target)
    assert type(member.channel) is ReconnectingChannel
    assert member.channel is member.channel
    assert await caller(channel)() == b"x"
    assert repr(member) == f"<Member {member.id} of 'test.Shop', UP>"


async def test_one_that_is_gone_changes_no_more(shops, aio_cluster, events):
    channel = aio_cluster(shops[0])
    member = channel.members[0]
    channel.update([])
    member.down()
    member.up()
    assert (member.state, events) == ("CLOSED", [])
