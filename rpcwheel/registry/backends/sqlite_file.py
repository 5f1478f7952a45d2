"""One connection to the file of a registry, that heals: the file may be locked, gone or another.

A file that was deleted and made again leaves who had it open deaf and dumb, without any error. So
before each use it is looked whether the path still leads to what is open. What has gone wrong is
said in the words of `RegistryBackend`.

There is no write-ahead log, because it would be a second file: deleted alone, or left beside
another database, it spoils what all processes see, for ever. The price is 0.2 ms a write instead of
0.1 (6 processes on 2 cores). Nothing waits for the disk: what is in here does not outlive the
machine's start anyway, and should a power failure damage the file, it is made anew.
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
"""Device and number of a file."""

APPLICATION: Final = 0x72706377
"""`rpcw`: how a registry's file is known from others of SQLite's."""

VERSION: Final = 1
"""Of the tables."""

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
"""What SQLite says if this user may not; the first also if there is no directory."""

_inherited: Final[list[sqlite3.Connection]] = []
"""Of the parent process: neither used nor closed in a child, as SQLite forbids both."""


class SqliteFile:
    """A registry's file; opened, and made, when it is first used. Any thread, one at a time."""

    def __init__(self, path: str, timeout_s: float) -> None:
        """Take note.

        Args:
            path: Of the file; its directory must be there when it is used.
            timeout_s: How long a lock of others is waited for.
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
        """Use the connection; each statement sees one state of the file.

        Raises:
            RegistryUnavailable, RegistryRefused: It can't be used.
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
        """As `reading`, in one transaction: all of it happens, or nothing."""
        with self.reading() as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):  # if the disk is full, SQLite has done so already
                    db.execute("ROLLBACK")
                raise

    def changed(self) -> bool:
        """Whether others, or another connection of ours, wrote since the last call; cheap.

        Raises:
            RegistryUnavailable, RegistryRefused: It can't be used.
        """
        with self.reading() as db:
            before, (self._version,) = self._version, db.execute("PRAGMA data_version").fetchone()
            return before != self._version

    def replaced(self) -> bool:
        """Whether the path leads to another file than the one that is open, or to none."""
        if self._db is None:
            return False
        try:
            return self._at_path() != self._place
        except OSError:  # a directory on the way is none any more; who reads is told so
            return True

    def close(self) -> None:
        """Close the connection, for good. Idempotent; waits for who uses it."""
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
            if before is not None and self._place == before:  # else which one is open is unsure
                return self._db
            self._drop()
            if before is not None and time.monotonic() > end:  # else it is we who have made it
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
        db.execute("BEGIN IMMEDIATE")  # or what is looked at changes between two looks
        if not self._has_tables(db):  # else another process was faster
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
        """What has gone wrong, in words; under the lock."""
        if not _is(error, sqlite3.SQLITE_BUSY):
            self._drop()
        if isinstance(error, OSError):
            kind = RegistryRefused if isinstance(error, PermissionError) else RegistryUnavailable
            return kind(f"{self._path}: {error.strerror}")
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        there, place = self._path.is_dir(), self._path.parent
        if code in FORBIDDEN and place.is_dir() and not there:
            return RegistryRefused(
                f"{self._path}: this user may not write it, or its directory ({error})"
            )
        match code:
            case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
                said = f"another process has locked it for more than {self._timeout_s:g} s"
            case sqlite3.SQLITE_FULL:
                said = "the disk is full"
            case sqlite3.SQLITE_NOTADB | sqlite3.SQLITE_CORRUPT if self._is_ours():
                return self._made_anew()
            case sqlite3.SQLITE_NOTADB | sqlite3.SQLITE_CORRUPT:
                said = "it is no registry, or damaged; move it away, and another is made"
            case sqlite3.SQLITE_CANTOPEN:
                said = "it is a directory" if there else f"there is no directory {place}"
            case _:
                said = f"{error} ({getattr(error, 'sqlite_errorname', type(error).__name__)})"
        return RegistryUnavailable(f"{self._path}: {said}")

    def _made_anew(self) -> RegistryError:
        """Delete what is damaged, unless another process was faster."""
        try:
            if self._at_path() == self._place:
                self._path.unlink(missing_ok=True)
        except OSError as error:
            return RegistryRefused(
                f"{self._path}: it is damaged, and this user may not delete it ({error.strerror})"
            )
        return RegistryUnavailable(f"{self._path}: it was damaged, and is made anew")

    def _is_ours(self) -> bool:
        """Whether the header of a damaged file says that a registry was in it."""
        with suppress(OSError), self._path.open("rb") as file:
            return file.read(100)[68:72] == APPLICATION.to_bytes(4, "big")
        return False

    def reset(self) -> None:
        """Start anew, without a connection, in a forked child."""
        self._lock = threading.Lock()
        if self._db is not None:
            _inherited.append(self._db)
            self._db = None


def _text(found: bytes) -> str:
    """What others wrote may be no UTF-8, and must not hide the rest."""
    return found.decode(errors="replace")


def _is(error: Exception, code: int) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == code
