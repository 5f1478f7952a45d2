"""What a kit is in both worlds: one policy, one timer, and what it keeps for calls and connections.

That is the queues of the calls that it parked, the heartbeats of the channels that it made, and the
detectors of its servers. Channels and servers themselves are the user's.
"""

from __future__ import annotations

import difflib
import inspect
import warnings
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, Generic, ParamSpec, Protocol, Self, TypeVar

from rpcwheel.call.policy import CallPolicy
from rpcwheel.durations import to_ns, to_seconds
from rpcwheel.errors import ConfigurationError
from rpcwheel.methods import checked_pattern
from rpcwheel.policy import shown

from .policy import PREFIX, KitPolicy

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from datetime import timedelta

    from rpcwheel.call.policy import (
        DeadlinePolicy,
        DefaultResponsePolicy,
        HedgingPolicy,
        MethodPolicy,
        RetryPolicy,
    )
    from rpcwheel.failback.core import FailbackStats
    from rpcwheel.failback.policy import FailbackPolicy
    from rpcwheel.heartbeat.policy import HeartbeatPolicy
    from rpcwheel.idle.policy import IdlePolicy
    from rpcwheel.probe import Probe
    from rpcwheel.registry.policy import RegistryPolicy
    from rpcwheel.registry.publisher import PublisherBase
    from rpcwheel.timer.api import Timer

    Ports = int | str | Iterable[int | str] | None

__all__ = ["KitBase", "check_served"]


class FailbackQueues(Protocol):
    """What the queues of both worlds have."""

    @property
    def pending(self) -> int:
        """How many calls wait."""

    def stats(self) -> dict[str, FailbackStats]:
        """Count by queue."""


class Manager(Protocol):
    """What the heartbeat managers of both worlds have."""

    @property
    def closed(self) -> bool:
        """Whether it has ended."""

    def attach(self, connection: Any, *, probe: Probe | None = None) -> Any:
        """Begin to watch a channel."""


class Detector(Protocol):
    """What the idle detectors of both worlds have."""

    @property
    def closed(self) -> bool:
        """Whether it has ended."""

    def close(self) -> None:
        """End it."""


Q = TypeVar("Q", bound=FailbackQueues)
M = TypeVar("M", bound=Manager)
T = TypeVar("T")
D = TypeVar("D", bound=Detector)
P = ParamSpec("P")

SETTINGS: Final = (
    "timeout",
    "retry",
    "hedging",
    "default_response",
    "failback",
    "idempotent",
    "wait_for_ready",
    "heartbeat",
    "idle",
    "registry",
)


INTERCEPTORS_UNWATCHED: Final = (
    "interceptors do not know their channel; make it with kit.channel(target), or use "
    "kit.intercept_channel(channel)"
)
"""Why `client_interceptors()` can't have their channel probed."""

SERVED: Final = frozenset({"server", "publish", "service", "port", "ports", "connections"})
"""The parameters of `serve` that are not settings of the publisher."""

NOT_SERVED: Final = {
    "policy": "it is the kit's own: Kit(registry=...)",
    "timer": "it is the kit's own: Kit(timer=...)",
    "registry": "did you mean 'publish'?",
    "services": "did you mean 'service'? It takes one name, or several",
}


def check_served(settings: Mapping[str, object]) -> None:
    """Check that `serve` can hand these settings on to a publisher.

    Raises:
        TypeError: A publisher has no such setting.
    """
    from rpcwheel.registry.publisher import PublisherBase

    known = set(inspect.signature(PublisherBase.__init__).parameters) | SERVED
    known -= {"self", "on_serving", *NOT_SERVED}
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = (
                f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(known))}"
            )
            raise TypeError(f"serve() has no setting {name!r}: {NOT_SERVED.get(name, meant)}")


def _in_our_words(init: Callable[P, None]) -> Callable[P, None]:
    """A constructor that says what a setting is that it does not know."""
    known = inspect.signature(init).parameters

    @wraps(init)
    def checking(*args: P.args, **settings: P.kwargs) -> None:
        if len(args) > 1:
            given = shown(args[1])
            raise TypeError(f"settings are given by name: timeout=2.0, for one; not {given}")
        if not settings.keys() <= known.keys():
            rest: dict[str, Any] = {name: settings[name] for name in settings if name != "timer"}
            KitPolicy(**rest)  # raises, with the nearest that there is
        init(*args, **settings)

    return checking


