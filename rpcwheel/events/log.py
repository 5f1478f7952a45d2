"""Logging of events: the sink that is installed by default.

The loggers are `rpcwheel.timer`, `rpcwheel.failback`, `rpcwheel.call`, `rpcwheel.callback`,
`rpcwheel.connection` and `rpcwheel.registry`. Lost work is logged as an error, a failure that is
retried as a warning, success as info. Each event class has its `log_line`.

One event is one line. Each field of the event is an attribute of the record (`rpcwheel_method`): a
string, a number or None. `record.msg` is the same for all events of a class, so that log collectors
can group them. Names and error texts may come from peers: whitespace in them becomes one space,
other characters that are not printable are escaped. A failed call is logged with its status code
and details. Only errors without a status have a traceback, if they show a bug or a lost call. It is
in `record.exc_text`, escaped. `record.exc_info` is None, because some handlers print it unescaped.

The rate is limited for each event class and subject. Suppressed lines are counted; the count is
logged with the next line of that subject, at the next event after the period, or when the process
exits.
"""

import atexit
import contextlib
import logging
import math
import os
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from rpcwheel.errors import InstanceIdConflict, RpcWheelError, time_text

from .events import Event, LogLine, plural
from .rate_limit import RateLimiter, Suppressed

MAX_LINE: Final = 600
"""Characters of a line. If it is longer, each text in it is cut to `MAX_SHORT`."""

MAX_TEXT: Final = 500
"""Characters of a name or another text, and of a line of a traceback."""

MAX_SHORT: Final = 80

MAX_ERROR: Final = 240
"""Characters of an error's text."""

MAX_TRACEBACK: Final = 16_384
"""Characters of a traceback."""

MAX_TRACEBACK_LINES: Final = 100

BURST: Final = 10
"""Lines of one class and subject in a period."""

PERIOD_S: Final = 10.0

LIMITER: Final = RateLimiter()

PREFIX: Final = "rpcwheel_"
"""The prefix of the attributes of records. Without it, `name` is the logger's, structlog's message
is `event`, and log stores have their own `service`, `source`, `status` and `error`."""

Value: TypeAlias = str | float | None

_OTHER: Final = logging.getLogger("rpcwheel")


def log_event(event: Event) -> None:
    """Write `event` to its logger. An event without a `log_line` is logged at level debug."""
    line: LogLine | None = getattr(event, "log_line", None)
    if line is None:
        _OTHER.debug("%r", event, extra=_attributes(type(event), {}))
        return
    if not event.logger.isEnabledFor(line.level):
        return
    now_s = time.monotonic()
    suppressed = LIMITER.admit(
        type(event),
        _subject(line, event),
        now_s,
        burst=1 if line.interval_s else BURST,
        period_s=line.interval_s or PERIOD_S,
        always_after=line.always_after,
    )
    if suppressed is not None:
        _write(line, event, suppressed)
    for count in LIMITER.sweep(now_s):
        _report(count)


def _subject(line: LogLine, event: Event) -> str:
    """Return the subject of the rate limit; different failures of a method have limits each."""
    names = event.subject_fields if line.subject is None else line.subject
    parts = [plain_text(getattr(event, name)) for name in names.split()]
    error: BaseException | None = getattr(event, "error", None)
    if not line.interval_s or isinstance(error, InstanceIdConflict):
        failure = getattr(event, "code", None) if error is None else error_kind(error)
        parts += [failure] if failure else []
    return " ".join(parts)


def _write(line: LogLine, event: Event, suppressed: int) -> None:
    error: BaseException | None = getattr(event, "error", None)
    more = f"; {suppressed} more suppressed since the last such line" if suppressed else ""
    template = line.template + "%(more)s"
    values = field_values(event)
    texts = _texts(event, values, more, MAX_TEXT)
    if len(template % texts) > MAX_LINE:
        texts = _texts(event, field_values(event, MAX_SHORT, MAX_SHORT), more, MAX_SHORT)
    record = event.logger.makeRecord(
        event.logger.name,
        line.level,
        __file__,
        log_event.__code__.co_firstlineno,
        template,
        (texts,),
        None,  # formatters would print the error unescaped
        "log_event",
        _attributes(type(event), values | {"suppressed": suppressed}),
    )
    if line.traceback and error is not None:
        record.exc_text = traceback_of(error)
    event.logger.handle(record)


def _report(count: Suppressed) -> None:
    line, logger = count.kind.log_line, count.kind.logger
    if line is not None:
        values = count._asdict() | {
            "kind": count.kind.__name__,
            "subject": plain_text(count.subject),
        }
        logger.log(
            line.level,
            "%s: %d more %s not logged within %g s",
            values["subject"] or logger.name,
            count.number,
            values["kind"],
            count.period_s,
            extra=_attributes(Suppressed, values),
        )


def report_suppressed() -> None:
    """Log how many lines were suppressed so far. At exit, or before a handler is removed."""
    for count in LIMITER.flush():
        _report(count)


