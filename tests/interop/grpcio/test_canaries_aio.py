"""Behavior of `grpc.aio` clients that rpcwheel works around.

A canary passes as long as grpcio behaves in this way. If one fails, grpcio has changed: its
docstring names the code of rpcwheel that is then wrong or no longer needed. Delete its row in
docs/grpcio.md too.
"""

import asyncio
import gc
import time
import weakref

import grpc
import pytest

from fixtures.client_interceptors import aio_interceptor, pass_on
from fixtures.event_loops import has_eager_tasks
from fixtures.grpc_servers import IMPATIENT
from fixtures.grpcio import since
from fixtures.shop import STREAM_STREAM, STREAM_UNARY, UNARY_STREAM, UNARY_UNARY, Hang, Silent
from fixtures.waiting import WAIT_S, aio_wait_until

aio = grpc.aio


class EveryKind(
    aio.UnaryUnaryClientInterceptor,
    aio.UnaryStreamClientInterceptor,
    aio.StreamUnaryClientInterceptor,
    aio.StreamStreamClientInterceptor,
):
    """One object for all four kinds, as `grpc` accepts it. Records the methods of its calls."""

    def __init__(self) -> None:
        self.seen = []

    async def intercept_unary_unary(self, continuation, details, request):
        self.seen.append(details.method.decode())
        return await continuation(details, request)

    intercept_unary_stream = intercept_unary_unary
    intercept_stream_unary = intercept_unary_unary
    intercept_stream_stream = intercept_unary_unary


def channel_to(shop, *interceptors):
    return aio.insecure_channel(shop.target, options=IMPATIENT, interceptors=interceptors)


async def test_one_object_for_all_kinds_is_registered_for_unary_unary_only(shop):
    """`client_interceptors` of aio returns four objects, one for each kind."""
    every = EveryKind()
    async with channel_to(shop, every) as channel:
        await channel.unary_unary(UNARY_UNARY)(b"x")
        assert [message async for message in channel.unary_stream(UNARY_STREAM)(b"x")] == [b"x"]
        await channel.stream_unary(STREAM_UNARY)(iter([b"x"]))
    assert every.seen == [UNARY_UNARY]


async def test_an_interceptor_that_waits_for_a_request_stream_blocks_the_writer(shop):
    """interceptors/aio_client.py returns the call of a request stream before it ends."""

    async def wait_for_its_end(continuation, details, requests):  # as one that retries must
        call = await continuation(details, requests)
        await call.code()
        return call

    async with channel_to(shop, aio_interceptor(wait_for_its_end, "stream_unary")) as channel:
        call = channel.stream_unary(STREAM_UNARY)()
        writing = asyncio.create_task(call.write(b"x"))
        done, _ = await asyncio.wait([writing], timeout=1)
        assert not done
        call.cancel()
        with pytest.raises(asyncio.InvalidStateError):
            await writing
        assert await channel.stream_unary(STREAM_UNARY)(iter([b"x"])) == b"x"


async def test_a_write_to_an_intercepted_call_during_done_writing_is_accepted(shop):
    """docs/grpcio.md recommends `intercept_channel`, whose calls refuse such a `write`."""
    async with channel_to(shop, aio_interceptor(pass_on, "stream_unary")) as channel:
        shop.then(Hang())
        call = channel.stream_unary(STREAM_UNARY)()
        await asyncio.gather(call.done_writing(), call.write(b"lost"))
        call.cancel()


@has_eager_tasks
async def test_a_write_to_an_intercepted_call_fails_with_eager_tasks(shop):
    """docs/grpcio.md recommends `intercept_channel`, whose calls can be written."""
    async with channel_to(shop, aio_interceptor(pass_on, "stream_unary")) as channel:
        asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)
        call = channel.stream_unary(STREAM_UNARY)()
        with pytest.raises(asyncio.InvalidStateError, match="finished"):
            await call.write(b"x")


