"""What a publisher is given, checked, and what its URLs say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rpcwheel.durations import MAX_NS, to_ns
from rpcwheel.errors import ConfigurationError

from .url import parse_url

if TYPE_CHECKING:
    from rpcwheel.durations import Duration

    from .url import RegistryUrl

__all__ = ["checked_port", "named_services", "said_in", "several", "span_ns", "url_of"]


def several(registry: object) -> list[Any]:
    """As a list.

    Raises:
        TypeError, ConfigurationError: They are none; there are none.
    """
    if not isinstance(registry, Sequence) or isinstance(registry, (bytes, bytearray)):
        raise TypeError(
            "registry must be a registry, a URL such as 'etcd://127.0.0.1:2379', or several of "
            f"them; not {registry!r}"
        )
    if not registry:
        raise ConfigurationError("registry is empty; give at least one registry, or its URL")
    return list(registry)


def url_of(registry: object) -> RegistryUrl | None:
    """Where a registry is; None for one of the user's that does not say."""
    url = registry if isinstance(registry, str) else getattr(registry, "url", None)
    if not isinstance(url, str):
        return None
    try:
        return parse_url(url)
    except ConfigurationError:
        if isinstance(registry, str):
            raise
        return None


def said_in(urls: Sequence[RegistryUrl], name: str) -> str:
    """What the first URL that has such an option says; "" if none does."""
    return next((url.options[name] for url in urls if url.options.get(name)), "")


def named_services(services: tuple[str, ...], urls: Sequence[RegistryUrl]) -> tuple[str, ...]:
    """The services that were named, by arguments or URLs.

    Raises:
        TypeError, ConfigurationError: One is no string; a URL names another.
    """
    of_urls = tuple(url.service for url in urls if url.service)
    for service in services:
        if not isinstance(service, str):
            raise TypeError(
                f'a service is named by a string, such as "shop.Orders"; not {service!r}'
            )
    if services and not set(of_urls) <= set(services):
        raise ConfigurationError(
            f"the URL names the service {of_urls[0]!r}, which is not among {', '.join(services)}; "
            "leave it out of the URL, or name it too"
        )
    return tuple(dict.fromkeys(services or of_urls))


def checked_port(port: object) -> int:
    """Give it back.

    Raises:
        TypeError, ConfigurationError: It is none.
    """
    if not isinstance(port, int) or isinstance(port, bool):
        raise TypeError(f"port must be a number, such as 50051, not {port!r}")
    if not 0 <= port < 1 << 16:
        raise ConfigurationError(f"port must be from 1 to 65535, or 0 for any, not {port}")
    return port


def span_ns(value: Duration, what: str) -> int:
    """A length of time that may be nothing, in nanoseconds.

    Raises:
        TypeError, ConfigurationError: It is none.
    """
    given_ns = to_ns(value, what=what)
    if given_ns < 0:
        raise ConfigurationError(f"{what} must be 0 or more seconds, not {value!r}")
    return min(given_ns, MAX_NS)
