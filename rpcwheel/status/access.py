"""Who may read the live view. No I/O."""

from __future__ import annotations

import hmac
import ipaddress
import re
from typing import Final

from rpcwheel.errors import ConfigurationError

LOOPBACK: Final = "127.0.0.1"

MIN_TOKEN: Final = 16
"""Characters of a token."""


def is_loopback(host: str) -> bool:
    """Return whether a host, without brackets, can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().removesuffix(".") == "localhost"


def check_access(host: str, *, has_token: bool) -> None:
    """Check that no other machine can read without a token.

    Raises:
        ConfigurationError: `host` is not the loopback, and there is no token.
    """
    if not has_token and not is_loopback(host):
        raise ConfigurationError(
            f"status_host={host!r} can be reached from other machines: set status_token too, such "
            f"as secrets.token_urlsafe(), or use status_host={LOOPBACK!r}"
        )


def checked_token(token: object) -> str:
    """Return the token. The errors do not contain it.

    Raises:
        TypeError: It is not a string.
        ConfigurationError: It is too short, or a header can't contain it.
    """
    if not isinstance(token, str):
        raise TypeError(f"status_token must be a string, not {type(token).__name__}")
    if len(token) < MIN_TOKEN or not re.fullmatch(r"[!-~]*", token):
        raise ConfigurationError(
            f"status_token must have {MIN_TOKEN} characters or more, of ASCII without spaces; such "
            "as secrets.token_urlsafe()"
        )
    return token


class Access:
    """Decides which requests are answered."""

    def __init__(self, host: str, token: str | None) -> None:
        check_access(host, has_token=token is not None)
        self._host = host.lower()
        self._token = None if token is None else checked_token(token).encode()

    @property
    def needs_token(self) -> bool:
        """Whether requests must have the token."""
        return self._token is not None

    def has_token(self, authorization: str) -> bool:
        """Return whether the header has the token. All wrong tokens take equally long."""
        scheme, _, token = authorization.partition(" ")
        is_token = hmac.compare_digest(token.strip().encode(errors="replace"), self._token or b"")
        return is_token and scheme.lower() == "bearer"

    def is_named_by(self, hosts: list[str]) -> bool:
        """Return whether there is one Host header, of the loopback or the configured host."""
        if len(hosts) != 1:
            return False
        host = re.sub(r":\d*\Z", "", hosts[0].strip().lower())
        host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        return host == self._host or is_loopback(host)