async def test_a_call_whose_request_has_a_wrong_type_raises_and_does_not_end(aio_shop_channel):
    """call/aio_call.py awaits each attempt of a hedged call, instead of using done-callbacks."""
    call = aio_shop_channel.unary_unary(UNARY_UNARY)("text")
    with pytest.raises(TypeError):
        await call
    assert not call.done()


async def test_a_request_that_cannot_be_serialized_is_sent_as_an_empty_message(aio_shop_channel):
    """balancer/aio_channel.py calls `check_request` for its TypeError only."""

    def fail(_):
        raise LookupError

    assert await aio_shop_channel.unary_unary(UNARY_UNARY, request_serializer=fail)(b"x") == b""


async def test_await_raises_the_exception_of_a_done_callback(aio_shop_channel):
    """_grpc/aio_relay.py catches each exception of a callback and emits `CallbackFailed`."""

    def fail(_):
        raise ValueError("of the user's")

    call = aio_shop_channel.unary_unary(UNARY_UNARY)(b"x")
    call.add_done_callback(fail)
    with pytest.raises(ValueError, match="of the user's"):
        await call


async def test_the_message_of_a_cancel_is_lost_in_a_call_with_one_response(shop, aio_shop_channel):
    async def awaited(call):
        return await call

    shop.then(Hang())
    task = asyncio.create_task(awaited(aio_shop_channel.unary_unary(UNARY_UNARY)(b"x")))
    assert await aio_wait_until(lambda: shop.calls)
    task.cancel("by a cancel scope")
    with pytest.raises(asyncio.CancelledError) as canceled:
        await task
    assert canceled.value.args == ()


async def test_time_remaining_of_an_intercepted_call_is_not_implemented(shop):
    """Calls of rpcwheel compute `time_remaining` from their own deadline."""
    async with channel_to(shop, aio_interceptor(pass_on)) as channel:
        call = channel.unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S)
        with pytest.raises(NotImplementedError):
            call.time_remaining()
        assert await call == b"x"


async def test_a_response_returned_by_an_inner_interceptor_takes_no_callbacks(shop):
    """The interceptors of rpcwheel always return a call, also for a default response."""
    inner = []

    async def answer(continuation, details, request):
        return b"bare"

    async def look(continuation, details, request):
        inner.append(await continuation(details, request))
        return inner[0]

    async with channel_to(shop, aio_interceptor(look), aio_interceptor(answer)) as channel:
        assert await channel.unary_unary(UNARY_UNARY)(b"x") == b"bare"
    assert await inner[0].trailing_metadata() is None
    with pytest.raises(NotImplementedError):
        inner[0].add_done_callback(print)


async def test_call_details_have_bytes_for_the_method_and_no_compression(shop):
    """interceptors/aio_client.py makes such details, and decodes methods."""
    got = []

    async def look(continuation, details, request):
        got.append(details)
        return await continuation(details, request)

    async with channel_to(shop, aio_interceptor(look)) as channel:
        await channel.unary_unary(UNARY_UNARY)(b"x")
    assert got[0]._fields == ("method", "timeout", "metadata", "credentials", "wait_for_ready")
    assert got[0].method == UNARY_UNARY.encode()
    assert got[0].metadata == aio.Metadata()


async def test_each_call_of_a_continuation_gets_the_whole_timeout(shop):
    """interceptors/aio_client.py passes each attempt what is left of one deadline."""

    async def thrice(continuation, details, request):
        for _ in range(3):
            call = await continuation(details, request)
            await call.code()
        return call

    shop.then(Hang(), Hang(), Hang())
    async with channel_to(shop, aio_interceptor(thrice)) as channel:
        begun = time.monotonic()
        call = channel.unary_unary(UNARY_UNARY)(b"x", timeout=0.2)
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert time.monotonic() - begun > 0.4


