"""On a loop, too: a call that a member did not get goes to another, and no other call does."""

import asyncio
import socket

import grpc
import pytest

from fixtures.aio_channels import ANSWERS, KINDS, STYLES, Stub
from fixtures.aio_clusters import InOrder, begun, caller, counts, in_order, states
from fixtures.aio_doors import refused, sent
from fixtures.clusters import instance, nobody_at
from fixtures.shop import STREAM_UNARY, UNARY_STREAM, UNARY_UNARY, Fail, Hang, Silent
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel.cluster import BroadcastFailed, ClusterPolicy, Picker
from rpcwheel.cluster._aio_unsent import is_unsent
from rpcwheel.cluster.aio import BroadcastInvoker, ForkingInvoker
from rpcwheel.observe.events import CallbackFailed, MemberDown, MemberUp

NEVER_SENT = "failed to connect to all addresses; last error: of an upstream"


# From one member to the next


async def test_a_call_that_found_no_connection_is_answered_by_another_member(
    shops, dead, aio_cluster, events
):
    for style in STYLES.values():
        for kind in KINDS:
            channel = in_order(aio_cluster, dead, shops[0])
            for _ in range(2):
                assert await style(Stub(channel), kind) == ANSWERS[kind]
            assert states(channel) == ["DOWN", "UP"]
            await aio_wait_until(lambda channel=channel: channel.calls == 0)
    assert events == [MemberDown("test.Shop", "000", "no connection")] * 8


async def test_each_member_is_tried_once_and_the_last_failure_is_told(dead, aio_cluster):
    with nobody_at() as other:
        for kind in KINDS:
            channel = in_order(aio_cluster, dead, other)
            with pytest.raises(grpc.aio.AioRpcError, match="failed to connect") as caught:
                await STYLES["iterate"](Stub(channel), kind)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert states(channel) == ["DOWN", "DOWN"]
            await aio_wait_until(lambda channel=channel: channel.calls == 0)


async def test_a_failure_of_a_server_is_the_callers(shops, aio_cluster):
    channel = in_order(aio_cluster, *shops[:2])
    for details in ("busy", NEVER_SENT):
        shops[0].then(Fail("UNAVAILABLE", details))
        assert (await refused(caller(channel)())).details() == details
    assert (counts(shops), states(channel)) == ([2, 0, 0], ["UP", "IDLE"])


async def test_one_that_was_sent_is_the_callers_though_its_member_is_down(
    shops, aio_cluster, events
):
    channel = in_order(aio_cluster, *shops[:2])
    shops[0].then(hang := Hang())
    call = begun(caller(channel)())
    await aio_wait_until(hang.begun.is_set)
    await asyncio.to_thread(shops[0].kill)
    assert (await refused(call)).code() is grpc.StatusCode.UNAVAILABLE
    await aio_wait_until(lambda: [type(event) for event in events] == [MemberDown])
    assert await caller(channel)() == b"x"
    assert counts(shops) == [1, 1, 0]


def gloomy(instance, options):
    """A channel that says that it has no connection, though it has."""
    channel = grpc.aio.insecure_channel(instance.target, options)
    channel.get_state = lambda **_: grpc.ChannelConnectivity.TRANSIENT_FAILURE
    return channel


def recovering(instance, options):
    """A channel that says that it has no connection when it is first asked, and then that it has.

    As one does whose server comes back just when a call has failed.
    """
    channel = grpc.aio.insecure_channel(instance.target, options)
    states = [grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.CONNECTING]
    channel.get_state = lambda **_: states.pop() if len(states) > 1 else states[0]
    return channel


async def test_a_connection_that_comes_too_late_does_not_hide_that_nothing_was_sent(
    shops, dead, aio_cluster
):
    channel = aio_cluster(connect=recovering, balance=InOrder())
    channel.update([instance(dead, id="0"), instance(shops[0], id="1")])
    assert await caller(channel)() == b"x"


