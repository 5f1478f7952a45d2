"""The server interceptor of `grpc.aio` on real servers: all classes of handlers, slow calls."""

import asyncio
import functools
import inspect
import itertools
import threading
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
from rpcwheel.call import CallPolicy, DeadlinePolicy, current_deadline, deadline_scope
from rpcwheel.events import CallSlow, DeadlineExceededBeforeStart
from rpcwheel.interceptors.aio import server_interceptors
from rpcwheel.timer import AsyncWheelTimer, ManualTimer

TWO_KINDS = ["unary_unary", "stream_stream"]
"""For rules that differ at most by what is answered."""

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


NATURES = [aio_answering, reading_and_writing, bound, partly, answering]

HANDLERS = [
    (aio_answering, "unary_unary"),
    (aio_answering, "stream_stream"),
    (reading_and_writing, "stream_unary"),
    (reading_and_writing, "stream_stream"),
    (reading_and_writing, "unary_stream"),
    (bound, "unary_unary"),
    (bound, "unary_stream"),
    (partly, "stream_unary"),
    (partly, "stream_stream"),
    (answering, "unary_unary"),
    (answering, "unary_stream"),
]
"""Handlers of each nature, with one response and with a stream; the requests are paired."""

ADAPTED = [
    (aio_answering, "stream_unary"),
    (aio_answering, "unary_stream"),
    (answering, "unary_unary"),
    (answering, "stream_stream"),
]
"""One handler for each way in which the interceptor wraps them."""


class Other(grpc.aio.ServerInterceptor):
    """Another interceptor, which calls `look` before each response."""

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
    """Return what a client sees of a call that fails."""
    with pytest.raises(grpc.RpcError) as caught:
        await asyncio.to_thread(ask, target, kind)  # grpc.aio's own may fail in writing first
    error = caught.value
    return error.code(), error.details(), [tuple(pair) for pair in error.trailing_metadata()]


@pytest.mark.parametrize(("nature", "kind"), HANDLERS)
async def test_a_handler_sees_the_deadline_of_its_own_call(nature, kind):
    made = handler(kind, nature(kind, left))
    async with aio_serving(made, interceptors=server_interceptors()) as target:
        assert 0 < seconds(await aio_ask(target, kind)) <= WAIT_S * ROUNDED
        loop = asyncio.get_running_loop()
        assert await loop.run_in_executor(None, left) is None  # nor into the threads of the pool
        assert await aio_ask(target, kind, timeout=None) == [b"None"]
    assert left() is None


async def test_the_policy_of_the_server_shortens_the_deadline_that_handlers_see():
    made = handler("unary_unary", aio_answering("unary_unary", left))
    for own, policy in ((100, WAIT_S), (WAIT_S, 100), (None, WAIT_S)):
        interceptors = server_interceptors(CallPolicy(timeout=policy))
        async with aio_serving(made, interceptors=interceptors) as target:
            given = seconds(await aio_ask(target, "unary_unary", timeout=own))
            assert 1 < given <= WAIT_S * ROUNDED


