"""The subchannels of one balanced channel and their connections. For both worlds.

Each instance of the service has a subchannel with its own connection. A pick returns a subchannel
whose connection is READY; its state is read at the pick. With very many instances a channel has
subchannels for only some of them (gRFC A68).

`SubchannelPool` applies what other modules decide: `subset.py` which instances are used,
`ejection.py` which subchannels are unhealthy and which ones stay without the registry, `picking.py`
which ones get calls and connect, and `pending.py` what becomes of calls that get none.

The lock of the pool guards everything except the pick itself, which reads attributes that are
replaced as a whole. The only user code under the lock is `Picker.prepare`, and the only calls of
gRPC read a state.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, NamedTuple, Protocol, TypeVar

from rpcwheel._concurrency.callbacks import CloseCallbacks, run_callback, weak_callback
from rpcwheel.durations import NEVER, to_ns, to_seconds
from rpcwheel.errors import ConfigurationError, check_callback
from rpcwheel.events import CallbackFailed, StaleInstancesKept, emit
from rpcwheel.telemetry import components
from rpcwheel.timer.manual import checked_timer, clock_of
from rpcwheel.transport.arguments import checked_options, refuse_both
from rpcwheel.transport.status import ChannelStatus, channel_problem

from .dubbo import conventions_of
from .ejection import SelfPreservation
from .lb_policy import checked_lb_policy
from .pending import CLOSED_MEANWHILE, WaitRules
from .picking import Picking
from .policy import checked_policy
from .subchannel import FAILING, SHUTDOWN, S
from .subset import InstanceSubset
from .tags import TagRouter

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence

    import grpc

    from rpcwheel.instance import ServiceInstance
    from rpcwheel.timer.api import Timer

    from .dubbo import DubboClient
    from .pending import PendingPick, Refusal
    from .pickers import Picker
    from .policy import BalancerPolicy

    ProbeDone = Callable[[bytes | None, BaseException | None], object]

RECONNECT_NS: Final = 1_000_000_000
"""The wait before `connect` is called again after it raised."""

OTHER_TIMEOUT_S: Final = 1.0
"""The maximum wait of an attempt for a subchannel that its call was not sent to."""

MAX_RECONNECT_BACKOFF: Final = ("grpc.max_reconnect_backoff_ms", 3_000)
"""With gRPC's default, a server that was away for long gets its first call up to 2 minutes late."""

MAX_REPICKS: Final = 3
"""The maximum number of picks of one call if the picked subchannel is not READY."""


S_contra = TypeVar("S_contra", contravariant=True)


class Checks(Protocol[S_contra]):
    """The health of the subchannels of a pool; `HealthChecker` implements it."""

    def check_later(self, subchannel: S_contra, delay_ns: int | None = None) -> None:
        """Check a subchannel after a delay; None for the usual delay."""

    def check_stale(self, subchannel: S_contra) -> None:
        """Check a subchannel now if it is stale and no check of it is under way."""

    def forget(self, subchannel: S_contra) -> None:
        """Cancel the check of a subchannel."""

    def is_probing_failures(self, subchannels: Sequence[S_contra], now_s: float) -> bool:
        """Whether probes find out now why servers can't be reached; starts them if it is time."""

    def close(self) -> None:
        """Cancel all checks."""


