"""When a heartbeat is sent, and when a connection is dead.

Dubbo's rules (`HeartbeatTimerTask`, `ReconnectTimerTask`): a heartbeat is sent when nothing was
read, *or* nothing written, for more than the interval, and again each tick until something is; a
connection on which nothing was read for more than the timeout is dead. Both are strict, and a
connection that was not used yet is left alone. What is added:

* Only silence condemns. Dead takes `ENOUGH` heartbeats in a row that were missed: a tick long
  nothing came, or the connection was broken. An answer counts however late it comes. What somebody
  said, or what went wrong on our own side, is no silence.
* We may have stood still ourselves (SIGSTOP, a laptop that sleeps, a blocked loop). Whoever looks
  much later than was planned knows it, forgets all misses, and takes the time off the silence:
  nobody else is to blame.
* Heartbeats are late by a random share, so that connections that fell silent together don't ask
  together; and on a coarse grid of the clock, so that a few share each wake-up. Deaths are late by
  a share too, or a server that comes back met all its clients in one instant.
* A connection that the server has closed for want of use is not made again for a heartbeat's sake.

Pure: time and what was seen come in, the next step goes out, and what is to be told waits in
`told`. Not thread-safe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rpcwheel.durations import NEVER, to_seconds

from .rules import TRANSITIONS, Changed, Died, HeartbeatState, Missed, Reconnect, Revived, Send

if TYPE_CHECKING:
    from collections.abc import Callable

    from .rules import HeartbeatRules, Seen

__all__ = ["HeartbeatCore"]

PAST: Final = -NEVER

ENOUGH: Final = 2
"""Heartbeats missed in a row, without which nothing is dead: one answer may get lost."""

MOST: Final = 8
"""Heartbeats on their way at a time; beyond that the youngest gives way to the next."""

_QUIET: Final = frozenset({HeartbeatState.OFF, HeartbeatState.WITHDRAWN, HeartbeatState.CLOSED})
_TROUBLED: Final = frozenset({HeartbeatState.SUSPECT, HeartbeatState.DEAD})


class HeartbeatCore:
    """The heartbeat of one connection."""

    def __init__(
        self, rules: HeartbeatRules, share: Callable[[], float], *, now_ns: int, begun: bool
    ) -> None:
        """Begin.

        Args:
            rules: When what is due.
            share: Gives a share from 0 to 1, at random: how late a heartbeat is.
            now_ns: The time.
            begun: Whether silence counts from now on, without waiting for the first use: for
                connections whose activity is not seen.
        """
        off = rules.interval_ns == NEVER
        self._rules, self._share, self._begun = rules, share, begun
        self.state = HeartbeatState.OFF if off else HeartbeatState.UNUSED
        self.misses = self.sent = self.answered = self.replaced = 0
        self.rtt_ns: int | None = None
        self.serving: bool | None = None
        self.told: list[Changed | Missed | Died | Revived] = []

        # What was heard
        self._floor_ns = PAST  # stamps up to here are forgotten
        self._since_ns: int | None = now_ns if begun else None  # silence counts from here ...
        self._heard_ns: int | None = None  # ... or from the last read
        self._silent_ns = self._since_ns  # the same over all connections, for people

        # Heartbeats
        self.on_way: set[int] = set()
        """Those that an answer still counts for."""
        self.waiting = False
        """Whether the last one is neither answered nor missed."""
        self._sent_ns = PAST
        self._missed_ns = NEVER  # when the last one counts as missed
        self._base_ns: int | None = None  # the silence that `_late_ns` was drawn for
        self._late_ns = 0
        self._hold_ns = PAST  # none before
        self._look_ns = NEVER if off else now_ns + int(share() * rules.interval_ns)  # if unused
        self._new = False  # one is due, as the connection is new
        self._forced = False  # or as somebody wants to know

        # Death
        self._planned_ns = NEVER  # when we meant to look next
        self._excused_ns = 0  # how long we stood still in this silence
        self._condemning = 0  # misses in a row that count
        self._dead_ns = NEVER  # when it is dead, once they are enough
        self._mourned = False  # this death was told
        self._replacing = False

    # When to look

    def next_ns(self, now_ns: int, seen: Seen) -> int:
        """When `step` may have something to do; `NEVER`: not before another method is called."""
        if self.state in _QUIET or self._replacing:
            self._planned_ns = NEVER
            return NEVER
        self.notice(now_ns, seen)
        at_ns = self._next_ns(now_ns, seen)
        self._planned_ns = max(now_ns, at_ns)
        return at_ns

    def _next_ns(self, now_ns: int, seen: Seen) -> int:
        if self._is_unused():
            if self._look_ns <= now_ns:  # a use since then is seen in time at the next look
                self._look_ns = now_ns + self._rules.interval_ns
            return self._look_ns
        beat_ns = self._missed_ns if self.waiting else self._beat_ns(now_ns, seen)
        return min(beat_ns, self._dead_ns)

    def _silent_since(self) -> int | None:
        return self._since_ns if self._heard_ns is None else self._heard_ns

    def _is_urgent(self) -> bool:
        return self._new or self._forced

    def _is_unused(self) -> bool:
        return self._silent_since() is None and not self._is_urgent()

    def _beat_ns(self, now_ns: int, seen: Seen) -> int:
        """When the next heartbeat is due."""
        rules, since_ns = self._rules, self._silent_since()
        if since_ns is None or self._is_urgent():
            return now_ns
        if self.state in _TROUBLED:
            return max(self._hold_ns, self._sent_ns + rules.tick_ns)
        written_ns = max(PAST if seen.write_ns is None else seen.write_ns, self._sent_ns)
        base_ns = min(since_ns, written_ns) if written_ns > self._floor_ns else since_ns
        if base_ns != self._base_ns:
            self._base_ns = base_ns
            first = not self.sent or (seen.use_ns is not None and seen.use_ns > self._sent_ns)
            most_ns = rules.spread_ns if first else min(rules.tick_ns, rules.spread_ns)
            self._late_ns = int(self._share() * most_ns)
        at_ns = base_ns + rules.interval_ns + 1 + self._late_ns
        return max(self._hold_ns, at_ns + -at_ns % rules.grid_ns)

    # What to do

    def step(self, now_ns: int, seen: Seen, *, idle: bool) -> Send | Reconnect | None:
        """Say what is to be done now.

        Args:
            now_ns: The time.
            seen: What was seen of the connection so far.
            idle: Whether the channel has no connection and wants none.
        """
        if self.state in _QUIET or self._replacing:
            return None
        self.notice(now_ns, seen)
        if self.waiting and now_ns >= self._missed_ns:
            self._miss(now_ns, "DEADLINE_EXCEEDED", condemning=True)
        if now_ns >= self._dead_ns:
            return self._die(now_ns)
        if self.waiting or self._is_unused() or now_ns < self._beat_ns(now_ns, seen):
            return None
        if idle and not self._is_urgent() and self.state is not HeartbeatState.DEAD:
            self._forget(now_ns, seen)
            return None
        return self._send(now_ns)

    def notice(self, now_ns: int, seen: Seen) -> None:
        """Take note of what the user's calls have read and written."""
        self._wake(now_ns)
        read_ns = seen.read_ns
        written = seen.write_ns is not None and seen.write_ns > self._floor_ns
        if read_ns is not None and read_ns > self._floor_ns:
            if self._heard_ns is None or read_ns > self._heard_ns:
                self._hear(read_ns, None)
        elif written and self._since_ns is None:
            self._begin_silence(min(seen.write_ns or now_ns, now_ns))

    def _wake(self, now_ns: int) -> None:
        """Notice that we stood still: what came meanwhile may not have been read yet."""
        if now_ns - self._planned_ns > self._rules.grace_ns:
            self._excused_ns += now_ns - self._planned_ns
            self._planned_ns = NEVER
            self._acquit()
            self._missed_ns = now_ns + self._rules.tick_ns

    def _acquit(self) -> None:
        """From now on it takes `ENOUGH` misses again."""
        self._condemning, self._dead_ns = 0, NEVER

    def _silence(self, now_ns: int) -> int:
        return 0 if self._silent_ns is None else max(0, now_ns - self._silent_ns)

    def _begin_silence(self, at_ns: int) -> None:
        self._since_ns = at_ns
        if self._silent_ns is None:
            self._silent_ns = at_ns

    def _hear(self, read_ns: int, rtt_ns: int | None) -> None:
        before_ns = self._silent_ns
        self._heard_ns = self._silent_ns = read_ns
        self._acquit()
        self._excused_ns = 0
        self.waiting = self._new = self._mourned = False
        self.misses = 0
        troubled = self.state in _TROUBLED
        self._become(HeartbeatState.ALIVE)
        if troubled:
            after_ns = 0 if before_ns is None else max(0, read_ns - before_ns)
            self.told.append(Revived(after_ns, rtt_ns))

    def _die(self, now_ns: int) -> Reconnect | None:
        silent_ns = self._silence(now_ns)
        if not self._mourned:
            self._mourned = True
            self._become(HeartbeatState.DEAD)
            self.told.append(Died(silent_ns, self.misses))
        # If it stays, there is another heartbeat before the next attempt.
        self._condemning, self._dead_ns = ENOUGH - 1, NEVER
        if not self._rules.reconnect:
            return None
        self._replacing, self._planned_ns = True, NEVER
        return Reconnect(f"no answer to heartbeats for {to_seconds(silent_ns):.1f} s")

    def confirm(self, now_ns: int, seen: Seen) -> bool:
        """Whether a connection that is about to be replaced is dead still."""
        self.notice(now_ns, seen)
        self._replacing = self._replacing and self.state is HeartbeatState.DEAD
        return self._replacing

    def _forget(self, now_ns: int, seen: Seen) -> None:
        """Leave a connection alone that is none; not one whose first call is about to make it."""
        tick_ns = self._rules.tick_ns
        used = seen.use_ns is not None and seen.use_ns > now_ns - tick_ns
        # A heartbeat that has not ended makes the connection, too, if nothing was read since.
        if used or (self.on_way and self.state is HeartbeatState.SUSPECT):
            self._hold_ns = now_ns + tick_ns
            return
        self._floor_ns = now_ns
        # Where use is not seen, to look again is all that can be done.
        self._since_ns = self._silent_ns = now_ns if self._begun else None
        self._heard_ns = None
        self._acquit()
        self._excused_ns = 0
        self.on_way.clear()
        self.misses = 0
        self._look_ns = now_ns + self._rules.interval_ns
        self._become(HeartbeatState.UNUSED)

    def _send(self, now_ns: int) -> Send:
        rules = self._rules
        if self._silent_since() is None:
            self._begin_silence(now_ns)
        patient = self._new or self.state is HeartbeatState.DEAD
        self._new = self._forced = False
        if len(self.on_way) >= MOST:  # one after the other would not do: a slow server is slow
            self.on_way.remove(max(self.on_way))
        self.sent += 1
        self.on_way.add(self.sent)
        self.waiting, self._sent_ns, self._missed_ns = True, now_ns, now_ns + rules.tick_ns
        if self.state in {HeartbeatState.ALIVE, HeartbeatState.UNUSED}:
            self._become(HeartbeatState.PROBING)
        return Send(self.sent, rules.timeout_ns, patient)

    # What became of it

    def heard(self, now_ns: int, number: int, *, rtt_ns: int, serving: bool | None) -> bool:
        """A heartbeat was answered; False if that is of no interest any more. After `notice`."""
        if number not in self.on_way:
            return False
        self.on_way = {later for later in self.on_way if later > number}
        self.answered += 1
        self.rtt_ns, self.serving = rtt_ns, serving
        self._hear(now_ns, rtt_ns)
        return True

    def missed(
        self,
        now_ns: int,
        number: int,
        answer: str,
        *,
        serving: bool | None = None,
        condemning: bool = True,
    ) -> bool:
        """A heartbeat failed, or its answer does not count; False as for `heard`.

        Args:
            now_ns: The time.
            number: Which one.
            answer: Its status, or what was wrong with the answer.
            serving: What the server says of itself.
            condemning: Whether it means that nobody is there; not, if somebody must have said it.
        """
        if number not in self.on_way:
            return False
        self.on_way.discard(number)
        if serving is not None:
            self.serving = serving
        if not condemning:
            self._acquit()
        if self.waiting and number == self.sent:
            self._miss(now_ns, answer, condemning=condemning)
        return True

    def _miss(self, now_ns: int, answer: str, *, condemning: bool) -> None:
        self.waiting = False
        self.misses += 1
        if self.state is HeartbeatState.PROBING:
            self._become(HeartbeatState.SUSPECT)
        self.told.append(Missed(self.misses, self._silence(now_ns), answer))
        self._condemning += condemning
        rules, since_ns = self._rules, self._silent_since()
        final = self._mourned and not rules.reconnect
        if since_ns is not None and self._condemning == ENOUGH and condemning and not final:
            late_ns = int(self._share() * rules.grace_ns)
            dead_ns = since_ns + rules.timeout_ns + 1 + self._excused_ns + late_ns
            # What came while a loop was blocked is read within the grace.
            self._dead_ns = max(dead_ns, now_ns + rules.grace_ns)

    def renewed(self, now_ns: int, *, by_us: bool = False) -> None:
        """There is another connection in the place of the old one; it is asked at once."""
        if self.state in _QUIET:
            return
        self.replaced += by_us
        self.on_way.clear()
        self._acquit()
        self._excused_ns = 0
        self._floor_ns = self._hold_ns = self._sent_ns = PAST
        self._heard_ns, self._planned_ns = None, NEVER
        self.waiting = self._mourned = self._replacing = False
        if self._since_ns is not None or self.state is not HeartbeatState.UNUSED:
            self._since_ns = now_ns
        if self.state is not HeartbeatState.UNUSED:
            self._new = True

    def refused(self) -> None:
        """The connection was not replaced: try again after another heartbeat."""
        self._replacing = False

    # What others want

    def beat(self) -> bool:
        """Make a heartbeat due now; False if one is waited for, or none is to be sent."""
        if self.state in _QUIET or self.waiting or self._replacing:
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
        self.waiting = False
        self.on_way.clear()
        self._become(state)
        return True

    def _become(self, state: HeartbeatState) -> None:
        old = self.state
        if state is not old and old is not HeartbeatState.CLOSED:
            self.state = state
            self.told.append(Changed(old, state))
