"""The watch of one service: views, listeners, and the snapshot file."""

import threading

import pytest

from fixtures.cache_worlds import REGISTRY, SERVICE, SnapshotListener, ids_of, instances, view
from fixtures.forks import holds_in_child
from fixtures.interrupts import interrupted_at_each_call
from fixtures.timers import run_threads
from fixtures.waiting import WAIT_S, in_thread, wait_until
from rpcwheel._concurrency.executor import SerialExecutor
from rpcwheel.instance import Snapshot
from rpcwheel.registry.policy import RegistryPolicy, RegistryRules
from rpcwheel.registry.watches import LISTENER_QUEUES, Listener, ServiceWatch


class FakeSnapshotFile:
    """A snapshot file in memory."""

    def __init__(self):
        self.stored = None
        self.kept = []

    def load(self, service):
        assert service == SERVICE
        return self.stored

    def keep(self, service, found, agrees=None):
        assert service == SERVICE
        self.kept.append((ids_of(found), agrees))


@pytest.fixture
def file():
    return FakeSnapshotFile()


@pytest.fixture
def make(file, timer):
    """Make watches; closed at the end."""
    made = []

    def make():
        unused = {"on_answer": lambda: None, "on_loss": lambda _: None}
        rules = RegistryRules.from_policy(RegistryPolicy())
        watch = ServiceWatch(SERVICE, REGISTRY, rules, timer=timer, snapshots=file, **unused)
        made.append(watch)
        return watch

    yield make
    for watch in made:
        watch.close()
    assert timer.pending == 0


@pytest.fixture
def watch(make):
    return make()


def shows(watch, ids, stale=""):
    """Wait until the snapshot has these instances, those in `stale` among them."""
    return wait_until(
        lambda: ids_of(watch.snapshot) == ids and "".join(sorted(watch.snapshot.stale)) == stale
    )


def test_an_instance_that_was_draining_in_any_view_is_removed_at_once(watch):
    watch.on_view(view("abcd"))
    watch.on_contact_lost("the connection was lost")
    watch.on_view(view("ab", draining="cd"))
    watch.on_view(view("a", draining="b"))
    watch.on_view(view("ac"))
    assert shows(watch, "ac")


# Snapshots


def test_the_age_grows_after_a_loss_of_contact_and_the_revision_stays(watch, timer):
    watch.on_view(view("a"))
    assert watch.wait(WAIT_S).age_s == 0.0
    watch.on_contact_lost("the connection was lost")
    assert wait_until(lambda: timer.advance(0.01) >= 0 and watch.snapshot.age_s > 0)
    assert watch.snapshot.revision == 1


@pytest.mark.parametrize("timeout_s", [None, 1e300])
def test_close_ends_a_wait_without_limit(watch, timeout_s):
    waiting = in_thread(watch.wait, timeout_s)
    watch.close()
    assert waiting.result(WAIT_S) is None


def test_other_threads_use_a_watch_after_a_wait_that_was_interrupted(watch):
    for _ in interrupted_at_each_call(lambda: watch.wait(0)):
        run_threads(lambda: watch.add_listener(print).close())


def test_a_wait_ends_in_a_forked_child_which_gets_no_updates(watch):
    assert not watch.closed
    assert holds_in_child(lambda: watch.wait() is None and watch.closed)


def test_after_close_updates_are_ignored_and_the_snapshot_can_be_read(watch):
    listener = SnapshotListener()
    watch.on_view(view("a"))
    watch.wait(WAIT_S)
    watch.close()
    watch.add_listener(listener)
    watch.on_view(view("ab"))
    watch.on_contact_lost("the connection was lost")
    assert (ids_of(watch.snapshot), listener.snapshots) == ("a", [])


def test_close_during_updates_and_new_listeners_leaves_no_timeout(watch, timer):
    def update():
        for number in range(200):
            watch.on_view(view("abcde"[: number % 6]))
            watch.on_contact_lost("the connection was lost")

    def listen():
        for _ in range(100):
            watch.add_listener(lambda _: None).close()

    def close():
        wait_until(lambda: watch.snapshot)
        watch.close()

    run_threads(update, listen, update, close)
    assert timer.pending == 0


# Listeners


def test_a_listener_gets_each_revision_once(watch):
    listener = SnapshotListener()
    registration, queue = watch.add_listener(listener), SerialExecutor()
    for ids in ("a", "ab"):
        watch.on_view(view(ids))
        assert wait_until(lambda ids=ids: listener.ids[-1:] == [ids])
        registration.notify(queue)
        assert queue.wait(WAIT_S)
    assert listener.ids == ["a", "ab"]


def test_a_listener_that_is_added_later_gets_the_snapshot(watch):
    watch.on_view(view("a"))
    assert watch.wait(WAIT_S)
    listener = SnapshotListener()
    watch.add_listener(listener)
    assert wait_until(lambda: listener.ids == ["a"])


def test_a_closed_listener_is_not_called(watch):
    watch.on_view(view("a"))
    assert watch.wait(WAIT_S)
    function, queue = SnapshotListener(), SerialExecutor()
    listener = Listener(watch, function)
    listener.close()
    listener.notify(queue)
    assert queue.wait(WAIT_S)
    assert function.snapshots == []


def test_hanging_listeners_take_one_thread_per_queue(watch):
    entered, called, go_on = [], [], threading.Event()

    def listener(snapshot):
        entered.append(threading.current_thread())
        go_on.wait(WAIT_S)
        called.append(snapshot)

    for _ in range(1000):
        watch.add_listener(listener)
    watch.on_view(view("a"))
    assert wait_until(lambda: len(entered) >= LISTENER_QUEUES)
    assert len(set(entered)) == LISTENER_QUEUES
    go_on.set()
    assert wait_until(lambda: len(called) == 1000)


# The snapshot file


def test_instances_that_only_the_file_has_are_not_written_again(make, file):
    file.stored = Snapshot(SERVICE, instances("a"), 1, "cache", 0.0)
    watch = make()
    watch.on_contact_lost("it can't be reached")
    assert shows(watch, "a")
    watch.close()
    assert file.kept == []


def test_live_instances_are_written_at_each_change_and_at_close(watch, file):
    for ids in ("a", "ab"):
        watch.on_view(view(ids))
        assert wait_until(lambda ids=ids: [kept for kept, _ in file.kept][-1:] == [ids])
    watch.close()
    assert [kept for kept, _ in file.kept] == ["a", "ab", "ab"]


def test_an_entry_is_confirmed_while_the_registry_agrees_with_it(watch, file):
    watch.on_view(view("a"))
    assert wait_until(lambda: file.kept)
    ((_, agrees),) = file.kept
    assert agrees() is True
    watch.on_contact_lost("the connection was lost")
    assert wait_until(lambda: agrees() is False)
    watch.close()
    assert agrees() is None
