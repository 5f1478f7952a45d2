"""Addresses and ports of this machine, for publishing where clients reach a server.

The functions that ask the system block: as long as the system's resolver or the timeout takes, else
for microseconds. Do not call them on an event loop or the timer's thread.
"""

from __future__ import annotations

import enum
import ipaddress
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rpcwheel.errors import ConfigurationError
from rpcwheel.instance import joined

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from rpcwheel.registry.url import RegistryUrl

CONNECT_TIMEOUT_S: Final = 1.0
"""The timeout of a connection to the published port, which shows that the server accepts calls."""

LOOPBACK: Final = "127.0.0.1"

LOCAL_SCHEMES: Final = {"memory", "sqlite"}
"""Schemes of registries that belong to one machine."""

DESCRIPTORS: Final = next(
    (path for path in (Path("/proc/self/fd"), Path("/dev/fd")) if path.is_dir()), None
)

EXTERNAL_ADDRESSES: Final = ("192.0.2.1", "2001:db8::1")
"""Addresses for documentation (RFC 5737 and 3849), which the default route leads to."""

ANY_PORT: Final = 9
"""A port for UDP sockets that send nothing."""


class PortBinding(enum.Enum):
    """Who listens on the port that is published."""

    OWN = "own"
    """This process."""
    BIND = "bind"
    """No process listens there yet; the server binds it."""
    PROXY = "proxy"
    """A proxy or a mapped port in front of this process."""


def port_binding(
    port: int,
    *,
    listening_ports: Collection[int],
    server_runs: bool,
    host_forwards: bool,
) -> PortBinding:
    """Decide who listens on the port that is published.

    Args:
        port: The port that is published; 0 for any.
        listening_ports: The ports on which this process listens.
        server_runs: Whether the server runs, so no port can be added to it.
        host_forwards: Whether a host was given that may forward to this process: it is not this
            machine, or accepts connections on the port.

    Raises:
        ConfigurationError: No server listens there and none can, or it can't be found out.
    """
    if port and port in listening_ports:
        return PortBinding.OWN
    if server_runs:
        if port and host_forwards:
            return PortBinding.PROXY
        raise ConfigurationError(
            f"port is {port}, and nothing in this process listens there, but the server runs "
            "already; give the port that add_insecure_port() or add_secure_port() returned, or, "
            "if it is reached through another machine or a proxy, say where: host="
        )
    if port and listening_ports and host_forwards:
        return PortBinding.PROXY
    # Without a port of this process no proxy can forward to it: another server has answered.
    return PortBinding.BIND


class PublishedPort:
    """The port at which clients reach a server. Each method blocks for a few seconds at most."""

    def __init__(self, host: str | None, number: int) -> None:
        """Take the arguments of the publisher. The number is 0 for any port, until `bind`."""
        self.host = host
        self.number = number
        self.binding = PortBinding.OWN

    def find_binding(self, *, server_runs: bool) -> None:
        """Find out who listens. `server_runs`: no port can be added to the server.

        Raises:
            ConfigurationError: As `port_binding`.
        """
        host, port = self.host, self.number
        is_elsewhere = host is not None and not is_local(host)
        accepts = bool(host and port and not connect_error(host, port, CONNECT_TIMEOUT_S))
        addresses = listening_addresses()
        if addresses is not None:
            listening_ports = {own_port for _, own_port in addresses}
        elif connect_error("localhost", port, CONNECT_TIMEOUT_S):
            listening_ports = set()
        else:  # which process listens can't be known; taken for this one
            listening_ports = {port}
        self.binding = port_binding(
            port,
            listening_ports=listening_ports,
            server_runs=server_runs,
            host_forwards=is_elsewhere or accepts,
        )

    def bind(self, add_insecure_port: Callable[[str], int], protocol: str) -> None:
        """Have the server listen on the port, without TLS.

        Raises:
            ConfigurationError: The port is in use, or the protocol is not "grpc".
        """
        if protocol != "grpc":
            raise ConfigurationError(
                f"nothing in this process listens on port {self.number}, and which credentials it "
                f"takes is not known: call add_secure_port('[::]:{self.number}', credentials) first"
            )
        try:
            check_unshared(self.number)
            self.number = add_insecure_port(f"[::]:{self.number}")
        except (OSError, RuntimeError) as error:
            raise ConfigurationError(
                f"port {self.number} can't be bound, perhaps because another process listens there "
                f"({error}); give another port; or, if the other process is a proxy for this "
                "server, host= and a server that has a port of its own; or, if both are to share "
                f"the port, call add_insecure_port('[::]:{self.number}') first"
            ) from error

    def check(self, host: str) -> None:
        """Check that the published address accepts connections, if it is one of this machine.

        Raises:
            ConfigurationError: It does not.
        """
        if self.binding is PortBinding.PROXY:
            return
        error = connect_error(host, self.number, CONNECT_TIMEOUT_S)
        if error and (self.host is None or is_local(host)):
            own = sorted(
                joined(*address)
                for address in listening_addresses() or ()
                if address[1] == self.number
            )
            raise ConfigurationError(
                f"nothing accepts connections at {joined(host, self.number)} ({error}), so that it "
                f"can't be published; the server listens at {', '.join(own) or 'no port'}; have it "
                "listen at '[::]', or give the host= at which it does"
            )


