"""Decides when a server starts no calls, so that gRPC accepts the calls that wait in it. No I/O.

gRPC needs the interpreter to accept a call, and while handlers compute, it accepts few. It hands
over the oldest first, and a call that it has not handed over cannot be refused. So after handlers
have computed for some time, no call is started until gRPC has accepted all. Streams and calls that
are never limited, such as health checks, are started all the same; they do not count here.

gRPC hands over calls that have waited as fast as it can, and then only as many as arrive. So the
pause ends when the number accepted in a round falls to about the mean.
"""

from __future__ import annotations

from typing import Final

ACCEPT_EVERY_NS: Final = 50_000_000
"""Between two pauses, handlers use this processor time, and it takes them at least this time."""

ROUND_S: Final = 0.001
"""The time between two looks. To accept a call and to refuse it takes 0.1 to 0.5 ms."""

MAX_RATE_FACTOR: Final = 1.5
"""If the rate of a round is at most so many times the mean rate since the last pause, gRPC has
accepted all calls."""

MAX_ROUND_NS: Final = 3_000_000
"""A longer round shows nothing if handlers run: one of them may have used the interpreter."""

MAX_PAUSE_NS: Final = 50_000_000
"""The longest time in a pause while no handler runs."""

MAX_NO_END_NS: Final = 25_000_000
"""The longest time in a pause without the end of a handler, while some run. They go on, and if they
compute, gRPC accepts few calls before they end; but they may also wait for something else."""

MAX_SHARED_PAUSE_NS: Final = 250_000_000
"""The longest pause. Handlers that were started before go on in it."""

GIVEN_UP_NS: Final = MAX_SHARED_PAUSE_NS + MAX_NO_END_NS
"""A pause that has not ended after this time is ignored: its event loop may be closed. It is less
than the shortest `max_wait`, unless that is set."""


class AcceptPause:
    """The pauses of one server. The caller holds the lock of its limiter."""

    def __init__(self) -> None:
        self.arrivals = 0
        """How many calls have arrived. The caller counts them."""
        self._is_on = False
        self._began_ns = 0
        self._last = 0, 0, 0
        """The time, the processor time and `arrivals` at the end of the last pause, or when none
        was needed."""
        self._round = 0, 0
        """The time and `arrivals` at the beginning of the round."""
        self._calm = 0
        """How many successive rounds had about the mean rate."""
        self._running = 0
        """How many handlers ran at the last look."""
        self._must_wait = False
        """Whether calls waited when the pause began."""
        self._since_ns = 0
        """When the pause began; or when a handler has ended in it, if calls waited or no other one
        ran."""

    def is_on(self, now_ns: int) -> bool:
        """Whether a pause is on. Then no call may start, except streams and unlimited calls."""
        return self._is_on and now_ns - self._began_ns < GIVEN_UP_NS

    def begin(
        self, now_ns: int, cpu_ns: int, running: int, *, must_wait: bool, is_beyond_lock: bool
    ) -> bool:
        """Begin a pause if gRPC needs one.

        Args:
            now_ns: The time now.
            cpu_ns: The processor time that handlers have used up to now.
            running: How many handlers run, without streams.
            must_wait: Whether calls wait. If none does, the server may have little to do, and the
                pause is short.
            is_beyond_lock: Whether handlers compute without the interpreter's lock.

        Returns:
            True if a pause begins now. Then call `end` every `ROUND_S` until it returns True.
        """
        last_ns, last_cpu_ns, _ = self._last
        elapsed_ns, used_ns = now_ns - last_ns, cpu_ns - last_cpu_ns
        if min(elapsed_ns, used_ns) < ACCEPT_EVERY_NS or self.is_on(now_ns):
            return False
        if used_ns * 2 <= elapsed_ns or is_beyond_lock:  # it had enough time
            self._last = now_ns, cpu_ns, self.arrivals
            return False
        self._is_on, self._calm = True, 0
        self._running, self._must_wait = running, must_wait
        self._began_ns = self._since_ns = now_ns
        self._round = now_ns, self.arrivals
        return True

    def end(self, now_ns: int, cpu_ns: int, running: int) -> bool:
        """End the pause if gRPC has accepted all calls, or it has taken too long.

        Args:
            now_ns: The time now.
            cpu_ns: As in `begin`.
            running: As in `begin`.

        Returns:
            True if it has ended.
        """
        if not self._is_on:  # it was given up, and another one has ended
            return True
        is_shared = self._running > 0  # in this round
        if running != self._running:
            self._running = running
            if self._must_wait or not running:
                self._since_ns = now_ns
        self._note_round(now_ns, is_shared=is_shared)
        most_ns = MAX_NO_END_NS if running else MAX_PAUSE_NS
        if (
            self._calm < (2 if is_shared else 1)
            and now_ns - self._since_ns < most_ns
            and now_ns - self._began_ns < MAX_SHARED_PAUSE_NS
        ):
            return False
        self._is_on = False
        self._last = now_ns, cpu_ns, self.arrivals
        return True

    def _note_round(self, now_ns: int, *, is_shared: bool) -> None:
        """Note the end of a round."""
        (began_ns, before), (last_ns, _, last) = self._round, self._last
        self._round = now_ns, self.arrivals
        round_ns, accepted = now_ns - began_ns, self.arrivals - before
        most = MAX_RATE_FACTOR * (self.arrivals - last) * round_ns
        if accepted * (now_ns - last_ns) > most or (is_shared and round_ns > MAX_ROUND_NS):
            self._calm = 0
        else:
            self._calm += 1
