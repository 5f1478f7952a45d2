"""`sqlite:///var/lib/shop/failback.db`: a file as the journal, for the processes of one machine.

The file has a write-ahead log. With `?durability=process`, the default, a stored call survives the
death of the process, also by SIGKILL. With `?durability=power` it also survives a power failure, if
the disk keeps what it has confirmed: each transaction waits for an fsync.

The file must be on a local disk, as SQLite's locks and shared memory do not work over a network.
It is created with mode 0600, because requests may be confidential. Only features of SQLite 3.31 are
used. If the file is deleted or replaced, with the files `-wal` and `-shm` beside it, the next
request opens the new one.

Times are those of the wall clock, because they must hold over a reboot. The file has the latest
time at which a transaction began. If the clock is behind it, it was set back, and the next
transaction moves the due times and the ends of leases back too. If it is set forward, they come
early.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import sqlite3
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from rpcwheel._engines.paths import expanded
from rpcwheel._engines.sqlite import TOO_MANY_OPEN, FileId, SqliteConnection, lacks_descriptors
from rpcwheel.errors import (
    ConfigurationError,
    JournalError,
    JournalFull,
    JournalRefused,
    JournalUnavailable,
)

from .backend import CallState, storable, stored_call
from .sql import COLUMNS, LARGEST_ID, Dialect, SqlJournal, where

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from .backend import Filter, NewRow, Route, StoredCall
    from .sql import Key, Update
    from .url import JournalUrl

APPLICATION_ID: Final = 0x7270636A
"""`rpcj`: marks the file of a journal in SQLite's header."""

SCHEMA_VERSION: Final = 1
"""The version of the tables, SQLite's `user_version`."""

BUSY_SHARE: Final = 0.9
"""For how much of the `timeout` a request waits for another process's transaction: the callers, who
wait for the whole of it, get its error."""

POLL_S: Final = 0.005
"""The time between two attempts of a request for which SQLite itself does not wait."""

ROOM_TIMEOUT_MS: Final = 100
"""How long a request waits for readers before it makes room on a full disk."""

TABLES: Final = (
    """CREATE TABLE call (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        queue TEXT NOT NULL, target TEXT NOT NULL, method TEXT NOT NULL, call_key TEXT NOT NULL,
        body BLOB NOT NULL, due_ms INTEGER NOT NULL, created_ms INTEGER NOT NULL,
        expires_ms INTEGER NOT NULL, attempts INTEGER NOT NULL, error TEXT NOT NULL,
        order_key TEXT, state INTEGER NOT NULL, worker TEXT, reason TEXT NOT NULL DEFAULT ''
    )""",
    "CREATE TABLE worker (name TEXT PRIMARY KEY, ends_ms INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE clock (latest_ms INTEGER NOT NULL)",
    "INSERT INTO clock VALUES (0)",
    "CREATE INDEX ready ON call (queue, target, due_ms, id, created_ms, state) WHERE state = 0",
    "CREATE INDEX blocked ON call (queue, target, created_ms, state) WHERE state = 1",
    "CREATE INDEX taken ON call (worker, queue, target, created_ms, state) WHERE state = 2",
    "CREATE INDEX dead ON call (queue, target, created_ms, state) WHERE state = 3",
    "CREATE INDEX ordered ON call (queue, target, order_key, state) WHERE order_key IS NOT NULL",
)
"""`ends_ms` is the end of a worker's lease, `latest_ms` about the latest time of a transaction. The
indexes of the states have all columns that `depths` reads: it is five times as fast as with reads
of the table."""

APPEND: Final = """INSERT INTO call (queue, target, method, call_key, body, due_ms, created_ms,
    expires_ms, attempts, error, order_key, state)
    VALUES (:queue, :target, :method, :call_key, :body, :delay_ms + :now, :now,
    :max_age_ms + :now, :attempts, :error, :order_key, :state)"""
TAKE: Final = f"""SELECT {COLUMNS} FROM call
    WHERE state = 0 AND queue = ? AND target = ? AND due_ms <= ? ORDER BY due_ms, id LIMIT ?"""
