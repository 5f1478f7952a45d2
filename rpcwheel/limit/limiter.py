"""Which calls of a server run, which wait, and which are refused. Decisions without I/O.

The caller of a `Limiter` reports when a call arrives and ends, starts the calls that the `Limiter`
returns, and refuses others. It holds the lock of the server. Times are integer nanoseconds on one
clock.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from rpcwheel.durations import NEVER, to_ns
from rpcwheel.rpc import DEFAULT_CRITICALITY, Criticality

from .adaptive import SURELY_BEYOND_LOCK, AdaptiveLimit
from .policy import ADAPTIVE

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.telemetry.call_counts import MethodCounts

    from .policy import LimitPolicy
    from .rate import TokenBucket

MIN_WAIT_NS: Final = 300_000_000
"""The maximum wait, unless handlers take long or the policy has another one."""

WAIT_IN_DURATIONS: Final = 4
"""The maximum wait if handlers take long, in usual durations."""

LATE_SHARE: Final = 10
"""The maximum wait is divided by this while the server is late: once a call was refused because it
had waited for the server for too long, and until none waits for that. (That some wait is no
overload: at 0.7 of the capacity of one slot, they do so for seconds.)"""

BUSY_LATE_SHARE: Final = 4
"""The same while handlers compute: the calls that gRPC accepts in one pause must not all be too old
before the next one, which comes after `ACCEPT_EVERY_NS`."""

LATE_NS: Final = 100_000_000
"""A server is late at least for this long after the last refusal. No call may wait because a pause
of the process, such as a garbage collection, was so long that all were refused. If the server were
not late then, the next calls would wait for the maximum, and be refused all at once, which is the
next pause."""

QUICK_NS: Final = 150_000_000
"""A method is quick if the mean of its last durations is less than this."""

MAX_TOOK_NS: Final = 4 * QUICK_NS
"""A longer duration counts as this: a method that was slow once is soon quick again."""

MEASURE_AGAIN_NS: Final = 1_000_000_000
"""If calls of a method were refused for this long because their time did not suffice, or for four
times the shortest duration if that is longer, and no handler has ended, the next one runs. Else a
method whose handlers were once slower than the timeouts of its callers would be refused for ever.
"""


class RefusalReason(enum.Enum):
    """Why a call was refused. The value is the name in metrics, the details are for the client."""

    WAITED = "waited", "it waited too long for other calls"
    FULL = "full", "as many calls wait as can be started soon"
    DEADLINE = "deadline", "less time was left than its method takes"
    SHORT = "short_deadline", "less time was left on its arrival than its method takes"
    STREAMS = "streams", "too many streams are open"
    RATE = "rate", "too many calls have arrived per second"
    CLOSED = "closed", "the server is being stopped"

    def __init__(self, _: str, text: str) -> None:
        self.label: str = self.value[0]
        self.details = f"refused before its handler ran: {text}"


class LimitedMethod:
    """One method of a server: its own limit, and what is known of its handlers."""

    def __init__(
        self,
        *,
        is_stream: bool,
        maximum: float,
        buckets: tuple[TokenBucket, ...] = (),
        counts: MethodCounts | None = None,
    ) -> None:
        self.is_stream = is_stream
        self.maximum = maximum
        """How many of its handlers may run; infinite if only the limit of the server applies."""
        self.buckets = buckets
        """Each call takes a token of each of these: that of the server and its own, if any."""
        self.counts = counts
        """Where calls are counted that are refused; None if metrics are off."""
        self.handler: object = None
        """The handler of its last call, in `grpc.aio`."""
        self.is_blocking = False
        """Whether `handler` runs on a thread."""
        self.running = 0
        self.waiting = 0
        self.is_quick = False
        """Whether its handlers take less than `QUICK_NS`, as far as is known."""
        self.is_slow = is_stream
        """Whether they take longer, or it is a stream. If no handler has ended, neither is true."""
        self.least_ns = 0
        """About the shortest of the last durations."""
        self.is_answered = True
        """Whether the client got the answer of the last handler whose duration counts."""
        self.refused_ns = 0
        """When the first call since then was refused because its time did not suffice, or the last
        one was started to measure the duration again; 0 if there was none."""
        self.usual_ns = 0
        """The moving average of the durations, each up to `MAX_TOOK_NS`."""

    def took(self, duration_ns: int) -> None:
        """Note the duration of a handler."""
        took_ns = min(duration_ns, MAX_TOOK_NS)
        self.usual_ns += (took_ns - self.usual_ns) >> 4 if self.usual_ns else took_ns
        self.is_quick = self.usual_ns < QUICK_NS
        self.is_slow = not self.is_quick
        if duration_ns < self.least_ns or not self.least_ns:
            self.least_ns = duration_ns
        else:
            self.least_ns += (duration_ns - self.least_ns) >> 4


class LimitedCall:
    """A call that has arrived."""

    def __init__(
        self, limit: Any, method: LimitedMethod, criticality: Criticality, nonce: str | bytes
    ) -> None:
        self.limit = limit
        """The `ServerLimit` of its server."""
        self.method = method
        self.criticality = criticality
        self.nonce = nonce
        """What the client wants to see in a refusal; "" for nothing. Not checked."""
        self.arrived_ns = 0
        self.deadline_ns = NEVER
        self.has_waited = False
        """Whether it was not started when it arrived."""
        self.is_waiting = False
        """Whether it is in the queue."""
        self.waits_for_method = False
        """Whether it waits because of its method's own number, and not for the server."""
        self.is_extra = False
        """Whether it runs in addition to the adaptive limit."""
        self.is_gone = False
        """Whether it ended before its handler ran: by its client, or by its deadline."""
        self.refused: RefusalReason | None = None
        """Why it was refused, if it was."""
        self.start: Any = None
        """A list with the function and the arguments that start it. To start or to refuse the call,
        they are popped: only one of both happens. And they have the context of the call, which has
        this object: if they stayed here, the stream would stay open (docs/grpcio.md)."""
        self.future: Any = None
        """The future of a call that waits."""
        self.error: BaseException | None = None
        """The error with which its handler was ended."""
        self.holders = 1
        """How many of these have not ended, in `grpc.aio`: the task that serves it, and the thread
        on which its handler runs, if it is blocking. The thread may go on after the task."""
        self.token_wait_ns = 0
        """Of a call above the rate: how long after its arrival there is a token again."""


