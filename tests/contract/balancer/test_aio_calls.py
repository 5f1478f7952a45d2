"""Calls of a balanced channel of grpc.aio: each is sent on one READY subchannel."""

import gc
import weakref

import grpc
import pytest

from fixtures.aio_balanced_channels import call_until, caller, connect_all, counts, subchannel_of
from fixtures.aio_channels import ANSWERS, KINDS, STYLES, Stub
from fixtures.aio_channels import hanging as hanging_call
from fixtures.aio_policy_channels import others, refused, sent
from fixtures.balanced_channels import instance
from fixtures.shop import STREAM_UNARY, UNARY_STREAM, UNARY_UNARY, Fail, Hang, Silent
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel import RetryPolicy, aio
from rpcwheel.balancer import BalancerPolicy, Picker
from rpcwheel.balancer.aio import BalancedChannel


class Passing:
    """Interceptors that record each attempt."""

    def __init__(self, name, seen):
        self._name = name
        self._seen = seen

    async def intercept(self, continuation, details, request):
        self._seen.append(self._name)
        details.metadata.add("passed", self._name)
        return await continuation(details, request)


class UnaryUnary(Passing, grpc.aio.UnaryUnaryClientInterceptor):
    intercept_unary_unary = Passing.intercept


class UnaryStream(Passing, grpc.aio.UnaryStreamClientInterceptor):
    intercept_unary_stream = Passing.intercept


class StreamUnary(Passing, grpc.aio.StreamUnaryClientInterceptor):
    intercept_stream_unary = Passing.intercept


class StreamStream(Passing, grpc.aio.StreamStreamClientInterceptor):
    intercept_stream_stream = Passing.intercept


def interceptors(name, seen):
    """One of each kind."""
    return [each(name, seen) for each in (UnaryUnary, UnaryStream, StreamUnary, StreamStream)]


KIT = aio.Kit(timeout=WAIT_S, retry=RetryPolicy(retry_on="UNAVAILABLE"))

CHANNELS = {
    "plain": lambda made: made(),
    "with interceptors": lambda made: made(interceptors=interceptors("given", [])),
    "of connect": lambda made: made(
        connect=lambda one, options: grpc.aio.insecure_channel(one.target, options)
    ),
    "of a kit": lambda made: KIT.intercept_channel(made()),
    "with the interceptors of a kit": lambda made: made(interceptors=KIT.client_interceptors()),
}


@pytest.mark.parametrize("make", CHANNELS.values(), ids=CHANNELS.keys())
async def test_calls_of_each_kind_go_to_the_instances_of_the_last_update(shops, aio_balanced, make):
    made = []

    def noting(**given):
        made.append(aio_balanced(**given))
        return made[0]

    stub = Stub(make(noting))  # made before the instances are known
    for shop in shops:
        made[0].update([instance(shop)])
        for style in STYLES.values():
            assert {kind: await style(stub, kind) for kind in KINDS} == ANSWERS
        assert len(shop.calls) == len(STYLES) * len(KINDS)
    await aio_wait_until(lambda: made[0].calls == 0)


async def test_an_unreachable_server_gets_no_calls(shops, dead, aio_balanced):
    channel = aio_balanced()
    channel.update([instance(shops[0]), instance(dead, weight=1000)])
    call = caller(channel)
    for _ in range(20):
        assert await call() == b"x"
    assert subchannel_of(channel, dead).healthy


async def test_a_failure_has_the_status_of_the_server(shops, aio_balanced):
    shops[0].then(Fail("NOT_FOUND", "no such thing", trailing=(("why", "so"),)))
    error = await refused(caller(aio_balanced(shops[0]))())
    assert (error.code().name, error.details()) == ("NOT_FOUND", "no such thing")
    assert ("why", "so") in tuple(error.trailing_metadata())


async def test_serializers_are_used_and_without_them_messages_are_bytes(shops, aio_balanced):
    channel = aio_balanced(shops[0])
    method = channel.unary_unary(UNARY_UNARY, str.encode, bytes.decode)
    assert await method("text") == "text"
    registered = channel.unary_unary(UNARY_UNARY, str.encode, bytes.decode, True)
    assert await registered("text") == "text"
    named = channel.unary_unary(UNARY_UNARY, _registered_method=True)
    assert await named(b"bytes") == b"bytes"
    streamed = channel.stream_unary(STREAM_UNARY, str.encode, bytes.decode)
    assert await streamed(iter(["te", "xt"])) == "text"


