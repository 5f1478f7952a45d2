"""One engine in this process: `python -m benchmarks.journal.child SCALE ENGINE`.

Prints a line of JSON.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks._child import print_rows
from benchmarks._clock import Cost, Stopwatch
from benchmarks._engines import engine as engine_class
from benchmarks.calls.scale import Row
from benchmarks.calls.turns import take_turns
from benchmarks.journal.bare import Bare, BarePostgresql, BareRedis, BareSqlite
from benchmarks.journal.subjects import (
    BARE,
    BATCH,
    BATCH_SIZE,
    BODY,
    LEASE_S,
    ONE,
    OURS,
    SCALES,
    SINGLE,
    TARGET,
    WORKER,
    WORKERS,
    Scale,
)
from rpcwheel.journal import JournalBackend, NewCall, open_journal_backend
from rpcwheel.journal.backend import Delivered, Filter, Route


class Ours:
    """A journal, with the methods of `Bare`."""

    def __init__(self, journal: JournalBackend) -> None:
        self._journal = journal
        self._worker = f"worker-{id(self)}"

    def prepare(self, calls: list[NewCall]) -> list[NewCall]:
        return calls

    def append(self, prepared: list[NewCall]) -> None:
        self._journal.append(prepared)

    def deliver(self, limit: int) -> int:
        routes = [Route("bench", TARGET, limit)]
        taken = self._journal.take(self._worker, LEASE_S, routes, 0.0)
        self._journal.report(self._worker, [Delivered(call.id) for call in taken])
        return len(taken)

    def close(self) -> None:
        self._journal.close()


Subject = Bare | Ours
Opened = dict[str, Callable[[], Any]]


def measure(scale: Scale, engine: str) -> list[Row]:
    """A row of each subject for each measurement."""
    rows: list[Row] = []
    with running(engine) as opened, ExitStack() as stack:
        subjects: dict[str, list[Any]] = {}
        for name, make in opened.items():
            subjects[name] = [make() for _ in range(4)]
            for each in subjects[name]:
                stack.callback(each.close)
        for what, bursts in {
            ONE: {name: appending(each[0], scale.single, 1) for name, each in subjects.items()},
            BATCH: {
                name: appending(each[0], scale.batched, BATCH_SIZE)
                for name, each in subjects.items()
            },
            SINGLE: {
                name: delivering(each[:1], scale.single, 1) for name, each in subjects.items()
            },
            WORKER: {
                name: delivering(each[:1], scale.batched, BATCH_SIZE)
                for name, each in subjects.items()
            },
            WORKERS: {
                name: delivering(each, scale.batched, BATCH_SIZE) for name, each in subjects.items()
            },
        }.items():
            taken = take_turns(bursts, rounds=scale.rounds, warm_up=scale.warm_up)
            for name in subjects:
                values = taken.values(name, BARE)
                rows.append(Row("client", "sync", what, f"{engine}, {name}", values))
            for each in subjects.values():  # the next measurement begins with no calls
                while each[0].deliver(1000):
                    pass
    return rows


def new_calls(number: int) -> list[NewCall]:
    """Make calls that are due."""
    return [
        NewCall("bench", TARGET, "/shop.Orders/Push", f"key-{each:012}", BODY, 0.0, 3600.0)
        for each in range(number)
    ]


def appending(subject: Subject, number: int, size: int) -> Callable[[], Cost]:
    """A burst that appends calls."""
    batches: list[Any] = [subject.prepare(new_calls(size)) for _ in range(number // size)]

    def burst() -> Cost:
        watch = Stopwatch()
        for batch in batches:
            subject.append(batch)
        return watch.per(number)

    return burst


def delivering(workers: list[Any], number: int, size: int) -> Callable[[], Cost]:
    """A burst that takes and reports calls, by some workers at once."""
    batch = workers[0].prepare(new_calls(BATCH_SIZE))

    def work(worker: Any) -> None:
        while worker.deliver(size):
            pass

    def burst() -> Cost:
        for _ in range(-(-number // BATCH_SIZE)):
            workers[0].append(batch)
        threads = [threading.Thread(target=work, args=(each,)) for each in workers]
        watch = Stopwatch()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return watch.per(number)

    return burst


@contextmanager
def running(engine: str) -> Iterator[Opened]:
    """The subjects on one engine: each has data of its own."""
    if engine.startswith("sqlite"):
        durability = engine.removeprefix("sqlite-")
        with tempfile.TemporaryDirectory() as directory:
            url = f"sqlite://{directory}/ours.db?durability={durability}"
            yield {
                BARE: lambda: BareSqlite(Path(directory) / "bare.db", durability),
                OURS: lambda: Ours(open_journal_backend(url)),
            }
    elif engine == "postgresql":
        with engine_class(engine)("-c", "fsync=on") as server:
            tables = open_journal_backend(server.journal_url(schema="bare"))
            tables.select(Filter())
            tables.close()
            yield {
                BARE: lambda: BarePostgresql(server.journal_url(), "bare"),
                OURS: lambda: Ours(open_journal_backend(server.journal_url())),
            }
    else:
        with engine_class(engine)() as server:
            yield {
                BARE: lambda: BareRedis(server.url(), "bare:"),
                OURS: lambda: Ours(open_journal_backend(server.url())),
            }


if __name__ == "__main__":
    print_rows(measure(SCALES[sys.argv[1]], sys.argv[2]))