CALL: Final[ContextVar[LimitedCall | None]] = ContextVar("rpcwheel_limited_call", default=None)
"""The call that is being served; None if the server has no limit, or it has none that applies."""

UNLIMITED: Final = LimitedCall(
    None, LimitedMethod(is_stream=False, maximum=math.inf), DEFAULT_CRITICALITY, ""
)
"""A call of a method without a limit."""

PROBE: Final = LimitedCall(
    None, LimitedMethod(is_stream=False, maximum=math.inf), DEFAULT_CRITICALITY, ""
)
"""A health check, a call of reflection, or a heartbeat: never limited."""


class CallQueue:
    """The calls of a server that wait, and how many of which kind."""

    def __init__(self) -> None:
        self.levels: dict[Criticality, deque[LimitedCall]] = {
            criticality: deque() for criticality in sorted(Criticality, reverse=True)
        }
        """Those of each criticality in the order of their arrival; the most critical first."""
        self.methods: set[LimitedMethod] = set()
        """The methods of which calls wait."""
        self.expires_ns = NEVER
        """No waiting call has an earlier deadline."""
        self.total = 0
        self.streams = 0
        self.quick = 0
        """How many may be quick: of a method that is not known to be slow."""
        self.for_method = 0
        """How many have `waits_for_method`."""

    def append(self, call: LimitedCall) -> None:
        """Add a call that has arrived."""
        self.levels[call.criticality].append(call)
        self.methods.add(call.method)
        self.expires_ns = min(self.expires_ns, call.deadline_ns)
        self._count(call, 1)

    def pop(self, calls: deque[LimitedCall], position: int = 0) -> LimitedCall:
        """Remove a call from one of the `levels`."""
        call = calls[position]
        del calls[position]
        self._count(call, -1)
        if not call.method.waiting:
            self.methods.discard(call.method)
        return call

    def has_more_critical(self, criticality: Criticality) -> bool:
        """Whether a call waits that is more critical."""
        return any(calls for level, calls in self.levels.items() if level > criticality)

    def has_less_critical(self, call: LimitedCall) -> bool:
        """Whether a less critical call waits for what this call waits for."""
        less = [calls for level, calls in self.levels.items() if level < call.criticality]
        if not call.waits_for_method:
            return any(less)
        return any(each.method is call.method for calls in less for each in calls)

    def _count(self, call: LimitedCall, number: int) -> None:
        method = call.method
        call.is_waiting = number > 0
        method.waiting += number
        self.total += number
        self.streams += number * method.is_stream
        self.quick += number * (not method.is_slow)
        self.for_method += number * call.waits_for_method


