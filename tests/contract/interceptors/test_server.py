"""Server interceptors on real servers: deadlines, statuses, slow calls.

A threaded server has plain handlers only; one of `grpc.aio` has several natures of them. The rules
of only one of the servers are in `test_server_sync_only` and `test_server_aio_only`.
"""

import ast
import asyncio
import inspect
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
    answering,
    ask,
    begin,
    handler,
)

from fixtures.call_counts import TYPES, codes_of
from fixtures.grpc_servers import IMPATIENT, GrpcServer
from fixtures.grpcio import ABORTS_ONCE
from fixtures.handlers import (
    bound,
    current,
    left,
    partly,
    reading_and_writing,
    seconds,
    serving_a_call_of,
    status,
    wrapping,
)
from fixtures.small_servers import IN_TIME, METHOD, serving_in, small
from fixtures.waiting import WAIT_S, Gate, aio_wait_until, wait_until
from fixtures.worlds import AioWorld, SyncWorld
from rpcwheel.call import CallPolicy, Criticality, DeadlinePolicy, MethodPolicy, deadline_scope
from rpcwheel.events import CallSlow, DeadlineExceededBeforeStart
from rpcwheel.rpc import CRITICALITY_KEY
from rpcwheel.timer import WheelTimer

DEADLINE_EXCEEDED = grpc.StatusCode.DEADLINE_EXCEEDED

LOOKED_AT = ContextVar("looked_at", default=None)

HANDLERS = [
    *((SyncWorld, answering, kind) for kind in KINDS),
    (AioWorld, aio_answering, "unary_unary"),
    (AioWorld, aio_answering, "stream_stream"),
    (AioWorld, reading_and_writing, "stream_unary"),
    (AioWorld, reading_and_writing, "stream_stream"),
    (AioWorld, reading_and_writing, "unary_stream"),
    (AioWorld, bound, "unary_unary"),
    (AioWorld, bound, "unary_stream"),
    (AioWorld, partly, "stream_unary"),
    (AioWorld, partly, "stream_stream"),
    (AioWorld, answering, "unary_unary"),
    (AioWorld, answering, "unary_stream"),
]
"""Handlers of each nature, with one response and with a stream; the requests are paired."""

WRAPPED = [
    (SyncWorld, answering, "stream_unary"),
    (SyncWorld, answering, "unary_stream"),
    (AioWorld, aio_answering, "stream_unary"),
    (AioWorld, aio_answering, "unary_stream"),
    (AioWorld, answering, "unary_unary"),
    (AioWorld, answering, "stream_stream"),
]
"""One handler for each way in which the interceptors wrap them."""


def each(rows):
    return pytest.mark.parametrize(("world", "nature", "kind"), rows, indirect=["world"])


def other(world, kind, look):
    """Another interceptor, which calls `look` before each response."""

    def around(behavior):
        async def unary(request, context):
            look(context)
            return await behavior(request, context)

        async def stream(request, context):
            look(context)
            async for response in behavior(request, context):
                yield response

        def plain(request, context):
            look(context)
            return behavior(request, context)

        if inspect.iscoroutinefunction(behavior):
            return unary
        return stream if inspect.isasyncgenfunction(behavior) else plain

    return wrapping(kind, around, is_aio=world.name == "aio")


def ours(world, policy=None, **given):
    return world.interceptors.server_interceptors(policy, **given)


# --- Deadlines and criticality ---


@each(HANDLERS)
def test_a_handler_sees_the_deadline_and_the_criticality_of_its_own_call(
    world, nature, kind, call_counts
):
    """And not those of the previous call on its thread, or around the server's start."""
    service, nothing = small(handler(kind, nature(kind, current))), (None, None)

    def seen(**options):
        return ast.literal_eval(ask(server.target, kind, **options)[0].decode())

    with (
        deadline_scope(30),
        serving_a_call_of(Criticality.CRITICAL),
        GrpcServer(service, world=world, workers=1, interceptors=ours(world)) as server,
    ):
        for level, label in (("CRITICAL-PLUS", "critical_plus"), ("urgent", None)):
            remaining, criticality = seen(metadata=((CRITICALITY_KEY, level),))
            assert (0 < remaining <= WAIT_S * ROUNDED, criticality) == (True, label)
            assert server.pool.submit(current).result() == nothing
            if world.name == "aio":  # nor do the threads of the loop's pool have them
                assert world.do(world.loop.run_in_executor, None, current) == nothing
        assert seen(timeout=None) == nothing
    assert world.do(current) == nothing
    (counted,) = call_counts.server.totals()
    assert (counted.method, counted.kind, counted.started) == (METHOD, TYPES[kind], 3)
    assert codes_of(call_counts.server) == {"OK": 3}


