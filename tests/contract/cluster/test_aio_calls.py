"""Calls through a ClusterChannel of grpc.aio go to the members of the moment."""

import gc
import weakref

import grpc
import pytest

from fixtures.aio_channels import ANSWERS, KINDS, STYLES, Stub
from fixtures.aio_channels import hanging as hanging_call
from fixtures.aio_clusters import caller, counts
from fixtures.aio_doors import others, refused
from fixtures.clusters import instance
from fixtures.shop import UNARY_STREAM, UNARY_UNARY, Fail, Hang, Silent
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel import RetryPolicy, aio
from rpcwheel.cluster import Picker
from rpcwheel.cluster.aio import ClusterChannel


class Foreign(grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation, details, request):
        return await continuation(details, request)


class ForeignStream(grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(self, continuation, details, request):
        return await continuation(details, request)


KIT = aio.Kit(timeout=WAIT_S, retry=RetryPolicy(retry_on="UNAVAILABLE"))


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


async def test_a_stub_made_before_an_update_works_after_it(both, shops, dead):
    outer, channel = both
    stub = Stub(outer)
    for shop in shops:
        channel.update([instance(shop)])
        for style in STYLES.values():
            assert {kind: await style(stub, kind) for kind in KINDS} == ANSWERS
        assert len(shop.calls) == len(STYLES) * len(KINDS)
    # Nobody sees that a member is away.
    channel.update([instance(shop), instance(dead, weight=1000)])
    for _ in range(2):
        assert {kind: await STYLES["iterate"](stub, kind) for kind in KINDS} == ANSWERS
    await aio_wait_until(lambda: channel.calls == 0)


async def test_calls_in_flight_are_counted_until_their_end(shops, aio_cluster):
    channel = aio_cluster(shops[0])
    calls = [await hanging_call(shops[0], channel, kind) for kind in KINDS]
    assert (channel.calls, channel.members[0].calls) == (len(KINDS), len(KINDS))
    for call in calls:
        call.cancel()
    await aio_wait_until(lambda: channel.calls == 0)
    assert all(call.cancelled() for call in calls)


async def test_a_call_that_nobody_awaits_runs_to_its_end(shops, aio_cluster):
    channel = aio_cluster(shops[0])
    channel.unary_unary(UNARY_UNARY)(b"x")
    assert channel.calls == 1
    await aio_wait_until(lambda: channel.calls == 0)


async def test_a_stream_that_its_caller_has_forgotten_is_cancelled(shops, aio_cluster):
    channel = aio_cluster(shops[0])
    shops[0].then(silent := Silent(after=1))
    call = channel.unary_stream(UNARY_STREAM)(b"ab")
    assert await call.read() == b"a"
    await aio_wait_until(silent.begun.is_set)
    gone = weakref.ref(call)
    del call
    await aio_wait_until(lambda: (gc.collect(), gone())[1] is None)
    await aio_wait_until(lambda: channel.calls == 0)
    await aio_wait_until(shops[0].calls[-1].ended.is_set)


async def test_a_call_costs_no_task_of_its_own(shops, aio_cluster):
    bare, channel, bare_tasks = grpc.aio.insecure_channel(shops[0].target), aio_cluster(shops[0]), 0
    for one in (bare, channel):
        shops[0].then(*(hangs := [Hang(), Hang()]))
        before = len(others())
        calls = [one.unary_unary(UNARY_UNARY)(b"x"), one.unary_stream(UNARY_STREAM)(b"x")]
        await aio_wait_until(lambda hangs=hangs: all(hang.begun.is_set() for hang in hangs))
        if one is bare:
            bare_tasks = len(others()) - before
        else:
            await aio_wait_until(lambda most=before + bare_tasks: len(others()) <= most)
        for call in calls:
            call.cancel()
        await aio_wait_until(lambda before=before: len(others()) == before)
    await bare.close()


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


async def test_the_deadline_is_that_of_the_whole_call(shops, aio_cluster):
    channel = aio_cluster(shops[0])
    shops[0].then(Hang())
    call = caller(channel, timeout=500)()
    await aio_wait_until(lambda: shops[0].calls)
    assert 400 < call.time_remaining() <= 500
    assert 400 < shops[0].calls[0].time_remaining < 510
    call.cancel()
