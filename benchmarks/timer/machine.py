"""On what it was measured."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.timer import netty
from rpcwheel import __version__

_CPUINFO = Path("/proc/cpuinfo")
_MEMINFO = Path("/proc/meminfo")


def facts(*, with_netty: bool) -> dict[str, str]:
    """The machine and the versions, by name."""
    found = {
        "Machine": f"{_cpu()}, {os.cpu_count()} processors, {_memory()}",
        "System": platform.platform(terse=True),
        "Python": f"{platform.python_implementation()} {sys.version.split(' (', maxsplit=1)[0]}",
        "Versions": ", ".join(f"{name} {_version(name)}" for name in ("uvloop", "Cython")),
        "rpcwheel": __version__,
    }
    if with_netty:
        found["JVM"] = f"{netty.java_version()}, netty-common {netty.VERSION}"
    return found


def load() -> str:
    """How many programs wanted a processor in the last minute."""
    return f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"


def _cpu() -> str:
    if _CPUINFO.exists():
        for line in _CPUINFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory() -> str:
    if not _MEMINFO.exists():
        return "memory unknown"
    return f"{int(_MEMINFO.read_text().split()[1]) / 2**20:.0f} GiB"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