def test_the_policy_of_the_method_shortens_the_deadline_that_its_handler_sees(world):
    made = handler("unary_unary", answering("unary_unary", left))
    for own, limit in ((100, WAIT_S), (WAIT_S, 100), (None, WAIT_S)):
        methods = {METHOD: MethodPolicy(timeout=limit)}
        policy = CallPolicy(timeout=WAIT_S / 3, methods=methods)
        with serving_in(world, made, *ours(world, policy)) as target:
            remaining = seconds(ask(target, "unary_unary", timeout=own))
            assert WAIT_S / 3 < remaining <= WAIT_S * ROUNDED


@each(WRAPPED)
def test_a_call_whose_deadline_has_passed_is_refused_and_counted(
    world, nature, kind, events, caplog, call_counts
):
    """On a loop that is blocked, grpc.aio does not cancel a call that waits."""
    served, held_up = [], []

    def hold_up(context):
        held_up.append(context)
        while context.time_remaining() > 0:
            time.sleep(0.01)

    made = handler(kind, nature(kind, served.append))
    with serving_in(world, made, other(world, kind, hold_up), *ours(world)) as target:
        for timeout in IN_TIME:
            assert status(target, kind, timeout=timeout)[0] is DEADLINE_EXCEEDED
            if held_up:
                break
        wait_until(lambda: events.of(DeadlineExceededBeforeStart))
        assert set(codes_of(call_counts.server)) == {"DEADLINE_EXCEEDED"}
    assert served == []
    late = events.of(DeadlineExceededBeforeStart)[0]
    assert late.method == METHOD
    assert late.late_s >= 0
    logged = [one.getMessage() for one in caplog.records if one.name.startswith("grpc")]
    if world.name == "aio" and nature is answering:
        # A blocking handler can only return. grpc.aio logs that if the client has just ended the
        # call: of a bare server 10 of 346 calls that ended within 3 ms of their deadlines.
        logged = [text for text in logged if not text.startswith("ExecuteBatchError")]
    assert logged == []


# --- Statuses, and other interceptors ---


def test_an_unknown_method_is_unimplemented_and_not_counted(world, call_counts):
    made = handler("unary_unary", None)
    with (
        serving_in(world, made, *ours(world)) as target,
        grpc.insecure_channel(target, options=IMPATIENT) as channel,
    ):
        call = channel.unary_unary("/test.Small/Other").future(b"x", timeout=WAIT_S)
        assert call.code() is grpc.StatusCode.UNIMPLEMENTED
        assert call_counts.server.totals() == []


def abort(context):
    context.set_trailing_metadata((("because", "of it"),))
    return context.abort(grpc.StatusCode.NOT_FOUND, "not here")


def fail(context):
    context.set_code(grpc.StatusCode.DATA_LOSS)
    context.set_details("set")
    raise KeyError("a bug")


def bug(context):
    raise KeyError("a bug")


def mark(context):
    context.set_code(grpc.StatusCode.ABORTED)
    context.set_details("set, not raised")


async def abort_on_loop(context):
    await abort(context)


