"""The TCP connections of this process: which belong to a server, what the kernel knows of each.

gRPC has no function that closes one connection of a server. This module finds the connection among
the descriptors of the process, duplicates the descriptor and works with the duplicate. So a
descriptor that gRPC closes meanwhile, and whose number is reused, is never taken for the one that
was examined. Tried with grpcio 1.60 and 1.85.

A process without a free descriptor cannot duplicate one. Therefore a `DescriptorSlot` reserves the
number of the duplicate beforehand.

Descriptors that are not sockets are not touched: closing any duplicate of a file releases the locks
that the process has on it (fcntl(2)), SQLite's for example.

A socket belongs to a server if its local address is where the server listens, as the user says, or
where a call of the server was seen. Two servers of one process that share address and port
(`SO_REUSEPORT`) cannot be distinguished.

Microseconds per descriptor; any thread. Linux only (`SUPPORTED`).
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
import sys
import weakref
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias
from urllib.parse import unquote

from rpcwheel.errors import ConfigurationError

if sys.platform != "win32":
    import fcntl
    import resource
    import termios

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from collections.abc import Set as AbstractSet

Address: TypeAlias = tuple[str, int]
"""An IP address in canonical form, and a port.

Without the scope of a link-local address. Two that differ only in it count as one connection, as
active as both together, so that none is closed wrongly.
"""

DESCRIPTORS: Final = Path("/proc/self/fd")

SUPPORTED: bool = sys.platform == "linux" and DESCRIPTORS.is_dir()
"""Whether connections can be found and closed on this system."""

STATE_AND_TIMES: Final = struct.Struct("=B43xI4xI")
"""Fields of `struct tcp_info`: the state, and milliseconds since data was sent, and received."""
COUNTS: Final = struct.Struct("=120xQQ")
"""Fields of `struct tcp_info` since Linux 4.1: bytes acknowledged by the peer, bytes received."""

SHUT_DOWN_STATES: Final = frozenset({4, 5, 6, 7, 9, 11})
"""States of a connection that this side has ended: all but ESTABLISHED and CLOSE_WAIT."""

IPV4_MAPPED: Final = bytes(10) + b"\xff\xff"
"""The first 12 bytes of an IPv4 address mapped into IPv6 (RFC 4291, 2.5.5.2)."""

MAX_DESCRIPTORS: Final = 1 << 20
"""Descriptors examined if they cannot be listed."""

# --- Addresses -----------------------------------------------------------------------------------


def canonical(ip: str) -> str:
    """Return the canonical form of an IP address, without scope; a mapped IPv4 address as IPv4.

    Raises:
        OSError: It is not an IP address.
    """
    if ":" not in ip:
        return socket.inet_ntop(socket.AF_INET, socket.inet_pton(socket.AF_INET, ip))
    packed = socket.inet_pton(socket.AF_INET6, ip.partition("%")[0])
    if packed.startswith(IPV4_MAPPED):
        return socket.inet_ntop(socket.AF_INET, packed[len(IPV4_MAPPED) :])
    return socket.inet_ntop(socket.AF_INET6, packed)


def parse_peer(peer: str) -> Address | None:
    """Return the address in the result of `context.peer()`; None if it is not a TCP address.

    For every unix socket gRPC says "unix:", so they cannot be distinguished.
    """
    family, _, rest = unquote(peer).partition(":")
    ip, _, port = rest.rpartition(":")
    if family not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    try:
        return canonical(ip.removeprefix("[").removesuffix("]")), int(port)
    except OSError:
        return None


def grpc_name(address: Address, scope: int = 0) -> str:
    """Return an address in gRPC's form, such as "ipv4:127.0.0.1:50296"."""
    ip, port = address
    if ":" not in ip:
        return f"ipv4:{ip}:{port}"
    return f"ipv6:%5B{ip}{f'%25{scope}' if scope else ''}%5D:{port}"


# --- One socket ----------------------------------------------------------------------------------


