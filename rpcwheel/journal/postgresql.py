"""`postgresql://user:password@db:5432/shop`: a journal for workers on many machines.

By psycopg 3. `?schema=rpcwheel` is the schema of the tables, which are created by the first
request; the role needs the right to create them, or an owner creates the schema. Other options are
those of libpq, such as `sslmode=verify-full`, or `target_session_attrs=read-write` with several
hosts. PgBouncer must pool sessions.

A call is durable as the server has it: with `synchronous_commit = on`, the default, it survives a
power failure; with `off`, the server may lose the last 0.6 s when it crashes. A standby has it if
`synchronous_standby_names` says so.

Leases and due times are measured by the server's clock. Workers do not wait for each other
(`FOR UPDATE SKIP LOCKED`), except for calls of the same order key. Each method is one transaction,
except `take`, which first frees calls of lost answers and of ended leases. Queue, target and order
key of a call may have 2,600 bytes together, as they are in an index.
"""

from __future__ import annotations

import re
import select
import threading
import time
import zlib
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import quote, urlencode

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import TransactionStatus
from psycopg.waiting import Ready, Wait

from rpcwheel._concurrency.executor import reset_after_fork
from rpcwheel.errors import (
    ConfigurationError,
    JournalError,
    JournalFull,
    JournalOutcomeUnknown,
    JournalRefused,
    JournalUnavailable,
)

from .backend import LostTakes, NewRow, storable, stored_call
from .sql import COLUMNS, Dialect, SqlJournal, Update, where
from .url import LOCATION_OPTIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from .backend import Filter, Route, StoredCall
    from .sql import Key
    from .url import JournalUrl

R = TypeVar("R")

SCHEMA_VERSION: Final = 1
"""The version of the tables, in the table `version`."""

ENCODINGS: Final = {"UTF8", "SQL_ASCII"}
"""The encodings of databases that can store every text."""

TIMEOUT_S: Final = 10.0
"""How long a request waits for the server, and a statement for locks."""

SCAN_TIMEOUT_S: Final = 120.0
"""How long a request that may read the whole table waits for the server."""

MARGIN_S: Final = 1.0
"""How much longer than the server the client waits, as the server's errors say more."""

LOCKS: Final = 1024
"""Order keys share so many advisory locks, as the server has room for few thousand."""

ATTEMPTS: Final = 4
"""How often a transaction is tried that others have made fail."""

HAS_TABLES: Final = "SELECT 1 FROM pg_tables WHERE schemaname = %s AND tablename = 'version'"

AGAIN: Final = (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure)
"""Errors of a transaction that others have made fail."""

NOW: Final = "(extract(epoch FROM clock_timestamp()) * 1000)::bigint"
CLOCK: Final = f"clock AS MATERIALIZED (SELECT {NOW} AS ms)"

TABLES: Final = (
    """CREATE TABLE $call (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        queue text NOT NULL, target text NOT NULL, method text NOT NULL, call_key text NOT NULL,
        body bytea NOT NULL, due_ms bigint NOT NULL, created_ms bigint NOT NULL,
        expires_ms bigint NOT NULL, attempts bigint NOT NULL, error text NOT NULL,
        order_key text, state smallint NOT NULL, worker text, taking bigint,
        reason text NOT NULL DEFAULT ''
    ) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_insert_scale_factor = 0.05)""",
    "CREATE TABLE $worker (name text PRIMARY KEY, ends_ms bigint NOT NULL)",
    """CREATE INDEX ready ON $call (queue, target, due_ms, id) INCLUDE (created_ms)
        WHERE state = 0""",
    "CREATE INDEX blocked ON $call (queue, target, created_ms) WHERE state = 1",
    "CREATE INDEX taken ON $call (worker) INCLUDE (queue, target, created_ms) WHERE state = 2",
    "CREATE INDEX dead ON $call (queue, target, created_ms) WHERE state = 3",
    """CREATE INDEX ordered ON $call (queue, target, order_key, id)
        WHERE order_key IS NOT NULL AND state < 3""",
    f"CREATE TABLE $version AS SELECT {SCHEMA_VERSION} AS version",
)
"""`$` stands for the schema. `ends_ms` is the end of a worker's lease, `taking` the number of the
request that has taken the call. The table changes so often that autovacuum must not wait for a
fifth of it."""

