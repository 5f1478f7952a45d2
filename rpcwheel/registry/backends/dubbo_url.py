"""The provider URLs of Dubbo, which are the names of its nodes in ZooKeeper.

    tri://10.0.0.7:50051/shop.v1.Orders?application=shop&group=g1&interface=com.example.Orders&...

`node_name` writes an instance as such a URL, and `record_of` reads one. What `node_name` has
written is read without any loss. Pure: no I/O, no clock.

============================  =====================================================================
parameter                     field of the instance
============================  =====================================================================
the path                      `service`: the name of the gRPC service on the wire
`group`, `version`, `weight`  the same
`timestamp`                   `started_at`, in milliseconds; dubbo-go gives seconds
`disabled=true`               `status="DRAINING"`: Dubbo's consumers make no new calls
`ssl-enabled=true`            `protocol="grpcs"`
`application`, `release`,     `metadata["dubbo.application"]` and so on. Of an instance without
`warmup`                      them, the URL has the application of the registry's URL, the release
                              of this package, and no warm-up (Dubbo's default is 10 minutes).
`rpcwheel.NAME`               `id`, `epoch`, `zone`, `extra`: what Dubbo does not have
all others                    `metadata`, such as `dubbo.tag`
============================  =====================================================================

In an instance of a Dubbo provider, `metadata["dubbo.interface"]` is the Java interface. Its id is
host and port, with group and version if it has any, and its epoch the timestamp.

Only Triple is read. Other protocols give a record that is not valid, as it names the protocol.

`consumer_of` reads the URL by which a client of Dubbo has registered itself.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final
from urllib.parse import quote_plus, unquote, unquote_plus

from rpcwheel.instance import MOST_METADATA, UNREADABLE, ServiceInstance, joined
from rpcwheel.registry.backend import Consumer

if TYPE_CHECKING:
    from collections.abc import Mapping

TRIPLE: Final = "tri"
"""The protocol in URLs. Dubbo's consumers accept `grpc` too."""

PROTOCOLS: Final = frozenset({TRIPLE, "grpc"})

PREFIX: Final = "dubbo."
"""Of the keys in metadata that stand for parameters of Dubbo with a meaning."""

INTERFACE: Final = f"{PREFIX}interface"
"""The key in metadata with the Java interface, of instances that Dubbo has published."""

PATH: Final = f"{PREFIX}path"
"""The key in metadata with the name of the gRPC service, if it is not that of the instance."""

TAG: Final = f"{PREFIX}tag"
"""The parameter, and the key in metadata, of the tag of a provider."""

NAMED: Final = ("application", "release", "warmup")
"""Parameters that are in metadata with `PREFIX`."""

FIELDS: Final = frozenset(
    {"interface", "group", "version", "weight", "timestamp", "disabled", "enabled", "ssl-enabled"}
)
"""Parameters that become fields of an instance."""

IGNORED: Final = frozenset(
    {"side", "dubbo", "generic", "dynamic", "deprecated", "anyhost", "pid", "methods", "proxy",
     "revision", "category", "prefer.serialization", "service-name-mapping"}
)  # fmt: skip
"""Parameters of Dubbo's own that say nothing to clients of gRPC, and may be long."""

WITH_MEANING: Final = IGNORED | FIELDS | set(NAMED)

OWN: Final = "rpcwheel."
ID: Final = f"{OWN}id"
EPOCH: Final = f"{OWN}epoch"
ZONE: Final = f"{OWN}zone"
EXTRA: Final = f"{OWN}extra"
STARTED_AT: Final = f"{OWN}started_at"
"""The start, if it is no whole number of milliseconds."""
GIVEN: Final = f"{OWN}given"
"""Which of `NAMED` are from the instance's metadata."""
METADATA: Final = f"{OWN}m."
"""Before keys of metadata that are also parameters with a meaning."""

DEFAULT_WEIGHT: Final = 100
LARGEST_WEIGHT: Final = 1000

DUBBO_WARMUP_MS: Final = 600_000
"""Dubbo's default. It applies to providers with a timestamp."""

LAST_S: Final = 1e12
"""Times at which milliseconds are no longer exact."""

LAST_IN_SECONDS: Final = 10**11
"""Timestamps below it are in seconds. In milliseconds, it is in 1973."""