def _attributes(kind: type, values: Mapping[str, Value]) -> dict[str, Value]:
    """Return what a record of an event of class `kind` has beyond the attributes of `logging`.

    An infinite time is None, because JSON has no infinity.
    """
    attributes: dict[str, Value] = {f"{PREFIX}event": kind.__name__}
    for name, value in values.items():
        attributes[f"{PREFIX}{name}"] = None if value == math.inf else value
    return attributes


def field_values(
    event: Event, max_text: int = MAX_TEXT, max_error: int = MAX_ERROR
) -> dict[str, Value]:
    """Return the event's fields with texts escaped and cut, and the `error_type` of its error."""
    values: dict[str, Value] = {}
    for name in event.__match_args__:
        value = getattr(event, name)
        if isinstance(value, BaseException):
            values["error_type"] = plain_text(error_kind(value), max_text)
            value = error_text(value, max_error)
        elif isinstance(value, tuple):
            value = plain_text(", ".join(value), max_text)
        elif isinstance(value, str):
            value = plain_text(value, max_text)
        values[name] = value
    return values


def _texts(event: Event, values: dict[str, Value], more: str, max_text: int) -> dict[str, Value]:
    """Return what a template may name."""
    name, function = values.get("name"), values.get("function")
    call = function if name == function else f"{name}: {function}"
    computed = {key: plain_text(text, max_text) for key, text in event.log_texts().items()}
    error = values.get("error") or "no answer"
    line = event.log_line
    counted = line.counted_fields if line is not None else ()
    counts = {f"{field} {noun}": _with_unit(values[field], noun) for field, noun in counted}
    return {**values, **counts, "call": call, **computed, "error": error, "more": more}


def _with_unit(value: Any, unit: str) -> str:
    return time_text(value) if unit == "s" else plural(value, unit)


def _has_status(error: BaseException) -> bool:
    """Whether it is a `grpc.RpcError`. Does not import grpc, which costs 0.1 s."""
    grpc = sys.modules.get("grpc")
    return grpc is not None and isinstance(error, grpc.RpcError)


def _is_call_error(error: BaseException) -> bool:
    """Whether it is an error of gRPC's own, whose `str` has many lines."""
    return _has_status(error) and not isinstance(error, RpcWheelError)


def status_text(error: BaseException | None) -> str:
    """Return the text of an error for a status: one line, escaped; "" for None."""
    return "" if error is None else error_text(error)


def waiting_calls(count: int) -> str:
    """Describe the number of calls that wait, for a status; "" for none."""
    return f"{count:,} call{' waits' if count == 1 else 's wait'}" if count else ""


def error_kind(error: BaseException) -> str:
    """Return the status code of a call's error, else the name of its class."""
    with contextlib.suppress(Exception):  # methods of a user's class
        if _is_call_error(error):
            return str(error.code().name)  # type: ignore[attr-defined]
    return type(error).__name__


def error_text(error: BaseException, longest: int = MAX_ERROR) -> str:
    """Return the error in one short line, such as `UNAVAILABLE: no such host`."""
    try:
        text = error.details() if _is_call_error(error) else str(error)  # type: ignore[attr-defined]
    except Exception:  # noqa: BLE001 - methods of a user's class; the error must be reported
        text = "(its text cannot be read)"
    kind = error_kind(error)
    return plain_text(f"{kind}: {text}" if text else kind, longest)


def traceback_of(error: BaseException) -> str | None:
    """Return the traceback, escaped and indented; if it is long, without lines in its middle.

    None if it has none, or for a gRPC status, whose traceback does not say more.
    """
    has_frames = any((error.__traceback__, error.__cause__, error.__context__))
    if _has_status(error) or not has_frames:
        return None
    lines = "".join(traceback.format_exception(error)).rstrip().split("\n")
    first, last = _half(lines), _half(lines[::-1])[::-1]
    left_out = len(lines) - len(first) - len(last)
    if left_out > 0:
        first.append(f"... {left_out:,} lines are left out ...")
    return "\n".join(f"  {line}" for line in first + last[max(-left_out, 0) :])


def _half(lines: list[str]) -> list[str]:
    """Return the first lines, escaped, that fit into half of the longest traceback."""
    half: list[str] = []
    left = MAX_TRACEBACK // 2
    for line in lines[: MAX_TRACEBACK_LINES // 2]:
        escaped = _escaped(line, MAX_TEXT)
        left -= len(escaped)
        if left < 0:
            break
        half.append(escaped)
    return half


def plain_text(text: str, longest: int = MAX_TEXT) -> str:
    """Return the text with one space for each run of whitespace, and escaped."""
    return _escaped(" ".join(text.split()), longest)


def _escaped(text: str, longest: int) -> str:
    r"""Return the text, cut, with Python's escapes for what is not printable: `\x1b`, `\u202e`."""
    beginning = text[:longest]
    if not beginning.isprintable():
        beginning = "".join(
            char if char.isprintable() else char.encode("unicode_escape").decode()
            for char in beginning
        )
    is_cut = len(text) > longest or len(beginning) > longest
    return f"{beginning[:longest]}..." if is_cut else beginning


atexit.register(report_suppressed)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=LIMITER.reset)
