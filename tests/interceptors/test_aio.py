"""The aio doors' own: the queues of several clients, and what the room shows."""

import asyncio

import grpc
import pytest

from rpcwheel.errors import ConfigurationError, FailbackClosed
from rpcwheel.failback import FailbackPolicy
from rpcwheel.interceptors import CallPolicy, aio, sync

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
