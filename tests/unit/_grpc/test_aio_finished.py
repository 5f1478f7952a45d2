"""Calls of grpc.aio that ended before they began, and what finished calls tell at once."""

import asyncio
import pickle

import grpc
import pytest

from rpcwheel._grpc.aio_finished import (
    CANCELLED_HERE,
    failed_call,
    failed_with,
    finished_call,
    refused_by,
)
from rpcwheel._grpc.aio_relay import NotAtOnceError, failure_of, has_ended, immediately
from rpcwheel._grpc.calls import metadata_from
from rpcwheel.errors import FailbackClosed, FailbackFull
from rpcwheel.rpc import Kind

OK = grpc.StatusCode.OK
INTERFACES = {
    Kind.UNARY_UNARY: grpc.aio.UnaryUnaryCall,
    Kind.UNARY_STREAM: grpc.aio.UnaryStreamCall,
    Kind.STREAM_UNARY: grpc.aio.StreamUnaryCall,
    Kind.STREAM_STREAM: grpc.aio.StreamStreamCall,
}


@pytest.mark.parametrize("kind", Kind)
async def test_a_call_that_ended_well_has_all_of_the_interface(kind):
    told = []
    call = finished_call(
        kind, OK, "why", result=[1, 2], initial=[("a", "b")], trailing=[("c", "d")]
    )
    assert isinstance(call, INTERFACES[kind])
    assert await answer(call, kind) == [1, 2]
    assert await call.code() is OK
    assert await call.details() == await call.debug_error_string() == "why"
    assert tuple(await call.initial_metadata()) == (("a", "b"),)
    assert tuple(await call.trailing_metadata()) == (("c", "d"),)
    assert (call.done(), call.cancelled(), call.cancel()) == (True, False, False)
    assert call.time_remaining() is None
    await call.wait_for_connection()
    call.add_done_callback(told.append)
    assert told == [call]


@pytest.mark.parametrize("kind", Kind)
async def test_one_that_failed_raises_its_status_wherever_it_is_asked(kind):
    call = finished_call(kind, grpc.StatusCode.NOT_FOUND, "gone")
    for ask in (lambda: answer(call, kind), call.wait_for_connection):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask()
        assert caught.value.details() == "gone"
    assert failure_of(call).code() is grpc.StatusCode.NOT_FOUND


async def test_one_that_was_cancelled_here_raises_as_grpcs_own():
    call = finished_call(Kind.UNARY_UNARY, grpc.StatusCode.CANCELLED, CANCELLED_HERE)
    assert call.cancelled()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_one_cancelled_by_the_server_raises_its_status():
    call = finished_call(Kind.UNARY_UNARY, grpc.StatusCode.CANCELLED, "not now")
    assert call.cancelled()
    with pytest.raises(grpc.aio.AioRpcError):
        await call


async def test_responses_can_be_read_one_by_one():
    call = finished_call(Kind.UNARY_STREAM, OK, "", result=(1, 2))
    assert [await call.read() for _ in range(3)] == [1, 2, grpc.aio.EOF]
    empty = finished_call(Kind.UNARY_STREAM, OK, "", result=None)
    assert await empty.read() is grpc.aio.EOF
    failed = finished_call(Kind.UNARY_STREAM, grpc.StatusCode.NOT_FOUND, "gone")
    for _ in range(2):
        with pytest.raises(grpc.aio.AioRpcError):
            await failed.read()


async def test_nothing_can_be_written_to_one_that_has_ended():
    call = finished_call(Kind.STREAM_UNARY, OK, "", result=1)
    with pytest.raises(asyncio.InvalidStateError):
        await call.write(b"x")
    await call.done_writing()
    assert call._done_writing_flag


async def test_an_error_that_is_no_status_is_raised_as_it_is():
    call = failed_call(Kind.UNARY_UNARY, KeyError("bug"))
    with pytest.raises(KeyError):
        await call
    assert await call.code() is grpc.StatusCode.UNKNOWN
    assert await call.details() == "KeyError: 'bug'"


async def test_a_status_that_knows_only_its_code_is_told_as_far_as_it_goes():
    class Bare(grpc.RpcError):
        def code(self):
            return grpc.StatusCode.ABORTED

    call = failed_call(Kind.UNARY_UNARY, Bare())
    assert await call.code() is grpc.StatusCode.ABORTED
    assert await call.details() is None
    assert tuple(await call.trailing_metadata()) == ()


async def test_what_has_nothing_to_wait_for_answers_at_once():
    async def quick():
        return 7

    async def slow():
        await asyncio.sleep(0)

    assert immediately(quick()) == 7
    with pytest.raises(NotAtOnceError):
        immediately(slow())


def test_metadata_is_taken_in_any_form():
    given = grpc.aio.Metadata(("a", "b"))
    assert metadata_from(given) is given
    assert metadata_from([("a", "b")]) == given
    assert len(metadata_from(None)) == 0


async def answer(call, kind):
    return [one async for one in call] if kind.streams_responses else await call


@pytest.mark.parametrize("kind", [FailbackFull, FailbackClosed])
def test_a_refusal_by_a_queue_is_an_error_of_both_kinds(kind):
    metadata = metadata_from([("k", "v")])
    failure = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, None, metadata, "gone")
    error = refused_by(kind("q: not queued"), failure)
    assert isinstance(error, kind)
    assert isinstance(error, grpc.aio.AioRpcError)
    assert error.__cause__ is failure
    assert (str(error), error.details()) == ("q: not queued", "q: not queued")
    assert (error.code(), error.trailing_metadata()) == (grpc.StatusCode.UNAVAILABLE, metadata)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.code()) == (type(error), str(error), error.code())


def test_a_call_whose_end_is_what_an_interceptor_raised_has_ended():
    class Intercepted:
        """As of grpc.aio before 1.83."""

        def done(self):
            raise KeyError("a bug")

    assert has_ended(Intercepted())
    assert has_ended(finished_call(Kind.UNARY_UNARY, OK, ""))


def test_a_failure_found_on_this_side_has_empty_metadata():
    error = failed_with(grpc.StatusCode.UNAVAILABLE, "why")
    assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "why")
    assert error.initial_metadata() == error.trailing_metadata() == grpc.aio.Metadata()