class SocketInfo(NamedTuple):
    """A TCP connection, and what the kernel knows of it. HTTP/2 pings count as bytes too."""

    descriptor: int
    inode: int
    """Another connection between the same two addresses, or with the same descriptor, has another
    inode."""
    peer: Address
    local: Address
    name: str
    """The peer in gRPC's form."""
    received_ago_ns: int
    """Since data was received; since the connection began if none was. 0 if the kernel does not
    say. In steps of 4 ms."""
    sent_ago_ns: int
    bytes_in: int | None
    bytes_out: int | None
    """Bytes that the peer has acknowledged. Both counts are None if the kernel does not say."""

    @property
    def lacks_times(self) -> bool:
        """Whether the kernel does not say when data was received.

        Also true of a connection that has just begun.
        """
        return not (self.received_ago_ns or self.bytes_in)


class OpenSocket:
    """The duplicate of a descriptor: it stays the same connection whatever gRPC does meanwhile."""

    def __init__(self, descriptor: int, duplicate: socket.SocketType) -> None:
        self._descriptor = descriptor
        self._socket = duplicate

    def inode(self) -> int:
        """The inode of the socket."""
        return os.fstat(self._socket.fileno()).st_ino

    def addresses(self, listening: set[Address] | None = None) -> tuple[Address, Address, int]:
        """The address of the peer, the local one, and the scope of the peer's.

        Args:
            listening: Gets the local address if the socket listens.

        Raises:
            OSError: It is not a TCP connection, or no longer connected.
        """
        own = self._socket
        is_stream = own.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_STREAM
        if own.family not in (socket.AF_INET, socket.AF_INET6) or not is_stream:
            raise OSError("not TCP")
        ip, port, *_ = own.getsockname()
        local = canonical(ip), port
        is_listening = own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if is_listening and listening is not None:
            listening.add(local)
        ip, port, *more = own.getpeername()
        return (canonical(ip), port), local, more[1] if more else 0

    def info(self, peer: Address, local: Address, scope: int) -> SocketInfo:
        """Ask the kernel.

        Raises:
            OSError: The connection was shut down, and gRPC has not closed its descriptor yet.
        """
        state, sent_ms, received_ms, bytes_out, bytes_in = self._tcp_info()
        if state in SHUT_DOWN_STATES:
            raise OSError("shut down")
        return SocketInfo(
            descriptor=self._descriptor,
            inode=self.inode(),
            peer=peer,
            local=local,
            name=grpc_name(peer, scope),
            received_ago_ns=received_ms * 1_000_000,
            sent_ago_ns=sent_ms * 1_000_000,
            bytes_in=bytes_in,
            bytes_out=bytes_out,
        )

    def received_ago_ns(self) -> int:
        """Return the nanoseconds since data was last received."""
        return self._tcp_info()[2] * 1_000_000

    def _tcp_info(self) -> tuple[int, int, int, int | None, int | None]:
        with suppress(OSError, struct.error):
            tcp_info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            state, sent_ms, received_ms = STATE_AND_TIMES.unpack_from(tcp_info)
            if len(tcp_info) >= COUNTS.size:
                bytes_out, bytes_in = COUNTS.unpack_from(tcp_info)
                if received_ms or bytes_in:  # gVisor leaves both 0
                    return state, sent_ms, received_ms, bytes_out, bytes_in
            return state, sent_ms, received_ms, None, None
        return 0, 0, 0, None, None

    def unread(self) -> int:
        """Bytes that have arrived and that gRPC has not read."""
        return self._ioctl(termios.FIONREAD)

    def unsent(self) -> int:
        """Bytes that gRPC has written and that the peer has not acknowledged."""
        return self._ioctl(termios.TIOCOUTQ)  # SIOCOUTQ has the same number

    def _ioctl(self, request: int) -> int:
        try:
            result = fcntl.ioctl(self._socket, request, bytes(4))
        except OSError:  # no longer connected
            return 0
        return int.from_bytes(result, sys.byteorder)

    def shutdown(self) -> None:
        """End the connection. gRPC then closes its descriptor and ends the calls on it.

        The client sees the end of the connection, and reconnects for its next call.
        """
        with suppress(OSError):  # it has gone already
            self._socket.shutdown(socket.SHUT_RDWR)

    def detach(self) -> None:
        """Let go of the descriptor without closing it."""
        self._socket.detach()


