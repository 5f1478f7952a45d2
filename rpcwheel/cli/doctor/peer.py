"""What listens at an address: HTTP/2 or another protocol, with or without TLS, and how fast it is.

Each function opens its own connections, closes them, and returns findings. Nothing is printed here.
"""

from __future__ import annotations

import ssl
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from rpcwheel.cli.findings import DoctorFinding, Level, Problem, distribution
from rpcwheel.cli.target import connect
from rpcwheel.options.names import STRIKES

from . import tls
from .http2 import Closed, GoneAway, Http2Connection, OtherProtocol, protocol_of
from .tls import TlsSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rpcwheel.cli.target import Address

DUBBO_S: Final = 60.0
"""How often a consumer of Dubbo pings (its `heartbeat`), also without calls."""

KEEPALIVE_PINGS: Final = STRIKES + 2
"""A server accepts the first ping, tolerates `STRIKES` early ones, and refuses the next."""

MIN_KEEPALIVE_S: Final = 1.0
"""gRPC does not ping more often."""

EXPIRES_SOON_DAYS: Final = 14

CLOSED_BY_PEER: Final = (Closed, ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)

REQUIRES_TLS: Final = Problem(
    "the server requires TLS",
    "pass --tls (clients: grpc.secure_channel instead of insecure_channel)",
    "tls",
)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address, and how to connect to it. The certificate must be valid for `name`."""

    address: Address
    timeout: float
    tls: TlsSettings = field(default_factory=TlsSettings)
    name: str = ""

    @property
    def until(self) -> float:
        """When a step that begins now times out."""
        return time.monotonic() + self.timeout


def open_connection(endpoint: Endpoint) -> tuple[Http2Connection, float]:
    """Connect, do the handshakes, and return the connection and the seconds that TCP took.

    Raises:
        Problem: TCP failed, the server does not offer HTTP/2 in TLS, or rejects the client.
        OtherProtocol, Closed, TimeoutError, ssl.SSLError, OSError: See `Http2Connection.handshake`.
    """
    sock, took = connect(endpoint.address, endpoint.timeout)
    until = endpoint.until
    if endpoint.tls.enabled:
        secure = tls.start_tls(sock, endpoint.tls.context(), endpoint.name, until)
        sock = secure
        if secure.selected_alpn_protocol() != "h2":
            secure.close()
            raise Problem(
                "TLS works, but the server does not offer HTTP/2 (ALPN h2), which gRPC requires",
                "configure the server, or the proxy that terminates TLS, to offer h2",
                "tls",
            )
    connection = Http2Connection(sock)
    try:
        connection.handshake(until)
    except BaseException as error:
        sock.close()
        if endpoint.tls.enabled and isinstance(error, CLOSED_BY_PEER):
            raise _closed_after_tls(endpoint) from None
        raise
    return connection, took


def protocol(endpoint: Endpoint) -> Iterator[DoctorFinding]:
    """Find out the protocol. The last finding is "http2" with OK if and only if gRPC may work."""
    try:
        connection, _ = open_connection(endpoint)
    except Problem as problem:
        yield DoctorFinding.failed("tcp", problem)
    except OtherProtocol as other:
        yield DoctorFinding.failed("http2", _other_protocol(other.received))
    except GoneAway as gone:
        yield DoctorFinding.failed("http2", _refused(gone))
    except ssl.SSLError as error:
        yield DoctorFinding.failed("tls", _tls_failed(error, endpoint))
    except OSError as error:
        yield DoctorFinding.failed("http2", _sent_nothing(error, endpoint))
    else:
        with connection.sock as sock:
            if isinstance(sock, ssl.SSLSocket):
                yield _certificate(sock)
            streams = connection.settings.get("max_concurrent_streams")
            limit = "no limit of" if streams is None else f"at most {streams}"
            yield DoctorFinding(
                "http2",
                Level.OK,
                f"{endpoint.address}: HTTP/2, {limit} concurrent calls per connection",
                facts={"address": str(endpoint.address), "settings": dict(connection.settings)},
            )


def round_trips(endpoint: Endpoint, samples: int) -> Iterator[DoctorFinding]:
    """Measure how long TCP takes to connect, and a PING, each time on a new connection.

    So even a server that permits no pings without calls does not refuse them.
    """
    connects, pings = [], []
    try:
        for _ in range(samples):
            connection, took = open_connection(endpoint)
            with connection.sock:
                connects.append(took)
                pings.append(connection.ping(endpoint.until))
    except (Problem, OtherProtocol, OSError) as error:
        yield DoctorFinding(
            "rtt",
            Level.WARN,
            f"{endpoint.address}: failed after {len(pings)} of {samples} connections: "
            f"{_text(error)}",
            "try again; there may be a connection limit, or the server restarts",
        )
    for step, times in (("connect", connects), ("ping", pings)):
        if times:
            text, facts = distribution(times)
            yield DoctorFinding(step, Level.OK, f"{endpoint.address}: {text}", facts=facts)


def check_keepalive(endpoint: Endpoint, every: float) -> Iterator[DoctorFinding]:
    """Ping at this interval without calls, once more than servers tolerate by default."""
    takes = (KEEPALIVE_PINGS - 1) * every
    yield DoctorFinding(
        "keepalive",
        Level.NOTE,
        f"{KEEPALIVE_PINGS} pings without calls, one every {every:g} s; takes {takes:g} s",
    )
    began, sent = time.monotonic(), 0
    try:
        connection, _ = open_connection(endpoint)
        with connection.sock:
            for sent in range(1, KEEPALIVE_PINGS + 1):
                connection.ping(endpoint.until)
                last = sent == KEEPALIVE_PINGS
                connection.listen(time.monotonic() + (min(every, 1.0) if last else every))
    except GoneAway as gone:
        yield _went_away(gone, sent, every)
    except (Problem, OtherProtocol, OSError) as error:
        yield DoctorFinding(
            "keepalive",
            Level.FAIL,
            f"the connection ended after {time.monotonic() - began:.1f} s and {sent} pings: "
            f"{_text(error)}",
            "something closes connections without calls, such as a load balancer: ping more "
            "often, or raise its idle timeout",
        )
    else:
        yield DoctorFinding(
            "keepalive",
            Level.OK,
            f"the server permits a ping every {every:g} s without calls{_like_dubbo(every)}",
            facts={"every": every, "pings": sent},
        )


def _like_dubbo(every: float) -> str:
    """Return that the pings of Dubbo's consumers are permitted, if they follow from this."""
    return f", and those of Dubbo's consumers, every {DUBBO_S:g} s" if every <= DUBBO_S else ""


