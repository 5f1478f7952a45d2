"""How a directory keeps up with what it is told, and with timers that fail."""

import threading
from contextlib import closing

import pytest

from fixtures.seen_worlds import REGISTRY, SERVICE, keys, shows, view
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.errors import TooManyTimeouts
from rpcwheel.observe.events import RegistryFailed
from rpcwheel.registry.policy import RegistryPolicy
from rpcwheel.registry.watches import MAX_PENDING, ServiceWatch
from rpcwheel.timer import WheelTimer

SOON = RegistryPolicy(lease_ttl=1, stale_timeout=0.2)


@pytest.fixture
def directory(timer):
    with closing(ServiceWatch(SERVICE, REGISTRY, timer=timer)) as directory:
        yield directory


@pytest.fixture
def busy(directory):
    """What lets the core of the directory go on, which is busy."""
    gate = busied(directory)
    yield gate
    gate.set()


def busied(directory):
    gate, entered = threading.Event(), threading.Event()

    def hang():
        entered.set()
        gate.wait(WAIT_S)

    directory._updates.submit(hang)
    assert entered.wait(WAIT_S)
    return gate


def test_of_views_that_come_faster_than_it_reads_only_the_last_one_waits(directory, busy):
    for _ in range(1000):
        directory.on_view(view("abc"))
    directory.on_view(view("ab"))
    assert len(directory._updates._jobs) == 1
    assert len(directory._pending) == 1
    busy.set()
    assert shows(directory, "ab")
    assert directory.snapshot.revision == 1


def test_no_doubt_is_passed_over_nor_what_was_seen_before_it(directory, busy):
    directory.on_view(view("abc"))
    directory.on_contact_lost("the connection was lost")
    directory.on_contact_lost("it was lost again")
    directory.on_view(view("xyz"))
    directory.on_view(view())
    busy.set()
    assert wait_until(lambda: directory.snapshot and directory.snapshot.stale == {"a", "b", "c"})
    assert keys(directory.snapshot) == "abc"


def test_who_said_draining_in_a_view_that_is_passed_over_is_gone_at_once(directory):
    directory.on_view(view("abcd"))
    assert shows(directory, "abcd")
    gate = busied(directory)
    directory.on_contact_lost("the connection was lost")
    directory.on_view(view("ab", draining="cd"))
    directory.on_view(view("a", draining="b"))
    directory.on_view(view("ac"))
    gate.set()
    assert shows(directory, "ac")
    assert directory.snapshot.stale == frozenset()


def test_views_and_doubts_by_turns_do_not_wait_without_limit(directory, busy):
    directory.on_view(view("ab"))
    for _ in range(1000):
        directory.on_contact_lost("the connection was lost")
        directory.on_view(view("a"))
    assert len(directory._pending) <= MAX_PENDING
    busy.set()
    assert shows(directory, "ab")
    assert wait_until(lambda: directory.snapshot.stale == {"b"})


def test_who_said_draining_in_one_of_too_many_views_is_gone_at_once(directory):
    directory.on_view(view("abc"))
    assert shows(directory, "abc")
    gate = busied(directory)
    directory.on_contact_lost("the connection was lost")
    directory.on_view(view("ab", draining="c"))
    for _ in range(MAX_PENDING):
        directory.on_contact_lost("the connection was lost")
        directory.on_view(view("a"))
    gate.set()
    assert shows(directory, "ab")
    assert wait_until(lambda: directory.snapshot.stale == {"b"})


def test_a_timer_that_is_full_does_not_make_it_hold_for_ever(events):
    with WheelTimer(max_pending=1) as timer:
        timer.new_timeout(print, 1000)
        with closing(ServiceWatch(SERVICE, REGISTRY, SOON, timer=timer)) as directory:
            held_and_then_gone(directory)
    (told,) = [event for event in events if isinstance(event, RegistryFailed)]
    assert (told.registry, type(told.error)) == (REGISTRY, TooManyTimeouts)


def held_and_then_gone(directory):
    directory.on_view(view("ab"))
    directory.on_contact_lost("the connection was lost")
    directory.on_view(view("a"))
    assert shows(directory, "a")