def address_facing(registries: Iterable[RegistryUrl]) -> str:
    """Return the address of this machine from which the registries are reached.

    It is the local address of a UDP socket that is connected to the registry, which sends nothing
    and makes the system choose an interface. The first address that is not the loopback's counts;
    if there are only those, 127.0.0.1. If no registry can be resolved now, it is the address that
    faces the internet.

    Raises:
        ConfigurationError: There is no such address.
    """
    failures: list[str] = []
    addresses: list[str] = []
    for url in registries:
        if url.scheme in LOCAL_SCHEMES or not url.hosts:
            addresses.append(LOOPBACK)
        for host, port in url.hosts if url.scheme not in LOCAL_SCHEMES else ():
            try:
                addresses.append(_source_address(host, port or ANY_PORT))
            except OSError as error:
                failures.append(f"{host}: {error}")
    if not addresses:  # the registries may be reached later; the server serves now
        for host in EXTERNAL_ADDRESSES:
            with suppress(OSError):
                addresses.append(_source_address(host, ANY_PORT))
    remote = [address for address in addresses if not ipaddress.ip_address(address).is_loopback]
    if not addresses:
        raise ConfigurationError(
            "by which address clients reach this server could not be found out "
            f"({'; '.join(failures) or 'no registry says where it is'}); give host="
        )
    return remote[0] if remote else LOOPBACK


def _source_address(host: str, port: int) -> str:
    for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0]).partition("%")[0]
    raise OSError("no route to it")


def is_local(host: str) -> bool:
    """Whether an address, or the first address of a name, belongs to this machine."""
    with suppress(OSError):
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)
            return True
    return False


def listening_addresses() -> frozenset[tuple[str, int]] | None:
    """The addresses and ports on which this process listens; None if the system hides them.

    A unix socket is its path with the port 0. Sockets of other families are left out.
    """
    if DESCRIPTORS is None:
        return None
    return frozenset(_listening_addresses(DESCRIPTORS))


def _listening_addresses(descriptors: Path) -> Iterator[tuple[str, int]]:
    for number in [int(path.name) for path in descriptors.iterdir()]:
        with suppress(OSError):  # closed meanwhile; a socket of another kind
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue  # closing a duplicate of a file would release its locks
            with socket.socket(fileno=os.dup(number)) as duplicate:
                if not duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    continue
                name = duplicate.getsockname()
                if duplicate.family in {socket.AF_INET, socket.AF_INET6}:
                    yield _without_mapping(name[0]), name[1]
                elif isinstance(name, str):
                    yield name, 0


def _without_mapping(address: str) -> str:
    """The IPv4 address in a mapped IPv6 address (RFC 4291, 2.5.5.2), at which gRPC listens."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return str(mapped or ip)


def connect_error(host: str, port: int, timeout_s: float) -> str:
    """Connect to an address; returns why that failed, or "" if it did not."""
    try:
        socket.create_connection((host, port), timeout_s).close()
    except OSError as error:
        return str(error)
    return ""


def check_unshared(port: int) -> None:
    """Check that `[::]:port` can be bound without sharing it.

    gRPC shares ports by default (SO_REUSEPORT): of two processes that bind the same port, each then
    gets a part of the connections.

    Raises:
        OSError: It can't; most often another process listens there.
    """
    both = socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if both else socket.AF_INET) as probe:
        if os.name == "posix":  # connections that were closed a moment ago do not count
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if both:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        probe.bind(("", port))
