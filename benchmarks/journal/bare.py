"""The same statements as those of the journals, in the bare drivers: the cost of the engines.

Values are prepared before, results are not made into objects, and errors are not handled.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks.journal.subjects import LEASE_S, TARGET
from rpcwheel.journal import CallState, NewCall
from rpcwheel.journal import sqlite as sqlite_journal
from rpcwheel.journal.sql import NewRow, Update

WORKER = "worker"


class Bare(Protocol):
    """An engine without a journal."""

    def prepare(self, calls: Sequence[NewCall]) -> Any:
        """Make the parameters of `append`."""

    def append(self, prepared: Any) -> None:
        """Store calls."""

    def deliver(self, limit: int) -> int:
        """Take calls, report all as delivered, and return their number."""

    def close(self) -> None:
        """Close the connection."""


class BareSqlite:
    """The module sqlite3."""

    def __init__(self, path: Path, durability: str) -> None:
        self._lock = threading.Lock()
        self._db = sqlite3.connect(path, isolation_level=None, timeout=60, check_same_thread=False)
        self._db.execute("PRAGMA auto_vacuum = INCREMENTAL")
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute(f"PRAGMA synchronous = {'FULL' if durability == 'power' else 'NORMAL'}")
        self._db.execute("BEGIN IMMEDIATE")
        if not self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            for statement in sqlite_journal.TABLES:
                self._db.execute(statement)
        self._db.execute("COMMIT")

    def prepare(self, calls: Sequence[NewCall]) -> Any:
        now_ms = int(time.time() * 1e3)
        state = {"state": int(CallState.READY), "now": now_ms}
        return [NewRow.of(call)._asdict() | state for call in calls]

    def append(self, prepared: Any) -> None:
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            if len(prepared) == 1:
                self._db.execute(sqlite_journal.APPEND, prepared[0])
            else:
                self._db.executemany(sqlite_journal.APPEND, prepared)
                self._db.execute("SELECT last_insert_rowid()").fetchone()
            self._db.execute("COMMIT")

    def deliver(self, limit: int) -> int:
        db, now_ms = self._db, int(time.time() * 1e3)
        db.execute("BEGIN IMMEDIATE")
        rows = db.execute(sqlite_journal.TAKE, ("bench", TARGET, now_ms, limit)).fetchall()
        taken = [(WORKER, row[0]) for row in rows]
        db.executemany("UPDATE call SET state = 2, worker = ? WHERE id = ?", taken)
        ends_ms = now_ms + round(LEASE_S * 1e3)
        db.execute("INSERT OR REPLACE INTO worker VALUES (?, ?)", (WORKER, ends_ms))
        db.execute("COMMIT")
        db.execute("BEGIN IMMEDIATE")
        db.executemany(sqlite_journal.DELETE, [(number, WORKER) for _, number in taken])
        db.execute("COMMIT")
        return len(rows)

    def close(self) -> None:
        self._db.close()


class BarePostgresql:
    """psycopg, in the tables of a journal."""

    def __init__(self, url: str, schema: str) -> None:
        import psycopg

        from rpcwheel.journal import postgresql

        self._arrays = postgresql._arrays
        self._db = psycopg.connect(url, autocommit=True)
        self._append, self._take, self._report = (
            text.replace("$", f"{schema}.")
            for text in (postgresql.APPEND, postgresql.TAKE, postgresql.REPORT)
        )

    def prepare(self, calls: Sequence[NewCall]) -> Any:
        return self._arrays(NewRow, [NewRow.of(call) for call in calls])

    def append(self, prepared: Any) -> None:
        self._db.execute(self._append, prepared, binary=True).fetchall()

    def deliver(self, limit: int) -> int:
        given: dict[str, Any] = {
            "queues": ["bench"],
            "targets": [TARGET],
            "limits": [limit],
            "within": 0,
            "lease": round(LEASE_S * 1e3),
            "worker": WORKER,
            "taking": 1,
            "always": True,
        }
        rows = self._db.execute(self._take, given, binary=True).fetchall()
        delivered = [row[1] for row in rows]
        reported = {"worker": WORKER, "delivered": delivered, **self._arrays(Update, [])}
        with self._db.transaction():
            self._db.execute(self._report, reported, binary=True).fetchall()
        return len(rows)

    def close(self) -> None:
        self._db.close()


class BareRedis:
    """redis-py, with the scripts of the journal."""

    def __init__(self, url: str, prefix: str) -> None:
        import redis

        from rpcwheel.journal import redis_scripts

        self._client = redis.Redis.from_url(url)
        self._prefix = prefix
        self._append, self._take, self._report = map(
            self._client.register_script,
            (redis_scripts.APPEND, redis_scripts.TAKE, redis_scripts.REPORT),
        )

    def prepare(self, calls: Sequence[NewCall]) -> Any:
        given: list[Any] = [self._prefix]
        for call in calls:
            given += (call.queue, call.target, call.method, call.key, call.body, 0, 3_600_000, 1)
            given += (call.error, 0, "")
        return given

    def append(self, prepared: Any) -> None:
        self._append(args=prepared)

    def deliver(self, limit: int) -> int:
        lease_ms = round(LEASE_S * 1e3)
        given = [self._prefix, WORKER, lease_ms, 0, 1, "bench", TARGET, limit]
        (_, rows, _), _ = self._take(args=given)
        results = [part for row in rows for part in (row[0], "delivered", 0, 0, "", "")]
        self._report(args=[self._prefix, WORKER, *results])
        return len(rows)

    def close(self) -> None:
        self._client.close()
