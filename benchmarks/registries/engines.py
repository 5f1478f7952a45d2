"""Engines for one measurement: those of the tests' fixtures, or none where none is needed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks._engines import engine


@dataclass(frozen=True, slots=True)
class Running:
    """An engine."""

    url: str
    wipe: Callable[[], object] | None = None
    """Has it start again without what it knew."""


@contextmanager
def running(name: str) -> Iterator[Running]:
    """One for this block."""
    if name == "memory":
        yield Running("memory://bench")
    elif name == "sqlite":
        with tempfile.TemporaryDirectory() as directory:
            yield Running(f"sqlite:///{Path(directory) / 'registry.db'}")
    else:
        with engine(name)() as started:
            yield Running(started.url(), started.wipe)
