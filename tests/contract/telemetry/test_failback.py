"""Traces of deliveries in the background: spans of their own, linked to that of the caller."""

import asyncio
import threading
from concurrent.futures import Future

import pytest
from opentelemetry import trace

import rpcwheel
import rpcwheel.aio
from fixtures.foreign_opentelemetry import events_of
from fixtures.instrumented_channels import answer
from fixtures.shop import SERVICE, UNARY_UNARY, Fail
from fixtures.waiting import WAIT_S, aio_wait_until
from fixtures.worlds import AioWorld, SyncWorld
from rpcwheel import FailbackPolicy
from rpcwheel.failback.aio import FailbackInvoker

NAME = f"rpcwheel.failback {UNARY_UNARY}"
QUEUED = {
    "timeout": WAIT_S,
    "retry": None,
    "failback": FailbackPolicy(
        name="orders", retry_on="UNAVAILABLE", backoff=0.001, max_attempts=3, default=b"later"
    ),
}


def traceparent(metadata) -> tuple[int, int]:
    """The trace and the span of which a call that arrived at the shop is a child."""
    _, trace_id, span_id, _ = metadata["traceparent"].split("-")
    return int(trace_id, 16), int(span_id, 16)


def ids(span) -> tuple[int, int]:
    return span.context.trace_id, span.context.span_id


def check_linked(delivery, queued) -> None:
    """The delivery belongs to no trace but its own, and links to the span that queued the call."""
    assert delivery.parent is None
    assert delivery.context.trace_id != queued.context.trace_id
    assert [link.context.span_id for link in delivery.links] == [queued.context.span_id]


def check_deliveries(failed, delivered, queued) -> None:
    for delivery in (failed, delivered):
        assert (delivery.name, delivery.kind) == (NAME, trace.SpanKind.INTERNAL)
        check_linked(delivery, queued)
    common = {"rpc.system.name": "grpc", "rpc.method": f"{SERVICE}/UnaryUnary",
              "rpcwheel.name": "orders"}  # fmt: skip
    assert failed.attributes == common | {
        "rpcwheel.attempt": 2, "rpcwheel.outcome": "failed", "error.type": "UNAVAILABLE",
        "rpc.response.status_code": "UNAVAILABLE",
    }  # fmt: skip
    assert failed.status.status_code is trace.StatusCode.ERROR
    assert failed.status.description == "UNAVAILABLE: again"
    (error,) = failed.events
    assert error.name == "exception"
    assert error.attributes["exception.message"] == "UNAVAILABLE: again"
    assert "exception.stacktrace" not in error.attributes
    assert delivered.attributes == common | {"rpcwheel.attempt": 3, "rpcwheel.outcome": "delivered"}
    assert delivered.status.status_code is trace.StatusCode.UNSET


each_style = pytest.mark.parametrize(
    ("world", "style"),
    [(SyncWorld, "blocking"), (SyncWorld, "held"), (AioWorld, "held")],
    indirect=["world"],
)


@pytest.mark.parametrize("journaled", [False, True], ids=["in memory", "from a journal"])
@each_style
def test_a_delivery_is_a_span_with_a_link_to_the_span_of_the_caller(
    shop, world, open_channel, spans, tmp_path, style, journaled
):
    shop.then("UNAVAILABLE", Fail("UNAVAILABLE", details="again"))
    failback = QUEUED["failback"]
    if journaled:
        failback = failback.replace(journal=f"sqlite://{tmp_path}/journal.db")
    channel = open_channel(**QUEUED | {"failback": failback})
    with spans.caller() as caller:
        assert answer(world, channel, style=style) == b"later"
    failed, delivered = spans.deliveries(2)
    assert events_of(caller) == ["rpcwheel.failback_queued"]
    check_deliveries(failed, delivered, caller)


def test_with_an_instrumentation_inside_the_call_of_a_delivery_is_its_child(
    shop, world, open_channel, spans, theirs
):
    shop.then("UNAVAILABLE")
    channel = open_channel("channel", inner=theirs, **QUEUED)
    with spans.caller() as caller:
        assert answer(world, channel) == b"later"
    (delivery,) = spans.deliveries(1)
    first, later = spans.clients(2)
    assert first.parent.span_id == caller.context.span_id
    assert (later.context.trace_id, later.parent.span_id) == ids(delivery)
    assert traceparent(shop.calls[1].metadata) == ids(later)


def test_with_an_instrumentation_outside_the_server_sees_the_span_of_the_delivery(
    shop, world, open_channel, spans, theirs
):
    shop.then("UNAVAILABLE")
    assert answer(world, open_channel(outer=theirs, **QUEUED)) == b"later"
    (delivery,) = spans.deliveries(1)
    (client,) = spans.clients(1)
    check_linked(delivery, client)
    assert [traceparent(seen.metadata) for seen in shop.calls] == [ids(client), ids(delivery)]