async def test_a_connection_that_was_there_proves_that_a_server_said_so(shops, aio_cluster):
    channel = in_order(aio_cluster, *shops[:2])
    assert await caller(channel)() == b"x"
    words = f"failed to connect to all addresses; last error: UNKNOWN: ipv4:{shops[0].target}: no"
    shops[0].then(Fail("UNAVAILABLE", words))
    assert (await refused(caller(channel)())).details() == words
    assert counts(shops) == [2, 0, 0]


async def test_words_of_another_address_prove_nothing_then(shops, aio_cluster):
    channel = in_order(aio_cluster, *shops[:2], connect=recovering)
    words = "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.7:50051: refused"
    shops[0].then(Fail("UNAVAILABLE", words))
    assert (await refused(caller(channel)())).details() == words
    assert counts(shops) == [1, 0, 0]


def breaking(instance, options):
    """A channel that says that it has a connection when it is first asked, and then has none.

    As one does whose server goes down before we look.
    """
    channel = recovering(instance, options)
    states = [grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.READY]
    channel.get_state = lambda **_: states.pop() if len(states) > 1 else states[0]
    return channel


async def test_nor_do_they_if_the_connection_breaks_thereafter(shops, aio_cluster):
    channel = in_order(aio_cluster, *shops[:2], connect=breaking)
    words = "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.7:50051: refused"
    shops[0].then(Fail("UNAVAILABLE", words))
    assert (await refused(caller(channel)())).details() == words
    assert counts(shops) == [1, 0, 0]


async def test_requests_that_were_taken_are_not_sent_again(shops, aio_cluster):
    """Though by the words of its failure, and by the state of the connection, nothing was sent."""
    for requests in (None, iter([b"a", b"b"]), sent(b"a", b"b")):
        channel = in_order(aio_cluster, *shops[:2], connect=gloomy)
        shops[0].then(Fail("UNAVAILABLE", NEVER_SENT, read=True))
        call = channel.stream_unary(STREAM_UNARY)(requests, timeout=WAIT_S)
        if requests is None:
            await call.write(b"a")
            await call.done_writing()
        assert (await refused(call)).details() == NEVER_SENT
    assert counts(shops) == [3, 0, 0]


async def test_a_message_that_was_read_is_not_read_twice(shops, aio_cluster):
    channel = in_order(aio_cluster, *shops[:2], connect=gloomy)
    shops[0].then(Fail("UNAVAILABLE", NEVER_SENT, after=1))
    call = channel.unary_stream(UNARY_STREAM)(b"ab", timeout=WAIT_S)
    assert await call.read() == b"a"
    assert (await refused(call.read())).details() == NEVER_SENT
    assert counts(shops) == [1, 0, 0]


async def test_iterated_requests_are_read_once_whoever_gets_them(shops, dead, aio_cluster):
    messages = [bytes([byte]) for byte in range(50)]
    for requests in (iter(messages), sent(*messages)):
        channel = in_order(aio_cluster, dead, shops[0])
        call = channel.stream_unary(STREAM_UNARY)(requests, timeout=WAIT_S)
        assert await call == b"".join(messages)
        assert shops[0].calls[-1].requests == messages


async def test_a_request_that_its_caller_changes_is_sent_as_it_was(shops, dead, aio_cluster):
    channel = in_order(aio_cluster, dead, shops[0])
    request = bytearray(b"as it was")
    call = channel.unary_unary(UNARY_UNARY, bytes, None)(request, timeout=WAIT_S)
    await asyncio.sleep(0)  # it is serialized on the loop, as by grpc.aio
    await asyncio.sleep(0)
    request[:] = b"changed"
    assert await call == b"as it was"


async def test_one_that_is_out_of_time_goes_nowhere_else(shops, dead, aio_cluster, timer):
    call = caller(in_order(aio_cluster, dead, shops[0]), timeout=3)()
    timer.advance(4)
    assert "failed to connect" in (await refused(call)).details()
    assert counts(shops) == [0, 0, 0]


async def test_an_empty_stream_of_requests_goes_to_another_member_too(shops, dead, aio_cluster):
    call = in_order(aio_cluster, dead, shops[0]).stream_unary(STREAM_UNARY)(timeout=WAIT_S)
    await call.done_writing()
    assert await call == b""


