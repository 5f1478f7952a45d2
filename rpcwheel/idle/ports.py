"""Where a server listens, as its user says it: ports, and addresses that name one.

A port alone is not enough: servers of one process may listen at the same port of two addresses, and
an outgoing connection of the process may come from that port of another address.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from rpcwheel.errors import ConfigurationError

from .peers import canonical

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Set as AbstractSet

    from .peers import Address

__all__ = ["Ports"]

UNIX_PORT: Final = 1
"""What grpc's `add_insecure_port` returns for a unix socket; no port that anybody listens at."""

UNIX: Final = "a unix socket"

NAMED: Final = {"localhost": ("127.0.0.1", "::1"), "": (None,), "*": (None,)}

ALL_IPV4: Final = "0.0.0.0"  # noqa: S104 - only compared with, never bound
ALL: Final = "::"  # gRPC accepts IPv4 connections there, too


class Ports(NamedTuple):
    """Where a server listens."""

    tcp: frozenset[tuple[str | None, int]] | None
    """Addresses and ports; without an address, a port of any. None: wherever calls were seen."""
    others: tuple[str, ...]
    """Addresses without a port: unix sockets."""

    @classmethod
    def of(cls, given: int | str | Iterable[int | str] | None) -> Ports:
        """Read what a user gives.

        Raises:
            TypeError, ConfigurationError: It names no ports.
        """
        if given is None:
            return cls(None, ())
        if isinstance(given, (bytes, bytearray)):  # each of its bytes would be a port
            raise TypeError(f"ports is {given!r}; {_PORTS}")
        several = [given] if isinstance(given, (int, str)) else list(given)
        if not several:
            raise ConfigurationError(f"ports is empty; {_PORTS}")
        found = [_port(one) for one in several]
        return cls(
            frozenset(place for places in found if not isinstance(places, str) for place in places),
            tuple(one for one in found if isinstance(one, str)),
        )

    @property
    def numbers(self) -> frozenset[int]:
        """The ports, of whatever address."""
        return frozenset(port for _, port in self.tcp or ())

    def has(
        self, local: Address, learned: AbstractSet[Address], listening: AbstractSet[Address]
    ) -> bool:
        """Whether a socket of this process at that address is the server's.

        Args:
            local: Its own end.
            learned: Where calls of the server's were seen.
            listening: The addresses and ports at which this process listens. A port that was given
                without an address means the only address at which the process listens on it. If
                there are several such addresses, that port matches no socket.
        """
        if local in learned:
            return True
        if self.tcp is None:
            return False
        ip, port = local
        if local in self.tcp:
            return True
        hosts = [host for host, at in listening if at == port]
        if (None, port) not in self.tcp or len(hosts) != 1:
            return False
        return hosts[0] == ip or _accepts(hosts[0], ip)


def _accepts(host: str, ip: str) -> bool:
    """Whether a socket that listens on `host`, a wildcard address, accepts connections to `ip`."""
    return host == ALL or (host == ALL_IPV4 and ":" not in ip)


_PORTS: Final = (
    "give what add_insecure_port() or add_secure_port() returned, or was given if that names a "
    'port: 50051, "[::]:50051", "unix:/run/shop.sock", or several; or None for where calls come in'
)


def _port(given: object) -> tuple[tuple[str | None, int], ...] | str:
    hosts: tuple[str | None, ...] = (None,)
    if isinstance(given, str):
        if given.startswith(("unix:", "unix-abstract:", "vsock:")):
            return given
        host, colon, port = given.rpartition(":")
        if not (colon and port.isdecimal()):
            raise ConfigurationError(f"ports has {given!r}, which names no port; {_PORTS}")
        number, hosts = int(port), _addresses(host)
    elif isinstance(given, int) and not isinstance(given, bool):
        number = given
    else:
        raise TypeError(f"ports has {given!r}; {_PORTS}")
    if not 0 < number < 1 << 16:
        raise ConfigurationError(f"ports has {given!r}, which is no port; {_PORTS}")
    if number == UNIX_PORT:
        return UNIX
    return tuple((host, number) for host in hosts)


def _addresses(host: str) -> tuple[str | None, ...]:
    """Which addresses a host is; None for all, and for a name, which is not asked for."""
    for prefix in ("ipv4:", "ipv6:", "dns:"):
        host = host.removeprefix(prefix)
    host = host.rpartition("/")[2].removeprefix("[").removesuffix("]")
    if host in NAMED:
        return NAMED[host]
    try:
        ip = canonical(host)
    except OSError:
        return (None,)
    return (None,) if ip in {ALL, ALL_IPV4} else (ip,)