_NEW: Final = "queue, target, method, call_key, body, delay_ms, max_age_ms, attempts, error"
_ARRAYS: Final = (
    "%(queue)b::text[], %(target)b::text[], %(method)b::text[], %(call_key)b::text[], "
    "%(body)b::bytea[], %(delay_ms)b::bigint[], %(max_age_ms)b::bigint[], "
    "%(attempts)b::bigint[], %(error)b::text[]"
)
_INSERT: Final = f"""WITH {CLOCK}
    INSERT INTO $call (queue, target, method, call_key, body, due_ms, created_ms, expires_ms,
        attempts, error, order_key, state)
    SELECT queue, target, method, call_key, body, ms + delay_ms, ms, ms + max_age_ms, attempts,
        error, """

APPEND: Final = f"""{_INSERT} NULL, 0
    FROM clock, unnest({_ARRAYS}) WITH ORDINALITY AS new({_NEW}, place)
    ORDER BY place RETURNING id"""

APPEND_ORDERED: Final = f"""{_INSERT} order_key, CASE
        WHEN order_key IS NULL THEN 0
        WHEN row_number() OVER (PARTITION BY queue, target, order_key ORDER BY place) > 1 THEN 1
        WHEN EXISTS (SELECT 1 FROM $call earlier WHERE earlier.queue = new.queue
            AND earlier.target = new.target AND earlier.order_key = new.order_key
            AND earlier.order_key IS NOT NULL AND earlier.state < 3) THEN 1
        ELSE 0 END
    FROM clock, unnest({_ARRAYS}, %(order_key)b::text[])
        WITH ORDINALITY AS new({_NEW}, order_key, place)
    ORDER BY place RETURNING id"""

_ENDED: Final = f"FROM $worker WHERE ends_ms <= {NOW} AND name <> %(worker)s"
HAS_ENDED: Final = f"SELECT 1 {_ENDED} LIMIT 1"
END: Final = f"SELECT name {_ENDED} FOR UPDATE SKIP LOCKED"

TAKE: Final = f"""WITH {CLOCK}, chosen AS MATERIALIZED (
        SELECT found.id
        FROM clock, unnest(%(queues)b::text[], %(targets)b::text[], %(limits)b::bigint[])
            AS route(queue, target, most),
            LATERAL (SELECT id FROM $call
                WHERE state = 0 AND queue = route.queue AND target = route.target
                    AND due_ms <= clock.ms + %(within)s
                ORDER BY due_ms, id LIMIT route.most FOR UPDATE SKIP LOCKED) AS found
        WHERE %(always)s OR NOT EXISTS (
            SELECT 1 FROM $worker WHERE ends_ms <= clock.ms AND name <> %(worker)s)
    ), lease AS (
        INSERT INTO $worker SELECT %(worker)s, ms + %(lease)s FROM clock
        WHERE EXISTS (SELECT 1 FROM chosen)
        ON CONFLICT (name) DO UPDATE SET ends_ms = excluded.ends_ms
    )
    UPDATE $call SET state = 2, worker = %(worker)s, taking = %(taking)s FROM clock
    WHERE id IN (SELECT id FROM chosen) RETURNING clock.ms, {COLUMNS}"""

REPORT: Final = f"""WITH {CLOCK}, deleted AS (
        DELETE FROM $call WHERE id = ANY(%(delivered)b::bigint[]) AND state = 2
            AND worker = %(worker)s
        RETURNING id, queue, target, order_key
    ), updated AS (
        UPDATE $call SET state = result.state, due_ms = coalesce(ms + result.delay_ms, due_ms),
            attempts = result.attempts, error = result.error, reason = result.reason,
            worker = NULL, taking = NULL
        FROM clock, unnest(%(id)b::bigint[], %(state)b::smallint[], %(delay_ms)b::bigint[],
            %(attempts)b::bigint[], %(error)b::text[], %(reason)b::text[])
            AS result(number, state, delay_ms, attempts, error, reason)
        WHERE id = result.number AND $call.state = 2 AND worker = %(worker)s
        RETURNING id, queue, target, order_key
    )
    SELECT * FROM deleted UNION ALL SELECT * FROM updated"""

