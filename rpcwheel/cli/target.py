"""Targets of the command line: `HOST:PORT`, `[IPv6]:PORT` or `unix:/path`; lookup and connect."""

from __future__ import annotations

import errno
import socket
import time
from dataclasses import dataclass
from functools import partial
from typing import Final, cast

from rpcwheel._concurrency.loop import begin_on_worker
from rpcwheel.instance import GRPC_SCHEMES, LARGEST_PORT, explicit_target

from .findings import Problem

SCHEMES: Final = ("dns:", "ipv4:", "ipv6:", "passthrough:///")

NOT_SUPPORTED: Final = GRPC_SCHEMES - {"dns", "ipv4", "ipv6", "unix"}

SocketAddress = tuple[str, int] | tuple[str, int, int, int] | str
"""What `socket.connect` takes."""


@dataclass(frozen=True, slots=True)
class ServerTarget:
    """`path` for a Unix socket, else `host` and `port`."""

    host: str
    port: int
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Address:
    """One address of a target."""

    family: socket.AddressFamily
    address: SocketAddress

    def __str__(self) -> str:
        return self.address if isinstance(self.address, str) else self.address[0]


def parse_target(text: str) -> ServerTarget:
    """Parse a target as `rpcwheel.insecure_channel` does: `unix:50051` is the host `unix`.

    Raises:
        ValueError: The text is not a target; the message shows a valid one.
    """
    text = explicit_target(text)
    if text.startswith("unix:"):
        path = text.removeprefix("unix:").removeprefix("//")
        if not path:
            raise ValueError("a Unix socket needs a path: unix:/run/app.sock")
        return ServerTarget("", 0, path)
    scheme, colon, _ = text.partition(":")
    scheme = scheme.lower()
    if colon and scheme in NOT_SUPPORTED:
        raise ValueError(
            f"give HOST:PORT, [IPv6]:PORT or unix:/path, not a target of {scheme!r}: {text}"
        )
    if "://" in text and not text.startswith(SCHEMES):
        from rpcwheel.registry.url import BACKENDS  # now: most targets do not need it

        scheme = text.partition("://")[0]
        if scheme in BACKENDS:
            raise ValueError(
                "this is the URL of a registry; give HOST:PORT of a server, which "
                "`rpcwheel registry ls URL` lists"
            )
        raise ValueError(f"leave out {scheme}://, give HOST:PORT")
    host, port = _host_and_port(_without_scheme(text))
    if not host:
        raise ValueError(f"{text!r} has no host; give HOST:PORT, such as localhost:50051")
    if not (port.isascii() and port.isdigit()) or not 0 < int(port) <= LARGEST_PORT:
        raise ValueError(f"the port must be a number from 1 to {LARGEST_PORT}, not {port!r}")
    return ServerTarget(host, int(port))


def _without_scheme(text: str) -> str:
    prefix = next(filter(text.startswith, SCHEMES), "")
    address = text.removeprefix(prefix)
    if prefix:  # gRPC reads `dns:shop:80`, `dns:/shop:80` and `dns:///shop:80` alike
        if address.startswith("//") and not address.startswith("///"):
            advice = "leave out the name server; " if prefix == "dns:" else ""
            raise ValueError(f"{advice}give HOST:PORT, not {text!r}")
        address = address.removeprefix("//").removeprefix("/")
    if "," in address:
        raise ValueError(f"{text!r} has several addresses; give one HOST:PORT")
    if "/" in address:
        raise ValueError(f"give one HOST:PORT, not {text!r}")
    return address


