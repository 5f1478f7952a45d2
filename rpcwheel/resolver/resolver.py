"""Makes the channels of both worlds, and updates those by name with the instances of a service.

Channels with the URL of one registry share its session: the first opens it, the last closes it.
"""

from __future__ import annotations

import threading
import weakref
from functools import partial
from shlex import quote
from typing import TYPE_CHECKING, Any, Final, TypeVar

from rpcwheel._concurrency.executor import EXECUTOR, reset_after_fork
from rpcwheel._concurrency.shared import SharedObjects
from rpcwheel.balancer.dubbo import DubboClient
from rpcwheel.balancer.policy import checked_policy
from rpcwheel.durations import to_ns
from rpcwheel.errors import RegistryError, RegistryRefused, short_repr
from rpcwheel.instance import explicit_target
from rpcwheel.registry.one_shot_timer import OneShotTimer
from rpcwheel.registry.registry import Registry, check_policy
from rpcwheel.registry.url import DUBBO_SCHEMES
from rpcwheel.transport.arguments import checked_options, checked_target

from .target import Target, names_service

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    import grpc

    from rpcwheel.instance import Snapshot
    from rpcwheel.registry.policy import RegistryPolicy
    from rpcwheel.registry.registry import RegistryBase, Subscription
    from rpcwheel.timer.api import Timer

C = TypeVar("C")

LIST: Final = "; `rpcwheel registry ls {}` shows what it lists"
"""What to do about a registry that lists no instance."""

AUTHORITY_OPTIONS: Final = frozenset({"grpc.default_authority", "grpc.ssl_target_name_override"})


SHARED_REGISTRIES: Final[SharedObjects[Registry]] = SharedObjects()
"""Registries opened for channels, by what they were opened with."""


def _hashable(policy: RegistryPolicy | None) -> Hashable:
    """Return the policy, or its identity if the user's `backoff` can't be hashed."""
    try:
        hash(policy)
    except TypeError:
        return id(policy)  # not of another one: the registry keeps its policy
    return policy


def new_channel(
    channel_class: Callable[..., C],
    resolved_class: Callable[..., C],
    registry_class: type[RegistryBase],
    *,
    target: str,
    credentials: grpc.ChannelCredentials | None,
    options: Sequence[tuple[str, Any]] | None,
    timer: Timer | None,
    **settings: Any,
) -> C:
    """Make the channel for `insecure_channel` or `secure_channel`.

    Args:
        channel_class: Makes a channel to an address.
        resolved_class: Makes a channel to a service.
        registry_class: Of a registry of the user's.
        target: This and all others: see `rpcwheel.insecure_channel`.
        credentials: None: without encryption.
        options: For each connection.
        timer: None for `shared_timer()`.
        **settings: The others, also those that are None.

    Raises:
        RuntimeError, ConfigurationError, ExtraMissing, TypeError: As `insecure_channel`.
    """
    shared = {"credentials": credentials, "timer": timer}
    for name in {"compression", "interceptors"} & settings.keys():
        shared[name] = settings.pop(name)
    if not names_service(target, settings):
        address = explicit_target(checked_target(target))
        return channel_class(address, options=options, **shared)
    registry = settings.pop("registry")
    if registry is not None and not isinstance(registry, registry_class):
        package = f"rpcwheel.registry{'' if registry_class is Registry else '.aio'}"
        raise TypeError(
            f"registry must be a {package}.Registry or None, not {short_repr(registry)}"
        )
    blocking = None if registry is None else registry._blocking
    selection = {name: settings.pop(name) for name in ("service", "group", "version")}
    named = Target.of(target, has_registry=registry is not None, **selection)
    if credentials is not None:
        named = named.with_tls()
    if named.authority is not None:
        options = checked_options(options)
        if not {name for name, _ in options} & AUTHORITY_OPTIONS:
            options = [*options, ("grpc.default_authority", named.authority)]
    policy, zone = checked_policy(settings.pop("balancer_policy")), settings.pop("zone")
    registry_policy = settings.pop("registry_policy")
    check_policy(registry_policy)
    resolver = Resolver(named, blocking, registry_policy, timer, to_ns(policy.pick_timeout))
    try:
        channel = resolved_class(
            named.service,
            options=options,
            balancer_policy=policy if zone is None else policy.replace(zone=zone),
            **shared,
            **{name: value for name, value in settings.items() if value is not None},
        )
        resolver.start(channel)
    except BaseException:
        resolver.close()
        raise
    return channel


