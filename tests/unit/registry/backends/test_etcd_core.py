"""Decisions about watches of etcd. test_etcd_core_model.py has a model of any sequence."""

from rpcwheel.durations import NEVER
from rpcwheel.registry.backends import etcd_watch_core as core
from rpcwheel.registry.backends.etcd_watch_core import (
    DATA_LOST,
    CancelWatch,
    CreateWatch,
    EndStream,
    NotifyContactLost,
    NotifyView,
    Read,
    SendProbe,
    WatchChange,
    WatchCore,
    WatchResponse,
)

SECOND = 1_000_000_000
PROBE_INTERVAL, TIMEOUT, REREAD, RETRY = 5 * SECOND, 3 * SECOND, 60 * SECOND, 2 * SECOND
SHOP, CART = b"/shop/", b"/cart/"
A_CHANGED = frozenset("a")


def new_core() -> WatchCore:
    return WatchCore(
        probe_interval_ns=PROBE_INTERVAL,
        timeout_ns=TIMEOUT,
        reread_interval_ns=REREAD,
        max_retry_ns=RETRY,
        uniform=lambda low, high: high,
    )


def watching(*prefixes: bytes, revision: int = 10) -> WatchCore:
    """Return a core whose watches were created and read on a stream; numbered from 1."""
    watches = new_core()
    for number, prefix in enumerate(prefixes, 1):
        watches.add(number, prefix, 0)
    watches.opened(0)
    for number in range(1, len(prefixes) + 1):
        watches.received(WatchResponse(number, revision, created=True), 0)
    watches.read({number: {} for number in range(1, len(prefixes) + 1)}, revision, 0)
    return watches


def test_more_services_than_fit_in_one_transaction_are_read_in_several() -> None:
    watches = new_core()
    count = core.MAX_SERVICES_PER_READ + 1
    for number in range(1, count + 1):
        watches.add(number, b"/%d/" % number, 0)
    watches.opened(0)
    for number in range(1, count):
        watches.received(WatchResponse(number, 7, created=True), 0)
    (first,) = watches.received(WatchResponse(count, 7, created=True), 0)
    actions = watches.read({number: {} for number in first.prefixes}, 7, 0)
    assert len(first.prefixes) == core.MAX_SERVICES_PER_READ
    assert actions[-1] == Read({count: b"/%d/" % count})


def test_a_probe_without_a_response_ends_the_stream() -> None:
    watches = watching(SHOP)
    assert watches.tick(PROBE_INTERVAL - 1) == []
    assert watches.tick(PROBE_INTERVAL) == [SendProbe()]
    watches.received(WatchResponse(-1, 10), PROBE_INTERVAL)
    assert watches.tick(2 * PROBE_INTERVAL) == [SendProbe()]
    assert watches.tick(2 * PROBE_INTERVAL + TIMEOUT) == [EndStream(unresponsive=True)]
    (lost,) = watches.ended("cancelled by us", 2 * PROBE_INTERVAL + TIMEOUT)
    assert lost == NotifyContactLost(1, "no answer in 3 s")


def test_a_create_request_without_a_response_ends_the_stream() -> None:
    watches = new_core()
    watches.add(1, SHOP, 0)
    watches.opened(0)
    assert watches.tick(TIMEOUT) == [EndStream(unresponsive=True)]


def test_no_response_is_expected_during_a_read() -> None:
    watches = new_core()
    watches.add(1, SHOP, 0)
    watches.opened(0)
    watches.received(WatchResponse(1, 7, created=True), 0)
    assert watches.next_wake_ns == NEVER
    watches.add(2, CART, PROBE_INTERVAL)
    watches.read({1: {}}, 7, 10 * PROBE_INTERVAL)
    assert watches.next_wake_ns == 10 * PROBE_INTERVAL + TIMEOUT


def test_the_wait_for_the_next_stream_doubles_up_to_a_maximum_until_a_read_succeeds() -> None:
    watches = watching(SHOP)
    waits, at = [], 0
    for _ in range(6):
        watches.ended("cut", at)
        waits.append(watches.next_wake_ns - at)
        at = watches.next_wake_ns
        watches.tick(at)
    assert waits == [SECOND // 5, 2 * SECOND // 5, 4 * SECOND // 5, 8 * SECOND // 5, RETRY, RETRY]
    watches.opened(at)
    watches.received(WatchResponse(1, 10, created=True), at)
    watches.read({1: {}}, 10, at)
    watches.ended("cut", at)
    assert watches.next_wake_ns - at == SECOND // 5


def test_a_decreased_revision_above_that_of_the_last_read_is_lost_data_too() -> None:
    watches = watching(SHOP, revision=10)
    watches.received(WatchResponse(1, 50, changes=(WatchChange("a", b"1", 50),)), 0)
    assert watches.received(WatchResponse(-1, 20), 0) == [Read({1: SHOP})]
    assert watches.read({1: {}}, 20, 0) == [
        NotifyContactLost(1, DATA_LOST),
        NotifyView(1, {}, 20),
    ]
    change = WatchChange("a", b"2", 21)
    assert watches.received(WatchResponse(1, 21, changes=(change,)), 0) == [
        NotifyView(1, {"a": b"2"}, 21, A_CHANGED)
    ]


def test_a_read_of_one_watch_that_detects_lost_data_is_followed_by_one_of_the_others() -> None:
    watches = watching(SHOP, revision=10)
    watches.add(2, CART, 0)
    assert watches.received(WatchResponse(2, 10, created=True), 0) == [Read({2: CART})]
    assert watches.read({2: {}}, 3, 0) == [
        NotifyContactLost(1, DATA_LOST),
        NotifyContactLost(2, DATA_LOST),
        NotifyView(2, {}, 3),
        Read({1: SHOP}),
    ]


def test_a_response_of_a_lagging_member_causes_a_read_without_contact_lost() -> None:
    watches = watching(SHOP, revision=10)
    watches.received(WatchResponse(-1, 9), 0)
    assert watches.read({1: {}}, 10, 0) == [NotifyView(1, {}, 10)]


def test_everything_is_read_again_after_the_reread_interval() -> None:
    watches = watching(SHOP)
    late = int(REREAD * 1.1)
    assert watches.received(WatchResponse(-1, 10), late - 1) == []
    assert watches.received(WatchResponse(-1, 10), late) == [Read({1: SHOP})]
    watches.read({1: {}}, 10, late)
    assert watches.received(WatchResponse(-1, 10), late) == []


def test_a_refused_watch_is_created_again_with_each_probe_and_affects_no_other() -> None:
    watches = new_core()
    watches.add(1, SHOP, 0)
    watches.add(2, CART, 0)
    watches.opened(0)
    refused = WatchResponse(-1, 7, created=True, canceled=True, reason="permission denied")
    assert watches.received(refused, 0) == [NotifyContactLost(1, "permission denied")]
    assert watches.received(WatchResponse(2, 7, created=True), 0) == [Read({2: CART})]
    watches.read({2: {}}, 7, 0)
    assert watches.tick(PROBE_INTERVAL) == [CreateWatch(1, SHOP), SendProbe()]


def test_a_removed_watch_is_canceled_and_affects_no_other() -> None:
    watches = watching(SHOP, CART)
    assert watches.remove(1) == [CancelWatch(1)]
    assert watches.remove(1) == []
    assert watches.received(WatchResponse(1, 10, canceled=True), 0) == []
    assert watches.received(WatchResponse(2, 11, changes=(WatchChange("a", b"1", 11),)), 0)
