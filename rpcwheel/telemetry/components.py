"""The running components of this process, where they report.

Each timer, queue, channel and so on adds itself here when it is made. Metrics and the live view
read the list. References are weak.

A component has a method `status()`, for any thread. It returns a frozen dataclass, or None if the
component is closed; a detector returns one for each connection. Its field `problem` says what is
wrong with the component, or is an empty string.

The first component runs the function given to `on_first`, which may start metrics and traces. This
module knows no metrics package and reads no environment.
"""

from __future__ import annotations

import os
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from .call_counts import CallCounts

    Kind: TypeAlias = Literal[
        "timer",
        "failback",
        "journal",
        "heartbeat",
        "channel",
        "detector",
        "limit",
        "admission",
        "registry",
        "publisher",
    ]

MAX_EXPECTED: Final = 1000
"""Names of queues that are remembered."""


class _Components:
    """The components by kind, and where calls are counted.

    Has no lock: a component may be made or dropped in a finalizer or a signal handler, under any
    lock. All operations on its dicts are atomic.
    """

    def __init__(self) -> None:
        self._by_kind: dict[str, dict[int, weakref.ref[Any]]] = {}
        self.counts: CallCounts | None = None
        self.expected_queues: dict[str, None] = {}
        """Names of queues that may not exist yet."""
        self._ended: Callable[[tuple[Kind, Any]], object] | None = None
        self._on_first: list[Callable[[], object]] = []  # emptied by the thread that runs it
        self._counts_calls: Callable[[], object] = bool

    def reset(self) -> None:
        """Forget what a forked child has no use of.

        Its timers, queues and journals begin anew, and clients and functions keep their circuit
        breakers.
        """
        for kind in self._by_kind.keys() - {"timer", "failback", "journal", "admission"}:
            self._by_kind[kind] = {}

    def on_first(self, function: Callable[[], object], counts_calls: Callable[[], object]) -> None:
        """Run a function once, on the thread that makes the first component. It must not raise.

        `counts_calls` says whether it will count calls. Any thread that makes a component meanwhile
        asks too, so that no component is made without counts.
        """
        self._on_first, self._counts_calls = [function], counts_calls

    def start(self) -> None:
        """Run the function of `on_first`, if it has not run yet."""
        if self._on_first and self._counts_calls():
            self.count_calls()  # before another thread continues without the counts
        while self._on_first:
            try:
                function = self._on_first.pop()
            except IndexError:  # another thread was faster
                return
            function()

    def add(self, kind: Kind, component: object, *, ends: bool = False) -> None:
        """Report a component from now on, as long as it exists. Any thread.

        It has a method `status()`. `ends`: its finalizer calls `end` or `end_timer`, if it has not
        called it before.
        """
        self.start()
        references, key = self._by_kind.setdefault(kind, {}), id(component)
        # The collector of cycles clears references before it calls finalizers, which `end` removes.
        forget = None if ends else lambda _: references.pop(key, None)
        references[key] = weakref.ref(component, forget)

    def remove(self, kind: Kind, component: object) -> bool:
        """Report a component no more: it was closed. Returns whether it was reported."""
        return self._by_kind.get(kind, {}).pop(id(component), None) is not None

    def of_kind(self, kind: Kind) -> list[Any]:
        """Return the components that exist, in the order in which they were made."""
        references = self._by_kind.get(kind, {}).copy().values()
        return [component for weak in references if (component := weak()) is not None]

    def expect_queue(self, name: str) -> None:
        """Report a failback queue that will be made by the first call that fails."""
        if len(self.expected_queues) < MAX_EXPECTED:
            self.expected_queues[name] = None

    def on_end(self, function: Callable[[tuple[Kind, Any]], object]) -> None:
        """Call `function((kind, status))` when a component with counters ends.

        Perhaps in a finalizer. The kind is "timer", "limit" or "admission". The `status` of a timer
        has only a `name` and the `stats`.
        """
        self._ended = function

    def end_timer(self, timer: Any) -> None:
        """Remove a timer, and report its last counts, as `end` does."""
        if self.remove("timer", timer) and self._ended is not None:
            self._ended(("timer", SimpleNamespace(name=timer.name, stats=timer.stats())))

    def end(self, kind: Kind, component: Any) -> None:
        """Remove a component, in its finalizer, and report its last counts.

        Those of a component that is not there are of the parent of this forked child.
        """
        if self.remove(kind, component) and self._ended is not None:
            self._ended((kind, component.status()))

    def call_counts(self) -> CallCounts | None:
        """Return where calls are counted; None if the metrics are off."""
        self.start()
        return self.counts

    def count_calls(self) -> CallCounts:
        """Count the calls of clients and servers that are made from now on. Idempotent."""
        from .call_counts import CALL_COUNTS  # now: `import rpcwheel` alone needs no counts

        if self.counts is None:
            self.counts = CALL_COUNTS
        return self.counts


_COMPONENTS: Final = _Components()
add: Final = _COMPONENTS.add
remove: Final = _COMPONENTS.remove
of_kind: Final = _COMPONENTS.of_kind
on_first: Final = _COMPONENTS.on_first
start: Final = _COMPONENTS.start
end_timer: Final = _COMPONENTS.end_timer
end: Final = _COMPONENTS.end
on_end: Final = _COMPONENTS.on_end
expect_queue: Final = _COMPONENTS.expect_queue
expected_queues: Final = _COMPONENTS.expected_queues
call_counts: Final = _COMPONENTS.call_counts
count_calls: Final = _COMPONENTS.count_calls

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_COMPONENTS.reset)
