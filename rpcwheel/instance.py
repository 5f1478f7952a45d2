"""`ServiceInstance`, one server of a service, and `Snapshot`, all known instances of a service."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import secrets
import time
from dataclasses import dataclass
from itertools import compress, count
from operator import is_not
from typing import Annotated, Any, Final, Literal

from pydantic import Field, StrictInt, StrictStr, field_validator, model_validator

from rpcwheel.errors import ConfigurationError, short_repr
from rpcwheel.policy import Number, Policy

__all__ = [
    "GRPC_SCHEMES",
    "ServiceInstance",
    "Snapshot",
    "Source",
    "checked_host",
    "differences",
    "explicit_target",
    "grpc_target",
    "record_epoch",
]

LARGEST_PORT: Final = 65535

VERSION: Final = 1
"""The version of the JSON form. Of a newer version, known fields are read."""

UNREADABLE: Final = "unreadable"
"""The field of a record that stands for one of another program that can't be read: the reason."""

MOST_METADATA: Final = 8192
"""Characters of all metadata together."""

NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
"""What services, namespaces and other names in URLs are."""

_ID: Final = re.compile(r"[^/\s\x00-\x1f\x7f\ud800-\udfff]{1,256}")
_LABEL: Final = r"[A-Za-z0-9_](?:[A-Za-z0-9_\-]{0,61}[A-Za-z0-9_])?"
_LAST_LABEL: Final = r"(?![0-9]+\.?\Z|0[xX])" + _LABEL  # of digits: resolvers read it as IPv4
_DNS_NAME: Final = re.compile(rf"(?:{_LABEL}\.)*{_LAST_LABEL}\.?")
_LONGEST_DNS_NAME: Final = 253
_ZONE: Final = re.compile(r"[A-Za-z0-9._~\-]+")


GRPC_SCHEMES: Final = frozenset(
    {"dns", "google-c2p", "ipv4", "ipv6", "unix", "unix-abstract", "vsock", "xds"}
)
"""Schemes of targets that gRPC resolves itself. It ignores their case (grpcio 1.85)."""


