"""The failures of an engine, noted while the same thread notes one."""

from rpcwheel.errors import JournalUnavailable
from rpcwheel.events import JournalFailed, JournalRecovered
from rpcwheel.journal.outage import Outage


def test_a_finalizer_whose_call_is_refused_does_not_deadlock(events):
    def now_ns():
        if not reading:
            reading.append(1)
            outage.failed(JournalUnavailable("in a finalizer"))
        return 0

    reading = []
    outage = Outage("sqlite:///calls.db", now_ns, lambda: 0)
    outage.failed(JournalUnavailable("away"))
    outage.succeeded()
    assert [type(event) for event in events] == [JournalFailed, JournalRecovered]
    assert not outage.is_failing