async def test_a_picker_sees_method_message_and_metadata(shops, aio_balanced):
    seen = []

    class Noting(Picker):
        def prepare(self, subchannels, weights):
            return lambda *call: (seen.append(call), subchannels[0])[1]

    channel = aio_balanced(shops[0], lb_policy=Noting())
    await connect_all(channel)
    metadata = (("a", "b"),)
    call = channel.unary_unary(UNARY_UNARY, str.encode, bytes.decode)
    assert await call("text", metadata=metadata, timeout=WAIT_S) == "text"
    assert seen[-1] == (UNARY_UNARY, "text", metadata)
    await channel.stream_unary(STREAM_UNARY)(iter([b"x"]), timeout=WAIT_S)
    assert seen[-1] == (STREAM_UNARY, None, None)


async def test_an_error_of_a_picker_is_raised_by_the_call(shops, aio_balanced):
    class Failing(Picker):
        def prepare(self, subchannels, weights):
            return lambda *_: 1 / 0

    channel = aio_balanced(shops[0], lb_policy=Failing())
    with pytest.raises(ZeroDivisionError):  # it waits for the connection first
        await caller(channel)()
    with pytest.raises(ZeroDivisionError):
        caller(channel)()
    assert channel.calls == 0


async def test_the_deadline_reaches_the_server(shops, aio_balanced):
    channel = aio_balanced(shops[0])
    shops[0].then(Hang())
    call = caller(channel, timeout=500)()
    await aio_wait_until(lambda: shops[0].calls)
    assert 400 < call.time_remaining() <= 500
    assert 400 < shops[0].calls[0].time_remaining < 510
    call.cancel()


# Interceptors


async def test_interceptors_run_in_order_after_the_pick_and_appended_ones_last(shops, aio_balanced):
    seen = []

    class Noting(Picker):
        def prepare(self, subchannels, weights):
            return lambda *_: (seen.append("pick"), subchannels[0])[1]

    given = [*interceptors("first", seen), *interceptors("second", seen)]
    channel = aio_balanced(shops[0], lb_policy=Noting(), interceptors=given)
    stub = Stub(channel)
    await connect_all(channel)
    assert await STYLES["iterate"](stub, "unary_unary") == ANSWERS["unary_unary"]
    seen.clear()
    for kind, appended in zip(KINDS, interceptors("appended", seen), strict=True):
        getattr(channel, f"_{kind}_interceptors").append(appended)  # as google-cloud does
    for style in STYLES.values():
        for kind in KINDS:
            assert await style(stub, kind) == ANSWERS[kind]
            assert seen == ["pick", "first", "second", "appended"]
            seen.clear()


async def test_interceptors_run_once_for_each_attempt_and_on_each_subchannel(shops, aio_balanced):
    seen = []
    channel = aio_balanced(shops[0], interceptors=interceptors("given", seen))
    channel._unary_unary_interceptors.append(UnaryUnary("appended", seen))
    retry = RetryPolicy(retry_on={"UNAVAILABLE"}, max_attempts=3, backoff=0.0, retry_budget=None)
    async with aio.Kit(retry=retry, idempotent=True, timeout=WAIT_S) as kit:
        shops[0].then("UNAVAILABLE", "UNAVAILABLE")
        assert await caller(kit.intercept_channel(channel))() == b"x"
    assert seen == ["given", "appended"] * 3
    channel.update([instance(shops[1])])
    assert await caller(channel)() == b"x"
    assert seen == ["given", "appended"] * 4
    assert shops[1].calls[0].metadata["passed"] == "appended"


async def test_an_interceptor_may_answer_or_raise(shops, aio_balanced):
    class Cached(grpc.aio.UnaryUnaryClientInterceptor):
        async def intercept_unary_unary(self, continuation, details, request):
            if request == b"raise":
                raise KeyError(request)
            return b"cached"

    channel = aio_balanced(shops[0], interceptors=[Cached()])
    call = caller(channel)
    assert await call() == b"cached"
    with pytest.raises(KeyError):
        await call(b"raise")
    await aio_wait_until(lambda: channel.calls == 0)
    assert (counts(shops), channel.subchannels[0].healthy) == ([0, 0, 0], True)


# Calls in flight


async def test_calls_in_flight_are_counted_until_their_end(shops, aio_balanced):
    channel = aio_balanced(shops[0])
    calls = [await hanging_call(shops[0], channel, kind) for kind in KINDS]
    assert (channel.calls, channel.subchannels[0].calls) == (len(KINDS), len(KINDS))
    for call in calls:
        assert call.cancel()
    await aio_wait_until(lambda: channel.calls == 0)
    assert all(call.cancelled() for call in calls)


