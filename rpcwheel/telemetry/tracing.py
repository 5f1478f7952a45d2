"""Traces with OpenTelemetry: events of the spans of calls, and a span for each delivery.

`start` switches them on. It needs `opentelemetry-api`; without an SDK nothing is recorded, and
before `start` nothing is imported.

* Events about attempts of a call (`NAMES`) are added to the current span. They are emitted in the
  context of the caller, so it is the span that was current when the call was made.
* Events about a connection are added to the spans of the calls in flight on it. Each transport has
  these spans; a call that begins adds the current span if it is recording (0.5 µs), and removes it
  at its end.
* A delivery of failback, perhaps hours later, is a span of its own with a link to the span of the
  caller. Calls made during the delivery are its children.

Attributes are those of the log records: escaped, cut, without content or metadata of requests.
Nothing here raises. The first exception of a tracer in each function is logged.
"""

from __future__ import annotations

import functools
import logging
import math
import sys
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from rpcwheel.events import (
    ConnectionDead,
    ConnectionReplaced,
    DefaultResponseUsed,
    Event,
    FailbackDropped,
    FailbackQueued,
    HedgeSent,
    RetryScheduled,
    RetryStopped,
    StreamStalled,
    add_sink,
)
from rpcwheel.events.log import error_kind, error_text, field_values, plain_text, traceback_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

P = ParamSpec("P")
R = TypeVar("R")

NAMES: Final[dict[type[Event], str]] = {
    RetryScheduled: "rpcwheel.retry",
    RetryStopped: "rpcwheel.retry_stopped",
    HedgeSent: "rpcwheel.hedge",
    DefaultResponseUsed: "rpcwheel.default_response",
    StreamStalled: "rpcwheel.stream_stalled",
    FailbackQueued: "rpcwheel.failback_queued",
    FailbackDropped: "rpcwheel.failback_dropped",
    ConnectionDead: "rpcwheel.connection_dead",
    ConnectionReplaced: "rpcwheel.reconnect",
}
"""The names of span events."""

ABOUT_CONNECTIONS: Final = (ConnectionDead, ConnectionReplaced)
"""Events that `add_to_calls` adds, because they are not emitted in the context of a call."""

CONVENTIONS: Final = {
    "method": "rpc.method",
    "code": "rpc.response.status_code",
    "error_type": "error.type",
}
"""Attributes that OpenTelemetry's semantic conventions name, by the name of the field."""

PREFIX: Final = "rpcwheel."
"""The prefix of all other attributes."""

_LOG: Final = logging.getLogger("rpcwheel")


class _Api:
    """The modules of OpenTelemetry; None until `start`."""

    trace: Any = None
    context: Any = None
    propagate: Any = None
    tracer: Any = None


_REPORTED: Final[set[str]] = set()


def _report(function: str) -> None:
    """Log the current exception, once for each function."""
    if function not in _REPORTED:
        _REPORTED.add(function)
        _LOG.exception(
            "OpenTelemetry raised in %s; it is still called, but later exceptions are not logged",
            function,
        )


