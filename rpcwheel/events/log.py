"""Logging of events: the sink that is installed by default.

The loggers are `rpcwheel.timer`, `rpcwheel.failback`, `rpcwheel.call`, `rpcwheel.connection` and
`rpcwheel.registry`. Events that lose work are errors, failures that are tried again are warnings,
successes have the level info. The event itself is on the record as `record.event`, and `record.msg`
is the same for all events of a kind, so that log collectors can group them.

One event is one line. Names and error texts come from peers: whitespace in them becomes one space,
other characters that are not printable are escaped. A failed call is logged with its status and
details. Only errors without a status have a traceback, where they show a bug or a lost call. It is
in `record.exc_text`, escaped; `record.exc_info` is None, as some handlers print it as it came.

Lines are limited for each kind of event and each method (and status of its failure), target or
service. What was suppressed is counted; the number is logged with the next such line, at the next
event after the period, or when the process exits.
"""

import atexit
import logging
import os
import sys
import time
import traceback
from dataclasses import fields
from typing import Final, NamedTuple

from rpcwheel.errors import InstanceIdConflict, RpcWheelError

from . import events
from .rate_limit import RateLimiter, Suppressed

TIMER: Final = logging.getLogger("rpcwheel.timer")
FAILBACK: Final = logging.getLogger("rpcwheel.failback")
CALL: Final = logging.getLogger("rpcwheel.call")
CALLBACK: Final = logging.getLogger("rpcwheel.callback")
CONNECTION: Final = logging.getLogger("rpcwheel.connection")
REGISTRY: Final = logging.getLogger("rpcwheel.registry")
OTHER: Final = logging.getLogger("rpcwheel")
_LONGEST_ERROR: Final = 240
"""Characters of an error's text."""

_LONGEST_FIELD: Final = 500
"""Characters of any other text, and of a line of a traceback."""

_LONGEST_TRACEBACK: Final = 16_384
"""Characters of a traceback."""

_MOST_LINES: Final = 100
"""Lines of a traceback."""

BURST: Final = 10
"""Lines of one kind and subject in a period."""

PERIOD_S: Final = 10.0

SELDOM_S: Final = 1.0
"""Seconds between two lines about one queue that would otherwise be written for each call."""

RARELY_S: Final = 60.0
"""Seconds between two equal lines about one target, or one service of a registry. An outage may
last for days."""

_LIMITER: Final = RateLimiter()


class _Line(NamedTuple):
    logger: logging.Logger
    level: int
    subject: str
    """The fields that say what the event is about, separated by spaces: its rate is limited for
    each value of them."""
    text: str
    """A template over the event's fields, and those that `_words` adds."""
    traceback: bool = False
    """Whether an error without a status is logged with its traceback."""
    every_s: float = 0.0
    """It is written at most once in so many seconds for each subject; 0: at most `BURST` times in
    `PERIOD_S`."""
    ends: type[events.Event] | None = None
    """The kind of event that it is the end of, of the same subject: after such a line it is written
    in any case."""