DELETE: Final = "DELETE FROM call WHERE id = ? AND state = 2 AND worker = ?"
UPDATE: Final = """UPDATE call SET state = :state, due_ms = coalesce(:delay_ms + :now, due_ms),
    attempts = :attempts, error = :error, reason = :reason, worker = NULL
    WHERE id = :id AND state = 2 AND worker = :worker"""
"""The parameters are those of an `Update`, the worker and the time."""
KEY: Final = "queue = ? AND target = ? AND order_key = ?"

DIALECT: Final = Dialect(
    mark="?",
    now="(SELECT now_ms())",  # once for each statement
    like="GLOB",
    pattern=lambda pattern: pattern.replace("[", "[[]"),
    contains="instr({}, ?) > 0",
    among="IN (SELECT value FROM json_each(?))",
    numbers=json.dumps,
)

CHUNK: Final = 2000
"""Calls that `retry` and `delete` change in one transaction."""

CLOCK_MS: Final = 1000
"""How exact `latest_ms` is. A clock that is set back by less is not noticed."""

VACUUM_PAGES: Final = 500
"""Free pages that are given back to the file system after a report, if most pages are free."""

FORBIDDEN: Final = frozenset({"SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_READONLY"})
CREATED_BY: Final = "the first program that uses it creates it"

WRONG_PLACE: Final = (
    PermissionError,
    FileNotFoundError,
    NotADirectoryError,
    IsADirectoryError,
)
INVALID: Final = frozenset({"SQLITE_CONSTRAINT", "SQLITE_TOOBIG", "SQLITE_MISMATCH"})
DAMAGED: Final = frozenset({"SQLITE_NOTADB", "SQLITE_CORRUPT"})

Method = TypeVar("Method", bound="Callable[..., Any]")


def _with_room(method: Method) -> Method:
    """Repeat a request that has found the disk full, if a checkpoint has made room."""

    @functools.wraps(method)
    def request(self: SqliteJournal, *args: Any, **options: Any) -> Any:
        if self._was_full:  # before the log takes the space that is free again
            self._was_full = not self._make_room()
        try:
            return method(self, *args, **options)
        except JournalFull:
            self._was_full = not self._make_room()
            if self._was_full:
                raise
        return method(self, *args, **options)

    return cast("Method", request)


