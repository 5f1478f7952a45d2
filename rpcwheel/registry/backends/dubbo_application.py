"""The records of Dubbo's application level, which lists processes and not services.

=========================================  ========================================================
node                                       data
=========================================  ========================================================
`/services/{application}/{host}:{port}`    ephemeral: one server, and the revision of its metadata
`/{root}/metadata/{application}/{rev.}`    the services of the servers that have this revision
`/{root}/mapping/{interface}`              the applications that have the interface
=========================================  ========================================================

Consumers read them from the last to the first. Dubbo's consumers prefer this level as soon as one
provider of a service is there: a server that is published at the interface level only gets no
calls then. Services whose path is not the interface are not found at this level, between programs
in Java neither (Dubbo 3.3.6); consumers then use the interface level.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Final

from rpcwheel.instance import joined

from .dubbo_url import EPOCH, TRIPLE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

INSTANCE_CLASS: Final = "org.apache.dubbo.registry.zookeeper.ZookeeperInstance"
"""The class of the payload, by which Curator's JSON reader in Java knows it."""

SEPARATOR: Final = ","

OF_PROCESS: Final = frozenset({EPOCH, "timestamp"})
"""Parameters that are left out of metadata, as nobody deletes those of an earlier process."""


def metadata_of(
    application: str, host: str, port: int, services: Sequence[tuple[str, str, Mapping[str, str]]]
) -> tuple[str, bytes]:
    """Return the revision and the metadata of the services of one server.

    Args:
        application: The name of the application.
        host: The host of the server, so that no two servers share a revision.
        port: The port.
        services: The interface, the path and the parameters of each.
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
    text = json.dumps([application, host, described], sort_keys=True)
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
        "dubbo.metadata.storage-type": "remote",
        "timestamp": timestamp,
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
    names = [name for name in mapping.decode(errors="replace").split(SEPARATOR) if name]
    if application in names:
        return None
    return SEPARATOR.join([*names, application]).encode()