def test_the_metadata_of_a_delivery_without_a_trace_context_stays_as_it_is(shop, spans):
    shop.then("UNAVAILABLE")
    with rpcwheel.Kit(**QUEUED) as kit, kit.channel(shop.target) as channel:
        with spans.caller():
            assert channel.unary_unary(UNARY_UNARY)(b"a", metadata=[("a", "b")]) == b"later"
        spans.deliveries(1)
    assert shop.calls[1].metadata["a"] == "b"
    assert "traceparent" not in shop.calls[1].metadata


def test_a_call_that_is_given_up_says_why(shop, spans):
    shop.then("UNAVAILABLE", "NOT_FOUND")
    with rpcwheel.Kit(**QUEUED) as kit, kit.channel(shop.target) as channel:
        with spans.caller():
            assert channel.unary_unary(UNARY_UNARY)(b"a") == b"later"
        (delivery,) = spans.deliveries(1)
    assert delivery.attributes["rpcwheel.outcome"] == "gave_up"
    assert delivery.attributes["rpcwheel.reason"].startswith("its error is not one that")
    assert delivery.attributes["rpc.response.status_code"] == "NOT_FOUND"


def test_a_dropped_call_is_an_event_of_the_span_of_the_caller(invoker, spans):
    failback = invoker(max_pending=1, overflow="drop")
    with spans.caller() as caller:
        for _ in range(2):
            failback.invoke(refuse)
    assert events_of(caller) == ["rpcwheel.failback_queued", "rpcwheel.failback_dropped"]


def refuse() -> None:
    raise ConnectionError("refused")


class Function:
    """Fails at first, and then notes which span is current."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.seen: list[tuple[int, int]] = []

    def __call__(self) -> None:
        self.seen.append(self._current())
        if self.errors:
            raise self.errors.pop(0)

    async def aio(self) -> None:
        self()

    def future(self) -> Future[None]:
        result: Future[None] = Future()
        try:
            self()
        except ConnectionError as error:
            result.set_exception(error)
        else:
            result.set_result(None)
        return result

    @staticmethod
    def _current() -> tuple[int, int]:
        context = trace.get_current_span().get_span_context()
        return context.trace_id, context.span_id


@pytest.mark.parametrize("name", ["Function", "Function.future", "Function.aio"])
async def test_a_function_runs_with_the_span_of_its_delivery(
    name, invoker, aio_invoker, timer, spans
):
    function = Function(ConnectionError("refused"))
    with spans.caller() as caller:
        if name == "Function.aio":
            await aio_invoker(backoff=1).invoke(function.aio)
        elif name == "Function.future":
            invoker(backoff=1).invoke(function.future).result(WAIT_S)
        else:
            invoker(backoff=1).invoke(function)
    timer.advance(1)
    (delivery,) = await asyncio.to_thread(spans.deliveries, 1)
    check_linked(delivery, caller)
    assert delivery.name == f"rpcwheel.failback {delivery.attributes['rpcwheel.function']}"
    assert delivery.attributes["rpcwheel.function"].endswith(name)
    assert function.seen == [ids(caller), ids(delivery)]


def test_the_traceback_of_an_error_without_a_status_is_recorded(invoker, timer, spans):
    failback = invoker(backoff=1, max_attempts=2)
    with spans.caller():
        failback.invoke(refuse)
    timer.advance(1)
    (delivery,) = spans.deliveries(1)
    (error,) = delivery.events
    assert error.attributes["exception.type"] == "ConnectionError"
    assert "in refuse" in error.attributes["exception.stacktrace"]
    assert delivery.attributes["error.type"] == "ConnectionError"


@pytest.mark.parametrize("form", ["blocking", "future"])
def test_a_dead_letter_hook_runs_with_the_span_of_the_last_delivery(form, invoker, timer, spans):
    function = Function(ConnectionError("first"), ConnectionError("second"))
    seen, called = [], threading.Event()

    def hook(_) -> None:
        seen.append(Function._current())
        called.set()

    failback = invoker(backoff=1, max_attempts=2, dead_letter=hook)
    with spans.caller() as caller:
        result = failback.invoke(function if form == "blocking" else function.future)
        if form == "future":
            result.result(WAIT_S)
    assert events_of(caller) == ["rpcwheel.failback_queued"]
    timer.advance(1)
    (delivery,) = spans.deliveries(1)
    assert called.wait(WAIT_S)
    assert seen == [ids(delivery)]


def test_an_attempt_that_ends_with_its_loop_is_lost(spans):
    function, running = Function(ConnectionError("refused")), threading.Event()

    async def attempt() -> None:
        await function.aio()
        running.set()
        await asyncio.sleep(WAIT_S)

    async def serve() -> None:
        policy = FailbackPolicy(retry_on=ConnectionError, backoff=0, name="orders")
        failback = FailbackInvoker(policy)
        with spans.caller():
            await failback.invoke(attempt)
        assert await aio_wait_until(running.is_set)
        invokers.append(failback)

    invokers: list[FailbackInvoker] = []
    asyncio.run(serve())
    (delivery,) = spans.deliveries(1)
    assert delivery.attributes["rpcwheel.outcome"] == "lost"
    assert delivery.attributes["rpcwheel.reason"] == "its retry was cancelled"
    assert delivery.status.status_code is trace.StatusCode.ERROR
