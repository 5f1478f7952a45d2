"""A headless service of Kubernetes as a registry for reading: `headless://shop-orders.default:50051`.

The host is the service. The system's resolver (`getaddrinfo`) gives its addresses, IPv4 and IPv6;
each is one instance. They are resolved every `interval` seconds (30), and when a channel can't
reach a server, at most every `MIN_INTERVAL_S`. gRPC's own `dns:///` resolves only in the second
case, so it does not find new pods while the known ones answer.

With `?srv=1` the addresses and ports come from the SRV records `_grpc._tcp.HOST`. The records with
the lowest priority value are used, their weights are not.

An address that no server can have, such as 0.0.0.0, is a record that can't be read: it is skipped,
with an event. If all addresses are such, the registry is unavailable.

If the resolver fails, the registry is unavailable and the known addresses stay. The answer that a
name does not exist, or has no addresses, means that the service has no instances, but only if it
had addresses before. Otherwise the name may be wrong, and the registry is unavailable.

Kubernetes publishes the pods itself, so nothing can be registered.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

from rpcwheel._concurrency.executor import EXECUTOR, reset_after_fork
from rpcwheel._concurrency.loop import begin_on_worker
from rpcwheel.durations import to_ns
from rpcwheel.errors import (
    ConfigurationError,
    RegistryRefused,
    RegistryUnavailable,
)
from rpcwheel.instance import VERSION, ServiceInstance, joined
from rpcwheel.registry.backend import RegistryBackend, View
from rpcwheel.timer.manual import clock_of

from .polling import PollingWatcher

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from concurrent.futures import Future

    from rpcwheel.registry.backend import Lost, Settings, Watch, Watcher
    from rpcwheel.registry.url import RegistryUrl

INTERVAL_S: Final = 30.0
MIN_INTERVAL_S: Final = 5.0
"""Between resolutions requested by `refresh`. grpc-go and gRPC core wait for 30 s."""

NO_ADDRESSES: Final = frozenset({socket.EAI_NONAME, getattr(socket, "EAI_NODATA", None)})
"""Errors by which the resolver says that the name does not exist, or has no addresses. If no name
server answers, the error is EAI_AGAIN (glibc, musl)."""

_Endpoint = tuple[str, int]


class _NoAddresses(Exception):
    """The resolver has answered that there are no addresses."""


class HeadlessBackend(RegistryBackend):
    """The backend `headless://`. Thread-safe."""

    read_only = True

    def __init__(self, url: RegistryUrl, settings: Settings) -> None:
        super().__init__(url, settings)
        url.check_options("interval", "protocol", "srv")
        self._srv = url.flag("srv")
        host, port = url.hosts[0] if len(url.hosts) == 1 else ("", None)
        if not host or url.user or url.password or (port is None) is not self._srv:
            wanted = "without a port" if self._srv else "with the port of its pods"
            example = "headless://shop-orders.default" + ("?srv=1" if self._srv else ":50051")
            raise ConfigurationError(
                f"{url}: headless:// takes one host {wanted}, such as {example}"
            )
        self._host, self._port = host, port or 0
        self._protocol = _checked_protocol(url)
        if self._srv:
            from dns import resolver

            self._dns = resolver
        interval_s = url.seconds("interval", default=INTERVAL_S)
        self._now_ns = clock_of(settings.timer)
        self._polling = PollingWatcher(
            url,
            self._read,
            timer=settings.timer,
            period_s=interval_s,
            retry_s=interval_s,
        )
        self._had_addresses = False
        self._resolved_ns: int | None = None
        self.reset()
        reset_after_fork(self)

    def reset(self) -> None:
        """Forget the running resolution, in a forked child."""
        self._lock = threading.RLock()  # a call that ends in a finalizer may call `refresh`
        self._running: Future[tuple[_Endpoint, ...]] | None = None

    def publish(self, instances: Sequence[ServiceInstance]) -> None:
        raise RegistryRefused(f"{self.url} is for reading only")

    def withdraw(self, instances: Sequence[ServiceInstance]) -> None:
        raise RegistryRefused(f"{self.url} is for reading only")

    def renew(self, instances: Collection[ServiceInstance]) -> Mapping[tuple[str, str], Lost]:
        return {}

    def lookup(self, service: str) -> View:
        return self._read(service)

    def services(self) -> Sequence[str]:
        return [self._host] if self._endpoints() else []

    def watch(self, service: str, watcher: Watcher) -> Watch:
        self._check_open()
        return self._polling.watch(service, watcher)

    def refresh(self, service: str) -> None:
        with self._lock:
            now_ns, last_ns = self._now_ns(), self._resolved_ns
            if self._closed or (last_ns is not None and now_ns - last_ns < to_ns(MIN_INTERVAL_S)):
                return
            self._resolved_ns = now_ns
        EXECUTOR.submit(self, partial(self._polling.request_read, service))

    def close(self) -> None:
        self._closed = True
        self._polling.close()

    def _read(self, service: str, _: View | None = None) -> View:
        if service != self._host:
            raise RegistryRefused(
                f"{self.url} has one service, {self._host!r}, which is its host; not {service!r}"
            )
        records, refused, usable = {}, None, False
        for host, port in self._endpoints():
            try:
                instance = ServiceInstance(
                    service=service, host=host, port=port, protocol=self._protocol, epoch=""
                )
            except ConfigurationError as error:  # such as 0.0.0.0, of a filtering name server
                refused = error
                unreadable = {"v": VERSION, "service": service, "host": host, "port": port}
                records[joined(host, port)] = json.dumps(unreadable).encode()
            else:
                records[instance.id] = instance.encoded()
                usable = True
        if refused is not None and not usable:
            raise RegistryUnavailable(f"{self.url}: {refused}") from refused
        return View(records)

    def _endpoints(self) -> tuple[_Endpoint, ...]:
        """Resolve, or wait for the resolution that is under way; at most `timeout_s`.

        The system's resolver can't be interrupted. It runs on a worker thread of its own, one at a
        time.
        """
        with self._lock:
            self._check_open()
            if self._running is None:
                self._resolved_ns = self._now_ns()
                self._running = begin_on_worker(self._run)
            running = self._running
        try:
            endpoints = running.result(self.settings.timeout_s)
        except TimeoutError:
            raise RegistryUnavailable(
                f"{self.url}: the resolver has not answered within {self.settings.timeout_s:g} s"
            ) from None
        except _NoAddresses as error:
            if not self._had_addresses:
                raise RegistryUnavailable(f"{self.url}: {error}") from None
            return ()
        self._had_addresses = True
        return endpoints

    # On a worker thread

    def _run(self) -> tuple[_Endpoint, ...]:
        try:
            return tuple(dict.fromkeys(self._resolve()))
        finally:
            with self._lock:  # not before `_endpoints` has set it
                self._running = None

    def _resolve(self) -> Iterable[_Endpoint]:
        if not self._srv:
            return self._addresses(self._host, self._port)
        endpoints: list[_Endpoint] = []
        for host, port in self._srv_records():
            with suppress(_NoAddresses):  # a pod that has gone meanwhile
                endpoints += self._addresses(host, port)
        if not endpoints:
            raise _NoAddresses(f"no host in the SRV records of {self._host!r} has an address")
        return endpoints

    def _addresses(self, host: str, port: int) -> list[_Endpoint]:
        try:
            answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            text = f"the host {host!r} can't be resolved: {error.strerror}"
            if error.errno in NO_ADDRESSES:
                raise _NoAddresses(text) from error
            raise RegistryUnavailable(f"{self.url}: {text}") from error
        except (OSError, UnicodeError) as error:
            text = f"the host {host!r} can't be resolved: {error}"
            raise RegistryUnavailable(f"{self.url}: {text}") from error
        return [(_host_of(family, address), port) for family, *_, address in answers]

    def _srv_records(self) -> list[_Endpoint]:
        dns, name = self._dns, f"_grpc._tcp.{self._host}"
        try:
            records = list(dns.resolve(name, "SRV", search=True, lifetime=self.settings.timeout_s))
        except (dns.NXDOMAIN, dns.NoAnswer) as error:
            raise _NoAddresses(f"there are no SRV records {name}: {error}") from error
        except Exception as error:
            raise RegistryUnavailable(f"{self.url}: {name}: {error}") from error
        first = min((record.priority for record in records), default=0)
        return [
            (record.target.to_text(omit_final_dot=True), record.port)
            for record in records
            if record.priority == first
        ]


def _checked_protocol(url: RegistryUrl) -> Literal["grpc", "grpcs"]:
    match url.options.get("protocol", "grpc"):
        case "grpc" | "grpcs" as protocol:
            return protocol
        case given:
            raise ConfigurationError(f"{url}: protocol must be grpc or grpcs, not {given!r}")


def _host_of(family: int, address: tuple[Any, ...]) -> str:
    """Return the host of a socket's address; a link-local IPv6 address has its zone."""
    host = str(address[0])
    zone = address[3] if family == socket.AF_INET6 else 0
    if zone and "%" not in host and ipaddress.ip_address(host).is_link_local:
        return f"{host}%{zone}"
    return host
