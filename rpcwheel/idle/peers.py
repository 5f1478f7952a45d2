"""Which TCP connections this process holds, who is at their other end, and how one is closed.

gRPC has no call that closes one connection of a server, but the descriptors are the process's own:
each is duplicated, and what is asked or done goes by the duplicate. So a descriptor that gRPC
closes meanwhile, and whose number another file gets, is never taken for the one that was looked at:
the duplicate stays the same connection, whatever its number was. Proved on grpcio 1.60 and 1.85.

A process that has no descriptor left, perhaps because of its idle connections, can't duplicate one
either. So a `Slot` holds the place of the duplicates beforehand, and is never given up.

Descriptors that are no sockets are left alone: to close any duplicate of a file takes away the
locks that the process has on it (fcntl(2)), SQLite's for one.

Blocks for microseconds per descriptor; any thread.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
import sys
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias
from urllib.parse import unquote

if sys.platform != "win32":
    import fcntl
    import resource
    import termios

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

__all__ = [
    "SUPPORTED",
    "Address",
    "OpenSocket",
    "Slot",
    "TcpInfo",
    "canonical",
    "open_sockets",
    "parse_peer",
]

Address: TypeAlias = tuple[str, int]
"""An IP address in its canonical text, and a port.

Without the scope of a link-local address: two that differ in it alone count as one, and so as
active as both together, which errs to the side of keeping a connection.
"""

DESCRIPTORS: Final = Path("/proc/self/fd")

SUPPORTED: bool = sys.platform == "linux" and DESCRIPTORS.is_dir()
"""Whether connections can be found, asked and closed here. Else `open_sockets` finds none."""

TIMES: Final = struct.Struct("=44xI4xI")
"""Of `struct tcp_info`: milliseconds since data was sent last, and since it was received last."""
COUNTS: Final = struct.Struct("=120xQQ")
"""Of `struct tcp_info` since Linux 4.1: bytes that the peer acknowledged, bytes received."""

MAPPED: Final = bytes(10) + b"\xff\xff"
"""The 12 bytes before an IPv4 address that an IPv6 socket talks to (RFC 4291, 2.5.5.2)."""

MOST_NUMBERS: Final = 1 << 20
"""Descriptors looked at if they can't be listed."""

GOAWAY: Final = struct.pack("!3B2BIII", 0, 0, 8, 7, 0, 0, 0x7FFFFFFF, 0)
"""RFC 9113, 6.8: 8 bytes, type 7, no flags, stream 0; last stream 2^31-1, NO_ERROR."""


@dataclass(frozen=True, slots=True)
class TcpInfo:
    """What the kernel knows of a connection. Pings of HTTP/2 and their answers count here too."""

    received_ago_s: float
    """Since data came in; since the connection began if none did. Steps of 4 ms."""
    sent_ago_s: float
    """Since data went out; since the connection began if none did."""
    bytes_in: int | None
    bytes_out: int | None
    """As far as the peer acknowledged them. Both None before Linux 4.1."""


class OpenSocket:
    """One TCP connection; of use only while it is the current item of `open_sockets`."""

    __slots__ = ("_scope", "_socket", "inode", "local", "peer")

    def __init__(
        self, duplicate: socket.SocketType, peer: Address, scope: int, local: Address, inode: int
    ) -> None:
        self._socket = duplicate
        self._scope = scope  # of a link-local address: the number of the interface
        self.peer = peer
        self.local = local
        """This process's end: the server's if it is a server's connection."""
        self.inode = inode
        """Which connection it is: another one between the same two addresses has another."""

    def __repr__(self) -> str:
        return f"<OpenSocket {self.text} at port {self.local[1]}>"

    @property
    def text(self) -> str:
        """The peer as `context.peer()` has it, "ipv4:127.0.0.1:50296" for one."""
        ip, port = self.peer
        if ":" not in ip:
            return f"ipv4:{ip}:{port}"
        scope = f"%25{self._scope}" if self._scope else ""
        return f"ipv6:%5B{ip}{scope}%5D:{port}"

    def info(self) -> TcpInfo | None:
        """Ask the kernel; None if it does not say."""
        try:
            got = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:
            return None
        if len(got) < TIMES.size:
            return None
        sent_ms, received_ms = TIMES.unpack_from(got)
        bytes_out, bytes_in = COUNTS.unpack_from(got) if len(got) >= COUNTS.size else (None, None)
        return TcpInfo(received_ms / 1000, sent_ms / 1000, bytes_in, bytes_out)

    def unread(self) -> int:
        """Bytes that have come and that gRPC has not read yet."""
        return self._ask(termios.FIONREAD)

    def unsent(self) -> int:
        """Bytes that gRPC has written and that the peer has not acknowledged yet."""
        return self._ask(termios.TIOCOUTQ)  # SIOCOUTQ is the same number

    def _ask(self, question: int) -> int:
        try:
            answer = fcntl.ioctl(self._socket, question, bytes(4))
        except OSError:  # no longer connected
            return 0
        return int.from_bytes(answer, sys.byteorder)

    def shutdown(self) -> None:
        """End it both ways. gRPC sees that at once, closes its descriptor and ends the calls on it.

        The peer sees the end of the connection, and connects again when it next wants something.
        One that is gone already is as good.
        """
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def goaway(self) -> bool:
        """Ask the peer to make no more calls here, as gRPC would by HTTP/2; False if not possible.

        A client of gRPC then ends its calls, closes the connection and makes another one for the
        next. For plaintext only: under TLS this is no frame, and the peer gives the connection up.
        Only if no call is open: gRPC could be in the midst of a frame of its own.
        """
        if self.unsent():
            return False
        try:
            return self._socket.send(GOAWAY, socket.MSG_DONTWAIT) == len(GOAWAY)
        except OSError:
            return False


