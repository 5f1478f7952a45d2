"""Events, told in a row: sinks are users' code."""

import threading

from rpcwheel.observe import add_sink, remove_sink
from rpcwheel.registry.event_row import EventRow


def test_events_are_told_in_order_off_the_callers_thread(events):
    threads = set()
    add_sink(watch := lambda _: threads.add(threading.current_thread()))
    row = EventRow()
    row.tell(range(100))
    assert row.flush(20)
    remove_sink(watch)
    assert events == [*range(100)]
    assert threading.current_thread() not in threads


def test_a_sink_that_hangs_holds_up_nobody_for_long():
    hangs, goes_on = threading.Event(), threading.Event()

    def hang(_):
        hangs.set()
        goes_on.wait(60)

    add_sink(hang)
    row = EventRow()
    row.tell(range(5000))
    assert hangs.wait(20)
    assert not row.flush(0.01)
    remove_sink(hang)
    goes_on.set()
    assert row.flush(20)
