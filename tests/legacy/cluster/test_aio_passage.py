"""A call that its member did not get goes to another one; no other call does."""

import asyncio

import grpc
import pytest

from fixtures.aio_channels import ANSWERS, KINDS, STYLES, Stub
from fixtures.aio_clusters import InOrder, caller, counts, in_order, states
from fixtures.aio_doors import refused, sent
from fixtures.clusters import instance, nobody_at
from fixtures.shop import STREAM_UNARY, UNARY_STREAM, UNARY_UNARY, Fail, Hang
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel.cluster import Picker
from rpcwheel.observe.events import MemberDown, MemberUp

NEVER_SENT = "failed to connect to all addresses; last error: of an upstream"


# From one member to the next


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES.keys())
@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_that_found_no_connection_is_answered_by_another_member(  # noqa: PLR0917
    shops, dead, aio_cluster, events, kind, style
):
    channel = in_order(aio_cluster, dead, shops[0])
    assert await style(Stub(channel), kind) == ANSWERS[kind]
    assert (len(shops[0].calls), states(channel)) == (1, ["DOWN", "UP"])
    assert events == [MemberDown("test.Shop", "000", "no connection")]
    await aio_wait_until(lambda: channel.calls == 0)
    assert await style(Stub(channel), kind) == ANSWERS[kind]
    assert len(events) == 1


@pytest.mark.parametrize("kind", KINDS)
async def test_each_member_is_tried_once_and_the_last_failure_is_told(dead, aio_cluster, kind):
    with nobody_at() as other:
        channel = in_order(aio_cluster, dead, other)
        with pytest.raises(grpc.aio.AioRpcError, match="failed to connect") as caught:
            await STYLES["iterate"](Stub(channel), kind)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert states(channel) == ["DOWN", "DOWN"]
    await aio_wait_until(lambda: channel.calls == 0)


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
    call = asyncio.ensure_future(_awaited(caller(channel)()))
    await aio_wait_until(hang.begun.is_set)
    await asyncio.to_thread(shops[0].kill)
    assert (await refused(call)).code() is grpc.StatusCode.UNAVAILABLE
    assert [type(event) for event in events] == [MemberDown]
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


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_a_connection_that_comes_too_late_does_not_hide_that_nothing_was_sent(
    shops, dead, aio_cluster, host
):
    channel = aio_cluster(connect=recovering, balance=InOrder())
    channel.update([instance(dead, host=host, id="0"), instance(shops[0], id="1")])
    assert await caller(channel)() == b"x"


async def test_a_host_name_is_no_hindrance(shops, dead, aio_cluster):
    channel = aio_cluster(balance=InOrder())
    channel.update([instance(dead, host="localhost", id="0"), instance(shops[0], id="1")])
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


@pytest.mark.parametrize("style", ["written", "iterated", "iterated asynchronously"])
async def test_requests_that_were_taken_are_not_sent_again(shops, aio_cluster, style):
    """Though by the words of its failure, and by the state of the connection, nothing was sent."""
    channel = in_order(aio_cluster, *shops[:2], connect=gloomy)
    shops[0].then(Fail("UNAVAILABLE", NEVER_SENT, read=True))
    given = {"iterated": iter([b"a", b"b"]), "iterated asynchronously": sent(b"a", b"b")}
    call = channel.stream_unary(STREAM_UNARY)(given.get(style), timeout=WAIT_S)
    if style == "written":
        await call.write(b"a")
        await call.done_writing()
    assert (await refused(call)).details() == NEVER_SENT
    assert counts(shops) == [1, 0, 0]


async def test_a_message_that_was_read_is_not_read_twice(shops, aio_cluster):
    channel = in_order(aio_cluster, *shops[:2], connect=gloomy)
    shops[0].then(Fail("UNAVAILABLE", NEVER_SENT, after=1))
    call = channel.unary_stream(UNARY_STREAM)(b"ab", timeout=WAIT_S)
    assert await call.read() == b"a"
    assert (await refused(call.read())).details() == NEVER_SENT
    assert counts(shops) == [1, 0, 0]


@pytest.mark.parametrize("given", [iter, lambda messages: sent(*messages)])
async def test_iterated_requests_are_read_once_whoever_gets_them(shops, dead, aio_cluster, given):
    channel = in_order(aio_cluster, dead, shops[0])
    messages = [bytes([byte]) for byte in range(50)]
    call = channel.stream_unary(STREAM_UNARY)(given(messages), timeout=WAIT_S)
    assert await call == b"".join(messages)
    assert shops[0].calls[0].requests == messages


async def test_a_request_that_its_caller_changes_is_sent_as_it_was(shops, dead, aio_cluster):
    channel = in_order(aio_cluster, dead, shops[0])
    request = bytearray(b"as it was")
    call = channel.unary_unary(UNARY_UNARY, bytes, None)(request, timeout=WAIT_S)
    await asyncio.sleep(0)  # it is serialized on the loop, as by grpc.aio
    await asyncio.sleep(0)
    request[:] = b"changed"
    assert await call == b"as it was"


async def test_the_deadline_is_that_of_the_whole_call(shops, dead, aio_cluster):
    channel = in_order(aio_cluster, dead, shops[0])
    shops[0].then(Hang())
    call = caller(channel, timeout=500)()
    await aio_wait_until(lambda: shops[0].calls)
    assert 400 < call.time_remaining() <= 500
    assert 400 < shops[0].calls[0].time_remaining < 510
    call.cancel()


async def test_one_that_is_out_of_time_goes_nowhere_else(shops, dead, aio_cluster, timer):
    call = caller(in_order(aio_cluster, dead, shops[0]), timeout=3)()
    timer.advance(4)
    assert "failed to connect" in (await refused(call)).details()
    assert counts(shops) == [0, 0, 0]


async def test_the_time_that_it_has_waited_counts(shops, aio_cluster, timer):
    channel = aio_cluster()
    call = caller(channel, timeout=500)(wait_for_ready=True)
    timer.advance(100)
    channel.update([instance(shops[0])])
    assert await call == b"x"
    assert 300 < shops[0].calls[0].time_remaining < 410


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
    task = asyncio.create_task(_awaited(caller(channel)()))
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


async def test_an_answer_of_a_member_that_is_down_has_it_called_again(shops, aio_cluster, events):
    channel = in_order(aio_cluster, shops[0])
    for answer in (b"well", Fail("NOT_FOUND")):
        channel.members[0].down("by hand")
        shops[0].then(answer)
        await caller(channel)().code()
        await aio_wait_until(lambda: states(channel) == ["UP"])
    assert [type(event) for event in events] == [MemberDown, MemberUp] * 2


async def _awaited(call):
    return await call
