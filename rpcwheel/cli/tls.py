"""TLS as gRPC does it, with words for what can go wrong: whom it trusts, and what ALPN says."""

from __future__ import annotations

import os
import ssl
import time
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Final

from .diagnosis import Trouble

if TYPE_CHECKING:
    import socket

__all__ = ["TlsSettings", "days_left", "explained", "handshake", "roots"]

WRONG_NAME: Final = {62, 64}  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
EXPIRED, NOT_YET = 10, 9
SELF_SIGNED: Final = {18, 19}
UNKNOWN_CA: Final = {2, 20, 21}

_ALERTS: Final = {
    "CERTIFICATE_REQUIRED": (
        "the server wants a certificate of the client (mTLS)",
        "pass --cert FILE --key FILE",
    ),
    "BAD_CERTIFICATE": ("the server does not take our certificate", "check --cert"),
    "UNKNOWN_CA": (
        "the server does not trust whoever signed our certificate",
        "pass a --cert signed by the CA that the server was given",
    ),
    "HANDSHAKE_FAILURE": (
        "the server refused the handshake; it may want a certificate of the client",
        "pass --cert FILE --key FILE; or the two have no cipher in common",
    ),
    "NO_APPLICATION_PROTOCOL": (
        "the server knows no HTTP/2 (ALPN h2)",
        "have the server, or the proxy before it, offer h2",
    ),
    "PROTOCOL_VERSION": ("the two have no version of TLS in common", "let the server do TLS 1.2"),
    "UNRECOGNIZED_NAME": (
        "the server has no certificate for this name",
        "pass --servername NAME",
    ),
}


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """What the command line said; without `wanted`, plaintext."""

    wanted: bool = False
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    servername: str = ""

    def pem(self) -> tuple[bytes, bytes | None, bytes | None]:
        """Roots, private key and certificate, as `grpc.ssl_channel_credentials` takes them."""
        key = None if self.key is None else self.key.read_bytes()
        cert = None if self.cert is None else self.cert.read_bytes()
        return roots(self.ca), key, cert

    def context(self, *, verify: bool = True, check_name: bool = True) -> ssl.SSLContext:
        """As Python wants it.

        Raises:
            OSError, ssl.SSLError: A file is missing or no PEM.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = verify and check_name
        context.verify_mode = ssl.CERT_REQUIRED if verify else ssl.CERT_NONE
        context.load_verify_locations(cadata=roots(self.ca).decode())
        if self.cert is not None:
            context.load_cert_chain(self.cert, self.key)
        context.set_alpn_protocols(["h2"])
        return context


def roots(ca: Path | None) -> bytes:
    """Whom to trust: the file given, or what gRPC trusts: the roots it brings, not the system's."""
    if ca is None and (given := os.environ.get("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH")):
        ca = Path(given)
    if ca is not None:
        return ca.read_bytes()
    return (resources.files("grpc") / "_cython" / "_credentials" / "roots.pem").read_bytes()


def handshake(
    sock: socket.socket, context: ssl.SSLContext, name: str, until: float
) -> ssl.SSLSocket:
    """Shake hands; the socket is closed if that fails.

    Raises:
        ssl.SSLError, OSError: As Python's.
    """
    try:
        sock.settimeout(max(0.001, until - time.monotonic()))
        return context.wrap_socket(sock, server_hostname=name or None)
    except BaseException:
        sock.close()
        raise


def days_left(peer: ssl.SSLSocket) -> float | None:
    """How long the certificate will hold; None where it was not checked."""
    certificate = peer.getpeercert() or {}
    end = certificate.get("notAfter")
    return None if end is None else (ssl.cert_time_to_seconds(str(end)) - time.time()) / 86400


def names_of(peer: ssl.SSLSocket) -> list[str]:
    """Whom the certificate is for."""
    names = (peer.getpeercert() or {}).get("subjectAltName", ())
    return [str(pair[1]) for pair in names]


def explained(error: ssl.SSLError, name: str, names: list[str]) -> Trouble | None:
    """What it means, where it is the certificate or an alert; None for what is no TLS."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _certificate(error.verify_code, error.verify_message, name, names)
    reason = (error.reason or "").upper()
    for alert, (said, do) in _ALERTS.items():
        if reason.endswith(alert):
            return Trouble(said, do)
    if "ALERT" in reason:
        return Trouble(f"the server refused the handshake ({reason})", "look into its log")
    return None


def _certificate(code: int, message: str, name: str, names: list[str]) -> Trouble:
    if code in WRONG_NAME:
        holders = f", but for {', '.join(names)}" if names else ""
        return Trouble(
            f"the certificate is not for {name!r}{holders}",
            "connect by one of its names, or pass --servername NAME "
            '(clients: the option ("grpc.ssl_target_name_override", NAME))',
        )
    if code == EXPIRED:
        return Trouble("the certificate has expired", "renew it, and restart the server with it")
    if code == NOT_YET:
        return Trouble("the certificate is not valid yet", "check the clocks of both machines")
    if code in SELF_SIGNED | UNKNOWN_CA:
        kind = "is self-signed" if code in SELF_SIGNED else "is signed by an unknown CA"
        return Trouble(
            f"the certificate {kind} ({message}); gRPC trusts the public CAs that it brings, "
            "not the system's",
            "pass --ca FILE with the CA's certificate "
            "(clients: grpc.ssl_channel_credentials(root_certificates=...))",
        )
    return Trouble(f"the certificate is not valid: {message}", "renew it")