class _Epoch:
    """The random epoch of this process; a forked child has its own."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        self.word = secrets.token_hex(8)


_epoch: Final = _Epoch()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_epoch.renew)


class ServiceInstance(Policy):
    """One server of a service.

    Immutable and hashable. `replace(weight=10)` returns a copy with the same `id`.

    Raises:
        ConfigurationError: A value is out of range; the message says what is allowed.
        TypeError: A value is of a wrong type.
    """

    service: StrictStr
    """`"shop.Orders"`: letters, digits, `.`, `_` and `-`."""
    host: StrictStr
    """The DNS name or IP address for clients. An address to listen on, such as `0.0.0.0`, is
    refused."""
    port: Annotated[StrictInt, Field(ge=1, le=65535)]
    id: StrictStr = ""
    """Unique in the service. The default is `host:port`, so a restarted server replaces itself."""
    group: StrictStr = ""
    version: StrictStr = ""
    weight: Annotated[StrictInt, Field(ge=0, le=1000)] = 100
    """Its share of the calls, relative to other instances. 0: none, unless all have 0."""
    protocol: Literal["grpc", "grpcs"] = "grpc"
    """`grpcs`: gRPC over TLS."""
    zone: StrictStr = ""
    metadata: dict[StrictStr, StrictStr] = Field(default_factory=dict)
    """Values for clients: at most 8192 characters, keys and values together."""
    status: Literal["UP", "DRAINING"] = "UP"
    """DRAINING: it still serves, but is to get no new calls."""
    epoch: StrictStr = Field(default_factory=lambda: _epoch.word)
    """Identifies the process that published it. A late withdrawal does not delete a successor."""
    started_at: Annotated[Number, Field(ge=0, allow_inf_nan=False)] = 0.0
    """The start of the server: seconds since 1970 on its clock. 0: unknown."""
    extra: dict[StrictStr, Any] = Field(default_factory=dict)
    """Fields that a newer version of this package has written. They are kept."""

    @field_validator("service")
    @classmethod
    def _is_a_name(cls, value: str) -> str:
        if not NAME.fullmatch(value):
            raise ConfigurationError(
                f"it must be a name of letters, digits, '.', '_' and '-', not {value!r}"
            )
        return value

    @field_validator("host")
    @classmethod
    def _is_a_host(cls, value: str) -> str:
        host = checked_host(value)
        if _is_unspecified(host):
            raise ConfigurationError(
                f"{value!r} is an address to listen on, not one to call; give the host name or the "
                "address that clients reach"
            )
        return host

    @field_validator("metadata")
    @classmethod
    def _is_short(cls, value: dict[str, str]) -> dict[str, str]:
        size = sum(len(key) + len(text) for key, text in value.items())
        if size > MOST_METADATA:
            raise ConfigurationError(f"it has {size} characters; {MOST_METADATA} are allowed")
        return value

    @field_validator("extra")
    @classmethod
    def _has_no_known_names(cls, value: dict[str, Any]) -> dict[str, Any]:
        if ours := value.keys() & {*cls.model_fields, "v"}:
            raise ConfigurationError(f"{', '.join(sorted(ours))}: use the argument of that name")
        try:
            if value:
                json.dumps(value, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigurationError(f"it must be JSON: {error}") from None
        return value

    @model_validator(mode="before")
    @classmethod
    def _has_an_id(cls, data: Any) -> Any:
        if isinstance(data, dict) and not data.get("id"):
            host, port = data.get("host"), data.get("port")
            if isinstance(host, str) and isinstance(port, int) and _ID.fullmatch(host):
                return {**data, "id": joined(host, port)}
        return data

    @field_validator("id")
    @classmethod
    def _is_an_id(cls, value: str) -> str:
        if value and not _ID.fullmatch(value):
            raise ConfigurationError(
                f"it must be at most 256 characters without '/' and white space, not {value!r}"
            )
        return value

    def __hash__(self) -> int:
        return hash((self.service, self.id, self.epoch))

    @property
    def address(self) -> str:
        """Host and port, such as `10.0.0.7:50051`, `[::1]:50051` or `shop.example:50051`."""
        return joined(self.host, self.port)

    @property
    def target(self) -> str:
        """The target of a gRPC channel, such as `ipv4:10.0.0.7:50051`; see `grpc_target`."""
        return grpc_target(self.host, self.port)

    @property
    def key(self) -> tuple[str, str]:
        """Service and id, which are unique in a registry."""
        return self.service, self.id

    def encoded(self) -> bytes:
        """Return the JSON that all registries store."""
        record = self.model_dump(exclude_defaults=True, exclude={"extra"})
        record |= {"epoch": self.epoch, "id": self.id}
        return json.dumps({**self.extra, **record, "v": VERSION}, sort_keys=True).encode()

    @classmethod
    def decoded(cls, data: bytes | str) -> ServiceInstance:
        """Read what `encoded` wrote, also by a newer version.

        Raises:
            ValueError: It is not a valid instance; the message says why.
        """
        try:
            record = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"no JSON: {error}") from None
        is_record = isinstance(record, dict) and isinstance(record.pop("v", None), int)
        if not is_record:
            raise ValueError("no record of an instance: a JSON object with a version `v`")
        if UNREADABLE in record:
            raise ValueError(str(record[UNREADABLE]))
        fields = {name: record.pop(name) for name in tuple(record) if name in cls.model_fields}
        fields.pop("extra", None)
        fields.setdefault("epoch", "")
        try:
            return cls(**fields, extra=record)
        except (ConfigurationError, TypeError) as error:
            raise ValueError(str(error)) from None


Source = Literal["live", "stale", "cache"]
"""The source of a snapshot. "live": the registry. "stale": the registry, and instances that it has
lost (`Snapshot.stale`). "cache": the file of an earlier run; the registry has not answered yet."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The known instances of a service at one time."""

    service: str
    instances: tuple[ServiceInstance, ...] = ()
    """Sorted by id."""
    revision: int = 0
    """Increases with each change that this process has seen."""
    source: Source = "live"
    stale: frozenset[str] = frozenset()
    """Ids of instances that the registry may have lost by accident; they are kept for a time."""
    age_s: float = 0.0
    """The time since the registry last confirmed the snapshot, or since the file was written."""
    expired: frozenset[str] = frozenset()
    """Ids of instances that are not in the snapshot any more because they were stale for
    `stale_timeout`; those of the last time. Their servers may still answer."""


