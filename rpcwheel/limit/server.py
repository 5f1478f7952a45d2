"""The limiter of one server, with its lock, its status and its events.

`ServerLimit` is what `grpc` and `grpc.aio` share.
"""

from __future__ import annotations

import math
import random
import sys
import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel._grpc.handlers import kind_of
from rpcwheel.durations import to_ns
from rpcwheel.events import LimitIneffective, OverloadBegan, OverloadEnded, emit
from rpcwheel.events.events import plural
from rpcwheel.methods import matches
from rpcwheel.rpc import (
    CRITICALITY_KEY,
    DEFAULT_CRITICALITY,
    HEARTBEAT_KEY,
    NONCE_KEY,
    PUSHBACK_KEY,
    REFUSED_KEY,
    Criticality,
    criticality_named,
)
from rpcwheel.telemetry import components
from rpcwheel.timer.manual import checked_timer

from .limiter import PROBE, UNLIMITED, LimitedCall, LimitedMethod, Limiter, RefusalReason
from .pause import AcceptPause
from .policy import ADAPTIVE, LimitPolicy
from .rate import TokenBucket
from .refusals import Refusals

if TYPE_CHECKING:
    from collections.abc import Callable

    import grpc

    from rpcwheel.timer.api import Timer

NEVER_LIMITED: Final = ("/grpc.health.v1.Health/*", "/grpc.reflection.v1*.ServerReflection/*")

MAX_METHODS: Final = 4096
"""Methods that are remembered. A generic handler may serve any name."""

CPU_EVERY_NS: Final = 5_000_000
"""How often the processor time of a thread is read at most, which takes up to 0.8 us."""

NO_OVERLOAD: Final = (RefusalReason.RATE, RefusalReason.SHORT, RefusalReason.CLOSED)
"""The reasons for which also a server with little to do refuses calls."""


class Decisions(NamedTuple):
    """The calls to start and to refuse, and when to decide again."""

    started: list[LimitedCall]
    refused: list[tuple[LimitedCall, RefusalReason]]
    expires_ns: int | None
    """When to decide again, after `has_expired`; None if that is scheduled already."""


@dataclass(frozen=True, slots=True)
class RefusedStatus:
    """The calls of one criticality that a server has refused for one reason."""

    criticality: str
    reason: str
    calls: int


@dataclass(frozen=True, slots=True)
class LimitStatus:
    """The state of the limit of one server."""

    name: str
    limit: int | None
    """How many handlers may run now; None if only methods have limits, or it has no effect."""
    running: int
    """How many handlers run, without streams."""
    streams: int
    """How many streams are open."""
    waiting: int
    refused: tuple[RefusedStatus, ...]
    """Without those of which there are none; the most critical first."""
    problem: str
    """What is wrong with it; "" if nothing is."""


