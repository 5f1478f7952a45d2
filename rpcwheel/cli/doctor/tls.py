"""TLS with the root certificates that gRPC trusts, and the meaning of its errors."""

from __future__ import annotations

import os
import ssl
import time
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rpcwheel._engines.tls import load_certificate
from rpcwheel.cli.findings import Problem

if TYPE_CHECKING:
    import socket

# Verification errors of OpenSSL (x509_vfy.h)
WRONG_NAME: Final = {62, 64}  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
EXPIRED, NOT_YET_VALID = 10, 9
SELF_SIGNED: Final = {18, 19}
UNKNOWN_CA: Final = {2, 20, 21}

ALERTS: Final = {
    "CERTIFICATE_REQUIRED": (
        "the server requires a client certificate (mTLS)",
        "pass --cert FILE --key FILE",
    ),
    "BAD_CERTIFICATE": ("the server rejects the client certificate", "check --cert"),
    "UNKNOWN_CA": (
        "the server does not trust the CA of the client certificate",
        "pass a --cert that is signed by the CA that the server was given",
    ),
    "HANDSHAKE_FAILURE": (
        "the server refused the handshake; it may require a client certificate",
        "pass --cert FILE --key FILE; or client and server have no cipher in common",
    ),
    "NO_APPLICATION_PROTOCOL": (
        "the server does not offer HTTP/2 (ALPN h2)",
        "configure the server, or the proxy in front of it, to offer h2",
    ),
    "PROTOCOL_VERSION": (
        "client and server have no TLS version in common",
        "enable TLS 1.2 or 1.3 on the server",
    ),
    "UNRECOGNIZED_NAME": (
        "the server has no certificate for this name",
        "pass --servername NAME",
    ),
}


ROOTS_VARIABLE: Final = "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"
"""A variable of gRPC with the path of the root certificates."""


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """The options for TLS."""

    enabled: bool = False
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    servername: str = ""

    def pem(self) -> tuple[bytes, bytes | None, bytes | None]:
        """Return roots, private key and certificate for `grpc.ssl_channel_credentials`."""
        key = None if self.key is None else self.key.read_bytes()
        cert = None if self.cert is None else self.cert.read_bytes()
        return roots(self.ca), key, cert

    def context(self, *, verify: bool = True, check_name: bool = True) -> ssl.SSLContext:
        """Return the same settings for Python's `ssl`.

        Raises:
            OSError, ssl.SSLError: A file does not exist or is not PEM, or the key is encrypted.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = verify and check_name
        context.verify_mode = ssl.CERT_REQUIRED if verify else ssl.CERT_NONE
        if verify:
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as gRPC
            # `ssl` refuses characters that are not ASCII, also in comments, which gRPC ignores.
            ascii_only = roots(self.ca).decode("latin-1").encode("ascii", "replace")
            context.load_verify_locations(cadata=ascii_only.decode())
        if self.cert is not None:
            load_certificate(context, self.cert, self.key)
        context.set_alpn_protocols(["h2"])
        return context


def roots(ca: Path | None) -> bytes:
    """Return the given file, or gRPC's own root certificates; gRPC ignores those of the system."""
    if ca is None and (variable := os.environ.get(ROOTS_VARIABLE)):
        ca = Path(variable)
    if ca is not None:
        return ca.read_bytes()
    return (resources.files("grpc") / "_cython" / "_credentials" / "roots.pem").read_bytes()


def start_tls(
    sock: socket.socket, context: ssl.SSLContext, name: str, until: float
) -> ssl.SSLSocket:
    """Do the TLS handshake. If it fails, the socket is closed.

    Raises:
        ssl.SSLError, OSError: The handshake failed.
    """
    try:
        sock.settimeout(max(0.001, until - time.monotonic()))
        return context.wrap_socket(sock, server_hostname=name or None)
    except BaseException:
        sock.close()
        raise


def days_left(peer: ssl.SSLSocket) -> float | None:
    """Return the days until the certificate expires; None if it was not verified."""
    end = (peer.getpeercert() or {}).get("notAfter")
    return None if end is None else (ssl.cert_time_to_seconds(str(end)) - time.time()) / 86400


def names_of(peer: ssl.SSLSocket) -> list[str]:
    """Return the names that the certificate is valid for."""
    names = (peer.getpeercert() or {}).get("subjectAltName", ())
    return [str(pair[1]) for pair in names]


def explained(error: ssl.SSLError, name: str, names: list[str]) -> Problem | None:
    """Return the meaning of a wrong certificate or a TLS alert; None if the peer sent no TLS."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _certificate(error.verify_code, error.verify_message, name, names)
    reason = (error.reason or "").upper()
    for alert, (message, advice) in ALERTS.items():
        if reason.endswith(alert):
            return Problem(message, advice, "tls")
    if "ALERT" in reason:
        return Problem(f"the server refused the handshake ({reason})", "look into its log", "tls")
    return None


def _certificate(code: int, text: str, name: str, names: list[str]) -> Problem:
    if code in WRONG_NAME:
        valid_for = f", but for {', '.join(names)}" if names else ""
        message = f"the certificate is not valid for {name!r}{valid_for}"
        advice = (
            "connect to one of its names, or pass --servername NAME "
            '(clients: the option ("grpc.ssl_target_name_override", NAME))'
        )
    elif code == EXPIRED:
        message, advice = "the certificate has expired", "renew it, and restart the server"
    elif code == NOT_YET_VALID:
        message, advice = "the certificate is not valid yet", "check the clocks of both hosts"
    elif code in SELF_SIGNED | UNKNOWN_CA:
        kind = "is self-signed" if code in SELF_SIGNED else "is signed by an unknown CA"
        message = (
            f"the certificate {kind} ({text}); gRPC trusts the public CAs that are part of grpcio, "
            "not those of the system"
        )
        advice = (
            "pass --ca FILE with the certificate of the CA "
            "(clients: grpc.ssl_channel_credentials(root_certificates=...))"
        )
    else:
        message, advice = f"the certificate is not valid: {text}", "renew it"
    return Problem(message, advice, "tls")
