"""A unary call of grpc.aio that is handed to its caller as it is, and turns when it has to."""

import asyncio
import gc
import weakref

import grpc
import pytest
from grpc.aio import _channel

from fixtures.shop import UNARY_UNARY, Fail, Hang
from fixtures.waiting import aio_wait_until
from rpcwheel._grpc import aio_plain
from rpcwheel._grpc.aio_calls import ended_by
from rpcwheel._grpc.aio_plain import PLAIN, PlainCall, plain_beginner
from rpcwheel.observe import CallbackFailed
from rpcwheel.rpc import Kind

pytestmark = pytest.mark.skipif(not PLAIN, reason="this grpc's calls are made in another way")

CODE = grpc.StatusCode
QUESTIONS = [
    "code",
    "details",
    "debug_error_string",
    "initial_metadata",
    "trailing_metadata",
    "wait_for_connection",
]


class Conductor:
    """Ends a call as its try has ended, or goes on as the test says."""

    kind = Kind.UNARY_UNARY
    method = UNARY_UNARY
    requests = None

    def __init__(self, native, then) -> None:
        self.native, self.then = native, then
        self.ends = 0

    def follow(self, relay):
        self.relay = weakref.ref(relay)

    def failed(self, relay, call, error):
        if self.then:
            relay.begin(self.then.pop()())
        else:
            relay.finish(call if error is None or call.done() else ended_by(self.kind, error))

    def finished(self):
        self.ends += 1

    def time_remaining(self):
        return self.native.time_remaining()

    def listen(self, relay, call):
        return None


class Stub:
    """Begins calls and owns them; notes which turned, and how many ended well without it."""

    method = UNARY_UNARY

    def __init__(self, channel, *codec) -> None:
        self.member = channel.unary_unary(UNARY_UNARY, *codec)
        self.begin = plain_beginner(self.member)
        self.turned, self.well = [], 0
        self.then = []

    def __call__(self, request=b"x", timeout=None, metadata=None):
        note = [None, self]
        return self.begin(request, timeout, metadata, None, None, None, note, self.at_end)

    def at_end(self, note):
        call = note[0]
        if call is not None and call.is_ok():
            note[0], self.well = None, self.well + 1
        elif call is not None:
            call.turn()

    def conductor(self, note, native):
        assert isinstance(note[0], PlainCall)
        self.turned.append(Conductor(native, self.then))
        return self.turned[-1]


