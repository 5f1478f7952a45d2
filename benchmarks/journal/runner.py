"""Runs the measurements, each engine in a process of its own, and collects their rows."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from benchmarks import _child
from benchmarks.calls.scale import Row
from benchmarks.calls.server_process import ROOT
from benchmarks.calls.subjects import Skipped
from benchmarks.journal.subjects import ENGINES

TIMEOUT_S = 600.0

SERVERS = {"postgresql": "PostgresqlEngine", "redis": "RedisEngine"}


def run(only: frozenset[str], scale: str) -> Iterator[Row | Skipped]:
    """Measure what is asked for, and say on stderr what is under way."""
    for engine in ENGINES:
        if engine not in only:
            continue
        if reason := missing(engine):
            yield Skipped(engine, reason)
            continue
        began = time.monotonic()
        module = "benchmarks.journal.child"
        yield from _child.rows(engine, module, (scale, engine), timeout_s=TIMEOUT_S)
        print(f"{engine}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def missing(engine: str) -> str | None:
    """Why an engine can't be had here."""
    if engine not in SERVERS:
        return None
    tests = str(ROOT / "tests")
    if tests not in sys.path:
        sys.path.append(tests)
    try:
        kind: Any = getattr(import_module(f"fixtures.engine_{engine}"), SERVERS[engine])
    except ImportError as error:
        return str(error)
    reason: str | None = kind.available()
    return reason