async def test_requests_that_are_still_to_come_are_waited_for_no_more_at_the_end(
    shops, dead, aio_cluster
):
    ended = []

    async def never():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)
        yield

    channel = in_order(aio_cluster, dead, shops[0])
    call = channel.stream_unary(STREAM_UNARY)(never(), timeout=WAIT_S)
    await aio_wait_until(lambda: shops[0].calls)
    call.cancel()
    await aio_wait_until(lambda: ended)


async def test_cancelling_ends_the_try_that_runs(shops, dead, aio_cluster):
    channel = in_order(aio_cluster, dead, shops[0])
    shops[0].then(hang := Hang())
    task = begun(caller(channel)())
    await aio_wait_until(hang.begun.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await aio_wait_until(shops[0].calls[0].ended.is_set)
    await aio_wait_until(lambda: channel.calls == 0)


async def test_what_a_picker_raises_is_the_callers(shops, dead, aio_cluster):
    class Fails(Picker):
        def prepare(self, members, weights):
            return lambda *_: members[0] if len(members) == 2 else 1 / 0

    channel = in_order(aio_cluster, dead, shops[0], balance=Fails())
    with pytest.raises(ZeroDivisionError):
        await caller(channel)()  # of the second try
    with pytest.raises(ZeroDivisionError):
        caller(channel)()
    assert channel.calls == 0


# A member that no call can be made on


def connecting(*broken):
    """Makes channels, but for members that are broken: those ids, which may be mended."""

    def connect(one, options):
        if one.id in connect.broken:
            raise KeyError("no certificate")
        connect.made[one.id] = made = grpc.aio.insecure_channel(one.target, options)
        return made

    connect.broken, connect.made = set(broken), {}
    return connect


# `connect` raises


async def test_where_connect_raises_another_member_is_called(shops, aio_cluster, events):
    channel = in_order(aio_cluster, *shops[:2], connect=connecting("000"))
    for kind in ("unary_unary", "stream_unary", "unary_unary"):
        request = b"x" if kind == "unary_unary" else iter([b"x"])
        method = getattr(channel, kind)(f"/test.Shop/{kind.title().replace('_', '')}")
        assert await method(request, timeout=WAIT_S) == b"x"
    assert (counts(shops), states(channel)) == ([0, 3, 0], ["DOWN", "UP"])
    assert events == [MemberDown("test.Shop", "000", "connect: KeyError('no certificate')")]


async def test_what_connect_raises_for_all_is_the_callers(shops, aio_cluster):
    channel = in_order(aio_cluster, *shops[:2], connect=connecting("000", "001"))
    for _ in range(2):
        with pytest.raises(KeyError, match="no certificate"):
            caller(channel)()
    assert (channel.calls, states(channel)) == (0, ["DOWN", "DOWN"])


async def test_a_probe_finds_that_connect_raises_no_more(shops, aio_cluster, events, timer):
    connect = connecting("000")
    policy = ClusterPolicy(probe=0.5)
    channel = in_order(aio_cluster, *shops[:2], connect=connect, policy=policy)
    assert await caller(channel)() == b"x"
    timer.advance(0.6)
    await aio_wait_until(lambda: [one for one in events if isinstance(one, CallbackFailed)])
    connect.broken.clear()
    timer.advance(0.6)
    await aio_wait_until(lambda: isinstance(events[-1], MemberUp))
    assert states(channel) == ["UP", "UP"]


async def test_a_call_that_was_not_sent_goes_past_it_too(shops, dead, aio_cluster):
    channel = in_order(aio_cluster, dead, shops[0], shops[1], connect=connecting("001"))
    assert await caller(channel)() == b"x"
    assert counts(shops) == [0, 1, 0]


async def test_if_there_is_nobody_behind_it_the_failure_of_the_call_is_told(
    shops, dead, aio_cluster
):
    channel = in_order(aio_cluster, dead, shops[0], connect=connecting("001"))
    assert "failed to connect" in (await refused(caller(channel)())).details()


async def test_one_that_has_waited_goes_past_it_too(shops, aio_cluster):
    channel = in_order(aio_cluster, connect=connecting("000", "001"))
    channel.update([])
    calls = [caller(channel)(wait_for_ready=True) for _ in range(2)]
    channel.update([instance(shop, id=f"{place:03}") for place, shop in enumerate(shops)])
    assert [await call for call in calls] == [b"x", b"x"]
    channel.update([])
    calls = [caller(channel)(wait_for_ready=True) for _ in range(2)]
    channel.update([instance(shops[0], id="000")])
    for call in calls:
        with pytest.raises(KeyError):
            await call


async def test_a_broadcast_tells_of_it_beside_the_answers(shops, aio_cluster):
    channel = in_order(aio_cluster, *shops[:2], connect=connecting("000"))
    call = BroadcastInvoker(channel).unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S)
    with pytest.raises(BroadcastFailed, match="no certificate") as caught:
        await call
    assert caught.value.answers == {shops[1].target: b"x"}
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "000: connect: KeyError('no certificate')" in caught.value.details()


