"""What listens at an address: HTTP/2 or something else, with TLS or without, and how quickly.

Each function opens connections of its own and closes them. What is found is told as notes; nothing
is printed here.
"""

from __future__ import annotations

import ssl
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from rpcwheel.options.names import STRIKES

from . import tls
from .diagnosis import Level, Note, Trouble, spread
from .http2 import Closed, Connection, GoneAway, OtherProtocol, protocol_of
from .target import connect
from .tls import TlsSettings

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from .target import Address

__all__ = ["KEEPALIVE_PINGS", "Way", "opened", "pings_permitted", "protocol", "round_trips"]

KEEPALIVE_PINGS: Final = STRIKES + 2
"""The first is free, `STRIKES` are forgiven, and one more is too many."""

OFTEN_S: Final = 1.0
"""gRPC pings no more often."""

SOON_DAYS: Final = 14

ENDED: Final = (Closed, ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)

WANTS_TLS: Final = Trouble(
    "the server wants TLS",
    "pass --tls (clients: grpc.secure_channel instead of insecure_channel)",
    "tls",
)


@dataclass(frozen=True, slots=True)
class Way:
    """How to get there; `name` is whom the certificate has to be for."""

    address: Address
    timeout: float
    tls: TlsSettings = field(default_factory=TlsSettings)
    name: str = ""

    def connect(self) -> tuple[socket.socket, float]:
        """TCP only; see `target.connect`."""
        return connect(self.address, self.timeout)

    @property
    def until(self) -> float:
        """When a step that begins now has taken too long."""
        return time.monotonic() + self.timeout


def opened(way: Way) -> tuple[Connection, float]:
    """Connect and greet; gives the connection, and the seconds that TCP took.

    Raises:
        Trouble: TCP failed, or the server offers no HTTP/2 in TLS, or takes no such client.
        OtherProtocol, Closed, TimeoutError, ssl.SSLError, OSError: As `Connection.greet`.
    """
    sock, took = way.connect()
    until = way.until
    if way.tls.wanted:
        secure = tls.handshake(sock, way.tls.context(), way.name, until)
        sock = secure
        if secure.selected_alpn_protocol() != "h2":
            secure.close()
            raise Trouble(
                "TLS works, but the server does not offer HTTP/2 (ALPN h2), and gRPC insists on it",
                "have the server, or the proxy that ends TLS, offer h2",
                "tls",
            )
    connection = Connection(sock)
    try:
        connection.greet(until)
    except BaseException as error:
        sock.close()
        if way.tls.wanted and isinstance(error, ENDED):
            raise _no_client_of_mine(way) from None
        raise
    return connection, took


def protocol(way: Way) -> Iterator[Note]:
    """Say what speaks there; the last note is about "http2" and OK if and only if gRPC may work."""
    try:
        connection, _ = opened(way)
    except Trouble as trouble:
        yield Note.failed("tcp", trouble)
    except OtherProtocol as other:
        yield Note.failed("http2", _other(other.first))
    except GoneAway as gone:
        yield Note.failed("http2", _unwelcome(gone))
    except ssl.SSLError as error:
        yield Note.failed("tls", _tls_failed(error, way))
    except OSError as error:
        yield Note.failed("http2", _without_a_word(error, way))
    else:
        with connection.sock as sock:
            if isinstance(sock, ssl.SSLSocket):
                yield _certificate(sock)
            streams = connection.settings.get("max_concurrent_streams")
            limit = "no limit of" if streams is None else f"at most {streams}"
            yield Note(
                "http2",
                Level.OK,
                f"{way.address}: HTTP/2, {limit} concurrent calls per connection",
                facts={"address": str(way.address), "settings": dict(connection.settings)},
            )


def round_trips(way: Way, samples: int) -> Iterator[Note]:
    """How long TCP takes to connect, and a PING: each over a connection of its own.

    So that not even a server that permits no pings sees too many.
    """
    connects, pings = [], []
    try:
        for _ in range(samples):
            connection, took = opened(way)
            with connection.sock:
                connects.append(took)
                pings.append(connection.ping(way.until))
    except (Trouble, OtherProtocol, OSError) as error:
        yield Note(
            "rtt",
            Level.WARN,
            f"{way.address}: after {len(pings)} of {samples} connections: {_words(error)}",
            "look again; a limit of connections, or a server that comes and goes",
        )
    for step, times in (("connect", connects), ("ping", pings)):
        if times:
            said, facts = spread(times)
            yield Note(step, Level.OK, f"{way.address}: {said}", facts=facts)


def pings_permitted(way: Way, every: float) -> Iterator[Note]:
    """Ping at that interval, without calls, once more than servers usually forgive."""
    needs = (KEEPALIVE_PINGS - 1) * every
    yield Note(
        "keepalive",
        Level.NOTE,
        f"{KEEPALIVE_PINGS} pings without calls, one each {every:g} s: takes {needs:g} s",
    )
    began, sent = time.monotonic(), 0
    try:
        connection, _ = opened(way)
        with connection.sock:
            for sent in range(1, KEEPALIVE_PINGS + 1):
                connection.ping(way.until)
                last = sent == KEEPALIVE_PINGS
                connection.listen(time.monotonic() + (min(every, 1.0) if last else every))
    except GoneAway as gone:
        yield _gone(gone, sent, every)
    except (Trouble, OtherProtocol, OSError) as error:
        yield Note(
            "keepalive",
            Level.FAIL,
            f"the connection ended after {time.monotonic() - began:.1f} s and {sent} pings: "
            f"{_words(error)}",
            "something closes connections without calls, a load balancer for one: "
            "ping more often, or let it wait longer",
        )
    else:
        yield Note(
            "keepalive",
            Level.OK,
            f"a ping each {every:g} s is permitted, also without calls",
            facts={"every": every, "pings": sent},
        )