class DescriptorSlot:
    """A reserved descriptor number, for the duplicate of one socket at a time.

    Takes two descriptors: the one of that number, and one that keeps its place in between. Both are
    closed with the object, at the latest.
    """

    def __init__(self) -> None:
        """Reserve it.

        Raises:
            OSError: The process has no free descriptor.
        """
        self._placeholder = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._number = os.dup(self._placeholder)
        except OSError:
            os.close(self._placeholder)
            raise
        self._close = weakref.finalize(self, _close_all, self._placeholder, self._number)

    def duplicate(self, descriptor: int) -> OpenSocket | None:
        """Duplicate a descriptor until `release`; None if it is not a socket."""
        try:
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                return None
            os.dup2(descriptor, self._number, inheritable=False)
        except OSError:
            return None
        try:
            # SOCK_NONBLOCK keeps Python from setting a timeout (`socket.setdefaulttimeout`), which
            # would make the connection itself blocking or not.
            kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK
            # The class of C takes half the time of `socket.socket`; there may be thousands.
            duplicate = socket.SocketType(-1, kind, 0, fileno=self._number)
        except OSError:
            self._clear()
            return None
        return OpenSocket(descriptor, duplicate)

    def release(self, duplicate: OpenSocket) -> None:
        """Close the duplicate and keep its number reserved."""
        duplicate.detach()
        self._clear()

    def _clear(self) -> None:
        if self._close.alive:
            os.dup2(self._placeholder, self._number, inheritable=False)

    def close(self) -> None:
        """Close both descriptors. Idempotent."""
        self._close()


