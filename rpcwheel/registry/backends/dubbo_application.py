"""The records of Dubbo's application level, which lists processes and not services.

=========================================  ========================================================
node                                       data
=========================================  ========================================================
`/services/{application}/{host}:{port}`    ephemeral: one server, and the revision of its metadata
`/{root}/metadata/{application}/{rev.}`    the services of the servers that have this revision
`/{root}/{application}/{rev.}`             the same for dubbo-go, which reads and writes it here
`/{root}/mapping/{interface}`              the applications that have the interface
=========================================  ========================================================

Consumers read them from the last to the first. A provider may keep its metadata to itself instead
(Dubbo's default, `metadata-type=local`): consumers then call its `MetadataServiceV2`, whose answer
is here too.

Dubbo's consumers prefer this level as soon as one provider of a service is there: a server that is
published at the interface level only gets no calls then. Services whose path is not the interface
are not found at this level by programs in Java (Dubbo 3.3.6), which then use the interface level.
Clients here look them up by the interface, and find them.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from rpcwheel._grpc.wire import WireType, fields, text_field
from rpcwheel.instance import joined

from .dubbo_url import EPOCH, OWN, TAG, TRIPLE, instance_from, unreadable_record

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

INSTANCE_CLASS: Final = "org.apache.dubbo.registry.zookeeper.ZookeeperInstance"
"""The class of the payload, by which Curator's JSON reader in Java knows it."""

SEPARATOR: Final = ","

OF_PROCESS: Final = frozenset({EPOCH, "timestamp"})
"""Parameters that are left out of metadata, as nobody deletes those of an earlier process."""


LOCAL: Final = "local"
REMOTE: Final = "remote"
"""Values of `dubbo.metadata.storage-type`: in the provider (the default), or in ZooKeeper."""

NO_REVISIONS: Final = frozenset({"", "0"})
"""Revisions of a process without services."""

METADATA_VERSION: Final = "2.0.0"
"""The version of the metadata service that answers in protobuf."""

FROM_PROCESS: Final = ("timestamp", TAG)
"""Values of a process that are parameters of all its services, unless these have their own."""

BESIDE_INTERFACES: Final = f"{OWN}interfaces"
"""The key of a value that only processes of this package have. Their services are always at the
interface level too, which has more of them, and all changes."""


@dataclass(frozen=True, slots=True)
class ApplicationInstance:
    """One process of an application, as its node describes it."""

    host: str
    port: int
    revision: str
    """Names its metadata within the application."""
    parameters: Mapping[str, str]
    """`FROM_PROCESS`."""
    is_beside_interfaces: bool
    """Whether its services are at the interface level too."""
    metadata_address: tuple[str, int] | None
    """Where it answers for its metadata; None: they are in ZooKeeper."""


@dataclass(frozen=True, slots=True)
class DubboService:
    """One service in the metadata of a process."""

    interface: str
    group: str
    version: str
    protocol: str
    port: int
    """0: that of the process."""
    path: str
    parameters: Mapping[str, str]


@dataclass(frozen=True, slots=True, eq=False)
class ApplicationMetadata:
    """The services of all processes that have the same revision. Hashed by identity."""

    services: tuple[DubboService, ...]


# Writing


def metadata_paths(root: str, application: str, revision: str) -> tuple[str, str]:
    """Return the paths of the metadata of a revision, for Java and for dubbo-go (3.3.1)."""
    return f"{root}/metadata/{application}/{revision}", f"{root}/{application}/{revision}"


def metadata_of(
    application: str, port: int, services: Sequence[tuple[str, str, Mapping[str, str]]]
) -> tuple[str, bytes]:
    """Return the revision and the metadata of the services of one server.

    Servers that differ only in their host share a revision, as in Dubbo, whose `MetadataInfo` does
    not contain the host either. Neither Dubbo nor rpcwheel deletes metadata, so each host would
    leave its own. `services` has the interface, the path and the parameters of each.
    """
    described = {}
    for interface, path, parameters in services:
        group, version = parameters.get("group", ""), parameters.get("version", "")
        key = f"{group + '/' if group else ''}{interface}{':' + version if version else ''}"
        described[f"{key}:{TRIPLE}"] = {
            "name": interface,
            "group": group,
            "version": version,
            "protocol": TRIPLE,
            "port": port,
            "path": path,
            "params": {
                **{key: value for key, value in parameters.items() if key not in OF_PROCESS},
                "interface": interface,
            },
        }
    text = json.dumps([application, described], sort_keys=True)
    revision = hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()  # as Dubbo's
    record = {"app": application, "revision": revision, "services": described}
    return revision, json.dumps(record, sort_keys=True).encode()


def instance_of_application(
    application: str, host: str, port: int, revision: str, timestamp: str
) -> bytes:
    """Return the data of the node of one server, as Curator's service discovery writes it."""
    address = joined(host, port)
    metadata = {
        "dubbo.endpoints": json.dumps([{"port": port, "protocol": TRIPLE}], separators=(",", ":")),
        "dubbo.metadata.revision": revision,
        "dubbo.metadata.storage-type": REMOTE,
        "timestamp": timestamp,
        BESIDE_INTERFACES: "true",
    }
    payload = {
        "@class": INSTANCE_CLASS,
        "id": address,
        "name": application,
        "metadata": {key: value for key, value in metadata.items() if value},
    }
    record = {
        "name": application,
        "id": address,
        "address": host,
        "port": port,
        "sslPort": None,
        "payload": payload,
        "registrationTimeUTC": int(timestamp or 0),
        "serviceType": "DYNAMIC",
        "uriSpec": None,
    }
    return json.dumps(record).encode()


def with_application(mapping: bytes, application: str) -> bytes | None:
    """Return the data of a mapping with an application; None if it has it already."""
    names = applications_in(mapping)
    if application in names:
        return None
    return SEPARATOR.join([*names, application]).encode()


