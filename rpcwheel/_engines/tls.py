"""TLS settings of the URL of an engine: `?ca=root.pem&cert=chain.pem&key=key.pem`."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc

from rpcwheel.errors import ConfigurationError

from .paths import expanded

if TYPE_CHECKING:
    from collections.abc import Mapping

TLS_ADVICE: Final = (
    "the TLS handshake failed; check that the port speaks TLS, that its certificate is for this "
    "host, and the root that signed it: ?ca=root.pem; a server may also want a client certificate: "
    "&cert=chain.pem&key=key.pem"
)
"""Followed by the reason. First, because log lines are cut at the end."""

ENDED: Final = (ssl.SSLEOFError, ssl.SSLZeroReturnError)
"""Errors of a connection that has ended without a reason, which may have any cause."""

ENDED_ADVICE: Final = (
    "if this goes on, the server may want another client certificate: ?cert=chain.pem&key=key.pem"
)
"""With TLS 1.3, a client may write before it reads why the server refuses its certificate."""


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS settings whose files, in PEM, could be loaded."""

    ca: str | None = None
    """File of the root certificates to trust; None: the system's."""
    cert: str | None = None
    """File of the client's certificate chain, if the server requires one."""
    key: str | None = None
    """File of the client's private key."""
    server_name: str | None = None
    """Name that the server's certificate must have; None: the host's."""

    @classmethod
    def from_options(cls, url: object, options: Mapping[str, str] | None) -> Tls | None:
        """Read the options `ca`, `cert`, `key` and `server_name` of a URL, and load the files.

        Returns:
            None if there are no options, for a connection without TLS.

        Raises:
            ConfigurationError: The options contradict each other, or a file can't be loaded.
        """
        if options is None:
            return None
        values = {name: options[name] for name in cls.__slots__ if name in options}
        if ("cert" in values) != ("key" in values):
            raise ConfigurationError(f"{url}: cert and key go together: two files in PEM")
        for name in {"ca", "cert", "key"} & values.keys():
            values[name] = str(expanded(values[name], url))
        tls = cls(**values)
        try:
            tls.context()
        except OSError as error:  # ssl.SSLError is one
            raise ConfigurationError(f"{url}: ca, cert or key can't be used: {error}") from None
        return tls

    def context(self) -> ssl.SSLContext:
        """Create a context that checks the server's certificate and host name."""
        context = ssl.create_default_context(cafile=self.ca)
        if self.cert is not None:
            load_certificate(context, self.cert, self.key)
        return context

    def grpc_credentials(self) -> grpc.ChannelCredentials:
        """Create gRPC credentials from the files as they are now: they may have been renewed.

        Raises:
            OSError: A file can't be read any more.
        """
        files = (None if path is None else Path(path) for path in (self.ca, self.key, self.cert))
        root, key, chain = (None if file is None else file.read_bytes() for file in files)
        credentials: grpc.ChannelCredentials = grpc.ssl_channel_credentials(root, key, chain)
        return credentials


def load_certificate(context: ssl.SSLContext, cert: str | Path, key: str | Path | None) -> None:
    """Load a certificate chain and its private key, without asking for a pass phrase.

    OpenSSL would ask on the terminal, for each connection, and block the program. gRPC takes no
    pass phrase at all.

    Raises:
        OSError: A file can't be read, is not PEM, or the key is encrypted.
    """
    context.load_cert_chain(cert, key, password=_refuse_encrypted_key)


def _refuse_encrypted_key() -> str:
    raise OSError("the private key is encrypted; use one without a pass phrase")


def refused_by_tls(error: BaseException | None) -> bool:
    """Whether an error was raised because one side did not accept the other's certificate.

    Also true if one side does not speak TLS.
    """
    cause = ssl_error_of(error)
    return cause is not None and not isinstance(cause, ENDED)


def ssl_error_of(error: BaseException | None) -> ssl.SSLError | None:
    """Return the error of `ssl` among an error and its causes."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return error
