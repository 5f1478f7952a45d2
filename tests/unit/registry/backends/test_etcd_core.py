"""The decisions about watches, each by itself. The model is in test_etcd_core_model.py."""

from rpcwheel.durations import NEVER
from rpcwheel.registry.backends import etcd_watch_core as core
from rpcwheel.registry.backends.etcd_watch_core import (
    Break,
    Cancel,
    Change,
    Create,
    Heard,
    Look,
    Open,
    Probe,
    Saw,
    Suspect,
    WatchCore,
)

SECOND = 1_000_000_000
STEP, TIMEOUT, RELOOK, RETRY = 5 * SECOND, 3 * SECOND, 60 * SECOND, 2 * SECOND
SHOP, CART = b"/shop/", b"/cart/"


def made(relook: int = RELOOK, uniform=lambda low, high: high) -> WatchCore:
    return WatchCore(
        step_ns=STEP, timeout_ns=TIMEOUT, relook_ns=relook, retry_ns=RETRY, uniform=uniform
    )


def watching(*prefixes: bytes, now: int = 0, revision: int = 10) -> WatchCore:
    """With a stream, on which all watches were created and looked at; numbers count from 1."""
    watches = made()
    for number, prefix in enumerate(prefixes, 1):
        watches.add(number, prefix, now)
    watches.opened(now)
    for number in range(1, len(prefixes) + 1):
        watches.heard(Heard(number, revision, created=True), now)
    watches.looked({number: {} for number in range(1, len(prefixes) + 1)}, revision, now)
    return watches


def test_the_first_watch_opens_a_stream_and_is_looked_at_only_when_etcd_has_confirmed_it() -> None:
    watches = made()
    assert watches.add(1, SHOP, 0) == [Open()]
    assert watches.opened(0) == [Create(1, SHOP)]
    assert watches.heard(Heard(1, 7, created=True), 0) == [Look({1: SHOP})]
    assert watches.looked({1: {b"/shop/a": b"1"}}, 8, 0) == [Saw(1, {b"/shop/a": b"1"}, 8)]


def test_all_watches_of_a_new_stream_are_looked_at_together() -> None:
    watches = made()
    watches.add(1, SHOP, 0)
    assert watches.add(2, CART, 0) == []  # the stream is being opened already
    assert watches.opened(0) == [Create(1, SHOP), Create(2, CART)]
    assert watches.heard(Heard(1, 7, created=True), 0) == []
    assert watches.heard(Heard(2, 7, created=True), 0) == [Look({1: SHOP, 2: CART})]


def test_more_services_than_fit_in_one_transaction_are_looked_at_in_several() -> None:
    watches = made()
    count = core.MOST_AT_ONCE + 1
    for number in range(1, count + 1):
        watches.add(number, b"/%d/" % number, 0)
    watches.opened(0)
    for number in range(1, count):
        watches.heard(Heard(number, 7, created=True), 0)
    (first,) = watches.heard(Heard(count, 7, created=True), 0)
    actions = watches.looked({number: {} for number in first.prefixes}, 7, 0)
    assert len(first.prefixes) == core.MOST_AT_ONCE
    assert actions[-1] == Look({count: b"/%d/" % count})


def test_changes_that_a_look_has_shown_already_are_not_applied_again() -> None:
    watches = watching(SHOP, revision=10)
    old = Change(b"/shop/a", b"old", 9)
    assert watches.heard(Heard(1, 9, changes=(old,)), 0) == []
    new = (Change(b"/shop/a", b"new", 11), Change(b"/shop/b", b"new", 11))
    assert watches.heard(Heard(1, 11, changes=new), 0) == [
        Saw(1, {b"/shop/a": b"new", b"/shop/b": b"new"}, 11)
    ]
    gone = Change(b"/shop/a", None, 12)
    assert watches.heard(Heard(1, 12, changes=(gone,)), 0) == [Saw(1, {b"/shop/b": b"new"}, 12)]


def test_a_probe_is_sent_each_step_and_one_without_an_answer_ends_the_stream() -> None:
    watches = watching(SHOP)
    assert watches.tick(STEP - 1) == []
    assert watches.tick(STEP) == [Probe()]
    watches.heard(Heard(-1, 10), STEP)
    assert watches.tick(2 * STEP) == [Probe()]
    assert watches.tick(2 * STEP + TIMEOUT) == [Break(silent=True)]
    (doubt,) = watches.ended("cancelled by us", 2 * STEP + TIMEOUT)
    assert doubt == Suspect(1, "no answer in 3 s")


def test_a_stream_that_does_not_even_confirm_a_watch_is_ended_too() -> None:
    watches = made()
    watches.add(1, SHOP, 0)
    watches.opened(0)
    assert watches.tick(TIMEOUT) == [Break(silent=True)]


def test_while_it_looks_no_answer_is_expected() -> None:
    watches = made()
    watches.add(1, SHOP, 0)
    watches.opened(0)
    watches.heard(Heard(1, 7, created=True), 0)
    assert watches.next_wake_ns == NEVER
    watches.add(2, CART, STEP)
    watches.looked({1: {}}, 7, 10 * STEP)
    assert watches.next_wake_ns == 10 * STEP + TIMEOUT


