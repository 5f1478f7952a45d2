"""The members of a stub: calls of each kind and style go to the members of the moment."""

import asyncio
import gc
import weakref

import grpc
import pytest

from fixtures.aio_channels import ANSWERS, KINDS, STYLES, Stub
from fixtures.aio_clusters import caller, counts, in_order
from fixtures.aio_doors import others, refused
from fixtures.clusters import instance
from fixtures.shop import UNARY_STREAM, UNARY_UNARY, Fail, Hang, Silent
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel import RetryPolicy, aio
from rpcwheel._grpc.aio_plain import PLAIN, PlainCall
from rpcwheel.cluster import Picker
from rpcwheel.cluster.aio import ClusterChannel


class Foreign(grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation, details, request):
        return await continuation(details, request)


class ForeignStream(grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(self, continuation, details, request):
        return await continuation(details, request)


KIT = aio.Kit(timeout=WAIT_S, retry=RetryPolicy(on="UNAVAILABLE"))


def connected_with(*interceptors):
    """Members' channels with interceptors in them."""
    return lambda one, options: grpc.aio.insecure_channel(
        one.target, options, interceptors=interceptors
    )


WAYS = {
    "plain": lambda made: made(),
    "connected with interceptors": lambda made: made(
        connect=connected_with(Foreign(), ForeignStream())
    ),
    "below a kit": lambda made: KIT.intercept_channel(made()),
    "connected with a kit's": lambda made: made(connect=connected_with(*KIT.client_interceptors())),
}
"""What stubs are made of."""


@pytest.fixture(params=WAYS.values(), ids=WAYS.keys())
def both(request, aio_cluster):
    """What stubs are made of, and the channel below."""
    made = []

    def noting(**given):
        made.append(aio_cluster(**given))
        return made[0]

    return request.param(noting), made[0]


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES.keys())
@pytest.mark.parametrize("kind", KINDS)
async def test_a_stub_made_before_an_update_works_after_it(both, shops, dead, kind, style):
    outer, channel = both
    stub = Stub(outer)
    queued = kind.startswith("stream") and style is STYLES["read and write"]
    for place, shop in enumerate(shops):
        # Nobody sees that one is away; but what is written goes into a queue of interceptors.
        away = [] if queued and channel._fleet.foreign else [instance(dead, weight=1000)]
        channel.update([instance(shop), *away])
        for number in (1, 2):
            assert await style(stub, kind) == ANSWERS[kind]
            assert counts(shops)[place] == number
    await aio_wait_until(lambda: channel.calls == 0)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_in_flight_is_counted_until_its_end(shops, aio_cluster, kind):
    channel = aio_cluster(shops[0])
    shops[0].then(hang := Hang())
    call = getattr(Stub(channel), kind)(b"" if kind.startswith("unary") else None)
    await aio_wait_until(hang.begun.is_set)
    assert (channel.calls, channel.members[0].calls) == (1, 1)
    call.cancel()
    await aio_wait_until(lambda: channel.calls == 0)
    assert call.cancelled()


async def test_a_call_that_nobody_awaits_runs_to_its_end(shops, aio_cluster):
    channel = aio_cluster(shops[0])
    channel.unary_unary(UNARY_UNARY)(b"x")
    assert channel.calls == 1
    await aio_wait_until(lambda: channel.calls == 0)


@pytest.mark.parametrize("moved", [False, True])
async def test_a_stream_that_its_caller_has_forgotten_is_cancelled(shops, dead, aio_cluster, moved):
    targets = (dead, shops[0]) if moved else (shops[0],)
    channel = aio_cluster(*targets, balance=Lowest())
    shops[0].then(silent := Silent(after=1))
    call = channel.unary_stream(UNARY_STREAM)(b"ab")
    assert await call.read() == b"a"
    await aio_wait_until(silent.begun.is_set)
    gone = weakref.ref(call)
    del call
    await aio_wait_until(lambda: (gc.collect(), gone())[1] is None)
    await aio_wait_until(lambda: channel.calls == 0)
    await aio_wait_until(shops[0].calls[-1].ended.is_set)


class Lowest(Picker):
    """Whoever is called the least often comes first, those never called of all."""

    def prepare(self, members, weights):
        return lambda *_: min(members, key=lambda one: one.used)


async def test_a_call_costs_no_task_of_its_own(shops, aio_cluster):
    bare, channel = grpc.aio.insecure_channel(shops[0].target), aio_cluster(shops[0])
    made = []
    for one in (bare, channel):
        shops[0].then(Hang(), Hang())
        before = len(others())
        calls = [one.unary_unary(UNARY_UNARY)(b"x"), one.unary_stream(UNARY_STREAM)(b"x")]
        await asyncio.sleep(0.05)
        made.append(len(others()) - before)
        for call in calls:
            call.cancel()
        await aio_wait_until(lambda before=before: len(others()) == before)
    await bare.close()
    assert made[1] == made[0] > 0


async def test_a_failure_is_told_as_on_a_bare_channel(shops, aio_cluster):
    shops[0].then(Fail("NOT_FOUND", "no such thing", trailing=(("why", "so"),)))
    error = await refused(caller(aio_cluster(shops[0]))())
    assert (error.code().name, error.details()) == ("NOT_FOUND", "no such thing")
    assert ("why", "so") in tuple(error.trailing_metadata())


async def test_what_begins_no_call_is_not_counted(shops, aio_cluster):
    channel = aio_cluster(shops[0])
    with pytest.raises(TypeError):
        channel.unary_unary(UNARY_UNARY)(b"x", wrong=True)
    with pytest.raises(TypeError):
        channel.unary_unary(UNARY_UNARY, None, None, "more", "and more")(b"x")
    with pytest.raises(TypeError):
        channel.stream_unary(UNARY_UNARY)(7)
    assert channel.calls == 0