DUBBO_VERSION: Final = "2.0.2"
"""The version of Dubbo's protocol, which all its providers give."""


def node_name(instance: ServiceInstance, *, interface: str, application: str, release: str) -> str:
    """Return the URL of an instance, encoded as the name of a node.

    Args:
        instance: Any instance.
        interface: The Java interface.
        application: The name of the application, unless the instance's metadata has one.
        release: Names the publishing program and its version.
    """
    parameters = parameters_of(instance, application=application, release=release)
    parameters["interface"] = interface
    query = "&".join(
        f"{_quoted(key)}={_quoted(value)}" for key, value in sorted(parameters.items())
    )
    address = joined(instance.host, instance.port)
    return _encoded(f"{TRIPLE}://{address}/{instance.service}?{query}")


def parameters_of(instance: ServiceInstance, *, application: str, release: str) -> dict[str, str]:
    """Return the parameters of an instance's URL, without the interface."""
    named = {"application": application, "release": release, "warmup": "0"}
    from_metadata = [name for name in NAMED if f"{PREFIX}{name}" in instance.metadata]
    named |= {name: instance.metadata[f"{PREFIX}{name}"] for name in from_metadata}
    parameters = {"side": "provider", "dubbo": DUBBO_VERSION, "dynamic": "true"}
    parameters |= {name: value for name, value in named.items() if value or name in from_metadata}
    for key, value in instance.metadata.items():
        if key.removeprefix(PREFIX) not in from_metadata or not key.startswith(PREFIX):
            parameters[f"{METADATA}{key}" if _has_meaning(key) else key] = value
    started_at = float(instance.started_at)
    milliseconds = round(started_at * 1000) if started_at < LAST_S else 0
    fields = {
        "group": instance.group,
        "version": instance.version,
        "weight": "" if instance.weight == DEFAULT_WEIGHT else str(instance.weight),
        "timestamp": str(milliseconds) if milliseconds else "",
        "disabled": "true" if instance.status == "DRAINING" else "",
        "ssl-enabled": "true" if instance.protocol == "grpcs" else "",
        ID: instance.id if instance.id != joined(instance.host, instance.port) else "",
        ZONE: instance.zone,
        EXTRA: json.dumps(instance.extra, sort_keys=True) if instance.extra else "",
        STARTED_AT: "" if milliseconds / 1000 == started_at else repr(started_at),
        GIVEN: ",".join(from_metadata),
    }
    parameters |= {key: value for key, value in fields.items() if value}
    return parameters | {EPOCH: instance.epoch}


def instance_from(
    scheme: str,
    address: str,
    path: str,
    parameters: Mapping[str, str],
    *,
    service: str,
    interface: str,
) -> ServiceInstance:
    """Return the instance that the parts of a URL stand for.

    Raises:
        ValueError: It is not the URL of a Triple provider; the message says why.
    """
    if scheme not in PROTOCOLS:
        raise ValueError(f"its protocol is {scheme!r}; only Triple ({TRIPLE}) can be called")
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdecimal()):
        raise ValueError(f"{address!r} is no host and port")
    is_own = EPOCH in parameters
    metadata = _own_metadata(parameters) if is_own else _dubbo_metadata(parameters, interface)
    if path not in {"", service}:
        metadata[PATH] = path
    group, version = parameters.get("group", ""), parameters.get("version", "")
    id_ = parameters.get(ID, "")
    if not is_own:
        id_ = ",".join(filter(None, (f"{host}:{port}", group, version)))
    is_off = parameters.get("disabled") == "true" or parameters.get("enabled") == "false"
    started_at = float(parameters.get(STARTED_AT) or _started_at(parameters, is_own=is_own))
    try:
        return ServiceInstance(
            service=service,
            host=host,
            port=int(port[:6]),
            id=id_,
            group=group,
            version=version,
            weight=min(LARGEST_WEIGHT, max(0, _number(parameters.get("weight", ""), 100))),
            protocol="grpcs" if parameters.get("ssl-enabled") == "true" else "grpc",
            zone=parameters.get(ZONE, ""),
            metadata=metadata,
            status="DRAINING" if is_off else "UP",
            epoch=parameters.get(EPOCH, parameters.get("timestamp", "")),
            started_at=started_at,
            extra=json.loads(parameters.get(EXTRA, "{}")),
        )
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def consumer_of(name: str, service: str) -> Consumer:
    """Read the URL of a client, `consumer://HOST/INTERFACE?...`; parameters may be missing."""
    _, address, _, parameters = parsed(name)
    return Consumer(
        service=service,
        application=parameters.get("application", ""),
        host=address,
        version=parameters.get("version", ""),
        group=parameters.get("group", ""),
        release=parameters.get("release", ""),
        started_at=_started_at(parameters, is_own=False),
    )