_LINES: Final[dict[type[events.Event], _Line]] = {
    events.TaskSlow: _Line(
        TIMER,
        logging.WARNING,
        "timer task",
        "%(timer)s: task %(task)s held the timer's thread for %(duration_s).3f s; "
        "what may block belongs on an executor",
    ),
    events.TaskFailed: _Line(
        TIMER,
        logging.ERROR,
        "timer task",
        "%(timer)s: task %(task)s raised %(error)s",
        traceback=True,
    ),
    events.ExecutorRejected: _Line(
        TIMER, logging.WARNING, "timer task", "%(timer)s: task %(task)s was not taken: %(error)s"
    ),
    events.TooManyTimers: _Line(
        TIMER,
        logging.WARNING,
        "",
        "%(live)d timers are live, more than %(limit)d; use one for all "
        "(rpcwheel.timer.shared_timer), and stop those that are done with",
    ),
    events.FailbackQueued: _Line(
        FAILBACK,
        logging.WARNING,
        "name function",
        "%(call)s failed, next try in %(delay_s).3g s, %(pending)d pending: %(error)s",
    ),
    events.FailbackAttemptFailed: _Line(
        FAILBACK,
        logging.INFO,
        "name function",
        "%(call)s failed %(attempts)d times in %(waited_s).3g s, "
        "next try in %(delay_s).3g s: %(error)s",
    ),
    events.FailbackDelivered: _Line(
        FAILBACK,
        logging.INFO,
        "name function",
        "%(call)s delivered at try %(attempts)d, after %(waited_s).3g s",
    ),
    events.FailbackGaveUp: _Line(
        FAILBACK,
        logging.ERROR,
        "name function",
        "%(call)s abandoned after %(attempts)d tries in %(waited_s).3g s, %(reason)s: %(error)s",
        traceback=True,
    ),
    events.FailbackDropped: _Line(
        FAILBACK,
        logging.ERROR,
        "name function",
        "%(call)s dropped, the queue is full, %(pending)d pending: %(error)s",
        every_s=SELDOM_S,
    ),
    events.FailbackLost: _Line(
        FAILBACK,
        logging.ERROR,
        "name",
        "%(name)s: %(count)d call(s) not delivered, %(reason)s; "
        "the oldest waited %(oldest_s).3g s: %(functions)s",
    ),
    events.DeadLetterFailed: _Line(
        FAILBACK,
        logging.ERROR,
        "name function",
        "%(call)s: the dead_letter hook raised: %(error)s",
        traceback=True,
    ),
    events.CallSlow: _Line(
        CALL, logging.WARNING, "method", "%(method)s (%(side)s) still runs after %(elapsed_s).3g s"
    ),
    events.RetryScheduled: _Line(
        CALL,
        logging.INFO,
        "method",
        "%(method)s failed with %(code)s at try %(attempts)d, next try in %(delay_s).3g s",
    ),
    events.HedgeSent: _Line(
        CALL, logging.INFO, "method", "%(method)s: attempt %(attempt)d sent by hedging"
    ),
    events.RetryStopped: _Line(
        CALL,
        logging.INFO,
        "method",
        "%(method)s failed with %(code)s at try %(attempts)d, no other follows: %(reason)s",
    ),
    events.DefaultResponseUsed: _Line(
        CALL, logging.WARNING, "method", "%(method)s failed, answered with its default: %(error)s"
    ),
    events.StreamStalled: _Line(
        CALL, logging.WARNING, "method", "%(method)s cancelled, no message for %(silent_s).3g s"
    ),
    events.DeadlineExceededBeforeStart: _Line(
        CALL,
        logging.WARNING,
        "method",
        "%(method)s refused, its deadline passed %(late_s).3g s before its turn came",
    ),
    events.CallbackFailed: _Line(
        CALLBACK,
        logging.ERROR,
        "subject callback",
        "%(subject)s: %(callback)s raised %(error)s",
        traceback=True,
    ),
    events.HeartbeatMissed: _Line(
        CONNECTION,
        logging.INFO,
        "target",
        "%(target)s: heartbeat missed, %(misses)d in a row, "
        "nothing read for %(silent_s).3g s (%(answer)s)",
        every_s=RARELY_S,
    ),
    events.ConnectionDead: _Line(
        CONNECTION,
        logging.WARNING,
        "target",
        "%(target)s: connection dead, nothing read for %(silent_s).3g s, %(misses)d heartbeat(s) "
        "missed, %(calls)d call(s) in flight",
        every_s=RARELY_S,
    ),
    events.ConnectionReplaced: _Line(
        CONNECTION,
        logging.INFO,
        "target",
        "%(target)s: replaced its connection by a new one (number %(number)d); %(calls)d call(s) "
        "were in flight on the old one: %(reason)s",
        every_s=RARELY_S,
    ),
    events.ConnectionAlive: _Line(
        CONNECTION,
        logging.INFO,
        "target",
        "%(target)s: connection alive after %(after_s).3g s of silence",
        every_s=RARELY_S,
        ends=events.ConnectionDead,
    ),
    events.ConnectionIdle: _Line(
        CONNECTION,
        logging.INFO,
        "peer",
        "%(peer)s: unused for %(idle_s).3g s, %(reason)s, "
        "%(calls)d call(s) and %(streams)d stream(s) open",
        every_s=RARELY_S,
    ),
    events.ConnectionClosed: _Line(
        CONNECTION,
        logging.INFO,
        "peer",
        "%(peer)s: connection closed (%(how)s) after %(idle_s).3g s, %(reason)s",
    ),
    events.IdleCloseSkipped: _Line(
        CONNECTION,
        logging.INFO,
        "peer",
        "%(peer)s: connection not closed, %(reason)s",
        every_s=RARELY_S,
    ),
    events.IdleDetectionLimited: _Line(
        CONNECTION, logging.WARNING, "reason", "idle connections: %(reason)s"
    ),
    events.LateResponse: _Line(
        CALL,
        logging.WARNING,
        "name",
        "%(name)s: the answer to %(key)s came %(late_s).3g s after the call had %(ending)s",
    ),
    events.UnmatchedResponse: _Line(
        CALL,
        logging.WARNING,
        "name",
        "%(name)s: an answer came to %(key)s, which no call waits for",
    ),
    events.InstancePublished: _Line(
        REGISTRY,
        logging.INFO,
        "registry service instance",
        "%(registry)s: published %(service)s instance %(instance)s%(published)s",
    ),
    events.InstanceWithdrawn: _Line(
        REGISTRY,
        logging.INFO,
        "registry service instance",
        "%(registry)s: withdrew %(service)s instance %(instance)s",
    ),
    events.RegistryFailed: _Line(
        REGISTRY,
        logging.WARNING,
        "registry",
        "%(registry)s: %(attempted)s failed (%(next)s): %(error)s",
        every_s=RARELY_S,
    ),
    events.RegistryRecovered: _Line(
        REGISTRY,
        logging.INFO,
        "registry",
        "%(registry)s: the registry answers again after %(after_s).3g s",
        every_s=RARELY_S,
        ends=events.RegistryFailed,
    ),
    events.InstancesChanged: _Line(
        REGISTRY,
        logging.INFO,
        "registry service",
        "%(registry)s: %(service)s has %(number)s%(origin)s: %(change)s",
    ),
    events.InstancesRetained: _Line(
        REGISTRY,
        logging.WARNING,
        "registry service",
        "%(registry)s: %(number)s of %(service)s disappeared while the registry may have lost data "
        "(%(reason)s); kept as stale until the registry lists them again or stale_timeout is over",
        every_s=RARELY_S,
    ),
    events.RecordSkipped: _Line(
        REGISTRY,
        logging.WARNING,
        "registry service",
        "%(registry)s: ignored the record %(key)s of %(service)s, which is not a valid instance: "
        "%(error)s",
        every_s=RARELY_S,
    ),
    events.SnapshotFailed: _Line(
        REGISTRY,
        logging.WARNING,
        "registry path",
        "%(registry)s: cannot use the snapshot file %(path)s, which clients need only if they "
        "start while the registry is down: %(error)s",
    ),
    events.SubchannelUnhealthy: _Line(
        CONNECTION,
        logging.WARNING,
        "channel subchannel",
        "%(channel)s: %(subchannel)s is unhealthy and gets no calls: %(reason)s",
        every_s=RARELY_S,
    ),
    events.SubchannelHealthy: _Line(
        CONNECTION,
        logging.INFO,
        "channel subchannel",
        "%(channel)s: %(subchannel)s is healthy again, after %(after_s).3g s",
        every_s=RARELY_S,
        ends=events.SubchannelUnhealthy,
    ),
    events.StaleInstancesKept: _Line(
        CONNECTION,
        logging.WARNING,
        "channel",
        "%(channel)s: the registry has no instances any more; the channel keeps these as long as "
        "they answer: %(subchannels)s",
        every_s=RARELY_S,
    ),
    events.ShutdownStep: _Line(
        REGISTRY,
        logging.INFO,
        "server",
        "%(server)s is shutting down (%(reason)s): %(shutdown)s",
    ),
    events.WithdrawalFailed: _Line(
        REGISTRY,
        logging.WARNING,
        "server registry",
        "%(server)s has stopped, but could not be withdrawn from %(registry)s, which may "
        "list it until its lease ends%(because)s",
    ),
}