class Connections(Generic[S]):
    """Makes, probes and drains the connections of a pool's subchannels.

    The subclass of each API decides on which thread; other methods may be called on any thread.
    """

    channel_class: ClassVar[type[Any]]
    """The `ReconnectingChannel` of the API."""

    def __init__(
        self,
        pool: SubchannelPool[S],
        connect: Callable[[ServiceInstance, list[tuple[str, Any]]], Any] | None,
        own: dict[str, Any],
        on_subchannel: Callable[[S], object] | None,
        on_removed: Callable[[S], object] | None,
    ) -> None:
        """Begin without connections; the arguments are those of `SubchannelPool`."""
        self._pool = pool
        self._connect = connect
        self._own = own
        self._listeners = [
            (
                _checked_callback(on_subchannel, "on_subchannel"),
                _checked_callback(on_removed, "on_removed"),
            )
        ]
        self._connecting: set[S] = set()
        self._replaced: list[Any] = []  # that the user has closed or drained
        self.leaving: list[S] = []
        """The removed subchannels that still have calls."""

    # --- For subclasses to override; not called under the lock, must not raise ---

    def connect(self, subchannels: Iterable[S]) -> None:
        """Call `connect_now`, on the right thread."""
        raise NotImplementedError

    def drain(self, subchannels: Iterable[S]) -> None:
        """Call `drain_now` with subchannels that have connections, on the right thread."""
        raise NotImplementedError

    def closed_error(self) -> Exception:
        """Return the exception that gRPC raises for a call on a closed channel."""
        raise NotImplementedError

    def run_soon(self, job: Callable[[], object]) -> None:
        """Call `job()` on a worker, or on the loop. Any thread; does not block."""
        raise NotImplementedError

    def probe(self, subchannel: S, timeout_s: float, done: ProbeDone) -> None:
        """Call `SERVER_HEALTH` on the connection of a subchannel.

        Runs on a worker, a caller's thread, or the loop.
        Calls `done(response, error)`, with None for one of them, on any thread, or on the loop,
        also if it raises. If the process is exiting, calls `done(None, None)`.
        """
        raise NotImplementedError

    # --- The rest ---

    def reset(self) -> None:
        """Forget what threads of the parent connect, in a forked child."""
        self._connecting = set()

    def connect_now(self, subchannels: Iterable[S]) -> None:
        """Connect the subchannels that are IDLE, on this thread; does not wait for connections."""
        now_ns = time.monotonic_ns()
        with self._pool.lock:
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
                with self._pool.lock:
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
        with self._pool.lock:
            current = subchannel.connection
            is_used = (current is None or not current.accepts_calls) and not subchannel.removed
            if is_used:
                self._replaced = [old for old in self._replaced if not old.closed]
                if current is not None and not current.closed:
                    self._replaced.append(current)  # its calls continue
                subchannel.connection = new
            listeners = tuple(self._listeners)  # now: `add_listener` calls those added later
        if not is_used:
            new.drain(0)
            return self.connection_of(subchannel)
        for on_subchannel, _ in listeners:
            if on_subchannel is not None:
                run_callback(self._pool.name, on_subchannel, subchannel)
        return new

    def try_connect(self, subchannel: S) -> str:
        """Make the connection of a subchannel. Returns why there is none, or ""."""
        try:
            self.connection_of(subchannel)
        except Exception as error:  # noqa: BLE001 - the user's `connect`; in the call's status
            self.connect_failed(subchannel, error)
        else:
            return ""
        return "its instance was removed" if subchannel.removed else subchannel.error_text

    def new_connection(self, instance: ServiceInstance) -> Any:
        """Make a `ReconnectingChannel`."""
        connect = None if self._connect is None else partial(self._connect, instance)
        channel = self.channel_class(instance.target, connect=connect, **self._own)
        components.remove("channel", channel)  # it is reported as a subchannel
        return channel

    def add_listener(
        self, on_subchannel: Callable[[S], object], on_removed: Callable[[S], object]
    ) -> None:
        """Add callbacks; calls `on_subchannel` with each subchannel that has a channel already."""
        pool = self._pool
        with pool.lock:
            self._listeners.append((on_subchannel, on_removed))
            connected = [
                subchannel for subchannel in pool.subchannels if subchannel.connection is not None
            ]
        for subchannel in connected:
            run_callback(pool.name, on_subchannel, subchannel)

    def drain_now(self, subchannels: Iterable[S]) -> None:
        """Close the connections of removed subchannels when their calls have ended."""
        pool = self._pool
        for subchannel in subchannels:
            subchannel.connection.on_close(weak_callback(self.has_left, subchannel))
            subchannel.connection.drain(
                pool.policy.drain_timeout,
                reason=f"{subchannel.id} was removed from {pool.name}",
            )
            for _, on_removed in tuple(self._listeners):
                if on_removed is not None:
                    run_callback(pool.name, on_removed, subchannel)

    def has_left(self, subchannel: S) -> None:
        """Forget a removed subchannel whose connection is closed."""
        with self._pool.lock:
            if subchannel in self.leaving:
                self.leaving.remove(subchannel)

    def connect_failed(self, subchannel: S, error: BaseException) -> None:
        """Record that the user's `connect` raised. Ignored if the subchannel was removed."""
        if subchannel.removed:
            return
        subchannel.error_text = f"connect raised {error!r}"
        subchannel.connect_after_ns = time.monotonic_ns() + RECONNECT_NS
        emit(CallbackFailed(self._pool.name, f"connect {subchannel.id}", error))

    def take_all(self, subchannels: Iterable[S]) -> list[Any]:
        """Return the connections to close with the pool. Under its lock."""
        replaced, self._replaced = self._replaced, []
        leaving, self.leaving = self.leaving, []
        used = [subchannel.connection for subchannel in (*subchannels, *leaving)]
        return [connection for connection in used if connection is not None] + replaced


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


