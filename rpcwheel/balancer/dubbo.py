"""What calls to Dubbo's providers need that other servers of gRPC do not.

Dubbo's providers are instances with the Java interface in their metadata (`dubbo_url.INTERFACE`).
Pure: no I/O, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rpcwheel.registry.backends.dubbo_url import INTERFACE, PREFIX, TAG

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rpcwheel.instance import ServiceInstance

    Headers = tuple[tuple[str, str], ...]

GROUP_HEADER: Final = "tri-service-group"
VERSION_HEADER: Final = "tri-service-version"
CONSUMER_HEADER: Final = "tri-consumer-appname"

ABSENT: Final = "Invoker for gRPC not found"
"""Details of UNIMPLEMENTED from a provider without the service. It answers so when it is stopped,
between the withdrawal of its services and the end of its connections (Dubbo Java 3.3.6), so the
call was not executed, and others have the service."""


@dataclass(frozen=True, slots=True)
class DubboClient:
    """What a client of a registry of Dubbo's says of itself."""

    application: str = ""
    """Its name."""
    tag: str = ""
    """The tag of calls that have none of their own."""


@dataclass(frozen=True, slots=True)
class Conventions:
    """How calls to one server differ: headers, and the warm-up of its weight."""

    headers: Headers = ()
    """Metadata that each call is given."""
    is_dubbo: bool = False
    warmup_ns: int | None = None
    """How long its weight grows after its start; None: as the channel's policy says."""


NO_CONVENTIONS: Final = Conventions()


def conventions_of(instance: ServiceInstance, client: DubboClient | None) -> Conventions:
    """Return the conventions of an instance; the client is None if the registry is not Dubbo's."""
    metadata = instance.metadata
    if INTERFACE not in metadata:
        return NO_CONVENTIONS
    headers = {
        GROUP_HEADER: instance.group,
        VERSION_HEADER: instance.version,
        CONSUMER_HEADER: client.application if client else "",
        TAG: client.tag if client else "",
    }
    warmup = metadata.get(f"{PREFIX}warmup", "")
    is_number = warmup.isascii() and warmup.isdecimal() and len(warmup) < 12  # noqa: PLR2004
    return Conventions(
        tuple((key, value) for key, value in headers.items() if value),
        is_dubbo=True,
        warmup_ns=int(warmup) * 1_000_000 if is_number else None,
    )


def with_headers(
    metadata: Iterable[tuple[str, str | bytes]] | None, headers: Headers
) -> tuple[tuple[str, str | bytes], ...]:
    """Return the metadata of a call with headers, without headers that the call has already."""
    pairs = tuple((key, value) for key, value in metadata or ())
    present = {key for key, _ in pairs}
    return (*pairs, *(pair for pair in headers if pair[0] not in present))