async def test_forks_go_past_it(shops, aio_cluster):
    channel = in_order(aio_cluster, *shops, connect=connecting("000"))
    shops[1].then(Fail("NOT_FOUND"))
    shops[2].then(hang := Hang())
    call = ForkingInvoker(channel).unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S)
    await aio_wait_until(hang.begun.is_set)
    await aio_wait_until(lambda: counts(shops) == [0, 1, 1])
    shops[2].calls[0].ended.set()
    assert await call == b"x"


# Its connection takes long


async def test_a_call_of_little_time_does_not_prove_that_there_is_no_connection(
    aio_cluster, timer, events
):
    with socket.create_server(("127.0.0.1", 0)) as slow:  # which never says that it is there
        channel = in_order(aio_cluster, slow.getsockname()[1], policy=ClusterPolicy(probe=1000))
        for state in ("UP", "UP", "DOWN"):
            timer.advance(0.6)
            error = await refused(caller(channel, timeout=0.1)())
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert states(channel) == [state]
    assert [event.reason for event in events] == ["DEADLINE_EXCEEDED without a connection"]


async def test_the_time_that_a_call_waited_for_a_member_is_not_that_of_the_connection(
    aio_cluster, timer
):
    with socket.create_server(("127.0.0.1", 0)) as slow:
        channel = aio_cluster(policy=ClusterPolicy(probe=1000, wait=50))
        timer.advance(1)
        call = caller(channel, timeout=5)()
        await asyncio.sleep(0)
        timer.advance(4.9)
        channel.update([instance(slow.getsockname()[1])])
        assert (await refused(call)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert states(channel) == ["UP"]


# The user has closed it


async def test_a_connection_that_the_user_has_closed_is_no_hindrance_for_others(shops, aio_cluster):
    connect = connecting()
    channel = in_order(aio_cluster, *shops[:2], connect=connect)
    assert await caller(channel)() == b"x"
    await connect.made["000"].close()
    assert await caller(channel)() == b"x"
    assert (counts(shops), states(channel)) == ([1, 1, 0], ["DOWN", "UP"])


async def test_where_it_was_the_only_one_the_caller_hears_of_it(shops, aio_cluster):
    connect = connecting()
    channel = in_order(aio_cluster, shops[0], connect=connect)
    assert await caller(channel)() == b"x"
    await connect.made["000"].close()
    with pytest.raises(grpc.aio.UsageError, match="closed"):
        caller(channel)()


async def test_a_member_whose_channel_the_user_has_drained_gets_another(shops, aio_cluster):
    channel = in_order(aio_cluster, shops[0])
    shops[0].then(Silent(after=1))
    stream = channel.unary_stream(UNARY_STREAM)(b"ab", timeout=WAIT_S)
    assert await stream.read() == b"a"
    former = channel.members[0].channel
    former.drain()
    assert await caller(channel)() == b"x"
    assert not former.closed
    stream.cancel()
    await aio_wait_until(lambda: former.closed)


async def test_a_broadcast_to_channels_tells_of_one_that_is_closed(shops):
    async with grpc.aio.insecure_channel(shops[0].target) as well:
        closed = grpc.aio.insecure_channel(shops[1].target)
        await closed.close()
        with pytest.raises(BroadcastFailed, match="Channel is closed") as caught:
            await BroadcastInvoker([well, closed]).unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S)
        assert list(caught.value.answers.values()) == [b"x"]
        forked = ForkingInvoker([well, closed]).unary_unary(UNARY_UNARY)
        assert await forked(b"x", timeout=WAIT_S) == b"x"


