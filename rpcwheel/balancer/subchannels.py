"""The subchannels of one balanced channel, and which of them gets the next call. For both worlds.

Each instance of the service has a subchannel with its own connection. A pick returns a subchannel
whose connection is READY; its state is read at the pick. Most pickers choose among the READY
subchannels of the best `SubchannelLevel`.

At the first call all subchannels of the best level connect. Those of the next level connect if all
of the better levels have failed, or none of them has become READY for `FAILOVER_NS`. With very many
instances a channel has subchannels for only some of them (gRFC A68).

The lock guards everything except the pick itself, which reads attributes that are replaced as a
whole. The only user code under the lock is `Picker.prepare`, and the only calls of gRPC read a
state.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from enum import IntEnum
from functools import partial
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Final,
    Generic,
    NamedTuple,
    Protocol,
    TypeAlias,
    TypeVar,
)

import grpc

from rpcwheel._concurrency.callbacks import CloseCallbacks, run_callback, weak_callback
from rpcwheel.backoff import Backoff
from rpcwheel.durations import NEVER, to_ns, to_seconds
from rpcwheel.errors import ConfigurationError, public_name, safe_repr
from rpcwheel.events import (
    CallbackFailed,
    StaleInstancesKept,
    SubchannelHealthy,
    SubchannelUnhealthy,
    emit,
)
from rpcwheel.telemetry import components
from rpcwheel.timer.clock import checked_timer, clock_of
from rpcwheel.transport.arguments import checked_options, refuse_both
from rpcwheel.transport.state import ChannelStatus, SubchannelStatus, channel_problem

from .lb_policy import checked_lb_policy
from .policy import DEFAULT_HEALTH_CHECK_BACKOFF, checked_policy
from .subset import InstanceSubset

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable

    from rpcwheel.instance import ServiceInstance
    from rpcwheel.timer.api import Timer

    from .pickers import Pick, Picker
    from .policy import BalancerPolicy

IDLE: Final = grpc.ChannelConnectivity.IDLE
CONNECTING: Final = grpc.ChannelConnectivity.CONNECTING
READY: Final = grpc.ChannelConnectivity.READY
FAILING: Final = grpc.ChannelConnectivity.TRANSIENT_FAILURE
SHUTDOWN: Final = grpc.ChannelConnectivity.SHUTDOWN

ORDER: Final = (READY, CONNECTING, IDLE, FAILING)

FAILURES: Final = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED"})
"""Statuses that show that a server may not work. Every other status is an answer."""

UNDECIDED: Final = frozenset({"CANCELLED", ""})
"""Statuses that show neither; "" is a call without a status."""

RECHECK_NS: Final = 100_000_000
RECHECK_CONNECTING_NS: Final = 2_000_000
"""How often calls read the states again while not all subchannels are READY; the second value
applies while a subchannel is connecting."""

FAILOVER_NS: Final = 1_000_000_000
"""How long the subchannels of a level may take to become READY before the next level connects."""

LOST_NS: Final = 60_000_000_000
"""How long instances that left the registry are remembered for self-preservation. If several
servers are cut off at the same time, their leases end within this time."""

RECONNECT_NS: Final = 1_000_000_000
"""The wait before `connect` is called again after it raised."""

FIRST_POLL_S: Final = 0.0005
MAX_POLL_S: Final = 0.05
"""How often states are read while calls wait; the interval grows from the first to the second."""

OTHER_TIMEOUT_S: Final = 1.0
"""The maximum wait of an attempt of a hedged call for a subchannel that was not tried."""

EXPLAIN_TIMEOUT_S: Final = 0.03
MAX_EXPLAINED: Final = 3
EXPLAIN_AGAIN_S: Final = 1.0
"""Probes find out why servers can't be reached: their timeout, the number of servers that are
probed, and for how long the result is used."""

SLOW_START_STEPS: Final = 20
"""The number of steps in which a weight grows."""

MAX_BACKOFF_ATTEMPTS: Final = 64
"""The number of attempts after which the backoff no longer grows: wait objects may overflow."""

MIN_CHECK_DELAY_NS: Final = 10_000_000
"""The minimum delay between health checks of a subchannel."""

MAX_RECONNECT_BACKOFF: Final = ("grpc.max_reconnect_backoff_ms", 3_000)
"""With gRPC's default, a server that was away for long gets its first call up to 2 minutes late."""

CANCELED_CALLS: Final = 5
"""The number of canceled calls, without an answer in between, that leads to a health check."""

MAX_REPICKS: Final = 3
"""The maximum number of picks of one call if the picked subchannel is not READY."""


class SubchannelLevel(IntEnum):
    """How preferable a subchannel is for calls; less is better."""

    PREFERRED_ZONE = 0
    """Healthy, in the preferred zone. Without a preferred zone every zone counts as preferred."""
    OTHER_ZONE = 1
    """Healthy, in another zone."""
    NO_WEIGHT = 2
    """Healthy, with weight 0."""
    DRAINING = 3
    """Healthy, and its instance is DRAINING."""
    UNHEALTHY = 4
    """Marked unhealthy by the user, by a heartbeat or by outlier ejection."""


PREFERRED_ZONE, OTHER_ZONE, NO_WEIGHT, DRAINING, UNHEALTHY = SubchannelLevel
# `SubchannelLevel.DRAINING` takes 0.1 µs in Python 3.11, and `level` is called for each subchannel.