def _contained(function: Callable[P, R]) -> Callable[P, R | None]:
    """Do nothing and return None before `start`, or if OpenTelemetry raises."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R | None:
        if _Api.trace is None:
            return None
        try:
            return function(*args, **kwargs)
        except Exception:  # noqa: BLE001 - of a tracer, or of a span processor of the user
            _report(function.__name__)
            return None

    return call


def start() -> None:
    """Add events and spans to traces from now on. Idempotent.

    Raises:
        ImportError: `opentelemetry-api` is not installed.
    """
    from opentelemetry import context, propagate, trace

    _Api.context, _Api.propagate = context, propagate
    # It uses an SDK that is installed later, too.
    _Api.tracer = trace.get_tracer("rpcwheel", sys.modules["rpcwheel"].__version__)
    _Api.trace = trace
    add_sink(_add_to_current)


# --- Events ---


def _add_to_current(event: Event) -> None:
    """Add an event to the current span. A sink: its exceptions are reported by `emit`."""
    name = NAMES.get(type(event))
    if name is None or isinstance(event, ABOUT_CONNECTIONS):
        return
    span = _Api.trace.get_current_span()
    if span.is_recording():
        span.add_event(name, _attributes(event))


def begin_call(spans: dict[object, Any]) -> object | None:
    """Note the current span for a call that begins on a connection, if the span is recording.

    Returns:
        The key to remove from `spans` at the end of the call; None if nothing was noted.
    """
    if _Api.trace is None:
        return None
    try:
        span = _Api.trace.get_current_span()
        if not span.is_recording():
            return None
    except Exception:  # noqa: BLE001 - as in `_contained`, which costs 0.1 µs
        _report("begin_call")
        return None
    key = object()  # several calls may have the same span
    spans[key] = span
    return key


@_contained
def add_to_calls(event: Event, spans: dict[object, Any]) -> None:
    """Add an event about a connection to the spans of the calls in flight on it."""
    different = {id(span): span for span in spans.copy().values()}
    attributes = _attributes(event) if different else {}
    for span in different.values():
        if span.is_recording():
            span.add_event(NAMES[type(event)], attributes)


def _attributes(event: Event) -> dict[str, str | float]:
    """Return the fields of an event; without infinite times, which are not valid in JSON."""
    values = field_values(event)
    return {
        CONVENTIONS.get(name, PREFIX + name): value.removeprefix("/")
        if name == "method" and isinstance(value, str)
        else value
        for name, value in values.items()
        if value is not None and value != math.inf
    }


# --- Deliveries ---


@_contained
def begin_delivery(queue: str, label: str, attempt: int) -> Any:
    """Begin the span of a delivery, and make it the current one in the running context.

    The label is the full name of a method, or the name of a function. The `attempt` of the first
    delivery is 2, because the caller has made the first one. Returns None if there is no SDK.
    """
    trace, name = _Api.trace, plain_text(label)
    attributes = {"rpcwheel.name": plain_text(queue), "rpcwheel.attempt": attempt}
    if label.startswith("/"):
        attributes |= {"rpc.system.name": "grpc", "rpc.method": name.removeprefix("/")}
    else:
        attributes |= {"rpcwheel.function": name}
    caller = trace.get_current_span().get_span_context()
    span = _Api.tracer.start_span(
        f"rpcwheel.failback {name}",
        context=trace.set_span_in_context(trace.INVALID_SPAN),  # not a child: the caller has ended
        kind=trace.SpanKind.INTERNAL,
        attributes=attributes,
        links=[trace.Link(caller)] if caller.is_valid else [],
    )
    if not span.get_span_context().is_valid:
        return None
    make_current(span)
    return span


def carrier() -> dict[str, str]:
    """Return the trace context of the current span, to be stored; empty without one."""
    return _carrier() or {}


@_contained
def _carrier() -> dict[str, str]:
    entries: dict[str, str] = {}
    if _Api.trace.get_current_span().get_span_context().is_valid:
        _Api.propagate.inject(entries)
        entries.pop("baggage", None)  # values of the program's own, which may be confidential
    return entries


@_contained
def make_stored_current(stored: dict[str, str]) -> None:
    """Make the span of a stored trace context the current one in the running context."""
    if stored:
        _Api.context.attach(_Api.propagate.extract(stored))


@_contained
def make_current(span: Any) -> None:
    """Make a span, if it is not None, the current one in the running context."""
    if span is not None:
        _Api.context.attach(_Api.trace.set_span_in_context(span))


@_contained
def set_outcome(
    span: Any, outcome: str, error: BaseException | None = None, reason: str = ""
) -> None:
    """Record how a delivery has ended: "delivered", "failed", "gave_up" or "lost".

    After "failed" another attempt follows; otherwise `reason` says why not. A span of None is
    ignored.
    """
    if span is None or not span.is_recording():
        return
    span.set_attribute("rpcwheel.outcome", outcome)
    if reason:
        span.set_attribute("rpcwheel.reason", plain_text(reason))
    if error is not None:
        _record_error(span, error)
    elif outcome == "lost":
        span.set_status(_Api.trace.StatusCode.ERROR, plain_text(reason))


def _record_error(span: Any, error: BaseException) -> None:
    """Record an error like `Span.record_exception`, but escaped and cut."""
    kind, text = error_kind(error), error_text(error)
    attributes = {"exception.type": type(error).__qualname__, "exception.message": text}
    if trace_back := traceback_of(error):
        attributes["exception.stacktrace"] = trace_back
    span.set_attribute("error.type", plain_text(kind))
    if kind != type(error).__name__:
        span.set_attribute("rpc.response.status_code", plain_text(kind))
    span.add_event("exception", attributes)
    span.set_status(_Api.trace.StatusCode.ERROR, text)


@_contained
def end(span: Any) -> None:
    """End the span of a delivery; None is ignored."""
    if span is not None:
        span.end()


def with_current_trace(
    metadata: Iterable[tuple[str, str | bytes]],
) -> tuple[tuple[str, str | bytes], ...]:
    """Return the metadata of a delivery, with the trace context of the current span.

    An instrumentation outside of rpcwheel has put that of the caller's span into the metadata of
    the call. Metadata without a trace context stays as it is.
    """
    pairs = tuple(metadata)
    replaced = _replace_trace(pairs)
    return pairs if replaced is None else replaced


@_contained
def _replace_trace(
    metadata: tuple[tuple[str, str | bytes], ...],
) -> tuple[tuple[str, str | bytes], ...]:
    fields = {name.lower() for name in _Api.propagate.get_global_textmap().fields}
    if not fields.intersection(key for key, _ in metadata):
        return metadata
    carrier: dict[str, str] = {}
    _Api.propagate.inject(carrier)
    own = ((key.lower(), value) for key, value in carrier.items())
    return (*(pair for pair in metadata if pair[0] not in fields), *own)
