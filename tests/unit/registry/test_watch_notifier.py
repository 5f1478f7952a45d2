"""A watcher is called in order, one call at a time, and learns which records changed."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from fixtures.engine_watchers import CheckedWatcher
from fixtures.waiting import WAIT_S, Gate, in_thread
from rpcwheel.events import CallbackFailed
from rpcwheel.registry.backend import View
from rpcwheel.registry.backends.watch_notifier import WatchNotifier

A, B = View({"a": b"1"}, 1), View({"b": b"2"}, 2)
IDS = st.sampled_from("abc")
VALUES = st.sampled_from([None, b"1", b"2"])


class Recorder:
    """A watcher that records its calls."""

    def __init__(self):
        self.news = []

    def on_view(self, view):
        self.news.append(view)

    def on_contact_lost(self, reason):
        self.news.append(reason)


def test_a_view_added_during_a_call_is_passed_on_after_it():
    class Deep(Recorder):
        def on_view(self, view):
            super().on_view(view)
            if view is A:
                notifier.add(B)
                notifier.start()
                self.news.append("end of A")

    notifier = WatchNotifier(watcher := Deep())
    notifier.add(A)
    notifier.start()
    assert watcher.news == [A, "end of A", B]


def test_a_closed_watcher_is_not_called():
    class Leaving(Recorder):
        def on_contact_lost(self, reason):
            super().on_contact_lost(reason)
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


def test_an_exception_of_the_watcher_becomes_an_event(events):
    class Raising(Recorder):
        def on_view(self, view):
            super().on_view(view)
            raise OSError("sorry")

    notifier = WatchNotifier(watcher := Raising())
    for view in (A, B):
        notifier.add(view)
        notifier.start()
    assert watcher.news == [A, B]
    assert [type(event) for event in events] == [CallbackFailed, CallbackFailed]


def test_closing_does_not_wait_for_a_call_on_another_thread():
    watcher = Recorder()
    watcher.on_view = gate = Gate()
    notifier = WatchNotifier(watcher)
    notifier.add(A)
    starting = in_thread(notifier.start)
    assert gate.entered.wait(WAIT_S)
    notifier.close()
    assert not starting.done()
    gate.opened.set()
    starting.result(WAIT_S)


@given(
    st.lists(
        st.one_of(
            st.tuples(IDS, VALUES, st.booleans()),
            st.sampled_from(["start", "lost"]),
        ),
        max_size=30,
    )
)
def test_each_call_is_news_and_changed_has_exactly_the_ids_that_differ_from_the_last_view(steps):
    """However many views were merged or left out in between."""
    watcher = CheckedWatcher()
    notifier = WatchNotifier(watcher)
    records = {}
    notifier.add(View({}))
    for step in steps:
        match step:
            case "start":
                notifier.start()
            case "lost":
                notifier.add("lost")
            case (name, value, is_known):
                records = {key: old for key, old in records.items() if key != name}
                if value is not None:
                    records[name] = value
                notifier.add(View(records, changed=frozenset({name, "a"}) if is_known else None))
    notifier.add(View(records, changed=frozenset()))
    notifier.start()
    assert watcher.views[-1].records == records
    assert not watcher.wrong
    assert not any(one == other == "lost" for one, other in pairwise(watcher.news))
