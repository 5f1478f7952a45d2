"""TLS as a URL has it: `?tls=true&ca=root.pem&cert=chain.pem&key=key.pem`."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rpcwheel.errors import ConfigurationError

if TYPE_CHECKING:
    from rpcwheel.registry.url import RegistryUrl

__all__ = ["TLS_ADVICE", "TLS_OPTIONS", "Tls", "refused_by_tls"]

TLS_OPTIONS: Final = ("tls", "ca", "cert", "key")

TLS_ADVICE: Final = (
    "the TLS handshake failed; check that the port speaks TLS, that its certificate is for this "
    "host and has not expired, and give the root that signed it: ?ca=root.pem (by default the "
    "system's roots count), and our own certificate if the server wants one: "
    "&cert=chain.pem&key=key.pem"
)
"""What follows the reason in a `RegistryRefused`, with every engine."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM, which can be read."""

    ca: str | None = None
    """Whose signature the server's certificate must have; None: one that the system knows."""
    cert: str | None = None
    """Ours, if the server wants one."""
    key: str | None = None

    @classmethod
    def of(cls, url: RegistryUrl, *, default: bool) -> Tls | None:
        """What the URL has; None without TLS. `default` is what its scheme says.

        Raises:
            ConfigurationError: It contradicts itself, or a file can't be read.
        """
        files = {name: url.options[name] for name in ("ca", "cert", "key") if name in url.options}
        if not url.flag("tls", default=default):
            if files:
                raise ConfigurationError(f"{url}: {', '.join(files)}: for TLS only; add tls=true")
            return None
        if ("cert" in files) != ("key" in files):
            raise ConfigurationError(f"{url}: cert and key go together: two files in PEM")
        tls = cls(**files)
        try:
            tls.context()
        except OSError as error:  # ssl.SSLError is one
            raise ConfigurationError(f"{url}: ca, cert or key can't be used: {error}") from None
        return tls

    def context(self) -> ssl.SSLContext:
        """One that wants a certificate for the server's host name."""
        context = ssl.create_default_context(cafile=self.ca)
        if self.cert is not None:
            context.load_cert_chain(self.cert, self.key)
        return context


def refused_by_tls(error: BaseException | None) -> bool:
    """Whether one side did not accept the other's certificate, or speaks no TLS."""
    while error is not None:
        if isinstance(error, ssl.SSLError):  # an end without a word may be anything
            return not isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError))
        error = error.__cause__ or error.__context__
    return False
