"""The rules of `RegistryBackend`, one function for each."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Final

from rpcwheel.errors import RegistryClosed, RegistryUnavailable
from rpcwheel.timer import ManualTimer

from .registry_harness import (
    TIMEOUT_S,
    ConformanceHarness,
    RecordingWatcher,
    on_threads,
    require,
    shown,
)
from .registry_model import RandomRequests

if TYPE_CHECKING:
    from rpcwheel.instance import ServiceInstance
    from rpcwheel.registry.backend import RegistryBackend, View, Watch

MANY: Final = 300
"""More than etcd accepts in one transaction (128 operations)."""

ROUNDS: Final = 10
"""Attempts to renew a lease in time. An attempt fails if the process is suspended."""

SILENCE_S: Final = 0.5
"""Seconds within which a call that must not happen would have happened."""


def requests_agree_with_a_reference(harness: ConformanceHarness) -> None:
    """Random requests to several backends have the results that a reference in memory has.

    These are most rules of publishing, renewing, lookups and watches. A failure names the rule.
    """
    RandomRequests(harness).run()


def many_instances_are_published_at_once(harness: ConformanceHarness) -> None:
    """A registry publishes many at once after the engine has lost its data."""
    publisher, other = harness.new_backend(), harness.new_backend()
    many = [harness.instance(number) for number in range(MANY)]
    harness.publish(publisher, *many)
    harness.expect_found(other, *many)
    lost = publisher.renew(many)
    require(not lost, f"renew must find all published instances, but misses {len(lost)} of {MANY}")
    harness.withdraw(publisher, *many)
    harness.expect_found(other)


def all_ids_and_texts_are_kept(harness: ConformanceHarness) -> None:
    """Ids and texts may have characters that are special to engines, and the longest lengths."""
    publisher, other = harness.new_backend(), harness.new_backend()
    ids = ["[::1]:50051", "a%2Fb", "a%b", "%2E", "*", "?", ".", "..", "'\";--", "ä€😀", "\x80"]
    ids += ["{x}", "a\\b", "#", "x" * 256]
    text = {"ä\n\0": "😀\t'\"", "long": "x" * 8000}
    instances = [harness.instance(1, id=instance_id, zone="ä b") for instance_id in ids]
    harness.publish(publisher, *instances, harness.instance(2, metadata=text))
    harness.expect_found(other, *instances, harness.instance(2, metadata=text))
    lost = publisher.renew(instances)
    require(not lost, f"renew must find all published instances, but misses {dict(lost)}")
    harness.withdraw(publisher, *instances)
    harness.expect_found(other, harness.instance(2, metadata=text))


def a_renewed_lease_does_not_end(harness: ConformanceHarness) -> None:
    """Instances stay that are renewed every third of a lease. Takes more than two leases."""
    publisher, other = harness.new_backend(), harness.new_backend()
    instance = harness.instance()
    rounds = 0
    while True:
        rounds += 1
        start = began = harness.now
        try:
            harness.publish(publisher, instance)
            pauses = [harness.now - began, harness.let_time_pass(2.2 * harness.lease_s)]
            began = harness.now
            lost = publisher.renew([instance])
            instances = harness.lookup(other)
        except (AssertionError, RegistryUnavailable):
            late_s = harness.now - start - 2.2 * harness.lease_s
            if rounds == ROUNDS or late_s < harness.lease_s / 4:
                raise
            continue  # the process was suspended, and the connection was lost
        if rounds == ROUNDS or max(*pauses, harness.now - began) < harness.lease_s / 4:
            break  # if not, the process was suspended, and the lease may have ended
    require(not lost, f"renew must find instances renewed in time, but returned {dict(lost)}")
    require(
        instances == [instance],
        f"lookup must find instances renewed in time, but found {shown(instances)}",
    )


def a_lease_that_is_not_renewed_ends(harness: ConformanceHarness) -> None:
    """Lookups, watchers and a late `renew` show the end, as after the process was killed."""
    publisher, other, watcher = harness.new_backend(), harness.new_backend(), RecordingWatcher()
    if publisher.keeps_alive:  # then the lease ends only with the process
        return
    instance = harness.instance()
    other.watch(harness.service, watcher)
    _publish_until_seen(harness, publisher, watcher, instance)
    harness.stop_renewing(publisher)
    harness.let_time_pass(2 * harness.lease_s)
    harness.expect_found(other)
    watcher.wait_for(harness)
    lost = publisher.renew([instance])
    require(
        set(lost) == {instance.key},
        f"renew must report an instance that was not renewed in time, but returned {dict(lost)}",
    )
    _publish_until_seen(harness, publisher, watcher, instance)


def _publish_until_seen(
    harness: ConformanceHarness,
    publisher: RegistryBackend,
    watcher: RecordingWatcher,
    instance: ServiceInstance,
) -> None:
    """Publish, and again if the lease ended because the process was suspended."""

    def seen() -> bool:
        if publisher.renew([instance]):
            harness.publish(publisher, instance)
        return watcher.has_seen(instance)

    harness.publish(publisher, instance)
    harness.wait_until(
        seen,
        lambda: f"a watcher must see {shown([instance])}, but {watcher.last_view}",
    )


def methods_may_be_called_on_any_thread(harness: ConformanceHarness) -> None:
    """The calls come from different threads, one at a time."""
    publisher, other = harness.new_backend(), harness.new_backend()
    instance = harness.instance()
    on_threads(lambda: harness.publish(publisher, instance))
    on_threads(lambda: publisher.renew([instance]))
    harness.expect_found(other, instance)
    on_threads(lambda: harness.withdraw(publisher, instance))
    harness.expect_found(other)


def close_is_idempotent_and_refuses_later_requests(harness: ConformanceHarness) -> None:
    """Requests after `close` raise `RegistryClosed`."""
    backend = harness.new_backend()
    harness.publish(backend, harness.instance())
    harness.close(backend)
    backend.close()
    for method, ask in {
        "publish": lambda: backend.publish([harness.instance()]),
        "withdraw": lambda: backend.withdraw([harness.instance()]),
        "renew": lambda: backend.renew([harness.instance()]),
        "lookup": lambda: backend.lookup(harness.service),
        "services": backend.services,
    }.items():
        try:
            ask()
        except RegistryClosed:
            continue
        raise AssertionError(f"{method} after close must raise RegistryClosed")


def close_ends_threads_and_timeouts(harness: ConformanceHarness) -> None:
    """After `close` no new thread is left, and no timeout on the backend's timer."""
    before = set(threading.enumerate())
    backend = harness.new_backend()
    timer = backend.settings.timer
    pending = 0 if timer is None else timer.pending
    harness.publish(backend, harness.instance())
    harness.expect_found(backend, harness.instance())
    harness.close(backend)
    left: list[threading.Thread] = []

    def look() -> bool:
        left[:] = [
            thread
            for thread in threading.enumerate()
            if thread not in before and not _is_ours(thread)
        ]
        return not left

    end = time.monotonic() + TIMEOUT_S
    while not look() and time.monotonic() < end:
        time.sleep(0.005)
    require(not left, f"close must end the backend's threads, but there are {left}")
    if isinstance(timer, ManualTimer):  # other timers have timeouts of other users
        require(timer.pending <= pending, "close must cancel the backend's timeouts")