def record_epoch(data: bytes) -> str | None:
    """Return the epoch of an encoded instance; None if the data are no record."""
    try:
        record = json.loads(data)
    except (ValueError, RecursionError):
        return None
    epoch = record.get("epoch", "") if isinstance(record, dict) else None
    return epoch if isinstance(epoch, str) else None


Instances = tuple[ServiceInstance, ...]


def differences(before: Instances, after: Instances) -> tuple[Instances, Instances]:
    """Return two tuples without their common beginning and end: removed and added instances.

    Compares objects by identity, in C: about 20 ns for each.
    """
    shorter = min(len(before), len(after))
    start = next(compress(count(), map(is_not, before, after)), shorter)
    rest = shorter - start
    from_end = map(is_not, reversed(before), reversed(after))
    end = next(compress(range(rest), from_end), rest)
    return before[start : len(before) - end], after[start : len(after) - end]


def checked_host(host: str) -> str:
    """Return a DNS name as it is, and an IP address in its usual form, without brackets.

    DNS names may contain underscores, as the names of Docker services do.

    Raises:
        ConfigurationError: It is neither a DNS name nor an IP address.
    """
    has_brackets = host.startswith("[") and host.endswith("]") and ":" in host
    text, percent, zone = host[1:-1].partition("%") if has_brackets else host.partition("%")
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        is_name = len(host.removesuffix(".")) <= _LONGEST_DNS_NAME and _DNS_NAME.fullmatch(host)
        if is_name:
            return host
    else:
        if not percent:
            return str(address)
        if isinstance(address, ipaddress.IPv6Address) and _ZONE.fullmatch(zone):
            return f"{address}%{zone}"
    raise ConfigurationError(
        "it must be a DNS name or an IP address, without a port, such as 'shop.example', "
        f"'10.0.0.7' or 'fe80::1%eth0', not {short_repr(host)}"
    )


def grpc_target(host: str, port: int) -> str:
    """Return the target of a gRPC channel to a host that `checked_host` returned.

    The target always names its scheme, or gRPC would read one in the host: it connects to the Unix
    socket `50051` for `unix:50051`. The authority and the TLS server name are those of `host:port`
    (grpcio 1.85). An address with a zone is left to gRPC's DNS resolver: if this machine has no
    such interface, calls fail with UNAVAILABLE, but with UNKNOWN if the scheme is `ipv6`.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"dns:///{joined(host, port)}"
    if isinstance(address, ipaddress.IPv6Address) and address.scope_id:
        return f"dns:///{joined(host.replace('%', '%25'), port)}"
    return f"ipv{address.version}:{joined(host, port)}"


def explicit_target(target: str) -> str:
    """Return a target of gRPC in which no host name is read as a scheme.

    gRPC reads a scheme in `unix:50051` and in `dns:50051`: it connects to the Unix socket `50051`
    of the working directory, and to the host `50051`. Here a scheme, a colon and a port mean
    `host:port`, and become `dns:///unix:50051`. The target of that Unix socket is `unix:./50051`.

    All other targets are returned as they are.
    """
    host, _, port = target.partition(":")
    is_port = port.isascii() and port.isdigit() and 0 < int(port[:6]) <= LARGEST_PORT
    return f"dns:///{target}" if is_port and host.lower() in GRPC_SCHEMES else target


def _is_unspecified(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_unspecified


def joined(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    host = host.removeprefix("[").removesuffix("]")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def started_now() -> float:
    """Return the present time for `started_at`."""
    return round(time.time(), 3)
