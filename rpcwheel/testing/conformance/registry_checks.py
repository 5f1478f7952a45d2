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

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rpcwheel.instance import ServiceInstance
    from rpcwheel.registry.backend import RegistryBackend, View, Watch

MANY: Final = 300
"""More than etcd accepts in one transaction (128 operations)."""

ROUNDS: Final = 10
"""Attempts to renew a lease in time. An attempt fails if the process is suspended."""

SILENCE_S: Final = 0.5
"""Seconds within which a call that must not happen would have happened."""


# Publishing


def published_instances_are_found(harness: ConformanceHarness) -> None:
    """Every backend finds them, with all values unchanged."""
    publisher, other = harness.new_backend(), harness.new_backend()
    first = harness.instance(1, zone="west", metadata={"a": "1"}, started_at=1.5, protocol="grpcs")
    second = harness.instance(2, status="DRAINING", group="g", version="2")
    harness.publish(publisher, first, second)
    harness.expect_found(publisher, first, second)
    harness.expect_found(other, first, second)


def publishing_again_replaces_an_instance(harness: ConformanceHarness) -> None:
    """An instance is replaced by its own process, and by a process with another epoch."""
    before, after = harness.new_backend(), harness.new_backend()
    instance = harness.instance()
    harness.publish(before, instance)
    harness.publish(before, instance)
    harness.expect_found(after, instance)
    changed = instance.replace(weight=7)
    harness.publish(before, changed)
    harness.expect_found(after, changed)
    successor = instance.replace(epoch="another", weight=9)
    harness.publish(after, successor)
    harness.expect_found(before, successor)


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


def withdrawn_instances_are_removed(harness: ConformanceHarness) -> None:
    """Withdrawing an instance twice, or an unknown one, is no error. Other instances stay."""
    publisher, other = harness.new_backend(), harness.new_backend()
    first, second, never = (harness.instance(number) for number in (1, 2, 3))
    harness.publish(publisher, first, second)
    harness.withdraw(publisher, first, never)
    harness.expect_found(other, second)
    harness.withdraw(publisher, first)
    harness.expect_found(other, second)


def a_late_withdrawal_keeps_the_successor(harness: ConformanceHarness) -> None:
    """The old process withdraws after the new one has published the same id."""
    before, after = harness.new_backend(), harness.new_backend()
    old = harness.instance(1, epoch="before")
    new = harness.instance(1, epoch="after")
    harness.publish(before, old)
    harness.publish(after, new)
    before.withdraw([old])
    harness.expect_found(after, new)
    lost = after.renew([new])
    require(not lost, f"renew of the successor must find it, but returned {dict(lost)}")


def empty_requests_are_accepted(harness: ConformanceHarness) -> None:
    """Publish, withdraw and renew take empty sequences."""
    backend = harness.new_backend()
    backend.publish([])
    backend.withdraw([])
    require(not backend.renew([]), "renew of no instances must return no losses")
    harness.expect_found(backend)


def an_unknown_service_has_no_instances(harness: ConformanceHarness) -> None:
    """A lookup of an unknown service is no error."""
    backend = harness.new_backend()
    harness.publish(backend, harness.instance())
    harness.expect_found(backend, service=f"{harness.service}.unknown")


def services_have_instances(harness: ConformanceHarness) -> None:
    """Services are listed in order, each once, until their last instance is removed."""
    publisher, other = harness.new_backend(), harness.new_backend()
    names = [f"{harness.service}.{name}" for name in ("b", "a", "c")]
    instances = [harness.instance(number, name) for name in names for number in (1, 2)]
    harness.publish(publisher, *instances)
    listed = _services(harness, other)
    require(
        listed == sorted(names), f"services() must return {sorted(names)} in order, not {listed}"
    )
    harness.withdraw(publisher, *instances[:2])
    left = sorted(names[1:])
    harness.wait_until(
        lambda: _services(harness, other) == left,
        lambda: f"services() must return {left}, not {_services(harness, other)}",
    )


