"""One subchannel of a balanced channel: its instance, its connection and its health."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import grpc

from rpcwheel.errors import public_name, safe_repr
from rpcwheel.transport.status import SubchannelStatus

from .dubbo import ABSENT, NO_CONVENTIONS, with_headers

if TYPE_CHECKING:
    from collections.abc import Container

    from rpcwheel.instance import ServiceInstance

IDLE: Final = grpc.ChannelConnectivity.IDLE
CONNECTING: Final = grpc.ChannelConnectivity.CONNECTING
READY: Final = grpc.ChannelConnectivity.READY
FAILING: Final = grpc.ChannelConnectivity.TRANSIENT_FAILURE
SHUTDOWN: Final = grpc.ChannelConnectivity.SHUTDOWN


FAILING_WEIGHT: Final = 1 / 16
"""The weight of a call in the share of failures."""

NO_FAILURES: Final = 0.001
"""A smaller share of failures is none."""

ERRORS_NS: Final = 1_000_000_000
"""How long a failed call adds to the load of its subchannel."""


@dataclass(slots=True, eq=False)
class RecentErrors:
    """The calls of about the last `ERRORS_NS` that failed because of the server, and the others.

    They are counted from the first failure on. Threads may read and count at the same time; a count
    may be lost.
    """

    errors: float = 0.0
    answers: float = 0.0
    at_ns: int = 0
    """The time of the last failure."""
    successes: int = 0
    """`SubchannelHealth.successes` at that time."""

    def count_error(self, now_ns: int, successes: int, *, is_in_successes: bool) -> None:
        """Count a call that failed because of the server.

        `successes` are those of `SubchannelHealth` now. They include this call if its status was an
        answer (`is_in_successes`).
        """
        rest = self._rest(now_ns)
        self.errors = self.errors * rest + 1.0
        self.answers = self.answers * rest + max(0, successes - self.successes - is_in_successes)
        self.at_ns, self.successes = now_ns, successes

    def attempts_per_answer(self, now_ns: int, successes: int) -> float:
        """Return about how many attempts an answer takes: 1.0 if none fails."""
        rest = self._rest(now_ns)
        answers = self.answers * rest + max(0, successes - self.successes)
        return 1.0 + self.errors * rest / (answers + 1.0)

    def _rest(self, now_ns: int) -> float:
        return max(0.0, 1.0 - (now_ns - self.at_ns) / ERRORS_NS)


@dataclass(slots=True, eq=False)
class SubchannelHealth:
    """What calls and health checks have shown of one subchannel. Times are on the timer's clock."""

    unhealthy_ns: int | None = None
    """Since when it is unhealthy; None if it is healthy."""
    unhealthy_reason: str = ""
    ejected: bool = False
    """Whether it is unhealthy because its calls failed."""
    ejections: int = 0
    recovered_ns: int = 0
    """When it last became healthy again."""
    generation: int = 0
    """Incremented when the subchannel becomes unhealthy, healthy or stale, or its instance was
    published again. Results of health checks of an earlier generation are ignored."""
    checks: int = 0
    """The number of failed health checks of this generation."""
    checking: bool = False
    """Whether a health check of this generation is under way."""
    suspected: bool = False
    """Whether that check is made although it is healthy, because its calls are canceled."""
    canceled: int = 0
    """The number of calls canceled in a row."""
    canceled_since: int = 0
    """`successes` at the first of them."""
    failures: int = 0
    """The number of calls that failed in a row."""
    successes: int = 0
    window_ns: int = 0
    """The begin of the interval of `failure_percentage`."""
    window_failures: int = 0
    window_successes: int = 0
    """`successes` at its begin."""
    failing: float = 0.0
    """The share of calls that fail; the last one has the weight `FAILING_WEIGHT`."""
    recent: RecentErrors | None = None
    """None if no call has failed for about a second."""

    def window_calls(self) -> int:
        """Return the number of calls in the interval."""
        return self.window_failures + self.successes - self.window_successes

    def share_of_failures(self) -> float:
        """Return the share of the last calls that failed; more after several in a row."""
        return max(self.failing, self.failures / (self.failures + 2))

    def check_anew(self) -> None:
        """Begin a generation: results of earlier health checks count no more."""
        self.generation += 1
        self.checks = 0
        self.checking = self.suspected = False

    def set_unhealthy(self, reason: str, now_ns: int) -> None:
        """Make the subchannel unhealthy."""
        self.unhealthy_ns, self.unhealthy_reason = now_ns, reason
        self.check_anew()

    def set_healthy(self, now_ns: int) -> int:
        """Make the subchannel healthy and return for how long it was not."""
        since_ns = now_ns if self.unhealthy_ns is None else self.unhealthy_ns
        self.unhealthy_ns, self.unhealthy_reason = None, ""
        self.check_anew()
        self.ejected = False
        self.failures = self.window_failures = 0
        self.window_ns, self.window_successes = now_ns, self.successes
        self.failing = 0.0
        self.recovered_ns = now_ns
        return now_ns - since_ns


