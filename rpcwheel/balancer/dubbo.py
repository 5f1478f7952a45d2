"""What calls to Dubbo's providers need that other servers of gRPC do not.

Dubbo's providers are instances with the Java interface in their metadata (`dubbo_url.INTERFACE`).
Pure: no I/O, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rpcwheel.registry.backends.dubbo_url import INTERFACE, PREFIX, TAG

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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
class Conventions:
    """What is special about calls to one server."""

    headers: Headers = ()
    """Metadata that each call is given."""
    is_dubbo: bool = False
    warmup_ns: int | None = None
    """How long its weight grows after its start; None: as the channel's policy says."""


NO_CONVENTIONS: Final = Conventions()


def conventions_of(instance: ServiceInstance, application: str, tag: str) -> Conventions:
    """Return the conventions of an instance.

    Args:
        instance: Any instance.
        application: The name of this client; "" if it has none.
        tag: The tag of this client's calls, which providers pass on; "" for none.
    """
    metadata = instance.metadata
    if INTERFACE not in metadata:
        return NO_CONVENTIONS
    headers = {
        GROUP_HEADER: instance.group,
        VERSION_HEADER: instance.version,
        CONSUMER_HEADER: application,
        TAG: tag,
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


def tagged(instances: Sequence[ServiceInstance], tag: str) -> Sequence[ServiceInstance]:
    """Return the instances for calls with a tag, or without one (Dubbo `TagStateRouter`).

    Those of the tag; if there are none, those without a tag. Calls without a tag go only to
    instances without one.
    """
    same = [instance for instance in instances if instance.metadata.get(TAG, "") == tag]
    if same or not tag:
        return instances if len(same) == len(instances) else same
    return [instance for instance in instances if not instance.metadata.get(TAG)]