def log_event(event: events.Event) -> None:
    """Write `event` to its logger; one of a kind not known here goes to `rpcwheel`, level debug."""
    line = _LINES.get(type(event))
    if line is None:
        OTHER.debug("%r", event, extra={"event": event})
        return
    if not line.logger.isEnabledFor(line.level):
        return
    now_s = time.monotonic()
    suppressed = _LIMITER.admit(
        type(event),
        _subject(line, event),
        now_s,
        burst=1 if line.every_s else BURST,
        period_s=line.every_s or PERIOD_S,
        ends=line.ends,
    )
    if suppressed is not None:
        _write(line, event, suppressed)
    for one in _LIMITER.over(now_s):
        _report(one)


def _subject(line: _Line, event: events.Event) -> str:
    """What the rate limit tells apart: another failure of the same method must not be hidden."""
    parts = [_plain(getattr(event, name)) for name in line.subject.split()]
    error: BaseException | None = getattr(event, "error", None)
    if not line.every_s or isinstance(error, InstanceIdConflict):
        failure = getattr(event, "code", None) if error is None else _kind_of(error)
        parts += [failure] if failure else []
    return " ".join(parts)


def _write(line: _Line, event: events.Event, suppressed: int) -> None:
    error: BaseException | None = getattr(event, "error", None)
    traced = error if line.traceback and not _is_status(error) else None
    more = f"; {suppressed} more suppressed since the last such line" if suppressed else ""
    record = line.logger.makeRecord(
        line.logger.name,
        line.level,
        __file__,
        0,
        line.text + "%(more)s",
        (_words(event) | {"error": _one_line(error), "more": more},),
        None,  # formatters would print the error as it came
        "log_event",
        {"event": event},
    )
    if traced is not None:
        record.exc_text = _traceback(traced)
    line.logger.handle(record)