@public_name("Subchannel")
class SubchannelBase:
    """One server of a balanced channel; the part that both worlds have in common."""

    def __init__(self, pool: Any, instance: ServiceInstance, started_ns: int) -> None:
        self._pool = pool  # its `SubchannelPool`
        self.instance = instance
        self.started_ns = started_ns
        """When the instance started, on the timer's clock; `-NEVER` if that is not known."""
        self.connection: Any = None
        """Its `ReconnectingChannel`; None until it is made."""
        self.health = SubchannelHealth()
        self.conventions = NO_CONVENTIONS
        """What its server expects of calls."""
        self.stale = False
        """Whether its instance has left the registry and it is kept because it still answers."""
        self.removed = False
        """Whether it was removed, because its instance was removed or the channel is closed."""
        self.error_text = ""
        """Why its last connection attempt failed; "" if that is not known."""
        self.explained_s = -math.inf
        """When a probe was last sent to find that out, on the monotonic clock."""
        self.connect_after_ns = 0
        """When `connect` may be called again after it raised, on the monotonic clock."""

    def has_other(self, tried: Container[object]) -> bool:
        """Whether the channel has another subchannel that is READY, as good, and not in `tried`."""
        return bool(self._pool.has_other(self, tried))

    def lacks_service(self, details: str | None) -> bool:
        """Whether these details of UNIMPLEMENTED say that the server has the service no more."""
        return self.conventions.is_dubbo and details == ABSENT

    def metadata_of(self, metadata: Any) -> Any:
        """Return the metadata of a call on it, with the headers that its server expects."""
        headers = self.conventions.headers
        return with_headers(metadata, headers) if headers else metadata

    @property
    def id(self) -> str:
        """The id of its instance."""
        return self.instance.id

    @property
    def address(self) -> str:
        """Host and port of its instance, such as `10.0.0.7:50051`."""
        return self.instance.address

    @property
    def calls(self) -> int:
        """The number of calls in flight."""
        return 0 if self.connection is None else int(self.connection.calls)

    @property
    def load(self) -> float:
        """The number of calls in flight; more if calls have failed within about the last second.

        Then these, and one more, are multiplied by the attempts that an answer takes.
        """
        recent = self.health.recent
        if recent is None:
            return self.calls
        attempts = recent.attempts_per_answer(self._pool.now_ns(), self.health.successes)
        if attempts == 1.0:
            self.health.recent = None
        return (self.calls + 1) * attempts - 1.0

    @property
    def state(self) -> grpc.ChannelConnectivity:
        """The state of its connection. READY if `connect` made a channel that hides its state."""
        if self.removed:
            return SHUTDOWN
        if self.is_ready():
            return READY  # first, because this is frequent and fast
        connection = self.connection
        if connection is None or not connection.accepts_calls:  # or the user closed or drained it
            return FAILING if time.monotonic_ns() < self.connect_after_ns else IDLE
        try:
            state = connection.get_state()
        except Exception:  # noqa: BLE001 - of a channel that `connect` made
            return READY
        if state is None:
            return READY
        return IDLE if state is SHUTDOWN else state  # the user closed what `connect` made

    @property
    def healthy(self) -> bool:
        """Whether it is healthy. Unhealthy subchannels get calls only if no other is READY."""
        return self.health.unhealthy_ns is None

    @property
    def unhealthy_reason(self) -> str:
        """Why it is unhealthy; "" if it is healthy."""
        return self.health.unhealthy_reason

    @property
    def ejected(self) -> bool:
        """Whether it is unhealthy because its calls failed."""
        return self.health.ejected

    def mark_unhealthy(self, reason: str = "asked for") -> None:
        """Give it no calls while a healthy subchannel is READY, until it answers a health check.

        Ignored if it is unhealthy already, or removed. Any thread.

        Args:
            reason: The reason for the event.
        """
        self._pool.checker.mark_unhealthy(self, reason)

    def mark_healthy(self) -> None:
        """Give it calls again at once. Ignored if it is healthy. Any thread."""
        self._pool.checker.mark_healthy(self)

    def is_ready(self) -> bool:
        """Whether its connection is READY now."""
        connection = self.connection
        return connection is not None and bool(connection.is_ready())

    def succeeded(self) -> None:
        """Count a call that was answered."""
        health = self.health
        health.failures = 0
        health.successes += 1
        if health.failing:
            failing = health.failing * (1.0 - FAILING_WEIGHT)
            health.failing = failing if failing > NO_FAILURES else 0.0

    def status(self) -> SubchannelStatus:
        """Describe the subchannel now."""
        instance, state, reason = self.instance, self.state, self.unhealthy_reason
        problem = f"unhealthy: {reason}" if not self.healthy else ""
        if not problem and self.stale:
            problem = "stale: its instance has left the registry"
        if not problem and state is FAILING:
            problem = "it cannot be reached"
        return SubchannelStatus(
            id=self.id,
            address=self.address,
            state=state.name,
            healthy=self.healthy,
            unhealthy_reason=reason,
            ejected=self.ejected,
            stale=self.stale,
            calls=self.calls,
            weight=instance.weight,
            zone=instance.zone,
            problem=problem,
        )

    @safe_repr
    def __repr__(self) -> str:
        health = "" if self.healthy else f", unhealthy: {self.unhealthy_reason}"
        stale = ", stale" if self.stale else ""
        return (
            f"<{type(self).__name__} {self.id} of {self.instance.service!r}, "
            f"{self.state.name}{health}{stale}>"
        )


S = TypeVar("S", bound=SubchannelBase)