@public_name("Subchannel")
class SubchannelBase:
    """One server of a balanced channel; the part that both worlds have in common."""

    _unhealthy_ns: int | None = None
    _unhealthy_reason = ""

    def __init__(
        self, pool: SubchannelPool[Any], instance: ServiceInstance, started_ns: int
    ) -> None:
        self._pool = pool
        self.instance = instance
        self.started_ns = started_ns
        """When the instance started, on the timer's clock; `-NEVER` if that is not known."""
        self.connection: Any = None
        """Its `ReconnectingChannel`; None until it is made."""
        self.stale = False
        """Whether its instance has left the registry and it is kept because it still answers."""
        self.removed = False
        """Whether it was removed, because its instance was removed or the channel is closed."""
        self.error_text = ""
        """Why its last connection attempt failed; "" if that is not known."""
        self.connect_after_ns = 0
        """When `connect` may be called again after it raised, on the monotonic clock."""
        self.ejected = False
        """Whether it is unhealthy because its calls failed."""
        self.ejections = 0
        self.taken_back_ns = 0
        self.generation = 0
        """Incremented when the subchannel becomes unhealthy, healthy or stale. Results of health
        checks of an earlier generation are ignored."""
        self.checks = 0
        """The number of failed health checks of this generation."""
        self.canceled = self.canceled_since = 0
        """The number of calls canceled in a row, and `successes` at the first of them."""
        self.suspected = False
        """Whether its health is checked although it is healthy, because its calls are canceled."""
        self.checking = False
        """Whether a health check is under way."""
        self.failures = 0
        """The number of calls that failed in a row."""
        self.successes = 0
        self.window_ns = 0
        self.window_failures = 0
        self.window_successes = 0

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
        return self._unhealthy_ns is None

    @property
    def unhealthy_reason(self) -> str:
        """Why it is unhealthy; "" if it is healthy."""
        return self._unhealthy_reason

    def mark_unhealthy(self, reason: str = "asked for") -> None:
        """Give it no calls while a healthy subchannel is READY, until it answers a health check.

        Ignored if it is unhealthy already, or removed. Any thread.

        Args:
            reason: The reason for the event.
        """
        self._pool.mark_unhealthy(self, reason)

    def mark_healthy(self) -> None:
        """Give it calls again at once. Ignored if it is healthy. Any thread."""
        self._pool.mark_healthy(self)

    def is_ready(self) -> bool:
        """Whether its connection is READY now."""
        connection = self.connection
        return connection is not None and bool(connection.is_ready())

    def succeeded(self) -> None:
        """Count a call that was answered."""
        self.failures = 0
        self.successes += 1

    def level(self, zone: str) -> SubchannelLevel:
        """Return its level on a channel with this preferred zone; "" for no preference."""
        instance = self.instance
        if self._unhealthy_ns is not None:
            return UNHEALTHY
        if instance.status == "DRAINING":
            return DRAINING
        if not instance.weight:
            return NO_WEIGHT
        return OTHER_ZONE if zone and instance.zone != zone else PREFERRED_ZONE

    def status(self) -> SubchannelStatus:
        """Describe the subchannel now."""
        instance, state, reason = self.instance, self.state, self.unhealthy_reason
        problem = f"unhealthy: {reason}" if not self.healthy else ""
        if not problem and self.stale:
            problem = "stale: its instance has left the registry"
        if not problem and state is FAILING:
            problem = "it cannot be reached"
        return SubchannelStatus(
            self.id,
            self.address,
            state.name,
            self.healthy,
            reason,
            self.ejected,
            self.stale,
            self.calls,
            instance.weight,
            instance.zone,
            problem,
        )

    def set_unhealthy(self, reason: str, now_ns: int) -> None:
        """Make it unhealthy. The caller holds the pool's lock."""
        self._unhealthy_ns, self._unhealthy_reason = now_ns, reason
        self.generation += 1
        self.checks = 0

    def set_healthy(self, now_ns: int) -> int:
        """Make it healthy and return for how long it was not. The caller holds the pool's lock."""
        since_ns = now_ns if self._unhealthy_ns is None else self._unhealthy_ns
        self._unhealthy_ns, self._unhealthy_reason = None, ""
        self.generation += 1
        self.ejected = False
        self.failures = self.window_failures = 0
        self.window_ns, self.window_successes = now_ns, self.successes
        self.taken_back_ns = now_ns
        return now_ns - since_ns

    @safe_repr
    def __repr__(self) -> str:
        health = "" if self.healthy else f", unhealthy: {self.unhealthy_reason}"
        stale = ", stale" if self.stale else ""
        return (
            f"<{type(self).__name__} {self.id} of {self.instance.service!r}, "
            f"{self.state.name}{health}{stale}>"
        )


S = TypeVar("S", bound=SubchannelBase)
S_contra = TypeVar("S_contra", contravariant=True)

_Levels: TypeAlias = dict[SubchannelLevel, list[tuple[S, grpc.ChannelConnectivity]]]
"""The subchannels of each level, with their states."""


class _Change(NamedTuple, Generic[S]):
    """The consequences of an update."""

    removed: tuple[S, ...]
    """The removed subchannels, which are drained."""
    renewed: tuple[S, ...]
    """The unhealthy subchannels whose instance was published again by another process."""
    returned: tuple[S, ...]
    """The subchannels that were stale and whose instances were published again."""
    retained: tuple[S, ...]
    """The subchannels that are stale from now on."""


class Checks(Protocol[S_contra]):
    """The health checks of a pool."""

    def check_later(self, subchannel: S_contra, delay_ns: int | None = None) -> None:
        """Check a subchannel after a delay; None for the usual delay."""

    def forget(self, subchannel: S_contra) -> None:
        """Cancel the check of a subchannel."""

    def close(self) -> None:
        """Cancel all checks."""


class Refusal(NamedTuple):
    """The status of a call that gets no subchannel."""

    code: grpc.StatusCode
    details: str
    unreachable: bool = False
    """Whether all connection attempts have failed."""
    final: bool = False
    """Whether it applies to calls with `wait_for_ready` too."""


