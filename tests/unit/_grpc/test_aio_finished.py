"""Calls of grpc.aio that have ended on this side have the whole interface of gRPC's calls."""

import asyncio
import pickle

import grpc
import pytest

from fixtures.rpc_errors import CodeOnly
from rpcwheel._grpc.aio_finished import failed_call, failed_with, finished_call, refused_by
from rpcwheel._grpc.aio_relay import WouldBlockError, failure_of, has_ended, run_without_waiting
from rpcwheel._grpc.calls import CANCELLED_HERE, aio_metadata
from rpcwheel.errors import REFUSALS
from rpcwheel.rpc import Kind

OK = grpc.StatusCode.OK
INTERFACES = {
    Kind.UNARY_UNARY: grpc.aio.UnaryUnaryCall,
    Kind.UNARY_STREAM: grpc.aio.UnaryStreamCall,
    Kind.STREAM_UNARY: grpc.aio.StreamUnaryCall,
    Kind.STREAM_STREAM: grpc.aio.StreamStreamCall,
}


@pytest.mark.parametrize("kind", Kind)
async def test_a_successful_call_has_the_interface_of_its_kind(kind):
    called = []
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
    call.add_done_callback(called.append)
    assert called == [call]


@pytest.mark.parametrize("kind", Kind)
async def test_a_failed_call_raises_its_status(kind):
    call = finished_call(kind, grpc.StatusCode.NOT_FOUND, "gone")
    for ask in (lambda: answer(call, kind), call.wait_for_connection):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask()
        assert caught.value.details() == "gone"
    assert failure_of(call).code() is grpc.StatusCode.NOT_FOUND


async def test_the_status_of_an_interceptor_has_its_frames_each_time_it_is_raised():
    def intercept():
        raise failed_with(grpc.StatusCode.NOT_FOUND, "gone")

    with pytest.raises(grpc.RpcError) as raised:
        intercept()
    call = failed_call(Kind.UNARY_UNARY, raised.value)
    for _ in range(2):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert [each.name for each in caught.traceback].count("intercept") == 1


async def test_a_call_canceled_on_this_side_raises_cancelled_error():
    call = finished_call(Kind.UNARY_UNARY, grpc.StatusCode.CANCELLED, CANCELLED_HERE)
    assert call.cancelled()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_a_call_canceled_by_the_server_raises_its_status():
    call = finished_call(Kind.UNARY_UNARY, grpc.StatusCode.CANCELLED, "not now")
    assert call.cancelled()
    with pytest.raises(grpc.aio.AioRpcError):
        await call


async def test_responses_can_be_read_with_read():
    call = finished_call(Kind.UNARY_STREAM, OK, "", result=(1, 2))
    assert [await call.read() for _ in range(3)] == [1, 2, grpc.aio.EOF]
    empty = finished_call(Kind.UNARY_STREAM, OK, "", result=None)
    assert await empty.read() is grpc.aio.EOF
    failed = finished_call(Kind.UNARY_STREAM, grpc.StatusCode.NOT_FOUND, "gone")
    for _ in range(2):
        with pytest.raises(grpc.aio.AioRpcError):
            await failed.read()


async def test_write_raises_after_the_end():
    call = finished_call(Kind.STREAM_UNARY, OK, "", result=1)
    with pytest.raises(asyncio.InvalidStateError):
        await call.write(b"x")
    await call.done_writing()
    assert call._done_writing_flag


async def test_an_error_without_a_status_is_raised_and_has_the_code_unknown():
    call = failed_call(Kind.UNARY_UNARY, KeyError("bug"))
    with pytest.raises(KeyError):
        await call
    assert await call.code() is grpc.StatusCode.UNKNOWN
    assert await call.details() == "KeyError: 'bug'"


async def test_a_status_may_have_a_code_and_nothing_else():
    call = failed_call(Kind.UNARY_UNARY, CodeOnly(grpc.StatusCode.ABORTED))
    assert await call.code() is grpc.StatusCode.ABORTED
    assert await call.details() is None
    assert tuple(await call.trailing_metadata()) == ()


async def test_metadata_of_an_error_that_does_not_consist_of_pairs_is_empty():
    wrong = {"key": "value"}
    error = grpc.aio.AioRpcError(grpc.StatusCode.ABORTED, wrong, wrong, "gone")
    call = failed_call(Kind.UNARY_UNARY, error)
    assert tuple(await call.initial_metadata()) == ()
    assert tuple(await call.trailing_metadata()) == ()


async def test_run_without_waiting_runs_a_coroutine_that_need_not_wait_and_refuses_others():
    async def quick():
        return 7

    async def slow():
        await asyncio.sleep(0)

    assert run_without_waiting(quick()) == 7
    with pytest.raises(WouldBlockError):
        run_without_waiting(slow())


def test_metadata_from_takes_any_form():
    given = grpc.aio.Metadata(("a", "b"))
    assert aio_metadata(given) is given
    assert aio_metadata([("a", "b")]) == given
    assert len(aio_metadata(None)) == 0


async def answer(call, kind):
    return [one async for one in call] if kind.streams_responses else await call


@pytest.mark.parametrize("kind", REFUSALS)
def test_a_refusal_of_a_failback_queue_is_an_rpc_error_and_a_failback_error(kind):
    metadata = aio_metadata([("k", "v")])
    failure = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, None, metadata, "gone")
    error = refused_by(kind("q: not queued"), failure)
    assert isinstance(error, kind)
    assert isinstance(error, grpc.aio.AioRpcError)
    assert error.__cause__ is failure
    assert (str(error), error.details()) == ("q: not queued", "q: not queued")
    assert (error.code(), error.trailing_metadata()) == (grpc.StatusCode.UNAVAILABLE, metadata)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.code()) == (type(error), str(error), error.code())


def test_a_call_whose_done_raises_has_ended():
    class Intercepted:
        """As a call of grpc.aio before 1.83 whose interceptor raised."""

        def done(self):
            raise KeyError("a bug")

    assert has_ended(Intercepted())
    assert has_ended(finished_call(Kind.UNARY_UNARY, OK, ""))
