"""What a million timeouts cost while nothing is due: wake-ups and CPU time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.timer.scale import Row, Scale
from benchmarks.timer.subject import Subject
from benchmarks.timer.subjects import make
from rpcwheel.timer.queue import FORM

FAR_S = 86_400.0
_TASKS = Path("/proc/self/task")


def measure(names: Sequence[str], scale: Scale) -> list[Row]:
    """A row `idle` for each. A process should measure one subject only."""
    return [each for name in names if (each := _measure(name, scale)) is not None]


def _measure(name: str, scale: Scale) -> Row | None:
    """Times that any thread went to sleep, beyond what waiting takes with nothing pending."""
    if not _TASKS.exists():
        return None
    subject = make(name)
    try:
        ours, _ = _let_pass(subject, scale.idle_s / 10)
        subject.fill(scale.many, FAR_S, 2 * FAR_S)
        subject.let_pass(0.0)
        time.sleep(scale.idle_s / 10)  # the thread has found its place
        sleeps, cpu_ns = _let_pass(subject, scale.idle_s)
    finally:
        subject.close()
    values = {"wakeups": float(sleeps - ours), "cpu_ms": cpu_ns / 1e6, "seconds": scale.idle_s}
    return Row("idle", name, FORM, scale.many, values)


def _let_pass(subject: Subject, seconds: float) -> tuple[int, int]:
    cpu_ns, before = time.process_time_ns(), _sleeps()
    subject.let_pass(seconds)
    return _sleeps() - before, time.process_time_ns() - cpu_ns


def _sleeps() -> int:
    """How often the threads of this process have gone to sleep: each wake-up is followed by one."""
    return sum(_sleeps_of(task / "status") for task in _TASKS.iterdir())


def _sleeps_of(status: Path) -> int:
    for line in status.read_text().splitlines():
        if line.startswith("voluntary_ctxt_switches:"):
            return int(line.split()[1])
    return 0