class Resolver:
    """Updates one channel, which it holds weakly, with the instances of a service. Thread-safe.

    On worker threads, also a channel of `grpc.aio`, which takes updates on any thread.
    """

    def __init__(
        self,
        target: Target,
        registry: Registry | None,
        policy: RegistryPolicy | None,
        timer: Timer | None,
        wait_ns: int,
    ) -> None:
        """Open the registry of the target if none is given. Does nothing else before `start`.

        Args:
            target: The service and its registry.
            registry: The user's own; None: that of the target's URL.
            policy: For a registry that is given by URL; None: the defaults.
            timer: None for `shared_timer()`.
            wait_ns: How long calls wait at most for the first instances.

        Raises:
            ConfigurationError, ExtraMissing: The registry can't be opened.
        """
        self._target, self._wait_ns = target, wait_ns
        if registry is None:
            url: Any = target.url
            key = target.registry_key, _hashable(policy), id(timer)
            make = partial(Registry, url, registry_policy=policy, timer=timer)
            registry = SHARED_REGISTRIES.acquire(key, make)
        self._registry = registry
        opened = self._registry._session.url  # also that of a registry of the user
        self._client: DubboClient | None = None
        if opened.scheme in DUBBO_SCHEMES:
            tag = target.tag or opened.options.get("tag", "")
            self._client = DubboClient(opened.options.get("application", ""), tag)
        url = self._registry.url
        self._how_to_list = "" if opened.scheme == "memory" else LIST.format(quote(url))
        self.reset()
        reset_after_fork(self)
        look_up_again = partial(EXECUTOR.submit, self, partial(self._look_up, wait=False))
        self._timer = OneShotTimer(timer, look_up_again)
        self._subscription: Subscription | None = None
        self._closed = False
        self._dropped: weakref.finalize[..., Any] | None = None

    def reset(self) -> None:
        """Replace the lock, in a forked child: another thread may have held it."""
        self._lock = threading.RLock()

    def start(self, channel: Any) -> None:
        """Update a channel until it is closed or dropped, or this is closed.

        Raises:
            RegistryClosed: The registry is closed.
        """
        self._channel = weakref.ref(channel)
        self._dropped = weakref.finalize(channel, EXECUTOR.submit, self, self.close)
        self._dropped.atexit = False
        channel._resolver = self
        rules, grace_ns = self._registry._session.rules, None
        if rules.self_preservation:  # a server that can reach the registry again publishes then
            grace_ns = rules.jitter_ns + rules.longest_retry_ns
        channel._pool.follow_registry(self.refresh, grace_ns, self._client)
        self._subscription = self._registry.subscribe(self._target.service, self._update)
        EXECUTOR.submit(self, self._look_up)

    def close(self) -> None:
        """End the subscription, and close the registry if no other channel uses it. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._timer.clear()
        if self._dropped is not None:
            self._dropped.detach()
        if self._subscription is not None:
            self._subscription.close()
        if self._target.url is not None and SHARED_REGISTRIES.release(self._registry):
            self._registry.close()

    def refresh(self) -> None:
        """Have the registry look again, if it is polled. Never blocks; any thread."""
        self._registry._session.refresh(self._target.service)

    def _update(self, snapshot: Snapshot) -> None:
        channel = self._channel()
        if channel is not None:
            selected = self._target.select(snapshot)
            reason = "" if selected else self._target.mismatch(snapshot)
            if reason:
                reason = f"{self._registry.url} {reason}{self._how_to_list}"
            channel._pool.update(selected, expired=snapshot.expired, empty_reason=reason)

    def _look_up(self, *, wait: bool = True) -> None:
        """Find out whether the registry answers; if not, report to calls why. Runs on a worker.

        Args:
            wait: Whether calls wait, and the registry is asked again, if it is unavailable.
        """
        if self._closed:
            return
        try:
            self._registry.lookup(self._target.service)
        except RegistryError as error:
            channel = self._channel()
            if channel is None:
                return
            wait = wait and not isinstance(error, RegistryRefused)
            channel.report_error(str(error), wait=wait)
            with self._lock:
                if wait and not self._closed:
                    self._timer.wake(self._timer.now_ns() + self._wait_ns)