def parse_peer(peer: str) -> Address | None:
    """The address in what grpc's `context.peer()` gives; None if it is no TCP address.

    Of unix sockets it is "unix:" for all, so that none can be told from another.
    """
    family, _, rest = unquote(peer).partition(":")
    ip, _, port = rest.rpartition(":")
    if family not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    try:
        return canonical(ip.removeprefix("[").removesuffix("]")), int(port)
    except OSError:
        return None


class Slot:
    """Two descriptors that are held: the place of the duplicate, and what is there in between.

    For one scan at a time. Closed with the object, at the latest; never during a scan.
    """

    __slots__ = ("__weakref__", "_close", "_hand", "_rest")

    def __init__(self) -> None:
        """Take them.

        Raises:
            OSError: The process has none left.
        """
        self._rest = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._hand = os.dup(self._rest)
        except OSError:
            os.close(self._rest)
            raise
        self._close = weakref.finalize(self, _close_all, self._rest, self._hand)

    def take(self, descriptor: int) -> socket.SocketType | None:
        """A socket object with a duplicate; None if there is no socket (any more)."""
        try:
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                return None
            os.dup2(descriptor, self._hand, inheritable=False)
        except OSError:
            return None
        try:
            # The flag keeps Python from changing the socket, which after `socket.setdefaulttimeout`
            # it would: blocking or not is a matter of the connection, not of the descriptor.
            kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK
            # The bare class of C: half the time of `socket.socket`, and there may be thousands.
            return socket.SocketType(-1, kind, 0, fileno=self._hand)
        except OSError:
            self.clear()
            return None

    def clear(self) -> None:
        """Close the duplicate, and keep its place; nothing once both are given up."""
        if self._close.alive:
            os.dup2(self._rest, self._hand, inheritable=False)

    def close(self) -> None:
        """Give both up. Idempotent."""
        self._close()


def _close_all(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def open_sockets(
    wanted: Callable[[Address, int], bool],
    *,
    slot: Slot | None = None,
    listening: set[Address] | None = None,
    between: Callable[[], object] = lambda: None,
) -> Generator[OpenSocket, None, None]:
    """Look through the descriptors of this process once.

    Args:
        wanted: `wanted(peer, local_port)` says whether a connection is to be given. It is asked for
            every TCP connection of the process, the outgoing ones too.
        slot: Where to hold what is looked at; None: one of its own, for which there must be room.
        listening: Gets the addresses at which this process listens.
        between: Called before each descriptor is looked at, while none is held; it may wait.

    Yields:
        Each connection, of use until the next is asked for or the iterator is closed. In no order.

    Raises:
        OSError: No descriptor is left for a slot.
    """
    if not SUPPORTED:
        return
    held = Slot() if slot is None else slot
    try:
        for number in _numbers():
            between()
            duplicate = held.take(number)
            if duplicate is None:
                continue
            try:
                found = _look(duplicate, listening)
                if found is not None and wanted(found.peer, found.local[1]):
                    yield found
            finally:
                duplicate.detach()
                held.clear()
    finally:
        if slot is None:
            held.close()


def _numbers() -> Iterable[int]:
    """Those of the descriptors; where none is left to list them with, all that there can be."""
    try:
        return map(int, os.listdir(DESCRIPTORS))  # noqa: PTH208 - there may be thousands
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return range(MOST_NUMBERS if most == resource.RLIM_INFINITY else min(most, MOST_NUMBERS))


def _look(duplicate: socket.SocketType, listening: set[Address] | None) -> OpenSocket | None:
    if duplicate.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        if duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) != socket.SOCK_STREAM:
            return None
        ip, port, *_ = duplicate.getsockname()
        local = canonical(ip), port
        if duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            if listening is not None:
                listening.add(local)
            return None
        ip, port, *more = duplicate.getpeername()
        inode = os.fstat(duplicate.fileno()).st_ino
    except OSError:  # it is no longer connected
        return None
    return OpenSocket(duplicate, (canonical(ip), port), more[1] if more else 0, local, inode)


def canonical(ip: str) -> str:
    """One text for each address, without scope, and IPv4's own for those mapped into IPv6.

    Raises:
        OSError: It is none.
    """
    if ":" not in ip:
        return socket.inet_ntop(socket.AF_INET, socket.inet_pton(socket.AF_INET, ip))
    packed = socket.inet_pton(socket.AF_INET6, ip.partition("%")[0])
    if packed.startswith(MAPPED):
        return socket.inet_ntop(socket.AF_INET, packed[len(MAPPED) :])
    return socket.inet_ntop(socket.AF_INET6, packed)
