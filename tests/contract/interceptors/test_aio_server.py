"""The server interceptor of grpc.aio, on real servers: handlers of every nature."""

import asyncio
import functools
import inspect
import time
from contextvars import ContextVar

import grpc
import pytest
from scenarios.served import (
    KINDS,
    ONE_ANSWER,
    ROUNDED,
    STREAMS,
    aio_answering,
    aio_ask,
    answering,
    ask,
    begin,
    handler,
)

from fixtures.grpc_servers import IMPATIENT
from fixtures.small_servers import IN_TIME, METHOD, aio_serving
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel.deadline import current_deadline, deadline_scope
from rpcwheel.interceptors import CallPolicy
from rpcwheel.interceptors._aio_server import server_interceptors
from rpcwheel.observe import CallLate

LOOKED_AT = ContextVar("looked_at", default=None)


def reading_and_writing(kind, look):
    """Coroutines in the style of `context.read()` and `context.write()`."""

    async def unary(request, context):
        if kind == "stream_unary":
            assert await context.read() == b"x"
        return repr(look(context)).encode()

    async def stream(request, context):
        if kind == "stream_stream":
            assert await context.read() == b"x"
        await context.write(repr(look(context)).encode())

    return unary if kind in ONE_ANSWER else stream


def bound(kind, look):
    class Servicer:
        async def unary(self, request, context):
            return await aio_answering(kind, look)(request, context)

        async def stream(self, request, context):
            async for answer in aio_answering(kind, look)(request, context):
                yield answer

    return Servicer().unary if kind in ONE_ANSWER else Servicer().stream


def partly(kind, look):
    async def unary(_more, request, context):
        return repr(look(context)).encode()

    async def stream(_more, request, context):
        yield repr(look(context)).encode()

    return functools.partial(unary if kind in ONE_ANSWER else stream, "more")


def listing(kind, look):
    """A plain function that gives its answers in a list; grpc.aio takes that, grpc does not."""
    behavior = answering(kind, look)
    if kind in ONE_ANSWER:
        return behavior
    return lambda request, context: list(behavior(request, context))


NATURES = [aio_answering, reading_and_writing, bound, partly, answering]


class Other(grpc.aio.ServerInterceptor):
    """An interceptor of somebody else's, that calls `look` before each answer's making."""

    def __init__(self, kind, look):
        self.kind, self.look = kind, look

    async def intercept_service(self, continuation, details):
        behavior = getattr(await continuation(details), self.kind)

        async def unary(request, context):
            self.look(context)
            return await behavior(request, context)

        async def stream(request, context):
            self.look(context)
            async for answer in behavior(request, context):
                yield answer

        def plain(request, context):
            self.look(context)
            return behavior(request, context)

        if inspect.iscoroutinefunction(behavior):
            return handler(self.kind, unary)
        return handler(self.kind, stream if inspect.isasyncgenfunction(behavior) else plain)


def left(_context=None):
    deadline = current_deadline()
    return None if deadline is None else deadline.remaining()


def seconds(answers):
    return float(answers[0])


async def status(target, kind):
    """What a client sees of a call that fails."""
    with pytest.raises(grpc.RpcError) as caught:
        await asyncio.to_thread(ask, target, kind)  # grpc.aio's own may fail in writing first
    error = caught.value
    return error.code(), error.details(), [tuple(pair) for pair in error.trailing_metadata()]


@pytest.mark.parametrize("nature", [*NATURES, listing])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_handler_sees_the_deadline_of_its_caller(kind, nature):
    if nature is listing and kind in STREAMS:
        nature = answering
    made = handler(kind, nature(kind, left))
    async with aio_serving(made, interceptors=server_interceptors()) as target:
        assert 0 < seconds(await aio_ask(target, kind, timeout=15)) <= 15 * ROUNDED


