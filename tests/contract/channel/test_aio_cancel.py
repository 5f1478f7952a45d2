"""A call that ends with its connection is told from one that its caller cancels."""

import asyncio

import grpc
import pytest

from fixtures.aio_channels import KINDS, Stub
from fixtures.shop import UNARY_UNARY, Fail, Hang, Silent
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel import RetryPolicy, aio

REASON = "connection replaced: it is dead"


def passing(kind):
    """An interceptor of this kind that does nothing."""
    base = getattr(grpc.aio, f"{kind.title().replace('_', '')}ClientInterceptor")

    async def intercept(self, continuation, details, request):
        return await continuation(details, request)

    return type("Passing", (base,), {f"intercept_{kind}": intercept})()


@pytest.fixture(params=["plain", "interceptors", "kit", "retrying kit"])
def way(request, make):
    """What stubs are made of, and the channel below."""
    given = [passing(kind) for kind in KINDS] if request.param == "interceptors" else None
    channel = make(interceptors=given)
    match request.param:
        case "kit":
            return aio.Kit(timeout=60.0).intercept_channel(channel), channel
        case "retrying kit":
            retry = RetryPolicy(on="UNAVAILABLE")
            return aio.Kit(timeout=60.0, retry=retry).intercept_channel(channel), channel
    return channel, channel


async def iterate(call):
    return await anext(aiter(call))


WAITS = {
    **{f"{kind} await": (kind, lambda call: call) for kind in ("unary_unary", "stream_unary")},
    **{
        f"{kind} read": (kind, lambda call: call.read())
        for kind in ("unary_stream", "stream_stream")
    },
    **{f"{kind} iterate": (kind, iterate) for kind in ("unary_stream", "stream_stream")},
}
"""How the answer is waited for, by kind."""


async def begin(shop, outer, kind, *, begun=True):
    """A call that the server does not answer."""
    shop.then(hang := Hang())
    call = getattr(Stub(outer), kind)(b"x" if kind.startswith("unary") else None)
    if begun:
        await aio_wait_until(hang.begun.is_set)
    return call


def task_of(wait, call):
    async def waiting():
        return await wait(call)

    return asyncio.create_task(waiting())


async def within_timeout(awaitable):
    async with asyncio.timeout(30):
        return await awaitable


async def directly(awaitable):
    return await awaitable


SCOPES = {
    "no scope": directly,
    "wait_for": lambda awaitable: asyncio.wait_for(awaitable, 30),
    "timeout": within_timeout,
    "shield": asyncio.shield,
    "gather": asyncio.gather,
}


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys())
async def test_a_call_ended_with_its_connection_raises_its_status(shop, way, wait, begun):
    (outer, channel), (kind, answer) = way, wait
    call = await begin(shop, outer, kind, begun=begun)
    waiting = task_of(answer, call)
    await asyncio.sleep(0)
    channel.replace("it is dead", drain=0, force=True)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(waiting, 20)
    assert (caught.value.code().name, caught.value.details()) == ("UNAVAILABLE", REASON)
    assert (await call.code()).name == "UNAVAILABLE"
    assert await call.details() == REASON
    assert not call.cancelled()
    assert not call.cancel()
    assert channel.calls == 0


@pytest.mark.parametrize("scope", SCOPES.values(), ids=SCOPES.keys())
@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys())
async def test_the_scope_in_which_it_is_awaited_changes_nothing(shop, channel, wait, scope):
    kind, answer = wait
    call = await begin(shop, channel, kind)
    waiting = task_of(lambda call: scope(answer(call)), call)
    await asyncio.sleep(0.01)
    channel.replace("it is dead", drain=0)
    with pytest.raises(grpc.aio.AioRpcError, match=REASON):
        await asyncio.wait_for(waiting, 20)


async def test_in_a_group_it_is_one_failure_among_others(shop, channel):
    calls = [await begin(shop, channel, "unary_unary") for _ in range(3)]

    async def together():
        async with asyncio.TaskGroup() as group:
            for call in calls:
                group.create_task(directly(call))
            await asyncio.sleep(0.01)
            channel.replace("it is dead", drain=0)

    with pytest.raises(ExceptionGroup) as caught:
        await together()
    assert {error.code() for error in caught.value.exceptions} == {grpc.StatusCode.UNAVAILABLE}


@pytest.mark.parametrize("when", ["alone", "before", "after", "a step before", "a step after"])
@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys())
async def test_a_caller_that_is_cancelled_stays_cancelled(shop, way, wait, when):
    (outer, channel), (kind, answer) = way, wait
    call = await begin(shop, outer, kind)
    waiting = task_of(answer, call)
    await asyncio.sleep(0.01)
    if "after" in when:  # the replacement is first
        channel.replace("it is dead", drain=0, force=True)
    if when == "a step after":
        await asyncio.sleep(0)
    cancelled = waiting.cancel()
    if when == "a step before":
        await asyncio.sleep(0)
    if "before" in when:
        channel.replace("it is dead", drain=0, force=True)
    await asyncio.wait([waiting], timeout=WAIT_S)
    assert waiting.done()
    if not cancelled or (when == "a step after" and not waiting.cancelled()):
        assert when == "a step after"  # it had been told already
    else:
        assert waiting.cancelled()
    assert channel.calls == 0 or when == "alone"
    await aio_wait_until(lambda: channel.calls == 0)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys())
