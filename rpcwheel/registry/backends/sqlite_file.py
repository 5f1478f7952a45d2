"""A SQLite connection to a registry's file. Opened again if the file was replaced or damaged.

If a file is deleted and created again, SQLite continues with the deleted one and reports no error.
So each use first checks that the path still leads to the file that is open. Errors are those of
`RegistryBackend`.

There is no write-ahead log, because it would be a second file. If that is deleted alone, or stays
beside another database, the data is damaged for good. Without it a write takes 0.2 ms instead of
0.1 (6 processes on 2 cores). Writes do not wait for the disk: a reboot ends all leases, so no
record needs to survive it, and a file that a power failure has damaged is created again.
"""

from __future__ import annotations

import secrets
import sqlite3
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from rpcwheel._engines.paths import expanded
from rpcwheel._engines.sqlite import TOO_MANY_OPEN, FileId, SqliteConnection, lacks_descriptors
from rpcwheel.errors import (
    RegistryClosed,
    RegistryError,
    RegistryRefused,
    RegistryUnavailable,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

APPLICATION_ID: Final = 0x72706377
"""`rpcw`: marks the file of a registry in SQLite's header."""

APPLICATION_ID_BYTES: Final = slice(68, 72)
"""Where the header of a file has it (SQLite's "Database File Format", section 1.3)."""

SCHEMA_VERSION: Final = 1
"""The version of the tables, SQLite's `user_version`."""

TABLES: Final = (
    "CREATE TABLE meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID",
    "CREATE TABLE lease (id TEXT PRIMARY KEY, ends_ns INTEGER, length_ns INTEGER) WITHOUT ROWID",
    """CREATE TABLE instance (
        namespace TEXT, service TEXT, id TEXT, data BLOB, epoch TEXT, lease TEXT,
        PRIMARY KEY (namespace, service, id)
    ) WITHOUT ROWID""",
    "CREATE INDEX of_lease ON instance (lease)",
)
"""`meta` has two rows. `store` is a random id of the file, by which clients notice that it was
created again. `revision` counts the changes of instances. `ends_ns` is on `CLOCK_MONOTONIC`, and
`length_ns` is the duration of the lease. `epoch` is that of the `ServiceInstance`.
"""

FORBIDDEN: Final = (
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_READONLY,
)
"""SQLite's errors if this user has no rights; the first also if there is no directory."""

DAMAGED: Final = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)
"""SQLite's errors if a file is damaged, or is not a database."""