def record_of(name: str, service: str, interface: str) -> tuple[str, bytes]:
    """Return the id and the record of a node; of one that can't be read, its name and the reason.

    The reason is a record that `ServiceInstance.decoded` refuses with a message that contains it.
    """
    try:
        instance = instance_from(*parsed(name), service=service, interface=interface)
    except ValueError as error:
        return name, unreadable_record(service, name, str(error))
    return instance.id, instance.encoded()


def unreadable_record(service: str, id_: str, reason: str) -> bytes:
    """Return a record that `ServiceInstance.decoded` refuses with this reason."""
    return json.dumps({"v": 1, "service": service, "id": id_, UNREADABLE: reason}).encode()


def parsed(name: str) -> tuple[str, str, str, Mapping[str, str]]:
    """Return the scheme, the address, the path and the parameters of a URL in a node's name."""
    url, _, query = unquote_plus(name).partition("?")
    scheme, _, rest = url.partition("://")
    address, _, path = rest.partition("/")
    pairs = (pair.partition("=") for pair in query.split("&") if pair)
    parameters = {key: value for key, _, value in pairs}
    if EPOCH in parameters:  # `node_name` has quoted these twice
        parameters = {unquote(key): unquote(value) for key, value in parameters.items()}
    return scheme, address, path, parameters


def _own_metadata(parameters: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata of an instance that `node_name` has written."""
    from_metadata = filter(None, parameters.get(GIVEN, "").split(","))
    return {
        **{key: value for key, value in parameters.items() if not _has_meaning(key)},
        **{
            key.removeprefix(METADATA): value
            for key, value in parameters.items()
            if key.startswith(METADATA)
        },
        **{f"{PREFIX}{name}": parameters.get(name, "") for name in from_metadata},
    }


def _dubbo_metadata(parameters: Mapping[str, str], interface: str) -> dict[str, str]:
    """Return the metadata of an instance that Dubbo has published."""
    named = {f"{PREFIX}{name}": parameters[name] for name in NAMED if name in parameters}
    if "timestamp" in parameters:
        named.setdefault(f"{PREFIX}warmup", str(DUBBO_WARMUP_MS))
    named[INTERFACE] = interface
    if TAG in parameters:
        named[TAG] = parameters[TAG]
    others = {key: value for key, value in parameters.items() if not _has_meaning(key)}
    size = sum(len(key) + len(value) for key, value in (named | others).items())
    return others | named if size <= MOST_METADATA else named


def _has_meaning(key: str) -> bool:
    """Whether a parameter has a meaning of its own, so that it is no metadata."""
    return key in WITH_MEANING or key.startswith(OWN)


def _started_at(parameters: Mapping[str, str], *, is_own: bool) -> float:
    """Return the timestamp of a URL in seconds. dubbo-go (3.3.1) writes seconds."""
    timestamp = _number(parameters.get("timestamp", ""), 0)
    is_seconds = timestamp < LAST_IN_SECONDS and not is_own
    return float(timestamp) if is_seconds else timestamp / 1000


def _number(text: str, default: int) -> int:
    digits = text.removeprefix("-")
    is_number = digits.isascii() and digits.isdecimal() and len(digits) < 16  # noqa: PLR2004
    return int(text) if is_number else default


def _quoted(text: str) -> str:
    """Quote the characters that end a key or a value in a URL."""
    return text.replace("%", "%25").replace("&", "%26").replace("=", "%3D")


def _encoded(url: str) -> str:
    """Encode a URL as `java.net.URLEncoder` does."""
    return quote_plus(url, safe="*").replace("~", "%7E")
