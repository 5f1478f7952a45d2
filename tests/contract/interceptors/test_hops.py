"""A calls B, B calls C: the deadline is propagated, and no handler works after it."""

import asyncio
import threading
import time

import grpc
import pytest
from scenarios.served import ask, handler

from fixtures.small_servers import IN_TIME, METHOD, serving_in
from fixtures.waiting import WAIT_S, wait_until
from fixtures.worlds import KINDS, AioWorld, SyncWorld
from rpcwheel.call import current_deadline, deadline_scope

ENTRY = 9.5
"""Seconds. Below 10 s grpc rounds up by at most 0.01 s at each hop; a hop works for 0.05 s."""

sync_only = pytest.mark.parametrize("world", [SyncWorld], indirect=True)
aio_only = pytest.mark.parametrize("world", [AioWorld], indirect=True)


@pytest.fixture
def aio_world():
    world = AioWorld()
    yield world
    world.close()


@pytest.mark.parametrize("kind", KINDS)
def test_each_hop_has_less_time_than_the_previous_one(kind, chain):
    chain.leaf(kind).hop(kind).hop(kind)
    assert ask(chain.target, kind, timeout=ENTRY) == [b"'leaf'"]
    entry, middle, leaf = chain.seen
    assert ENTRY > middle > leaf > 0
    assert entry > middle


def test_a_scope_of_the_caller_limits_all_hops(chain, world):
    chain.leaf("unary_unary").hop("unary_unary")
    with deadline_scope(ENTRY):
        call = world.call(chain.channel(), method=METHOD, timeout=100)
    assert call.result() == b"'leaf'"
    assert ENTRY > chain.seen[1] > 0


# --- After the deadline ---


def ask_until(begun, target):
    """Make calls whose deadline passes, until one has reached the handler before."""
    for timeout in IN_TIME:
        with pytest.raises(grpc.RpcError) as caught:
            ask(target, "unary_unary", timeout=timeout)
        assert ended_by_the_deadline(caught.value)
        if begun:
            return


def ended_by_the_deadline(error):
    """Whether the first caller's error is that of its deadline.

    All hops have the same one. If the error of a hop arrives before the caller's own timer has
    fired, it is that of a handler that raised: gRPC sends UNKNOWN.
    """
    if error.code() is grpc.StatusCode.UNKNOWN:
        return "DEADLINE_EXCEEDED" in error.details()
    return error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def wasting(begun, ended):
    """Work in steps until `current_deadline()` has expired."""

    def work(request, context):
        begun.append(request)
        while not current_deadline().expired():
            time.sleep(0.01)
        ended.set()
        wait_until(lambda: not context.is_active())  # or the answer may be there just in time
        return request

    return work


@sync_only
def test_no_hop_works_after_the_deadline(chain):
    """The last handler checks its deadline, and the call to it ends at the same time."""
    begun, ended, codes = [], threading.Event(), []
    chain.serve(handler("unary_unary", wasting(begun, ended)))
    further = chain.channel().unary_unary(METHOD)

    def middle(request, context):
        try:
            return further(request)
        except grpc.RpcError as error:
            codes.append(error.code())
            raise

    chain.serve(handler("unary_unary", middle)).hop("unary_unary")
    ask_until(begun, chain.target)
    assert ended.wait(WAIT_S)
    wait_until(lambda: codes)
    assert codes[0] in {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}


@aio_only
def test_no_aio_hop_works_after_the_deadline(chain):
    """grpc.aio cancels the handlers, and so the calls that they await."""
    begun, cancelled = [], []

    async def endless(request, context):
        begun.append(request)
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(request)

    chain.serve(handler("unary_unary", endless)).hop("unary_unary")
    ask_until(begun, chain.target)
    wait_until(lambda: cancelled)


@sync_only
def test_a_plain_handler_of_an_aio_server_propagates_its_deadline(chain, aio_world):
    """It runs in a thread pool, without the context of the call."""
    chain.leaf("unary_unary")
    further = chain.channel().unary_unary(METHOD)
    made = handler("unary_unary", lambda request, context: further(request))
    interceptors = aio_world.interceptors.server_interceptors()
    with serving_in(aio_world, made, *interceptors) as target:
        assert ask(target, "unary_unary", timeout=ENTRY) == [b"'leaf'"]
    assert ENTRY * 1.01 > chain.seen[0] > 0
