"""The checks of what a backend publishes, withdraws, renews and finds."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

from rpcwheel.errors import RegistryClosed, RegistryUnavailable
from rpcwheel.timer import ManualTimer

from ._harness import PATIENCE_S, ConformanceHarness, RecordingWatcher, claim, on_threads, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rpcwheel.instance import ServiceInstance
    from rpcwheel.registry.backend import RegistryBackend

__all__ = ["CHECKS"]

MANY: Final = 300
"""More than etcd takes in one transaction (128 operations)."""

ROUNDS: Final = 10
"""In which a lease is renewed for a while, until it was renewed in time throughout."""


def what_is_published_is_found(stand: ConformanceHarness) -> None:
    """By all backends, as it was given."""
    publisher, other = stand.new(), stand.new()
    one = stand.instance(1, zone="west", metadata={"a": "1"}, started_at=1.5, protocol="grpcs")
    two = stand.instance(2, status="DRAINING", group="g", version="2")
    stand.publish(publisher, one, two)
    stand.finds(publisher, one, two)
    stand.finds(other, one, two)


def what_is_published_again_is_replaced(stand: ConformanceHarness) -> None:
    """By the same process, and by another one, whose epoch is another."""
    before, after = stand.new(), stand.new()
    one = stand.instance()
    stand.publish(before, one)
    stand.publish(before, one)
    stand.finds(after, one)
    changed = one.changed(weight=7)
    stand.publish(before, changed)
    stand.finds(after, changed)
    successor = one.changed(epoch="another", weight=9)
    stand.publish(after, successor)
    stand.finds(before, successor)


def many_are_published_at_once(stand: ConformanceHarness) -> None:
    """As after a registry has lost its memory."""
    publisher, other = stand.new(), stand.new()
    many = [stand.instance(number) for number in range(MANY)]
    stand.publish(publisher, *many)
    stand.finds(other, *many)
    lost = publisher.renew(many)
    claim(not lost, f"renew must find all that was published, but misses {len(lost)} of {MANY}")
    stand.withdraw(publisher, *many)
    stand.finds(other)


def what_is_withdrawn_is_gone(stand: ConformanceHarness) -> None:
    """Also if it is withdrawn twice, or was never there; the rest stays."""
    publisher, other = stand.new(), stand.new()
    one, two, never = (stand.instance(number) for number in (1, 2, 3))
    stand.publish(publisher, one, two)
    stand.withdraw(publisher, one, never)
    stand.finds(other, two)
    stand.withdraw(publisher, one)
    stand.finds(other, two)


def a_late_withdrawal_leaves_the_successor(stand: ConformanceHarness) -> None:
    """The process before withdraws when the one after has published already."""
    before, after = stand.new(), stand.new()
    old = stand.instance(1, epoch="before")
    new = stand.instance(1, epoch="after")
    stand.publish(before, old)
    stand.publish(after, new)
    before.withdraw([old])
    stand.finds(after, new)
    lost = after.renew([new])
    claim(not lost, f"renew of the successor must find it, but says {dict(lost)}")


def nothing_is_no_error(stand: ConformanceHarness) -> None:
    """No instances at all are published, withdrawn and renewed."""
    backend = stand.new()
    backend.publish([])
    backend.withdraw([])
    claim(not backend.renew([]), "renew of nothing must miss nothing")
    stand.finds(backend)


def an_unknown_service_has_no_instances(stand: ConformanceHarness) -> None:
    """It is no error either."""
    backend = stand.new()
    stand.publish(backend, stand.instance())
    stand.finds(backend, service=f"{stand.service}.unknown")


def services_are_those_with_instances(stand: ConformanceHarness) -> None:
    """In order, each once, and no longer when its last instance is gone."""
    publisher, other = stand.new(), stand.new()
    names = [f"{stand.service}.{name}" for name in ("b", "a", "c")]
    instances = [stand.instance(number, name) for name in names for number in (1, 2)]
    stand.publish(publisher, *instances)
    of_us = _services(stand, other)
    claim(of_us == sorted(names), f"services() must give {sorted(names)} in order, not {of_us}")
    stand.withdraw(publisher, *instances[:2])
    left = sorted(names[1:])
    stand.eventually(
        lambda: _services(stand, other) == left,
        lambda: f"services() must give {left}, not {_services(stand, other)}",
    )


def a_name_is_no_prefix(stand: ConformanceHarness) -> None:
    """`orders` is not `orders-v2`, nor is an id that begins like another one that."""
    publisher, other = stand.new(), stand.new()
    names = [stand.service + end for end in ("", "-v2", ".v2", "2", "_")]
    instances = [stand.instance(1, name) for name in names]
    longer = stand.instance(10)
    stand.publish(publisher, *instances, longer.changed(id=instances[0].id + "0"))
    for name, one in zip(names[1:], instances[1:], strict=True):
        stand.finds(other, one, service=name)
    stand.withdraw(publisher, instances[0])
    stand.finds(other, longer.changed(id=instances[0].id + "0"))
    stand.finds(other, instances[1], service=names[1])


def every_id_and_text_survives(stand: ConformanceHarness) -> None:
    """Also what means something to the engine, and the longest."""
    publisher, other = stand.new(), stand.new()
    ids = ["[::1]:50051", "a%2Fb", "*", "?", "..", "'\";--", "ä€😀", "{x}", "a\\b", "#", "x" * 256]
    text = {"ä\n\0": "😀\t'\"", "long": "x" * 8000}
    instances = [stand.instance(1, id=one, zone="ä b") for one in ids]
    stand.publish(publisher, *instances, stand.instance(2, metadata=text))
    stand.finds(other, *instances, stand.instance(2, metadata=text))
    lost = publisher.renew(instances)
    claim(not lost, f"renew must find all that was published, but misses {dict(lost)}")
    stand.withdraw(publisher, *instances)
    stand.finds(other, stand.instance(2, metadata=text))


def a_lease_that_is_renewed_does_not_end(stand: ConformanceHarness) -> None:
    """Renewed each third of it, for more than two of them."""
    publisher, other = stand.new(), stand.new()
    one = stand.instance()
    rounds = 0
    while True:
        rounds += 1
        start = began = stand.now
        try:
            stand.publish(publisher, one)
            pauses = [stand.now - began, stand.let_pass(2.2 * stand.lease_s)]
            began = stand.now
            lost = publisher.renew([one])
            found = stand.found(other)
        except (AssertionError, RegistryUnavailable):
            late_s = stand.now - start - 2.2 * stand.lease_s
            if rounds == ROUNDS or late_s < stand.lease_s / 4:
                raise
            continue  # the machine stood still, and the connection was lost
        if rounds == ROUNDS or max(*pauses, stand.now - began) < stand.lease_s / 4:
            break  # else the machine stood still for so long that the lease may have ended
    claim(not lost, f"renew must find what was renewed in time, but says {dict(lost)}")
    claim(found == [one], f"lookup must find what was renewed in time, but found {shown(found)}")


def what_is_not_renewed_is_forgotten(stand: ConformanceHarness) -> None:
    """As that of a process that was killed: lookups and watchers learn it, and `renew`, if late."""
    publisher, other, witness = stand.new(), stand.new(), RecordingWatcher()
    if publisher.keeps_alive:  # then only a process that ends could show it
        return
    one = stand.instance()
    other.watch(stand.service, witness)
    _publish_until_seen(stand, publisher, witness, one)
    stand.neglect(publisher)
    stand.let_pass(2 * stand.lease_s)
    stand.finds(other)
    witness.sees(stand)
    _claim_lost(publisher, [one], [one], "was not renewed in time")
    _publish_until_seen(stand, publisher, witness, one)


def _publish_until_seen(
    stand: ConformanceHarness,
    publisher: RegistryBackend,
    witness: RecordingWatcher,
    one: ServiceInstance,
) -> None:
    """Publish again when the lease has ended, as on a machine that stood still for so long."""

    def seen() -> bool:
        if publisher.renew([one]):
            stand.publish(publisher, one)
        return witness.has_seen(one)

    stand.publish(publisher, one)
    stand.eventually(
        seen,
        lambda: f"a watcher must be told of {shown([one])}, but {witness.last_words}",
    )


def renew_tells_what_is_missing(stand: ConformanceHarness) -> None:
    """What was never published, and what others have deleted; published again, it is well."""
    publisher, other = stand.new(), stand.new()
    one, two, never = (stand.instance(number) for number in (1, 2, 3))
    _claim_lost(publisher, [never], [never], "was never published")
    publisher.publish([one, two])
    other.withdraw([one])
    _claim_lost(publisher, [one, two, never], [one, never], "was withdrawn or never published")
    publisher.publish([one])
    _claim_lost(publisher, [one, two], [], "is missing")


def renew_tells_what_another_has_taken(stand: ConformanceHarness) -> None:
    """The key is there, with another epoch."""
    publisher, other = stand.new(), stand.new()
    one, two = stand.instance(1), stand.instance(2)
    publisher.publish([one, two])
    stand.publish(other, one.changed(epoch="another"))
    _claim_lost(publisher, [one, two], [one], "was taken over")


def a_view_stays_as_it_was(stand: ConformanceHarness) -> None:
    """It is not changed by what happens later."""
    backend = stand.new()
    stand.publish(backend, stand.instance(1))
    view = backend.lookup(stand.service)
    before = dict(view.records)
    stand.publish(backend, stand.instance(1, weight=3), stand.instance(2))
    claim(dict(view.records) == before, "a View that lookup gave was changed by a later publish")


def any_thread_may_ask(stand: ConformanceHarness) -> None:
    """One after the other: workers are not always the same thread."""
    publisher, other = stand.new(), stand.new()
    one = stand.instance()
    on_threads(lambda: stand.publish(publisher, one))
    on_threads(lambda: publisher.renew([one]))
    stand.finds(other, one)
    on_threads(lambda: stand.withdraw(publisher, one))
    stand.finds(other)


def close_gives_up_the_lease(stand: ConformanceHarness) -> None:
    """What the backend published is gone, what others did is not."""
    publisher, other = stand.new(), stand.new()
    one, two = stand.instance(1), stand.instance(2)
    stand.publish(publisher, one)
    stand.publish(other, two)
    stand.leave(publisher)
    stand.finds(other, two)


def closing_twice_is_no_error(stand: ConformanceHarness) -> None:
    """But asking afterwards is, and says so."""
    backend = stand.new()
    stand.publish(backend, stand.instance())
    stand.leave(backend)
    backend.close()
    for method, ask in {
        "publish": lambda: backend.publish([stand.instance()]),
        "withdraw": lambda: backend.withdraw([stand.instance()]),
        "renew": lambda: backend.renew([stand.instance()]),
        "lookup": lambda: backend.lookup(stand.service),
        "services": backend.services,
    }.items():
        try:
            ask()
        except RegistryClosed:
            continue
        raise AssertionError(f"{method} after close must raise RegistryClosed")


def closing_leaves_nothing_running(stand: ConformanceHarness) -> None:
    """No thread that was not there before, and no timeout on the backend's timer."""
    before = set(threading.enumerate())
    backend = stand.new()
    timer = backend.settings.timer
    pending = 0 if timer is None else timer.pending
    stand.publish(backend, stand.instance())
    stand.finds(backend, stand.instance())
    stand.leave(backend)
    left: list[threading.Thread] = []

    def look() -> bool:
        left[:] = [one for one in threading.enumerate() if one not in before and not _is_ours(one)]
        return not left

    end = time.monotonic() + PATIENCE_S
    while not look() and time.monotonic() < end:
        time.sleep(0.005)
    claim(not left, f"close must end the backend's threads, but there are {left}")
    if isinstance(timer, ManualTimer):  # on others, others' timeouts come and go
        claim(timer.pending <= pending, "close must cancel the backend's timeouts")