async def test_serializers_are_kept_and_a_call_without_them_is_of_bytes(shops, aio_cluster):
    channel = aio_cluster(shops[0])
    member = channel.unary_unary(UNARY_UNARY, str.encode, bytes.decode)
    assert await member("text") == "text"
    registered = channel.unary_unary(UNARY_UNARY, str.encode, bytes.decode, True)
    assert await registered("text") == "text"
    named = channel.unary_unary(UNARY_UNARY, _registered_method=True)
    assert await named(b"bytes") == b"bytes"
    pushed = channel.stream_unary("/test.Shop/StreamUnary", str.encode, bytes.decode)
    assert await pushed(iter(["te", "xt"])) == "text"


async def test_a_picker_sees_the_request_and_interceptors_see_it_too(shops, aio_cluster):
    seen = []

    class Sees(Picker):
        def prepare(self, members, weights):
            return lambda *call: (seen.append(call), members[0])[1]

    class Notes(grpc.aio.UnaryUnaryClientInterceptor):
        async def intercept_unary_unary(self, continuation, details, request):
            seen.append(request)
            return await continuation(details, request)

    given = (UNARY_UNARY, "text", (("a", "b"),))
    for connect in (None, connected_with(Notes())):
        channel = aio_cluster(shops[0], balance=Sees(), connect=connect)
        call = channel.unary_unary(UNARY_UNARY, str.encode, bytes.decode)
        assert await call("text", metadata=(("a", "b"),), timeout=WAIT_S) == "text"
    assert seen == [given, given, "text"]
    await channel.stream_unary("/test.Shop/StreamUnary")(iter([b"x"]), timeout=WAIT_S)
    assert seen[3:] == [("/test.Shop/StreamUnary", None, None)]


async def test_a_stub_keeps_its_channel(shops, aio_cluster):
    """Which somebody may tell of its members."""
    channel = ClusterChannel("test.Shop", [instance(shops[0])])
    call, kept = channel.unary_unary(UNARY_UNARY), weakref.ref(channel)
    del channel
    gc.collect()
    kept().update([instance(shops[1])])
    assert await call(b"x", timeout=WAIT_S) == b"x"
    assert counts(shops) == [0, 1, 0]
    await kept().close()


async def test_members_that_are_gone_are_not_kept(shops, aio_cluster):
    channel = aio_cluster(shops[0])
    call = channel.unary_unary(UNARY_UNARY)
    await call(b"x", timeout=WAIT_S)
    gone = weakref.ref(channel.members[0])
    channel.update([instance(shops[1])])
    await call(b"x", timeout=WAIT_S)
    await aio_wait_until(lambda: (gc.collect(), gone())[1] is None)


# Plain calls: those to a member that was called before

needs_plain = pytest.mark.skipif(not PLAIN, reason="this grpc's calls are made in another way")


@needs_plain
async def test_a_call_to_a_member_that_has_answered_needs_no_relay(shops, aio_cluster):
    call = caller(aio_cluster(*shops[:1]))
    assert not isinstance(first := call(), PlainCall)
    assert await first == b"x"
    assert isinstance(second := call(), PlainCall)
    assert await second == b"x"


async def test_an_answer_to_one_of_which_more_was_asked_stamps_the_traffic(shops, aio_cluster):
    channel = aio_cluster(shops[0])
    call = caller(channel)
    await call()
    (member,) = channel._fleet.roster.members
    traffic = member.link.traffic
    traffic.last_read_ns = None
    assert await call().code() is grpc.StatusCode.OK
    assert traffic.last_read_ns is not None


@needs_plain
async def test_one_that_its_member_did_not_get_goes_to_another(shops, aio_cluster):
    channel = in_order(aio_cluster, *shops[:2])
    call = channel.unary_unary(UNARY_UNARY, bytes)
    assert await call(b"1") == b"1"
    await asyncio.to_thread(shops[0].kill)
    await aio_wait_until(lambda: channel.get_state() is not grpc.ChannelConnectivity.READY)
    request = bytearray(b"as it was")
    running = call(request, metadata=iter([("key", "value")]), timeout=50)
    assert isinstance(running, PlainCall)
    request[:] = b"changed"
    assert await running == b"as it was"
    (seen,) = shops[1].calls
    assert (seen.metadata["key"], seen.time_remaining < 51) == ("value", True)
    assert [member.state for member in channel.members] == ["DOWN", "UP"]
    assert channel.calls == 0


async def test_one_that_runs_when_its_member_leaves_is_drained(shops, aio_cluster):
    channel = aio_cluster(shops[0])
    call = caller(channel)
    await call()
    shops[0].then(hang := Hang())
    running = call()
    await aio_wait_until(hang.begun.is_set)
    channel.update([])
    assert channel.calls == 1
    running.cancel()
    await aio_wait_until(lambda: (channel.calls, channel._fleet.roster.leaving) == (0, []))


async def test_one_that_went_to_another_runs_on_when_the_first_is_closed(shops, aio_cluster):
    channel = in_order(aio_cluster, *shops[:2])
    call = caller(channel)
    await call()
    await asyncio.to_thread(shops[0].kill)
    await aio_wait_until(lambda: channel.get_state() is not grpc.ChannelConnectivity.READY)
    shops[1].then(hang := Hang())
    running = asyncio.ensure_future(call())
    await aio_wait_until(hang.begun.is_set)
    first = channel._fleet.roster.members[0].link
    channel.update([instance(shops[1])])
    await aio_wait_until(lambda: first.closed and not first._closing)
    assert not running.done()
    shops[1].calls[-1].ended.set()
    assert await running == b"x"
