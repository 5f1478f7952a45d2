"""A watcher hears all that matters, in order, one call at a time."""

import threading

from hypothesis import given
from hypothesis import strategies as st

from fixtures.timers import run_threads
from fixtures.waiting import wait_until
from rpcwheel.observe import CallbackFailed
from rpcwheel.registry.provider import View
from rpcwheel.registry.providers._telling import Telling

A, B = View({"a": b"1"}, 1), View({"b": b"2"}, 2)


class Told:
    """What a watcher was told."""

    def __init__(self):
        self.news = []

    def saw(self, view):
        self.news.append(view)

    def suspect(self, reason):
        self.news.append(reason)


def test_of_views_in_a_row_the_last_is_told():
    told = Told()
    telling = Telling(told)
    telling.note(A)
    telling.note(B)
    telling.tell()
    telling.tell()
    assert told.news == [B]


def test_a_view_with_the_same_records_is_no_news():
    told = Told()
    telling = Telling(told)
    for view in (A, View(A.records, 7), B):
        telling.note(view)
        telling.tell()
    assert told.news == [A, B]


def test_a_doubt_is_told_before_the_view_after_it_which_is_news_then():
    told = Told()
    telling = Telling(told)
    telling.note(A)
    telling.tell()
    telling.note(B)
    telling.note("lost")
    telling.note("lost again")
    telling.note(A)
    telling.tell()
    assert told.news == [A, "lost", A]


def test_what_is_noted_in_a_call_is_told_after_it():
    class Deep(Told):
        def saw(self, view):
            super().saw(view)
            if view is A:
                telling.note(B)
                telling.tell()
                self.news.append("end of A")

    telling = Telling(told := Deep())
    telling.note(A)
    telling.tell()
    assert told.news == [A, "end of A", B]


def test_nothing_is_told_after_it_is_closed_even_by_the_watcher_itself():
    class Leaving(Told):
        def suspect(self, reason):
            super().suspect(reason)
            telling.close()

    closed = []
    telling = Telling(told := Leaving(), closed.append)
    telling.note("lost")
    telling.note(A)
    telling.tell()
    telling.close()
    telling.note(B)
    telling.tell()
    assert told.news == ["lost"]
    assert closed == [telling]
    assert telling.closed


def test_one_that_raises_is_an_event_and_is_told_on(events):
    class Raising(Told):
        def saw(self, view):
            super().saw(view)
            raise OSError("sorry")

    telling = Telling(told := Raising())
    for view in (A, B):
        telling.note(view)
        telling.tell()
    assert told.news == [A, B]
    assert [type(event) for event in events] == [CallbackFailed, CallbackFailed]


def test_closing_does_not_wait_for_a_call_on_another_thread():
    entered, release = threading.Event(), threading.Event()

    class Slow(Told):
        def saw(self, view):
            entered.set()
            release.wait()

    telling = Telling(Slow())
    telling.note(A)
    thread = threading.Thread(target=telling.tell)
    thread.start()
    entered.wait()
    telling.close()
    assert thread.is_alive()
    release.set()
    thread.join()


@given(st.integers(2, 4), st.integers(1, 20))
def test_calls_never_overlap_and_the_last_state_is_told_in_the_end(threads, rounds):
    class Careful(Told):
        inside = False

        def saw(self, view):
            assert not self.inside
            self.inside = True
            super().saw(view)
            self.inside = False

    telling = Telling(told := Careful())
    lock = threading.Lock()
    count = 0

    def work():
        nonlocal count
        for _ in range(rounds):
            with lock:
                count += 1
                telling.note(View({"n": str(count).encode()}, count))
            telling.tell()

    run_threads(*[work] * threads)
    assert wait_until(lambda: told.news[-1].revision == threads * rounds)
    revisions = [view.revision for view in told.news]
    assert revisions == sorted(revisions)
