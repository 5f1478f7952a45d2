"""The running components of this process, and the switch of the metrics.

Metrics and the live view report timers, queues, channels and so on. Each component adds itself here
when it is made. References are weak.

The first component switches metrics and traces on, if a package for them is installed. Without such
a package nothing is imported. `RPCWHEEL_METRICS=off` keeps both off; `prometheus` or `otel` allows
metrics for only one of the two. `RPCWHEEL_TRACES=off` keeps the traces off.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import weakref
from typing import TYPE_CHECKING, Any, Final, Literal

from .call_counts import CallCounts

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    Name: TypeAlias = Literal[
        "timer",
        "failback",
        "journal",
        "heartbeat",
        "channel",
        "detector",
        "registry",
        "publisher",
    ]

__all__ = [
    "add",
    "call_counts",
    "components",
    "count_calls",
    "end_timer",
    "expect_queue",
    "expected_queues",
    "on_end_of_timer",
    "remove",
    "sinks",
    "start",
]

VARIABLE: Final = "RPCWHEEL_METRICS"

MODULES: Final = {"prometheus": "prometheus_client", "otel": "opentelemetry.metrics"}
"""By the value of `VARIABLE`, the module that it needs."""

MAX_EXPECTED: Final = 1000
"""Names of queues that are remembered."""

TRACE_MODULE: Final = "opentelemetry.trace"

_LOG: Final = logging.getLogger("rpcwheel")


class _Live:
    """The components by name, and whether the metrics were switched on.

    Has no lock: a component may be made or dropped in a finalizer or a signal handler, under any
    lock. All operations on its dicts are atomic.
    """

    def __init__(self) -> None:
        self._components: dict[str, dict[int, weakref.ref[Any]]] = {}
        self._own_counts = CallCounts()
        self.counts: CallCounts | None = None
        self.expected_queues: dict[str, None] = {}
        """Names of queues that may not exist yet."""
        self._timer_ended: Callable[[tuple[str, Any]], object] | None = None
        self._to_start = [_start_sinks, _start_traces]  # emptied by the thread that starts them
        self._sinks: list[str] | None = None

    def reset(self) -> None:
        """Forget what a forked child has no use of; its timers, queues and journals begin anew."""
        for name in self._components.keys() - {"timer", "failback", "journal"}:
            self._components[name] = {}

    def add(self, name: Name, component: object) -> None:
        """Report a component from now on, as long as it exists. Any thread."""
        self.start()
        known, key = self._components.setdefault(name, {}), id(component)
        known[key] = weakref.ref(component, lambda _: known.pop(key, None))

    def remove(self, name: Name, component: object) -> None:
        """Report a component no more: it was closed."""
        self._components.get(name, {}).pop(id(component), None)

    def components(self, name: Name) -> list[Any]:
        """Return the components that exist, in the order in which they were made."""
        references = self._components.get(name, {}).copy().values()
        return [one for reference in references if (one := reference()) is not None]

    def expect_queue(self, name: str) -> None:
        """Report a failback queue that will be made by the first call that fails."""
        if len(self.expected_queues) < MAX_EXPECTED:
            self.expected_queues[name] = None

    def on_end_of_timer(self, function: Callable[[tuple[str, Any]], object]) -> None:
        """Call `function((name, stats))` when a timer ends, perhaps in a finalizer.

        The `stats` are `TimerStats`.
        """
        self._timer_ended = function

    def end_timer(self, timer: Any) -> None:
        """Remove a timer, and report its last counts."""
        known = self._components.get("timer", {}).pop(id(timer), None)
        if known is not None and self._timer_ended is not None:
            self._timer_ended((timer.name, timer.stats()))

    def call_counts(self) -> CallCounts | None:
        """Return where calls are counted; None if the metrics are off."""
        self.start()
        return self.counts

    def count_calls(self) -> CallCounts:
        """Count the calls of clients and servers that are made from now on. Idempotent."""
        if self.counts is None:
            self.counts = self._own_counts
        return self.counts

    def sinks(self) -> list[str]:
        """Return the keys of `MODULES` that are installed and that the environment allows."""
        if self._sinks is None:
            self._sinks = _installed_sinks()
        return self._sinks

    def start(self) -> None:
        """Switch metrics and traces on, if that was not tried yet. Never raises."""
        if self._to_start and self.sinks():
            self.count_calls()  # before another thread continues without the counts
        while self._to_start:
            try:
                start = self._to_start.pop()
            except IndexError:  # another thread was faster
                return
            try:
                start()
            except Exception:  # noqa: BLE001 - the program continues without it
                _LOG.exception("metrics or traces stay off, because they could not be started")


def _start_sinks() -> None:
    if names := sinks():
        importlib.import_module("rpcwheel.metrics").start(names)


def _start_traces() -> None:
    if not is_off(VARIABLE) and not is_off("RPCWHEEL_TRACES") and _is_installed(TRACE_MODULE):
        importlib.import_module("rpcwheel.tracing").start()


def is_off(variable: str) -> bool:
    """Whether a variable of the environment says "off", or what others use for it."""
    return os.environ.get(variable, "").strip().lower() in {"off", "0", "false", "no", "none"}


def _installed_sinks() -> list[str]:
    if is_off(VARIABLE):
        return []
    wanted = os.environ.get(VARIABLE, "").strip().lower()
    if wanted and wanted not in MODULES:
        _LOG.warning(
            "%s=%s is not known and has no effect; it may be off, %s",
            VARIABLE,
            ascii(wanted),
            " or ".join(MODULES),
        )
        wanted = ""
    return [
        name for name, module in MODULES.items() if wanted in ("", name) and _is_installed(module)
    ]


def _is_installed(module: str) -> bool:
    """Whether a module can be imported. Many packages share the namespace `opentelemetry`."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # no such namespace; a module that a test has made
        return False


_LIVE: Final = _Live()
add: Final = _LIVE.add
remove: Final = _LIVE.remove
end_timer: Final = _LIVE.end_timer
expect_queue: Final = _LIVE.expect_queue
expected_queues: Final = _LIVE.expected_queues
on_end_of_timer: Final = _LIVE.on_end_of_timer
components: Final = _LIVE.components
call_counts: Final = _LIVE.call_counts
count_calls: Final = _LIVE.count_calls
sinks: Final = _LIVE.sinks
start: Final = _LIVE.start

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_LIVE.reset)
