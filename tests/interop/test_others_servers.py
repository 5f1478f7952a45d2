"""Server interceptors of rpcwheel before and behind those of other libraries."""

import asyncio

import grpc
import pytest
from scenarios.served import KINDS, ONE_ANSWER, aio_answering, answering, ask, handler

from fixtures.small_servers import aio_serving, serving
from fixtures.waiting import aio_wait_until, wait_until
from rpcwheel.call import CallPolicy, current_deadline
from rpcwheel.interceptors import aio, sync

TIMEOUT = 30.0
PACKAGES = ["opentelemetry", "grpc_interceptor"]

FIRSTS = ["ours", "theirs"]


def each_with_one_kind(turn):
    """Each package on either side of ours; the kinds of call take turns."""
    rows = [
        (package, first, KINDS[(2 * i + j + turn) % len(KINDS)])
        for i, package in enumerate(PACKAGES)
        for j, first in enumerate(FIRSTS)
    ]
    return pytest.mark.parametrize(("theirs", "first", "kind"), rows, indirect=["theirs"])


@pytest.fixture
def theirs(request):
    """Interceptors of another library."""
    return pytest.importorskip(f"fixtures.foreign_{request.param}").Theirs()


def in_order(first, theirs, world):
    """Both, one first."""
    module = sync if world == "sync" else aio
    both = [*module.server_interceptors(CallPolicy()), theirs.server_interceptor(world)]
    return both if first == "ours" else both[::-1]


def seconds_left(_):
    return current_deadline().remaining()


def aborting(kind):
    """A behavior that ends with a status of its own."""

    def unary(request, context):
        context.abort(grpc.StatusCode.NOT_FOUND, "no such order")

    def stream(request, context):
        yield b"first"
        context.abort(grpc.StatusCode.NOT_FOUND, "no such order")

    return unary if kind in ONE_ANSWER else stream


def aio_aborting(kind):
    """The same in coroutines."""

    async def unary(request, context):
        await context.abort(grpc.StatusCode.NOT_FOUND, "no such order")

    async def stream(request, context):
        yield b"first"
        await context.abort(grpc.StatusCode.NOT_FOUND, "no such order")

    return unary if kind in ONE_ANSWER else stream


@each_with_one_kind(0)
def test_a_handler_sees_its_deadline(theirs, first, kind):
    served = handler(kind, answering(kind, seconds_left))
    with serving(served, interceptors=in_order(first, theirs, "sync")) as target:
        (left,) = ask(target, kind, timeout=TIMEOUT)
    assert 0 < float(left) < TIMEOUT * 1.02  # gRPC rounds up what it sends
    assert wait_until(lambda: theirs.seen == ["OK"])


@each_with_one_kind(1)
async def test_an_aio_handler_sees_its_deadline(theirs, first, kind):
    served = handler(kind, aio_answering(kind, seconds_left))
    async with aio_serving(served, interceptors=in_order(first, theirs, "aio")) as target:
        (left,) = await asyncio.to_thread(ask, target, kind, timeout=TIMEOUT)  # as an answer may
        # come while it still sends, a client of grpc.aio may make up an error
        assert 0 < float(left) < TIMEOUT * 1.02
        await aio_wait_until(lambda: theirs.seen == ["OK"])


@each_with_one_kind(2)
def test_an_abort_reaches_the_client_unchanged(theirs, first, kind):
    served = handler(kind, aborting(kind))
    with (
        serving(served, interceptors=in_order(first, theirs, "sync")) as target,
        pytest.raises(grpc.RpcError, match="no such order") as failed,
    ):
        ask(target, kind)
    assert failed.value.code() is grpc.StatusCode.NOT_FOUND
    assert wait_until(lambda: theirs.seen == ["NOT_FOUND"])


@each_with_one_kind(3)
async def test_an_aio_abort_reaches_the_client_unchanged(theirs, first, kind):
    served = handler(kind, aio_aborting(kind))
    async with aio_serving(served, interceptors=in_order(first, theirs, "aio")) as target:
        with pytest.raises(grpc.RpcError, match="no such order") as failed:
            await asyncio.to_thread(ask, target, kind)  # a client of grpc.aio may make up another
        assert failed.value.code() is grpc.StatusCode.NOT_FOUND
        await aio_wait_until(lambda: theirs.seen == ["NOT_FOUND"])