async def failure_of(call):
    """The code that comes out of it, and no error that keeps frames."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()


@pytest.fixture
def stub(aio_shop_channel):
    return Stub(aio_shop_channel)


async def test_one_that_goes_well_is_grpcs_own_and_does_not_turn(stub):
    call = stub(metadata=(("key", "value"),), timeout=50)
    assert isinstance(call, grpc.aio.UnaryUnaryCall)
    assert 40 < call.time_remaining() <= 50
    assert (call.done(), call.cancelled()) == (False, False)
    assert await call == b"x"
    assert await call == b"x"
    assert (call.done(), call.cancelled(), call.cancel()) == (True, False, False)
    assert (await call.code(), await call.details()) == (CODE.OK, "")
    assert not await call.trailing_metadata()
    assert (stub.turned, stub.well) == ([], 1)


async def test_the_server_gets_what_grpcs_own_would_send(shop, stub):
    await stub(metadata=(("key", "value"),), timeout=50)
    await stub(metadata=grpc.aio.Metadata(("key", "value")))
    await stub()
    await stub.member(b"x")
    first, second, third, bare = shop.calls
    assert first.metadata["key"] == second.metadata["key"] == "value"
    assert 40 < first.time_remaining < 51
    assert third.metadata == bare.metadata


async def test_one_that_fails_raises_what_grpcs_own_raises(shop, stub):
    shop.then(Fail("NOT_FOUND", "no such thing", trailing=(("why", "so"),)))
    call = stub()
    with pytest.raises(grpc.aio.AioRpcError, match="no such thing") as failure:
        await call
    assert failure.value.trailing_metadata()["why"] == "so"
    assert (await call.code(), await call.details()) == (CODE.NOT_FOUND, "no such thing")
    (turned,) = stub.turned
    assert (turned.ends, stub.well) == (1, 0)


async def test_one_that_fails_while_nobody_waits_has_its_status(shop, stub):
    shop.then(Fail("NOT_FOUND", "no such thing"))
    call = stub()
    await aio_wait_until(call.done)
    assert await call.code() is CODE.NOT_FOUND
    assert not call.cancel()


@pytest.mark.parametrize("question", QUESTIONS)
async def test_one_that_is_asked_while_it_runs_turns_and_answers(stub, question):
    call, bare = stub(), stub.member(b"x")
    assert await getattr(call, question)() == await getattr(bare, question)()
    assert await call == b"x"
    assert len(stub.turned) == 1


async def test_a_done_callback_gets_what_its_caller_holds(stub):
    told = []
    call = stub()
    call.add_done_callback(told.append)
    assert await call == b"x"
    await aio_wait_until(lambda: told)
    call.add_done_callback(told.append)
    late = stub()
    assert await late == b"x"
    late.add_done_callback(told.append)
    assert [id(each) for each in told] == [id(call), id(call), id(late)]
    assert len(stub.turned) == 1


@pytest.mark.parametrize("late", [False, True])
async def test_a_done_callback_that_raises_is_told_as_an_event(stub, events, late):
    call = stub()
    if late:
        await call
    call.add_done_callback(lambda _: 1 / 0)
    assert await call == b"x"
    await aio_wait_until(lambda: events)
    (failed,) = events
    assert isinstance(failed, CallbackFailed)
    assert (failed.subject, type(failed.error)) == (UNARY_UNARY, ZeroDivisionError)


@pytest.mark.parametrize("begun", [False, True])
async def test_a_caller_that_is_cancelled_cancels_its_call(shop, stub, begun):
    shop.then(hang := Hang())
    call = stub()
    waiting = asyncio.ensure_future(call)
    await asyncio.sleep(0)
    if begun:
        await aio_wait_until(hang.begun.is_set)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert call.cancelled()
    assert await call.code() is CODE.CANCELLED


async def test_whoever_awaits_a_call_that_is_cancelled_is_told_so(shop, stub):
    shop.then(Hang())
    call = stub()
    waiting = asyncio.ensure_future(call)
    await asyncio.sleep(0)
    assert call.cancel()
    assert not call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (call.done(), call.cancelled()) == (True, True)


@pytest.mark.parametrize("awaited", [False, True])
async def test_one_that_is_ended_says_why_and_cancels_nobody(shop, stub, awaited):
    shop.then(hang := Hang())
    call = stub()
    waiting = asyncio.ensure_future(call) if awaited else call
    await aio_wait_until(hang.begun.is_set)
    call.end("given up")
    with pytest.raises(grpc.aio.AioRpcError, match="given up") as failure:
        await waiting
    assert failure.value.code() is CODE.UNAVAILABLE
    assert stub.turned[0].native.cancelled()


async def test_one_that_has_ended_well_is_not_ended_again(stub):
    call = stub()
    assert await call == b"x"
    call.end("given up")
    assert (await call, await call.code()) == (b"x", CODE.OK)


@pytest.mark.parametrize("asked", [False, True])
async def test_another_try_may_answer_whoever_waits_already(shop, stub, asked):
    shop.then(Fail("UNAVAILABLE"), Fail("UNAVAILABLE"))
    stub.then = [lambda: stub.member(b"third"), lambda: stub.member(b"second")]
    call = stub()
    waiting = [asyncio.ensure_future(call), asyncio.ensure_future(call)]
    if asked:
        waiting.append(asyncio.ensure_future(call.code()))
    assert (await asyncio.gather(*waiting))[:2] == [b"third"] * 2
    assert (await call.code(), len(stub.turned)) == (CODE.OK, 1)


async def test_a_call_that_waits_for_another_try_can_be_cancelled(shop, stub):
    shop.then(Fail("UNAVAILABLE"), hang := Hang())
    stub.then = [lambda: stub.member(b"second")]
    call = stub()
    waiting = asyncio.ensure_future(call)
    await aio_wait_until(hang.begun.is_set)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert call.cancelled()


async def test_a_request_that_can_not_be_serialized_is_sent_as_by_grpcs_own(
    shop, aio_shop_channel, caplog
):
    """As nothing (1.85): it logs what was raised, and goes on."""
    stub = Stub(aio_shop_channel, lambda _: 1 / 0)
    answers = [
        await asyncio.gather(begin(b"x"), return_exceptions=True) for begin in (stub, stub.member)
    ]
    assert repr(answers[0]) == repr(answers[1])
    assert [record.name for record in caplog.records] == ["grpc._common"] * 2


async def test_nothing_is_left_of_a_call_but_what_its_caller_holds(stub):
    gc.collect()
    gc.disable()
    try:
        call = stub()
        await call
        gone = weakref.ref(call)
        del call
        assert gone() is None
    finally:
        gc.enable()


async def test_nothing_is_left_of_one_that_has_turned_either(shop, stub):
    """By its failure. Each that has a done-callback waits for the collector in grpc.aio 1.83."""
    gc.collect()
    gc.disable()
    try:
        shop.then(Fail("NOT_FOUND"))
        call = stub()
        assert await failure_of(call) is CODE.NOT_FOUND
        (turned,) = stub.turned
        gone = weakref.ref(turned.native), weakref.ref(call)
        del call, turned
        stub.turned.clear()
        await aio_wait_until(lambda: [one() for one in gone] == [None, None])
    finally:
        gc.enable()


async def test_one_that_nobody_keeps_runs_to_its_end(stub):
    stub()
    gc.collect()
    await aio_wait_until(lambda: stub.well == 1)


@pytest.mark.parametrize("grace", [None, 20])
async def test_it_is_one_of_its_channels_calls(shop, grace):
    shop.then(hang := Hang()) if grace is None else None
    channel = grpc.aio.insecure_channel(shop.target)
    call = Stub(channel)()
    await asyncio.sleep(0)
    if grace is None:
        await aio_wait_until(hang.begun.is_set)
    await channel.close(grace)
    assert call.cancelled() is (grace is None)


async def test_so_is_one_that_has_turned_until_another_try_answers_it(shop, aio_shop_channel):
    shop.then(Hang(), Fail("UNAVAILABLE"), hang := Hang())
    first, second = grpc.aio.insecure_channel(shop.target), aio_shop_channel
    stub = Stub(first)
    here = stub()
    asked = asyncio.ensure_future(here.code())
    await aio_wait_until(lambda: shop.calls)
    stub.then = [lambda: second.unary_unary(UNARY_UNARY)(b"second")]
    elsewhere = stub()
    await aio_wait_until(hang.begun.is_set)
    stub.then = []
    await first.close()
    assert (await asked, here.cancelled()) == (CODE.CANCELLED, True)
    assert not elsewhere.done()
    shop.calls[-1].ended.set()
    assert await elsewhere == b"second"


async def test_none_has_interceptors(shop):
    class Foreign(grpc.aio.UnaryUnaryClientInterceptor):
        async def intercept_unary_unary(self, continuation, details, request):
            return await continuation(details, request)

    async with grpc.aio.insecure_channel(shop.target, interceptors=[Foreign()]) as channel:
        assert plain_beginner(channel.unary_unary(UNARY_UNARY)) is None
    assert plain_beginner(object()) is None


async def test_there_are_none_where_grpc_makes_its_calls_in_another_way(monkeypatch):
    assert aio_plain._fits()

    def call(self, request):
        return self._something_new(request)

    monkeypatch.setattr(_channel.UnaryUnaryMultiCallable, "__call__", call)
    assert not aio_plain._fits()