_FREE: Final = """WITH freed AS (
        UPDATE $call SET state = 0, worker = NULL, taking = NULL WHERE state = 2 AND {}
        RETURNING queue, target, order_key
    )
    SELECT DISTINCT queue, target, order_key FROM freed WHERE order_key IS NOT NULL"""
FREE_WORKERS: Final = _FREE.format("worker = ANY(%s::text[])")
FREE_LOST: Final = _FREE.format("worker = %s AND taking = ANY(%s::bigint[])")

LOCK: Final = "SELECT pg_advisory_xact_lock(%s, bucket) FROM unnest(%s::int[]) AS bucket"
_KEYS: Final = """unnest(%(queues)b::text[], %(targets)b::text[], %(keys)b::text[])
    AS given(queue, target, order_key)"""
_OF_KEY: Final = """$call.queue = given.queue AND $call.target = given.target
    AND $call.order_key = given.order_key AND $call.order_key IS NOT NULL AND state < 3"""
LOCK_READY: Final = f"""SELECT 1 FROM {_KEYS} JOIN $call ON {_OF_KEY} AND state = 0
    FOR UPDATE OF call"""
"""Waits for a `take` that is about to take such a call."""
SETTLE: Final = f"""WITH key AS MATERIALIZED (
        SELECT *, (SELECT min(id) FROM $call WHERE {_OF_KEY}) AS first FROM {_KEYS}
        WHERE NOT EXISTS (SELECT 1 FROM $call WHERE {_OF_KEY} AND state = 2)
    )
    UPDATE $call SET state = 1 - state FROM key AS given
    WHERE {_OF_KEY} AND (id = first AND state = 1 OR id <> first AND state = 0)"""
"""Makes the first call of each key ready and the others blocked, unless one is taken."""

RETRY_WAITING: Final = f"UPDATE $call SET due_ms = {NOW} WHERE state < 2 AND "
RETRY_DEAD: Final = f"""WITH {CLOCK}, retried AS (
        UPDATE $call SET created_ms = ms, due_ms = ms, expires_ms = ms + expires_ms - created_ms,
            attempts = 0, reason = '', state = CASE WHEN order_key IS NULL THEN 0 ELSE 1 END
        FROM clock WHERE state = 3 AND {{}} RETURNING queue, target, order_key
    )
    SELECT queue, target, order_key, count(*) FROM retried GROUP BY queue, target, order_key"""
DELETE: Final = """WITH deleted AS (
        DELETE FROM $call WHERE {} RETURNING queue, target, order_key
    )
    SELECT queue, target, order_key, count(*) FROM deleted GROUP BY queue, target, order_key"""

ROUTES: Final = """WITH RECURSIVE step AS (
        (SELECT queue, target FROM $call WHERE state = 0 ORDER BY queue, target LIMIT 1)
        UNION ALL
        SELECT next.queue, next.target FROM step, LATERAL (
            SELECT queue, target FROM $call
            WHERE state = 0 AND (queue, target) > (step.queue, step.target)
            ORDER BY queue, target LIMIT 1) AS next
    )
    SELECT queue, target FROM step"""
"""Skips from one to the next in the index of ready calls."""

DIALECT: Final = Dialect(
    mark="%s",
    now=NOW,
    like="LIKE",
    pattern=lambda pattern: (
        re.sub(r"([\\%_])", r"\\\1", pattern).replace("*", "%").replace("?", "_")
    ),
    contains="strpos({}, %s) > 0",
    among="= ANY(%s::bigint[])",
    numbers=list,
)

REFUSED: Final = re.compile(
    r"authentication failed|no pg_hba\.conf entry|pg_hba\.conf rejects|no password supplied"
    r"|permission denied|(role|database) .* does not exist|certificate"
)
"""What libpq says if the server refuses a connection; it does not tell the SQLSTATE."""

ABOUT_LOGIN: Final = "the user, the password, the rights, and the name of the database"
ABOUT_TLS: Final = "the options sslmode, sslrootcert, sslcert and sslkey"
"""What to look at if the server refuses, or is refused by libpq."""

LOST: Final = re.compile(r"$|08|57P")
"""The start of the SQLSTATE of errors that do not tell whether the statement was executed: the
connection was lost, or the server is ending."""

NO_FUNCTION: Final = "42883"
"""The SQLSTATE of a statement whose function does not exist, or not for columns of this type."""