def _report(one: Suppressed) -> None:
    line = _LINES[one.kind]
    line.logger.log(
        line.level,
        "%s: %d more %s not logged within %.3g s",
        one.subject or line.logger.name,
        one.number,
        one.kind.__name__,
        one.period_s,
        extra={"event": one},
    )


def _report_all() -> None:
    for one in _LIMITER.flush():
        _report(one)


def _words(event: events.Event) -> dict[str, object]:
    """What the templates may name: the event's fields, and texts that are derived from them.

    Sequences of names are joined.
    """
    words: dict[str, object] = {}
    for field in fields(event):  # type: ignore[arg-type]  # each kind in _LINES is a dataclass
        value = getattr(event, field.name)
        if isinstance(value, tuple):
            value = ", ".join(value)
        words[field.name] = _plain(value) if isinstance(value, str) else value
    name, function = words.get("name"), words.get("function")
    words["call"] = function if name == function else f"{name}: {function}"
    match event:
        case events.InstancePublished():
            words["published"] = _published(event)
        case events.RegistryFailed():
            words["attempted"], words["next"] = _attempted(event), _next(event)
        case events.InstancesChanged():
            words["number"] = _number_of_instances(event.instances)
            words["origin"] = _ORIGINS.get(event.source, "")
            words["change"] = f"{event.added} added, {event.removed} removed"
            if not event.added and not event.removed:
                words["change"] = (
                    "none added or removed, but values or state changed"
                    if event.instances
                    else "the registry lists none"
                )
        case events.InstancesRetained():
            words["number"] = _number_of_instances(event.instances)
        case events.WithdrawalFailed():
            words["because"] = "" if event.error is None else f": {_one_line(event.error)}"
        case events.ShutdownStep():
            words["shutdown"] = _SHUTDOWN_STEPS.get(event.step, words["step"])
    return words


def _number_of_instances(number: int) -> str:
    return f"{number} instance" if number == 1 else f"{number} instances"


def _published(event: events.InstancePublished) -> str:
    status = "" if event.status == "UP" else f" with status {_plain(event.status)}"
    if not event.again:
        return status
    why = _REASONS_TO_REPUBLISH.get(event.again, _plain(event.again))
    return f"{status} again: {why}; it was missing for at most {event.away_s:.3g} s"


def _attempted(event: events.RegistryFailed) -> str:
    if isinstance(event.error, InstanceIdConflict):
        return "keeping an instance published"
    words = _REQUESTS.get(event.request)
    if words is None:
        return _plain(event.request)
    return words.format(_number_of_instances(event.items))


def _next(event: events.RegistryFailed) -> str:
    """What happens next."""
    if event.delay_s is None:
        return _NOT_REPEATED.get(event.request, "not tried again")
    when = f"in {event.delay_s:.3g} s" if event.delay_s else "now"
    if isinstance(event.error, InstanceIdConflict):
        return f"it is published again {when}"
    kept = "known instances are kept; " if event.request == "watch" else ""
    return f"{kept}next attempt {when}"


