"""The aio interceptor with tasks in place of calls: what a server can't bring about on purpose."""

import asyncio
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import grpc
import pytest

from fixtures.limited_servers import LONG_S
from fixtures.waiting import WAIT_S, Gate
from rpcwheel.limit import pause
from rpcwheel.limit.aio_interceptor import LimitInterceptor
from rpcwheel.limit.limiter import UNLIMITED, RefusalReason
from rpcwheel.limit.policy import LimitPolicy
from rpcwheel.limit.server import ServerLimit
from rpcwheel.rpc import DEFAULT_CRITICALITY
from rpcwheel.timer import ManualTimer


async def echo(request, _):
    return request


HANDLER = grpc.unary_unary_rpc_method_handler(echo)
DETAILS = SimpleNamespace(method="/test.Shop/Get", invocation_metadata=())


class Server:
    """Calls of a server with a limit of one, as tasks that run until they are told to end."""

    def __init__(self, policy):
        self.limit = ServerLimit(policy, lambda _: policy, timer=None)
        self.interceptor = LimitInterceptor(self.limit)
        self.handler = HANDLER
        self.ran = []
        self.ends = {}

    async def _handler(self, _details):
        return self.handler

    async def _serve(self, name):
        """What gRPC does; it catches the error."""
        with suppress(asyncio.CancelledError):
            handler = await self.interceptor.intercept_service(self._handler, DETAILS)
            if not handler.request_streaming:  # it is not refused
                self.ran.append(name)
                await self.ends[name].wait()

    async def arrive(self, name, at_end=lambda: None):
        """Begin a call; `at_end` is called at its end, before the interceptor notices that."""
        self.ends[name] = asyncio.Event()
        task = asyncio.create_task(self._serve(name))
        task.add_done_callback(lambda _: at_end())
        await asyncio.sleep(0)
        return task


@pytest.fixture
def server():
    return Server(LimitPolicy(max_concurrent=1, max_wait=LONG_S))


async def test_a_call_that_is_canceled_as_it_is_started_gives_its_place_to_the_next(server):
    first, second, third = [await server.arrive(name) for name in ("first", "second", "third")]
    # It will be started when the task of the first has ended; then it is canceled first.
    first.add_done_callback(lambda _: second.cancel())
    server.ends["first"].set()
    server.ends["third"].set()
    await asyncio.gather(first, second, third, return_exceptions=True)
    assert server.ran == ["first", "third"]
    await asyncio.sleep(0)
    assert server.limit.limiter.running == 0


async def test_a_call_that_was_canceled_just_before_is_not_started(server):
    others = []

    def cancel_second():  # its future is canceled at once, and its task notices that later
        others[0].cancel()

    first = await server.arrive("first", at_end=cancel_second)
    others += [await server.arrive(name) for name in ("second", "third")]
    server.ends["first"].set()
    server.ends["third"].set()
    await asyncio.gather(first, *others, return_exceptions=True)
    assert server.ran == ["first", "third"]
    await asyncio.sleep(0)
    assert server.limit.limiter.running == 0


async def test_no_call_is_started_while_grpc_accepts_calls(server, monkeypatch):
    monkeypatch.setattr(pause, "GIVEN_UP_NS", 1 << 60)  # the machine may be busy
    first = await server.arrive("first")
    second = await server.arrive("second")
    begin, end = server.limit.begin_pause, server.limit.end_pause
    has_accepted = []
    server.limit.begin_pause = lambda now_ns, _: not has_accepted and begin(2 * now_ns, 2 * now_ns)
    server.limit.end_pause = lambda *args: bool(has_accepted) and end(*args)
    server.interceptor._cpu_due_ns = 0  # it is read again
    server.ends["first"].set()
    await first
    await asyncio.sleep(0)
    assert (server.ran, server.limit.limiter.running) == (["first"], 0)
    third = await server.arrive("third")  # it may not overtake
    assert server.limit.limiter.running == 0
    has_accepted.append(True)
    server.ends["second"].set()
    server.ends["third"].set()
    await asyncio.gather(second, third)
    assert server.ran == ["first", "second", "third"]