FOREIGN: Final = frozenset({"42703", NO_FUNCTION, "42P07"})
"""The SQLSTATE of statements that have found other columns, or tables of the same names."""

_inherited: Final[list[object]] = []
"""Connections of the parent process, which a child must not close."""


class PostgresqlJournal(SqlJournal):
    """A journal in a schema of a PostgreSQL database. Thread-safe; has three connections.

    One is for workers, one for counts, and one for other requests that may read the whole table. A
    call is stored after a count, which must not wait for a request that takes long.
    """

    _dialect = DIALECT

    def __init__(self, url: JournalUrl) -> None:
        super().__init__(url)
        options = dict(url.options)
        schema = options.pop("schema", LOCATION_OPTIONS["schema"])
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,62}", schema):
            raise ConfigurationError(
                f"{url}: schema must be a name of letters, digits and underscores, not {schema!r}"
            )
        query = urlencode(options, quote_via=quote)
        # Not by `urlunsplit`, which leaves the slashes out if there is no host, as for a socket.
        conninfo = f"{url.scheme}://{url.parts.netloc}{url.parts.path}?{query}"
        try:
            parameters = conninfo_to_dict(conninfo)
        except psycopg.Error as error:
            problem = str(error).strip()
            if "query parameter" not in problem:  # it may have the password
                problem = "it is not a URL that libpq accepts"
            raise ConfigurationError(
                f"{url}: {problem}; a journal is postgresql://user:password@host:5432/database, "
                "and has the options lease, timeout, schema, and those of libpq"
            ) from None
        defaults: dict[str, Any] = {
            "connect_timeout": round(TIMEOUT_S),
            "tcp_user_timeout": round(TIMEOUT_S * 1e3),
            "application_name": "rpcwheel",
        }
        # With that of a database in SQL_ASCII, texts would be bytes.
        encoding = {"client_encoding": "utf8"}
        self._parameters = defaults | parameters | encoding
        self._schema = schema
        self._lock_class = zlib.crc32(f"rpcwheel.{schema}".encode()) - (1 << 31)
        self._lost = LostTakes()
        self._worker = _PostgresqlConnection(lambda: self._connect(TIMEOUT_S))
        self._counter = _PostgresqlConnection(lambda: self._connect(SCAN_TIMEOUT_S))
        self._scanner = _PostgresqlConnection(lambda: self._connect(SCAN_TIMEOUT_S))

    # --- Calls ---

    def _insert(self, rows: list[NewRow]) -> list[int]:
        """Store calls by one statement, without waiting for others unless they have order keys."""
        parameters = _arrays(NewRow, rows)
        keys = [(row.queue, row.target, row.order_key) for row in rows if row.order_key is not None]
        if not keys:
            with self._use(self._worker, storing=True) as db:
                return [row[0] for row in self._rows(db, APPEND, parameters)]

        def work(db: _Bounded) -> list[int]:
            self._lock(db, keys)
            return [row[0] for row in self._rows(db, APPEND_ORDERED, parameters)]

        return self._transaction(self._worker, work, storing=True)

    def take(
        self, worker: str, lease_s: float, routes: Sequence[Route], within_s: float
    ) -> list[StoredCall]:
        """Give ready calls to a worker, by one statement.

        If it takes none, another one looks whether a lease has ended, whose calls come first.
        """
        self._free_lost(worker)
        limits: dict[tuple[str, str], int] = {}
        for route in routes:
            place = storable(route.queue), storable(route.target)
            limits[place] = limits.get(place, 0) + max(0, route.limit)
        taking = self._lost.new_number()
        parameters: dict[str, Any] = {
            "queues": [queue for queue, _ in limits],
            "targets": [target for _, target in limits],
            "limits": list(limits.values()),
            "within": round(within_s * 1e3),
            "lease": round(lease_s * 1e3),
            "worker": worker,
            "taking": taking,
            "always": False,
        }
        try:
            with self._use(self._worker) as db:
                rows = self._rows(db, TAKE, parameters) if any(limits.values()) else []
                has_ended = not rows and bool(self._rows(db, HAS_ENDED, parameters))
            if has_ended:
                self._transaction(self._worker, lambda db: self._end_workers(db, worker))
                with self._use(self._worker) as db:
                    parameters["always"] = True
                    rows = self._rows(db, TAKE, parameters) if any(limits.values()) else []
        except BaseException:
            self._lost.add(worker, taking)
            raise
        order = {place: number for number, place in enumerate(limits)}
        calls = [stored_call(row[1:], row[0]) for row in rows]
        return sorted(calls, key=lambda call: (order[call.queue, call.target], call.due_s, call.id))

    def renew(self, worker: str, lease_s: float) -> bool:
        with self._use(self._worker) as db:
            text = f"UPDATE $worker SET ends_ms = {NOW} + %s WHERE name = %s"
            return self._execute(db, text, (round(lease_s * 1e3), worker)).rowcount > 0

    def _store(self, worker: str, delivered: list[int], updates: list[Update]) -> list[int]:
        """Store results by one statement, and settle by others if calls have order keys."""
        parameters = {"worker": worker, "delivered": delivered, **_arrays(Update, updates)}

        def work(db: _Bounded) -> list[int]:
            rows = self._rows(db, REPORT, parameters)
            self._settle(db, [row[1:] for row in rows])
            return [row[0] for row in rows]

        return self._transaction(self._worker, work)

    def release(self, worker: str) -> None:
        self._transaction(self._worker, lambda db: self._end(db, [worker]))

    # --- Operators ---

    def routes(self) -> list[tuple[str, str]]:
        with self._use(self._scanner) as db:
            return [(queue, target) for queue, target in self._rows(db, ROUTES)]

    def _count(self, text: str) -> list[Any]:
        with self._use(self._counter) as db:
            return self._rows(db, text)

    def _scan(self, text: str, parameters: Sequence[Any] = ()) -> list[Any]:
        with self._use(self._scanner) as db:
            return self._rows(db, text, parameters)

    def retry(self, chosen: Filter) -> int:
        condition, parameters = where(chosen, DIALECT)

        def work(db: _Bounded) -> int:
            waiting = self._execute(db, RETRY_WAITING + condition, parameters).rowcount
            return waiting + self._change_and_settle(db, RETRY_DEAD.format(condition), parameters)

        return self._transaction(self._scanner, work)

    def delete(self, chosen: Filter) -> int:
        condition, parameters = where(chosen, DIALECT)
        text = DELETE.format(condition)
        return self._transaction(
            self._scanner, lambda db: self._change_and_settle(db, text, parameters)
        )

    def _change_and_settle(self, db: _Bounded, text: str, parameters: Sequence[Any]) -> int:
        """Change calls, by a statement that returns how many of each order key; return the sum."""
        rows = self._rows(db, text, parameters)
        self._settle(db, [row[:3] for row in rows])
        return int(sum(row[3] for row in rows))

    def close(self) -> None:
        self._closed = True
        self._scanner.close()
        self._counter.close()
        self._worker.close()

    # --- Workers whose lease has ended, and order keys ---

    def _end_workers(self, db: _Bounded, worker: str) -> None:
        self._end(db, [row[0] for row in self._rows(db, END, {"worker": worker})])

    def _end(self, db: _Bounded, names: list[str]) -> None:
        if names:
            keys = self._rows(db, FREE_WORKERS, (names,))
            self._execute(db, "DELETE FROM $worker WHERE name = ANY(%s::text[])", (names,))
            self._settle(db, keys)

    def _free_lost(self, worker: str) -> None:
        """Make calls ready that were taken by requests whose answers were lost."""
        if numbers := self._lost.of(worker):
            self._transaction(
                self._worker,
                lambda db: self._settle(db, self._rows(db, FREE_LOST, (worker, numbers))),
            )

    def _lock(self, db: _Bounded, keys: Sequence[Key]) -> None:
        """Let no other transaction change the order of these keys."""
        buckets = {zlib.crc32("\0".join(key).encode()) % LOCKS for key in keys}
        self._execute(db, LOCK, (self._lock_class, sorted(buckets)))

    def _settle(self, db: _Bounded, rows: Sequence[Sequence[Any]]) -> None:
        """Settle the order keys of rows with queue, target and order key, which may be NULL."""
        unique_keys: list[Key] = sorted({(*row,) for row in rows if row[2] is not None})
        if not unique_keys:
            return
        columns = dict(
            zip(
                ("queues", "targets", "keys"),
                map(list, zip(*unique_keys, strict=True)),
                strict=True,
            )
        )
        self._lock(db, unique_keys)
        # Two statements: the second one must see what the locks have waited for.
        self._execute(db, LOCK_READY, columns)
        self._execute(db, SETTLE, columns)

    # --- Connections ---

    def _execute(self, db: _Bounded, text: str, parameters: Any = None) -> psycopg.Cursor[Any]:
        return db.execute(text.replace("$", f'"{self._schema}".'), parameters, binary=True)

    def _rows(self, db: _Bounded, text: str, parameters: Any = None) -> list[Any]:
        return self._execute(db, text, parameters).fetchall()

    def _transaction(
        self,
        connection: _PostgresqlConnection,
        work: Callable[[_Bounded], R],
        *,
        storing: bool = False,
    ) -> R:
        """Run a transaction, and again if others have made it fail."""
        left = ATTEMPTS
        while True:
            left -= 1
            try:
                with self._use(connection, storing=storing) as db, db.transaction():
                    return work(db)
            except JournalUnavailable as error:
                if left == 0 or not isinstance(error.__cause__, AGAIN):
                    raise

    @contextmanager
    def _use(
        self, connection: _PostgresqlConnection, *, storing: bool = False
    ) -> Iterator[_Bounded]:
        connected = False
        try:
            with connection.use() as db:
                connected = True
                yield db
        except psycopg.Error as error:
            journal_error = self._error(error)
            is_lost = isinstance(error, psycopg.OperationalError) and LOST.match(
                error.sqlstate or ""
            )
            if storing and connected and is_lost:
                journal_error = JournalOutcomeUnknown(
                    f"{journal_error}; it is not known whether the call was stored"
                )
            raise journal_error from error

    def _connect(self, timeout_s: float) -> _Bounded:
        if self._closed:
            raise JournalUnavailable(f"{self.url} was closed")
        db: _Bounded = _Bounded.connect(autocommit=True, **self._parameters)
        try:
            db.timeout_s = timeout_s + MARGIN_S
            self._prepare(db, timeout_s)
        except BaseException:
            db.close()
            raise
        return db

    def _prepare(self, db: _Bounded, timeout_s: float) -> None:
        """Set what the statements need, and create the tables if there are none.

        Statements that follow a lock must see what it has waited for, whatever level of isolation
        is the default of the role or the database.
        """
        encoding = db.info.parameter_status("server_encoding")
        if encoding and encoding not in ENCODINGS:  # a proxy may not tell it
            raise JournalRefused(
                f"{self.url}: the database has the encoding {encoding}, which cannot store every "
                "text of an error; create one with ENCODING 'UTF8'"
            )
        limit = f"{round(timeout_s * 1e3)}ms"
        db.execute(
            """SELECT set_config('statement_timeout', %(limit)s, false),
                set_config('idle_in_transaction_session_timeout', %(limit)s, false),
                set_config('default_transaction_isolation', 'read committed', false)""",
            {"limit": limit},
        )
        if (version := self._version(db)) is None:
            if not self.creates:
                raise JournalRefused(
                    f"{self.url}: there is no journal in the schema {self._schema}; the first "
                    "program that uses it creates it"
                )
            with db.transaction():
                db.execute("SELECT pg_advisory_xact_lock(%s, %s)", (self._lock_class, LOCKS))
                if self._version(db) is None:
                    self._create(db)
            version = self._version(db)
        if version != SCHEMA_VERSION:
            raise JournalRefused(
                f"{self.url}: the tables in the schema {self._schema} were made by a newer "
                f"rpcwheel (version {version} of the tables, this one knows {SCHEMA_VERSION}): "
                "update rpcwheel"
            )

    def _version(self, db: _Bounded) -> int | None:
        # Not by to_regclass: it may not see what was created while the lock was waited for.
        if not self._rows(db, HAS_TABLES, (self._schema,)):
            return None
        version = self._rows(db, "SELECT max(version) FROM $version")[0][0]
        if not isinstance(version, int):
            raise JournalRefused(f"{self.url}: {self._foreign()}")
        return version

    def _foreign(self, alternative: str = "") -> str:
        return (
            f"the schema {self._schema} has other tables than those of a journal{alternative}; "
            "give the journal a schema of its own, such as ?schema=rpcwheel"
        )

    def _create(self, db: _Bounded) -> None:
        if not self._rows(db, "SELECT 1 FROM pg_namespace WHERE nspname = %s", (self._schema,)):
            db.execute(f'CREATE SCHEMA "{self._schema}"')
        for statement in TABLES:
            self._execute(db, statement)

    def _error(self, error: psycopg.Error) -> JournalError:
        state = error.sqlstate or ""
        message = error.diag.message_primary or str(error).strip() or type(error).__name__
        words = re.sub('"[^"]*"', "", message)  # a name may be any word
        message = f"{self.url}: {message}"
        if state == "53100":
            return JournalFull(f"{message} (the server's disk is full)")
        if state.startswith("28") or state == "42501" or (not state and REFUSED.search(words)):
            is_tls = "certificate" in words
            return JournalRefused(f"{message}; look at {ABOUT_TLS if is_tls else ABOUT_LOGIN}")
        if state in FOREIGN:
            alternative = ", or the server lacks a function" if state == NO_FUNCTION else ""
            return JournalRefused(f"{message}; {self._foreign(alternative)}")
        if state[:2] in {"22", "23", "54"}:
            return JournalRefused(f"{message}; the journal cannot store such a value")
        if isinstance(error, psycopg.DataError):
            return JournalRefused(f"{message}; the journal cannot store such a value")
        return JournalUnavailable(message)


