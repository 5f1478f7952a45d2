"""Where the doctor is to look: `HOST:PORT`, `[IPv6]:PORT` or `unix:/path`, and its addresses."""

from __future__ import annotations

import errno
import queue
import socket
import threading
import time
from dataclasses import dataclass
from typing import Final, cast

from rpcwheel.instance import explicit_target

from .diagnosis import Trouble

__all__ = ["Address", "Target", "connect", "explained", "parse_target", "resolve"]

_PREFIXES: Final = ("dns:///", "dns:", "ipv4:", "ipv6:", "passthrough:///")
_HIGHEST_PORT: Final = 65535


Place = tuple[str, int] | tuple[str, int, int, int] | str
"""What `socket.connect` takes."""


@dataclass(frozen=True, slots=True)
class Target:
    """`path` for a unix socket, else `host` and `port`."""

    host: str
    port: int
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Address:
    """What a socket connects to."""

    family: socket.AddressFamily
    place: Place

    def __str__(self) -> str:
        return self.place if isinstance(self.place, str) else self.place[0]


def parse_target(text: str) -> Target:
    """Read it as `rpcwheel.insecure_channel`: `unix:50051` is the host `unix`.

    Raises:
        ValueError: It is none; the message says what to give.
    """
    text = explicit_target(text)
    if text.startswith("unix:"):
        path = text.removeprefix("unix:").removeprefix("//")
        if not path:
            raise ValueError("a unix socket has a path: unix:/run/app.sock")
        return Target("", 0, path)
    if "://" in text and not text.startswith(_PREFIXES):
        scheme, _, rest = text.partition("://")
        raise ValueError(f"leave out {scheme}://, and give HOST:PORT: {rest.rstrip('/')}")
    prefix = next(filter(text.startswith, _PREFIXES), "")
    text = text.removeprefix(prefix)
    host, port = _parts(text)
    if not host:
        raise ValueError(f"{text!r} has no host; give HOST:PORT, such as localhost:50051")
    if not (port.isascii() and port.isdigit()) or not 0 < int(port) <= _HIGHEST_PORT:
        raise ValueError(f"a port is a number from 1 to {_HIGHEST_PORT}, not {port!r}")
    return Target(host, int(port))


def _parts(text: str) -> tuple[str, str]:
    if text.startswith("["):
        host, bracket, port = text[1:].rpartition("]:")
        if not bracket:
            raise ValueError(f"{text!r} has no port after the bracket; give [::1]:50051, say")
        return host, port
    host, colon, port = text.rpartition(":")
    if _is_ipv6(text):
        raise ValueError(f"an IPv6 address stands in brackets, and has a port: [{text}]:50051")
    if ":" in host:
        raise ValueError(f"an IPv6 address stands in brackets: [{host}]:{port}")
    if not colon and text:
        raise ValueError(f"{text!r} has no port; give HOST:PORT, such as {text}:50051")
    return host, port


def _is_ipv6(text: str) -> bool:
    try:
        socket.inet_pton(socket.AF_INET6, text)
    except (OSError, ValueError):
        return False
    return True


def resolve(target: Target, timeout: float) -> list[Address]:
    """Find the addresses; gives up after `timeout` seconds (the look-up ends when it likes).

    Raises:
        Trouble: There are none.
    """
    if target.path:
        return [Address(socket.AF_UNIX, target.path)]
    answers: queue.SimpleQueue[object] = queue.SimpleQueue()

    def look_up() -> None:
        try:
            found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            answers.put(error)
        else:
            answers.put([Address(one[0], cast("Place", one[4])) for one in found])

    threading.Thread(target=look_up, name="doctor-names", daemon=True).start()
    try:
        found = answers.get(timeout=timeout)
    except queue.Empty:
        raise Trouble(
            f"no answer of the name service within {timeout:g} s", "check /etc/resolv.conf, or DNS"
        ) from None
    if isinstance(found, list):
        return list(dict.fromkeys(found))
    if isinstance(found, socket.gaierror) and found.errno == socket.EAI_AGAIN:
        raise Trouble(
            f"the name {target.host!r} could not be looked up now ({found.strerror})",
            "check the spelling, and that a name server can be reached (/etc/resolv.conf)",
        )
    raise Trouble(
        f"the name {target.host!r} is unknown ({getattr(found, 'strerror', found)})",
        "check the spelling; in Kubernetes, the namespace and the service",
    )


def connect(address: Address, timeout: float) -> tuple[socket.socket, float]:
    """Connect; gives the socket and the seconds it took.

    Raises:
        Trouble: It is not possible; says why in words.
    """
    sock = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout)
        began = time.monotonic()
        sock.connect(address.place)
        took = time.monotonic() - began
        if address.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        sock.close()
        raise explained(error, timeout) from None
    return sock, took


_ERRORS: Final = {
    errno.ECONNREFUSED: (
        "refused: the machine answers, but nothing listens there",
        "start the server; check its port, and whether it binds 127.0.0.1, seen only from there",
    ),
    errno.ECONNRESET: (
        "reset: it ended the connection at once",
        "look into the server's log; a proxy or a limit of connections may do so",
    ),
    errno.EPIPE: (
        "it ended the connection at once",
        "look into the server's log; a proxy or a limit of connections may do so",
    ),
    errno.ENOENT: ("no such socket", "check the path; is the server running?"),
    errno.EACCES: ("no permission", "check the rights of the socket and its directories"),
    errno.EPERM: ("no permission", "a local firewall may forbid it"),
}
_NO_ROUTE: Final = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.ENETDOWN}


def explained(error: OSError, timeout: float) -> Trouble:
    """An error of a socket, in words."""
    if isinstance(error, TimeoutError):
        return Trouble(
            f"no answer within {timeout:g} s",
            "check firewalls and security groups, and whether the machine is up",
        )
    if error.errno in _NO_ROUTE:
        return Trouble(f"no way there ({error.strerror})", "check the network, VPN and address")
    said, do = _ERRORS.get(error.errno or 0, (f"failed: {error}", "look into the server's log"))
    return Trouble(said, do)