class KitBase(Generic[Q, M, T, D]):
    """All but what makes and what waits."""

    @_in_our_words
    def __init__(
        self,
        *,
        timeout: float | timedelta | DeadlinePolicy | None = None,
        retry: RetryPolicy | None = None,
        hedging: float | timedelta | HedgingPolicy | None = None,
        default_response: DefaultResponsePolicy | None = None,
        failback: FailbackPolicy | None = None,
        idempotent: bool = False,
        wait_for_ready: bool | None = None,
        methods: Mapping[str, MethodPolicy] | None = None,
        heartbeat: float | timedelta | HeartbeatPolicy | None = None,
        idle: float | timedelta | IdlePolicy | None = None,
        registry: float | timedelta | RegistryPolicy | None = None,
        timer: Timer | None = None,
    ) -> None:
        """Check the settings; nothing runs before the first call.

        Args:
            timeout: Seconds for each call, all attempts included, or a `DeadlinePolicy`.
            retry: Which failed calls are retried within their deadline. Only methods marked
                `idempotent` are retried.
            hedging: Seconds after which a call of an `idempotent` method is sent once more, or a
                `HedgingPolicy`.
            default_response: Which failed calls are logged and answered with a default.
            failback: Which failed calls are answered with a default and delivered later.
            idempotent: Whether a server may execute a call of any method twice without harm. Better
                mark single methods with `methods`, by `MethodPolicy(idempotent=True)`.
            wait_for_ready: Whether calls that find no connection wait for one, if their caller does
                not say.
            methods: What holds for some methods instead, by pattern: `"/shop.Orders/Get*"`.
            heartbeat: Seconds of silence after which channels of `channel()` and of
                `intercept_channel()` are probed, or a `HeartbeatPolicy`.
            idle: Seconds without use after which connections of servers that `detect_idle()` looks
                after are closed, or an `IdlePolicy`.
            registry: Seconds after which registries forget a server whose process is gone, or a
                `RegistryPolicy`; for those of `channel()` and `serve()`.
            timer: Any rpcwheel timer; None takes `shared_timer()` when one is needed.

        Raises:
            ConfigurationError: A setting is unknown or out of range, or contradicts another or this
                world.
            TypeError: A setting is of a wrong type.
        """
        policy = KitPolicy(
            timeout=timeout,
            retry=retry,
            hedging=hedging,
            default_response=default_response,
            failback=failback,
            idempotent=idempotent,
            wait_for_ready=wait_for_ready,
            methods={} if methods is None else methods,
            heartbeat=heartbeat,
            idle=idle,
            registry=registry,
        )
        self._begin(policy, timer)

    @classmethod
    def from_policy(cls, policy: CallPolicy, *, timer: Timer | None = None) -> Self:
        """Make a kit of a policy that was made elsewhere; a `KitPolicy` has all that it may have.

        Raises:
            TypeError: `policy` is neither a `KitPolicy` nor a `CallPolicy`.
        """
        if not isinstance(policy, CallPolicy):
            raise TypeError(
                f"policy must be a KitPolicy or a CallPolicy, not {policy!r}; {cls.__name__}(...) "
                "takes its settings by name"
            )
        if not isinstance(policy, KitPolicy):
            policy = KitPolicy(**{name: getattr(policy, name) for name in policy.model_fields_set})
        kit = cls.__new__(cls)
        kit._begin(policy, timer)  # noqa: SLF001 - its own
        return kit

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], *, timer: Timer | None = None) -> Self:
        """Make a kit of the settings in a TOML or YAML file (YAML needs `rpcwheel[config]`).

        Raises:
            ConfigurationError: The file can't be read, or settings in it are wrong; the message
                names the file and each place.
        """
        from .config import policy_from_file

        return cls.from_policy(policy_from_file(path), timer=timer)

    @classmethod
    def from_env(cls, prefix: str = PREFIX, *, timer: Timer | None = None) -> Self:
        """Make a kit of the environment's settings, over those of the file that CONFIG names.

        Args:
            prefix: How the names of the variables begin: `RPCWHEEL_CONFIG=shop.toml`,
                `RPCWHEEL_TIMEOUT=2.0`, `RPCWHEEL_RETRY__RETRY_ON=["UNAVAILABLE"]`.
            timer: As in the constructor.

        Raises:
            ConfigurationError: A variable that begins so is no setting, or is wrong.
        """
        from .config import policy_from_env

        return cls.from_policy(policy_from_env(prefix), timer=timer)

    @classmethod
    def from_service_config(
        cls, config: str | Mapping[str, Any] | os.PathLike[str], *, timer: Timer | None = None
    ) -> Self:
        """Make a kit of gRPC's service config, the one that services in other languages read.

        It applies `timeout`, `waitForReady`, `retryPolicy`, `hedgingPolicy` and `retryThrottling`.
        A method with a `retryPolicy` or `hedgingPolicy` counts as idempotent. A warning names what
        it does not apply. Do not give the same config to gRPC as the channel's option
        `grpc.service_config`: then both retry.

        Args:
            config: The JSON text, the mapping that it stands for, or the path of a file (a
                `pathlib.Path`; a plain string is taken for the text).
            timer: As in the constructor.

        Raises:
            ConfigurationError: It can't be read, or gRPC would refuse it.
            TypeError: It is of another type.
        """
        from .service_config import policy_from_service_config

        return cls.from_policy(policy_from_service_config(config), timer=timer)

    def _begin(self, policy: KitPolicy, timer: Timer | None) -> None:
        from rpcwheel.timer.clock import checked_timer

        self._policy = policy
        self._timer = checked_timer(timer)
        self._queues = self._make_queues()
        self._manager = None if policy.heartbeat is None else self._make_manager(policy.heartbeat)
        self._has_warned = False
        self._tables: list[T] = []  # of servers that no detector looks after yet
        self._detectors: list[D] = []

    def _make_queues(self) -> Q:
        raise NotImplementedError

    def _make_manager(self, policy: HeartbeatPolicy) -> M:
        raise NotImplementedError

    @property
    def policy(self) -> KitPolicy:
        """All settings. Immutable."""
        return self._policy

    def policy_for(self, method: str) -> MethodPolicy:
        """Return the effective settings of one method.

        They are those of all patterns in `methods` that match it, the most specific one first, and
        those of the kit.

        Args:
            method: The full name: `"/shop.Orders/Get"`.

        Raises:
            ConfigurationError: It is no full name.
        """
        return self._policy.policy_for(checked_pattern(method))

    def server_options(self, **settings: Any) -> list[tuple[str, int]]:
        """Make the options for a server: `grpc.server(pool, options=kit.server_options())`.

        With them the server finds dead clients by pings, and permits those of clients. With
        `heartbeat` it pings after as long a silence, and a client is dead after as long a silence
        as a server is for `channel()`.

        Args:
            **settings: Those of `rpcwheel.options.server_options`, in place of the kit's.
        """
        from rpcwheel.options import server_options

        beat = self._policy.heartbeat
        if beat is not None and beat.interval is not None:
            every_ns = to_ns(beat.interval)
            whole_ns = 3 * every_ns if beat.timeout is None else to_ns(beat.timeout)
            every_s, answer_s = max(1.0, to_seconds(every_ns)), to_seconds(whole_ns - every_ns)
            settings = {"keepalive": every_s, "ping_timeout": answer_s} | settings
        return server_options(**settings)

    def _watch(self, channel: Any, intercepted: Any, balanced: type[Any]) -> None:
        """With `heartbeat`, have a channel of the user's watched until `intercepted` is closed.

        Raises:
            RuntimeError: This kit is closed.
        """
        if self._manager is None:
            return
        from rpcwheel.heartbeat.watched import below

        inner = below(channel)
        if not isinstance(inner, balanced):
            intercepted.on_close(self._manager.attach(channel).detach)
            return
        if self._manager.closed:
            raise RuntimeError("this kit is closed; make another one")
        from .subchannels import SubchannelHeartbeats

        heartbeats = SubchannelHeartbeats(self._manager, None)
        inner.add_listener(heartbeats.add, heartbeats.remove)

    def _warn_unwatched(self, why: str, *, stacklevel: int = 2) -> None:
        """Warn, once for each kit, of a channel that `heartbeat` has no effect on."""
        beat = self._policy.heartbeat
        if self._has_warned or beat is None or beat.interval is None:
            return
        self._has_warned = True
        said = f"Kit(heartbeat=...) has no effect on this channel: {why}"
        warnings.warn(said, RuntimeWarning, stacklevel=stacklevel + 1)

    def _check_probe(self, probe: object) -> None:
        if probe is not None and self._manager is None:
            raise ConfigurationError(
                "probe is what a heartbeat asks, and this kit has none; make it with one, such as "
                "Kit(heartbeat=10.0)"
            )

    def _by_name(self, target: str, named: dict[str, Any], probe: Probe | None) -> dict[str, Any]:
        """The settings of a channel by name; {} if the target is an address.

        Raises:
            ConfigurationError: It is an address, and `named` has settings of channels by name.
            RuntimeError: The kit has `heartbeat` and is closed.
        """
        from rpcwheel.registry.target import names_service

        if self._manager is not None and self._manager.closed:
            raise RuntimeError("this kit is closed; make another one")
        if not names_service(target, named):
            return {}
        settings = {"policy" if name == "balancer" else name: named[name] for name in named}
        settings |= {"registry_policy": self._policy.registry, "timer": self._timer}
        if self._manager is not None:
            from .subchannels import SubchannelHeartbeats

            heartbeats = SubchannelHeartbeats(self._manager, probe)
            settings |= {"on_subchannel": heartbeats.add, "on_removed": heartbeats.remove}
        return settings

    def _on_serving(
        self,
        server: Any,
        ports: Ports,
        connections: T | None,
    ) -> Callable[[Any], Callable[[], object]] | None:
        """The publisher's `on_serving`: begins to close idle connections; None without `idle`."""
        if self._policy.idle is None or (connections is None and not self._tables):
            return None
        table = self._claim(connections)

        def begin(publisher: PublisherBase[Any]) -> Callable[[], object]:
            where = publisher.own_ports if ports is None else ports
            return self.detect_idle(server, where, connections=table).close

        return begin

    def detect_idle(self, server: Any, ports: Ports = None, *, connections: T | None = None) -> D:
        """Begin to close the connections of a server that do nothing."""
        raise NotImplementedError

    def _claim(self, connections: T | None) -> T:
        """The table for a detector: the one given, or the only one that has none."""
        if self._policy.idle is None:
            raise ConfigurationError(
                "this kit has no `idle`; make it with one, such as Kit(idle=180.0)"
            )
        if connections is None:
            if not self._tables:
                raise ConfigurationError(
                    "no server waits for a detector: make it with "
                    "interceptors=kit.server_interceptors() first, and give it one detector"
                )
            if len(self._tables) > 1:
                raise ConfigurationError(
                    f"server_interceptors() was called for {len(self._tables)} servers that no "
                    "detector looks after; call it once for each server, and give its first "
                    "interceptor here: detect_idle(server, connections=interceptors[0])"
                )
            connections = self._tables[0]
        return connections

    def _looked_after(self, connections: T, detector: D) -> D:
        self._tables = [table for table in self._tables if table is not connections]
        self._detectors = [one for one in self._detectors if not one.closed]
        self._detectors.append(detector)
        return detector

    def _end_detectors(self) -> None:
        for detector in self._detectors:
            detector.close()
        if self._tables:
            from rpcwheel.events import IdleDetectionLimited, emit

            said = "a kit with `idle` is closed, and detect_idle(server) was not called for"
            emit(IdleDetectionLimited(f"{said} {len(self._tables)} of its servers"))
            self._tables.clear()

    @property
    def pending(self) -> int:
        """How many parked calls wait to be delivered."""
        return self._queues.pending

    def stats(self) -> dict[str, FailbackStats]:
        """Count what has become of every parked call, by queue."""
        return self._queues.stats()

    def __repr__(self) -> str:
        settings = ", ".join(self._switched_on()) or "nothing switched on"
        return f"<{type(self).__module__}.{type(self).__name__}: {settings}>"

    def _switched_on(self) -> Iterator[str]:
        """The names of the settings, not what is in them: a default may be anything."""
        for name in SETTINGS:
            if getattr(self._policy, name):
                yield name
        if self._policy.methods:
            yield f"methods {', '.join(self._policy.methods)}"