def _is_ours(thread: threading.Thread) -> bool:
    """Whether it is the shared timer's, which lasts as long as the process."""
    return thread.daemon and thread.name == "rpcwheel-timer"


def _services(stand: ConformanceHarness, backend: RegistryBackend) -> list[str]:
    """Those of this check."""
    return [name for name in backend.services() if name.startswith(stand.service)]


def _claim_lost(
    backend: RegistryBackend,
    asked: Sequence[ServiceInstance],
    wanted: Sequence[ServiceInstance],
    why: str,
) -> None:
    lost = backend.renew(asked)
    claim(
        set(lost) == {one.key for one in wanted},
        f"renew must tell of what {why}: {shown(wanted)}; but says {dict(lost)}",
    )
    known = {"missing", "taken", "lease", "session", "wiped"}
    claim(
        set(lost.values()) <= known,
        f"renew must say why, as one of {sorted(known)}, not {set(lost.values())}",
    )


CHECKS: Final = (
    what_is_published_is_found,
    what_is_published_again_is_replaced,
    many_are_published_at_once,
    what_is_withdrawn_is_gone,
    a_late_withdrawal_leaves_the_successor,
    nothing_is_no_error,
    an_unknown_service_has_no_instances,
    services_are_those_with_instances,
    a_name_is_no_prefix,
    every_id_and_text_survives,
    a_lease_that_is_renewed_does_not_end,
    what_is_not_renewed_is_forgotten,
    renew_tells_what_is_missing,
    renew_tells_what_another_has_taken,
    a_view_stays_as_it_was,
    any_thread_may_ask,
    close_gives_up_the_lease,
    closing_twice_is_no_error,
    closing_leaves_nothing_running,
)