class SubchannelPool(Generic[S]):
    """The subchannels of one channel. Thread-safe.

    The subclass of each API adds the health checks and the calls that wait.
    """

    subchannel_class: ClassVar[type[Any]]
    connections_class: ClassVar[type[Connections[Any]]]
    checker: Checks[S]

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
        """Check the arguments, which are those of `BalancedChannel`; begin without subchannels.

        `own` has those that are not allowed together with `connect`.
        """
        self.name = _checked_name(name)
        picker = checked_lb_policy(lb_policy)
        self.policy = checked_policy(policy)
        self.rules = WaitRules(name, to_seconds(to_ns(self.policy.pick_timeout)))
        slow_start_ns = to_ns(self.policy.slow_start or 0)
        self.router: TagRouter[S] = TagRouter(
            partial(Picking, picker, self.policy.zone, slow_start_ns)
        )
        self.preservation: SelfPreservation[S] = SelfPreservation(
            enabled=self.policy.self_preservation
        )
        self.now_ns = clock_of(checked_timer(timer))
        refuse_both(connect, **own)
        protocol = "grpc" if own["credentials"] is None else "grpcs"
        self._instances = InstanceSubset(
            size=None if picker.sees_all_states else self.policy.subset_size,
            zone=self.policy.zone,
            protocol=protocol if connect is None else "",  # else `connect` decides how to connect
            tag_of=self.router.tag_of_server,
        )
        own = own | {"options": subchannel_options(options), "timer": timer}
        self.connections: Connections[S] = self.connections_class(
            self, connect, own, on_subchannel, on_removed
        )
        self.close_callbacks = CloseCallbacks(name)
        self._refresh: Callable[[], object] | None = None
        self.lock = threading.RLock()  # a finalizer may end a call on any thread
        self._by_id: dict[str, S] = {}
        self.subchannels: tuple[S, ...] = ()
        """The subchannels that may get calls, in the order of their ids."""
        self.closing = False
        """Whether `close` was called: new calls are refused. In aio, waiting calls may still
        begin."""
        self.closed = False
        components.add("channel", self)

    # --- For subclasses to override; not called under the lock, must not raise ---

    def changed(self) -> None:
        """Wake calls and subscribers that wait for a change."""
        raise NotImplementedError

    # --- Instances ---

    def follow_registry(
        self,
        refresh: Callable[[], object],
        grace_ns: int | None,
        client: DubboClient | None,
    ) -> None:
        """Prepare for `update` with the instances of a registry.

        Args:
            refresh: Called repeatedly while calls are made and a server can't be reached or none is
                known. Any thread. Must not block or raise.
            grace_ns: How long servers that the registry has lost and that answer are kept; see
                `SelfPreservation.grace_ns`.
            client: What it is for Dubbo's providers; None: the registry is not Dubbo's.
        """
        self._refresh, self.preservation.grace_ns = refresh, grace_ns
        self.router.client = client

    def update(
        self,
        instances: Iterable[ServiceInstance],
        *,
        expired: Container[str] = (),
        empty_reason: str = "",
    ) -> None:
        """Set the instances; changes only what differs.

        Args:
            instances: The instances.
            expired: Ids of instances that the registry lost, and not by a withdrawal. Those that
                still answer are kept as stale.
            empty_reason: Why there are no instances, for the status of calls.

        Raises:
            TypeError: An element is not a `ServiceInstance`; nothing has changed.
        """
        with self.lock:
            if self.closed:
                return
            self._instances.update(instances)
            self.rules.empty_reason = empty_reason
            listed, now_ns = self._instances.by_id, self.now_ns()
            kept, lost = self.preservation.kept(self._by_id, listed, expired, now_ns)
            change = self._use_instances(
                kept | {each.id: self._new_subchannel(each) for each in lost}
            )
            if change is None:
                return
            left = [subchannel.instance for subchannel in change.removed]
            left = [instance for instance in left if instance.id not in listed]
            self.preservation.remember_lost(left, listed, now_ns)
        self._apply(change)

    def _apply(self, change: _Change[S]) -> None:
        """Perform what an update requires outside the lock."""
        if change.retained:
            ids = tuple(subchannel.id for subchannel in change.retained)
            emit(StaleInstancesKept(self.name, ids))
        for subchannel in (*change.returned, *change.removed):
            if subchannel.healthy or subchannel.removed:
                self.checker.forget(subchannel)
        connected = [each for each in change.removed if each.connection is not None]
        if connected:
            self.connections.drain(connected)
        self.changed()
        for subchannel in (*change.renewed, *change.retained):
            self.checker.check_later(subchannel, 0)

    def remove_stale(self, subchannel: S) -> None:
        """Remove a stale subchannel that no longer answers."""
        with self.lock:
            if not subchannel.stale or subchannel.removed:
                return
            others = {id_: other for id_, other in self._by_id.items() if other is not subchannel}
            change = self._use_instances(
                {id_: other for id_, other in others.items() if other.stale}
            )
        if change is not None:
            self._apply(change)

    def expire_stale(self) -> bool:
        """Remove all stale subchannels, although they answer, if that is due."""
        with self.lock:
            if self.closed or not self.preservation.may_expire(self._by_id, self.now_ns()):
                return False
            change = self._use_instances({})
        if change is not None:
            self._apply(change)
        return True

    def _use_instances(self, stale: dict[str, S]) -> _Change[S] | None:
        """Use the known instances and these stale subchannels; None if nothing changes."""
        was_usable = self.rules.are_known and not self.rules.unusable
        unusable = self._instances.protocol_problem(self.name)
        self.rules.know(unusable)
        selected = [] if unusable else self._instances.chosen(beside=len(stale))
        if unusable:
            stale = {}
        elif was_usable and self._is_unchanged(selected, stale):
            return None
        kept = dict(stale)
        renewed: list[S] = []
        returned: list[S] = []
        retained = tuple(subchannel for subchannel in stale.values() if not subchannel.stale)
        for newly_stale in retained:
            newly_stale.stale = True
            newly_stale.health.check_anew()
        for instance in selected:
            subchannel = self._by_id.get(instance.id)
            if subchannel is None or _place(subchannel.instance) != _place(instance):
                kept[instance.id] = self._new_subchannel(instance)
                continue
            if subchannel.stale:
                subchannel.stale = False
                returned.append(subchannel)
            if not subchannel.healthy and subchannel.instance.epoch != instance.epoch:
                subchannel.health.check_anew()
                renewed.append(subchannel)
            self._set_instance(subchannel, instance)
            kept[instance.id] = subchannel
        removed = self._replace(kept)
        if retained or returned or any(subchannel.stale for subchannel in removed):
            self.preservation.stale_changed(self.now_ns())
        return _Change(removed, tuple(renewed), tuple(returned), retained)

    def _is_unchanged(self, instances: list[ServiceInstance], stale: dict[str, S]) -> bool:
        """Whether the subchannels have exactly these instances, without any change."""
        if len(instances) + len(stale) != len(self._by_id):
            return False
        for instance in instances:
            subchannel = self._by_id.get(instance.id)
            if subchannel is None or subchannel.instance is not instance or subchannel.stale:
                return False
        return all(subchannel.stale for subchannel in stale.values())

    def _replace(self, kept: dict[str, S]) -> tuple[S, ...]:
        """Use these subchannels from now on; returns the removed ones."""
        remaining = set(kept.values())
        removed = tuple(
            subchannel for subchannel in self.subchannels if subchannel not in remaining
        )
        for subchannel in removed:
            subchannel.removed = True
            if subchannel.connection is not None:
                self.connections.leaving.append(subchannel)
        self._by_id = kept
        self.subchannels = tuple(kept[name] for name in sorted(kept))
        self.router.route(self.subchannels)
        self.choose_anew()
        return removed

    def _new_subchannel(self, instance: ServiceInstance) -> S:
        subchannel: S = self.subchannel_class(self, instance, self._started_ns(instance))
        self._set_instance(subchannel, instance)
        return subchannel

    def _started_ns(self, instance: ServiceInstance) -> int:
        if not instance.started_at:
            return -NEVER
        # not in the future, whatever its own clock says
        return self.now_ns() - max(0, to_ns(time.time() - instance.started_at))

    def _set_instance(self, subchannel: S, instance: ServiceInstance) -> None:
        if subchannel.instance.started_at != instance.started_at:  # its server was started again
            subchannel.started_ns = self._started_ns(instance)
        subchannel.instance = instance
        subchannel.conventions = conventions_of(instance, self.router.client)

    def report_error(self, error: str, *, wait: bool) -> None:
        """Record why the instances are not known. Ignored if they are known."""
        with self.lock:
            if not self.rules.report_error(error, wait=wait):
                return
        self.changed()

    def close_all(self) -> list[Any]:
        """Remove all subchannels. Returns the connections to close; none at the second call."""
        with self.lock:
            if self.closed:
                return []
            self.closing = self.closed = True
            subchannels, self.subchannels = self.subchannels, ()
            for subchannel in subchannels:
                subchannel.removed = True
            self._by_id = {}
            for picking in self.router:
                picking.pick = None
            self.router.route(())
            connections = self.connections.take_all(subchannels)
        self.checker.close()
        return connections

    # --- Picks ---

    def pick(self, method: str, request: Any, metadata: Any) -> S | None:
        """Pick a READY subchannel for a call; None if there is none now.

        Raises:
            Exception: Whatever the key function of a picker raised.
        """
        router = self.router
        picking = router.picking_for(metadata) if router.has_tags else router.untagged
        if not picking.is_settled and picking.is_due(time.monotonic_ns(), self.now_ns()):
            self.refresh(picking, if_due=True)
        pick = picking.pick
        if pick is not None:
            chosen = pick(method, request, metadata)
            if chosen is not None and chosen.is_ready():
                return chosen
        return self._pick_anew(picking, method, request, metadata)

    def _pick_anew(self, picking: Picking[S], method: str, request: Any, metadata: Any) -> S | None:
        """Read the states and pick."""
        for _ in range(MAX_REPICKS):
            self.refresh(picking)
            chosen = self.pick_again(method, request, metadata)
            if chosen is not None or picking.pick is None or picking.connects_when_picked:
                return chosen
        return None

    def pick_again(self, method: str, request: Any, metadata: Any) -> S | None:
        """Pick for a waiting call, without reading the states, which were just read for all."""
        picking = self.router.picking_for(metadata)
        picking.is_used = True  # an update may have made it while the call waited
        pick = picking.pick  # another thread may replace it
        chosen = None if pick is None else pick(method, request, metadata)
        if chosen is None or chosen.is_ready():
            return chosen
        if picking.connects_when_picked:
            self.connections.connect((chosen,))
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

        `tried` has the subchannels that the attempts of the call were sent to; None if the call may
        go to any. The request of a stream is None. While another subchannel is connecting, the
        attempt waits for `OTHER_TIMEOUT_S`; if it has waited for so long, a subchannel that was
        tried is picked.
        """
        picked = (self.pick_again if waited_s else self.pick)(method, request, metadata)
        if picked is None or tried is None:
            return picked
        connecting = None
        with self.lock:  # two attempts may begin at the same time
            if picked in tried:
                others = self.router.picking_with(picked).others(picked, tried)
                ready = [other for other in others if other.is_ready()]
                if ready:
                    picked = ready[0]
                elif waited_s < min(OTHER_TIMEOUT_S, self.rules.pick_timeout_s):
                    connecting = next(
                        (other for other in others if other.state is not FAILING), None
                    )
            if connecting is None:
                tried.append(picked)
        if connecting is not None:
            self.connections.connect((connecting,))
            return None
        return picked

    def has_other(self, subchannel: S, tried: Container[object]) -> bool:
        """Whether a subchannel that is not in `tried` is READY and as good as `subchannel`."""
        with self.lock:
            others = self.router.picking_with(subchannel).others(subchannel, tried)
            return any(other.is_ready() for other in others)

    def try_pick(self, pending: PendingPick, now_s: float) -> S | Refusal | None:
        """Pick for a call that waits.

        Returns:
            The subchannel, or the status with which the call ends; None if it waits on.

        Raises:
            Exception: Whatever the key function of a picker raised.
        """
        picked = self.pick_other(
            pending.tried,
            pending.method,
            pending.message,
            pending.metadata,
            pending.waited_s(now_s),
        )
        return self._refusal_of(pending, now_s) if picked is None else picked

    def try_subchannels(self, pending: PendingPick, now_s: float) -> tuple[S, ...] | Refusal | None:
        """Return all subchannels for the call, in any state, or as `try_pick` if none."""
        return self.subchannels_for(pending.metadata) or self._refusal_of(pending, now_s)

    def subchannels_for(self, metadata: Any) -> tuple[S, ...]:
        """Return all subchannels that a call with this metadata may use, in any state."""
        return self.router.picking_for(metadata).subchannels

    def _refusal_of(self, pending: PendingPick, now_s: float) -> Refusal | None:
        with self.lock:  # an update changes the rules before the subchannels
            if self.closed:
                return CLOSED_MEANWHILE
            subchannels, reason = self.subchannels_for(pending.metadata), ""
            if not subchannels and self.subchannels:
                count = len(self.subchannels)
                reason = self.router.empty_reason(self.name, count, pending.metadata)
            refusal = self.rules.refusal(
                subchannels, wait_for_ready=pending.wait_for_ready, empty_reason=reason
            )
        if refusal is not None and refusal.unreachable:
            has_time = pending.timeout_left_s(now_s) != 0
            if self.checker.is_probing_failures(subchannels, now_s) and has_time:
                return None
            # Probes may have ended since: the refusal must have their results.
            refusal = self.rules.refusal(subchannels)
        if refusal is not None:
            return refusal
        left_s = pending.wait_left_s(now_s)
        is_late = left_s is not None and left_s <= 0
        if not is_late:
            return None
        return self.rules.timed_out(pending, subchannels, empty_reason=reason)

    def refresh(self, picking: Picking[S] | None = None, *, if_due: bool = False) -> None:
        """Read states, prepare the picker after changes, and connect IDLE subchannels.

        Reads those of a picking; None: of all that calls use. `if_due`: does nothing if another
        thread has just done it.
        """
        with self.lock:
            if picking is not None:
                pickings: Sequence[Picking[S]] = (picking,)
            else:
                own = self.router.picking_for(None)
                pickings = [each for each in self.router if each.is_used or each is own]
            now_ns, timer_ns = time.monotonic_ns(), self.now_ns()
            if if_due and not any(each.is_due(now_ns, timer_ns) for each in pickings):
                return
            idle = [each for which in pickings for each in which.read(now_ns, timer_ns)]
        if self.rules.are_known and any(each.is_unreachable for each in pickings):
            self.unreachable()
        if idle:
            self.connections.connect(idle)
        for subchannel in self.subchannels:
            if subchannel.stale and subchannel.state is FAILING:
                self.checker.check_stale(subchannel)  # removes it if it still can't be reached

    def choose_anew(self) -> None:
        """Read all states after a change; the next call connects subchannels. Under the lock."""
        for picking in self.router:
            if picking.read(time.monotonic_ns(), self.now_ns(), connects=False):
                picking.read_soon()

    def unreachable(self) -> None:
        """Report that a server can't be reached."""
        if self._refresh is not None:
            self._refresh()

    # --- The whole ---

    @property
    def calls(self) -> int:
        """The number of calls in flight, also on subchannels whose instance was removed."""
        return sum(
            subchannel.calls for subchannel in (*self.subchannels, *self.connections.leaving)
        )

    def whole_state(self) -> grpc.ChannelConnectivity:
        """Return the best state of all subchannels, as gRPC's round_robin does."""
        with self.lock:  # as in `_refusal_of`
            return SHUTDOWN if self.closed else self.rules.state(self.subchannels)

    def status(self) -> ChannelStatus | None:
        """Describe the channel now; None if it is closed or being closed."""
        if self.closing:
            return None
        subchannels = tuple(subchannel.status() for subchannel in self.subchannels)
        state = self.whole_state().name
        return ChannelStatus(
            target=self.name,
            balanced=True,
            state=state,
            calls=self.calls,
            connection=None,
            stale=any(subchannel.stale for subchannel in subchannels),
            subchannels=subchannels,
            problem=channel_problem(state, has_servers=bool(subchannels)),
        )


def subchannel_options(options: object) -> list[tuple[str, Any]]:
    """Return the options of the connections of subchannels.

    Raises:
        TypeError: An option is not a pair.
    """
    checked = checked_options(options)
    names = {name for name, _ in checked}
    return checked if MAX_RECONNECT_BACKOFF[0] in names else [*checked, MAX_RECONNECT_BACKOFF]


def _checked_callback(callback: Any, name: str) -> Any:
    if callback is not None:
        check_callback(callback, name, f"{name}(subchannel)")
    return callback


def _place(instance: ServiceInstance) -> tuple[str, int, str]:
    return instance.host, instance.port, instance.protocol


def _checked_name(name: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"name must be a string such as 'shop.Orders', not {name!r}")
    if not name:
        raise ConfigurationError("name must not be empty; give that of the service: 'shop.Orders'")
    return name