def _went_away(gone: GoneAway, sent: int, every: float) -> DoctorFinding:
    if not gone.too_many_pings:
        return DoctorFinding(
            "keepalive",
            Level.WARN,
            f"the server closed the connection gracefully at ping {sent}: {gone}",
            "it limits the age or the idle time of connections; clients reconnect by themselves",
        )
    permit = max(every, MIN_KEEPALIVE_S) * 0.9
    return DoctorFinding(
        "keepalive",
        Level.FAIL,
        f"the server refuses a ping every {every:g} s without calls: {gone} at ping {sent}",
        f"server: rpcwheel.options.server_options(permit_every={permit:g}) "
        "(Go: EnforcementPolicy, Java: permitKeepAliveTime); or clients: "
        "rpcwheel.options.channel_options(), which pings every 330 s and only during calls",
        {"every": every, "pings": sent},
    )


def _refused(gone: GoneAway) -> Problem:
    return Problem(
        f"the server speaks HTTP/2, but refuses the connection: {gone}",
        "it shuts down, or accepts no more connections: look into its log",
    )


def _closed_after_tls(endpoint: Endpoint) -> Problem:
    """Explain a connection that is closed after TLS; a server rejects a certificate like this."""
    if endpoint.tls.cert is None:
        return Problem(
            "TLS works, but the server closes the connection at once: it probably requires a "
            "client certificate (mTLS)",
            "pass --cert FILE --key FILE",
            "tls",
        )
    return Problem(
        "TLS works, but the server closes the connection at once: it probably rejects the client "
        "certificate",
        "pass a --cert that is signed by the CA that the server was given, and check its dates",
        "tls",
    )


