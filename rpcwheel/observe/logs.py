"""How events read in the log: the sink that is there from the start.

Timers write to the logger `rpcwheel.timer`, failback to `rpcwheel.failback`, calls to
`rpcwheel.call`, connections to `rpcwheel.connection`, registries and what is published there to
`rpcwheel.registry`. What loses work is an error, what will be tried again a warning, what went
right is told at level info. The event itself is on the record as `record.event`, and `record.msg`
is the same for all events of a kind, so that log collectors can group them.
"""

import logging
import math
import time
from dataclasses import fields
from typing import Final, NamedTuple

from . import events

TIMER: Final = logging.getLogger("rpcwheel.timer")
FAILBACK: Final = logging.getLogger("rpcwheel.failback")
CALL: Final = logging.getLogger("rpcwheel.call")
CONNECTION: Final = logging.getLogger("rpcwheel.connection")
REGISTRY: Final = logging.getLogger("rpcwheel.registry")
OTHER: Final = logging.getLogger("rpcwheel")
_LONGEST: Final = 240
"""Characters of an error's text: a gRPC error is ten lines long and says the same in two."""


SELDOM_S: Final = 1.0
"""Seconds between two lines that say the same of one queue for each of its calls."""

RARELY_S: Final = 60.0
"""Seconds between two lines that say the same of one target, or of one service of a registry: what
is gone may stay so for days."""

MOST_SAID: Final = 4096
"""Names remembered; clients come from any number of ports."""

_SUBJECTS: Final = (
    {"name"},
    {"target"},
    {"peer"},
    {"channel", "member"},
    {"registry", "service"},
    {"registry"},
)
"""What an event may be about, by its fields; the first that it has counts."""

_SAID: Final[dict[tuple[type, str], tuple[float, int]]] = {}
"""When such a line was last written, by kind and name, and how many were held back since. Without a
lock, as a finalizer may log in the middle of it: a line more or a count less does no harm."""


class _Line(NamedTuple):
    logger: logging.Logger
    level: int
    text: str
    """A template over the event's fields, with some more: `said` is its error in one line, `call`
    the failback's name and the function, or one of them where both are the same, `next` when it is
    tried again, and `back` why and after how long something is there once more."""
    traceback: bool = False
    every_s: float = 0.0
    """It is written at most once in so many seconds for each of what `_subject` names; the
    template's `held` tells of the others."""
    ends: type | None = None
    """The kind of event that it is the end of: after such a line it is written in any case."""


