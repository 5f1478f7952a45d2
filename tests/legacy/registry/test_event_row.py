"""Events, told in a row: sinks are users' code."""

import threading

from fixtures.waiting import WAIT_S
from rpcwheel.observe import add_sink, remove_sink
from rpcwheel.registry.event_row import EventRow


def test_a_sink_that_hangs_holds_up_nobody_for_long():
    hangs, goes_on = threading.Event(), threading.Event()

    def hang(_):
        hangs.set()
        goes_on.wait(WAIT_S)

    add_sink(hang)
    row = EventRow()
    row.tell(range(5000))
    assert hangs.wait(WAIT_S)
    assert not row.flush(0.01)
    remove_sink(hang)
    goes_on.set()
    assert row.flush(WAIT_S)
