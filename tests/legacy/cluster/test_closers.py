"""Who wants to know of the end is told once, and holds nobody up."""

import gc
import weakref

from rpcwheel.cluster._closers import Closers, told
from rpcwheel.observe import ListenerFailed


def test_each_is_told_once():
    closers, seen = Closers("s"), []
    closers.add(lambda: seen.append(1))
    closers.tell()
    closers.tell()
    assert seen == [1]


def test_who_comes_late_is_told_at_once():
    closers, seen = Closers("s"), []
    closers.tell()
    closers.add(lambda: seen.append(1))
    assert seen == [1]


def test_who_is_forgotten_is_not_told():
    closers, seen = Closers("s"), []
    forget = closers.add(lambda: seen.append(1))
    forget()
    forget()
    closers.tell()
    assert seen == []


def test_what_forgets_keeps_nothing_alive():
    closers = Closers("s")
    forget, alive = closers.add(print), weakref.ref(closers)
    del closers
    gc.collect()
    assert alive() is None
    forget()


def test_one_that_raises_harms_nobody_and_is_told(events):
    closers, seen = Closers("s"), []
    closers.add(lambda: 1 / 0)
    closers.add(lambda: seen.append(1))
    closers.tell()
    assert seen == [1]
    assert [type(event) for event in events] == [ListenerFailed]


def test_the_listener_may_be_named(events):
    told("s", lambda: 1 / 0, "the listener")
    assert events[0].listener == "'the listener'"