def names_do_not_match_by_prefix(harness: ConformanceHarness) -> None:
    """`orders` is not `orders-v2`. The same holds for ids."""
    publisher, other = harness.new_backend(), harness.new_backend()
    names = [harness.service + end for end in ("", "-v2", ".v2", "2", "_")]
    instances = [harness.instance(1, name) for name in names]
    longer = harness.instance(10)
    harness.publish(publisher, *instances, longer.replace(id=instances[0].id + "0"))
    for name, instance in zip(names[1:], instances[1:], strict=True):
        harness.expect_found(other, instance, service=name)
    harness.withdraw(publisher, instances[0])
    harness.expect_found(other, longer.replace(id=instances[0].id + "0"))
    harness.expect_found(other, instances[1], service=names[1])


def all_ids_and_texts_are_kept(harness: ConformanceHarness) -> None:
    """Ids and texts may have characters that are special to engines, and the longest lengths."""
    publisher, other = harness.new_backend(), harness.new_backend()
    ids = ["[::1]:50051", "a%2Fb", "*", "?", "..", "'\";--", "ä€😀", "{x}", "a\\b", "#", "x" * 256]
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
    _require_lost(publisher, [instance], [instance], "was not renewed in time")
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


def renew_reports_missing_instances(harness: ConformanceHarness) -> None:
    """`renew` reports instances that were never published or that others have removed."""
    publisher, other = harness.new_backend(), harness.new_backend()
    first, second, never = (harness.instance(number) for number in (1, 2, 3))
    _require_lost(publisher, [never], [never], "was never published")
    publisher.publish([first, second])
    other.withdraw([first])
    _require_lost(
        publisher, [first, second, never], [first, never], "was withdrawn or never published"
    )
    publisher.publish([first])
    _require_lost(publisher, [first, second], [], "is missing")


def renew_reports_replaced_instances(harness: ConformanceHarness) -> None:
    """`renew` reports an instance whose key exists with another epoch."""
    publisher, other = harness.new_backend(), harness.new_backend()
    first, second = harness.instance(1), harness.instance(2)
    publisher.publish([first, second])
    harness.publish(other, first.replace(epoch="another"))
    _require_lost(publisher, [first, second], [first], "was taken over")