_LINES: Final[dict[type, _Line]] = {
    events.TaskSlow: _Line(
        TIMER,
        logging.WARNING,
        "%(timer)s: task %(task)s held the timer's thread for %(duration_s).3f s; "
        "what may block belongs on an executor",
    ),
    events.TaskFailed: _Line(
        TIMER, logging.ERROR, "%(timer)s: task %(task)s raised %(said)s", traceback=True
    ),
    events.HandOffRefused: _Line(
        TIMER, logging.WARNING, "%(timer)s: task %(task)s was not taken: %(said)s"
    ),
    events.TimersTooMany: _Line(
        TIMER,
        logging.WARNING,
        "%(live)d timers are live, more than %(limit)d; use one for all "
        "(rpcwheel.timer.shared_timer), and stop those that are done with",
    ),
    events.CallParked: _Line(
        FAILBACK,
        logging.WARNING,
        "%(call)s failed, next try in %(delay_s).3g s, %(pending)d pending: %(said)s",
    ),
    events.CallRetried: _Line(
        FAILBACK,
        logging.INFO,
        "%(call)s failed %(attempts)d times in %(waited_s).3g s, "
        "next try in %(delay_s).3g s: %(said)s",
    ),
    events.CallDelivered: _Line(
        FAILBACK,
        logging.INFO,
        "%(call)s delivered at try %(attempts)d, after %(waited_s).3g s",
    ),
    events.CallAbandoned: _Line(
        FAILBACK,
        logging.ERROR,
        "%(call)s abandoned after %(attempts)d tries in %(waited_s).3g s, %(reason)s: %(said)s",
        traceback=True,
    ),
    events.CallDropped: _Line(
        FAILBACK,
        logging.ERROR,
        "%(call)s dropped, the queue is full, %(pending)d pending: %(said)s%(held)s",
        every_s=SELDOM_S,
    ),
    events.CallsUndelivered: _Line(
        FAILBACK,
        logging.ERROR,
        "%(name)s: %(count)d call(s) not delivered, %(reason)s; "
        "the oldest waited %(oldest_s).3g s: %(functions)s",
    ),
    events.DeadLetterFailed: _Line(
        FAILBACK,
        logging.ERROR,
        "%(call)s: the dead_letter hook raised: %(said)s",
        traceback=True,
    ),
    events.CallSlow: _Line(
        CALL, logging.WARNING, "%(method)s (%(side)s) still runs after %(elapsed_s).3g s"
    ),
    events.CallRetrying: _Line(
        CALL,
        logging.INFO,
        "%(method)s failed with %(code)s at try %(attempts)d, next try in %(delay_s).3g s",
    ),
    events.CallNotRetried: _Line(
        CALL,
        logging.INFO,
        "%(method)s failed with %(code)s at try %(attempts)d, no other follows: %(reason)s",
    ),
    events.CallExcused: _Line(
        CALL, logging.WARNING, "%(method)s failed, answered with its default: %(said)s"
    ),
    events.StreamSilent: _Line(
        CALL, logging.WARNING, "%(method)s cancelled, no message for %(silent_s).3g s"
    ),
    events.CallLate: _Line(
        CALL,
        logging.WARNING,
        "%(method)s refused, its deadline passed %(late_s).3g s before its turn came",
    ),
    events.HookFailed: _Line(
        CALL, logging.ERROR, "%(method)s: a %(hook)s raised %(said)s", traceback=True
    ),
    events.ListenerFailed: _Line(
        CONNECTION,
        logging.ERROR,
        "%(target)s: listener %(listener)s raised %(said)s%(held)s",
        traceback=True,
        every_s=RARELY_S,
    ),
    events.HeartbeatMissed: _Line(
        CONNECTION,
        logging.INFO,
        "%(target)s: heartbeat missed, %(misses)d in a row, "
        "nothing read for %(silent_s).3g s (%(answer)s)%(held)s",
        every_s=RARELY_S,
    ),
    events.ConnectionDead: _Line(
        CONNECTION,
        logging.WARNING,
        "%(target)s: connection dead, nothing read for %(silent_s).3g s, %(misses)d heartbeat(s) "
        "missed, %(calls)d call(s) in flight%(held)s",
        every_s=RARELY_S,
    ),
    events.ConnectionReplaced: _Line(
        CONNECTION,
        logging.INFO,
        "%(target)s: connection %(number)d in the place of the last, %(reason)s, "
        "which had %(calls)d call(s) in flight%(held)s",
        every_s=RARELY_S,
    ),
    events.ConnectionAlive: _Line(
        CONNECTION,
        logging.INFO,
        "%(target)s: connection alive after %(after_s).3g s of silence%(held)s",
        every_s=RARELY_S,
        ends=events.ConnectionDead,
    ),
    events.ConnectionIdle: _Line(
        CONNECTION,
        logging.INFO,
        "%(peer)s: unused for %(idle_s).3g s, %(reason)s, "
        "%(calls)d call(s) and %(streams)d stream(s) open%(held)s",
        every_s=RARELY_S,
    ),
    events.ConnectionClosed: _Line(
        CONNECTION,
        logging.INFO,
        "%(peer)s: connection closed (%(how)s) after %(idle_s).3g s, %(reason)s",
    ),
    events.ConnectionKept: _Line(
        CONNECTION,
        logging.INFO,
        "%(peer)s: connection not closed, %(reason)s%(held)s",
        every_s=RARELY_S,
    ),
    events.IdleLimited: _Line(CONNECTION, logging.WARNING, "idle connections: %(reason)s"),
    events.AnswerLate: _Line(
        CALL,
        logging.WARNING,
        "%(name)s: the answer to %(key)s came %(late_s).3g s after the call had %(ending)s",
    ),
    events.AnswerUnknown: _Line(
        CALL, logging.WARNING, "%(name)s: an answer came to %(key)s, which no call waits for"
    ),
    events.InstancePublished: _Line(
        REGISTRY, logging.INFO, "%(registry)s: %(service)s at %(instance)s is published%(back)s"
    ),
    events.InstanceWithdrawn: _Line(
        REGISTRY, logging.INFO, "%(registry)s: %(service)s at %(instance)s is withdrawn"
    ),
    events.RegistryFailed: _Line(
        REGISTRY,
        logging.WARNING,
        "%(registry)s: %(request)s failed, %(items)d item(s), %(next)s: %(said)s%(held)s",
        every_s=RARELY_S,
    ),
    events.RegistryRecovered: _Line(
        REGISTRY,
        logging.INFO,
        "%(registry)s: the registry answers again, after %(after_s).3g s%(held)s",
        every_s=RARELY_S,
        ends=events.RegistryFailed,
    ),
    events.InstancesChanged: _Line(
        REGISTRY,
        logging.INFO,
        "%(registry)s: %(service)s has %(instances)d instance(s) (%(source)s), "
        "%(added)d more and %(removed)d gone",
    ),
    events.InstancesHeld: _Line(
        REGISTRY,
        logging.WARNING,
        "%(registry)s: %(service)s keeps %(instances)d instance(s) that the registry has lost, "
        "%(reason)s%(held)s",
        every_s=RARELY_S,
    ),
    events.RecordSkipped: _Line(
        REGISTRY,
        logging.WARNING,
        "%(registry)s: %(service)s: the record %(key)s is skipped: %(said)s%(held)s",
        every_s=RARELY_S,
    ),
    events.SnapshotFailed: _Line(
        REGISTRY,
        logging.WARNING,
        "%(registry)s: the file %(path)s can't be used, which harms only a start while the "
        "registry is down: %(said)s",
    ),
    events.MemberDown: _Line(
        CONNECTION,
        logging.WARNING,
        "%(channel)s: %(member)s is down, and not called until it answers a probe: "
        "%(reason)s%(held)s",
        every_s=RARELY_S,
    ),
    events.MemberUp: _Line(
        CONNECTION,
        logging.INFO,
        "%(channel)s: %(member)s is up again, after %(after_s).3g s%(held)s",
        every_s=RARELY_S,
        ends=events.MemberDown,
    ),
    events.ServingEnds: _Line(REGISTRY, logging.INFO, "%(server)s ends, %(step)s: %(reason)s"),
}