class SubchannelPool(Generic[S]):
    """The subchannels of one channel. Thread-safe.

    The subclasses of the two worlds make connections, send health checks and hold waiting calls.
    """

    subchannel_class: ClassVar[type[Any]]
    channel_class: ClassVar[type[Any]]
    """The `ReconnectingChannel` of the world."""
    checker: Checks[S]
    on_unreachable: Callable[[], object] | None = None
    """Called repeatedly while calls are made and a server can't be reached or none is known. Any
    thread. Must not block or raise."""
    stale_grace_ns: int | None = None
    """How long stale subchannels that answer are kept after the last change of what is stale, once
    they are no longer the majority. None: the instances are not of a registry, so what an update
    lacks is removed at once, unless it is empty."""
    _is_unreachable = False

    closing = False
    """Whether `close` was called: new calls are refused. In aio, waiting calls may still begin."""
    closed = False
    _known = False
    _error = ""
    _error_is_final = False
    _mixed: Refusal | None = None
    _pick: Pick[S] | None = None
    _unsettled = True
    """Whether states or weights must be read again at `_recheck_ns`."""
    _recheck_ns = 0
    _reweigh_ns = NEVER
    _unready_ns: int | None = None
    """Since when no subchannel is READY, on the monotonic clock."""

    def __init__(
        self,
        name: str,
        lb_policy: str | Picker,
        policy: BalancerPolicy | None,
        *,
        timer: Timer | None,
        connect: Callable[[ServiceInstance, list[tuple[str, Any]]], Any] | None,
        options: object,
        own: dict[str, Any],
        on_subchannel: Callable[[S], object] | None,
        on_removed: Callable[[S], object] | None,
    ) -> None:
        """Check the arguments of the channel; begin without subchannels.

        Args:
            name: The name of the service.
            lb_policy: The name of a picker, or a `Picker`.
            policy: The settings; None for the defaults.
            timer: The timer whose clock is used for slow start, ejection and health.
            connect: Makes gRPC's channels; None: they are made with the arguments in `own`.
            options: gRPC's options of each connection.
            own: The other arguments of each connection; not allowed together with `connect`.
            on_subchannel: Called with each subchannel when its channel is made.
            on_removed: Called with each subchannel whose instance was removed.
        """
        self.name = _checked_name(name)
        self._picker = checked_lb_policy(lb_policy)
        self.policy = checked_policy(policy)
        self._pick_timeout_s = to_seconds(to_ns(self.policy.pick_timeout))
        self.check_timeout_s = to_seconds(to_ns(self.policy.health_check_timeout))
        backoff = self.policy.health_check_backoff
        self._check_backoff = Backoff(DEFAULT_HEALTH_CHECK_BACKOFF if backoff is None else backoff)
        self._slow_start_ns = to_ns(self.policy.slow_start or 0)
        self.now_ns = clock_of(checked_timer(timer))
        refuse_both(connect, **own)
        self._connect = connect
        self._own = own | {"options": subchannel_options(options), "timer": timer}
        self._protocol = "grpc" if own["credentials"] is None else "grpcs"
        if connect is not None:
            self._protocol = ""  # the user's `connect` decides how it connects
        self._listeners = [
            (
                _checked_callback(on_subchannel, "on_subchannel"),
                _checked_callback(on_removed, "on_removed"),
            )
        ]
        self.close_callbacks = CloseCallbacks(name)
        self._connecting: set[S] = set()
        self._replaced: list[Any] = []  # connections that the user has closed or drained
        self._poll_s = FIRST_POLL_S
        self._explained_s = -EXPLAIN_AGAIN_S
        self._instances = InstanceSubset(
            size=None if self._picker.sees_all_states else self.policy.subset_size,
            zone=self.policy.zone,
            protocol=self._protocol,
        )
        self.lock = threading.RLock()  # a finalizer may end a call on any thread
        self._by_id: dict[str, S] = {}
        self.subchannels: tuple[S, ...] = ()
        """The subchannels that may get calls, in the order of their ids."""
        self.leaving: list[S] = []
        """The removed subchannels that still have calls."""
        self.empty_reason = ""
        """Why there are no instances, for the status of calls."""
        self._lost: dict[str, tuple[int, ServiceInstance]] = {}
        """Instances that left the registry without DRAINING, and when."""
        self._returned_ns = 0
        """When an instance became or ceased to be stale for the last time."""
        self._chosen: tuple[list[S], list[int]] = ([], [])
        """The subchannels and weights that `_pick` was prepared with."""
        components.add("channel", self)

    @property
    def calls(self) -> int:
        """The number of calls in flight, also on subchannels whose instance was removed."""
        return sum(subchannel.calls for subchannel in (*self.subchannels, *self.leaving))

    # --- For subclasses to override; not called under the lock, must not raise ---

    def connect(self, subchannels: Iterable[S]) -> None:
        """Call `connect_now`, on the right thread."""
        raise NotImplementedError

    def drain(self, subchannels: Iterable[S]) -> None:
        """Call `drain_now`, on the right thread."""
        raise NotImplementedError

    def changed(self) -> None:
        """Wake calls and subscribers that wait for a change."""
        raise NotImplementedError

    def run_soon(self, check: Callable[[], object]) -> None:
        """Call `check()` on a worker, or on the loop. Any thread; does not block."""
        raise NotImplementedError

    def probe(self, subchannel: S, done: Callable[[bool | None], object]) -> None:
        """Send a health check on a connection that is READY.

        Calls `done(answered)` on a worker, or on the loop. If the process is exiting, calls
        `done(None)`.
        """
        raise NotImplementedError

    def closed_error(self) -> Exception:
        """Return the exception that gRPC raises for a call on a closed channel."""
        raise NotImplementedError

    # --- Connections ---

    def connect_now(self, subchannels: Iterable[S]) -> None:
        """Connect the subchannels that are IDLE, on this thread; does not wait for connections."""
        now_ns = time.monotonic_ns()
        with self.lock:
            to_connect = [
                subchannel
                for subchannel in subchannels
                if subchannel not in self._connecting and now_ns >= subchannel.connect_after_ns
            ]
            self._connecting.update(to_connect)
        for subchannel in to_connect:
            try:
                connection = self.connection_of(subchannel)
                with suppress(Exception):  # a channel of `connect` that hides its state
                    if connection.get_state(try_to_connect=True) is SHUTDOWN:
                        connection.drain(0)  # the user closed its channel; make another
            except BaseException as error:
                self.connect_failed(subchannel, error)
                if not isinstance(error, Exception):
                    raise
            finally:
                with self.lock:
                    self._connecting.discard(subchannel)

    def connection_of(self, subchannel: S) -> Any:
        """Return the channel of a subchannel; makes one if there is none, or the user closed it.

        Raises:
            ValueError, grpc.aio.UsageError: The subchannel was removed; has gRPC's text.
            Exception: Whatever `connect` raised.
        """
        current = subchannel.connection
        if current is not None and (current.accepts_calls or subchannel.removed):
            return current
        if subchannel.removed:
            raise self.closed_error()
        new = self.new_connection(subchannel.instance)
        with self.lock:
            current = subchannel.connection
            is_used = (current is None or not current.accepts_calls) and not subchannel.removed
            if is_used:
                self._replaced = [old for old in self._replaced if not old.closed]
                if current is not None and not current.closed:
                    self._replaced.append(current)  # its calls continue
                subchannel.connection = new
        if not is_used:
            new.drain(0)
            return self.connection_of(subchannel)
        for on_subchannel, _ in tuple(self._listeners):
            if on_subchannel is not None:
                run_callback(self.name, on_subchannel, subchannel)
        return new

    def add_listener(
        self, on_subchannel: Callable[[S], object], on_removed: Callable[[S], object]
    ) -> None:
        """Add callbacks; calls `on_subchannel` with each subchannel that has a channel already."""
        with self.lock:
            self._listeners.append((on_subchannel, on_removed))
            connected = [
                subchannel for subchannel in self.subchannels if subchannel.connection is not None
            ]
        for subchannel in connected:
            run_callback(self.name, on_subchannel, subchannel)

    def new_connection(self, instance: ServiceInstance) -> Any:
        """Make a `ReconnectingChannel`."""
        connect = None if self._connect is None else partial(self._connect, instance)
        channel = self.channel_class(instance.target, connect=connect, **self._own)
        components.remove("channel", channel)  # it is reported as a subchannel
        return channel

    def drain_now(self, subchannels: Iterable[S]) -> None:
        """Close the connections of removed subchannels when their calls have ended."""
        for subchannel in subchannels:
            if subchannel.connection is not None:
                subchannel.connection.on_close(weak_callback(self.removed_closed, subchannel))
                subchannel.connection.drain(
                    self.policy.drain_timeout,
                    reason=f"{subchannel.id} was removed from {self.name}",
                )
            for _, on_removed in tuple(self._listeners):
                if on_removed is not None:
                    run_callback(self.name, on_removed, subchannel)

    def removed_closed(self, subchannel: S) -> None:
        """Forget a removed subchannel whose connection is closed."""
        with self.lock:
            if subchannel in self.leaving:
                self.leaving.remove(subchannel)

    def connect_failed(self, subchannel: S, error: BaseException) -> None:
        """Record that the user's `connect` raised. Ignored if the subchannel was removed."""
        if subchannel.removed:
            return
        subchannel.error_text = f"connect raised {error!r}"
        subchannel.connect_after_ns = time.monotonic_ns() + RECONNECT_NS
        emit(CallbackFailed(self.name, f"connect {subchannel.id}", error))

    # --- Instances ---

    def update(self, instances: Iterable[ServiceInstance], *, expired: Container[str] = ()) -> None:
        """Set the instances; changes only what differs.

        Args:
            instances: The instances.
            expired: Ids of instances that the registry lost, and not by a withdrawal. Those that
                still answer are kept as stale.

        Raises:
            TypeError: An element is not a `ServiceInstance`; nothing has changed.
        """
        with self.lock:
            if self.closed:
                return
            self._instances.update(instances)
            change = self._update(self._kept_as_stale(expired))
            if change is None:
                return
            listed = self._instances.by_id
            left = [
                subchannel.instance for subchannel in change.removed if subchannel.id not in listed
            ]
            self._remember_lost(left, listed)
        self._apply(change)

    def _apply(self, change: _Change[S]) -> None:
        """Perform what an update requires outside the lock."""
        if change.retained:
            emit(
                StaleInstancesKept(
                    self.name, tuple(subchannel.id for subchannel in change.retained)
                )
            )
        for subchannel in change.returned:
            if subchannel.healthy:
                self.checker.forget(subchannel)
        for subchannel in change.removed:
            self.checker.forget(subchannel)
        self.drain(change.removed)
        self.changed()
        for subchannel in (*change.renewed, *change.retained):
            self.checker.check_later(subchannel, 0)

    def remove_stale(self, subchannel: S) -> None:
        """Remove a stale subchannel that no longer answers."""
        with self.lock:
            if not subchannel.stale or subchannel.removed:
                return
            change = self._update(
                {id_: other for id_, other in self._stale().items() if other is not subchannel}
            )
        if change is not None:
            self._apply(change)

    def expire_stale(self) -> bool:
        """Remove all stale subchannels, although they answer, if that is due.

        Not as long as most subchannels are stale: the few others would get all calls. And not
        before the servers that can be published again have been.
        """
        with self.lock:
            if self.stale_grace_ns is None or 2 * len(self._stale()) > len(self._by_id):
                return False
            if self.now_ns() - self._returned_ns < self.stale_grace_ns:
                return False
            change = self._update({})
        if change is not None:
            self._apply(change)
        return True

    def _stale(self) -> dict[str, S]:
        return {id_: subchannel for id_, subchannel in self._by_id.items() if subchannel.stale}

    def _kept_as_stale(self, expired: Container[str]) -> dict[str, S]:
        """Return the subchannels to keep although the registry does not list their instances."""
        listed = self._instances.by_id
        if not self.policy.self_preservation:
            return {}
        if not listed:
            return self._last_ones()
        if self.stale_grace_ns is None:
            return {}
        return {
            id_: subchannel
            for id_, subchannel in self._by_id.items()
            if (subchannel.stale or id_ in expired)
            and id_ not in listed
            and subchannel.instance.status != "DRAINING"
        }

    def _update(self, stale: dict[str, S]) -> _Change[S] | None:
        """Use the known instances and these stale subchannels; None if nothing changes."""
        was_usable = self._known and self._mixed is None
        self._known, self._error = True, ""
        selected = self._select_instances(len(stale))
        if self._mixed is not None:
            stale = {}
        elif was_usable and self._has_just(selected, stale):
            return None
        kept = dict(stale)
        renewed: list[S] = []
        returned: list[S] = []
        retained = tuple(subchannel for subchannel in stale.values() if not subchannel.stale)
        for newly_stale in retained:
            newly_stale.stale = True
            newly_stale.generation += 1
        for instance in selected:
            subchannel = self._by_id.get(instance.id)
            if subchannel is None or _place(subchannel.instance) != _place(instance):
                kept[instance.id] = self._new_subchannel(instance)
                continue
            if subchannel.stale:
                subchannel.stale = False
                returned.append(subchannel)
            if not subchannel.healthy and subchannel.instance.epoch != instance.epoch:
                subchannel.generation += 1
                subchannel.checks = 0
                renewed.append(subchannel)
            subchannel.instance = instance
            kept[instance.id] = subchannel
        removed = self._replace(kept)
        if retained or returned or any(subchannel.stale for subchannel in removed):
            self._returned_ns = self.now_ns()
        return _Change(removed, tuple(renewed), tuple(returned), retained)

    def _has_just(self, instances: list[ServiceInstance], stale: dict[str, S]) -> bool:
        """Whether the subchannels have exactly these instances, without any change."""
        if len(instances) + len(stale) != len(self._by_id):
            return False
        for instance in instances:
            subchannel = self._by_id.get(instance.id)
            if subchannel is None or subchannel.instance is not instance or subchannel.stale:
                return False
        return all(subchannel.stale for subchannel in stale.values())

    def _remember_lost(self, lost: list[ServiceInstance], present: Container[str]) -> None:
        """Remember instances that left without DRAINING, for `LOST_NS`."""
        now_ns = self.now_ns()
        self._lost = {
            id_: (since_ns, instance)
            for id_, (since_ns, instance) in self._lost.items()
            if id_ not in present and now_ns - since_ns < LOST_NS
        }
        self._lost |= {
            instance.id: (now_ns, instance) for instance in lost if instance.status != "DRAINING"
        }

    def _last_ones(self) -> dict[str, S]:
        """Return the subchannels to keep when no instance is left in the registry.

        Includes instances that were lost shortly before: if all servers are cut off from the
        registry, their leases end one after the other.
        """
        kept = {
            id_: subchannel
            for id_, subchannel in self._by_id.items()
            if subchannel.instance.status != "DRAINING"
        }
        self._remember_lost([], kept)
        lost, self._lost = self._lost, {}
        for id_, (_, instance) in lost.items():
            kept[id_] = self._new_subchannel(instance)
        return kept

    def _replace(self, kept: dict[str, S]) -> tuple[S, ...]:
        """Use these subchannels from now on; returns the removed ones."""
        remaining = set(kept.values())
        removed = tuple(
            subchannel for subchannel in self.subchannels if subchannel not in remaining
        )
        for subchannel in removed:
            subchannel.removed = True
            if subchannel.connection is not None:
                self.leaving.append(subchannel)
        self._by_id = kept
        self.subchannels = tuple(kept[name] for name in sorted(kept))
        self._choose_anew()
        return removed

    def _select_instances(self, stale: int) -> list[ServiceInstance]:
        """Return the instances that get a subchannel, beside so many stale ones.

        If an instance requires TLS, a channel without TLS connects to none. Otherwise an attacker
        who can write to the registry could have requests sent in plain text.
        """
        self._mixed = None
        total, usable = len(self._instances.by_id), len(self._instances.usable)
        if self._protocol == "grpc" and usable < total:
            which = "all" if not usable else f"{total - usable} of {total}"
            details = (
                f"{which} instances of {self.name} require TLS, and this channel has no "
                "credentials; use rpcwheel.secure_channel(target, credentials)"
            )
        elif self._protocol and total and not usable:
            details = (
                f"no instance of {self.name} is published with TLS (protocol='grpcs'), and this "
                "channel has credentials; publish the servers with protocol='grpcs', or use "
                "rpcwheel.insecure_channel(target)"
            )
        else:
            return self._instances.chosen(beside=stale)
        self._mixed = Refusal(grpc.StatusCode.FAILED_PRECONDITION, details, final=True)
        return []

    def _new_subchannel(self, instance: ServiceInstance) -> S:
        started_ns = -NEVER
        if instance.started_at:  # not in the future, whatever its own clock says
            started_ns = self.now_ns() - max(0, to_ns(time.time() - instance.started_at))
        subchannel: S = self.subchannel_class(self, instance, started_ns)
        return subchannel

    def report_error(self, error: str, *, wait: bool) -> None:
        """Record why the instances are not known. Ignored if they are known."""
        with self.lock:
            if self._known:
                return
            self._error, self._error_is_final = error, not wait
        self.changed()

    def close_all(self) -> list[Any]:
        """Remove all subchannels. Returns the connections to close; none at the second call."""
        with self.lock:
            if self.closed:
                return []
            self.closing = self.closed = True
            gone = (*self.subchannels, *self.leaving)
            for subchannel in gone:
                subchannel.removed = True
            self.subchannels, self.leaving, self._by_id, self._pick = (), [], {}, None
            replaced, self._replaced = self._replaced, []
        self.checker.close()
        return [
            *(subchannel.connection for subchannel in gone if subchannel.connection is not None),
            *replaced,
        ]

    # --- Picking ---

    def pick(self, method: str, request: Any, metadata: Any) -> S | None:
        """Pick a READY subchannel for a call; None if there is none now.

        Raises:
            Exception: Whatever the key function of a picker raised.
        """
        if self._unsettled:
            self._settle()
        pick = self._pick
        if pick is not None:
            chosen = pick(method, request, metadata)
            if chosen is not None:
                connection = chosen.connection  # like `is_ready`, without a call
                if connection is not None and connection.is_ready():
                    return chosen
        return self._pick_anew(method, request, metadata)

    def _pick_anew(self, method: str, request: Any, metadata: Any) -> S | None:
        """Read the states and pick."""
        for _ in range(MAX_REPICKS):
            self.refresh()
            chosen = self.pick_again(method, request, metadata)
            if chosen is not None or self._pick is None or self._picker.sees_all_states:
                return chosen
        return None

    def pick_again(self, method: str, request: Any, metadata: Any) -> S | None:
        """Pick for a waiting call, without reading the states, which were just read for all."""
        pick = self._pick
        chosen = None if pick is None else pick(method, request, metadata)
        if chosen is None or chosen.is_ready():
            return chosen
        if self._picker.sees_all_states:
            self.connect((chosen,))
        return None

    def pick_other(
        self,
        tried: list[object] | None,
        method: str,
        request: Any,
        metadata: Any,
        waited_s: float = 0.0,
    ) -> S | None:
        """Pick a subchannel that the call was not sent to, if there is one, and add it to `tried`.

        Args:
            tried: The subchannels that the attempts of the call were sent to; None for a call that
                is not hedged.
            method: The full name of the method.
            request: The request; None if it is a stream.
            metadata: The metadata of the call.
            waited_s: How long the attempt has waited. While another subchannel is connecting, it
                waits for `OTHER_TIMEOUT_S`; then a subchannel that was tried is picked.
        """
        picked = (self.pick_again if waited_s else self.pick)(method, request, metadata)
        if picked is None or tried is None:
            return picked
        connecting = None
        with self.lock:  # two attempts may begin at the same time
            if picked in tried:
                others = self._others(picked, tried)
                ready = [other for other in others if other.is_ready()]
                if ready:
                    picked = ready[0]
                elif waited_s < min(OTHER_TIMEOUT_S, self._pick_timeout_s):
                    connecting = next(
                        (other for other in others if other.state is not FAILING), None
                    )
            if connecting is None:
                tried.append(picked)
        if connecting is not None:
            self.connect((connecting,))
            return None
        return picked

    def _others(self, picked: S, tried: list[object]) -> list[S]:
        """Return the untried subchannels of the level of `picked`, beginning after it."""
        zone, row = self.policy.zone, self.subchannels
        at = row.index(picked) if picked in row else 0
        level = picked.level(zone)
        return [
            subchannel
            for subchannel in (*row[at:], *row[:at])
            if subchannel not in tried and subchannel.level(zone) <= level
        ]

    def _settle(self) -> None:
        """Read states and weights again if the interval has passed."""
        if time.monotonic_ns() < self._recheck_ns and self.now_ns() < self._reweigh_ns:
            return
        with self.lock:
            if time.monotonic_ns() < self._recheck_ns and self.now_ns() < self._reweigh_ns:
                return  # another thread was first
            idle = self._refresh()
        self._act_on_states(idle)

    def refresh(self) -> None:
        """Read all states, prepare the picker after changes, and connect IDLE subchannels."""
        with self.lock:
            idle = self._refresh()
        self._act_on_states(idle)

    def _act_on_states(self, idle: list[S]) -> None:
        if self._is_unreachable and self.on_unreachable is not None:
            self.on_unreachable()
        if idle:
            self.connect(idle)
        for subchannel in self.subchannels:
            if subchannel.stale and subchannel.state is FAILING:
                self._check_stale(subchannel)  # removes it if it still can't be reached

    def _check_stale(self, subchannel: S) -> None:
        if subchannel.stale and not subchannel.checking:
            subchannel.checking = True
            self.checker.check_later(subchannel, 0)

    def _choose_anew(self) -> None:
        """Read all states after a change; the next call connects subchannels. Under the lock."""
        if self._refresh():
            self._recheck_ns = 0

    def _refresh(self) -> list[S]:
        """Read all states; returns the IDLE subchannels to connect. Under the lock."""
        now_ns = time.monotonic_ns()
        levels: _Levels[S] = {}
        for subchannel in self.subchannels:
            state = subchannel.state
            levels.setdefault(subchannel.level(self.policy.zone), []).append((subchannel, state))
        ready_level = min(
            (level for level, members in levels.items() if any(s is READY for _, s in members)),
            default=None,
        )
        if ready_level is not None:
            self._unready_ns = None
        elif self._unready_ns is None:
            self._unready_ns = now_ns
        self._is_unreachable = self._known and (
            not levels or any(s is FAILING for members in levels.values() for _, s in members)
        )
        idle = self._idle(levels, now_ns)
        self._choose(levels, ready_level)
        all_ready = all(s is READY for members in levels.values() for _, s in members)
        self._reweigh_ns = self._next_weights_ns()
        self._unsettled = (
            not (
                all_ready
                or (
                    self._picker.sees_all_states
                    and ready_level == min(levels, default=PREFERRED_ZONE)
                )
            )
            or self._reweigh_ns != NEVER
        )
        connects = idle or any(s is CONNECTING for members in levels.values() for _, s in members)
        self._recheck_ns = now_ns + (RECHECK_CONNECTING_NS if connects else RECHECK_NS)
        return idle

    def _idle(self, levels: _Levels[S], now_ns: int) -> list[S]:
        """Return the subchannels to connect: by level, until one is READY or may become so."""
        if self._picker.sees_all_states:
            return []  # connected when picked
        idle = []
        since_ns = now_ns if self._unready_ns is None else self._unready_ns
        waits = now_ns - since_ns < FAILOVER_NS
        for level in sorted(levels):
            states = [state for _, state in levels[level]]
            idle += [subchannel for subchannel, state in levels[level] if state is IDLE]
            if READY in states or (waits and (IDLE in states or CONNECTING in states)):
                break
        return idle

    def _choose(self, levels: _Levels[S], ready_level: SubchannelLevel | None) -> None:
        """Prepare the picker if the candidates or their weights have changed."""
        if self._picker.sees_all_states:
            best = min(
                (
                    level
                    for level, members in levels.items()
                    if any(s is not FAILING for _, s in members)
                ),
                default=max(levels, default=PREFERRED_ZONE),
            )
            chosen = [
                subchannel
                for level, members in levels.items()
                if level <= best
                for subchannel, _ in members
            ]
        elif ready_level is None:
            chosen = []
        else:
            chosen = [subchannel for subchannel, state in levels[ready_level] if state is READY]
        weights = [self._weight(subchannel) for subchannel in chosen]
        if (chosen, weights) == self._chosen and self._pick is not None:
            return
        self._chosen = chosen, weights
        try:
            self._pick = self._prepare_pick(chosen, weights) if chosen else None
        except Exception as error:  # noqa: BLE001 - of a user's picker; raised by calls
            self._pick = partial(_raise, error.with_traceback(None))

    def _prepare_pick(self, chosen: list[S], weights: list[int]) -> Pick[S]:
        pick = self._picker.prepare(chosen, weights)
        if not callable(pick):
            raise TypeError(
                f"{type(self._picker).__name__}.prepare() must return a function pick(method, "
                f"request, metadata), not {pick!r}"
            )
        return pick

    def _weight(self, subchannel: S) -> int:
        """Return its weight now, at least 1 (Dubbo `AbstractLoadBalance`)."""
        weight, slow_start_ns = subchannel.instance.weight, self._slow_start_ns
        if slow_start_ns:
            uptime_ns = self.now_ns() - subchannel.started_ns
            if uptime_ns < slow_start_ns:
                weight = weight * max(0, uptime_ns) // slow_start_ns
        return max(1, weight)

    def _next_weights_ns(self) -> int:
        """Return when weights have grown by a step, on the timer's clock; `NEVER` if none grows."""
        slow_start_ns = self._slow_start_ns
        if not slow_start_ns:
            return NEVER
        now_ns = self.now_ns()
        if all(now_ns - subchannel.started_ns >= slow_start_ns for subchannel in self.subchannels):
            return NEVER
        return now_ns + max(1, slow_start_ns // SLOW_START_STEPS)

    def refusal(self) -> Refusal | None:
        """Return the status of a call that got no subchannel; None if the call waits."""
        if self._mixed is not None:
            return self._mixed
        unavailable = grpc.StatusCode.UNAVAILABLE
        if not self._known:
            if self._error and self._error_is_final:
                return Refusal(unavailable, f"no instance of {self.name} is known: {self._error}")
            return None
        subchannels = self.subchannels
        if not subchannels:
            why = f": {self.empty_reason}" if self.empty_reason else ""
            return Refusal(unavailable, f"no instance of {self.name} is known{why}")
        if any(subchannel.state is not FAILING for subchannel in subchannels):
            return None
        return Refusal(unavailable, self._unreachable(), unreachable=True)

    def _unreachable(self) -> str:
        texts = dict.fromkeys(
            f"{subchannel.address}: {subchannel.error_text}"
            for subchannel in self.subchannels
            if subchannel.error_text
        )
        reasons = "; ".join(list(texts)[:MAX_EXPLAINED])
        more = f" and {len(texts) - MAX_EXPLAINED} more" if len(texts) > MAX_EXPLAINED else ""
        count = len(self.subchannels)
        which = "the only server" if count == 1 else f"none of {count} servers"
        verb = "can't be reached" if count == 1 else "can be reached"
        return f"{which} of {self.name} {verb}" + (f": {reasons}{more}" if reasons else "")

    def limit_of(self, timeout: float | None, *, wait_for_ready: bool) -> float | None:
        """Return how many seconds a call may wait for a subchannel; None for no limit."""
        if wait_for_ready:
            return timeout
        return self._pick_timeout_s if timeout is None else min(timeout, self._pick_timeout_s)

    def timed_out(self, timeout: float | None, limit: float | None) -> Refusal:
        """Return the status of a call that has waited for too long.

        Args:
            timeout: The timeout of the call in seconds.
            limit: The result of `limit_of` for it.
        """
        late = grpc.StatusCode.DEADLINE_EXCEEDED
        code = late if limit == timeout else grpc.StatusCode.UNAVAILABLE
        refusal = self.refusal()
        if refusal is not None:  # a call with `wait_for_ready`
            return Refusal(code, refusal.details)
        if self._known:
            return Refusal(code, f"no connection to a server of {self.name} became ready in time")
        details = f"no instance of {self.name} is known yet"
        return Refusal(code, f"{details}: {self._error}" if self._error else details)

    # --- The ends of calls ---

    def failed(self, subchannel: S, code: str) -> None:
        """Record a call that did not succeed, with the name of its status code. Any thread."""
        if code in UNDECIDED:
            if code == "CANCELLED":
                self._count_canceled(subchannel)
            return
        if code not in FAILURES:
            subchannel.succeeded()
            return
        self._check_stale(subchannel)
        if not subchannel.is_ready():
            self._unsettled, self._recheck_ns = True, 0  # its connection broke
            if self.on_unreachable is not None:
                self.on_unreachable()
            return
        failures = self._outlier_failures(subchannel)
        if failures:
            self.mark_unhealthy(subchannel, f"{failures} calls failed: {code}", ejects=True)

    def _count_canceled(self, subchannel: S) -> None:
        """Check a subchannel whose calls are all canceled.

        With hedging, the attempts on a frozen server do not fail: they are canceled when another
        attempt is answered.
        """
        if self.policy.outlier_ejection is None:
            return
        if subchannel.canceled_since != subchannel.successes:
            subchannel.canceled_since, subchannel.canceled = subchannel.successes, 0
        subchannel.canceled += 1
        due = subchannel.canceled >= CANCELED_CALLS and not subchannel.suspected
        if due and subchannel.healthy and not subchannel.stale:
            subchannel.canceled = 0
            subchannel.suspected = True
            self.checker.check_later(subchannel, 0)

    def _outlier_failures(self, subchannel: S) -> str:
        """Count a failure. Returns the failures that cause an ejection; "" for no ejection."""
        ejection = self.policy.outlier_ejection
        if ejection is None or subchannel.removed:
            return ""
        with self.lock:
            now_ns = self.now_ns()
            subchannel.failures += 1
            if now_ns - subchannel.window_ns >= to_ns(ejection.interval):
                subchannel.window_ns = now_ns
                subchannel.window_failures = 0
                subchannel.window_successes = subchannel.successes
            subchannel.window_failures += 1
            succeeded = subchannel.successes - subchannel.window_successes
            calls = subchannel.window_failures + succeeded
            by_count = (
                ejection.consecutive_failures is not None
                and subchannel.failures >= ejection.consecutive_failures
            )
            by_share = (
                ejection.failure_percentage is not None
                and calls >= ejection.min_calls
                and subchannel.window_failures * 100 >= ejection.failure_percentage * calls
            )
            if by_count:
                return f"{subchannel.failures}"
            return f"{subchannel.window_failures} of {calls}" if by_share else ""

    # --- Health ---

    def mark_unhealthy(self, subchannel: S, reason: str, *, ejects: bool = False) -> None:
        """Give a subchannel no calls while a healthy one is READY; check its health."""
        with self.lock:
            if subchannel.removed or not subchannel.healthy or self.closed:
                return
            now_ns = self.now_ns()
            check_ns = None
            if ejects:
                check_ns = self._eject(subchannel, now_ns)
                if check_ns is None:
                    return
            subchannel.set_unhealthy(reason, now_ns)
            self._choose_anew()
        emit(SubchannelUnhealthy(self.name, subchannel.id, reason))
        self.checker.check_later(subchannel, check_ns)
        self.changed()

    def _eject(self, subchannel: S, now_ns: int) -> int | None:
        """Eject a subchannel and return for how long; None if too many are. Under the lock."""
        ejection = self.policy.outlier_ejection
        ejected = sum(other.ejected for other in self.subchannels) + 1
        if ejection is None or ejected * 100 > ejection.max_ejection_percent * len(
            self.subchannels
        ):
            return None
        max_ns = to_ns(ejection.max_ejection_time)
        if now_ns - subchannel.taken_back_ns >= max_ns:
            subchannel.ejections = 0
        subchannel.ejections += 1
        subchannel.ejected = True
        return min(max_ns, to_ns(ejection.base_ejection_time) * subchannel.ejections)

    def mark_healthy(self, subchannel: S) -> None:
        """Give a subchannel calls again. Ignored if it is healthy."""
        with self.lock:
            if subchannel.removed or subchannel.healthy or self.closed:
                return
            after_ns = subchannel.set_healthy(self.now_ns())
            self._choose_anew()
        self.checker.forget(subchannel)
        if subchannel.stale:
            self.checker.check_later(subchannel)
        emit(SubchannelHealthy(self.name, subchannel.id, to_seconds(after_ns)))
        self.changed()

    def wants_check(self, subchannel: S, generation: int) -> bool:
        """Whether a health check of this generation is still needed."""
        if subchannel.removed or self.closed or subchannel.generation != generation:
            return False
        return subchannel.stale or subchannel.suspected or not subchannel.healthy

    def check_delay_ns(self, subchannel: S) -> int:
        """Return how long to wait before the next health check.

        Raises:
            Exception: Whatever the user's wait object raised.
        """
        attempt = min(subchannel.checks + 1, MAX_BACKOFF_ATTEMPTS)
        delay_ns = self._check_backoff.next_delay_ns(attempt, elapsed_ns=0, error=None)
        return NEVER if delay_ns is None else max(delay_ns, MIN_CHECK_DELAY_NS)

    def status(self) -> ChannelStatus | None:
        """Describe the channel now; None if it is closed or being closed."""
        if self.closing:
            return None
        subchannels = tuple(subchannel.status() for subchannel in self.subchannels)
        state = self.whole_state().name
        return ChannelStatus(
            self.name,
            True,
            state,
            self.calls,
            None,
            any(subchannel.stale for subchannel in subchannels),
            subchannels,
            channel_problem(state, has_servers=bool(subchannels)),
        )

    def whole_state(self) -> grpc.ChannelConnectivity:
        """Return the best state of all subchannels, as gRPC's round_robin does."""
        if self.closed:
            return SHUTDOWN
        if not self._known and not (self._error and self._error_is_final):
            return CONNECTING
        states = {subchannel.state for subchannel in self.subchannels}
        return next((state for state in ORDER if state in states), FAILING)


def _raise(error: Exception, *_: object) -> Any:
    raise error


def subchannel_options(options: object) -> list[tuple[str, Any]]:
    """Return the options of the connections of subchannels.

    Raises:
        TypeError: An option is not a pair.
    """
    checked = checked_options(options)
    names = {name for name, _ in checked}
    return checked if MAX_RECONNECT_BACKOFF[0] in names else [*checked, MAX_RECONNECT_BACKOFF]


def _checked_callback(callback: Any, name: str) -> Any:
    if callback is not None and not callable(callback):
        raise TypeError(f"{name} must be callable as {name}(subchannel), not {callback!r}")
    return callback


def _place(instance: ServiceInstance) -> tuple[str, int, str]:
    return instance.host, instance.port, instance.protocol


def _checked_name(name: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"name must be a string such as 'shop.Orders', not {name!r}")
    if not name:
        raise ConfigurationError("name must not be empty; give that of the service: 'shop.Orders'")
    return name