class _Bounded(psycopg.Connection[Any]):
    """A connection whose requests fail if the server does not answer in time.

    A server that is stopped, or a network that drops packets, does not end a request otherwise:
    psycopg has no timeout (3.2; `test_a_frozen_server_is_unavailable` tells).
    """

    timeout_s = TIMEOUT_S

    def is_lost(self) -> bool:
        """Whether the connection has ended, also if the server has ended it while it was idle."""
        if self.closed:
            return True
        poll = select.poll()
        try:
            poll.register(self.pgconn.socket, select.POLLIN)
            while poll.poll(0):  # the reason comes before the end
                self.pgconn.consume_input()
        except psycopg.OperationalError:
            return True
        return self.closed

    def wait(self, gen: Generator[Any, Any, R], *args: Any, **kwargs: Any) -> R:
        """Do the steps of a request; each tells for what of the socket it waits."""
        end_s = time.monotonic() + self.timeout_s
        socket, poll = self.pgconn.socket, select.poll()
        try:
            awaited = next(gen)
            while True:
                poll.register(
                    socket,
                    (select.POLLIN if awaited & Wait.R else 0)
                    | (select.POLLOUT if awaited & Wait.W else 0),
                )
                polled = poll.poll(max(0.0, end_s - time.monotonic()) * 1e3)
                if not polled:
                    raise psycopg.OperationalError("the server does not answer")
                events = polled[0][1]  # an error is for both
                ready = (Ready.R if events & ~select.POLLOUT else 0) | (
                    Ready.W if events & ~select.POLLIN else 0
                )
                awaited = gen.send(Ready(awaited & ready))
        except StopIteration as stop:
            result: R = stop.value
            return result