def _host_and_port(text: str) -> tuple[str, str]:
    if text.startswith("["):
        host, bracket, port = text[1:].rpartition("]:")
        if not bracket:
            raise ValueError(f"{text!r} has no port; give [HOST]:PORT, such as [::1]:50051")
        return host, port
    host, colon, port = text.rpartition(":")
    if _is_ipv6(text):
        raise ValueError(f"an IPv6 address needs brackets and a port: [{text}]:50051")
    if ":" in host:
        raise ValueError(f"an IPv6 address needs brackets: [{host}]:{port}")
    if not colon and text:
        example = f"127.0.0.1:{text}" if text.isdecimal() else f"{text}:50051"
        raise ValueError(f"{text!r} has no port; give HOST:PORT, such as {example}")
    return host, port


def _is_ipv6(text: str) -> bool:
    try:
        socket.inet_pton(socket.AF_INET6, text)
    except (OSError, ValueError):
        return False
    return True


def resolve(target: ServerTarget, timeout: float) -> list[Address]:
    """Look up the addresses of a target, on a worker thread, as `getaddrinfo` has no timeout.

    Raises:
        Problem: There is no address, or no answer within `timeout` seconds.
    """
    if target.path:
        return [Address(socket.AF_UNIX, target.path)]
    look_up = partial(socket.getaddrinfo, target.host, target.port, type=socket.SOCK_STREAM)
    try:
        answers = begin_on_worker(look_up).result(timeout)
    except TimeoutError:
        raise Problem(
            f"the name server does not answer within {timeout:g} s", "check /etc/resolv.conf"
        ) from None
    except (OSError, UnicodeError) as error:
        if isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN:
            raise Problem(
                f"the lookup of {target.host!r} failed for now ({error.strerror})",
                "check the spelling, and that a name server can be reached (/etc/resolv.conf)",
            ) from None
        raise Problem(
            f"the name {target.host!r} is unknown ({getattr(error, 'strerror', error)})",
            "check the spelling; in Kubernetes, check the namespace and the service",
        ) from None
    return list(
        dict.fromkeys(
            Address(family, cast("SocketAddress", address)) for family, *_, address in answers
        )
    )


def connect(address: Address, timeout: float) -> tuple[socket.socket, float]:
    """Connect, and return the socket and the seconds that it took.

    Raises:
        Problem: The connection failed.
    """
    sock = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout)
        began = time.monotonic()
        sock.connect(address.address)
        took = time.monotonic() - began
        if address.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        sock.close()
        problem = explained(error, timeout)
        is_loopback = str(address).startswith("127.") or str(address) == "::1"
        if error.errno == errno.ECONNREFUSED and is_loopback:
            problem.advice = REFUSED_HERE
        raise problem from None
    return sock, took


REFUSED_HERE: Final = (
    "start the server; check its port, and that it runs on this host and not in another container"
)
"""The advice if this host refuses a connection to itself."""
CLOSED_AT_ONCE: Final = (
    "the server closed the connection at once",
    "look into the server's log; a proxy or a connection limit may close it",
)
ERRORS: Final = {
    errno.ECONNREFUSED: (
        "connection refused: the host is up, but nothing listens on this port",
        "start the server; check its port, and whether it listens on 127.0.0.1 only",
    ),
    errno.ECONNRESET: CLOSED_AT_ONCE,
    errno.EPIPE: CLOSED_AT_ONCE,
    errno.ENOENT: ("no such socket", "check the path, and that the server runs"),
    errno.EACCES: ("no permission", "check the permissions of the socket and its directories"),
    errno.EPERM: ("no permission", "a local firewall may forbid it"),
}
NO_ROUTE: Final = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.ENETDOWN}


def explained(error: OSError, timeout: float) -> Problem:
    """Return the problem that an error of a socket means."""
    if isinstance(error, TimeoutError):
        return Problem(
            f"no answer within {timeout:g} s",
            "check firewalls and security groups, and whether the host is up",
        )
    if error.errno in NO_ROUTE:
        return Problem(f"no route to host ({error.strerror})", "check network, VPN and address")
    message, advice = ERRORS.get(
        error.errno or 0, (f"connecting failed: {error}", "look into the server's log")
    )
    return Problem(message, advice)
