"""Decides when a heartbeat is sent, and when a connection is dead.

The rules are Dubbo's (`HeartbeatTimerTask`, `ReconnectTimerTask`): a heartbeat is sent if nothing
was read, or nothing was written, for more than the interval, and again each tick until something is
read. A connection is dead if nothing was read for more than the timeout. Both comparisons are
strict. An unused connection gets no heartbeats. Added here:

* A connection is dead only after `MISSES_UNTIL_DEAD` heartbeats in a row without an answer: no
  answer came for a tick, or the connection was broken. A late answer counts. A status from a proxy
  and an error in this process do not count as silence.
* If this process stalled (SIGSTOP, suspend, a blocked event loop), which a look much later than
  planned shows, the misses are reset and the stalled time is subtracted from the silence.
* Heartbeats have a random delay, so that connections that became silent together do not send
  together, and are due on a coarse grid of the clock, so that several share a wake-up. Deaths have
  a random delay too; otherwise all clients would reconnect to a restarted server at once.
* No heartbeat reopens a connection that the server closed because it was idle.

Contains no I/O: the caller gives the time and the activity of the connection, which other threads
may stamp meanwhile, and carries out the action that is returned. Events and state changes are
appended to `reports`. Not thread-safe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rpcwheel.durations import NEVER, to_seconds
from rpcwheel.events.events import ConnectionAlive, ConnectionDead, HeartbeatMissed

from .rules import HeartbeatState, Reconnect, Send, StateChanged

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.events import Event
    from rpcwheel.transport.state import ActivityStamps

    from .rules import HeartbeatRules

PAST: Final = -NEVER

MISSES_UNTIL_DEAD: Final = 2
"""Heartbeats in a row that must be missed before a connection is dead: one answer may get lost."""

MAX_IN_FLIGHT: Final = 8
"""Heartbeats in flight at a time. Beyond that the youngest one is given up for the next one."""

_INACTIVE: Final = frozenset({HeartbeatState.OFF, HeartbeatState.CLOSED})
_NOT_ANSWERING: Final = frozenset({HeartbeatState.SUSPECT, HeartbeatState.DEAD})


class Silence:
    """How long nothing was read from a connection, and how often that was seen."""

    def __init__(self, start_ns: int | None) -> None:
        """Begin at `start_ns`; None: with the first use."""
        self._ignored_until_ns = PAST  # activity up to here belongs to a connection that is gone
        self._last_read_ns = PAST  # on the present connection
        self._reported_start_ns = start_ns  # the same across reconnects, for reports
        self.since_ns = start_ns
        """When it began; None: the connection was not used."""
        self.stalled_ns = 0
        """How long this process stalled during the silence."""
        self.misses = 0
        """Heartbeats in a row that were missed and count towards death."""
        self.dead_at_ns = NEVER
        """When the connection is dead; set when the misses are enough."""

    def seconds(self, now_ns: int) -> float:
        """How long it lasts, for reports."""
        start_ns = self._reported_start_ns
        return 0.0 if start_ns is None else to_seconds(max(0, now_ns - start_ns))

    def counts(self, at_ns: int) -> bool:
        """Whether an activity at this time is one of the present connection."""
        return at_ns > self._ignored_until_ns

    def broken_ns(self, activity: ActivityStamps, now_ns: int) -> int | None:
        """Take an activity into account. Returns when something was read that is new; else None."""
        read_ns, write_ns = activity.last_read_ns, activity.last_write_ns
        if read_ns is not None and self.counts(read_ns):
            return read_ns if read_ns > self._last_read_ns else None
        if write_ns is not None and self.counts(write_ns):
            self.start(min(write_ns, now_ns))
        return None

    def start(self, at_ns: int) -> None:
        """Begin, unless it has begun."""
        if self.since_ns is None:
            self.since_ns = at_ns
        if self._reported_start_ns is None:
            self._reported_start_ns = at_ns

    def restart(self, read_ns: int) -> None:
        """Begin again: something was read."""
        self._last_read_ns = self._reported_start_ns = read_ns
        self._begin(read_ns)

    def end(self, now_ns: int, start_ns: int | None) -> None:
        """End with the connection; begin at `start_ns`, or with the next use."""
        self._ignored_until_ns = now_ns
        self._reported_start_ns = start_ns
        self._begin(start_ns)

    def move(self, now_ns: int, *, is_used: bool) -> None:
        """Go on with a new connection, all of whose activity counts."""
        self._ignored_until_ns = self._last_read_ns = PAST
        self._begin(now_ns if is_used or self.since_ns is not None else None)

    def _begin(self, at_ns: int | None) -> None:
        self.since_ns = at_ns
        self.stalled_ns = 0
        self.reset_misses()

    def reset_misses(self) -> None:
        """Count again from 0."""
        self.misses, self.dead_at_ns = 0, NEVER


class Schedule:
    """When the next heartbeat of a connection is due."""

    def __init__(self, rules: HeartbeatRules, jitter: Callable[[], float], now_ns: int) -> None:
        """Begin at `now_ns`, with an unused connection."""
        self._rules, self._jitter = rules, jitter
        self._has_sent = False
        self._sent_ns = PAST  # when the last heartbeat was sent on this connection
        self._delay_base_ns: int | None = None  # the silence that `_delay_ns` was drawn for
        self._delay_ns = 0
        self.not_before_ns = PAST
        """The earliest time of the next heartbeat."""
        self._check_ns = now_ns + int(jitter() * rules.interval_ns)
        self.is_new = False
        """Whether a heartbeat is due because the connection is new."""
        self.is_requested = False
        """Whether a heartbeat is due because the user asked for it."""

    def is_due_now(self) -> bool:
        """Whether a heartbeat is due whatever was read."""
        return self.is_new or self.is_requested

    def check_ns(self, now_ns: int) -> int:
        """When an unused connection is looked at."""
        if self._check_ns <= now_ns:  # the next check finds a use in time for its heartbeat
            self.check_later(now_ns)
        return self._check_ns

    def check_later(self, now_ns: int) -> None:
        """Look at an unused connection after the interval."""
        self._check_ns = now_ns + self._rules.interval_ns

    def due_ns(
        self, now_ns: int, silence: Silence, activity: ActivityStamps, *, is_answering: bool
    ) -> int:
        """When the next heartbeat is due, if the answer to the last one is not awaited."""
        rules, since_ns = self._rules, silence.since_ns
        if since_ns is None or self.is_due_now():
            return now_ns
        if not is_answering:
            return max(self.not_before_ns, self._sent_ns + rules.tick_ns)
        write_ns = activity.last_write_ns
        written_ns = max(PAST if write_ns is None else write_ns, self._sent_ns)
        base_ns = min(since_ns, written_ns) if silence.counts(written_ns) else since_ns
        if base_ns != self._delay_base_ns:
            self._delay_base_ns = base_ns
            used = activity.last_use_ns is not None and activity.last_use_ns > self._sent_ns
            longest_ns = rules.max_jitter_ns
            if self._has_sent and not used:
                longest_ns = min(rules.tick_ns, longest_ns)
            self._delay_ns = int(self._jitter() * longest_ns)
        at_ns = base_ns + rules.interval_ns + 1 + self._delay_ns
        return max(self.not_before_ns, at_ns + -at_ns % rules.grid_ns)

    def sent(self, now_ns: int) -> None:
        """Note that a heartbeat is sent."""
        self._has_sent, self._sent_ns = True, now_ns
        self.is_new = self.is_requested = False

    def restart(self, *, is_used: bool) -> None:
        """Go on with a new connection; a heartbeat is due if the old one was used."""
        self.not_before_ns = self._sent_ns = PAST
        self.is_new = self.is_new or is_used


class HeartbeatCore:
    """The decisions for one connection."""

    def __init__(
        self,
        target: str,
        rules: HeartbeatRules,
        jitter: Callable[[], float],
        *,
        now_ns: int,
        silent_from_start: bool,
    ) -> None:
        """Start in state UNUSED, or OFF. `jitter` returns a random number from 0 to 1.

        With `silent_from_start`, silence counts from now, not from the first use: for channels
        whose activity is not known.
        """
        off = rules.interval_ns == NEVER
        self._target, self._rules, self._jitter = target, rules, jitter
        self._silent_from_start = silent_from_start
        self.state = HeartbeatState.OFF if off else HeartbeatState.UNUSED
        self.misses = self.sent = self.answered = self.replaced = 0
        self.rtt_ns: int | None = None
        self.serving: bool | None = None
        self.reports: list[StateChanged | Event] = []

        self.silence = Silence(now_ns if silent_from_start else None)
        # Heartbeats
        self.in_flight: set[int] = set()
        """Numbers of the heartbeats whose answer still counts."""
        self.awaiting_answer = False
        """Whether the last heartbeat is neither answered nor missed."""
        self._miss_at_ns = NEVER  # when the last heartbeat counts as missed
        self._schedule = Schedule(rules, jitter, now_ns)

        # Death
        self._planned_ns = NEVER  # when the next look was to be
        self._death_reported = False
        self._reconnecting = False

    # When to look

    def next_ns(self, now_ns: int, activity: ActivityStamps) -> int:
        """When `step` may have something to do; `NEVER`: not before another method is called."""
        if self.state in _INACTIVE or self._reconnecting:
            self._planned_ns = NEVER
            return NEVER
        self.observe(now_ns, activity)
        at_ns = self._next_ns(now_ns, activity)
        self._planned_ns = max(now_ns, at_ns)
        return at_ns

    def _next_ns(self, now_ns: int, activity: ActivityStamps) -> int:
        if self._is_unused():
            return self._schedule.check_ns(now_ns)
        due_ns = self._miss_at_ns if self.awaiting_answer else self._send_at_ns(now_ns, activity)
        return min(due_ns, self.silence.dead_at_ns)

    def _is_unused(self) -> bool:
        return self.silence.since_ns is None and not self._schedule.is_due_now()

    def _send_at_ns(self, now_ns: int, activity: ActivityStamps) -> int:
        is_answering = self.state not in _NOT_ANSWERING
        return self._schedule.due_ns(now_ns, self.silence, activity, is_answering=is_answering)

    # What to do

    def step(
        self, now_ns: int, activity: ActivityStamps, *, idle: bool, calls: int
    ) -> Send | Reconnect | None:
        """Return the next action; None if there is none.

        A channel is idle if it has no connection and does not connect. `calls` are those of the
        user in flight.
        """
        if self.state in _INACTIVE or self._reconnecting:
            return None
        self.observe(now_ns, activity)
        if self.awaiting_answer and now_ns >= self._miss_at_ns:
            self._miss(now_ns, "DEADLINE_EXCEEDED", is_silence=True)
        if now_ns >= self.silence.dead_at_ns:
            return self._mark_dead(now_ns, calls)
        waits = self.awaiting_answer or self._is_unused()
        if waits or now_ns < self._send_at_ns(now_ns, activity):
            return None
        if idle and not self._schedule.is_due_now() and self.state is not HeartbeatState.DEAD:
            self._mark_unused(now_ns, activity)
            return None
        return self._send(now_ns)

    def observe(self, now_ns: int, activity: ActivityStamps) -> None:
        """Take into account what the user's calls have read and written."""
        self._detect_stall(now_ns)
        read_ns = self.silence.broken_ns(activity, now_ns)
        if read_ns is not None:
            self._mark_alive(read_ns, None)

    def _detect_stall(self, now_ns: int) -> None:
        """Restart the counts after a stall of this process: data may have arrived unread."""
        if now_ns - self._planned_ns > self._rules.stall_ns:
            self.silence.stalled_ns += now_ns - self._planned_ns
            self._planned_ns = NEVER
            self.silence.reset_misses()
            self._miss_at_ns = now_ns + self._rules.tick_ns

    def _mark_alive(self, read_ns: int, rtt_ns: int | None) -> None:
        after_s = self.silence.seconds(read_ns)
        self.silence.restart(read_ns)
        self.awaiting_answer = self._schedule.is_new = self._death_reported = False
        self.misses = 0
        again = self.state in _NOT_ANSWERING
        self._set_state(HeartbeatState.ALIVE)
        if again:
            rtt_s = None if rtt_ns is None else to_seconds(rtt_ns)
            self.reports.append(ConnectionAlive(self._target, after_s, rtt_s))

    def _mark_dead(self, now_ns: int, calls: int) -> Reconnect | None:
        silent_s = self.silence.seconds(now_ns)
        if not self._death_reported:
            self._death_reported = True
            self._set_state(HeartbeatState.DEAD)
            self.reports.append(ConnectionDead(self._target, silent_s, self.misses, calls))
        # If the connection stays, another heartbeat is sent before the next reconnect.
        self.silence.misses, self.silence.dead_at_ns = MISSES_UNTIL_DEAD - 1, NEVER
        if not self._rules.reconnect:
            return None
        self._reconnecting, self._planned_ns = True, NEVER
        return Reconnect(f"no answer to heartbeats for {silent_s:.1f} s")

    def confirm_dead(self, now_ns: int, activity: ActivityStamps) -> bool:
        """Whether a connection that is about to be replaced is still dead."""
        self.observe(now_ns, activity)
        self._reconnecting = self._reconnecting and self.state is HeartbeatState.DEAD
        return self._reconnecting

    def _mark_unused(self, now_ns: int, activity: ActivityStamps) -> None:
        """The channel has no connection: send none, unless a call is about to make it connect."""
        tick_ns = self._rules.tick_ns
        used = activity.last_use_ns is not None and activity.last_use_ns > now_ns - tick_ns
        # An unanswered heartbeat also makes the channel connect, if nothing was read since.
        if used or (self.in_flight and self.state is HeartbeatState.SUSPECT):
            self._schedule.not_before_ns = now_ns + tick_ns
            return
        # If use is not known, the state of the channel is looked at again after the interval.
        self.silence.end(now_ns, now_ns if self._silent_from_start else None)
        self.in_flight.clear()
        self.misses = 0
        self._schedule.check_later(now_ns)
        self._set_state(HeartbeatState.UNUSED)

    def _send(self, now_ns: int) -> Send:
        rules = self._rules
        if self.silence.since_ns is None:
            self.silence.start(now_ns)
        wait_for_ready = self._schedule.is_new or self.state is HeartbeatState.DEAD
        self._schedule.sent(now_ns)
        if len(self.in_flight) >= MAX_IN_FLIGHT:  # keep the oldest ones: a server may be slow
            self.in_flight.remove(max(self.in_flight))
        self.sent += 1
        self.in_flight.add(self.sent)
        self.awaiting_answer = True
        self._miss_at_ns = now_ns + rules.tick_ns
        if self.state in {HeartbeatState.ALIVE, HeartbeatState.UNUSED}:
            self._set_state(HeartbeatState.PROBING)
        return Send(self.sent, rules.timeout_ns, wait_for_ready)

    # Results

    def record_answer(self, now_ns: int, number: int, *, rtt_ns: int, serving: bool | None) -> bool:
        """A heartbeat was answered; False if its answer no longer counts. Call `observe` first."""
        if number not in self.in_flight:
            return False
        self.in_flight = {later for later in self.in_flight if later > number}
        self.answered += 1
        self.rtt_ns, self.serving = rtt_ns, serving
        self._mark_alive(now_ns, rtt_ns)
        return True

    def record_miss(
        self,
        now_ns: int,
        number: int,
        answer: str,
        *,
        serving: bool | None = None,
        is_silence: bool = True,
    ) -> bool:
        """A heartbeat failed, or its answer does not count; returns as `record_answer`.

        `answer` is its status, or why the answer does not count. A status from a proxy and an error
        in this process are no silence.
        """
        if number not in self.in_flight:
            return False
        self.in_flight.discard(number)
        if serving is not None:
            self.serving = serving
        if not is_silence:
            self.silence.reset_misses()
        if self.awaiting_answer and number == self.sent:
            self._miss(now_ns, answer, is_silence=is_silence)
        return True

    def _miss(self, now_ns: int, answer: str, *, is_silence: bool) -> None:
        self.awaiting_answer = False
        self.misses += 1
        if self.state is HeartbeatState.PROBING:
            self._set_state(HeartbeatState.SUSPECT)
        rules, silence = self._rules, self.silence
        silent_s, since_ns = silence.seconds(now_ns), silence.since_ns
        self.reports.append(HeartbeatMissed(self._target, self.misses, silent_s, answer))
        silence.misses += is_silence
        final = self._death_reported and not rules.reconnect
        enough = is_silence and silence.misses == MISSES_UNTIL_DEAD
        if since_ns is not None and enough and not final:
            delay_ns = int(self._jitter() * rules.grace_ns)
            dead_at_ns = since_ns + rules.timeout_ns + 1 + silence.stalled_ns + delay_ns
            # What arrived while an event loop was blocked is read within the grace.
            silence.dead_at_ns = max(dead_at_ns, now_ns + rules.grace_ns)

    def connection_replaced(self, now_ns: int, *, by_heartbeat: bool = False) -> None:
        """The channel has a new connection; a heartbeat is due at once if the old one was used."""
        if self.state in _INACTIVE:
            return
        self.replaced += by_heartbeat
        self.in_flight.clear()
        self._planned_ns = NEVER
        self.awaiting_answer = self._death_reported = self._reconnecting = False
        is_used = self.state is not HeartbeatState.UNUSED
        self.silence.move(now_ns, is_used=is_used)
        self._schedule.restart(is_used=is_used)

    def reconnect_refused(self) -> None:
        """The connection was not replaced. The next attempt follows after another heartbeat."""
        self._reconnecting = False

    # Requests

    def request(self) -> bool:
        """Make a heartbeat due now; False if an answer is awaited, or none is to be sent."""
        if self.state in _INACTIVE or self.awaiting_answer or self._reconnecting:
            return False
        self._schedule.is_requested = True
        return True

    def close(self) -> None:
        """End: nothing is due any more. Idempotent."""
        self.awaiting_answer = False
        self.in_flight.clear()
        self._set_state(HeartbeatState.CLOSED)

    def _set_state(self, state: HeartbeatState) -> None:
        old = self.state
        if state is not old and old is not HeartbeatState.CLOSED:
            self.state = state
            self.reports.append(StateChanged(old, state))