def log_event(event: events.Event) -> None:
    """Write `event` to its logger; one of a kind not known here goes to `rpcwheel`, level debug."""
    line = _LINES.get(type(event))
    if line is None:
        OTHER.debug("%r", event, extra={"event": event})
        return
    if line.logger.isEnabledFor(line.level):
        told = _told(event)
        if line.every_s:
            name = _subject(told)
            begun = _SAID.get((line.ends, name)) if line.ends else None
            held = _held_back((type(event), name), line.every_s, time.monotonic(), begun)
            if held is None:
                return
            told["held"] = f"; {held} more since the last such line" if held else ""
        error: BaseException | None = getattr(event, "error", None)
        line.logger.log(
            line.level,
            line.text,
            told | {"said": _one_line(error)},
            exc_info=error if line.traceback else None,
            extra={"event": event},
        )


def _held_back(
    key: tuple[type, str], every_s: float, now_s: float, begun: tuple[float, int] | None
) -> int | None:
    """How many lines were held back since the last one; None if this one is to be, too."""
    last_s, held = _SAID.get(key, (-math.inf, 0))
    if now_s - last_s < every_s and not (begun and begun[0] > last_s):
        _SAID[key] = last_s, held + 1
        return None
    if len(_SAID) >= MOST_SAID:
        _SAID.clear()
    _SAID[key] = now_s, 0
    return held


def _told(event: events.Event) -> dict[str, object]:
    """The event's fields, and those that `_Line.text` has beside; sequences of names joined."""
    told: dict[str, object] = {}
    for field in fields(event):  # type: ignore[arg-type]  # each kind in _LINES is a dataclass
        value = getattr(event, field.name)
        told[field.name] = ", ".join(value) if isinstance(value, tuple) else value
    name, function, again = told.get("name"), told.get("function"), told.get("again")
    told["call"] = function if name == function else f"{name}: {function}"
    delay_s = told.get("delay_s")
    told["next"] = "not tried again"
    if delay_s is not None:
        told["next"] = f"next try in {delay_s:.3g} s" if delay_s else "tried again at once"
    told["back"] = f" again ({again}), away for up to {told['away_s']:.3g} s" if again else ""
    return told


def _subject(told: dict[str, object]) -> str:
    """What an event is about: of one subject, lines of a kind are held back."""
    for names in _SUBJECTS:
        if names <= told.keys():
            return " ".join(str(told[name]) for name in sorted(names))
    return ""


def _one_line(error: BaseException | None) -> str:
    """The error in one short line, whatever its `__str__` does."""
    kind = type(error).__name__
    try:
        text = " ".join(str(error).split())
    except Exception:  # noqa: BLE001 - an error that cannot be printed must still be reported
        text = "(its text cannot be had)"
    return f"{kind}: {text}"[:_LONGEST] if text else kind
