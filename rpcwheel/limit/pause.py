"""Pauses in which a server starts no calls, so that gRPC accepts those that have arrived. No I/O.

gRPC needs the interpreter to accept a call, and while handlers compute, it accepts few. It hands
over the oldest first, and a call that it has not handed over cannot be refused. So after handlers
have computed for some time, no call is started until gRPC has accepted all. Streams and calls that
are never limited, such as health checks, are started all the same.

Whether gRPC has accepted all is seen from how many it accepts: it hands over those that wait one
after the other, and then only as many as arrive.
"""

from __future__ import annotations

from typing import Final

ACCEPT_EVERY_NS: Final = 50_000_000
"""The processor time that handlers use between two pauses."""

ROUND_S: Final = 0.001
"""How often to look. To accept a call and to refuse it takes 0.1 to 0.5 ms."""

SURPLUS: Final = 1.5
"""gRPC accepts no calls that have waited if the rate of a round is at most so many times the mean
rate since the last pause."""

MAX_ROUND_NS: Final = 3_000_000
"""A longer round shows nothing if handlers run: one of them may have used the interpreter."""

MAX_PAUSE_NS: Final = 50_000_000
"""The longest pause after the last handler has ended."""

MAX_WAIT_NS: Final = 25_000_000
"""How long a pause waits for the next handler to end, if some run. They go on, and if they compute,
gRPC accepts few calls before they end; but they may also wait for something else."""

MAX_SHARED_PAUSE_NS: Final = 250_000_000
"""The longest pause in which handlers run."""

GIVEN_UP_NS: Final = 2 * MAX_SHARED_PAUSE_NS
"""After this time a pause does not count: nobody has looked, such as after the end of a loop."""


class AcceptPause:
    """The pauses of one server. The caller holds the lock of its limiter."""

    __slots__ = (
        "_began_ns",
        "_calm",
        "_is_on",
        "_last",
        "_round",
        "_running",
        "_since_ns",
        "arrivals",
    )

    def __init__(self) -> None:
        self.arrivals = 0
        """How many calls have arrived. The caller counts them."""
        self._is_on = False
        self._began_ns = 0
        self._last = 0, 0, 0
        """When the last pause ended, or gRPC had enough time, with the processor time and the calls
        up to then."""
        self._round = 0, 0
        """When the round began, with the calls up to then."""
        self._calm = 0
        """How many rounds one after the other have shown that gRPC has accepted all calls."""
        self._running = 0
        """How many handlers ran at the last look."""
        self._since_ns = 0
        """When the pause began, or a handler has ended in it."""

    def is_on(self, now_ns: int) -> bool:
        """Whether no call may be started."""
        return self._is_on and now_ns - self._began_ns < GIVEN_UP_NS

    def begin(self, now_ns: int, cpu_ns: int, running: int, *, is_beyond_lock: bool) -> bool:
        """Begin a pause if gRPC needs one.

        Args:
            now_ns: The time now.
            cpu_ns: The processor time that handlers have used up to now.
            running: How many handlers run, without streams.
            is_beyond_lock: Whether they compute without the interpreter's lock.

        Returns:
            True: it begins now. Call `end` each `ROUND_S`, until that is true.
        """
        last_ns, last_cpu_ns, _ = self._last
        used_ns = cpu_ns - last_cpu_ns
        if used_ns < ACCEPT_EVERY_NS or self.is_on(now_ns):
            return False
        if used_ns * 2 <= now_ns - last_ns or is_beyond_lock:  # it had enough time
            self._last = now_ns, cpu_ns, self.arrivals
            return False
        self._is_on, self._calm, self._running = True, 0, running
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
            True: it has ended.
        """
        is_shared = self._running > 0  # in this round
        if running != self._running:
            self._running, self._since_ns = running, now_ns
        self._note_round(now_ns, is_shared=is_shared)
        most_ns = MAX_WAIT_NS if running else MAX_PAUSE_NS
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
        mean = (self.arrivals - last) / (now_ns - last_ns)
        if accepted > SURPLUS * mean * round_ns or (is_shared and round_ns > MAX_ROUND_NS):
            self._calm = 0
        else:
            self._calm += 1