def _gone(gone: GoneAway, sent: int, every: float) -> Note:
    if not gone.too_many_pings:
        return Note(
            "keepalive",
            Level.WARN,
            f"the server ended the connection gracefully at ping {sent}: {gone}",
            "it limits how long connections are idle or old; clients connect again by themselves",
        )
    permit = max(every, OFTEN_S) * 0.9
    return Note(
        "keepalive",
        Level.FAIL,
        f"the server refuses a ping each {every:g} s without calls: {gone} at ping {sent}",
        f"server: rpcwheel.options.server_options(permit_every={permit:g}) "
        "(Go: EnforcementPolicy, Java: permitKeepAliveTime); or clients: "
        "rpcwheel.options.channel_options(), which pings each 330 s and only during calls",
        {"every": every, "pings": sent},
    )


def _unwelcome(gone: GoneAway) -> Trouble:
    return Trouble(
        f"it speaks HTTP/2, and ends the connection as it begins: {gone}",
        "it is shutting down, or takes no more connections: look into its log",
    )


def _no_client_of_mine(way: Way) -> Trouble:
    """After TLS 1.3 the client has done its part first; gRPC's servers say no by closing."""
    if way.tls.cert is None:
        return Trouble(
            "TLS works, then the server closes at once: most likely it wants a certificate of the "
            "client (mTLS)",
            "pass --cert FILE --key FILE",
            "tls",
        )
    return Trouble(
        "TLS works, then the server closes at once: most likely it does not take our certificate",
        "pass a --cert signed by the CA that the server was given, and check its dates",
        "tls",
    )


def _certificate(sock: ssl.SSLSocket) -> Note:
    left = tls.days_left(sock)
    said = f"{sock.version()}, ALPN h2"
    if left is None:
        return Note("tls", Level.OK, said)
    facts: dict[str, object] = {"version": sock.version(), "days_left": round(left, 1)}
    said += f", the certificate holds for {left:.0f} days"
    if left < SOON_DAYS:
        return Note("tls", Level.WARN, said, "renew it", facts)
    return Note("tls", Level.OK, said, facts=facts)


def _other(first: bytes) -> Trouble:
    name, said = protocol_of(first)
    match name:
        case "TLS":
            return WANTS_TLS
        case "HTTP/1.1":
            return Trouble(
                f"an HTTP/1.1 server answers ({said!r}), which is no gRPC",
                "check the port; a proxy before a gRPC server has to speak HTTP/2 on this side too",
            )
        case "":
            return Trouble(f"something else than HTTP/2 answers: {said}", "check the port")
        case _:
            shown = f" ({said!r})" if said else ""
            return Trouble(f"this is {name}{shown}, no gRPC server", "check host and port")


def _tls_failed(error: ssl.SSLError, way: Way) -> Trouble:
    names: list[str] = []
    if isinstance(error, ssl.SSLCertVerificationError) and error.verify_code in tls.WRONG_NAME:
        names = _names(way)
    return tls.explained(error, way.name, names) or _in_plaintext(error, way)


def _names(way: Way) -> list[str]:
    """Whom the certificate is for: a second handshake, which asks for no name."""
    try:
        sock, _ = way.connect()
        context = way.tls.context(check_name=False)
        with tls.handshake(sock, context, way.name, way.until) as secure:
            return tls.names_of(secure)
    except (Trouble, OSError):
        return []


def _without_a_word(error: OSError, way: Way) -> Trouble:
    """It closed, or said nothing: perhaps it waits for TLS, or for plaintext."""
    if way.tls.wanted:
        return _in_plaintext(error, way)
    try:
        sock, _ = way.connect()
        context = way.tls.context(verify=False)
        tls.handshake(sock, context, "", way.until).close()
    except ssl.SSLError as refused:
        if tls.explained(refused, "", []) is not None:  # an alert is TLS too
            return WANTS_TLS
    except (Trouble, OSError):
        pass
    else:
        return WANTS_TLS
    return _silent(error, way.timeout)


def _in_plaintext(error: OSError, way: Way) -> Trouble:
    """What answers without TLS, where TLS failed."""
    try:
        connection, _ = opened(Way(way.address, way.timeout))
    except OtherProtocol as other:
        return (
            _silent(error, way.timeout)
            if protocol_of(other.first)[0] == "TLS"
            else _other(other.first)
        )
    except GoneAway:
        pass
    except (Trouble, OSError):
        return _silent(error, way.timeout)
    else:
        connection.sock.close()
    return Trouble(
        "the server speaks HTTP/2 without TLS",
        "leave out --tls (clients: grpc.insecure_channel instead of secure_channel)",
        "tls",
    )


def _words(error: Exception) -> str:
    return error.said if isinstance(error, Trouble) else str(error) or type(error).__name__


def _silent(error: OSError, timeout: float) -> Trouble:
    if isinstance(error, TimeoutError):
        return Trouble(
            f"it takes the connection, and says nothing for {timeout:g} s",
            "the server is frozen or overloaded, or no gRPC server; check its process and the port",
        )
    if isinstance(error, ENDED):
        return Trouble(
            "it takes the connection, and closes it at once",
            "no gRPC server, a proxy without a backend, or a limit of connections: look into the "
            "log of what listens there",
        )
    return Trouble(f"the connection failed: {error}", "look into the server's log")