_REQUESTS: Final = {
    "publish": "publishing {}",
    "withdraw": "withdrawing {}",
    "renew": "renewing the lease of {}",
    "watch": "watching for changes",
    "lookup": "a lookup",
    "close": "closing the connection",
}

_NOT_REPEATED: Final = {
    "publish": "not tried again, as the registry is being closed",
    "withdraw": "not tried again; clients see the instances until their lease ends",
    "lookup": "the caller gets the last known instances, or this error",
    "close": "instances that are still published disappear when their lease ends",
}

_REASONS_TO_REPUBLISH: Final = {
    "missing": "its record had disappeared",
    "taken": "another process had replaced its record",
    "lease": "its lease had ended",
    "session": "the registry session had ended",
    "wiped": "the registry had lost its data",
}

_ORIGINS: Final = {
    "stale": ", some of which the registry does not list any more",
    "cache": " in the cache, as the registry has not answered yet",
}

_SHUTDOWN_STEPS: Final = {
    "withdraw": "withdrawing its instances from the registry",
    "not serving": "setting its health to NOT_SERVING",
    "wait": "still serving while clients learn of it (lame duck)",
    "stop": "accepting no more calls; calls in flight may finish",
    "closed": "finished",
}


def _is_status(error: BaseException | None) -> bool:
    """Whether it is a `grpc.RpcError`. Without importing grpc, which costs 0.1 s."""
    grpc = sys.modules.get("grpc")
    return grpc is not None and isinstance(error, grpc.RpcError)


def _kind_of(error: BaseException) -> str:
    """The status code of an error that has one, or its class."""
    try:
        if _is_status(error) and not isinstance(error, RpcWheelError):
            return str(error.code().name)  # type: ignore[attr-defined]
    except Exception:  # noqa: BLE001, S110 - a user's class; its name will do
        pass
    return type(error).__name__


def _one_line(error: BaseException | None) -> str:
    """The error in one short line, whatever its methods do: `UNAVAILABLE: no such host`."""
    kind = type(error).__name__
    try:
        text = str(error)
        if _is_status(error) and not isinstance(error, RpcWheelError):
            kind, text = error.code().name, error.details() or ""  # type: ignore[union-attr]
    except Exception:  # noqa: BLE001 - an error that cannot be printed must still be reported
        text = "(its text cannot be had)"
    return _plain(f"{kind}: {text}" if text else kind, _LONGEST_ERROR)


def _traceback(error: BaseException) -> str:
    """The traceback, escaped and indented; of a long one its beginning and its end."""
    lines = "".join(traceback.format_exception(error)).rstrip().split("\n")
    beginning, end = _fitting(lines), _fitting(lines[::-1])[::-1]
    left_out = len(lines) - len(beginning) - len(end)
    if left_out > 0:
        beginning.append(f"... {left_out:,} lines are left out ...")
    return "\n".join(f"  {line}" for line in beginning + end[max(-left_out, 0) :])


def _fitting(lines: list[str]) -> list[str]:
    """The first lines, escaped, that take at most half of what a traceback may have."""
    fitting: list[str] = []
    rest = _LONGEST_TRACEBACK // 2
    for line in lines[: _MOST_LINES // 2]:
        escaped = _escaped(line, _LONGEST_FIELD)
        rest -= len(escaped)
        if rest < 0:
            break
        fitting.append(escaped)
    return fitting


def _plain(text: str, longest: int = _LONGEST_FIELD) -> str:
    """The text with each run of whitespace as one space, and no other control characters."""
    return _escaped(" ".join(text.split()), longest)


def _escaped(text: str, longest: int) -> str:
    r"""The text, cut, with all that is not printable as Python escapes it: `\x1b`, `\u202e`."""
    beginning = text[:longest]
    if not beginning.isprintable():
        beginning = "".join(
            one if one.isprintable() else one.encode("unicode_escape").decode() for one in beginning
        )
    is_cut = len(text) > longest or len(beginning) > longest
    return f"{beginning[:longest]}..." if is_cut else beginning


atexit.register(_report_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_LIMITER.reset)
