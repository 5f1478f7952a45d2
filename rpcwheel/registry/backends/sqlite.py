"""`sqlite:///run/shop/registry.db?poll=0.1`: a registry in a file.

For the processes of one machine. It needs no server and no package. The file must not be on a
network file system. `sqlite_file.TABLES` describes the tables.

A lease is a row with its length and the time at which it ends, by the system's monotonic clock,
which all processes share. The clock begins anew at a reboot: if less than the length is left until
the end, the lease runs; if more, it was written before a reboot, and has ended.

Watches check every `poll` seconds whether instances were changed, which takes some microseconds.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Final

from rpcwheel._concurrency.executor import reset_after_fork
from rpcwheel.durations import NEVER, to_ns
from rpcwheel.errors import ConfigurationError, RegistryError, RegistryRefused
from rpcwheel.instance import record_epoch
from rpcwheel.registry.backend import RegistryBackend, View
from rpcwheel.timer.manual import clock_of

from .polling import PollingWatcher
from .sqlite_file import SqliteFile

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from rpcwheel.instance import ServiceInstance
    from rpcwheel.registry.backend import Lost, Settings, Watch, Watcher
    from rpcwheel.registry.url import RegistryUrl

POLL_S: Final = 0.1
"""The default of `poll`. A change is seen after 50 ms on average. Half the interval would take
twice the CPU time of an idle process."""

RUNS: Final = "lease.ends_ns > :now AND lease.ends_ns <= :now + lease.length_ns"
"""The condition for a lease that runs."""

FIND: Final = """
SELECT ends_ns, length_ns, instance.id, data FROM instance JOIN lease ON lease.id = instance.lease
WHERE namespace = ? AND service = ? AND typeof(ends_ns) = 'integer' ORDER BY instance.id
"""
"""Includes the records whose lease has ended, which `_running` removes after the read. A condition
in the query would use a time from before the read. If the read then waits for a lock and the lease
is renewed meanwhile, more than its length would be left, as if it were from before a reboot.

