"""A calls B, B calls C: the deadline is propagated, and no handler works after it."""

import asyncio
import threading
import time

import grpc
import pytest
from scenarios.served import aio_ask, ask, handler

from fixtures.chains import left
from fixtures.small_servers import IN_TIME, METHOD, aio_serving
from fixtures.waiting import WAIT_S, aio_wait_until, wait_until
from rpcwheel.call import CallPolicy, DeadlinePolicy, current_deadline, deadline_scope
from rpcwheel.interceptors import aio

ENTRY = 9.5
"""Seconds. Below 10 s grpc rounds up by at most 0.01 s at each hop; a hop works for 0.05 s."""


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


@pytest.mark.parametrize("kind", ["unary_unary", "stream_stream"])
def test_each_hop_has_less_time_than_the_previous_one(kind, chain):
    chain.leaf(kind).hop(kind).hop(kind)
    assert ask(chain.target, kind, timeout=ENTRY) == [b"leaf"]
    entry, middle, leaf = chain.seen
    assert ENTRY > middle > leaf > 0
    assert entry > middle


@pytest.mark.parametrize(
    ("kind", "intercepted"),
    [
        ("unary_unary", False),
        ("unary_stream", True),
        ("stream_unary", True),
        ("stream_stream", False),
    ],
)
async def test_each_aio_hop_has_less_time_than_the_previous_one(kind, intercepted, aio_chain):
    await aio_chain.leaf(kind)
    await aio_chain.hop(kind, intercepted=intercepted)
    await aio_chain.hop(kind, intercepted=intercepted)
    assert await aio_ask(aio_chain.target, kind, timeout=ENTRY) == [b"leaf"]
    entry, middle, leaf = aio_chain.seen
    assert ENTRY > middle > leaf > 0
    assert entry > middle


async def test_a_deadline_is_propagated_between_sync_and_aio(chain, aio_chain):
    chain.leaf("unary_unary").hop("unary_unary")
    aio_chain.target = chain.target
    await aio_chain.hop("unary_unary")
    assert await aio_ask(aio_chain.target, "unary_unary", timeout=ENTRY) == [b"leaf"]
    assert ENTRY > chain.seen[0] > chain.seen[1] > 0
    assert aio_chain.seen[0] > chain.seen[0]


def test_without_a_deadline_at_the_first_hop_the_last_has_none(chain):
    kind = "stream_unary"
    chain.leaf(kind).hop(kind).hop(kind)
    assert ask(chain.target, kind, timeout=None) == [b"leaf"]
    assert chain.seen == [None, None, None]


async def test_without_a_deadline_at_the_first_aio_hop_the_last_has_none(aio_chain):
    kind = "unary_stream"
    await aio_chain.leaf(kind)
    await aio_chain.hop(kind)
    assert await aio_ask(aio_chain.target, kind, timeout=None) == [b"leaf"]
    assert aio_chain.seen == [None, None]


def test_propagate_deadline_can_be_turned_off(chain):
    chain.policy = CallPolicy(timeout=DeadlinePolicy(propagate_deadline=False))
    chain.leaf("unary_unary").hop("unary_unary")
    ask(chain.target, "unary_unary", timeout=ENTRY)
    assert chain.seen[0] is not None
    assert chain.seen[1] is None


def test_a_scope_of_the_caller_limits_all_hops(chain):
    chain.leaf("unary_unary").hop("unary_unary")
    call = chain.channel().unary_unary(METHOD)
    with deadline_scope(ENTRY):
        assert call(b"x", timeout=100) == b"leaf"
    assert ENTRY > chain.seen[1] > 0


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
    for timeout in IN_TIME:
        with pytest.raises(grpc.RpcError) as caught:
            ask(chain.target, "unary_unary", timeout=timeout)
        assert ended_by_the_deadline(caught.value)
        if begun:
            break
    assert ended.wait(WAIT_S)
    assert wait_until(lambda: codes)
    assert codes[0] in {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}


async def test_no_aio_hop_works_after_the_deadline(aio_chain):
    """grpc.aio cancels the handlers, and so the calls that they await."""
    begun, cancelled = [], []

    async def endless(request, context):
        begun.append(request)
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(request)

    await aio_chain.serve(handler("unary_unary", endless))
    await aio_chain.hop("unary_unary")
    for timeout in IN_TIME:
        with pytest.raises(grpc.RpcError) as caught:
            await aio_ask(aio_chain.target, "unary_unary", timeout=timeout)
        assert ended_by_the_deadline(caught.value)
        if begun:
            break
    await aio_wait_until(lambda: cancelled)


async def test_a_plain_handler_of_an_aio_server_that_checks_its_deadline_stops(aio_chain):
    begun, ended = [], threading.Event()
    await aio_chain.serve(handler("unary_unary", wasting(begun, ended)))
    await aio_chain.hop("unary_unary")
    for timeout in IN_TIME:
        with pytest.raises(grpc.RpcError):
            await aio_ask(aio_chain.target, "unary_unary", timeout=timeout)
        if begun:
            break
    assert await asyncio.to_thread(ended.wait, WAIT_S)


def test_a_handler_without_time_left_makes_no_call(chain):
    begun, codes = [], []
    chain.leaf("unary_unary")
    further = chain.channel().unary_unary(METHOD)

    def middle(request, context):
        begun.append(request)
        while not current_deadline().expired():
            time.sleep(0.01)
        try:
            return further(request)
        except grpc.RpcError as error:
            codes.append((error.code(), error.details()))
            raise

    chain.serve(handler("unary_unary", middle))
    for timeout in IN_TIME:
        with pytest.raises(grpc.RpcError):
            ask(chain.target, "unary_unary", timeout=timeout)
        if begun:
            break
    assert wait_until(lambda: codes)
    assert codes[0][0] is grpc.StatusCode.DEADLINE_EXCEEDED
    assert chain.seen == []


async def test_a_plain_handler_of_an_aio_server_propagates_its_deadline(chain):
    """It runs in a thread pool, without the context of the call."""
    chain.leaf("unary_unary")
    further = chain.channel().unary_unary(METHOD)
    made = handler("unary_unary", lambda request, context: further(request))
    async with aio_serving(made, interceptors=aio.server_interceptors()) as target:
        assert await aio_ask(target, "unary_unary", timeout=ENTRY) == [b"leaf"]
    assert ENTRY * 1.01 > chain.seen[0] > 0


def test_a_thread_that_a_handler_starts_does_not_have_its_deadline(chain):
    """Work that outlives the call, on purpose."""
    seen = []

    def behavior(request, context):
        thread = threading.Thread(target=lambda: seen.append(left()))
        thread.start()
        thread.join()
        return request

    chain.serve(handler("unary_unary", behavior))
    ask(chain.target, "unary_unary", timeout=ENTRY)
    assert seen == [None]