def _close_all(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


# --- All sockets ---------------------------------------------------------------------------------


def find_sockets(
    wanted: Callable[[Address, int], bool],
    slot: DescriptorSlot,
    listening: set[Address] | None = None,
) -> list[SocketInfo]:
    """Find TCP connections of this process.

    Args:
        wanted: `wanted(peer, local_port)` says whether a connection is wanted. Called for each,
            outgoing ones too.
        slot: For the duplicates.
        listening: The addresses at which this process listens are added to it.
    """
    sockets = []
    for number in _descriptors():
        duplicate = slot.duplicate(number)
        if duplicate is None:
            continue
        try:
            peer, local, scope = duplicate.addresses(listening)
            if wanted(peer, local[1]):
                sockets.append(duplicate.info(peer, local, scope))
        except OSError:  # not TCP, or no longer connected
            pass
        finally:
            slot.release(duplicate)
    return sockets


def _descriptors() -> Iterable[int]:
    """The open descriptors; all possible numbers if there is no free one to list them with."""
    try:
        return map(int, os.listdir(DESCRIPTORS))  # noqa: PTH208 - there may be thousands
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return range(
        MAX_DESCRIPTORS if limit == resource.RLIM_INFINITY else min(limit, MAX_DESCRIPTORS)
    )


# --- The sockets of one server -------------------------------------------------------------------

UNIX_PORT: Final = 1
"""What gRPC's `add_insecure_port` returns for a unix socket."""

ALL_IPV4: Final = "0.0.0.0"  # noqa: S104 - compared with, never bound
ALL: Final = "::"  # gRPC accepts IPv4 connections there, too

PORTS_HELP: Final = (
    "give what add_insecure_port() or add_secure_port() returned, or was given if that names a "
    'port: 50051, "[::]:50051", "unix:/run/shop.sock", or several; or None for where calls come in'
)


class ServerPorts(NamedTuple):
    """The ports of a server, as configured by the user.

    A port without an address is not enough to recognize a socket: servers of one process may listen
    at the same port of two addresses, and an outgoing connection may have that port.
    """

    tcp: frozenset[tuple[str | None, int]] | None
    """Addresses and ports; the address None: any. None: wherever calls were seen."""
    unix: tuple[str, ...] = ()
    """Addresses without a port: unix sockets."""

    @classmethod
    def parse(cls, ports: int | str | Iterable[int | str] | None) -> ServerPorts:
        """Parse the argument of a user.

        Raises:
            TypeError, ConfigurationError: It names no ports.
        """
        if ports is None:
            return cls(None)
        if isinstance(ports, (bytes, bytearray)):  # each of its bytes would be a port
            raise TypeError(f"ports is {ports!r}; {PORTS_HELP}")
        several = [ports] if isinstance(ports, (int, str)) else list(ports)
        if not several:
            raise ConfigurationError(f"ports is empty; {PORTS_HELP}")
        tcp: set[tuple[str | None, int]] = set()
        unix: list[str] = []
        for item in several:
            if isinstance(item, str) and item.startswith(("unix:", "unix-abstract:", "vsock:")):
                unix.append(item)
                continue
            host, port = _parse_port(item)
            if port == UNIX_PORT:
                unix.append("a unix socket")
            else:
                tcp.update((address, port) for address in _addresses(host))
        return cls(frozenset(tcp), tuple(unix))

    @property
    def numbers(self) -> frozenset[int]:
        """The ports, of any address."""
        return frozenset(port for _, port in self.tcp or ())

    def has(
        self, local: Address, learned: AbstractSet[Address], listening: AbstractSet[Address]
    ) -> bool:
        """Whether a socket of this process with the local address is the server's.

        Calls of the server were seen at the addresses `learned`, and this process listens at those
        of `listening`. A port that was given without an address means the only address at which the
        process listens on it. If there are several, the port matches no socket.
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
        return hosts[0] in {ip, ALL} or (hosts[0] == ALL_IPV4 and ":" not in ip)


def _parse_port(value: object) -> tuple[str, int]:
    if isinstance(value, str):
        host, colon, text = value.rpartition(":")
        if not (colon and text.isdecimal()):
            raise ConfigurationError(f"ports has {value!r}, which names no port; {PORTS_HELP}")
        port = int(text)
    elif isinstance(value, int) and not isinstance(value, bool):
        host, port = "", value
    else:
        raise TypeError(f"ports has {value!r}; {PORTS_HELP}")
    if not 0 < port < 1 << 16:
        raise ConfigurationError(f"ports has {value!r}, which is no port; {PORTS_HELP}")
    return host, port


def _addresses(host: str) -> tuple[str | None, ...]:
    """The addresses of a host; None for all of them, and for a name, which is not resolved."""
    for prefix in ("ipv4:", "ipv6:", "dns:"):
        host = host.removeprefix(prefix)
    host = host.rpartition("/")[2].removeprefix("[").removesuffix("]")
    if host == "localhost":
        return ("127.0.0.1", "::1")
    try:
        ip = canonical(host)
    except OSError:
        return (None,)
    return (None,) if ip in {ALL, ALL_IPV4} else (ip,)


class SocketScanner:
    """Finds the sockets of one server. For one thread at a time."""

    def __init__(self, ports: ServerPorts) -> None:
        """Reserve a descriptor.

        Raises:
            OSError: The process has no free descriptor.
        """
        self._ports = ports
        self._learned: set[Address] = set()
        self._slot = DescriptorSlot()

    def scan(self, callers: AbstractSet[Address]) -> tuple[list[SocketInfo], list[SocketInfo]]:
        """Return the connections of the server, and those of `callers` at other ports than it has.

        Calls of the `callers` were seen.
        """
        numbers = self._ports.numbers
        candidates = numbers | {port for _, port in self._learned}
        listening: set[Address] = set()
        sockets = find_sockets(
            lambda peer, port: port in candidates or peer in callers, self._slot, listening
        )
        # A local address at which a call came in is the server's, unless the user gave other ports.
        # If a peer has two sockets, it is not known which of them made the call.
        count = Counter(info.peer for info in sockets)
        for info in sockets:
            is_possible = self._ports.tcp is None or info.local[1] in numbers
            if is_possible and info.peer in callers and count[info.peer] == 1:
                self._learned.add(info.local)
        own = [info for info in sockets if self._ports.has(info.local, self._learned, listening)]
        if self._ports.tcp is None:
            return own, []
        return own, [info for info in sockets if info.local[1] not in numbers]

    @contextmanager
    def open(self, info: SocketInfo) -> Iterator[OpenSocket | None]:
        """Duplicate the descriptor of a connection for the block; None if it has gone."""
        duplicate = self._slot.duplicate(info.descriptor)
        try:
            yield duplicate if duplicate is not None and duplicate.inode() == info.inode else None
        finally:
            if duplicate is not None:
                self._slot.release(duplicate)

    def close(self) -> None:
        """Free the descriptors. Idempotent."""
        self._slot.close()
