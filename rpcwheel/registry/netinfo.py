"""Where a server is, for those who are to call it: addresses of this machine, and ports of it.

What asks the system blocks: for a name of a registry's host as long as the resolver takes, else for
microseconds; none of it is for a loop or the timer's thread.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rpcwheel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .url import RegistryUrl

__all__ = ["LOOPBACK", "accepts", "host_towards", "is_local", "listening"]

LOOPBACK: Final = "127.0.0.1"

HERE: Final = {"memory", "sqlite"}
"""Schemes of registries that are of one machine."""

DESCRIPTORS: Final = next(
    (path for path in (Path("/proc/self/fd"), Path("/dev/fd")) if path.is_dir()), None
)

OUTWARD: Final = ("192.0.2.1", "2001:db8::1")
"""Nobody's addresses (RFC 5737 and 3849): on the way there, the default route is taken."""

ANY_PORT: Final = 9
"""What a UDP socket is pointed at; nothing is sent there."""


def host_towards(registries: Iterable[RegistryUrl]) -> str:
    """Find the address of this machine by which these are reached, and so can be reached from.

    A UDP socket is pointed at each, which sends nothing and makes the system choose an interface.
    The first address that is not the loopback's is taken; where all are, that. If none of the
    registries can be found now, it is the address by which the world outside is reached.

    Raises:
        ConfigurationError: Nor can that, so that nothing is known.
    """
    failures: list[str] = []
    found: list[str] = []
    for url in registries:
        if url.scheme in HERE or not url.hosts:
            found.append(LOOPBACK)
        for host, port in url.hosts if url.scheme not in HERE else ():
            try:
                found.append(_own_address(host, port or ANY_PORT))
            except OSError as error:
                failures.append(f"{host}: {error}")
    if not found:  # the registries may be reached later; the server serves now
        found = _own_addresses_outward()
    remote = [one for one in found if not ipaddress.ip_address(one).is_loopback]
    if not found:
        raise ConfigurationError(
            "by which address clients reach this server could not be found out "
            f"({'; '.join(failures) or 'no registry says where it is'}); give host="
        )
    return remote[0] if remote else LOOPBACK


def _own_address(host: str, port: int) -> str:
    for family, kind, _, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0]).partition("%")[0]
    raise OSError("no route to it")


def _own_addresses_outward() -> list[str]:
    found: list[str] = []
    for host in OUTWARD:
        with suppress(OSError):
            found.append(_own_address(host, ANY_PORT))
    return found


def is_local(host: str) -> bool:
    """Whether an address, or the first one of a name, is of this machine."""
    with suppress(OSError):
        family, _, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(place)
            return True
    return False


def listening() -> frozenset[tuple[str, int]] | None:
    """The addresses and ports at which this process listens; None where the system hides that.

    Paths of unix sockets stand there with the port 0.
    """
    if DESCRIPTORS is None:
        return None
    return frozenset(_listening())


def _listening() -> Iterator[tuple[str, int]]:
    for number in [int(path.name) for path in DESCRIPTORS.iterdir()] if DESCRIPTORS else ():
        with suppress(OSError):  # closed meanwhile; no socket of the kind
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue  # to close a duplicate of a file takes away its locks
            with socket.socket(fileno=os.dup(number)) as one:
                if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    name = one.getsockname()
                    yield (_plain(name[0]), int(name[1])) if isinstance(name, tuple) else (name, 0)


def _plain(address: str) -> str:
    """An address as people write it: gRPC listens at IPv4 by IPv6 sockets (RFC 4291, 2.5.5.2)."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return str(mapped or ip)


def accepts(host: str, port: int, timeout_s: float) -> str:
    """Connect there; "" if that was accepted, else why not."""
    try:
        socket.create_connection((host, port), timeout_s).close()
    except OSError as error:
        return str(error)
    return ""
