"""Reads the servers of services at Dubbo's application level.

The way from an interface to its servers has three or four nodes: its mapping names applications,
each of which has a node for each process, which names the revision of its metadata
(`dubbo_application.py`). What is unreadable on this way is a record that says why, so one process
does not hide the others.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

from .dubbo_application import (
    NO_REVISIONS,
    ApplicationInstance,
    ApplicationMetadata,
    applications_in,
    metadata_paths,
    read_instance,
    read_metadata,
    records_of,
)
from .dubbo_url import unreadable_record

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Mapping

    from .dubbo_metadata import MetadataCache, Revision
    from .zookeeper_nodes import NodeReads

CACHED_NODES: Final = 16384
"""Nodes are read again with each change of a service. To make the records of one takes 50 us."""


class ApplicationLevel:
    """The application level of one registry."""

    def __init__(
        self, root: str, services: str, metadata: MetadataCache, *, beside_interfaces: bool
    ) -> None:
        """Read nothing yet.

        Args:
            root: The path of mappings and metadata.
            services: The path of the processes of applications.
            metadata: Known metadata.
            beside_interfaces: Whether processes are left out that are known to be at the interface
                level too.
        """
        self._root = root
        self._services = services
        self._metadata = metadata
        self._beside_interfaces = beside_interfaces

    @property
    def mappings(self) -> str:
        """The path of the mappings of all interfaces."""
        return f"{self._root}/mapping"

    def read(
        self, reads: NodeReads, interfaces: Mapping[str, str], listed: Container[str] = ()
    ) -> tuple[dict[str, dict[str, bytes]], bool]:
        """Read the servers of services, whose Java interfaces are given.

        `listed` has addresses of processes that are known otherwise, and are left out.

        Returns:
            The records by service and id; and whether all metadata are known. False if metadata are
            missing; read again later.
        """
        mappings = reads.data([f"{self.mappings}/{each}" for each in interfaces.values()])
        applications = {
            service: _valid_names(mappings.get(f"{self.mappings}/{interface}", b""))
            for service, interface in interfaces.items()
        }
        processes, problems = self._processes(reads, set().union(*applications.values()), listed)
        is_complete = self._learn(reads, processes)
        records: dict[str, dict[str, bytes]] = {}
        for service, interface in interfaces.items():
            of_service = records[service] = {}
            for application in sorted(applications[service]):
                for name, problem in problems.get(application, {}).items():
                    of_service[name] = unreadable_record(service, name, problem)
                for name, (data, instance) in processes.get(application, {}).items():
                    metadata = self._metadata.get((application, instance.revision))
                    if isinstance(metadata, str):
                        of_service[name] = unreadable_record(service, name, metadata)
                    else:
                        of_service |= _records_of(data, metadata, service, interface)
        return records, is_complete

    def _processes(
        self, reads: NodeReads, applications: Collection[str], listed: Container[str]
    ) -> tuple[dict[str, dict[str, tuple[bytes, ApplicationInstance]]], dict[str, dict[str, str]]]:
        """Return the processes that have services, and why others can't be read; by name."""
        directories = {f"{self._services}/{name}": name for name in sorted(applications)}
        paths = {
            f"{directory}/{name}": (directories[directory], name)
            for directory, names in reads.children(directories).items()
            for name in sorted(names)
            if name not in listed
        }
        processes: dict[str, dict[str, tuple[bytes, ApplicationInstance]]] = {}
        problems: dict[str, dict[str, str]] = {}
        for path, data in reads.data(paths).items():
            application, name = paths[path]
            instance = _instance_or_problem(data)
            if isinstance(instance, str):
                problems.setdefault(application, {})[name] = instance
            elif instance.revision not in NO_REVISIONS and not (
                instance.is_beside_interfaces and self._beside_interfaces
            ):
                processes.setdefault(application, {})[name] = data, instance
        return processes, problems

    def _learn(
        self,
        reads: NodeReads,
        processes: Mapping[str, Mapping[str, tuple[bytes, ApplicationInstance]]],
    ) -> bool:
        """Look up the metadata that are not known; returns whether all are known then."""
        wanted: dict[Revision, list[ApplicationInstance]] = {}
        for application, by_name in processes.items():
            for _, instance in by_name.values():
                revision = application, instance.revision
                if isinstance(self._metadata.get(revision), str):
                    wanted.setdefault(revision, []).append(instance)
        addresses = {
            revision: [each.metadata_address for each in having if each.metadata_address]
            for revision, having in wanted.items()
        }
        stored = {
            revision: metadata_paths(self._root, *revision)
            for revision, having in wanted.items()
            if len(addresses[revision]) < len(having)
        }
        kept_by_processes = [each for each in wanted if each not in stored]
        new = [each for each in kept_by_processes if self._metadata.ask(each, addresses[each])]
        data = reads.data([path for paths in stored.values() for path in paths])
        for revision, paths in stored.items():
            path = next((path for path in paths if path in data), paths[0])
            try:
                self._metadata.put(revision, read_metadata(data[path]))
            except KeyError:
                self._metadata.put(revision, f"it has no metadata at {path}")
            except ValueError as error:
                self._metadata.put(revision, f"its metadata at {path} can't be read: {error}")
        if new:
            self._metadata.wait(new, reads.end_ns)
        return not any(isinstance(self._metadata.get(revision), str) for revision in wanted)


@lru_cache(CACHED_NODES)
def _records_of(
    data: bytes, metadata: ApplicationMetadata, service: str, interface: str
) -> dict[str, bytes]:
    return records_of(read_instance(data), metadata, service, interface)


@lru_cache(CACHED_NODES)
def _instance_or_problem(data: bytes) -> ApplicationInstance | str:
    try:
        return read_instance(data)
    except ValueError as error:
        return str(error)


def _valid_names(mapping: bytes) -> set[str]:
    """Return the applications of a mapping whose names can be those of nodes."""
    names = applications_in(mapping)
    return {name for name in names if name.isprintable() and "/" not in name and name.strip(".")}