@pytest.mark.parametrize("nature", NATURES)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_deadline_does_not_leak_into_the_next_call(kind, nature):
    made = handler(kind, nature(kind, left))
    async with aio_serving(made, interceptors=server_interceptors()) as target:
        await aio_ask(target, kind, timeout=15)
        loop = asyncio.get_running_loop()
        assert await loop.run_in_executor(None, left) is None  # nor into the threads of the pool
        assert await aio_ask(target, kind, timeout=None) == [b"None"]
    assert left() is None


@pytest.mark.parametrize("nature", [aio_answering, answering])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_scope_in_which_a_server_was_started_is_none_of_its_calls(kind, nature):
    made = handler(kind, nature(kind, left))
    with deadline_scope(30):
        async with aio_serving(made, interceptors=server_interceptors()) as target:
            assert await aio_ask(target, kind, timeout=None) == [b"None"]


@pytest.mark.parametrize(("own", "policy"), [(100, 10), (10, 100), (None, 10)])
async def test_the_policy_of_the_server_shortens_the_deadline_that_handlers_see(own, policy):
    made = handler("unary_unary", aio_answering("unary_unary", left))
    interceptors = server_interceptors(CallPolicy(timeout=policy))
    async with aio_serving(made, interceptors=interceptors) as target:
        assert 1 < seconds(await aio_ask(target, "unary_unary", timeout=own)) <= 10 * ROUNDED


@pytest.mark.parametrize("nature", NATURES)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_handler_stays_what_it_is(kind, nature):
    (interceptor,) = server_interceptors()
    behavior = nature(kind, left)

    async def continuation(_details):
        return handler(kind, behavior)

    made = await interceptor.intercept_service(continuation, type("", (), {"method": METHOD}))
    served = getattr(made, kind)
    for asks in (inspect.iscoroutinefunction, inspect.isasyncgenfunction):
        assert asks(served) == asks(behavior)


@pytest.mark.parametrize("nature", [aio_answering, answering])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_whose_deadline_has_passed_is_not_handed_to_its_handler(
    kind, nature, events, caplog
):
    """What waits on a loop that is blocked is not cancelled by grpc before its turn."""
    served, blocked = [], []

    def block(_context):
        blocked.append(timeout)
        time.sleep(timeout + 0.3)

    made = handler(kind, nature(kind, served.append))
    async with aio_serving(
        made, interceptors=[Other(kind, block), *server_interceptors()]
    ) as target:
        for timeout in IN_TIME:
            with pytest.raises(grpc.RpcError) as caught:
                await asyncio.to_thread(ask, target, kind, timeout=timeout)  # its loop is not
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            if blocked:
                break
        await aio_wait_until(lambda: CallLate(METHOD, 0.0) in events)
    assert served == []
    assert not [record for record in caplog.records if record.name.startswith("grpc")]


