"""The aio doors' own: the queues of several clients, and what the room shows."""

import asyncio

import grpc
import pytest

from fixtures.shop import UNARY_UNARY, Fail, Hang
from rpcwheel.errors import ConfigurationError, FailbackClosed
from rpcwheel.failback import FailbackPolicy
from rpcwheel.failback.core import CANCELLED, CHANNEL_CLOSED
from rpcwheel.interceptors import CallPolicy, aio, sync
from rpcwheel.observe import CallAbandoned

GONE = ConnectionError("gone")


def policy(**settings):
    return FailbackPolicy(**{"on": ConnectionError, "wait": 30.0} | settings)


class Far:
    """What a parked call calls."""

    def __init__(self, *failures) -> None:
        self.failures = list(failures)
        self.calls = 0

    async def __call__(self, *_):
        self.calls += 1
        if self.failures:
            raise self.failures.pop()


async def test_each_policy_has_one_queue_of_its_own(timer):
    async with aio.Queues(timer) as queues:
        one, other = policy(), policy()
        assert queues.of(one, "/a/B") is queues.of(one, "/a/C")
        assert queues.of(other, "/a/B") is not queues.of(one, "/a/B")
        assert list(queues.stats()) == ["/a/B", "/a/B (2)"]
        queues.of(policy(name="mine"), "/a/B")
        assert repr(queues) == "<Queues ['/a/B', '/a/B (2)', 'mine'] pending=0>"


async def test_flush_delivers_what_waits_in_all_queues(timer):
    async with aio.Queues(timer) as queues:
        far = Far()
        for one in (policy(), policy()):
            assert queues.of(one, "/a/B").park(GONE, far)
        assert queues.pending == 2
        assert await queues.flush(20)
        assert (queues.pending, far.calls) == (0, 2)


async def test_close_reports_what_was_not_delivered(timer):
    queues = aio.Queues(timer)
    for one in (policy(), policy()):
        queues.of(one, "/a/B").park(GONE, Far(GONE, GONE, GONE, GONE))
    assert len(await queues.close(0)) == 2
    assert await queues.close() == []


async def test_a_parked_call_whose_channel_was_closed_is_given_up_and_says_why(shop, timer, events):
    shop.then("UNAVAILABLE")
    async with aio.Queues(timer) as queues, grpc.aio.insecure_channel(shop.target) as bare:
        channel = aio.intercept_channel(
            bare, CallPolicy(failback=policy(on="UNAVAILABLE")), queues=queues
        )
        await channel.unary_unary(UNARY_UNARY)(b"x")
        await bare.close()
        assert await queues.flush(20)
        assert await queues.close() == []
    assert [e.reason for e in events if isinstance(e, CallAbandoned)] == [CHANNEL_CLOSED]


async def test_one_whose_channel_is_closed_in_the_middle_of_a_delivery_says_so_too(
    shop, timer, events
):
    hang = Hang()
    shop.then("UNAVAILABLE", hang)
    async with aio.Queues(timer) as queues, grpc.aio.insecure_channel(shop.target) as bare:
        channel = aio.intercept_channel(
            bare, CallPolicy(failback=policy(on="UNAVAILABLE")), queues=queues
        )
        await channel.unary_unary(UNARY_UNARY)(b"x")
        timer.advance(60)
        assert await asyncio.to_thread(hang.begun.wait, 20)
        await bare.close()
        assert await queues.flush(20)
    assert [e.reason for e in events if isinstance(e, CallAbandoned)] == [CANCELLED]


@pytest.mark.parametrize("door", ["channel", "interceptors"])
@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream", "stream_unary", "stream_stream"])
async def test_a_call_that_can_not_be_queued_fails_with_an_error_of_grpc(shop, timer, door, kind):
    queues = aio.Queues(timer)
    await queues.close()
    rules = CallPolicy(failback=policy(on="UNAVAILABLE"))
    between = aio.client_interceptors(rules, queues=queues) if door == "interceptors" else None
    shop.then(Fail("UNAVAILABLE", "gone", (("k", "v"),)))
    async with grpc.aio.insecure_channel(shop.target, interceptors=between) as bare:
        channel = bare if between else aio.intercept_channel(bare, rules, queues=queues)
        member = getattr(channel, kind)(f"/test.Shop/{kind.title().replace('_', '')}")
        call = member(b"x" if kind.startswith("unary") else [b"x"])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (call.read() if kind.endswith("stream") else call)
    error = caught.value
    assert isinstance(error, FailbackClosed)
    assert error.code() is await call.code() is grpc.StatusCode.UNAVAILABLE
    assert error.trailing_metadata()["k"] == "v"
    assert str(error) == await call.details()
    assert "was not queued" in str(error)


async def test_a_queue_that_is_asked_for_after_the_close_is_closed(timer):
    queues = aio.Queues(timer)
    await queues.close()
    with pytest.raises(FailbackClosed):
        queues.of(policy(), "/a/B").park(GONE, Far())


@pytest.mark.parametrize("wrong", ["5", None])
async def test_a_drain_that_is_no_time_closes_nothing(timer, wrong):
    async with aio.Queues(timer) as queues:
        with pytest.raises(TypeError):
            await queues.close(wrong)
        with pytest.raises(ConfigurationError):
            await queues.flush(float("nan"))
        assert queues.of(policy(), "/a/B").park(GONE, Far())
        assert await queues.flush(20)


def test_there_is_one_interceptor_for_each_kind():
    kinds = (
        grpc.aio.UnaryUnaryClientInterceptor,
        grpc.aio.UnaryStreamClientInterceptor,
        grpc.aio.StreamUnaryClientInterceptor,
        grpc.aio.StreamStreamClientInterceptor,
    )
    ours = aio.client_interceptors(CallPolicy())
    assert [[isinstance(one, kind) for kind in kinds] for one in ours] == [
        [kind is other for other in kinds] for kind in kinds
    ]


def test_the_interceptors_of_one_channel_share_one_budget():
    states = {id(one._state) for one in aio.client_interceptors(CallPolicy())}
    assert len(states) == 1


def test_it_shows_the_names_of_its_twin():
    assert aio.__all__ == sync.__all__
    assert all(hasattr(aio, name) for name in aio.__all__)
    assert asyncio.iscoroutinefunction(aio.Queues.flush)


async def test_a_server_of_grpc_aio_refuses_the_interceptors_of_grpc_before_it_serves():
    with pytest.raises(ValueError, match="Interceptor must be ServerInterceptor"):
        grpc.aio.server(interceptors=sync.server_interceptors())
