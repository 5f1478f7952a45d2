"""Engines for one measurement: those of the tests' fixtures, or none where none is needed."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.calls.server_process import ROOT

KINDS = {"etcd": "EtcdEngine", "zookeeper": "ZookeeperEngine", "redis": "RedisEngine"}


@dataclass(frozen=True, slots=True)
class Running:
    """An engine."""

    url: str
    wipe: Callable[[], object] | None = None
    """Has it start again without what it knew."""


def missing(name: str) -> str | None:
    """Why it can't be had here."""
    if name not in KINDS:
        return None
    try:
        reason: str | None = _kind(name).available()
    except ImportError as error:
        return str(error)
    return reason


@contextmanager
def running(name: str) -> Iterator[Running]:
    """One for this block."""
    if name == "memory":
        yield Running("memory://bench")
    elif name == "sqlite":
        with tempfile.TemporaryDirectory() as directory:
            yield Running(f"sqlite:///{Path(directory) / 'registry.db'}")
    else:
        with _kind(name)() as engine:
            yield Running(engine.url(), engine.wipe)


def _kind(name: str) -> Any:
    tests = str(ROOT / "tests")
    if tests not in sys.path:
        sys.path.append(tests)
    return getattr(import_module(f"fixtures.engine_{name}"), KINDS[name])