async def test_a_wrapped_handler_has_the_class_of_the_handler():
    """grpc.aio treats coroutine functions, generators and plain functions differently."""
    (interceptor,) = server_interceptors()
    changed = []
    for nature, kind in itertools.product(NATURES, KINDS):
        behavior = nature(kind, left)

        async def continuation(_details, made=handler(kind, behavior)):  # noqa: B008
            return made

        made = await interceptor.intercept_service(continuation, type("", (), {"method": METHOD}))
        served = getattr(made, kind)
        asks = (inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        if [ask(served) for ask in asks] != [ask(behavior) for ask in asks]:
            changed.append((nature.__name__, kind))
    assert changed == []


@pytest.mark.parametrize(("nature", "kind"), ADAPTED[1:3])
async def test_a_scope_around_the_start_of_a_server_does_not_limit_its_calls(kind, nature):
    made = handler(kind, nature(kind, left))
    with deadline_scope(30):
        async with aio_serving(made, interceptors=server_interceptors()) as target:
            assert await aio_ask(target, kind, timeout=None) == [b"None"]


@pytest.mark.parametrize(("nature", "kind"), ADAPTED)
async def test_a_call_whose_deadline_has_passed_is_refused(kind, nature, events, caplog):
    """grpc does not cancel a call that waits because the loop is blocked."""
    served, blocked = [], []

    def block(context):
        blocked.append(timeout)
        while context.time_remaining() > 0:
            time.sleep(0.01)

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
        await aio_wait_until(
            lambda: any(isinstance(one, DeadlineExceededBeforeStart) for one in events)
        )
    assert served == []
    assert not [record for record in caplog.records if record.name.startswith("grpc")]


class EndedByItsClient:
    """The context of a call whose client ends it between its deadline and its refusal."""

    def time_remaining(self):
        return 0.0

    async def abort(self, *_):
        raise grpc.aio.InternalError("execute_batch failed")


async def test_a_refused_call_that_its_client_has_ended_is_not_logged_as_an_error():
    async def continuation(_):
        return grpc.unary_unary_rpc_method_handler(behavior)

    async def behavior(request, context):
        raise AssertionError("the deadline has passed")

    (interceptor,) = server_interceptors()
    details = type("Details", (), {"method": "/test.Small/Call", "invocation_metadata": ()})
    made = await interceptor.intercept_service(continuation, details)
    with pytest.raises(asyncio.CancelledError):
        await made.unary_unary(b"", EndedByItsClient())


async def test_an_unknown_method_is_unimplemented():
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


@pytest.mark.parametrize(
    ("ending", "kind"),
    [
        (aborting, "unary_unary"),
        (aborting, "stream_stream"),
        (plainly_aborting, "stream_unary"),
        (plainly_aborting, "unary_stream"),
        (marking, "stream_unary"),
        (marking, "unary_stream"),
    ],
)
async def test_a_status_reaches_the_client_unchanged(kind, ending):
    made = handler(kind, ending(kind))
    async with (
        aio_serving(made) as plain,
        aio_serving(made, interceptors=server_interceptors()) as target,
    ):
        assert await status(target, kind) == await status(plain, kind)


@pytest.mark.parametrize("kind", TWO_KINDS)
async def test_an_exception_of_a_handler_reaches_the_client_unchanged(kind):
    made = handler(kind, failing(kind))
    async with aio_serving(made, interceptors=server_interceptors()) as target:
        code, details, _ = await status(target, kind)
    assert code is grpc.StatusCode.UNKNOWN
    assert details.startswith("Unexpected <class 'KeyError'>: ")


@pytest.mark.parametrize(("nature", "kind"), ADAPTED)
async def test_other_interceptors_get_the_same_context(kind, nature):
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


async def test_a_plain_stream_sees_context_variables_of_outer_interceptors_on_any_thread():
    def look(_context):
        return LOOKED_AT.get()

    first = Other("unary_stream", lambda _context: LOOKED_AT.set("first"))
    made = handler("unary_stream", answering("unary_stream", look))
    async with aio_serving(made, interceptors=[first, *server_interceptors()]) as target:
        assert await aio_ask(target, "unary_stream") == [b"'first'"]


async def test_a_plain_stream_works_behind_an_interceptor_that_runs_in_the_pool():
    class Around(grpc.aio.ServerInterceptor):
        async def intercept_service(self, continuation, details):
            behavior = (await continuation(details)).unary_stream

            def wrapped(request, context):
                yield from behavior(request, context)

            return handler("unary_stream", wrapped)

    made = handler("unary_stream", answering("unary_stream", left))
    async with aio_serving(made, interceptors=[Around(), *server_interceptors()]) as target:
        assert (
            0 < seconds(await aio_ask(target, "unary_stream", timeout=WAIT_S)) <= WAIT_S * ROUNDED
        )


@pytest.mark.parametrize(
    ("style", "kind"), [(aio_answering, "stream_stream"), (reading_and_writing, "unary_stream")]
)
async def test_a_client_that_cancels_cancels_the_handler(kind, style):
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


async def test_the_generator_of_a_handler_is_closed_with_its_wrapper():
    """Not only when the garbage collector finds it."""
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


SLOW = CallPolicy(timeout=DeadlinePolicy(slow_call_threshold=2.0))


class Gate:
    """A gate for handlers of any class; opened from the loop."""

    def __init__(self):
        self.entered = threading.Event()
        self.opened = threading.Event()

    def wait(self):
        self.entered.set()
        assert self.opened.wait(WAIT_S)

    async def wait_on_loop(self):
        self.entered.set()
        await aio_wait_until(self.opened.is_set)


def generating(kind, gate, end):
    async def unary(request, context):
        await gate.wait_on_loop()
        end()
        return b"done"

    async def stream(request, context):
        yield b"first"
        await gate.wait_on_loop()
        end()
        yield b"done"

    return unary if kind in ONE_ANSWER else stream


def writing(kind, gate, end):
    async def stream(request, context):
        await context.write(b"first")
        await gate.wait_on_loop()
        end()
        await context.write(b"done")

    return generating(kind, gate, end) if kind in ONE_ANSWER else stream


def plain(kind, gate, end):
    def unary(request, context):
        gate.wait()
        end()
        return b"done"

    def stream(request, context):
        yield b"first"
        gate.wait()
        end()
        yield b"done"

    return unary if kind in ONE_ANSWER else stream


WAITING = [
    (generating, "unary_unary"),
    (generating, "stream_stream"),
    (writing, "unary_stream"),
    (plain, "stream_unary"),
    (plain, "unary_stream"),
]
"""Handlers that wait at a gate, one for each way in which a call is watched."""


def well():
    pass


def with_a_bug():
    raise KeyError("a bug")


async def answers(call, kind):
    return [await call] if kind in ONE_ANSWER else [answer async for answer in call]


@pytest.mark.parametrize(("nature", "kind"), WAITING)
async def test_a_slow_call_is_reported_while_it_runs(kind, nature, timer, events):
    gate = Gate()
    made = handler(kind, nature(kind, gate, well))
    async with (
        aio_serving(made, interceptors=server_interceptors(SLOW, timer=timer)) as target,
        grpc.aio.insecure_channel(target, options=IMPATIENT) as channel,
    ):
        call = begin(channel, kind)
        await aio_wait_until(gate.entered.is_set)
        timer.advance(1.9)
        assert not any(isinstance(event, CallSlow) for event in events)
        timer.advance(0.2)
        await aio_wait_until(lambda: CallSlow(METHOD, "server", 2.0) in events)
        gate.opened.set()
        assert (await answers(call, kind))[-1] == b"done"


@pytest.mark.parametrize(
    ("nature", "kind", "end"),
    [
        (nature, kind, end)
        for (nature, kind), end in zip(
            WAITING, (well, with_a_bug, with_a_bug, well, with_a_bug), strict=True
        )
    ],
)
async def test_no_timeout_remains_after_the_end_of_a_call(kind, nature, end, timer):
    gate = Gate()
    made = handler(kind, nature(kind, gate, end))
    async with (
        aio_serving(made, interceptors=server_interceptors(SLOW, timer=timer)) as target,
        grpc.aio.insecure_channel(target, options=IMPATIENT) as channel,
    ):
        call = begin(channel, kind)
        await aio_wait_until(gate.entered.is_set)
        assert timer.pending == 1
        gate.opened.set()
        try:
            await answers(call, kind)
        except grpc.RpcError:
            assert end is with_a_bug
        await aio_wait_until(lambda: timer.pending == 0)


@pytest.mark.parametrize(("nature", "kind"), WAITING)
async def test_no_timeout_remains_after_the_client_has_canceled(kind, nature, timer):
    gate = Gate()
    made = handler(kind, nature(kind, gate, well))
    async with (
        aio_serving(made, interceptors=server_interceptors(SLOW, timer=timer)) as target,
        grpc.aio.insecure_channel(target, options=IMPATIENT) as channel,
    ):
        call = begin(channel, kind)
        if kind in STREAMS:
            assert await call.read() == b"first"
        await aio_wait_until(gate.entered.is_set)
        assert timer.pending == 1
        call.cancel()
        if nature is plain and kind in ONE_ANSWER:
            gate.opened.set()  # its thread works on
        await aio_wait_until(lambda: timer.pending == 0)
        gate.opened.set()


@pytest.mark.parametrize(("nature", "kind"), WAITING[1:4:2])
async def test_a_timer_that_takes_no_timeout_does_not_affect_calls(kind, nature):
    gate = Gate()
    gate.opened.set()
    timer = ManualTimer()
    timer.stop()
    made = handler(kind, nature(kind, gate, well))
    async with aio_serving(made, interceptors=server_interceptors(SLOW, timer=timer)) as target:
        assert (await aio_ask(target, kind))[-1] == b"done"


async def test_a_timer_on_the_loop_of_the_server_may_be_used(events):
    gate = Gate()
    policy = CallPolicy(timeout=DeadlinePolicy(slow_call_threshold=0.01))
    made = handler("unary_unary", plain("unary_unary", gate, well))
    async with (
        AsyncWheelTimer() as timer,
        aio_serving(made, interceptors=server_interceptors(policy, timer=timer)) as target,
    ):
        call = asyncio.create_task(aio_ask(target, "unary_unary"))
        await aio_wait_until(lambda: CallSlow(METHOD, "server", 0.01) in events)
        gate.opened.set()
        assert await call == [b"done"]


async def test_no_timeout_remains_after_a_plain_stream_handler_has_raised(timer):
    kind = "unary_stream"

    def behavior(request, context):
        raise KeyError("a bug")

    made = handler(kind, behavior)
    async with aio_serving(made, interceptors=server_interceptors(SLOW, timer=timer)) as target:
        with pytest.raises(grpc.RpcError):
            await aio_ask(target, kind)
        assert timer.stats().started == 1
        await aio_wait_until(lambda: timer.pending == 0)


class TellingOfTheEnd(grpc.aio.ServerInterceptor):
    """Calls `over` at the end of the call's task, before done-callbacks that are added later."""

    def __init__(self, over):
        self.over = over

    async def intercept_service(self, continuation, details):
        asyncio.current_task().add_done_callback(self.over)
        return await continuation(details)


async def test_the_thread_of_a_plain_stream_is_released_after_its_client_has_canceled():
    """Without the interceptor the thread waits forever, and the pool can't shut down."""
    gone, closed = threading.Event(), threading.Event()

    def behavior(request, context):
        try:
            yield b"first"
            assert gone.wait(WAIT_S)
            yield b"not read"
        finally:
            closed.set()

    def over(_task):
        gone.set()
        closed.wait(WAIT_S)  # the loop has not run other callbacks yet

    interceptors = [TellingOfTheEnd(over), *server_interceptors()]
    async with (
        aio_serving(handler("unary_stream", behavior), interceptors=interceptors) as target,
        grpc.aio.insecure_channel(target, options=IMPATIENT) as channel,
    ):
        call = begin(channel, "unary_stream")
        assert await call.read() == b"first"
        call.cancel()
        await aio_wait_until(closed.is_set)
    await asyncio.get_running_loop().shutdown_default_executor()
