"""One connection to a registry's file, which is opened again if the file was replaced or damaged.

If a file is deleted and created again, SQLite continues with the deleted one and reports no error.
So each use first checks that the path still leads to the file that is open. Errors are those of
`RegistryBackend`.

There is no write-ahead log, because it would be a second file. If that is deleted alone, or stays
beside another database, the data is damaged for good. Without it a write takes 0.2 ms instead of
0.1 (6 processes on 2 cores). Writes do not wait for the disk: no record outlives a reboot, and a
file that a power failure has damaged is created again.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rpcwheel._concurrency.executor import reset_after_fork
from rpcwheel.errors import RegistryClosed, RegistryError, RegistryRefused, RegistryUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SqliteFile"]

Place = tuple[int, int]
"""Device and inode of a file."""

APPLICATION: Final = 0x72706377
"""`rpcw`: marks the file of a registry in SQLite's header."""

VERSION: Final = 1
"""The version of the tables."""

TABLES: Final = (
    "CREATE TABLE meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID",
    "CREATE TABLE lease (id TEXT PRIMARY KEY, ends_ns INTEGER, length_ns INTEGER) WITHOUT ROWID",
    """CREATE TABLE instance (
        namespace TEXT, service TEXT, id TEXT, data BLOB, epoch TEXT, lease TEXT,
        PRIMARY KEY (namespace, service, id)
    ) WITHOUT ROWID""",
    "CREATE INDEX of_lease ON instance (lease)",
)

FORBIDDEN: Final = (
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_READONLY,
)
"""SQLite's errors if this user has no rights; the first also if there is no directory."""

_inherited: Final[list[sqlite3.Connection]] = []
"""Connections of the parent process. SQLite forbids a child to use or to close them."""