def test_watchers_are_made_suspicious_once_until_they_see_something() -> None:
    watches = watching(SHOP)
    assert watches.ended("cut", 0) == [Suspect(1, "cut")]
    for _ in range(3):
        at = watches.next_wake_ns
        assert watches.tick(at) == [Open()]
        assert watches.ended("refused", at) == []
    at = watches.next_wake_ns
    watches.tick(at)
    watches.opened(at)
    watches.heard(Heard(1, 10, created=True), at)
    watches.looked({1: {}}, 10, at)
    assert watches.ended("cut again", at) == [Suspect(1, "cut again")]


def test_on_a_new_stream_everything_is_created_and_looked_at_anew() -> None:
    watches = watching(SHOP, revision=10)
    watches.ended("cut", 0)
    at = watches.next_wake_ns
    watches.tick(at)
    assert watches.opened(at) == [Create(1, SHOP)]
    missed = Change(b"/shop/b", b"1", 13)
    assert watches.heard(Heard(1, 12, created=True), at) == [Look({1: SHOP})]
    assert watches.looked({1: {b"/shop/a": b"1"}}, 12, at) == [Saw(1, {b"/shop/a": b"1"}, 12)]
    assert watches.heard(Heard(1, 13, changes=(missed,)), at)


def test_the_waits_between_streams_double_up_to_the_longest_and_begin_anew_after_a_look() -> None:
    watches = watching(SHOP)
    waits, at = [], 0
    for _ in range(6):
        watches.ended("cut", at)
        waits.append(watches.next_wake_ns - at)
        at = watches.next_wake_ns
        watches.tick(at)
    assert waits == [SECOND // 5, 2 * SECOND // 5, 4 * SECOND // 5, 8 * SECOND // 5, RETRY, RETRY]
    watches.opened(at)
    watches.heard(Heard(1, 10, created=True), at)
    watches.looked({1: {}}, 10, at)
    watches.ended("cut", at)
    assert watches.next_wake_ns - at == SECOND // 5


def test_a_revision_that_goes_backwards_makes_it_look_and_a_look_tells_the_truth() -> None:
    watches = watching(SHOP, revision=10)
    watches.heard(Heard(1, 11, changes=(Change(b"/shop/a", b"1", 11),)), 0)
    assert watches.heard(Heard(-1, 3), 0) == [Look({1: SHOP})]
    assert watches.looked({1: {}}, 3, 0) == [Suspect(1, core.WIPED), Saw(1, {}, 3)]


def test_a_revision_may_go_backwards_and_still_be_above_that_of_the_last_look() -> None:
    watches = watching(SHOP, revision=10)
    watches.heard(Heard(1, 50, changes=(Change(b"/shop/a", b"1", 50),)), 0)
    assert watches.heard(Heard(-1, 20), 0) == [Look({1: SHOP})]
    assert watches.looked({1: {}}, 20, 0) == [Suspect(1, core.WIPED), Saw(1, {}, 20)]
    change = Change(b"/shop/a", b"2", 21)
    assert watches.heard(Heard(1, 21, changes=(change,)), 0) == [Saw(1, {b"/shop/a": b"2"}, 21)]


def test_a_look_for_one_watch_that_finds_the_memory_lost_is_followed_by_one_for_the_others() -> (
    None
):
    watches = watching(SHOP, revision=10)
    watches.add(2, CART, 0)
    assert watches.heard(Heard(2, 10, created=True), 0) == [Look({2: CART})]
    assert watches.looked({2: {}}, 3, 0) == [
        Suspect(1, core.WIPED),
        Suspect(2, core.WIPED),
        Saw(2, {}, 3),
        Look({1: SHOP}),
    ]


def test_a_member_that_lags_behind_makes_it_look_but_nobody_suspicious() -> None:
    watches = watching(SHOP, revision=10)
    watches.heard(Heard(-1, 9), 0)
    assert watches.looked({1: {}}, 10, 0) == [Saw(1, {}, 10)]


def test_now_and_then_it_looks_though_nothing_seems_to_be_missing() -> None:
    watches = watching(SHOP)
    late = int(RELOOK * 1.1)
    assert watches.heard(Heard(-1, 10), late - 1) == []
    assert watches.heard(Heard(-1, 10), late) == [Look({1: SHOP})]
    watches.looked({1: {}}, 10, late)
    assert watches.heard(Heard(-1, 10), late) == []


def test_a_watch_that_etcd_refuses_is_asked_for_again_with_each_probe_and_hurts_no_other() -> None:
    watches = made()
    watches.add(1, SHOP, 0)
    watches.add(2, CART, 0)
    watches.opened(0)
    denied = Heard(-1, 7, created=True, canceled=True, reason="permission denied")
    assert watches.heard(denied, 0) == [Suspect(1, "permission denied")]
    assert watches.heard(Heard(2, 7, created=True), 0) == [Look({2: CART})]
    watches.looked({2: {}}, 7, 0)
    assert watches.tick(STEP) == [Create(1, SHOP), Probe()]


def test_a_stream_without_watches_is_ended_and_nobody_is_made_suspicious() -> None:
    watches = watching(SHOP)
    assert watches.remove(1) == [Break()]
    assert watches.add(2, CART, 0) == []  # it is ending: the next one will have it
    assert watches.ended("cancelled by us", 0) == []
    assert watches.tick(watches.next_wake_ns) == [Open()]


def test_a_watch_that_is_removed_leaves_the_others_alone() -> None:
    watches = watching(SHOP, CART)
    assert watches.remove(1) == [Cancel(1)]
    assert watches.remove(1) == []
    assert watches.heard(Heard(1, 10, canceled=True), 0) == []
    assert watches.heard(Heard(2, 11, changes=(Change(b"/cart/a", b"1", 11),)), 0)