# Plain calls: those to a member that was called before


async def test_one_that_its_member_did_not_get_goes_to_another(shops, aio_cluster):
    channel = in_order(aio_cluster, *shops[:2])
    call = channel.unary_unary(UNARY_UNARY, bytes)
    assert await call(b"1") == b"1"
    await asyncio.to_thread(shops[0].kill)
    await aio_wait_until(lambda: channel.get_state() is not grpc.ChannelConnectivity.READY)
    request = bytearray(b"as it was")
    running = call(request, metadata=iter([("key", "value")]), timeout=50)
    request[:] = b"changed"
    assert await running == b"as it was"
    (seen,) = shops[1].calls
    assert (seen.metadata["key"], seen.time_remaining < 51) == ("value", True)
    assert [member.state for member in channel.members] == ["DOWN", "UP"]
    assert channel.calls == 0


async def test_one_that_went_to_another_runs_on_when_the_first_is_closed(shops, aio_cluster):
    channel = in_order(aio_cluster, *shops[:2])
    call = caller(channel)
    await call()
    await asyncio.to_thread(shops[0].kill)
    await aio_wait_until(lambda: channel.get_state() is not grpc.ChannelConnectivity.READY)
    shops[1].then(hang := Hang())
    running = asyncio.ensure_future(call())
    await aio_wait_until(hang.begun.is_set)
    first = channel.members[0].channel
    channel.update([instance(shops[1])])
    await aio_wait_until(lambda: first.closed and not first._closing)
    assert not running.done()
    shops[1].calls[-1].ended.set()
    assert await running == b"x"


# What makes it sure that nothing was sent

WORDS = "failed to connect to all addresses; last error: UNKNOWN: {}: connection refused"
OWN, OTHER = "ipv4:127.0.0.1:1", "ipv4:10.0.0.7:1"
OF_V6 = "ipv6:%5B::1%5D:1"


def failure(details, *trailing, code=grpc.StatusCode.UNAVAILABLE):
    # Before grpcio 1.82 no metadata has a default.
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details)


def test_two_of_three_signs_make_it_sure():
    rows = [
        ("IDLE", "TRANSIENT_FAILURE", OWN, True),
        ("IDLE", "TRANSIENT_FAILURE", OTHER, True),
        ("IDLE", "READY", OWN, True),
        ("READY", "TRANSIENT_FAILURE", OWN, True),
        ("READY", "TRANSIENT_FAILURE", OTHER, False),
        ("IDLE", "READY", OTHER, False),
        ("READY", "READY", OWN, False),
        ("READY", "CONNECTING", OWN, False),
        ("", "", OWN, False),
    ]
    for began_in, state, address, sure in rows:
        assert is_unsent(failure(WORDS.format(address)), instance(1), began_in, state) is sure


def test_what_a_host_name_stands_for_is_not_known():
    of_name, words = instance(1, host="localhost"), failure(WORDS.format(OWN))
    assert is_unsent(words, of_name, "IDLE", "TRANSIENT_FAILURE")
    assert not is_unsent(words, of_name, "READY", "TRANSIENT_FAILURE")
    assert not is_unsent(words, of_name, "IDLE", "READY")


def test_ipv6_is_known_too():
    of_v6 = instance(1, host="::1")
    assert is_unsent(failure(WORDS.format(OF_V6)), of_v6, "READY", "TRANSIENT_FAILURE")


def test_without_the_words_nothing_is_sure():
    for error in (
        failure("busy"),
        failure(None),
        failure(WORDS.format(OWN), ("a", "b")),
        failure(WORDS.format(OWN), code=grpc.StatusCode.INTERNAL),
    ):
        assert not is_unsent(error, instance(1), "IDLE", "TRANSIENT_FAILURE")