async def test_a_refused_request_stream_may_end_with_internal(shop):
    """_grpc/aio_relay.py waits for the status of the server after "Internal error from Core".

    About one of four calls ends in this way, at random.
    """
    seen = set()
    async with channel_to(shop) as channel:
        for _ in range(500):
            shop.then("UNAVAILABLE")
            call = channel.stream_unary(STREAM_UNARY)(iter([b"a", b"b", b"c"]))
            seen.add((await call.code(), await call.details() == "Internal error from Core"))
            if (grpc.StatusCode.INTERNAL, True) in seen:
                break
    assert (grpc.StatusCode.INTERNAL, True) in seen


async def test_a_call_that_ends_while_its_requests_are_ended_raises_cancelled_error(shop):
    """`let_status_arrive` of _grpc/aio_relay.py has the status arrive."""
    raised = set()
    shop.kill()
    async with channel_to(shop) as channel:
        for _ in range(20):
            try:
                await channel.stream_unary(STREAM_UNARY)(iter(()))
            except (asyncio.CancelledError, grpc.RpcError) as error:  # seldom, the status is sooner
                raised.add(type(error))
    assert asyncio.CancelledError in raised


@pytest.mark.parametrize(
    "wait",
    [lambda call: call.write(b"x"), lambda call: call.wait_for_connection()],
    ids=["write", "wait_for_connection"],
)
async def test_a_wait_of_a_call_that_is_canceled_before_its_metadata_is_sent_hangs(shop, wait):
    """_grpc/aio_relay.py also sets a private event of a canceled call."""
    async with channel_to(shop) as channel:
        call = channel.stream_stream(STREAM_STREAM)()
        waiting = asyncio.create_task(wait(call))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([waiting], timeout=0.5)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.wait([waiting])


async def test_the_iterator_of_requests_is_read_on_after_the_server_has_ended_the_call(shop):
    """docs/grpcio.md tells users to cancel what their iterator waits for."""
    begun, ended, goes_on = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def requests():
        begun.set()
        try:
            await goes_on.wait()
            yield b"x"
        finally:
            ended.set()

    shop.then("UNAVAILABLE")
    async with channel_to(shop) as channel:
        call = channel.stream_stream(STREAM_STREAM)(requests())
        await begun.wait()
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        assert not call.cancel()
    assert not ended.is_set()
    goes_on.set()
    async with asyncio.timeout(WAIT_S):
        await ended.wait()


@since(1, 83, reason="a response stream that its caller drops is canceled")
async def test_a_response_stream_that_its_caller_drops_is_kept_and_not_canceled(shop):
    """The calls of _grpc/aio_relay.py are canceled; call/aio_call.py uses them for limits."""
    async with channel_to(shop) as channel:
        shop.then(Silent(after=1))
        call = channel.unary_stream(UNARY_STREAM)(b"x")
        assert await call.read() == b"x"
        dropped = weakref.ref(call)
        del call
        gc.collect()
        assert not dropped().done()


async def test_an_intercepted_response_stream_is_in_a_reference_cycle_when_it_was_read(shop):
    """If this fails, docs/policies.md need not ask for `cancel()` with client_interceptors."""
    async with channel_to(shop, aio_interceptor(pass_on, "unary_stream")) as channel:
        call = channel.unary_stream(UNARY_STREAM)(b"x")
        assert await call.read() == b"x"
        assert call._response_aiter.ag_frame.f_locals["self"] is call


async def test_a_call_has_a_core_call_and_an_intercepted_call_a_task(shop):
    """_grpc/aio_counted.py adds callbacks to these, which do not keep the call alive."""
    for interceptors in ((), (aio_interceptor(pass_on),)):
        async with aio.insecure_channel(shop.target, interceptors=interceptors) as channel:
            call = channel.unary_unary(UNARY_UNARY)(b"x")
            if interceptors:
                assert isinstance(call._interceptors_task, asyncio.Task)
                call = await call._interceptors_task
            ended = []
            call._cython_call.add_done_callback(lambda: ended.append(call._cython_call.is_ok()))  # noqa: B023
            assert await call == b"x"
            assert ended == [True]