async def test_a_call_made_while_a_cancelled_task_cleans_up_raises_its_status(
    shop, way, wait, again
):
    """Such a task says for good that it was cancelled. It may be so a second time."""
    (outer, channel), (kind, answer) = way, wait
    cleans, ends = asyncio.Event(), []

    async def clean_up():
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            call = await begin(shop, outer, kind)
            cleans.set()
            try:
                await answer(call)
            except BaseException as error:  # noqa: BLE001 - whatever it is
                ends.append(error)
            raise

    task = asyncio.create_task(clean_up())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait_for(cleans.wait(), 20)
    await asyncio.sleep(0.01)
    if again:
        task.cancel()
    channel.replace("it is dead", drain=0, force=True)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 20)
    (end,) = ends
    assert isinstance(end, asyncio.CancelledError) if again else end.details() == REASON


async def test_who_writes_while_a_cancelled_task_cleans_up_is_told(shop, channel):
    ends = []

    async def clean_up():
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            call = await begin(shop, channel, "stream_unary")
            asyncio.get_running_loop().call_later(
                0.05, lambda: channel.replace("it is dead", drain=0)
            )
            try:
                while True:
                    await call.write(bytes(10**6))  # more than fits into any window
            except BaseException as error:  # noqa: BLE001 - whatever it is
                ends.append(error)
            raise

    task = asyncio.create_task(clean_up())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task], timeout=WAIT_S)
    (end,) = ends
    assert isinstance(end, (grpc.aio.AioRpcError, asyncio.InvalidStateError))


@pytest.mark.parametrize("scope", ["wait_for", "timeout"])
async def test_a_time_limit_stays_a_time_limit(shop, channel, scope):
    call = await begin(shop, channel, "unary_unary")

    async def limited():
        if scope == "wait_for":
            return await asyncio.wait_for(call, 0.05)
        async with asyncio.timeout(0.05):
            return await call

    asyncio.get_running_loop().call_later(0.05, lambda: channel.replace("late", drain=0))
    with pytest.raises((TimeoutError, grpc.aio.AioRpcError)):
        await limited()


async def test_a_cancelled_group_takes_its_calls_along(shop, channel):
    call = await begin(shop, channel, "unary_unary")

    async def fail():
        await asyncio.sleep(0.01)
        channel.replace("it is dead", drain=0)
        raise KeyError("a bug")

    async def together():
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            group.create_task(directly(call))

    with pytest.raises(ExceptionGroup) as caught:
        await together()
    assert any(isinstance(error, KeyError) for error in caught.value.exceptions)


@pytest.mark.parametrize("ask", ["code", "details", "trailing_metadata", "initial_metadata"])
async def test_who_asks_for_the_status_is_told(shop, way, ask):
    outer, channel = way
    call = await begin(shop, outer, "unary_stream", begun=False)
    asking = task_of(lambda call: getattr(call, ask)(), call)
    await asyncio.sleep(0.05)
    channel.replace("it is dead", drain=0, force=True)
    told = await asyncio.wait_for(asking, 20)
    wanted = {"code": grpc.StatusCode.UNAVAILABLE, "details": REASON}
    assert told == wanted.get(ask, told)


@pytest.mark.parametrize("kind", KINDS)
async def test_who_waits_for_the_connection_is_told(shop, channel, kind):
    call = await begin(shop, channel, kind, begun=False)
    waiting = task_of(lambda call: call.wait_for_connection(), call)
    await asyncio.sleep(0)
    channel.replace("it is dead", drain=0, force=True)
    with pytest.raises(grpc.aio.AioRpcError, match=REASON):
        await asyncio.wait_for(waiting, 20)


@pytest.mark.parametrize("kind", ["stream_unary", "stream_stream"])
@pytest.mark.parametrize("begun", [True, False])
async def test_who_writes_is_told(shop, way, kind, begun):
    """A bare call of grpc.aio 1.85 that is cancelled before it is on its way hangs who writes."""
    outer, channel = way
    call = await begin(shop, outer, kind, begun=begun)

    async def write():
        while True:
            await call.write(bytes(10**6))  # more than fits into any window

    writing = asyncio.create_task(write())
    await asyncio.sleep(0.05 if begun else 0)
    channel.replace("it is dead", drain=0, force=True)
    with pytest.raises((grpc.aio.AioRpcError, asyncio.InvalidStateError)):
        await asyncio.wait_for(writing, 20)
    assert (await call.code()).name == "UNAVAILABLE"
    await asyncio.wait_for(call.done_writing(), 20)


async def test_messages_that_were_read_stay_read(shop, channel):
    shop.then(Silent(after=2))
    call = Stub(channel).unary_stream(b"ab")
    assert [await call.read(), await call.read()] == [b"a", b"b"]
    channel.replace("it is dead", drain=0)
    with pytest.raises(grpc.aio.AioRpcError, match=REASON):
        await call.read()


async def test_a_status_that_came_first_stays(shop, channel):
    shop.then(Fail("NOT_FOUND", "no such thing"))
    call = channel.unary_unary(UNARY_UNARY)(b"x")
    await aio_wait_until(call.done)
    channel.replace("it is dead", drain=0)
    with pytest.raises(grpc.aio.AioRpcError, match="no such thing"):
        await call


async def test_a_request_iterator_is_closed_with_its_call(shop, channel):
    closed = asyncio.Event()

    async def requests():
        try:
            yield b"a"
            await asyncio.sleep(60)
        finally:
            closed.set()

    call = Stub(channel).stream_stream(requests())
    assert await call.read() == b"a"
    channel.replace("it is dead", drain=0)
    await asyncio.wait_for(closed.wait(), 20)