def _is_ours(thread: threading.Thread) -> bool:
    """Whether a thread is that of the shared timer, which runs as long as the process."""
    return thread.daemon and thread.name == "rpcwheel-timer"


# Watches


def a_closed_watch_reports_nothing(harness: ConformanceHarness) -> None:
    """Closing a watch twice, or after the backend, is no error."""
    publisher, other = harness.new_backend(), harness.new_backend()
    closed, watcher = RecordingWatcher(), RecordingWatcher()
    first, second = other.watch(harness.service, closed), other.watch(harness.service, watcher)
    closed.wait_for(harness)
    watcher.wait_for(harness)
    first.close()
    first.close()
    calls = len(closed.views)
    harness.publish(publisher, harness.instance())
    watcher.wait_for(harness, harness.instance())
    harness.let_time_pass(SILENCE_S)
    require(len(closed.views) == calls, "a watcher was called after its watch was closed")
    harness.close(other)
    calls = len(watcher.views)
    harness.withdraw(publisher, harness.instance())
    harness.let_time_pass(SILENCE_S)
    require(len(watcher.views) == calls, "a watcher was called after the backend was closed")
    second.close()


def a_watcher_may_close_its_watch(harness: ConformanceHarness) -> None:
    """Closing in a call of the watcher does not hang or raise, and no other call follows."""
    publisher, other = harness.new_backend(), harness.new_backend()
    closing, watcher = _ClosingWatcher(), RecordingWatcher()
    closing.watch = other.watch(harness.service, closing)
    watch = other.watch(harness.service, watcher)
    harness.publish(publisher, harness.instance(1))
    watcher.wait_for(harness, harness.instance(1))
    harness.wait_until(
        lambda: closing.has_closed, lambda: "a watcher that closes its watch in its own call hangs"
    )
    calls = closing.calls
    harness.publish(publisher, harness.instance(2))
    watcher.wait_for(harness, harness.instance(1), harness.instance(2))
    require(closing.calls == calls, "a watcher was called after it had closed its watch")
    watch.close()


def a_watcher_is_not_called_concurrently(harness: ConformanceHarness) -> None:
    """Several backends publish at once. The last view has the latest values."""
    backends = [harness.new_backend() for _ in range(3)]
    watcher = RecordingWatcher()
    watch = harness.new_backend().watch(harness.service, watcher)
    last = [harness.instance(number, weight=9) for number in range(len(backends))]

    def work(number: int) -> None:
        for weight in range(10):
            backends[number].publish([last[number].replace(weight=weight)])

    on_threads(*(partial(work, number) for number in range(len(backends))))
    for backend, instance in zip(backends, last, strict=True):
        harness.publish(backend, instance)
    watcher.wait_for(harness, *last)
    watch.close()


class _ClosingWatcher:
    """A watcher that closes its watch when it sees an instance."""

    watch: Watch | None = None
    calls = 0
    has_closed = False

    def on_view(self, view: View) -> None:
        self.calls += 1
        if view.records and self.watch is not None:
            self.watch.close()
            self.has_closed = True

    def on_contact_lost(self, reason: str) -> None:
        """Nothing to do."""


CHECKS: Final = (
    requests_agree_with_a_reference,
    many_instances_are_published_at_once,
    all_ids_and_texts_are_kept,
    a_renewed_lease_does_not_end,
    a_lease_that_is_not_renewed_ends,
    methods_may_be_called_on_any_thread,
    close_is_idempotent_and_refuses_later_requests,
    close_ends_threads_and_timeouts,
    a_closed_watch_reports_nothing,
    a_watcher_may_close_its_watch,
    a_watcher_is_not_called_concurrently,
)