class SqliteFile(SqliteConnection):
    """A registry's file, opened or created at its first use. Any thread, one at a time."""

    def __init__(self, path: str, timeout_s: float) -> None:
        """Open nothing yet.

        Args:
            path: The file; its directory must exist at the first use.
            timeout_s: The longest wait, each: for a lock of another process, for another thread
                that uses this object, and for a file that is replaced while it is opened.

        Raises:
            ConfigurationError: The path begins with `~`, and the user has no home directory.
        """
        super().__init__(expanded(path, f"sqlite://{path}"))
        self._timeout_s = timeout_s
        self.file_id: FileId | None = None
        """Of the file that the connection has open."""
        self._closed = False

    @contextmanager
    def connection(self) -> Iterator[sqlite3.Connection]:
        """Open the file if necessary, and use the connection without a transaction.

        Raises:
            RegistryUnavailable, RegistryRefused: The file can't be used.
        """
        if not self._acquire(self._timeout_s):
            raise RegistryUnavailable(f"{self._path}: still busy with the request before")
        try:
            yield self._open_if_needed()
        except RegistryError:  # which may be an OSError
            raise
        except (sqlite3.Error, OSError) as error:
            raise self._handle(error) from error
        finally:
            self._release()
            if self._closed:
                self._close_unless_used()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Use the connection in one transaction, which an exception rolls back."""
        with self.connection() as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):  # if the disk is full, SQLite has rolled back
                    db.execute("ROLLBACK")
                raise

    def close(self) -> None:
        """Close the connection, or have the running request close it. Idempotent; never waits."""
        self._closed = True
        self._close_unless_used()

    def _close_unless_used(self) -> None:
        if self._acquire(0):
            try:
                self._close()
            finally:
                self._release()

    def _open_if_needed(self) -> sqlite3.Connection:
        if self._closed:
            raise RegistryClosed(f"{self._path} was closed; open another")
        if self._db is not None:
            if self._id_of_file() == self.file_id:
                return self._db
            self._close()
        if self._is_used_by_parent():
            raise RegistryUnavailable(
                f"{self._path} was in use when this process was forked, which must not use it; "
                "fork before a registry is opened, or start another process"
            )
        # The path may be replaced while it is opened, and the inode of an open SQLite connection is
        # not known. So the connection counts only if the path led to the same file before and
        # after it was opened. A file that this creates is therefore opened twice.
        deadline_s = time.monotonic() + self._timeout_s
        attempts = 0
        while True:
            attempts += 1
            before = self.file_id = self._id_of_file()  # `_delete_damaged` reads it
            self._db = db = self._connect()
            self.file_id = self._id_of_file()
            if before is not None and before == self.file_id:
                return db
            self._close()
            if attempts > 1 and time.monotonic() > deadline_s:
                raise RegistryUnavailable(f"{self._path} is replaced or deleted again and again")

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(
            self._path, timeout=self._timeout_s, isolation_level=None, check_same_thread=False
        )
        db.text_factory = _text
        try:
            if not self._is_initialized(db):
                self._make_tables(db)
            db.execute("PRAGMA synchronous = OFF")
        except BaseException:
            db.close()
            raise
        return db

    @staticmethod
    def _is_initialized(db: sqlite3.Connection) -> bool:
        (application,) = db.execute("PRAGMA application_id").fetchone()
        (version,) = db.execute("PRAGMA user_version").fetchone()
        return (application, version) == (APPLICATION_ID, SCHEMA_VERSION)

    def _make_tables(self, db: sqlite3.Connection) -> None:
        db.execute("BEGIN IMMEDIATE")  # the checks and the changes are one transaction
        if not self._is_initialized(db):  # another process may have created them
            self._check_empty(db)
            for table in TABLES:
                db.execute(table)
            rows = (("store", secrets.token_hex(8)), ("revision", 0))
            db.executemany("INSERT INTO meta VALUES (?, ?)", rows)
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        db.execute("COMMIT")

    def _check_empty(self, db: sqlite3.Connection) -> None:
        (application,) = db.execute("PRAGMA application_id").fetchone()
        (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if application == APPLICATION_ID:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            raise RegistryRefused(
                f"{self._path} was made by another version of rpcwheel (its tables are of version "
                f"{version}, not {SCHEMA_VERSION}); update the older rpcwheel: servers and clients "
                "need the same file"
            )
        if application or tables:
            raise RegistryRefused(
                f"{self._path} is a database of something else; give a registry a file of its own"
            )

    def _handle(self, error: sqlite3.Error | OSError) -> RegistryError:
        """Drop an unusable connection, delete a damaged registry, and return the error to raise.

        Under the lock.
        """
        extended_code = getattr(error, "sqlite_errorcode", 0)
        code = extended_code & 0xFF  # the primary code
        if code != sqlite3.SQLITE_BUSY:
            self._close()
        if isinstance(error, OSError):
            kind = RegistryRefused if isinstance(error, PermissionError) else RegistryUnavailable
            return kind(f"{self._path}: {error.strerror}")
        if extended_code == sqlite3.SQLITE_READONLY_DBMOVED:
            return RegistryUnavailable(f"{self._path} was replaced or deleted during this request")
        has_too_many_open = code == sqlite3.SQLITE_CANTOPEN and lacks_descriptors()
        is_directory, parent = self._path.is_dir(), self._path.parent
        if code in FORBIDDEN and parent.is_dir() and not (is_directory or has_too_many_open):
            return RegistryRefused(
                f"{self._path}: this user may not write it, or its directory ({error})"
            )
        if code in DAMAGED and self._is_ours():
            return self._delete_damaged()
        match code:
            case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
                text = f"another process has locked it for more than {self._timeout_s:g} s"
            case sqlite3.SQLITE_FULL:
                text = "the disk is full"
            case sqlite3.SQLITE_NOTADB | sqlite3.SQLITE_CORRUPT:
                text = "it is no registry, or damaged; move it away, and another one is created"
            case sqlite3.SQLITE_CANTOPEN:
                place = "it is a directory" if is_directory else f"there is no directory {parent}"
                text = TOO_MANY_OPEN if has_too_many_open else place
            case _:
                text = f"{error} ({getattr(error, 'sqlite_errorname', type(error).__name__)})"
        return RegistryUnavailable(f"{self._path}: {text}")

    def _delete_damaged(self) -> RegistryError:
        """Delete a damaged file, unless another process has replaced it."""
        try:
            if self._id_of_file() == self.file_id:
                self._path.unlink(missing_ok=True)
        except OSError as error:
            return RegistryRefused(
                f"{self._path}: it is damaged, and this user may not delete it ({error.strerror})"
            )
        return RegistryUnavailable(f"{self._path}: it was damaged, and is created again")

    def _is_ours(self) -> bool:
        """Whether the header of a damaged file says that a registry was in it."""
        with suppress(OSError), self._path.open("rb") as file:
            header = file.read(100)
            return header[APPLICATION_ID_BYTES] == APPLICATION_ID.to_bytes(4, "big")
        return False


def _text(data: bytes) -> str:
    """Decode text of other programs, which may not be UTF-8."""
    return data.decode(errors="replace")