class SqliteJournal(SqlJournal):
    """A journal in one file. Thread-safe; has a connection for writing and one for reading."""

    is_file = True
    clock: Callable[[], float]
    _dialect = DIALECT

    def __init__(self, url: JournalUrl) -> None:
        url.check_options("durability")
        durability = url.choice("durability", "process", "power")
        if not url.path.strip("/.~") or url.path.endswith("/") or "\0" in url.path:
            raise ConfigurationError(f"{url}: give the file: sqlite:///var/lib/shop/failback.db")
        if url.parts.netloc not in {"", ".", "..", "~"}:
            raise ConfigurationError(
                f"{url}: SQLite takes a file of this machine, after three slashes: "
                "sqlite:///var/lib/shop/failback.db; one beside the program: sqlite://./failback.db"
            )
        super().__init__(url)
        self._path = expanded(url.path, url)
        self._synchronous = "FULL" if durability == "power" else "NORMAL"
        self.clock = time.time
        self._busy_s = BUSY_SHARE * url.timeout_s
        self._latest_ms = 0
        self._was_full = False
        self._writer = _SqliteJournalConnection(self._path, self._connect, self._error)
        self._reader = _SqliteJournalConnection(self._path, self._connect, self._error)

    @_with_room
    def _insert(self, rows: list[NewRow]) -> list[int]:
        with self._transaction() as (db, now_ms):
            if len(rows) > 1 and all(row.order_key is None for row in rows):
                db.executemany(APPEND, [_new_call(row, CallState.READY, now_ms) for row in rows])
                (last,) = db.execute("SELECT last_insert_rowid()").fetchone()
                return list(range(last - len(rows) + 1, last + 1))
            return [self._insert_row(db, row, now_ms) for row in rows]

    @staticmethod
    def _insert_row(db: sqlite3.Connection, row: NewRow, now_ms: int) -> int:
        state = CallState.READY
        if row.order_key is not None:
            key = row.queue, row.target, row.order_key
            earlier = f"SELECT 1 FROM call WHERE {KEY} AND state < 3 LIMIT 1"
            state = CallState.BLOCKED if db.execute(earlier, key).fetchone() else state
        return db.execute(APPEND, _new_call(row, state, now_ms)).lastrowid or 0

    @_with_room
    def take(
        self, worker: str, lease_s: float, routes: Sequence[Route], within_s: float
    ) -> list[StoredCall]:
        """Give ready calls to a worker. Begins a transaction only if there are any."""
        now_ms = self._now_ms()
        with self._writer as db:  # the other may be busy with a long scan
            has_work = (
                _ended_workers(db, now_ms, worker)
                or any(
                    _ready(db, route, now_ms, within_s, 1) for route in routes if route.limit > 0
                )
                or now_ms < _latest_ms(db) - CLOCK_MS
            )
        if not has_work:
            return []
        with self._transaction() as (db, now_ms):
            for name in _ended_workers(db, now_ms, worker):
                _end_worker(db, name)
            rows: list[Any] = []
            for route in routes:
                ready = _ready(db, route, now_ms, within_s)
                db.executemany(
                    "UPDATE call SET state = 2, worker = ? WHERE id = ?",
                    [(worker, row[0]) for row in ready],
                )
                rows += ready
            if rows:
                db.execute(
                    "INSERT OR REPLACE INTO worker VALUES (?, ?)",
                    (worker, now_ms + round(lease_s * 1e3)),
                )
        return [stored_call((*row[:12], CallState.TAKEN, row[13]), now_ms) for row in rows]

    @_with_room
    def renew(self, worker: str, lease_s: float) -> bool:
        with self._transaction() as (db, now_ms):
            changed = db.execute(
                "UPDATE worker SET ends_ms = ? WHERE name = ?",
                (now_ms + round(lease_s * 1e3), worker),
            )
            return changed.rowcount > 0

    @_with_room
    def _store(self, worker: str, delivered: list[int], updates: list[Update]) -> list[int]:
        with self._transaction() as (db, now_ms):
            keys = _order_keys(db, [*delivered, *(update.id for update in updates)])
            stored = [
                number for number in delivered if db.execute(DELETE, (number, worker)).rowcount
            ]
            stored += [
                update.id
                for update in updates
                if db.execute(UPDATE, update._asdict() | {"worker": worker, "now": now_ms}).rowcount
            ]
            _settle(db, keys)
        self._shrink()
        return stored

    @_with_room
    def release(self, worker: str) -> None:
        with self._transaction() as (db, _):
            _end_worker(db, worker)

    def routes(self) -> list[tuple[str, str]]:
        """List queues and targets. Skips from one to the next in the index of ready calls."""
        routes: list[tuple[str, str]] = []
        step = """SELECT queue, target FROM call WHERE state = 0 AND (queue, target) > (?, ?)
            ORDER BY queue, target LIMIT 1"""
        with self._reader as db:
            row = db.execute(
                "SELECT queue, target FROM call WHERE state = 0 ORDER BY queue, target LIMIT 1"
            ).fetchone()
            while row is not None:
                routes.append(row)
                row = db.execute(step, row).fetchone()
        return routes

    def _scan(self, text: str, parameters: Sequence[Any] = ()) -> list[Any]:
        with self._reader as db:
            return db.execute(text.replace("$", ""), parameters).fetchall()

    def retry(self, chosen: Filter) -> int:
        return self._change(chosen, "state <> 2", _make_due)

    def delete(self, chosen: Filter) -> int:
        return self._change(chosen, "1 = 1", _delete)

    def _change(
        self,
        chosen: Filter,
        condition: str,
        change: Callable[[sqlite3.Connection, list[int], int], None],
    ) -> int:
        """Change calls in transactions of a few milliseconds, between which others can write."""
        after, changed = LARGEST_ID, 0
        selected, parameters = where(chosen, DIALECT)
        # From the last id, as a change may make a later call of the order key READY or BLOCKED.
        statement = f"""SELECT id FROM call WHERE id <= ? AND {condition} AND {selected}
            ORDER BY id DESC LIMIT {CHUNK}"""
        while True:
            ids = self._change_some(statement, (after, *parameters), change)
            changed += len(ids)
            if len(ids) < CHUNK:
                return changed
            after = ids[-1] - 1

    @_with_room
    def _change_some(
        self,
        statement: str,
        parameters: Sequence[Any],
        change: Callable[[sqlite3.Connection, list[int], int], None],
    ) -> list[int]:
        """Change the calls that a statement selects in one transaction; return their ids."""
        with self._transaction() as (db, now_ms):
            ids = [row[0] for row in db.execute(statement, parameters)]
            keys = _order_keys(db, ids)
            change(db, ids, now_ms)
            _settle(db, keys)
        return ids

    def close(self) -> None:
        self._closed = True
        self._reader.close()
        self._writer.close()

    # --- Connections ---

    def _now_ms(self) -> int:
        return int(self.clock() * 1e3)

    @contextmanager
    def _transaction(self) -> Iterator[tuple[sqlite3.Connection, int]]:
        """Use the connection for writing in one transaction, which an exception rolls back."""
        with self._writer as db:
            try:
                db.execute("BEGIN IMMEDIATE")
                yield db, self._begin(db)
                db.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):  # if the disk is full, SQLite has perhaps done so
                    db.execute("ROLLBACK")
                raise

    def _begin(self, db: sqlite3.Connection) -> int:
        """Return the time of a transaction. If the clock was set back, correct the file first."""
        now_ms = self._now_ms()
        if self._latest_ms <= now_ms < self._latest_ms + CLOCK_MS:
            return now_ms
        self._latest_ms = 0  # read it again: this transaction may be rolled back
        latest_ms = _latest_ms(db)
        if latest_ms <= now_ms < latest_ms + CLOCK_MS:
            self._latest_ms = latest_ms
            return now_ms
        back_ms = latest_ms - now_ms
        if back_ms > CLOCK_MS:
            db.execute("UPDATE call SET due_ms = due_ms - ? WHERE state < 3", (back_ms,))
            db.execute("UPDATE worker SET ends_ms = ends_ms - ?", (back_ms,))
        db.execute("UPDATE clock SET latest_ms = ?", (now_ms,))
        return now_ms

    def _make_room(self) -> bool:
        """Copy the log into the database, and give its space back. False: that failed.

        SQLite copies it when it has 1,000 pages, which is more than the disk may have.
        """
        with suppress(sqlite3.Error, JournalError), self._writer as db:
            db.execute(f"PRAGMA busy_timeout = {ROOM_TIMEOUT_MS}")  # readers prevent it
            try:
                (busy, _, _) = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            finally:
                db.execute(f"PRAGMA busy_timeout = {self._busy_s * 1e3:.0f}")
            return not busy
        return False

    def _shrink(self) -> None:
        """Return free pages to the file system if there are many."""
        with suppress(sqlite3.Error, JournalError), self._writer as db:
            (free,) = db.execute("PRAGMA freelist_count").fetchone()
            if free > VACUUM_PAGES:
                (pages,) = db.execute("PRAGMA page_count").fetchone()
                if free > pages // 2:
                    # `execute` would return one page only: it does one step (CPython 3.11).
                    db.executescript(f"PRAGMA incremental_vacuum({VACUUM_PAGES})")

    def _connect(self) -> sqlite3.Connection:
        """Open the file. Create it if it does not exist, unless `creates` is False."""
        if self._closed:
            raise JournalUnavailable(f"{self.url} was closed")
        if not self.creates and not self._path.exists():
            if not self._path.parent.is_dir():
                raise JournalRefused(f"{self._path}: there is no such directory; create it")
            raise JournalRefused(f"{self._path}: there is no such file; {CREATED_BY}")
        with suppress(FileExistsError):  # with O_EXCL, which does not follow a symbolic link
            file = os.path.realpath(self._path)
            os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        db = sqlite3.connect(
            self._path,
            timeout=self._busy_s,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            self._prepare(db)
        except BaseException:
            db.close()
            raise
        return db

    def _prepare(self, db: sqlite3.Connection) -> None:
        db.execute("BEGIN")  # otherwise another process may create the tables between the two
        (application,) = db.execute("PRAGMA application_id").fetchone()
        (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        (version,) = db.execute("PRAGMA user_version").fetchone()
        db.execute("COMMIT")
        if tables and application != APPLICATION_ID:
            raise JournalRefused(
                f"{self._path} is another program's database; give the journal a file of its own"
            )
        if not tables and not self.creates:
            raise JournalRefused(f"{self._path} is empty, and no journal yet; {CREATED_BY}")
        if not tables:
            db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # before the first table
        self._switch_to_wal(db)
        db.create_function("now_ms", 0, self._now_ms)
        db.execute(f"PRAGMA synchronous = {self._synchronous}")
        if version == 0:
            version = self._create(db)
        if version > SCHEMA_VERSION:
            raise JournalRefused(
                f"{self._path} was made by a newer rpcwheel (version {version} of the tables, this "
                f"one knows {SCHEMA_VERSION}): update rpcwheel"
            )

    @staticmethod
    def _create(db: sqlite3.Connection) -> int:
        """Create the tables, if no other process has done it meanwhile; return their version."""
        db.execute("BEGIN IMMEDIATE")
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version == 0:
            for statement in TABLES:
                db.execute(statement)
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        db.execute("COMMIT")
        return int(version) or SCHEMA_VERSION

    def _switch_to_wal(self, db: sqlite3.Connection) -> None:
        """Use a write-ahead log. SQLite waits for no other connection that does the same."""
        end = time.monotonic() + self._busy_s
        while True:
            try:
                db.execute("PRAGMA journal_mode = WAL")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                    raise
                time.sleep(POLL_S)
            else:
                return

    def _error(self, error: Exception) -> JournalError:
        name = getattr(error, "sqlite_errorname", "")
        kind = "_".join(name.split("_")[:2])  # without the extension: SQLITE_IOERR_WRITE
        number = getattr(error, "errno", None)
        if (
            kind == "SQLITE_FULL"
            or number in {errno.ENOSPC, errno.EDQUOT}
            or (kind == "SQLITE_IOERR" and self._is_disk_full())
        ):
            return JournalFull(f"{self._path}: the disk is full")
        if kind in DAMAGED:
            return JournalRefused(
                f"{self._path} is damaged ({error}): stop its processes, move it away with its "
                "-wal and -shm files, and recover what it has by `sqlite3 FILE .recover`"
            )
        if kind in INVALID or (not name and isinstance(error, sqlite3.Error)):
            return JournalRefused(f"{self._path} cannot store a value: {error}")
        if kind == "SQLITE_CANTOPEN" and lacks_descriptors():
            return JournalUnavailable(f"{self._path}: {TOO_MANY_OPEN}")
        if kind in FORBIDDEN or isinstance(error, WRONG_PLACE):
            return JournalRefused(
                f"{self._path} cannot be opened for writing ({error}): create its directory, and "
                "let this user write the directory, the file, and its -wal and -shm files"
            )
        message = f"{self._path}: {error}"
        if kind == "SQLITE_BUSY":
            seconds = f"{self._busy_s:g} s"
            message = f"{self._path}: other processes have kept it busy for {seconds}"
        elif kind == "SQLITE_IOERR":
            message += (
                f" ({name}); look at the disk, its quota, and the limit of the size of files "
                "(ulimit -f)"
            )
        return JournalUnavailable(message)

    def _is_disk_full(self) -> bool:
        try:
            disk = os.statvfs(self._path.parent)
        except OSError:
            return False
        return disk.f_bavail * disk.f_frsize < 1 << 16


class _SqliteJournalConnection(SqliteConnection):
    """A connection that is opened when it is used, again after a fork or for another file.

    Errors of SQLite and of the system are raised as those of journals.
    """

    _locks_when_idle = True

    def __init__(
        self,
        path: Path,
        connect: Callable[[], sqlite3.Connection],
        translate: Callable[[Exception], JournalError],
    ) -> None:
        super().__init__(path)
        self._connect = connect
        self._translate = translate
        self._file: FileId | None = None

    def __enter__(self) -> sqlite3.Connection:
        """Keep other threads out, and return the connection. By hand: a generator takes 3 us."""
        self._acquire()
        try:
            if self._db is not None and not self._is_same_file():
                self._close()
            return self._db or self._open()
        except BaseException as error:
            self.__exit__(None, error, None)
            raise

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._release()
        is_own = isinstance(error, JournalError)  # which may be an OSError
        if isinstance(error, (sqlite3.Error, OSError)) and not is_own:
            raise self._translate(error) from error

    def _open(self) -> sqlite3.Connection:
        if self._is_used_by_parent():
            raise JournalUnavailable(
                f"{self._path} was in use when this process was forked, which must not use it; "
                "fork before the first call that fails, or start another process"
            )
        self._db = self._connect()
        (path,) = self._db.execute("SELECT file FROM pragma_database_list WHERE name = 'main'")
        status = os.stat(*path)  # `_path` may be a link, which leads elsewhere meanwhile
        self._file = status.st_dev, status.st_ino
        return self._db

    def _is_same_file(self) -> bool:
        try:
            return self._file is not None and self._id_of_file() == self._file
        except OSError:
            return False


def _ready(
    db: sqlite3.Connection, route: Route, now_ms: int, within_s: float, limit: int | None = None
) -> list[Any]:
    due_ms = now_ms + round(within_s * 1e3)
    most = route.limit if limit is None else limit
    place = storable(route.queue), storable(route.target)
    return db.execute(TAKE, (*place, due_ms, max(0, most))).fetchall()


def _latest_ms(db: sqlite3.Connection) -> int:
    (latest_ms,) = db.execute("SELECT latest_ms FROM clock").fetchone()
    return int(latest_ms)


def _make_due(db: sqlite3.Connection, ids: list[int], now_ms: int) -> None:
    db.executemany(
        """UPDATE call SET expires_ms = ? + expires_ms - created_ms, created_ms = ?, attempts = 0,
            reason = '', state = CASE WHEN order_key IS NULL THEN 0 ELSE 1 END
            WHERE id = ? AND state = 3""",
        [(now_ms, now_ms, number) for number in ids],
    )
    db.executemany("UPDATE call SET due_ms = ? WHERE id = ?", [(now_ms, number) for number in ids])


def _delete(db: sqlite3.Connection, ids: list[int], _: int) -> None:
    db.executemany("DELETE FROM call WHERE id = ?", [(number,) for number in ids])


def _ended_workers(db: sqlite3.Connection, now_ms: int, worker: str) -> list[str]:
    """Return the workers whose lease has ended, except `worker`, which asks."""
    ended = "SELECT name FROM worker WHERE ends_ms <= ? AND name <> ?"
    return [name for (name,) in db.execute(ended, (now_ms, worker))]


def _end_worker(db: sqlite3.Connection, name: str) -> None:
    keys = db.execute(
        """SELECT DISTINCT queue, target, order_key FROM call
            WHERE state = 2 AND worker = ? AND order_key IS NOT NULL""",
        (name,),
    ).fetchall()
    db.execute("UPDATE call SET state = 0, worker = NULL WHERE state = 2 AND worker = ?", (name,))
    db.execute("DELETE FROM worker WHERE name = ?", (name,))
    _settle(db, keys)


def _order_keys(db: sqlite3.Connection, ids: list[int]) -> list[Key]:
    """The queue, target and order key of calls that have one."""
    keys: dict[Key, None] = {}
    for number in ids:
        row = db.execute(
            """SELECT queue, target, order_key FROM call
                WHERE id = ? AND order_key IS NOT NULL""",
            (number,),
        ).fetchone()
        if row is not None:
            keys[row] = None
    return list(keys)


def _new_call(row: NewRow, state: CallState, now_ms: int) -> dict[str, object]:
    """Return the parameters of `APPEND`."""
    return row._asdict() | {"state": int(state), "now": now_ms}


def _settle(db: sqlite3.Connection, keys: list[Key]) -> None:
    """Make the first call of each order key ready and the others blocked, unless one is taken."""
    for key in keys:
        taken, ready, blocked = (
            db.execute(
                f"SELECT min(id) FROM call WHERE {KEY} AND state = ?", (*key, state)
            ).fetchone()[0]
            for state in (CallState.TAKEN, CallState.READY, CallState.BLOCKED)
        )
        if taken is not None or blocked is None or (ready is not None and ready < blocked):
            continue
        db.execute("UPDATE call SET state = 0 WHERE id = ?", (blocked,))
        if ready is not None:  # the other was a dead letter
            db.execute("UPDATE call SET state = 1 WHERE id = ?", (ready,))
