"""Server interceptors of rpcwheel before and behind those of other libraries."""

import grpc
import pytest
from scenarios.served import KINDS, ONE_ANSWER, aio_answering, answering, ask, handler

from fixtures.small_servers import serving_in
from fixtures.waiting import wait_until
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
def test_a_handler_sees_its_deadline(world, theirs, first, kind):
    make = answering if world.name == "sync" else aio_answering
    served = handler(kind, make(kind, seconds_left))
    with serving_in(world, served, *in_order(first, theirs, world.name)) as target:
        (left,) = ask(target, kind, timeout=TIMEOUT)  # by `grpc`: as an answer may come while it
        # still sends, a client of grpc.aio may make up an error
        assert 0 < float(left) < TIMEOUT * 1.02  # gRPC rounds up what it sends
        assert wait_until(lambda: theirs.seen == ["OK"])


@each_with_one_kind(2)
def test_an_abort_reaches_the_client_unchanged(world, theirs, first, kind):
    make = aborting if world.name == "sync" else aio_aborting
    served = handler(kind, make(kind))
    with serving_in(world, served, *in_order(first, theirs, world.name)) as target:
        with pytest.raises(grpc.RpcError, match="no such order") as failed:
            ask(target, kind)  # by `grpc`: a client of grpc.aio may make up another
        assert failed.value.code() is grpc.StatusCode.NOT_FOUND
        assert wait_until(lambda: theirs.seen == ["NOT_FOUND"])