class Limiter:
    """The calls of one server."""

    def __init__(
        self,
        policy: LimitPolicy | None,
        *,
        refuse: Callable[[LimitedCall, RefusalReason], None],
    ) -> None:
        """Make the limiter of a server.

        Args:
            policy: The policy of the server; None if only methods have limits.
            refuse: Called with each call to refuse and the reason. It must not call this object.
        """
        self._adaptive: AdaptiveLimit | None = None
        self.limit = math.inf
        """How many handlers may run now."""
        if policy is not None and policy.max_concurrent == ADAPTIVE:
            self._adaptive = AdaptiveLimit()
            self.limit = self._adaptive.limit
        elif policy is not None:
            self.limit = float(policy.max_concurrent)
        wait = None if policy is None else policy.max_wait
        self._max_wait_ns = None if wait is None else to_ns(wait)
        self._max_streams = math.inf
        if policy is not None and policy.max_streams is not None:
            self._max_streams = policy.max_streams
        self._refuse = refuse
        self._usual_ns = self._quick_usual_ns = 0
        """The moving averages of the durations of handlers, and of those of quick methods, without
        streams."""
        self._queue = CallQueue()
        self._late = 0
        """The server is late for calls of this criticality and below; 0 if it is not late."""
        self._late_at_ns = 0
        """When the last call of this criticality was refused because the server is late."""
        self.threads = math.inf
        """How many calls can run at the same time at all."""
        self._work_ns = 0
        """The times at which handlers have ended, less those at which they began, in sum, without
        streams and `extra`. Plus `running` times the time now, it is how long handlers have run."""
        self.running = 0
        """How many handlers run, without streams and `extra`."""
        self._quick = 0
        """How many handlers of quick methods run."""
        self.extra = 0
        """How many handlers run in addition to an adaptive limit: quick calls do not wait for slow
        handlers, such as long polls."""
        self.streams = 0
        self.refused: dict[tuple[Criticality, RefusalReason], int] = {}

    @property
    def waiting(self) -> int:
        """How many calls wait."""
        return self._queue.total

    @property
    def is_beyond_lock(self) -> bool:
        """Whether handlers compute without the interpreter's lock, as far as is known."""
        return self._adaptive is not None and self._adaptive.used >= SURELY_BEYOND_LOCK

    def set_minimum(self, minimum: int) -> None:
        """Set the lowest value of an adaptive limit."""
        if self._adaptive is not None:
            self._adaptive.minimum = minimum

    def set_threads(self, threads: int) -> None:
        """Set how many calls can run at the same time at all."""
        self.threads = threads
        self._count_streams(0)
        adaptive = self._adaptive
        if adaptive is not None:
            self.limit = adaptive.limit = min(adaptive.limit, adaptive.maximum)

    def arrive(self, call: LimitedCall, now_ns: int, *, must_wait: bool = False) -> bool:
        """Decide about a call that has arrived. If it does not start, go on with `take`.

        Args:
            call: The call.
            now_ns: The time now.
            must_wait: Whether it waits until `take` although it may run.

        Returns:
            True: start it. False: it waits, or was refused.
        """
        call.arrived_ns = now_ns
        method = call.method
        if method.buckets and not self._takes_tokens(call, now_ns):
            self._count_refused(call, RefusalReason.RATE)
            return False
        # It overtakes only calls that can't run: others were started by `take`. (In a pause, a
        # stream also overtakes streams that could run.)
        if (method.is_stream or not must_wait) and self._has_room(method):
            self._count_started(call, now_ns)
            return True
        if method.is_stream and self.streams >= self._max_streams:
            self._count_refused(call, RefusalReason.STREAMS)
            return False
        if not self._queue.total:
            self._end_lateness(now_ns)
        call.waits_for_method = method.running >= method.maximum and (
            method.is_stream or self.running < self.limit or method.maximum < self.limit
        )
        if call.waits_for_method or call.criticality <= self._late:
            self.refuse_late(now_ns)
            if self._is_full(call):
                self._count_late(call, RefusalReason.FULL, now_ns)
                return False
        call.has_waited = True
        self._queue.append(call)
        return False

    def ended(
        self,
        call: LimitedCall,
        started_ns: int,
        now_ns: int,
        cpu_ns: int,
        *,
        is_answered: bool = True,
    ) -> None:
        """Note that a call that was started has ended. The caller goes on with `take`.

        Args:
            call: The call.
            started_ns: When it was started.
            now_ns: The time now.
            cpu_ns: The processor time that all handlers have used up to now.
            is_answered: Whether its client got the answer.
        """
        method = call.method
        method.running -= 1
        self._quick -= method.is_quick
        if method.is_stream:
            self._count_streams(-1)
            return
        if call.is_extra:
            self.extra -= 1
        else:
            self._work_ns += now_ns
            self.running -= 1
        took_ns = now_ns - started_ns
        if call.is_gone or (not is_answered and took_ns < self._usual_ns):
            return  # its handler has not run, or its client did not want to wait
        was_quick, was_slow = method.is_quick, method.is_slow
        method.took(took_ns)
        method.is_answered, method.refused_ns = is_answered, 0
        self._quick += (method.is_quick - was_quick) * method.running
        self._queue.quick += (was_slow - method.is_slow) * method.waiting
        self._usual_ns += (took_ns - self._usual_ns) >> 4 if self._usual_ns else took_ns
        if method.is_quick:
            usual_ns = self._quick_usual_ns
            self._quick_usual_ns += (took_ns - usual_ns) >> 4 if usual_ns else took_ns
        adaptive = self._adaptive
        if adaptive is not None and not call.is_extra:
            has_waited = call.has_waited
            if adaptive.ended(took_ns, now_ns, has_waited=has_waited, is_answered=is_answered):
                adaptive.measure(now_ns, cpu_ns, self._work_ns + self.running * now_ns)
                self.limit = adaptive.limit

    def take(self, now_ns: int) -> LimitedCall | None:
        """Return a waiting call to start now; None if none may start. Call it until then."""
        if not self._queue.total:
            return None
        self.refuse_late(now_ns)
        if self.running + self.extra + self.streams >= self.threads:
            return None
        may_run = self.running < self.limit or (self._queue.quick and self._has_extra_room())
        if not may_run and not self._queue.streams:
            return None
        ahead = 0
        queue = self._queue
        rooms = {method for method in queue.methods if self._has_room(method)}
        if rooms or now_ns >= queue.expires_ns:  # else thousands may wait for their own method
            for criticality, calls in queue.levels.items():
                ahead += len(calls)
                newest_first = criticality <= self._late and self.limit < ahead == queue.total
                call = self._take_from(calls, now_ns, rooms, newest_first=newest_first)
                if call is not None:
                    return call
            waiting = (call.deadline_ns for calls in queue.levels.values() for call in calls)
            queue.expires_ns = min(waiting, default=NEVER)
        if self.running < self.limit:
            self._end_lateness(now_ns)
        return None

    def _take_from(
        self,
        calls: deque[LimitedCall],
        now_ns: int,
        rooms: set[LimitedMethod],
        *,
        newest_first: bool,
    ) -> LimitedCall | None:
        """Return the first of these calls whose method has room, and remove those without time."""
        position, step = (len(calls) - 1, -1) if newest_first else (0, 1)
        while 0 <= position < len(calls):
            call = calls[position]
            has_room = call.method in rooms
            if has_room or call.deadline_ns <= now_ns:
                self.refuse_without_time(call, now_ns)
            if has_room and call.refused is None:
                self._count_started(call, now_ns)
                return self._queue.pop(calls, position)
            if call.is_gone:
                self._queue.pop(calls, position)
                position += min(step, 0)
            else:
                position += step
        return None

    def refuse_late(self, now_ns: int) -> None:
        """Refuse the calls that have waited too long."""
        if not self._queue.total:
            return
        ahead, longest_ns = 0, self._max_wait()
        for criticality, calls in self._queue.levels.items():
            ahead += len(calls)  # with those that are more critical
            while calls:
                call = calls[0]
                # Others are less critical, and refused before it.
                is_last = ahead == self._queue.total
                is_late = is_last and criticality <= self._late and ahead > self.limit
                wait_ns = self._late_wait() if is_late else longest_ns
                if now_ns - call.arrived_ns <= wait_ns:
                    break
                self._count_late(call, RefusalReason.WAITED, now_ns)
                self._queue.pop(calls)
                ahead -= 1

    def refuse_without_time(self, call: LimitedCall, now_ns: int) -> None:
        """Refuse a call if less time is left until its deadline than its method takes.

        In `grpc.aio`, the deadline is known only when the handler is started.
        """
        method = call.method
        latest_ns = call.deadline_ns - method.least_ns
        if latest_ns > now_ns:
            return
        if call.deadline_ns > now_ns:
            if not method.refused_ns:
                method.refused_ns = now_ns
            elif now_ns - method.refused_ns >= max(MEASURE_AGAIN_NS, 4 * method.least_ns):
                method.refused_ns = now_ns
                return
        if latest_ns > call.arrived_ns:
            self._count_late(call, RefusalReason.DEADLINE, now_ns)
        elif method.is_answered:  # it is not the server's fault
            self._count_refused(call, RefusalReason.SHORT)
        else:
            self._count_refused(call, RefusalReason.DEADLINE)
        call.is_gone = True

    def forget(self, call: LimitedCall) -> None:
        """Forget a call that waits: its client has canceled it."""
        calls = self._queue.levels[call.criticality]
        self._queue.pop(calls, calls.index(call))

    def refuse_all(self) -> None:
        """Refuse all waiting calls: the server is being stopped."""
        for calls in self._queue.levels.values():
            while calls:
                self.refuse_closed(self._queue.pop(calls))

    def refuse_closed(self, call: LimitedCall) -> None:
        """Refuse a call that arrives while the server is being stopped."""
        self._count_refused(call, RefusalReason.CLOSED)

    def expiry_ns(self) -> int | None:
        """Return when to call `refuse_late` although no call arrives or ends; None for never."""
        arrived_ns = min(
            (calls[0].arrived_ns for calls in self._queue.levels.values() if calls),
            default=None,
        )
        return None if arrived_ns is None else arrived_ns + self._max_wait()

    def _takes_tokens(self, call: LimitedCall, now_ns: int) -> bool:
        """Take a token of each bucket, or of none; returns whether they were taken."""
        buckets = call.method.buckets
        call.token_wait_ns = max(bucket.wait_ns(now_ns) for bucket in buckets)
        if call.token_wait_ns:
            return False
        for bucket in buckets:
            bucket.take(now_ns)
        return True

    def _has_extra_room(self) -> bool:
        """Whether a quick call may run in addition to an adaptive limit.

        At most as many quick handlers run as the limit says, so only slow ones make this room.
        """
        return self._adaptive is not None and max(self._quick, self.extra) < self.limit

    def _has_room(self, method: LimitedMethod) -> bool:
        """Whether a call of a method may run now."""
        running = self.running + self.extra + self.streams
        if running >= self.threads or method.running >= method.maximum:
            return False
        if method.is_stream:
            return self.streams < self._max_streams
        return self.running < self.limit or (
            self._has_extra_room()
            and (method.is_quick or not (method.is_slow or method.running))  # the first shows it
        )

    def _count_started(self, call: LimitedCall, now_ns: int) -> None:
        """Count a call that has room as running."""
        method = call.method
        if method.is_stream:
            self._count_streams(1)
        elif self.running < self.limit:
            self._work_ns -= now_ns
            self.running += 1
        else:
            call.is_extra = True
            self.extra += 1
        method.running += 1
        self._quick += method.is_quick

    def _count_streams(self, more: int) -> None:
        """Count streams that begin or end: in a server of `grpc` they take threads from others."""
        self.streams += more
        adaptive = self._adaptive
        if adaptive is not None and self.threads < math.inf:
            adaptive.maximum = max(1, int(self.threads) - self.streams)

    def _max_wait(self) -> int:
        # The same for all methods, so that those that have waited the longest are the first.
        if self._max_wait_ns is not None:
            return self._max_wait_ns
        return max(MIN_WAIT_NS, WAIT_IN_DURATIONS * self._usual_ns)

    def _late_wait(self) -> int:
        is_busy = self._adaptive is not None and self._adaptive.is_busy
        return self._max_wait() // (BUSY_LATE_SHARE if is_busy else LATE_SHARE)

    def _is_full(self, call: LimitedCall) -> bool:
        """Whether as many calls wait as can be started before they have waited for too long.

        Then a call that waited would be refused later, which takes more time than to refuse it on
        arrival. A call that is more critical than others waits: the others are refused before it.
        """
        queue, method = self._queue, call.method
        if call.waits_for_method:
            waiting, usual_ns = method.waiting, method.usual_ns
            if method.is_stream:  # its durations are not measured
                usual_ns = MAX_TOOK_NS
            can_run, wait_ns = method.maximum, self._max_wait()
        else:
            waiting, usual_ns = queue.total - queue.for_method, self._usual_ns
            if self._adaptive is not None and not method.is_slow:  # it does not wait for slow ones
                waiting, usual_ns = min(waiting, queue.quick), self._quick_usual_ns
            can_run = min(self.limit, max(1, self.threads - self.streams))
            wait_ns = self._late_wait()
        if not usual_ns or waiting < can_run * (1 + wait_ns / usual_ns):
            return False
        return not queue.has_less_critical(call)

    def _end_lateness(self, now_ns: int) -> None:
        """Stop being late, because no call waits for the server; not within `LATE_NS`."""
        if now_ns - self._late_at_ns >= LATE_NS:
            self._late = 0

    def _count_late(self, call: LimitedCall, reason: RefusalReason, now_ns: int) -> None:
        """Refuse a call because it has waited, or would wait, for too long: the server is late.

        Not if the call waited for the number of its own method, which says nothing about others.
        """
        level = call.criticality
        is_newer = level >= self._late or (
            now_ns - self._late_at_ns >= LATE_NS and not self._queue.has_more_critical(level)
        )
        if is_newer and not call.waits_for_method:
            self._late, self._late_at_ns = level, now_ns
        self._count_refused(call, reason)

    def _count_refused(self, call: LimitedCall, reason: RefusalReason) -> None:
        call.refused = reason
        key = call.criticality, reason
        self.refused[key] = self.refused.get(key, 0) + 1
        self._refuse(call, reason)