def _certificate(sock: ssl.SSLSocket) -> DoctorFinding:
    left = tls.days_left(sock)
    message = f"{sock.version()}, ALPN h2"
    if left is None:
        return DoctorFinding("tls", Level.OK, message)
    facts: dict[str, object] = {"version": sock.version(), "days_left": round(left, 1)}
    message += f", the certificate expires in {left:.0f} days"
    if left < EXPIRES_SOON_DAYS:
        return DoctorFinding("tls", Level.WARN, message, "renew it", facts)
    return DoctorFinding("tls", Level.OK, message, facts=facts)


def _other_protocol(received: bytes) -> Problem:
    name, text = protocol_of(received)
    match name:
        case "TLS":
            return REQUIRES_TLS
        case "HTTP/1.1":
            return Problem(
                f"an HTTP/1.1 server answers ({text!r}), not a gRPC server",
                "check the port; a proxy in front of a gRPC server must accept HTTP/2",
            )
        case "":
            return Problem(f"the server does not speak HTTP/2, it sends {text}", "check the port")
        case _:
            shown = f" ({text!r})" if text else ""
            return Problem(f"this is {name}{shown}, not a gRPC server", "check host and port")


def _tls_failed(error: ssl.SSLError, endpoint: Endpoint) -> Problem:
    names: list[str] = []
    if isinstance(error, ssl.SSLCertVerificationError) and error.verify_code in tls.WRONG_NAME:
        names = _names(endpoint)
    return tls.explained(error, endpoint.name, names) or _try_plaintext(error, endpoint)


def _names(endpoint: Endpoint) -> list[str]:
    """Return the names in the certificate, by a second handshake that does not check the name."""
    try:
        sock, _ = connect(endpoint.address, endpoint.timeout)
        context = endpoint.tls.context(check_name=False)
        with tls.start_tls(sock, context, endpoint.name, endpoint.until) as secure:
            return tls.names_of(secure)
    except (Problem, OSError):
        return []


def _sent_nothing(error: OSError, endpoint: Endpoint) -> Problem:
    """Find out why a server closes or is silent: it may expect TLS, or plaintext."""
    if endpoint.tls.enabled:
        return _try_plaintext(error, endpoint)
    try:
        sock, _ = connect(endpoint.address, endpoint.timeout)
        context = endpoint.tls.context(verify=False)
        tls.start_tls(sock, context, "", endpoint.until).close()
    except ssl.SSLError as refused:
        if tls.explained(refused, "", []) is not None:  # only a TLS server sends an alert
            return REQUIRES_TLS
    except (Problem, OSError):
        pass
    else:
        return REQUIRES_TLS
    return _silent(error, endpoint.timeout)


def _try_plaintext(error: OSError, endpoint: Endpoint) -> Problem:
    """Find out what answers without TLS, after TLS has failed."""
    try:
        connection, _ = open_connection(Endpoint(endpoint.address, endpoint.timeout))
        connection.sock.close()
    except OtherProtocol as other:
        if protocol_of(other.received)[0] == "TLS":
            return _silent(error, endpoint.timeout)
        return _other_protocol(other.received)
    except GoneAway:
        pass
    except (Problem, OSError):
        return _silent(error, endpoint.timeout)
    return Problem(
        "the server speaks HTTP/2 without TLS",
        "leave out --tls (clients: grpc.insecure_channel instead of secure_channel)",
        "tls",
    )


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__


def _silent(error: OSError, timeout: float) -> Problem:
    if isinstance(error, TimeoutError):
        return Problem(
            f"the server accepts the connection, but sends nothing for {timeout:g} s",
            "it is frozen, overloaded, or not a gRPC server; check its process and the port",
        )
    if isinstance(error, CLOSED_BY_PEER):
        return Problem(
            "the server accepts the connection, and closes it at once",
            "it is not a gRPC server, a proxy without a backend, or limits its connections: look "
            "into its log",
        )
    return Problem(f"the connection failed: {error}", "look into the server's log")
