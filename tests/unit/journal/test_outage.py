"""The failures of an engine, noted while the same thread notes one."""

from rpcwheel.errors import JournalUnavailable
from rpcwheel.events import JournalFailed, JournalRecovered
from rpcwheel.journal.outage import Outage


class InterruptedLock:
    """A lock under which a signal handler runs, once."""

    def __init__(self, lock, handler):
        self._lock, self._handlers = lock, [handler]

    def __enter__(self):
        assert self._lock.acquire(blocking=False)
        while self._handlers:
            self._handlers.pop()()

    def __exit__(self, *_):
        self._lock.release()


def test_a_signal_handler_whose_call_fails_does_not_deadlock(events):
    outage = Outage("sqlite:///calls.db", lambda: 0, lambda: 0)
    handler = lambda: outage.failed(JournalUnavailable("in a handler"))  # noqa: E731
    outage._lock = InterruptedLock(outage._lock, handler)
    outage.failed(JournalUnavailable("away"))
    assert [type(event) for event in events] == [JournalFailed]


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
