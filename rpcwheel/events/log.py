"""Logging of events: the sink that is installed by default.

The loggers are `rpcwheel.timer`, `rpcwheel.failback`, `rpcwheel.call`, `rpcwheel.callback`,
`rpcwheel.connection` and `rpcwheel.registry`. Lost work is logged as an error, a failure that is
retried as a warning, success as info. Each event class has its `log_line`.

One event is one line. The event itself is `record.event`. `record.msg` is the same for all events
of a class, so that log collectors can group them. Names and error texts may come from peers:
whitespace in them becomes one space, other characters that are not printable are escaped. A failed
call is logged with its status code and details. Only errors without a status have a traceback, if
they show a bug or a lost call. It is in `record.exc_text`, escaped. `record.exc_info` is None,
because some handlers print it unescaped.

The rate is limited for each event class and subject. Suppressed lines are counted; the count is
logged with the next line of that subject, at the next event after the period, or when the process
exits.
"""

import atexit
import contextlib
import logging
import os
import sys
import time
import traceback
from dataclasses import fields
from typing import Final

from rpcwheel.errors import InstanceIdConflict, RpcWheelError

from .events import Event, LogLine
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

_OTHER: Final = logging.getLogger("rpcwheel")


def log_event(event: Event) -> None:
    """Write `event` to its logger. An event without a `log_line` is logged at level debug."""
    line: LogLine | None = getattr(event, "log_line", None)
    if line is None:
        _OTHER.debug("%r", event, extra={"event": event})
        return
    if not line.logger.isEnabledFor(line.level):
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
    parts = [_plain(getattr(event, name)) for name in line.subject.split()]
    error: BaseException | None = getattr(event, "error", None)
    if not line.interval_s or isinstance(error, InstanceIdConflict):
        failure = getattr(event, "code", None) if error is None else _error_kind(error)
        parts += [failure] if failure else []
    return " ".join(parts)


def _write(line: LogLine, event: Event, suppressed: int) -> None:
    error: BaseException | None = getattr(event, "error", None)
    more = f"; {suppressed} more suppressed since the last such line" if suppressed else ""
    template = line.template + "%(more)s"
    texts = _texts(event, MAX_TEXT, MAX_ERROR)
    if len(template % (texts | {"more": more})) > MAX_LINE:
        texts = _texts(event, MAX_SHORT, MAX_SHORT)
    record = line.logger.makeRecord(
        line.logger.name,
        line.level,
        __file__,
        0,
        template,
        (texts | {"more": more},),
        None,  # formatters would print the error unescaped
        "log_event",
        {"event": event},
    )
    if line.traceback and error is not None and not _has_status(error) and _has_frames(error):
        record.exc_text = _traceback(error)
    line.logger.handle(record)


def _report(count: Suppressed) -> None:
    line = count.kind.log_line
    if line is not None:
        line.logger.log(
            line.level,
            "%s: %d more %s not logged within %.3g s",
            _plain(count.subject) or line.logger.name,
            count.number,
            count.kind.__name__,
            count.period_s,
            extra={"event": count},
        )


def _report_all() -> None:
    for count in LIMITER.flush():
        _report(count)


def _texts(event: Event, max_text: int, max_error: int) -> dict[str, object]:
    """Return what a template may name: the event's fields, escaped, and its `log_texts`."""
    values = {field.name: getattr(event, field.name) for field in fields(event)}  # type: ignore[arg-type]
    name, function = values.get("name"), values.get("function")
    values["call"] = function if name == function else f"{name}: {function}"
    texts: dict[str, object] = {}
    for key, value in (values | event.log_texts()).items():
        text = ", ".join(value) if isinstance(value, tuple) else value
        texts[key] = _plain(text, max_text) if isinstance(text, str) else text
    return texts | {"error": _error_text(values.get("error"), max_error)}


def _has_status(error: BaseException) -> bool:
    """Whether it is a `grpc.RpcError`. Does not import grpc, which costs 0.1 s."""
    grpc = sys.modules.get("grpc")
    return grpc is not None and isinstance(error, grpc.RpcError)


def _has_frames(error: BaseException) -> bool:
    """Whether the error or an earlier one of its chain has a traceback."""
    return any((error.__traceback__, error.__cause__, error.__context__))


def _is_call_error(error: BaseException) -> bool:
    """Whether it is an error of gRPC's own, whose `str` has many lines."""
    return _has_status(error) and not isinstance(error, RpcWheelError)


def _error_kind(error: BaseException) -> str:
    """Return the status code of a call's error, else the name of its class."""
    with contextlib.suppress(Exception):  # methods of a user's class
        if _is_call_error(error):
            return str(error.code().name)  # type: ignore[attr-defined]
    return type(error).__name__


def _error_text(error: BaseException | None, longest: int) -> str:
    """Return the error in one short line, such as `UNAVAILABLE: no such host`."""
    if error is None:
        return "no answer"
    try:
        text = error.details() if _is_call_error(error) else str(error)  # type: ignore[attr-defined]
    except Exception:  # noqa: BLE001 - methods of a user's class; the error must be reported
        text = "(its text cannot be read)"
    kind = _error_kind(error)
    return _plain(f"{kind}: {text}" if text else kind, longest)


def _traceback(error: BaseException) -> str:
    """Return the traceback, escaped and indented; if it is long, without lines in its middle."""
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


def _plain(text: str, longest: int = MAX_TEXT) -> str:
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


atexit.register(_report_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=LIMITER.reset)
