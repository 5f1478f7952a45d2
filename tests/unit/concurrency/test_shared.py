"""Objects that several users share, by key."""

import gc
import threading
import weakref

import pytest

from fixtures.forks import held_by_another_thread, holds_in_child
from rpcwheel._concurrency.shared import SharedObjects


class Thing:
    """An object that can be shared."""


class Interrupted(Thing):
    """Runs the last function of `then` in each `__hash__`, as a signal handler may run anywhere."""

    def __init__(self):
        self.then = []

    def __hash__(self):
        if self.then:
            self.then.pop()()
        return id(self)


def test_users_of_one_key_share_an_object_until_the_last_releases_it():
    shared = SharedObjects()
    first = shared.acquire("a", Thing)
    assert shared.acquire("a", Thing) is first
    assert shared.acquire("b", Thing) is not first
    assert [shared.release(first), shared.release(first)] == [False, True]
    assert shared.acquire("a", Thing) is not first


def test_an_object_that_was_not_acquired_has_one_user():
    assert SharedObjects().release(Thing())


def test_nothing_is_kept_of_an_object_that_could_not_be_made():
    shared = SharedObjects()
    with pytest.raises(ZeroDivisionError):
        shared.acquire("a", lambda: 1 / 0)
    assert isinstance(shared.acquire("a", Thing), Thing)


def test_an_object_that_is_dropped_is_forgotten():
    shared = SharedObjects()
    dropped = weakref.ref(shared.acquire("a", Thing))
    gc.collect()
    assert dropped() is None
    assert shared.release(shared.acquire("a", Thing))


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("later", range(3))
def test_a_use_may_end_in_the_middle_of_the_begin_or_end_of_another(begins, later):
    shared = SharedObjects()
    thing, _, _ = (shared.acquire("a", Interrupted) for _ in range(3))
    were_last = []

    def release():
        were_last.append(shared.release(thing))

    thing.then = [release, *[bool] * later]
    if begins:
        assert shared.acquire("a", Interrupted) is thing
    else:
        release()
    while thing.then:
        thing.then.pop()()
    while len(were_last) < 3 + begins:
        release()
    assert were_last == [False] * (2 + begins) + [True]


def test_a_release_does_not_wait_while_another_object_is_made():
    shared = SharedObjects()
    thing = shared.acquire("a", Thing)
    released = []

    def make():
        thread = threading.Thread(target=lambda: released.append(shared.release(thing)))
        thread.start()
        thread.join(30)
        return Thing()

    shared.acquire("b", make)
    assert released == [True]


def test_a_forked_child_has_other_objects_than_its_parent():
    shared = SharedObjects()
    thing = shared.acquire("a", Thing)
    with held_by_another_thread(shared._lock), held_by_another_thread(shared._making):
        assert holds_in_child(lambda: shared.acquire("a", Thing) is not thing)
    assert shared.release(thing)


def test_a_forked_child_may_share_the_objects_of_its_parent():
    shared = SharedObjects(also_in_child=True)
    thing = shared.acquire("a", Thing)
    with held_by_another_thread(shared._lock), held_by_another_thread(shared._making):
        assert holds_in_child(lambda: shared.acquire("a", Thing) is thing)
