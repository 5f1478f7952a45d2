"""The heartbeats of many connections, as far as they are the same for `grpc` and `grpc.aio`."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from rpcwheel._concurrency.callbacks import weak_callback
from rpcwheel.errors import ConfigurationError
from rpcwheel.probe import HealthProbe, Probe
from rpcwheel.timer.clock import checked_timer

from .base import HeartbeatBase
from .policy import HeartbeatPolicy
from .rules import HeartbeatRules, HeartbeatState
from .watched import below

if TYPE_CHECKING:
    from rpcwheel.durations import Duration
    from rpcwheel.timer.api import Timer

__all__ = ["ManagerBase"]

H = TypeVar("H", bound=HeartbeatBase)


class ManagerBase(Generic[H]):
    """Keeps heartbeats, by connection. Thread-safe."""

    _kind: ClassVar[type[Any]]
    """What it makes."""
    _other: ClassVar[tuple[type[Any], str]]
    """The channels of the other world, and who watches those."""

    def __init__(
        self,
        timer: Timer | None = None,
        *,
        interval: Duration | None = 60.0,
        timeout: Duration | None = None,
        probe: Probe | None = None,
        drain_timeout: Duration | None = 0.0,
        reconnect: bool = True,
    ) -> None:
        _refuse_policy(timer)
        policy = HeartbeatPolicy(
            interval=interval, timeout=timeout, drain_timeout=drain_timeout, reconnect=reconnect
        )
        self._timer = checked_timer(timer)
        self._probe = checked_probe(HealthProbe() if probe is None else probe)
        self.policy = policy
        """What holds for every connection that is attached."""
        self._rules = HeartbeatRules.from_policy(policy)
        self._lock = threading.RLock()
        self._kept: dict[int, H] = {}
        self._closed = False

    @classmethod
    def from_policy(
        cls, policy: HeartbeatPolicy, *, timer: Timer | None = None, probe: Probe | None = None
    ) -> Self:
        """Make one of a policy.

        Raises:
            TypeError: It is no `HeartbeatPolicy`; the timer or the probe is none.
        """
        if not isinstance(policy, HeartbeatPolicy):
            raise TypeError(f"policy must be a HeartbeatPolicy, not {policy!r}")
        settings = {name: getattr(policy, name) for name in HeartbeatPolicy.model_fields}
        return cls(timer, probe=probe, **settings)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def heartbeats(self) -> tuple[H, ...]:
        """Those that are attached, without those of closed channels."""
        return tuple(one for one in self._all() if not one.is_closed_below())

    def _all(self) -> tuple[H, ...]:
        with self._lock:
            return tuple(self._kept.values())

    def attach(self, connection: Any, *, probe: Probe | None = None) -> H:
        """Begin to watch a connection; a second time, gives the same heartbeat.

        Args:
            connection: A `ReconnectingChannel`, with interceptors on top or without: those are
                passed by. Any other gRPC channel can be watched too, but its activity is not seen,
                so that it is probed once in each interval while it is connected, and it can't be
                replaced: its death is only reported.
            probe: What to ask this one; None: what the manager was made with.

        Returns:
            Its heartbeat, until `detach()`, `close()`, or the channel's own end.

        Raises:
            TypeError: It is no channel, or one of the other world; the probe is none.
            RuntimeError: This manager is closed.
            TimerStopped, TooManyTimeouts: The timer doesn't take it; nothing is attached.
        """
        if not callable(getattr(connection, "unary_unary", None)):
            raise TypeError(f"connection must be a gRPC channel, not {connection!r}")
        connection = below(connection)
        other, watcher = self._other
        if isinstance(connection, other):
            raise TypeError(f"{connection!r} is a channel of the other world: use {watcher}")
        probe = self._probe if probe is None else checked_probe(probe)
        self._prune()
        with self._lock:
            if self._closed:
                raise RuntimeError("this HeartbeatManager is closed; make another one")
            known = self._kept.get(id(connection))
            if known is not None:
                return known
            heartbeat: H = self._make(connection, probe)
            heartbeat._begin()  # noqa: SLF001 - for us
            if heartbeat.state is not HeartbeatState.CLOSED:
                self._kept[id(connection)] = heartbeat
        on_close = getattr(connection, "on_close", None)
        if callable(on_close):
            unhook = on_close(weak_callback(heartbeat.detach))
            heartbeat._when_over(unhook)  # noqa: SLF001
        return heartbeat

    def close(self) -> None:
        """Detach all; the connections stay their users'. Idempotent."""
        with self._lock:
            self._closed = True
        for heartbeat in self._all():
            heartbeat.detach()

    def __repr__(self) -> str:
        return f"<HeartbeatManager of {len(self._kept)} connections, {self.policy!r}>"

    def _make(self, connection: Any, probe: Probe) -> H:
        made: H = self._kind(
            connection,
            rules=self._rules,
            drain_timeout=self.policy.drain_timeout,
            probe=probe,
            timer=self._timer,
            forget=weak_callback(self._forget, id(connection)),
        )
        return made

    def _prune(self) -> None:
        """Let go of heartbeats whose channels were dropped or closed."""
        for heartbeat in self._all():
            if heartbeat.orphaned or heartbeat.is_closed_below():
                heartbeat.detach()

    def _forget(self, key: int, heartbeat: HeartbeatBase) -> None:
        with self._lock:
            if self._kept.get(key) is heartbeat:
                del self._kept[key]


def _refuse_policy(timer: object) -> None:
    """What is given for a timer by mistake."""
    if isinstance(timer, HeartbeatPolicy):
        raise TypeError(
            "the first argument is the timer; of a policy: HeartbeatManager.from_policy(policy)"
        )
    if isinstance(timer, (int, float, timedelta)):
        raise TypeError(f"the first argument is the timer; for seconds: interval={timer!r}")


def checked_probe(probe: object) -> Probe:
    """Give `probe` back.

    Raises:
        TypeError: It is no probe; its request is not bytes.
        ConfigurationError: Its method is no full name.
    """
    if isinstance(probe, type) or not isinstance(probe, Probe) or not callable(probe.judge):
        raise TypeError(
            "probe must be HealthProbe(), MethodProbe('/shop.Orders/Ping'), or an object with "
            f"`method`, `request` and `judge(response)`; not {probe!r}"
        )
    method: object = probe.method
    if not isinstance(method, str) or not method.startswith("/"):
        raise ConfigurationError(
            f"a probe's method is a full name such as '/shop.Orders/Ping'; not {method!r}"
        )
    request: object = probe.request
    if not isinstance(request, bytes):
        raise TypeError(f"a probe's request is the serialised message, bytes; not {request!r}")
    return probe