Columns have no fixed type in SQLite, and another program may have written a text."""

FIND_SERVICES: Final = """
SELECT DISTINCT ends_ns, length_ns, service FROM instance JOIN lease ON lease.id = instance.lease
WHERE namespace = ? AND typeof(ends_ns) = 'integer'
"""

FIND_META: Final = "SELECT value FROM meta WHERE name IN ('store', 'revision') ORDER BY name"
END_LEASES: Final = f"DELETE FROM lease WHERE NOT ({RUNS})"  # noqa: S608 - contains no input
DELETE_ORPHANS: Final = "DELETE FROM instance WHERE lease NOT IN (SELECT id FROM lease)"
PUT: Final = """
INSERT OR REPLACE INTO instance (namespace, service, id, data, epoch, lease)
VALUES (?, ?, ?, ?, ?, ?)
"""
DELETE: Final = "DELETE FROM instance WHERE namespace = ? AND service = ? AND id = ? AND epoch = ?"
COUNT_CHANGE: Final = "UPDATE meta SET value = value + 1 WHERE name = 'revision'"
"""The revision shows watches whether a write has changed instances or only renewed a lease."""


class SqliteBackend(RegistryBackend):
    """The backend `sqlite://`. Thread-safe.

    In a forked child it opens the file again, with another lease and without watches.
    """

    path_is_own: ClassVar = True

    def __init__(self, url: RegistryUrl, settings: Settings) -> None:
        super().__init__(url, settings)
        url.check_options("poll")
        if not url.path:
            raise ConfigurationError(f"{url}: the file is missing: sqlite:///run/registry.db")
        poll_s = url.seconds("poll", default=POLL_S)
        self._lease_ns = to_ns(settings.lease_s)
        self._now_ns = clock_of(settings.timer)
        self._file = SqliteFile(url.path, settings.timeout_s)
        # For watches: their reads do not wait while a request waits for another process's lock, and
        # no request waits while they do.
        self._watch_file = SqliteFile(url.path, settings.timeout_s)
        self._polling = PollingWatcher(
            url,
            self._read,
            timer=settings.timer,
            period_s=poll_s,
            retry_s=settings.lease_s / 3,
            full_every=max(1, round(settings.lease_s / poll_s)),
            check=self._check,
        )
        # `store` is the random id that a file gets when it is created.
        self._lease: str | None = None  # the id of this process's lease
        self._lease_store: str | None = None  # the `store` of the file that the lease is in
        self._lost: Lost = "missing"  # why there is no lease
        # Only `_polling` uses these, in one job at a time.
        self._first_end_ns: dict[str, int] = {}  # by watched service: when its first lease ends
        # At the last check for changes: the id of the file, as a restored copy has the same `store`
        # and perhaps the same `revision`; and these two.
        self._checked: list[Any] = []
        self._read_store: str | None = None  # `store` at the last read of a service
        reset_after_fork(self)

    def publish(self, instances: Sequence[ServiceInstance]) -> None:
        self._check_open()
        if not instances:
            return
        with self._file.transaction() as db:
            self._delete_ended_leases(db)
            lease = self._renew_lease(db) or self._new_lease(db)
            rows = (
                (
                    self.url.namespace,
                    instance.service,
                    instance.id,
                    instance.encoded(),
                    instance.epoch,
                    lease,
                )
                for instance in instances
            )
            db.executemany(PUT, rows)
            db.execute(COUNT_CHANGE)
            store = _store(db)
        self._lease, self._lease_store = lease, store

    def withdraw(self, instances: Sequence[ServiceInstance]) -> None:
        self._check_open()
        if not instances:
            return
        rows = (
            (self.url.namespace, instance.service, instance.id, instance.epoch)
            for instance in instances
        )
        with self._file.transaction() as db:
            if db.executemany(DELETE, rows).rowcount:
                db.execute(COUNT_CHANGE)

    def renew(self, instances: Collection[ServiceInstance]) -> Mapping[tuple[str, str], Lost]:
        self._check_open()
        if self._lease is None:
            return dict.fromkeys((instance.key for instance in instances), self._lost)
        with self._file.transaction() as db:
            self._delete_ended_leases(db)
            lease = self._renew_lease(db)
            store = _store(db)
            stored = db.execute(
                "SELECT service, id, data FROM instance WHERE lease = ? AND namespace = ?",
                (lease, self.url.namespace),
            ).fetchall()
        if lease is None:
            self._lease = None
            self._lost = "lease" if store == self._lease_store else "wiped"
            return dict.fromkeys((instance.key for instance in instances), self._lost)
        epochs = {(service, id_): record_epoch(_as_bytes(data)) for service, id_, data in stored}
        return {
            instance.key: "missing"
            for instance in instances
            if epochs.get(instance.key) != instance.epoch
        }

    def lookup(self, service: str) -> View:
        self._check_open()
        return self._read_service(self._file, service)[0]

    def services(self) -> Sequence[str]:
        self._check_open()
        rows = self._find(self._file, FIND_SERVICES, self.url.namespace)
        return sorted({service for _, (service,) in rows})

    def watch(self, service: str, watcher: Watcher) -> Watch:
        self._check_open()
        return self._polling.watch(service, watcher)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._polling.close()
        if self._lease is not None:
            # If this fails, the lease ends by itself.
            with suppress(RegistryError), self._file.transaction() as db:
                db.execute("DELETE FROM lease WHERE id = ?", (self._lease,))
                db.execute(DELETE_ORPHANS)
                db.execute(COUNT_CHANGE)
        self._file.close()
        self._watch_file.close()

    # In a transaction

    def _delete_ended_leases(self, db: sqlite3.Connection) -> None:
        """Delete the leases of all processes that have ended, with their instances."""
        if db.execute(END_LEASES, {"now": self._now_ns()}).rowcount:
            db.execute(DELETE_ORPHANS)
            db.execute(COUNT_CHANGE)

    def _renew_lease(self, db: sqlite3.Connection) -> str | None:
        """Renew the lease of this process and return its id; None if there is none any more."""
        if self._lease is None:
            return None
        ends_ns = self._now_ns() + self._lease_ns
        changed = db.execute(
            "UPDATE lease SET ends_ns = ? WHERE id = ?", (ends_ns, self._lease)
        ).rowcount
        return self._lease if changed else None

    def _new_lease(self, db: sqlite3.Connection) -> str:
        lease = secrets.token_hex(8)
        db.execute(
            "INSERT INTO lease (id, ends_ns, length_ns) VALUES (?, ?, ?)",
            (lease, self._now_ns() + self._lease_ns, self._lease_ns),
        )
        return lease

    # Reading

    def _read_service(self, file: SqliteFile, service: str) -> tuple[View, int]:
        """Return the records of a service, and when the first of their leases ends, in ns."""
        rows = self._find(file, FIND, self.url.namespace, service)
        records = {str(key): _as_bytes(data) for _, (key, data) in rows}
        return View(records), min((ends_ns for ends_ns, _ in rows), default=NEVER)

    def _find(self, file: SqliteFile, query: str, *parameters: str) -> list[tuple[int, list[Any]]]:
        """Return the rows of a query whose leases run, as `_running` does.

        Leases that have ended are deleted before they count as such: while the file can't be
        written, because the disk is full or a process holds its lock, none can be renewed either.
        """
        with file.connection() as db:
            rows = db.execute(query, parameters).fetchall()
            running = self._running(rows)
        if len(running) == len(rows):
            return running
        try:
            with file.transaction() as db:
                self._delete_ended_leases(db)
                return self._running(db.execute(query, parameters).fetchall())
        except RegistryRefused:  # this user may only read the file
            return running

    def _running(self, rows: Iterable[tuple[Any, ...]]) -> list[tuple[int, list[Any]]]:
        """Select the rows of leases that run, as `RUNS` does, but after the read; see `FIND`.

        Args:
            rows: Each begins with the end of a lease and its length.

        Returns:
            For each row the end of its lease, and the columns after the first two.
        """
        now_ns = self._now_ns()
        return [
            (ends_ns, row)
            for ends_ns, length_ns, *row in rows
            if now_ns < ends_ns <= now_ns + length_ns
        ]

    # Watching, on a thread of EXECUTOR

    def _read(self, service: str, _: View | None) -> View:
        """Read a service for its watches, in full each time."""
        view, self._first_end_ns[service] = self._read_service(self._watch_file, service)
        with self._watch_file.connection() as db:
            store = _store(db)
        before, self._read_store = self._read_store, store
        if before not in {None, store}:
            self._polling.report_contact_lost(f"{self.url}: another file is in its place")
        return view

    def _check(self) -> None:
        """Read all again if there may be something new: a change, a lease's end, another file.

        A renewal of a lease is a write too, but changes neither `store` nor `revision`.
        """
        with self._watch_file.connection() as db:
            meta = [self._watch_file.file_id, *db.execute(FIND_META)]
        before, self._checked = self._checked, meta
        for service in self._first_end_ns.keys() - self._polling.services:
            del self._first_end_ns[service]
        now_ns = self._now_ns()
        if before == meta and all(now_ns < ends_ns for ends_ns in self._first_end_ns.values()):
            return
        self._first_end_ns.clear()  # all services are read now, and again later if that fails
        self._polling.request_read()

    def reset(self) -> None:
        """Start without a lease. Called by `reset_after_fork` in a forked child.

        `SqliteFile` opens the file again, and `PollingWatcher` drops its watches.
        """
        self._lease, self._lost = None, "lease"


def _as_bytes(data: object) -> bytes:
    """Return the data of a record, which another program may have written with another type."""
    return data if isinstance(data, bytes) else str(data).encode()


def _store(db: sqlite3.Connection) -> str:
    """Return the `store` of the file; "0" if another program has deleted it."""
    row = db.execute("SELECT value FROM meta WHERE name = 'store'").fetchone()
    return "0" if row is None else str(row[0])
