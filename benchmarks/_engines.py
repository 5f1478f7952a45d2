"""The engines of the tests' fixtures, which benchmarks start too."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from benchmarks._process import ROOT

CLASSES = {
    "etcd": "EtcdEngine",
    "postgresql": "PostgresqlEngine",
    "redis": "RedisEngine",
    "zookeeper": "ZookeeperEngine",
}


def engine(name: str) -> Any:
    """The class of an engine."""
    tests = str(ROOT / "tests")
    if tests not in sys.path:
        sys.path.append(tests)
    return getattr(import_module(f"fixtures.engine_{name}"), CLASSES[name])


def missing(name: str) -> str | None:
    """Why an engine can't be had here; None if it can, or needs no program."""
    if name not in CLASSES:
        return None
    try:
        reason: str | None = engine(name).available()
    except ImportError as error:
        return str(error)
    return reason
