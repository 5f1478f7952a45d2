"""The checks of what a backend tells those who watch."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from ._harness import ConformanceHarness, RecordingWatcher, claim, on_threads

if TYPE_CHECKING:
    from rpcwheel.registry.backend import View, Watch

__all__ = ["CHECKS"]

CALM_S: Final = 0.5
"""Seconds in which what must not come would have come."""


def a_watch_begins_with_what_there_is(stand: ConformanceHarness) -> None:
    """With nothing, if that is so: it is an answer too."""
    publisher, other = stand.new(), stand.new()
    empty, full = RecordingWatcher(), RecordingWatcher()
    first = other.watch(f"{stand.service}.empty", empty)
    empty.sees(stand)
    one = stand.instance()
    stand.publish(publisher, one)
    second = other.watch(stand.service, full)
    full.sees(stand, one)
    first.close()
    second.close()


def a_watch_tells_of_each_change(stand: ConformanceHarness) -> None:
    """What is published, changed, withdrawn, and left by a backend that is closed."""
    publisher, second, other = stand.new(), stand.new(), stand.new()
    witness = RecordingWatcher()
    watch = other.watch(stand.service, witness)
    witness.sees(stand)
    one, two = stand.instance(1), stand.instance(2)
    stand.publish(publisher, one)
    witness.sees(stand, one)
    stand.publish(second, two)
    witness.sees(stand, one, two)
    stand.publish(publisher, one.changed(weight=5))
    witness.sees(stand, one.changed(weight=5), two)
    stand.withdraw(publisher, one)
    witness.sees(stand, two)
    stand.leave(second)
    witness.sees(stand)
    watch.close()


def a_watcher_is_told_by_its_own_backend_too(stand: ConformanceHarness) -> None:
    """Who publishes and watches is often one process."""
    backend = stand.new()
    witness = RecordingWatcher()
    watch = backend.watch(stand.service, witness)
    witness.sees(stand)
    stand.publish(backend, stand.instance())
    witness.sees(stand, stand.instance())
    watch.close()


def a_watch_is_of_one_service(stand: ConformanceHarness) -> None:
    """Several of a backend do not get into each other's way, nor do names that begin alike."""
    publisher, other = stand.new(), stand.new()
    names = [stand.service + end for end in ("", "-v2", ".v2")]
    witnesses = {name: RecordingWatcher() for name in names}
    watches = [other.watch(name, witness) for name, witness in witnesses.items()]
    for name, witness in witnesses.items():
        witness.sees(stand)
        stand.publish(publisher, stand.instance(1, name))
    for name, witness in witnesses.items():
        witness.sees(stand, stand.instance(1, name))
    for watch in watches:
        watch.close()


def watches_of_one_service_are_independent(stand: ConformanceHarness) -> None:
    """Each is told, and closing one leaves the other."""
    publisher, other = stand.new(), stand.new()
    one, two = RecordingWatcher(), RecordingWatcher()
    first, second = other.watch(stand.service, one), other.watch(stand.service, two)
    stand.publish(publisher, stand.instance(1))
    one.sees(stand, stand.instance(1))
    two.sees(stand, stand.instance(1))
    first.close()
    stand.publish(publisher, stand.instance(2))
    two.sees(stand, stand.instance(1), stand.instance(2))
    second.close()


def a_closed_watch_is_silent(stand: ConformanceHarness) -> None:
    """Closing twice is no error, nor is closing after the backend."""
    publisher, other = stand.new(), stand.new()
    closed, witness = RecordingWatcher(), RecordingWatcher()
    first, second = other.watch(stand.service, closed), other.watch(stand.service, witness)
    closed.sees(stand)
    witness.sees(stand)
    first.close()
    first.close()
    told = len(closed.views)
    stand.publish(publisher, stand.instance())
    witness.sees(stand, stand.instance())
    stand.let_pass(CALM_S)
    claim(len(closed.views) == told, "a watcher was told after its watch was closed")
    stand.leave(other)
    told = len(witness.views)
    stand.withdraw(publisher, stand.instance())
    stand.let_pass(CALM_S)
    claim(len(witness.views) == told, "a watcher was told after the backend was closed")
    second.close()


def a_watcher_may_close_its_watch(stand: ConformanceHarness) -> None:
    """In its own call; that neither hangs nor ends in an error, and no other call follows."""
    publisher, other = stand.new(), stand.new()
    watcher, witness = _Leaving(), RecordingWatcher()
    watcher.watch = other.watch(stand.service, watcher)
    watch = other.watch(stand.service, witness)
    stand.publish(publisher, stand.instance(1))
    witness.sees(stand, stand.instance(1))
    stand.eventually(
        lambda: watcher.left, lambda: "a watcher that closes its watch in its own call hangs"
    )
    told = watcher.told
    stand.publish(publisher, stand.instance(2))
    witness.sees(stand, stand.instance(1), stand.instance(2))
    claim(watcher.told == told, "a watcher was told after it had closed its watch")
    watch.close()


def a_watcher_is_called_once_at_a_time(stand: ConformanceHarness) -> None:
    """Whoever publishes meanwhile; in the end it has seen the last of all."""
    backends = [stand.new() for _ in range(3)]
    witness = RecordingWatcher()
    watch = stand.new().watch(stand.service, witness)
    last = [stand.instance(number, weight=9) for number in range(len(backends))]

    def work(number: int) -> None:
        for weight in range(10):
            backends[number].publish([last[number].changed(weight=weight)])

    on_threads(*(partial(work, number) for number in range(len(backends))))
    for backend, one in zip(backends, last, strict=True):
        stand.publish(backend, one)
    witness.sees(stand, *last)
    watch.close()


class _Leaving:
    """A watcher that closes its watch when it is told of an instance."""

    watch: Watch | None = None
    told = 0
    left = False

    def saw(self, view: View) -> None:
        self.told += 1
        if view.records and self.watch is not None:
            self.watch.close()
            self.left = True

    def suspect(self, reason: str) -> None:
        """Nothing to do."""


CHECKS: Final = (
    a_watch_begins_with_what_there_is,
    a_watch_tells_of_each_change,
    a_watcher_is_told_by_its_own_backend_too,
    a_watch_is_of_one_service,
    watches_of_one_service_are_independent,
    a_closed_watch_is_silent,
    a_watcher_may_close_its_watch,
    a_watcher_is_called_once_at_a_time,
)