async def test_a_call_that_is_canceled_early_does_not_count_as_a_short_handler(server):
    first = await server.arrive("first")
    await asyncio.sleep(0.02)
    server.ends["first"].set()
    await first
    second = await server.arrive("second")
    second.cancel()
    await second
    await asyncio.sleep(0)
    assert (server.ran, server.limit.limiter.running) == (["first", "second"], 0)
    (method,) = server.limit._methods.values()
    assert method.least_ns >= 10_000_000  # uvloop may sleep for less


async def test_a_blocking_handler_that_goes_on_after_its_call_has_not_answered(server):
    gate = Gate()
    server.handler = grpc.unary_unary_rpc_method_handler(lambda request, _: gate(request))

    async def serve():
        handler = await server.interceptor.intercept_service(server._handler, DETAILS)
        running = asyncio.create_task(asyncio.to_thread(handler.unary_unary, b"x", None))
        await asyncio.to_thread(gate.entered.wait, WAIT_S)
        return running

    running = await asyncio.create_task(serve())
    gate.opened.set()
    assert await running == b"x"
    (method,) = server.limit._methods.values()
    assert not method.is_answered


class Context:
    """The context of a call with so many seconds left."""

    def __init__(self, left_s):
        self._left_s = left_s
        self.code = None

    def time_remaining(self):
        return self._left_s

    async def abort(self, code, *_):
        self.code = code
        raise grpc.aio.AbortError("Locally aborted.")


async def refused(served, left_s=0.5):
    """Whether the handler of a call with too little time left refuses it, and does not run."""
    context = Context(left_s)
    with pytest.raises(grpc.aio.AbortError):  # interceptors before it see no response
        await served.unary_unary(b"x", context)
    return context.code is grpc.StatusCode.RESOURCE_EXHAUSTED


async def slow_method():
    """The limit of a server that refuses calls, and a function that begins a call of 1 s.

    It has begun one, which ends with the task.
    """

    async def find(_):
        return HANDLER

    policy = LimitPolicy(max_concurrent=4, max_wait=LONG_S)
    limit = ServerLimit(policy, lambda _: policy, timer=ManualTimer())
    interceptor = LimitInterceptor(limit)
    assert await interceptor.intercept_service(find, DETAILS) is HANDLER
    (method,) = limit._methods.values()
    method.took(1_000_000_000)
    limit.report_refused([(UNLIMITED, RefusalReason.WAITED)])
    return limit, partial(interceptor.intercept_service, find, DETAILS)


async def test_a_call_that_is_refused_when_it_starts_is_reported_at_once():
    limit, begin = await slow_method()
    for left_s in (0.5, 1.0):  # the first had too little time when it arrived
        assert await refused(await begin(), left_s)
    assert limit.status().problem == "overloaded: it has refused 2 calls"
    reasons = [
        (DEFAULT_CRITICALITY, RefusalReason.SHORT),
        (DEFAULT_CRITICALITY, RefusalReason.DEADLINE),
    ]
    assert limit.limiter.refused == dict.fromkeys(reasons, 1)


async def test_the_error_of_a_call_that_is_refused_when_it_starts_keeps_no_frames():
    _, begin = await slow_method()

    async def serve():
        with pytest.raises(grpc.aio.AbortError) as caught:
            await (await begin()).unary_unary(b"x", Context(0.5))
        return caught.value

    error = await asyncio.create_task(serve())
    await asyncio.sleep(0)  # the interceptor notices that the task has ended
    assert error.__traceback__ is None


async def test_a_method_that_was_slow_once_is_measured_again_after_a_second():
    """All its handlers may have been canceled at the same timeout, as if they took so long."""
    limit, begin = await slow_method()
    (method,) = limit._methods.values()
    assert await refused(await begin())
    method.refused_ns -= 4_000_000_000
    served = await begin()
    assert await served.unary_unary(b"x", Context(0.5)) == b"x"
    assert await refused(await begin())  # one suffices


async def test_while_calls_are_refused_each_call_needs_the_time_that_its_method_takes():
    limit, begin = await slow_method()
    for left_s in (None, 1.5):
        served = await begin()
        assert await served.unary_unary(b"x", Context(left_s)) == b"x"
    served = await begin()
    assert await refused(served)
    assert limit.limiter.refused == {(DEFAULT_CRITICALITY, RefusalReason.SHORT): 1}
    waits = asyncio.create_task(begin())
    await asyncio.sleep(0)
    assert not waits.done()
    waits.cancel()
    await asyncio.wait([waits])
