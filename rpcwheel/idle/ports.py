"""Where a server listens, as its user says it: ports, and addresses that name one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from rpcwheel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Ports"]


class Ports(NamedTuple):
    """Where a server listens."""

    tcp: frozenset[int] | None
    """None: wherever calls were seen."""
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
        several = [given] if isinstance(given, (int, str)) else list(given)
        if not several:
            raise ConfigurationError(f"ports is empty; {_PORTS}")
        found = [_port(one) for one in several]
        return cls(
            frozenset(port for port in found if isinstance(port, int)),
            tuple(port for port in found if isinstance(port, str)),
        )


_PORTS: Final = (
    "give what add_insecure_port() or add_secure_port() returned, or was given if that names a "
    'port: 50051, "[::]:50051", "unix:/run/shop.sock", or several; or None for where calls come in'
)


def _port(given: object) -> int | str:
    if isinstance(given, str):
        if given.startswith(("unix:", "unix-abstract:", "vsock:")):
            return given
        _, colon, port = given.rpartition(":")
        if not (colon and port.isdecimal()):
            raise ConfigurationError(f"ports has {given!r}, which names no port; {_PORTS}")
        number = int(port)
    elif isinstance(given, int) and not isinstance(given, bool):
        number = given
    else:
        raise TypeError(f"ports has {given!r}; {_PORTS}")
    if not 0 < number < 1 << 16:
        raise ConfigurationError(f"ports has {given!r}, which is no port; {_PORTS}")
    return number