@pytest.mark.parametrize(
    ("world", "nature", "kind", "look", "slow_call_threshold"),
    [
        (SyncWorld, answering, "unary_unary", abort, None),
        (SyncWorld, answering, "unary_stream", abort, 30.0),
        (SyncWorld, answering, "stream_unary", fail, 30.0),
        (SyncWorld, answering, "stream_stream", fail, None),
        (SyncWorld, answering, "unary_unary", mark, 30.0),
        (SyncWorld, answering, "unary_stream", mark, None),
        (AioWorld, aio_answering, "unary_unary", abort_on_loop, None),
        (AioWorld, aio_answering, "stream_stream", abort_on_loop, None),
        (AioWorld, answering, "stream_unary", abort, None),
        pytest.param(AioWorld, answering, "unary_stream", abort, None, marks=ABORTS_ONCE),
        (AioWorld, aio_answering, "unary_unary", fail, None),
        (AioWorld, aio_answering, "stream_stream", fail, None),
        (AioWorld, aio_answering, "stream_unary", mark, None),
        (AioWorld, aio_answering, "unary_stream", mark, None),
        (AioWorld, reading_and_writing, "stream_stream", mark, None),
        (AioWorld, answering, "unary_unary", mark, None),
        (AioWorld, answering, "stream_stream", mark, None),
        *((*row, bug, None) for row in WRAPPED),
    ],
    indirect=["world"],
)
def test_a_status_reaches_the_client_unchanged_and_is_counted(
    world, nature, kind, look, slow_call_threshold, call_counts
):
    made = handler(kind, nature(kind, look))
    policy = CallPolicy(timeout=DeadlinePolicy(slow_call_threshold=slow_call_threshold))
    with serving_in(world, made) as plain, serving_in(world, made, *ours(world, policy)) as target:
        seen = status(target, kind)
        assert seen == status(plain, kind)
        assert codes_of(call_counts.server) == {seen[0].name: 1}


@each(WRAPPED)
def test_other_interceptors_get_the_same_context(world, nature, kind):
    seen = []

    def first(context):
        LOOKED_AT.set("first")
        seen.append((left(), context))

    def second(context):
        seen.append((left(), context))

    def last(context):
        assert LOOKED_AT.get() == "first" or world.name == "aio"
        second(context)

    chain = [other(world, kind, first), *ours(world), other(world, kind, second)]
    with serving_in(world, handler(kind, nature(kind, last)), *chain) as target:
        ask(target, kind)
    before, after, inside = (deadline for deadline, _ in seen)
    assert before is None
    assert 0 < inside <= after <= WAIT_S * ROUNDED
    assert len({id(context) for _, context in seen}) == 1


# --- Slow calls ---


SLOW = CallPolicy(timeout=DeadlinePolicy(slow_call_threshold=2.0))


def gated(nature, kind, gate, end):
    """A handler that waits at the gate before its last response, and then calls `end`."""

    def wait(context):
        if hasattr(context, "add_callback"):  # of grpc, which does not cancel the handler
            context.add_callback(gate.opened.set)
        gate(b"")
        end()

    async def wait_on_loop(context):
        gate.entered.set()
        await aio_wait_until(gate.opened.is_set)
        end()

    return handler(
        kind, nature(kind, wait if nature is answering else wait_on_loop, first=[b"first"])
    )


def well():
    pass


def with_a_bug():
    raise KeyError("a bug")


SYNC_WAITING = [(SyncWorld, answering, "unary_unary"), (SyncWorld, answering, "stream_stream")]
AIO_WAITING = [
    (AioWorld, aio_answering, "unary_unary"),
    (AioWorld, aio_answering, "stream_stream"),
    (AioWorld, reading_and_writing, "unary_stream"),
    (AioWorld, answering, "stream_unary"),
    (AioWorld, answering, "unary_stream"),
]
WAITING = SYNC_WAITING + AIO_WAITING
"""Handlers that wait at a gate, one for each way in which a call is watched."""


def read_all(call, kind):
    return list(call) if kind in STREAMS else [call.result(WAIT_S)]


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.opened.set()


@pytest.fixture
def call(world, nature, kind, end, gate, timer):
    """A call whose handler waits at the gate."""
    made = gated(nature, kind, gate, end)
    with (
        serving_in(world, made, *ours(world, SLOW, timer=timer)) as target,
        grpc.insecure_channel(target, options=IMPATIENT) as channel,
    ):
        call = begin(channel, kind)
        assert gate.entered.wait(WAIT_S)
        yield call
        gate.opened.set()


@pytest.mark.parametrize("end", [well])
@each(WAITING)
def test_a_slow_call_is_reported_while_it_runs(call, kind, gate, timer, events):
    timer.advance(1.9)
    assert not events.of(CallSlow)
    timer.advance(0.2)
    wait_until(lambda: CallSlow(METHOD, "server", 2.0) in events)
    gate.opened.set()
    assert read_all(call, kind)[-1] == b"None"