# Reading


def applications_in(mapping: bytes) -> list[str]:
    """Return the applications in the data of a mapping."""
    return [name for name in mapping.decode(errors="replace").split(SEPARATOR) if name]


def read_instance(data: bytes) -> ApplicationInstance:
    """Read the data of the node of one process.

    Raises:
        ValueError: They are not valid, or its metadata are not available; the message says why.
    """
    record = _json_object(data)
    metadata = _json_object(_json_object(record.get("payload") or {}).get("metadata") or {})
    host, port = str(record.get("address") or ""), _port(record.get("port"))
    address = None
    if metadata.get("dubbo.metadata.storage-type", LOCAL) != REMOTE:
        address = host, _metadata_port(metadata)
    return ApplicationInstance(
        host,
        port,
        str(metadata.get("dubbo.metadata.revision", "")),
        {key: str(metadata[key]) for key in FROM_PROCESS if key in metadata},
        BESIDE_INTERFACES in metadata,
        address,
    )


def read_metadata(data: bytes) -> ApplicationMetadata:
    """Read metadata that are in ZooKeeper.

    Raises:
        ValueError: They are not valid; the message says why.
    """
    services = _json_object(_json_object(data).get("services") or {})
    return ApplicationMetadata(tuple(map(_service_of, map(_json_object, services.values()))))


def _service_of(record: Mapping[str, Any]) -> DubboService:
    parameters = _json_object(record.get("params") or {})
    return DubboService(
        interface=str(record.get("name") or ""),
        group=str(record.get("group") or ""),
        version=str(record.get("version") or ""),
        protocol=str(record.get("protocol") or ""),
        port=_port(record.get("port") or 0),
        path=str(record.get("path") or ""),
        parameters={key: str(value) for key, value in parameters.items()},
    )


def records_of(
    instance: ApplicationInstance, metadata: ApplicationMetadata, service: str, interface: str
) -> dict[str, bytes]:
    """Return the records of an interface that a process has, by id."""
    records = {}
    for each in metadata.services:
        if each.interface != interface:
            continue
        address = joined(instance.host, each.port or instance.port)
        identity = {"group": each.group, "version": each.version}
        parameters = {**instance.parameters, **each.parameters, **identity}
        try:
            read = instance_from(
                each.protocol, address, each.path, parameters, service=service, interface=interface
            )
        except ValueError as error:
            id_ = f"{each.protocol}:{address}"
            records[id_] = unreadable_record(service, id_, str(error))
        else:
            records[read.id] = read.encoded()
    return records


def _metadata_port(metadata: Mapping[str, Any]) -> int:
    """Return the port of a process's metadata service."""
    parameters = _json_object(metadata.get("dubbo.metadata-service.url-params") or b"{}")
    protocol = parameters.get("protocol")
    if protocol != TRIPLE or metadata.get("meta-v") != METADATA_VERSION:
        raise ValueError(
            f"its metadata service has the protocol {protocol!r} and the version "
            f"{metadata.get('meta-v')!r}; only {TRIPLE!r} with {METADATA_VERSION} can be called: "
            "set metadata-type=remote for the provider, or register-mode=all"
        )
    return _port(parameters.get("port"))


def _json_object(value: bytes | str | Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        record = json.loads(value) if isinstance(value, (bytes, str)) else value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON: {error}") from None
    if isinstance(record, dict):
        return record
    raise ValueError(f"no JSON object: {record!r:.100}")


def _port(value: object) -> int:
    text = str(value)
    if not (text.isascii() and text.isdecimal() and int(text[:6]) < 1 << 16):
        raise ValueError(f"{value!r:.100} is no port")
    return int(text)


# The messages of MetadataServiceV2, in the encoding of protobuf

SERVICES_FIELD: Final = 3
"""The number of the field of `MetadataInfoV2` that is a map."""

PARAMETERS_FIELD: Final = 7
"""The number of the field of `ServiceInfoV2` that is a map."""

KEY, VALUE = 1, 2
"""The fields of an entry of a map."""

SERVICE_FIELDS: Final = {1: "name", 2: "group", 3: "version", 4: "protocol", 5: "port", 6: "path"}
"""The other fields of `ServiceInfoV2`, and their names in ZooKeeper."""


def metadata_request(revision: str) -> bytes:
    """Return a `MetadataRequest`."""
    return text_field(1, revision)


def read_metadata_message(data: bytes) -> ApplicationMetadata:
    """Read a `MetadataInfoV2`.

    Raises:
        ValueError: It is not valid; the message says why.
    """
    services = []
    for number, value in _fields(data):
        if number == SERVICES_FIELD:
            entry = dict(_fields(_message(value)))
            services.append(_service_of_message(_message(entry.get(VALUE, b""))))
    return ApplicationMetadata(tuple(services))


def _service_of_message(data: bytes) -> DubboService:
    record: dict[str, object] = {}
    parameters: dict[str, str] = {}
    for number, value in _fields(data):
        if number in SERVICE_FIELDS:
            record[SERVICE_FIELDS[number]] = value if isinstance(value, int) else value.decode()
        elif number == PARAMETERS_FIELD:
            entry = {key: _message(text).decode() for key, text in _fields(_message(value))}
            parameters[entry.get(KEY, "")] = entry.get(VALUE, "")
    return _service_of(record | {"params": parameters})


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and the value of each field; those of fixed size are unknown ones."""
    for number, wire_type, value in fields(data):
        if wire_type in {WireType.VARINT, WireType.BYTES}:
            yield number, value


def _message(value: int | bytes) -> bytes:
    if isinstance(value, bytes):
        return value
    raise ValueError(f"the number {value} instead of a message")
