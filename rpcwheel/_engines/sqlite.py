"""`SqliteConnection`: a SQLite connection that is closed before a fork.

SQLite keeps the locks of its connections by the inode of the file, in the memory of the process. A
forked child inherits that memory, but not the locks of the kernel. If a connection of the parent
stays open, connections that the child opens to the same file rely on it (SQLite 3.40):

* If the parent was in a transaction, the child can never write. SQLite takes the inherited lock for
  that of another thread.
* SQLite has only the first of several read locks of a process confirmed by the kernel. If the
  parent was reading, the child reads without a lock while other processes write.
* With a write-ahead log, each open connection has a read lock. The child has none, so the parent
  deletes the log when it closes the file, and what the child stores after that is lost.

So the thread that forks waits for the connections of the other threads, and closes all of them.
Parent and child open the file again. SQLite requires that no connection is open during a fork
("How To Corrupt An SQLite Database File", section 2.6).

A connection cannot be closed if its request takes longer than `FORK_TIMEOUT_S`, or if the thread
that forks is in a request itself, in a signal handler or finalizer. Nothing is closed if C code
forks without Python's handlers (uWSGI). Then the child must not use the file if it was locked.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
import time
import weakref
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, ClassVar, Final

if TYPE_CHECKING:
    from pathlib import Path

FORK_TIMEOUT_S: Final = 10.0
"""How long a fork waits for requests. They wait for other processes for 5 s, or as configured."""

FileId = tuple[int, int]
"""Device and inode of a file."""

TOO_MANY_OPEN: Final = "too many files are open (ulimit -n)"
"""What an error means if `lacks_descriptors`."""

DESCRIPTORS: Final = 3
"""How many files SQLite opens: that of the database, and at most two beside it."""


def lacks_descriptors() -> bool:
    """Whether files can't be opened, as the process or the system has too many open.

    SQLite reports this as it does missing rights: SQLITE_CANTOPEN.
    """
    with ExitStack() as files:
        try:
            for _ in range(DESCRIPTORS):  # SQLite has closed the files that it could open
                files.enter_context(open(os.devnull, "rb"))  # noqa: PTH123 - no path of users
        except OSError as error:
            return error.errno in {errno.EMFILE, errno.ENFILE}
    return False


class SqliteConnection:
    """Owner of one connection, for one thread at a time. A subclass opens `_db`."""

    _locks_when_idle: ClassVar = False
    """Whether the connection locks the file when idle: with a write-ahead log."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._db: sqlite3.Connection | None = None
        self._lock = threading.Lock()
        self._thread = 0  # that has the lock
        with _FORK.lock:
            _FORK.connections.add(self)

    def close(self) -> None:
        """Close the connection after the running request."""
        self._acquire()
        try:
            self._close()
        finally:
            self._release()

    def _acquire(self, timeout_s: float = -1) -> bool:
        """Keep out other threads, and forks; False if others do so for `timeout_s`."""
        if not self._lock.acquire(timeout=timeout_s):
            return False
        self._thread = threading.get_ident()
        return True

    def _release(self) -> None:
        self._thread = 0
        self._lock.release()

    def _close(self) -> None:
        """Close the connection if it is open. The caller has the lock."""
        db, self._db = self._db, None
        if db is not None:
            with suppress(sqlite3.Error):
                db.close()

    def _is_used_by_parent(self) -> bool:
        """Return whether the file was in use at the fork of this process, which must not use it."""
        if _FORK.files:
            with suppress(OSError):
                return self._id_of_file() in _FORK.files
        return False

    def _id_of_file(self) -> FileId | None:
        """Identify the file to which the path leads now; None if there is none."""
        try:
            status = os.stat(self._path)  # noqa: PTH116 - at each use; a Path takes twice as long
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    def close_before_fork(self, timeout_s: float) -> bool:
        """Close the connection and keep the lock; False if it is in use."""
        if self._thread == threading.get_ident() or not self._acquire(max(0.0, timeout_s)):
            return False
        self._close()
        return True

    def release_after_fork(self) -> None:
        """Release the lock of `close_before_fork`."""
        self._release()

    def abandon(self) -> None:
        """Leave the parent's connection alone, in a forked child."""
        db, self._db = self._db, None
        if self._lock.locked() or (db is not None and self._locks_when_idle):
            with suppress(OSError):
                file = self._id_of_file()
                _FORK.files.update([] if file is None else [file])
        if db is not None:
            _keep_open(db)
        if self._thread != threading.get_ident():
            self._lock = threading.Lock()
        elif db is not None:  # this thread is in a transaction of the parent, which goes on
            db.set_authorizer(lambda *_: sqlite3.SQLITE_DENY)


def _keep_open(db: sqlite3.Connection) -> None:
    """Prevent that a connection is closed in the child, also when the interpreter ends."""
    with suppress(ImportError):
        import ctypes

        ctypes.pythonapi.Py_IncRef(ctypes.py_object(db))


class _Fork:
    """All connections, and those that are closed during the present fork."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # held during a fork: no connection is added then
        self.connections: weakref.WeakSet[SqliteConnection] = weakref.WeakSet()
        self.closed: list[SqliteConnection] = []
        self.files: set[FileId] = set()
        """Which the parent was using, in a forked child."""

    def before(self) -> None:
        self.lock.acquire()
        end_s = time.monotonic() + FORK_TIMEOUT_S
        for connection in list(self.connections):
            if connection.close_before_fork(end_s - time.monotonic()):
                self.closed.append(connection)

    def after_in_parent(self) -> None:
        while self.closed:
            self.closed.pop().release_after_fork()
        self.lock.release()

    def after_in_child(self) -> None:
        closed, self.closed = self.closed, []
        for connection in list(self.connections):
            if connection in closed:
                connection.release_after_fork()
            else:
                connection.abandon()
        self.lock = threading.RLock()


_FORK: Final = _Fork()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_FORK.before,
        after_in_parent=_FORK.after_in_parent,
        after_in_child=_FORK.after_in_child,
    )