@pytest.mark.parametrize(
    ("world", "nature", "kind", "end"),
    [
        *((*row, well) for row in SYNC_WAITING),
        (SyncWorld, answering, "stream_unary", with_a_bug),
        (SyncWorld, answering, "unary_stream", with_a_bug),
        *(
            (*row, end)
            for row, end in zip(
                AIO_WAITING, (well, with_a_bug, with_a_bug, well, with_a_bug), strict=True
            )
        ),
    ],
    indirect=["world"],
)
def test_no_timeout_remains_after_the_end_of_a_call(call, kind, end, gate, timer, events):
    assert timer.pending == 1
    gate.opened.set()
    try:
        read_all(call, kind)
    except grpc.RpcError:
        assert end is with_a_bug
    wait_until(lambda: timer.pending == 0)
    timer.advance(5)
    assert not events.of(CallSlow)


@pytest.mark.parametrize("end", [well])
@each(WAITING)
def test_a_call_that_its_client_has_canceled_leaves_no_timeout(
    call_counts, call, world, nature, kind, gate, timer
):
    assert timer.pending == 1
    call.cancel()
    may_succeed = world.name == "aio" and nature is answering and kind in ONE_ANSWER
    if may_succeed:
        gate.opened.set()  # its thread works on
    wait_until(lambda: timer.pending == 0)
    assert may_succeed or codes_of(call_counts.server) == {"CANCELLED": 1}


@each([*WRAPPED[:2], WRAPPED[2], WRAPPED[3]])
def test_a_call_whose_deadline_passes_in_its_handler_is_counted(world, nature, kind, call_counts):
    begun = threading.Event()

    def wait_for_the_deadline(context):  # which the client may notice earlier
        while context.time_remaining():
            time.sleep(0.001)

    def work(context):
        ended = threading.Event()
        begun.set()
        if context.add_callback(ended.set):
            ended.wait(2 * WAIT_S)
        wait_for_the_deadline(context)

    async def work_on_loop(context):
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            wait_for_the_deadline(context)

    made = handler(kind, nature(kind, work_on_loop if nature is aio_answering else work))
    with serving_in(world, made, *ours(world)) as target:
        for timeout in IN_TIME:
            assert status(target, kind, timeout=timeout)[0] is DEADLINE_EXCEEDED
            if begun.is_set():
                break
        assert begun.is_set()
        assert set(codes_of(call_counts.server)) == {"DEADLINE_EXCEEDED"}


def test_no_timeout_remains_after_a_stream_has_raised_before_its_first_response(world, timer):
    def behavior(request, context):
        raise KeyError("a bug")

    made = handler("unary_stream", behavior)
    with serving_in(world, made, *ours(world, SLOW, timer=timer)) as target:
        with pytest.raises(grpc.RpcError, match="a bug"):
            ask(target, "unary_stream")
        assert timer.stats().started == 1
        wait_until(lambda: timer.pending == 0)


def test_only_methods_with_slow_call_threshold_set_a_timeout(world, timer):
    policy = CallPolicy(methods={"/test.Other/*": MethodPolicy(timeout=SLOW.timeout)})
    made = handler("unary_unary", lambda request, context: request)
    with serving_in(world, made, *ours(world, policy, timer=timer)) as target:
        ask(target, "unary_unary")
    assert timer.stats().started == 0


def refuse(task, delay):
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("state", ["stopped", "full", "without a thread"])
@each([SYNC_WAITING[0], AIO_WAITING[1], AIO_WAITING[3]])
def test_a_timer_that_takes_no_timeout_does_not_affect_calls(
    world, nature, kind, gate, state, monkeypatch
):
    gate.opened.set()
    with WheelTimer(max_pending=1) as timer:
        timer.new_timeout(lambda _: None, 600)
        if state == "stopped":
            timer.stop()
        elif state == "without a thread":
            monkeypatch.setattr(timer, "new_timeout", refuse)
        made = gated(nature, kind, gate, well)
        with serving_in(world, made, *ours(world, SLOW, timer=timer)) as target:
            assert ask(target, kind)[-1] == b"None"
