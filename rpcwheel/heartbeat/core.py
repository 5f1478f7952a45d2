"""When a heartbeat is sent, and when a connection is dead.

Dubbo's rules (`HeartbeatTimerTask`, `ReconnectTimerTask`): a heartbeat is sent when nothing was
read, *or* nothing written, for more than the interval; a connection on which nothing was read for
more than the timeout is dead. Both are strict, and a connection that was not used yet is left
alone. Three things are added. A connection dies only after a heartbeat had its chance: if the
process itself stood still for minutes, nobody else is to blame. Heartbeats are late by a random
share, so that connections that fell silent together don't ask together. And a connection that the
server has closed for want of use is not made again for a heartbeat's sake.

Pure: time and what was seen come in, the next step goes out, and what is to be told waits in
`told`. Not thread-safe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rpcwheel.durations import NEVER, to_seconds

from .rules import TRANSITIONS, Changed, Died, HeartbeatState, Missed, Replace, Revived, Send

if TYPE_CHECKING:
    from collections.abc import Callable

    from .rules import HeartbeatRules, Seen

__all__ = ["HeartbeatCore"]

PAST: Final = -NEVER


_QUIET: Final = frozenset({HeartbeatState.OFF, HeartbeatState.WITHDRAWN, HeartbeatState.CLOSED})


class HeartbeatCore:
    """The heartbeat of one connection."""

    __slots__ = (
        "_base_ns",
        "_floor_ns",
        "_forced",
        "_heard_ns",
        "_hold_ns",
        "_late_ns",
        "_look_ns",
        "_mourned",
        "_patient",
        "_replacing",
        "_rules",
        "_sent_ns",
        "_share",
        "_silent_ns",
        "_since_ns",
        "_tried",
        "_urgent",
        "answered",
        "deadline_ns",
        "misses",
        "probe",
        "replaced",
        "rtt_ns",
        "sent",
        "serving",
        "state",
        "told",
    )

    def __init__(
        self, rules: HeartbeatRules, share: Callable[[], float], *, now_ns: int, begun: bool
    ) -> None:
        """Begin.

        Args:
            rules: When what is due.
            share: Gives a share from 0 to 1, at random: how late a heartbeat is.
            now_ns: The time.
            begun: Whether silence counts from now on, without waiting for the first use: for
                connections whose traffic is not seen.
        """
        off = rules.interval_ns == NEVER
        self._rules = rules
        self._share = share
        self.state = HeartbeatState.OFF if off else HeartbeatState.UNUSED
        self.misses = self.sent = self.answered = self.replaced = 0
        self.rtt_ns: int | None = None
        self.serving: bool | None = None
        self.probe: int | None = None
        """The number of the heartbeat that is on its way."""
        self.deadline_ns = NEVER
        """When it counts as missed."""
        self.told: list[Changed | Missed | Died | Revived] = []
        self._floor_ns = PAST  # stamps up to here are forgotten
        self._since_ns: int | None = now_ns if begun else None  # silence counts from here ...
        self._heard_ns: int | None = None  # ... or from the last read
        self._silent_ns = self._since_ns  # the same over all connections, for people
        self._sent_ns = PAST
        self._look_ns = NEVER if off else now_ns + int(share() * rules.interval_ns)
        self._base_ns: int | None = None  # the silence that `_late_ns` was drawn for
        self._late_ns = 0
        self._hold_ns = PAST  # no heartbeat before
        self._tried = False  # a heartbeat was missed in this silence
        self._mourned = False  # this death was told
        self._urgent = self._patient = False  # the next heartbeat, as the connection is new
        self._forced = False  # or as somebody wants to know
        self._replacing = False

    # When to look

    def next_ns(self, now_ns: int, seen: Seen) -> int:
        """When `step` may have something to do; `NEVER`: not before another method is called."""
        if self.state in _QUIET or self._replacing:
            return NEVER
        self._notice(now_ns, seen)
        if self.probe is not None:
            return self.deadline_ns
        since_ns = self._silent_since()
        if since_ns is None and not self._is_urgent():
            if self._look_ns <= now_ns:  # a use since then is seen in time at the next look
                self._look_ns = now_ns + self._rules.interval_ns
            return self._look_ns
        return min(self._beat_ns(now_ns, seen), self._dead_ns())

    def _silent_since(self) -> int | None:
        return self._since_ns if self._heard_ns is None else self._heard_ns

    def _is_urgent(self) -> bool:
        return self._urgent or self._forced

    def _beat_ns(self, now_ns: int, seen: Seen) -> int:
        """When the next heartbeat is due."""
        rules, since_ns = self._rules, self._silent_since()
        if since_ns is None or self._is_urgent():
            return now_ns
        if self.state in {HeartbeatState.SUSPECT, HeartbeatState.DEAD}:
            return max(self._hold_ns, self._sent_ns + rules.tick_ns)
        written_ns = max(PAST if seen.write_ns is None else seen.write_ns, self._sent_ns)
        base_ns = min(since_ns, written_ns) if written_ns > self._floor_ns else since_ns
        if base_ns != self._base_ns:
            self._base_ns = base_ns
            first = not self.sent or (seen.use_ns is not None and seen.use_ns > self._sent_ns)
            spread_ns = rules.spread_ns if first else rules.tick_ns
            self._late_ns = int(self._share() * spread_ns)
        return max(self._hold_ns, base_ns + rules.interval_ns + 1 + self._late_ns)

    def _dead_ns(self) -> int:
        """When it is dead, or may be replaced after all."""
        since_ns = self._silent_since()
        if since_ns is None or not self._tried or (self._mourned and not self._rules.replace):
            return NEVER
        return since_ns + self._rules.timeout_ns + 1

    # What to do

    def step(self, now_ns: int, seen: Seen, *, idle: bool) -> Send | Replace | None:
        """Say what is to be done now.

        Args:
            now_ns: The time.
            seen: What was seen of the connection so far.
            idle: Whether the channel has no connection and wants none.
        """
        if self.state in _QUIET or self._replacing:
            return None
        self._notice(now_ns, seen)
        if self.probe is not None and not self._is_overdue(now_ns):
            return None
        if now_ns >= self._dead_ns():
            return self._die(now_ns)
        unused = self._silent_since() is None and not self._is_urgent()
        if unused or now_ns < self._beat_ns(now_ns, seen):
            return None
        if idle and not self._is_urgent() and self.state is not HeartbeatState.DEAD:
            self._forget(now_ns, seen)
            return None
        return self._send(now_ns)

    def _is_overdue(self, now_ns: int) -> bool:
        """Whether the answer to the heartbeat on its way is no longer waited for."""
        if now_ns - self.deadline_ns > self._rules.tick_ns:
            self.deadline_ns = now_ns + self._rules.tick_ns  # we stood still: it may be here
        if now_ns < self.deadline_ns:
            return False
        self._miss(now_ns, "DEADLINE_EXCEEDED")
        return True

    def _notice(self, now_ns: int, seen: Seen) -> None:
        """Take note of what the user's calls have read and written."""
        read_ns = seen.read_ns
        written = seen.write_ns is not None and seen.write_ns > self._floor_ns
        if read_ns is not None and read_ns > self._floor_ns:
            if self._heard_ns is None or read_ns > self._heard_ns:
                self._hear(read_ns, None)
        elif written and self._since_ns is None:
            self._begin_silence(min(seen.write_ns or now_ns, now_ns))

    def _silence(self, now_ns: int) -> int:
        return 0 if self._silent_ns is None else max(0, now_ns - self._silent_ns)

    def _begin_silence(self, at_ns: int) -> None:
        self._since_ns = at_ns
        if self._silent_ns is None:
            self._silent_ns = at_ns

    def _hear(self, read_ns: int, rtt_ns: int | None) -> None:
        before_ns = self._silent_ns
        known = self._heard_ns is not None and self.state is HeartbeatState.PROBING
        self._heard_ns = self._silent_ns = read_ns
        self._tried = self._mourned = self._urgent = self._patient = False
        self.misses = 0
        if self.state is HeartbeatState.ALIVE:
            return
        self._become(HeartbeatState.ALIVE)
        if not known:
            after_ns = 0 if before_ns is None else max(0, read_ns - before_ns)
            self.told.append(Revived(after_ns, rtt_ns))

    def _die(self, now_ns: int) -> Replace | None:
        silent_ns = self._silence(now_ns)
        if not self._mourned:
            self._mourned = True
            self._become(HeartbeatState.DEAD)
            self.told.append(Died(silent_ns, self.misses))
        self._tried = False  # if it stays, there is another heartbeat before the next attempt
        if not self._rules.replace:
            return None
        self._replacing = True
        return Replace(f"no answer to heartbeats for {to_seconds(silent_ns):.1f} s")

    def confirm(self, now_ns: int, seen: Seen) -> bool:
        """Whether a connection that is about to be replaced is dead still."""
        self._notice(now_ns, seen)
        self._replacing = self._replacing and self.state is HeartbeatState.DEAD
        return self._replacing

    def _forget(self, now_ns: int, seen: Seen) -> None:
        """Leave a connection alone that is none; not one whose first call is about to make it."""
        tick_ns = self._rules.tick_ns
        if seen.use_ns is not None and seen.use_ns > now_ns - tick_ns:
            self._hold_ns = now_ns + tick_ns
            return
        stamps = (self._floor_ns, *(at_ns for at_ns in seen if at_ns is not None))
        self._floor_ns = max(stamps)
        self._since_ns = self._heard_ns = self._silent_ns = None
        self._tried = self._urgent = False
        self.misses = 0
        self._look_ns = now_ns + self._rules.interval_ns
        self._become(HeartbeatState.UNUSED)

    def _send(self, now_ns: int) -> Send:
        rules, since_ns = self._rules, self._silent_since()
        if since_ns is None:
            since_ns = now_ns
            self._begin_silence(now_ns)
        left_ns = since_ns + rules.timeout_ns + 1 - now_ns
        limit_ns = min(rules.interval_ns, max(left_ns, rules.tick_ns))
        patient = self._patient or self.state is HeartbeatState.DEAD
        self._urgent = self._forced = self._patient = False
        self.sent += 1
        self.probe, self._sent_ns, self.deadline_ns = self.sent, now_ns, now_ns + limit_ns
        if self.state in {HeartbeatState.ALIVE, HeartbeatState.UNUSED}:
            self._become(HeartbeatState.PROBING)
        return Send(self.sent, limit_ns, patient)

    # What became of it

    def heard(self, now_ns: int, number: int, *, rtt_ns: int, serving: bool | None) -> bool:
        """A heartbeat was answered; False if it is none that is waited for: nothing changes."""
        if number != self.probe:
            return False
        self.probe = None
        self.answered += 1
        self.rtt_ns, self.serving = rtt_ns, serving
        self._hear(now_ns, rtt_ns)
        return True

    def missed(self, now_ns: int, number: int, answer: str, *, serving: bool | None = None) -> bool:
        """A heartbeat failed, or its answer does not count; False as for `heard`."""
        if number != self.probe:
            return False
        if serving is not None:
            self.serving = serving
        self._miss(now_ns, answer)
        return True

    def _miss(self, now_ns: int, answer: str) -> None:
        self.probe = None
        if self._heard_ns is not None and self._heard_ns > self._sent_ns:
            return  # calls were answered meanwhile: it lives
        self._tried = True
        self.misses += 1
        if self.state is HeartbeatState.PROBING:
            self._become(HeartbeatState.SUSPECT)
        silent_ns = self._silence(now_ns)
        self.told.append(Missed(self.misses, silent_ns, answer))

    def renewed(self, now_ns: int, *, by_us: bool = False) -> None:
        """There is another connection in the place of the old one; it is asked at once."""
        if self.state in _QUIET:
            return
        self.replaced += by_us
        self.probe = None
        self._floor_ns = self._hold_ns = PAST
        self._heard_ns = None
        self._tried = self._mourned = self._replacing = False
        if self._since_ns is not None or self.state is not HeartbeatState.UNUSED:
            self._since_ns = now_ns
        if self.state is not HeartbeatState.UNUSED:
            self._urgent = self._patient = True

    def refused(self) -> None:
        """The connection was not replaced: try again after another heartbeat."""
        self._replacing = False

    # What others want

    def beat(self) -> bool:
        """Make a heartbeat due now; False if one is on its way, or none is to be sent."""
        if self.state in _QUIET or self.probe is not None or self._replacing:
            return False
        self._forced = True
        return True

    def withdraw(self) -> None:
        """Send nothing more, replace nothing more."""
        self._end(HeartbeatState.WITHDRAWN)

    def close(self) -> bool:
        """End it; False if it had ended."""
        return self._end(HeartbeatState.CLOSED)

    def _end(self, state: HeartbeatState) -> bool:
        if state not in TRANSITIONS[self.state]:
            return False
        self.probe = None
        self._become(state)
        return True

    def _become(self, state: HeartbeatState) -> None:
        old = self.state
        if state is not old and old is not HeartbeatState.CLOSED:
            self.state = state
            self.told.append(Changed(old, state))