async def test_arguments_that_begin_no_call_are_not_counted(shops, aio_balanced):
    channel = aio_balanced(shops[0])
    await connect_all(channel)
    with pytest.raises(TypeError):
        channel.unary_unary(UNARY_UNARY)(b"x", wrong=True)
    with pytest.raises(TypeError):
        channel.unary_unary(UNARY_UNARY, None, None, "more", "and more")(b"x")
    assert channel.calls == 0


async def test_a_unary_call_that_nobody_awaits_runs_to_its_end(shops, aio_balanced):
    channel = aio_balanced(shops[0])
    await connect_all(channel)
    channel.unary_unary(UNARY_UNARY)(b"x")
    gc.collect()
    assert channel.calls == 1
    await aio_wait_until(lambda: channel.calls == 0)
    assert counts(shops) == [1, 0, 0]


@pytest.mark.parametrize("waits", [False, True])
async def test_a_dropped_response_stream_is_canceled(shops, aio_balanced, waits):
    channel = aio_balanced(shops[0])
    if not waits:
        await connect_all(channel)
    shops[0].then(silent := Silent(after=1))
    call = channel.unary_stream(UNARY_STREAM)(b"ab")
    assert await call.read() == b"a"
    await aio_wait_until(silent.begun.is_set)
    gone = weakref.ref(call)
    del call
    await aio_wait_until(lambda: (gc.collect(), gone())[1] is None)
    await aio_wait_until(lambda: channel.calls == 0)
    await aio_wait_until(shops[0].calls[-1].ended.is_set)


async def test_a_call_needs_no_task_of_its_own(shops, aio_balanced):
    bare, channel = grpc.aio.insecure_channel(shops[0].target), aio_balanced(shops[0])
    await connect_all(channel)
    most = 0
    for one in (bare, channel):
        shops[0].then(*(hangs := [Hang(), Hang()]))
        before = len(others())
        calls = [one.unary_unary(UNARY_UNARY)(b"x"), one.unary_stream(UNARY_STREAM)(b"x")]
        await aio_wait_until(lambda hangs=hangs: all(hang.begun.is_set() for hang in hangs))
        if one is bare:
            most = len(others()) - before
        else:
            await aio_wait_until(lambda allowed=before + most: len(others()) <= allowed)
        for call in calls:
            call.cancel()
        await aio_wait_until(lambda before=before: len(others()) == before)
    await bare.close()


async def test_a_stub_keeps_its_channel_alive(shops, timer):
    policy = BalancerPolicy(pick_timeout=WAIT_S)
    channel = BalancedChannel(
        "test.Shop", [instance(shops[0])], balancer_policy=policy, timer=timer
    )
    call, kept = channel.unary_unary(UNARY_UNARY), weakref.ref(channel)
    del channel
    gc.collect()
    kept().update([instance(shops[1])])
    assert await call(b"x", timeout=WAIT_S) == b"x"
    assert counts(shops) == [0, 1, 0]
    await kept().close()


async def test_a_stub_does_not_keep_removed_subchannels(shops, aio_balanced):
    channel = aio_balanced(shops[0])
    call = channel.unary_unary(UNARY_UNARY)
    await call(b"x", timeout=WAIT_S)
    gone = weakref.ref(channel.subchannels[0])
    channel.update([instance(shops[1])])
    await call(b"x", timeout=WAIT_S)
    await aio_wait_until(lambda: (gc.collect(), gone())[1] is None)


# Servers that are stopped


async def test_calls_of_a_killed_server_fail_and_no_others(shops, aio_balanced):
    channel = aio_balanced(*shops[:2])
    await connect_all(channel)
    removed = subchannel_of(channel, shops[0])
    running = await hanging_call(shops[0], removed.channel)
    shops[0].kill()
    assert (await refused(running)).code().name in {"UNAVAILABLE", "CANCELLED"}
    await aio_wait_until(lambda: removed.state is not grpc.ChannelConnectivity.READY)
    call = caller(channel)
    for _ in range(20):
        assert await call() == b"x"
    shops[0].start()
    before = len(shops[0].calls)
    await call_until(channel, lambda: len(shops[0].calls) > before)


async def test_a_request_iterator_is_consumed_once_though_its_call_waits(shops, aio_balanced):
    channel = aio_balanced()
    requests = sent(b"a", b"b")
    call = channel.stream_unary(STREAM_UNARY)(requests, timeout=WAIT_S)
    channel.update([instance(shops[0])])
    assert await call == b"ab"
    assert [one async for one in requests] == []