class ServerLimit:
    """The limiter of one server, and its lock. Any thread may use it."""

    def __init__(
        self,
        policy: LimitPolicy | None,
        limit_of: Callable[[str], LimitPolicy | None],
        *,
        timer: Timer | None,
    ) -> None:
        """Make the limiter of a server.

        Args:
            policy: The limit of the whole server; None if only methods have limits.
            limit_of: Returns the policy of a method: `policy`, or its own; None for no limit.
            timer: Any rpcwheel timer; None for `shared_timer()`.
        """
        settings = LimitPolicy() if policy is None else policy
        self._server_policy = policy
        self._pushback_ns = to_ns(settings.pushback)
        self._buckets = _buckets(policy)
        self.name = settings.name
        self._max_criticality = settings.max_criticality
        self._default = self._capped(DEFAULT_CRITICALITY)
        self._limit_of = limit_of
        self.timer = checked_timer(timer)
        self._methods: dict[tuple[str, bool], LimitedMethod | None] = {}
        """By name, and whether its handler is one of a stream: an interceptor of others may refuse
        the call of a stream with a handler that is none."""
        self.lock = threading.Lock()
        self.limiter = Limiter(policy, refuse=self._note_refused)
        self.pause = AcceptPause()
        self.cpu_ns = 0
        """The processor time that handlers have used, if they have threads."""
        self._expires_ns = 0
        """The time of the last scheduled `decide`; 0 if none is scheduled."""
        self._refused: list[tuple[LimitedCall, RefusalReason]] = []
        """The calls that were refused since the last `decide`, which returns them."""
        self.overload = Refusals(timer, self._overload_began, partial(OverloadEnded, self.name))
        self._lacks_executor = False
        self._counts = components.call_counts()
        components.add("limit", self, ends=True)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            components.end("limit", self)

    def call(self, details: grpc.HandlerCallDetails, handler: Any) -> LimitedCall | None:
        """Return the call that arrives; None if the server has no limit for its method."""
        name = details.method
        is_stream = handler.request_streaming or handler.response_streaming
        try:
            method = self._methods[name, is_stream]
        except KeyError:
            method = self._add_method(name, handler)
        if method is None:
            return None
        if method is UNLIMITED.method:
            return UNLIMITED
        if method is PROBE.method:
            return PROBE
        criticality, criticalities, nonce = self._default, 0, ""
        # Details of another library's interceptor may have no metadata.
        for key, value in getattr(details, "invocation_metadata", None) or ():
            if key == CRITICALITY_KEY:
                criticalities += 1
                named = criticality_named(value) if isinstance(value, str) else None
                valid = named if named and criticalities == 1 else DEFAULT_CRITICALITY
                criticality = self._capped(valid)
            elif key == NONCE_KEY:
                nonce = value
            elif key == HEARTBEAT_KEY and self._max_criticality is None and not is_stream:
                return PROBE
        return LimitedCall(self, method, criticality, nonce)

    def _capped(self, criticality: Criticality) -> Criticality:
        cap = self._max_criticality
        return criticality if cap is None else min(criticality, cap)

    def _add_method(self, name: str, handler: grpc.RpcMethodHandler) -> LimitedMethod | None:
        policy, kind = self._limit_of(name), kind_of(handler)
        is_stream = kind.streams_requests or kind.streams_responses
        method: LimitedMethod | None
        if any(matches(pattern, name) for pattern in NEVER_LIMITED):
            method = PROBE.method
        elif policy is None:
            method = None if self._server_policy is None else UNLIMITED.method
        else:
            own = None if policy is self._server_policy else policy
            counts, other = self._counts, self._methods.get((name, not is_stream))
            method = LimitedMethod(
                is_stream=is_stream,
                maximum=_own_maximum(own),
                buckets=self._buckets + _buckets(own) if other is None else other.buckets,
                counts=None if counts is None else counts.server.method(name, kind.grpc_type),
            )
        if len(self._methods) >= MAX_METHODS:  # those that run go on counting
            self._methods = {
                each: kept
                for each, kept in self._methods.items()
                if kept is not None and (kept.running or kept.waiting)
            }
        self._methods[name, is_stream] = method
        return method

    def begin_pause(self, now_ns: int, cpu_ns: int) -> bool:
        """Begin a pause if gRPC needs one; whether it begins now. The caller holds the lock."""
        limiter = self.limiter
        return self.pause.begin(
            now_ns,
            cpu_ns,
            limiter.running + limiter.extra,
            must_wait=limiter.waiting > 0,
            is_beyond_lock=limiter.is_beyond_lock,
        )

    def end_pause(self, now_ns: int, cpu_ns: int) -> bool:
        """End the pause if it may end; whether it has. The caller holds the lock."""
        limiter = self.limiter
        return self.pause.end(now_ns, cpu_ns, limiter.running + limiter.extra)

    def decide(self, now_ns: int, *, starts: bool = True) -> Decisions:
        """Decide about the calls that wait. The caller holds the lock, and releases it first.

        Args:
            now_ns: The time now.
            starts: False: start no calls. True: start them unless a pause is on.
        """
        limiter, started = self.limiter, []
        starts = starts and not self.pause.is_on(now_ns)
        if not starts:
            limiter.refuse_late(now_ns)
        while starts and (call := limiter.take(now_ns)) is not None:
            started.append(call)
        refused, self._refused = self._refused, []
        # Again if that time has passed: what was scheduled may have ended with its loop.
        expires_ns = None if now_ns < self._expires_ns else limiter.expiry_ns()
        self._expires_ns = expires_ns or self._expires_ns
        return Decisions(started, refused, expires_ns)

    def has_expired(self, expires_ns: int) -> None:
        """Note that the time `Decisions.expires_ns` has come, or could not be scheduled."""
        if expires_ns == self._expires_ns:  # else another one has been scheduled
            self._expires_ns = 0

    # Refusals

    def _note_refused(self, call: LimitedCall, reason: RefusalReason) -> None:
        self._refused.append((call, reason))

    def refusal(
        self, call: LimitedCall, reason: RefusalReason
    ) -> tuple[str, str, tuple[tuple[str, str], ...]]:
        """Count a refused call: once for each.

        Returns:
            The name of the status code, the details and the trailing metadata.
        """
        code = "UNAVAILABLE" if reason is RefusalReason.CLOSED else "RESOURCE_EXHAUSTED"
        counts = call.method.counts
        if counts is not None:
            counts.end(counts.begin(), code)
        pushback_ns = call.token_wait_ns + int(self._pushback_ns * (0.5 + random.random()))
        pushback_ms = max(1, pushback_ns // 1_000_000)  # gRPC's own retries hang if it is 0
        nonce = call.nonce
        # gRPC receives other values too, but does not send them.
        if not (isinstance(nonce, str) and nonce.isascii() and nonce.isprintable()):
            nonce = ""
        trailing = (PUSHBACK_KEY, str(pushback_ms)), (REFUSED_KEY, nonce)
        return code, reason.details, trailing

    def report_refused(self, refused: list[tuple[LimitedCall, RefusalReason]]) -> None:
        """Report that calls were refused. Without the lock."""
        count = sum(reason not in NO_OVERLOAD for _, reason in refused)
        if count:
            self.overload.note(count)

    def _overload_began(self) -> OverloadBegan:
        with self.lock:
            running, waiting = self.limiter.running + self.limiter.extra, self.limiter.waiting
        return OverloadBegan(self.name, running, waiting)

    def report_ineffective(self) -> None:
        """Report that the server has another executor: it serves calls, and none arrives here."""
        self._lacks_executor = True
        # On a worker, because sinks and log handlers of users may block.
        event = LimitIneffective(self.name)
        EXECUTOR.submit(("events of limit", id(self)), partial(emit, event))

    def status(self) -> LimitStatus:
        """Return the state, for metrics and the live view."""
        with self.lock:
            limiter = self.limiter
            refused = tuple(
                RefusedStatus(criticality.label, reason.label, calls)
                for (criticality, reason), calls in sorted(
                    limiter.refused.items(), key=lambda item: (-item[0][0], item[0][1].label)
                )
            )
            problem = ""
            is_ineffective = self._lacks_executor and not self.pause.arrivals
            if is_ineffective:
                problem = "no effect: the server needs kit.server_executor()"
            elif calls := self.overload.calls:
                problem = f"overloaded: it has refused {plural(calls, 'call')}"
            return LimitStatus(
                self.name,
                None if is_ineffective or math.isinf(limiter.limit) else int(limiter.limit),
                limiter.running + limiter.extra,
                limiter.streams,
                limiter.waiting,
                refused,
                problem,
            )


def _buckets(policy: LimitPolicy | None) -> tuple[TokenBucket, ...]:
    """Make the bucket of a policy, if it has a rate."""
    rate = None if policy is None else policy.rate
    return () if rate is None else (TokenBucket(rate.rate, rate.burst),)


def _own_maximum(policy: LimitPolicy | None) -> float:
    """Return how many handlers of a method may run by its own policy, if it has one."""
    if policy is None or policy.max_concurrent == ADAPTIVE:
        return math.inf
    return float(policy.max_concurrent)