def a_view_does_not_change(harness: ConformanceHarness) -> None:
    """Later requests do not change a `View` that was returned."""
    backend = harness.new_backend()
    harness.publish(backend, harness.instance(1))
    view = backend.lookup(harness.service)
    before = dict(view.records)
    harness.publish(backend, harness.instance(1, weight=3), harness.instance(2))
    require(
        dict(view.records) == before, "a View that lookup returned was changed by a later publish"
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


def close_gives_up_the_lease(harness: ConformanceHarness) -> None:
    """Instances of the closed backend are removed, those of others stay."""
    publisher, other = harness.new_backend(), harness.new_backend()
    first, second = harness.instance(1), harness.instance(2)
    harness.publish(publisher, first)
    harness.publish(other, second)
    harness.close(publisher)
    harness.expect_found(other, second)


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


def _services(harness: ConformanceHarness, backend: RegistryBackend) -> list[str]:
    """Return the services of this check."""
    return [name for name in backend.services() if name.startswith(harness.service)]


def _require_lost(
    backend: RegistryBackend,
    asked: Sequence[ServiceInstance],
    wanted: Sequence[ServiceInstance],
    why: str,
) -> None:
    lost = backend.renew(asked)
    require(
        set(lost) == {instance.key for instance in wanted},
        f"renew must report each instance that {why}: {shown(wanted)}; but returned {dict(lost)}",
    )
    reasons = {"missing", "taken", "lease", "session", "wiped"}
    require(
        set(lost.values()) <= reasons,
        f"renew must give a reason of {sorted(reasons)}, not {set(lost.values())}",
    )


# Watches


def a_watch_begins_with_the_present_view(harness: ConformanceHarness) -> None:
    """An empty view is reported too."""
    publisher, other = harness.new_backend(), harness.new_backend()
    empty, full = RecordingWatcher(), RecordingWatcher()
    first = other.watch(f"{harness.service}.empty", empty)
    empty.wait_for(harness)
    instance = harness.instance()
    harness.publish(publisher, instance)
    second = other.watch(harness.service, full)
    full.wait_for(harness, instance)
    first.close()
    second.close()


def a_watch_reports_each_change(harness: ConformanceHarness) -> None:
    """Instances are published, changed and withdrawn, and their backend is closed."""
    publisher, another, other = harness.new_backend(), harness.new_backend(), harness.new_backend()
    watcher = RecordingWatcher()
    watch = other.watch(harness.service, watcher)
    watcher.wait_for(harness)
    first, second = harness.instance(1), harness.instance(2)
    harness.publish(publisher, first)
    watcher.wait_for(harness, first)
    harness.publish(another, second)
    watcher.wait_for(harness, first, second)
    harness.publish(publisher, first.replace(weight=5))
    watcher.wait_for(harness, first.replace(weight=5), second)
    harness.withdraw(publisher, first)
    watcher.wait_for(harness, second)
    harness.close(another)
    watcher.wait_for(harness)
    watch.close()


def a_watch_reports_changes_by_its_own_backend(harness: ConformanceHarness) -> None:
    """A process may publish and watch the same service."""
    backend = harness.new_backend()
    watcher = RecordingWatcher()
    watch = backend.watch(harness.service, watcher)
    watcher.wait_for(harness)
    harness.publish(backend, harness.instance())
    watcher.wait_for(harness, harness.instance())
    watch.close()


def a_watch_reports_only_its_service(harness: ConformanceHarness) -> None:
    """Watches of one backend do not disturb each other, also if names begin alike."""
    publisher, other = harness.new_backend(), harness.new_backend()
    names = [harness.service + end for end in ("", "-v2", ".v2")]
    watchers = {name: RecordingWatcher() for name in names}
    watches = [other.watch(name, watcher) for name, watcher in watchers.items()]
    for name, watcher in watchers.items():
        watcher.wait_for(harness)
        harness.publish(publisher, harness.instance(1, name))
    for name, watcher in watchers.items():
        watcher.wait_for(harness, harness.instance(1, name))
    for watch in watches:
        watch.close()


def watches_of_one_service_are_independent(harness: ConformanceHarness) -> None:
    """Each watch reports changes, and closing one does not end the other."""
    publisher, other = harness.new_backend(), harness.new_backend()
    first, second = RecordingWatcher(), RecordingWatcher()
    first_watch, second_watch = (
        other.watch(harness.service, first),
        other.watch(harness.service, second),
    )
    harness.publish(publisher, harness.instance(1))
    first.wait_for(harness, harness.instance(1))
    second.wait_for(harness, harness.instance(1))
    first_watch.close()
    harness.publish(publisher, harness.instance(2))
    second.wait_for(harness, harness.instance(1), harness.instance(2))
    second_watch.close()


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
    published_instances_are_found,
    publishing_again_replaces_an_instance,
    many_instances_are_published_at_once,
    withdrawn_instances_are_removed,
    a_late_withdrawal_keeps_the_successor,
    empty_requests_are_accepted,
    an_unknown_service_has_no_instances,
    services_have_instances,
    names_do_not_match_by_prefix,
    all_ids_and_texts_are_kept,
    a_renewed_lease_does_not_end,
    a_lease_that_is_not_renewed_ends,
    renew_reports_missing_instances,
    renew_reports_replaced_instances,
    a_view_does_not_change,
    methods_may_be_called_on_any_thread,
    close_gives_up_the_lease,
    close_is_idempotent_and_refuses_later_requests,
    close_ends_threads_and_timeouts,
    a_watch_begins_with_the_present_view,
    a_watch_reports_each_change,
    a_watch_reports_changes_by_its_own_backend,
    a_watch_reports_only_its_service,
    watches_of_one_service_are_independent,
    a_closed_watch_reports_nothing,
    a_watcher_may_close_its_watch,
    a_watcher_is_not_called_concurrently,
)
