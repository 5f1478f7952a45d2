"""The running components of this process, and the switch of the metrics.

Metrics and the live view report timers, queues, channels and so on. Each component adds itself here
when it is made. References are weak.

The first component switches the metrics on, if a package for them is installed. Without such a
package nothing is imported. `RPCWHEEL_METRICS=off` keeps them off; `prometheus` or `otel` allows
only one of the two.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from typing import TypeAlias

    from .call_counts import CallCounts

    Name: TypeAlias = Literal[
        "timer", "failback", "heartbeat", "channel", "detector", "registry", "publisher", "kit"
    ]

__all__ = [
    "add",
    "call_counts",
    "components",
    "count_calls",
    "remove",
    "replace_call_counts",
    "start",
]

VARIABLE: Final = "RPCWHEEL_METRICS"

MODULES: Final = {"prometheus": "prometheus_client", "otel": "opentelemetry.metrics"}
"""By the value of `VARIABLE`, the module that it needs."""

_LOG: Final = logging.getLogger("rpcwheel")


class _Live:
    """The components by name, and whether the metrics were switched on."""

    def __init__(self) -> None:
        self._components: dict[str, weakref.WeakSet[Any]] = {}
        self._is_started = False
        self.counts: CallCounts | None = None
        self.new_lock()

    def new_lock(self) -> None:
        """Replace the lock, in a forked child, where the old one may never be released."""
        self._lock = threading.RLock()  # a finalizer may make a component

    def reset(self) -> None:
        """Forget what a forked child has no use of; its timers and queues begin anew."""
        self.new_lock()
        self._components = {
            name: self._components[name]
            for name in ("timer", "failback")
            if name in self._components
        }

    def add(self, name: Name, component: object) -> None:
        """Report a component from now on, as long as it exists. Thread-safe."""
        self.start()
        with self._lock:
            self._components.setdefault(name, weakref.WeakSet()).add(component)

    def remove(self, name: Name, component: object) -> None:
        """Report a component no more: it was closed."""
        with self._lock:
            self._components.get(name, weakref.WeakSet()).discard(component)

    def components(self, name: Name) -> list[Any]:
        """Return the components that exist, in no order."""
        with self._lock:
            return list(self._components.get(name, ()))

    def call_counts(self) -> CallCounts | None:
        """Return where calls are counted; None if the metrics are off."""
        self.start()
        return self.counts

    def count_calls(self) -> CallCounts:
        """Count the calls of clients and servers that are made from now on. Idempotent."""
        from .call_counts import CallCounts

        with self._lock:
            if self.counts is None:
                self.counts = CallCounts()
            return self.counts

    def replace_call_counts(self, counts: CallCounts | None) -> CallCounts | None:
        """Count the calls of clients and servers that are made from now on here; None: nowhere.

        For tests. Returns where they were counted.
        """
        self.start()
        with self._lock:
            replaced, self.counts = self.counts, counts
            return replaced

    def start(self) -> None:
        """Switch the metrics on, if that was not tried yet. Never raises."""
        with self._lock:
            was_started, self._is_started = self._is_started, True  # first: it makes components
            if was_started or not (names := installed_sinks()):
                return
            try:
                importlib.import_module("rpcwheel.metrics").start(names)
            except ImportError as error:  # a package is too old
                _LOG.warning("metrics stay off: %s", error)
            except Exception:  # noqa: BLE001 - the program continues without metrics
                _LOG.exception("metrics stay off, because they could not be started")


def installed_sinks() -> list[str]:
    """Return the keys of `MODULES` that are installed and that the environment allows."""
    wanted = os.environ.get(VARIABLE, "").strip().lower()
    if wanted == "off":
        return []
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
    except ModuleNotFoundError:  # of the namespace
        return False


_LIVE: Final = _Live()
add: Final = _LIVE.add
remove: Final = _LIVE.remove
components: Final = _LIVE.components
call_counts: Final = _LIVE.call_counts
count_calls: Final = _LIVE.count_calls
replace_call_counts: Final = _LIVE.replace_call_counts
start: Final = _LIVE.start

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_LIVE.reset)