async def test_a_method_that_does_not_exist_stays_unknown():
    made = handler("unary_unary", None)
    async with (
        aio_serving(made, interceptors=server_interceptors()) as target,
        grpc.aio.insecure_channel(target, options=IMPATIENT) as channel,
    ):
        with pytest.raises(grpc.RpcError) as caught:
            await channel.unary_unary("/test.Small/Other")(b"x", timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def aborting(kind):
    async def unary(request, context):
        context.set_trailing_metadata((("because", "of it"),))
        await context.abort(grpc.StatusCode.NOT_FOUND, "not here")

    async def stream(request, context):
        await unary(request, context)
        yield b""

    return unary if kind in ONE_ANSWER else stream


def plainly_aborting(kind):
    return answering(kind, lambda context: context.abort(grpc.StatusCode.NOT_FOUND, "not here"))


def failing(kind):
    return aio_answering(kind, {}.__getitem__)


def marking(kind):
    def look(context):
        context.set_code(grpc.StatusCode.ABORTED)
        context.set_details("set, not raised")

    return aio_answering(kind, look)


@pytest.mark.parametrize("ending", [aborting, plainly_aborting, marking])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_status_reaches_the_client_unchanged(kind, ending):
    made = handler(kind, ending(kind))
    async with (
        aio_serving(made) as plain,
        aio_serving(made, interceptors=server_interceptors()) as target,
    ):
        assert await status(target, kind) == await status(plain, kind)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_bug_in_a_handler_reaches_the_client_as_before(kind):
    made = handler(kind, failing(kind))
    async with aio_serving(made, interceptors=server_interceptors()) as target:
        code, details, _ = await status(target, kind)
    assert code is grpc.StatusCode.UNKNOWN
    assert details.startswith("Unexpected <class 'KeyError'>: ")


@pytest.mark.parametrize("nature", [aio_answering, answering])
@pytest.mark.parametrize("kind", KINDS)
async def test_interceptors_before_and_after_it_do_their_work_on_the_same_context(kind, nature):
    seen = []

    def first(context):
        LOOKED_AT.set("first")
        seen.append((left(), context))

    def second(context):
        seen.append((left(), context))

    interceptors = [Other(kind, first), *server_interceptors(), Other(kind, second)]
    made = handler(kind, nature(kind, second))
    async with aio_serving(made, interceptors=interceptors) as target:
        await aio_ask(target, kind)
    assert len({id(context) for _, context in seen}) == 1
    before, after, inside = (deadline for deadline, _ in seen)
    assert before is None
    assert 0 < inside <= after <= WAIT_S * ROUNDED


async def test_a_plain_stream_sees_what_was_set_before_it_wherever_it_is_advanced():
    def look(_context):
        return LOOKED_AT.get()

    first = Other("unary_stream", lambda _context: LOOKED_AT.set("first"))
    made = handler("unary_stream", answering("unary_stream", look))
    async with aio_serving(made, interceptors=[first, *server_interceptors()]) as target:
        assert await aio_ask(target, "unary_stream") == [b"'first'"]


async def test_a_plain_stream_is_served_also_behind_an_interceptor_that_runs_in_the_pool():
    class Around(grpc.aio.ServerInterceptor):
        async def intercept_service(self, continuation, details):
            behavior = (await continuation(details)).unary_stream

            def wrapped(request, context):
                yield from behavior(request, context)

            return handler("unary_stream", wrapped)

    made = handler("unary_stream", answering("unary_stream", left))
    async with aio_serving(made, interceptors=[Around(), *server_interceptors()]) as target:
        assert 0 < seconds(await aio_ask(target, "unary_stream", timeout=15)) <= 15 * ROUNDED


@pytest.mark.parametrize("style", [aio_answering, reading_and_writing])
@pytest.mark.parametrize("kind", STREAMS)
async def test_a_client_that_leaves_cancels_the_handler_at_once(kind, style):
    begun, ended = asyncio.Event(), asyncio.Event()

    async def hang():
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def generator(request, context):
        yield b"first"
        await hang()

    async def writer(request, context):
        await context.write(b"first")
        await hang()

    made = handler(kind, generator if style is aio_answering else writer)
    async with (
        aio_serving(made, interceptors=server_interceptors()) as target,
        grpc.aio.insecure_channel(target, options=IMPATIENT) as channel,
    ):
        call = begin(channel, kind)
        assert await call.read() == b"first"
        await asyncio.wait_for(begun.wait(), WAIT_S)
        call.cancel()
        await asyncio.wait_for(ended.wait(), WAIT_S)


async def test_a_generator_is_closed_with_the_one_around_it():
    """Not when the loop finds it dropped."""
    (interceptor,) = server_interceptors()
    closed = []

    async def behavior(request, context):
        try:
            yield b"first"
        finally:
            closed.append(request)

    async def continuation(_details):
        return handler("unary_stream", behavior)

    made = await interceptor.intercept_service(continuation, type("", (), {"method": METHOD}))

    class Context:
        def time_remaining(self):
            return None

    answers = made.unary_stream(b"x", Context())
    assert await anext(answers) == b"first"
    await answers.aclose()
    assert closed == [b"x"]
