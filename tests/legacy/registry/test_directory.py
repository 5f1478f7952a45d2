"""What one process knows of one service: who is told, in what order, and what is left behind."""

import os
import threading
from contextlib import contextmanager

import pytest

from fixtures.seen_worlds import REGISTRY, SERVICE, Listener, ended, keys, shows, view
from fixtures.timers import run_threads
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel._concurrency.executor import SerialExecutor
from rpcwheel.registry.watches import ServiceWatch


@pytest.fixture
def make(timer):
    """Make directories; closed at the end."""
    made = []

    def make(**others):
        made.append(ServiceWatch(SERVICE, REGISTRY, **{"timer": timer} | others))
        return made[-1]

    yield make
    for directory in made:
        directory.close()
    assert timer.pending == 0


@pytest.fixture
def directory(make):
    return make()


@pytest.fixture
def listener():
    return Listener()


def kinds(events):
    return {type(event) for event in events}


# Listeners


def test_a_listener_that_is_asked_to_look_again_is_not_told_the_same(directory, listener):
    listening, row = directory.add_listener(listener), SerialExecutor()
    for word in ("a", "ab"):
        directory.on_view(view(word))
        assert wait_until(lambda word=word: listener.keys[-1:] == [word])
        listening.notify(row)
        assert wait_until(lambda: not row._running)
    assert listener.keys == ["a", "ab"]


def test_a_listener_is_called_by_one_thread_at_a_time(directory):
    inside, told = threading.Lock(), []

    def one_at_a_time(snapshot):
        assert inside.acquire(blocking=False)
        told.append(snapshot.revision)
        inside.release()

    directory.add_listener(one_at_a_time)
    for turn in range(100):
        word = "ab" if turn % 2 else "abc"
        directory.on_view(view(word))
        assert shows(directory, word)
    directory.on_view(view("abcd"))
    assert wait_until(lambda: told and told[-1] == directory.snapshot.revision == 101)
    assert told == sorted(set(told))


def test_a_thousand_listeners_that_hang_take_no_thousand_threads(directory):
    told, gate, before = [], threading.Event(), threading.active_count()

    def listener(snapshot):
        gate.wait(WAIT_S)
        told.append(snapshot)

    for _ in range(1000):
        directory.add_listener(listener)
    directory.on_view(view("a"))
    assert shows(directory, "a")
    assert wait_until(lambda: not directory._updates._running)
    assert threading.active_count() - before <= 24
    gate.set()
    assert wait_until(lambda: len(told) == 1000)


# Waiting


def test_close_wakes_who_waits_for_ever(directory):
    with waiting(directory, None) as got:
        directory.close()
    assert got == [None]


def test_more_seconds_than_the_system_can_count_are_for_ever(directory):
    with waiting(directory, 1e300) as got:
        directory.on_view(view("a"))
    assert [keys(snapshot) for snapshot in got] == ["a"]


@contextmanager
def waiting(directory, seconds):
    """Something to do while a thread waits; then what it got."""
    got = []
    thread = threading.Thread(target=lambda: got.append(directory.wait(seconds)), daemon=True)
    thread.start()
    assert wait_until(lambda: directory._changed._waiters)
    yield got
    thread.join(WAIT_S)


# Time and events


def test_a_snapshot_that_is_asked_for_has_its_age_of_now(directory, timer):
    directory.on_view(view("a"))
    assert directory.wait(WAIT_S).age_s == 0.0
    timer.advance(5)
    directory.on_contact_lost("the connection was lost")
    assert wait_until(lambda: directory._shown.since_ns is not None)
    timer.advance(7)
    assert (directory.snapshot.age_s, directory.snapshot.revision) == (7.0, 1)


# The end


def test_after_close_nothing_is_told_and_what_was_known_is_still_shown(directory, listener):
    directory.on_view(view("a"))
    directory.wait(WAIT_S)
    directory.close()
    directory.close()
    directory.add_listener(listener)
    directory.on_view(view("ab"))
    directory.on_contact_lost("the connection was lost")
    assert keys(directory.snapshot) == "a"
    assert wait_until(lambda: not directory._updates._running)
    assert not listener.told


def test_a_listener_that_waits_for_its_turn_at_close_is_not_called(directory, listener):
    gate, entered = threading.Event(), threading.Event()

    def slow(snapshot):
        listener(snapshot)
        entered.set()
        gate.wait(WAIT_S)

    directory.add_listener(slow)
    directory.on_view(view("a"))
    assert entered.wait(WAIT_S)
    directory.on_view(view("ab"))
    assert shows(directory, "ab")
    directory.close()
    gate.set()
    assert wait_until(lambda: not any(row._running for row in directory._queues))
    assert listener.keys == ["a"]


def test_views_listeners_and_ends_from_all_threads_at_once_leave_nothing(make, timer):
    directory = make()

    def views():
        for turn in range(100):
            directory.on_view(view("abcde"[: turn % 6]))
            directory.on_contact_lost("the connection was lost")

    def comers():
        for _ in range(100):
            directory.add_listener(lambda _: None).close()

    run_threads(views, comers, views, comers)
    directory.close()
    assert wait_until(lambda: not directory._updates._running)
    assert timer.pending == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_what_was_known_and_does_not_hang(directory):
    directory.on_view(view("a"))
    directory.wait(WAIT_S)
    held, gate = threading.Event(), threading.Event()

    def hold():
        with directory._changed:
            held.set()
            gate.wait(WAIT_S)

    threading.Thread(target=hold, daemon=True).start()
    assert held.wait(WAIT_S)
    child = os.fork()
    if not child:
        told = threading.Event()
        directory.add_listener(lambda _: told.set())
        good = told.wait(WAIT_S) and keys(directory.wait(0)) == "a"
        directory.close()
        os._exit(0 if good else 1)
    assert ended(child) == 0
    gate.set()
