"""Counted calls: ends that real calls have rarely, or only at other moments."""

import asyncio
from unittest.mock import Mock

import grpc
import pytest
from scenarios.served import handler

from fixtures.call_counts import replace_call_counts
from fixtures.waiting import aio_wait_until
from fixtures.worlds import METHODS
from rpcwheel._grpc import aio_counted, counted
from rpcwheel._grpc.aio_relay import MADE_UP_DETAILS
from rpcwheel._grpc.calls import is_blocking_unary
from rpcwheel.call import CallPolicy
from rpcwheel.interceptors import client, server
from rpcwheel.interceptors.serving import ServerState
from rpcwheel.telemetry.call_counts import CallCounts


@pytest.fixture
def counts():
    return CallCounts().client.method("/shop.Orders/Get", "unary")


def codes(counts) -> dict[str, int]:
    (totals,) = counts._side.totals()
    return {code: ended.number for code, ended in totals.ended.items()}


class Call:
    """A running call of another library."""

    __slots__ = ()  # takes no weak reference

    def done(self) -> bool:
        return False

    def code(self):
        return grpc.StatusCode.ABORTED

    def add_callback(self, callback) -> bool:
        return False


def test_a_call_that_ends_before_its_callback_is_added(counts):
    call = Call()
    assert counted.begin_counted(counts, lambda: call) is call
    assert codes(counts) == {"ABORTED": 1}


def test_a_call_that_takes_no_callbacks(counts):
    class Refusing(Call):
        def add_callback(self, callback):
            raise NotImplementedError

    counted.begin_counted(counts, Refusing)
    assert codes(counts) == {"UNKNOWN": 1}


def test_a_response_in_place_of_a_call_is_a_success(counts):
    assert counted.begin_counted(counts, lambda: b"x") == b"x"
    assert codes(counts) == {"OK": 1}


def test_a_counted_continuation_blocks_if_the_continuation_does(counts):
    def continuation(details, request):
        """A continuation of gRPC, by its name."""

    for name, blocks in ((".with_call", None), ("._with_call.<locals>.continuation", True)):
        continuation.__qualname__ = name
        made = counted.counted_continuation(continuation, counts)
        assert is_blocking_unary(made) is blocks


class AioCall:
    """A call of grpc.aio that has ended, first with a status of gRPC, then of the server."""

    def __init__(self, checks: int) -> None:
        self._checks = checks

    def done(self) -> bool:
        return True

    async def code(self):
        self._checks -= 1
        return grpc.StatusCode.ABORTED if self._checks < 0 else grpc.StatusCode.INTERNAL

    async def details(self) -> str:
        return MADE_UP_DETAILS


async def test_the_status_of_the_server_that_arrives_later_counts(counts):
    call = AioCall(checks=3)
    assert aio_counted.begin_counted(counts, lambda: call) is call
    await aio_wait_until(lambda: codes(counts))
    assert codes(counts) == {"ABORTED": 1}


async def test_a_status_that_grpc_has_set_counts_if_no_other_arrives(counts, monkeypatch):
    monkeypatch.setattr(aio_counted, "STATUS_CHECK_DELAYS_S", (0.0, 0.0))
    aio_counted.begin_counted(counts, AioCall, 9)
    await aio_wait_until(lambda: codes(counts))
    assert codes(counts) == {"INTERNAL": 1}


async def test_an_aio_call_that_takes_no_callbacks(counts):
    class Refusing(AioCall):
        def done(self) -> bool:
            return False

    aio_counted.begin_counted(counts, Refusing, 0)
    assert codes(counts) == {"UNKNOWN": 1}


async def test_an_aio_call_that_is_canceled_while_its_interceptors_run(counts):
    class Intercepted:
        def __init__(self) -> None:
            self._interceptors_task = asyncio.create_task(asyncio.Event().wait())

    aio_counted.begin_counted(counts, Intercepted)._interceptors_task.cancel()
    await aio_wait_until(lambda: codes(counts))
    assert codes(counts) == {"CANCELLED": 1}


class CoreCall:
    """What a call of grpc.aio consists of."""

    def __init__(self) -> None:
        self.callbacks = []

    def add_done_callback(self, callback) -> None:
        self.callbacks.append(callback)


@pytest.mark.parametrize("kind", ["unary", "server_stream"])
def test_an_aio_call_that_the_garbage_collector_has_dropped_before_its_end(kind):
    counts = CallCounts().client.method("/shop.Orders/Get", kind)
    core_call = CoreCall()

    class Dropped:
        _cython_call = core_call

    aio_counted.begin_counted(counts, Dropped)
    assert codes(counts) == {}
    for callback in core_call.callbacks:
        callback()
    assert codes(counts) == {"CANCELLED": 1}


# --- Without metrics ---


@pytest.fixture
def no_counts():
    replaced = replace_call_counts(None)
    yield
    replace_call_counts(replaced)


def test_without_metrics_a_stream_of_responses_is_that_of_the_behavior(no_counts):
    responses = iter(())
    behavior = handler("unary_stream", lambda request, context: responses)
    wrapped = ServerState(None, timer=None).wrap(behavior, "/a.B/C", server._wrap)
    context = Mock(time_remaining=lambda: None, invocation_metadata=tuple)
    assert wrapped.unary_stream(b"", context) is responses


def test_without_metrics_calls_are_not_wrapped_to_be_counted(no_counts, world):
    policy, bare = CallPolicy(timeout=60.0), world.channel("127.0.0.1:1")
    channel = world.do(world.interceptors.intercept_channel, bare, policy)
    method = world.do(channel.unary_unary, METHODS["unary_unary"])
    below = method._below if world.name == "sync" else method._call
    assert type(below) is type(world.do(bare.unary_unary, METHODS["unary_unary"]))
    interceptors = world.interceptors.client_interceptors(policy)
    assert world.name == "aio" or {type(one) for one in interceptors} == {client.ClientInterceptor}
    names = [name for one in interceptors for name in vars(one)]
    assert not [name for name in names if name.startswith("intercept")]