class SqliteFile:
    """A registry's file, opened or created at its first use. Any thread, one at a time."""

    def __init__(self, path: str, timeout_s: float) -> None:
        """Open nothing yet.

        Args:
            path: The file; its directory must exist at the first use.
            timeout_s: The longest wait for a lock of another process.
        """
        self._path = Path(path).expanduser().absolute()
        self._timeout_s = timeout_s
        self._db: sqlite3.Connection | None = None
        self._place: Place | None = None
        self._version = 0
        self._closed = False
        self._lock = threading.Lock()
        reset_after_fork(self)

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Use the connection without a transaction.

        Raises:
            RegistryUnavailable, RegistryRefused: The file can't be used.
        """
        if not self._lock.acquire(timeout=self._timeout_s):
            raise RegistryUnavailable(f"{self._path}: still busy with the request before")
        try:
            yield self._opened()
        except RegistryError:
            raise
        except (sqlite3.Error, OSError) as error:
            raise self._failure(error) from error
        finally:
            self._lock.release()

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Use the connection in one transaction, which an exception rolls back."""
        with self.reading() as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):  # if the disk is full, SQLite has rolled back
                    db.execute("ROLLBACK")
                raise

    def changed(self) -> bool:
        """Whether another connection has written since the last call. Takes microseconds.

        Raises:
            RegistryUnavailable, RegistryRefused: The file can't be used.
        """
        with self.reading() as db:
            before, (self._version,) = self._version, db.execute("PRAGMA data_version").fetchone()
            return before != self._version

    def replaced(self) -> bool:
        """Whether the path leads to another file than the open one, or to none."""
        if self._db is None:
            return False
        try:
            return self._at_path() != self._place
        except OSError:  # a parent is no directory any more; a read reports it
            return True

    def close(self) -> None:
        """Close the connection after the running request. Idempotent."""
        with self._lock:
            self._closed = True
            self._drop()

    def _opened(self) -> sqlite3.Connection:
        if self._closed:
            raise RegistryClosed(f"{self._path} was closed; open another")
        if self._db is not None:
            if self._at_path() == self._place:
                return self._db
            self._drop()
        end = time.monotonic() + self._timeout_s
        while True:
            before = self._place = self._at_path()
            self._db = self._connected()
            self._place = self._at_path()
            if before is not None and self._place == before:  # else it is unknown which one is open
                return self._db
            self._drop()
            if before is not None and time.monotonic() > end:  # else this process has created it
                raise RegistryUnavailable(f"{self._path} is replaced again and again")

    def _connected(self) -> sqlite3.Connection:
        db = sqlite3.connect(
            self._path, timeout=self._timeout_s, isolation_level=None, check_same_thread=False
        )
        db.text_factory = _text
        try:
            if not self._has_tables(db):
                self._make_tables(db)
            db.execute("PRAGMA synchronous = OFF")
        except BaseException:
            db.close()
            raise
        return db

    @staticmethod
    def _has_tables(db: sqlite3.Connection) -> bool:
        (application,) = db.execute("PRAGMA application_id").fetchone()
        (version,) = db.execute("PRAGMA user_version").fetchone()
        return (application, version) == (APPLICATION, VERSION)

    def _make_tables(self, db: sqlite3.Connection) -> None:
        db.execute("BEGIN IMMEDIATE")  # the checks and the changes are one transaction
        if not self._has_tables(db):  # else another process has created them
            self._check_empty(db)
            for table in TABLES:
                db.execute(table)
            given = (("store", secrets.token_hex(8)), ("revision", 0))
            db.executemany("INSERT INTO meta VALUES (?, ?)", given)
            db.execute(f"PRAGMA application_id = {APPLICATION}")
            db.execute(f"PRAGMA user_version = {VERSION}")
        db.execute("COMMIT")

    def _check_empty(self, db: sqlite3.Connection) -> None:
        (application,) = db.execute("PRAGMA application_id").fetchone()
        (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if application == APPLICATION:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            raise RegistryRefused(
                f"{self._path} was made by another version of rpcwheel (its tables are of version "
                f"{version}, not {VERSION}); give another file"
            )
        if application or tables:
            raise RegistryRefused(
                f"{self._path} is a database of something else; give a registry a file of its own"
            )

    def _at_path(self) -> Place | None:
        try:
            found = os.stat(self._path)  # noqa: PTH116 - at each poll; a Path takes twice as long
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    def _drop(self) -> None:
        db, self._db, self._version = self._db, None, 0
        if db is not None:
            with suppress(sqlite3.Error):
                db.close()

    def _failure(self, error: sqlite3.Error | OSError) -> RegistryError:
        """Convert an error, and drop the connection if it is of no more use. Under the lock."""
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code != sqlite3.SQLITE_BUSY:
            self._drop()
        if isinstance(error, OSError):
            kind = RegistryRefused if isinstance(error, PermissionError) else RegistryUnavailable
            return kind(f"{self._path}: {error.strerror}")
        is_directory, parent = self._path.is_dir(), self._path.parent
        if code in FORBIDDEN and parent.is_dir() and not is_directory:
            return RegistryRefused(
                f"{self._path}: this user may not write it, or its directory ({error})"
            )
        match code:
            case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
                text = f"another process has locked it for more than {self._timeout_s:g} s"
            case sqlite3.SQLITE_FULL:
                text = "the disk is full"
            case sqlite3.SQLITE_NOTADB | sqlite3.SQLITE_CORRUPT if self._is_ours():
                return self._deleted()
            case sqlite3.SQLITE_NOTADB | sqlite3.SQLITE_CORRUPT:
                text = "it is no registry, or damaged; move it away, and another one is created"
            case sqlite3.SQLITE_CANTOPEN:
                text = "it is a directory" if is_directory else f"there is no directory {parent}"
            case _:
                text = f"{error} ({getattr(error, 'sqlite_errorname', type(error).__name__)})"
        return RegistryUnavailable(f"{self._path}: {text}")

    def _deleted(self) -> RegistryError:
        """Delete a damaged file, unless another process has replaced it."""
        try:
            if self._at_path() == self._place:
                self._path.unlink(missing_ok=True)
        except OSError as error:
            return RegistryRefused(
                f"{self._path}: it is damaged, and this user may not delete it ({error.strerror})"
            )
        return RegistryUnavailable(f"{self._path}: it was damaged, and is created again")

    def _is_ours(self) -> bool:
        """Whether the header of a damaged file says that a registry was in it."""
        with suppress(OSError), self._path.open("rb") as file:
            return file.read(100)[68:72] == APPLICATION.to_bytes(4, "big")
        return False

    def reset(self) -> None:
        """Start without a connection, in a forked child."""
        self._lock = threading.Lock()
        if self._db is not None:
            _inherited.append(self._db)
            self._db = None


def _text(found: bytes) -> str:
    """Decode text of other programs, which may not be UTF-8."""
    return found.decode(errors="replace")
