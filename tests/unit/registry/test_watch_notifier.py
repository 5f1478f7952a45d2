"""A watcher is called in order, one call at a time."""

import threading

from hypothesis import given
from hypothesis import strategies as st

from fixtures.timers import run_threads
from fixtures.waiting import wait_until
from rpcwheel.observe import CallbackFailed
from rpcwheel.registry.backend import View
from rpcwheel.registry.backends.watch_notifier import WatchNotifier

A, B = View({"a": b"1"}, 1), View({"b": b"2"}, 2)


class Recorder:
    """A watcher that records its calls."""

    def __init__(self):
        self.news = []

    def saw(self, view):
        self.news.append(view)

    def suspect(self, reason):
        self.news.append(reason)


def test_a_view_with_the_same_records_is_left_out():
    watcher = Recorder()
    notifier = WatchNotifier(watcher)
    for view in (A, View(A.records, 7), B):
        notifier.add(view)
        notifier.start()
    assert watcher.news == [A, B]


def test_after_lost_contact_the_same_records_are_passed_on():
    watcher = Recorder()
    notifier = WatchNotifier(watcher)
    notifier.add(A)
    notifier.start()
    notifier.add("lost")
    notifier.add(A)
    notifier.start()
    assert watcher.news == [A, "lost", A]


def test_what_is_added_in_a_call_is_passed_on_after_it():
    class Deep(Recorder):
        def saw(self, view):
            super().saw(view)
            if view is A:
                notifier.add(B)
                notifier.start()
                self.news.append("end of A")

    notifier = WatchNotifier(watcher := Deep())
    notifier.add(A)
    notifier.start()
    assert watcher.news == [A, "end of A", B]


def test_a_watcher_that_closes_its_watch_is_called_no_more():
    class Leaving(Recorder):
        def suspect(self, reason):
            super().suspect(reason)
            notifier.close()

    closed = []
    notifier = WatchNotifier(watcher := Leaving(), closed.append)
    notifier.add("lost")
    notifier.add(A)
    notifier.start()
    notifier.close()
    notifier.add(B)
    notifier.start()
    assert watcher.news == ["lost"]
    assert closed == [notifier]
    assert notifier.closed


def test_a_watcher_that_raises_is_an_event_and_is_called_again(events):
    class Raising(Recorder):
        def saw(self, view):
            super().saw(view)
            raise OSError("sorry")

    notifier = WatchNotifier(watcher := Raising())
    for view in (A, B):
        notifier.add(view)
        notifier.start()
    assert watcher.news == [A, B]
    assert [type(event) for event in events] == [CallbackFailed, CallbackFailed]


def test_closing_does_not_wait_for_a_call_on_another_thread():
    entered, release = threading.Event(), threading.Event()

    class Slow(Recorder):
        def saw(self, view):
            entered.set()
            release.wait()

    notifier = WatchNotifier(Slow())
    notifier.add(A)
    thread = threading.Thread(target=notifier.start)
    thread.start()
    entered.wait()
    notifier.close()
    assert thread.is_alive()
    release.set()
    thread.join()


@given(st.integers(2, 4), st.integers(1, 20))
def test_calls_of_many_threads_never_overlap_and_keep_their_order(threads, rounds):
    class Careful(Recorder):
        inside = False

        def saw(self, view):
            assert not self.inside
            self.inside = True
            super().saw(view)
            self.inside = False

    notifier = WatchNotifier(watcher := Careful())
    lock = threading.Lock()
    count = 0

    def work():
        nonlocal count
        for _ in range(rounds):
            with lock:
                count += 1
                notifier.add(View({"n": str(count).encode()}, count))
            notifier.start()

    run_threads(*[work] * threads)
    assert wait_until(lambda: watcher.news[-1].revision == threads * rounds)
    revisions = [view.revision for view in watcher.news]
    assert revisions == sorted(revisions)
