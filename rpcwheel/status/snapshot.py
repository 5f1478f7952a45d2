"""A description of everything that runs in this process: `snapshot()`.

Each component describes itself by `status()`, on any thread. It waits for no event loop, and holds
its lock only for as long as it does otherwise. A component that raises is left out, and
its error is in `Status.errors`. `dataclasses.asdict` makes JSON of a `Status`.

Texts may come from peers (methods, instance ids, user agents): they are as the peer sent them.
Texts of errors are one line, in which characters that are not printable are escaped.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpcwheel.events.log import error_text
from rpcwheel.telemetry import components

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rpcwheel.admission.method import MethodAdmissionStatus
    from rpcwheel.failback.queue import QueueStatus
    from rpcwheel.heartbeat.monitor import HeartbeatStatus
    from rpcwheel.idle.detector import ConnectionStatus
    from rpcwheel.journal.journal import JournalStatus
    from rpcwheel.limit.server import LimitStatus
    from rpcwheel.publisher.publisher import PublisherStatus
    from rpcwheel.registry.session import RegistryStatus
    from rpcwheel.telemetry.call_counts import MethodStatus
    from rpcwheel.timer.api import TimerStatus
    from rpcwheel.transport.status import ChannelStatus


@dataclass(frozen=True, slots=True)
class Status:
    """A snapshot of what runs in this process. Rows are sorted by their first field."""

    version: str
    python: str
    grpcio: str
    """"" if it is not imported."""
    pid: int
    started: float | None
    """The start of the process, seconds since 1970; None: not known on this system."""
    now: float
    """Seconds since 1970."""
    timers: tuple[TimerStatus, ...]
    queues: tuple[QueueStatus, ...]
    journals: tuple[JournalStatus, ...]
    heartbeats: tuple[HeartbeatStatus, ...]
    channels: tuple[ChannelStatus, ...]
    connections: tuple[ConnectionStatus, ...]
    limits: tuple[LimitStatus, ...]
    admissions: tuple[MethodAdmissionStatus, ...]
    registries: tuple[RegistryStatus, ...]
    publishers: tuple[PublisherStatus, ...]
    methods: tuple[MethodStatus, ...]
    calls_counted: bool
    """Whether calls are counted; if not, `methods` is empty."""
    errors: tuple[str, ...]
    """Why components are missing."""


def snapshot() -> Status:
    """Describe what runs in this process. Any thread. Does not raise because a component does."""
    errors: list[str] = []

    def statuses(kind: components.Kind) -> Iterator[Any]:
        for component in components.of_kind(kind):
            try:
                status = component.status()
            except Exception as error:  # noqa: BLE001 - the other components are described
                errors.append(f"{kind}: {error_text(error)}")
            else:
                if status is not None:
                    yield status

    def rows(kind: components.Kind) -> tuple[Any, ...]:
        return tuple(sorted(statuses(kind), key=_first_field))

    def flat_rows(kind: components.Kind) -> tuple[Any, ...]:
        return tuple(sorted(chain.from_iterable(statuses(kind)), key=_first_field))

    counts = components.call_counts()
    return Status(
        version=_version("rpcwheel"),
        python=platform.python_version(),
        grpcio=_version("grpc"),
        pid=os.getpid(),
        started=_process_start(),
        now=time.time(),
        timers=rows("timer"),
        queues=rows("failback"),
        journals=rows("journal"),
        heartbeats=rows("heartbeat"),
        channels=rows("channel"),
        connections=flat_rows("detector"),
        limits=rows("limit"),
        admissions=flat_rows("admission"),
        registries=rows("registry"),
        publishers=rows("publisher"),
        methods=() if counts is None else counts.status(),
        calls_counted=counts is not None,
        errors=tuple(errors),
    )


def _first_field(row: Any) -> str:
    return str(getattr(row, row.__match_args__[0]))


def _version(package: str) -> str:
    """Return the version of a package; "" if it is not imported."""
    return str(getattr(sys.modules.get(package), "__version__", ""))


def _process_start() -> float | None:
    """Return the wall-clock time at which this process began; None if the system has no /proc."""
    try:
        fields = Path("/proc/self/stat").read_text("utf-8", errors="replace").rpartition(")")[2]
        ticks = int(fields.split()[19]) / os.sysconf("SC_CLK_TCK")
        uptime_s = float(Path("/proc/uptime").read_text("ascii").split()[0])
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    return time.time() - (uptime_s - ticks)