class _PostgresqlConnection:
    """A connection that is opened when it is used, and again in a child or after errors."""

    def __init__(self, connect: Callable[[], _Bounded]) -> None:
        self._connect = connect
        self._db: _Bounded | None = None
        self._lock = threading.Lock()
        reset_after_fork(self)

    def reset(self) -> None:
        """Leave the parent's connection alone, in a forked child."""
        self._lock = threading.Lock()
        if self._db is not None:
            _inherited.append(self._db)
            self._db = None

    @contextmanager
    def use(self) -> Iterator[_Bounded]:
        with self._lock:
            if self._db is not None and self._db.is_lost():
                self._close()
            if self._db is None:
                self._db = self._connect()
            try:
                yield self._db
            except (psycopg.OperationalError, psycopg.InterfaceError, psycopg.ProgrammingError):
                self._close()  # it may be lost, read-only, or its tables may be gone
                raise
            except BaseException:
                if self._db.info.transaction_status != TransactionStatus.IDLE:
                    self._close()
                raise

    def close(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            with suppress(psycopg.Error):
                db.close()


def _arrays(kind: type[NewRow | Update], rows: Sequence[NewRow | Update]) -> dict[str, Any]:
    """Return the columns of rows, as arrays by their names."""
    return {name: [row[at] for row in rows] for at, name in enumerate(kind._fields)}
