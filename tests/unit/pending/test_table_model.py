"""Random operations in both worlds, compared with a model of one dictionary."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fixtures.pending_worlds import CANCELLED, PENDING, AioWorld, SyncWorld, outcome
from fixtures.waiting import wait_until
from rpcwheel.errors import CallsClosed, CallTimeout, DuplicateKey, TooManyCalls
from rpcwheel.events import LateResponse, UnmatchedResponse, add_sink, log_event, remove_sink
from rpcwheel.timer import DeadlineHeap, ManualTimer

KEYS = st.integers(0, 4)
CONNECTIONS = st.sampled_from([None, "a", "b"])
TIMEOUTS = st.none() | st.integers(-1, 60)
MOST = st.sampled_from([None, None, 2, 4])


def timed_out(opened: int, sent: int | None) -> tuple[str, float, float | None]:
    """What the error of a call says."""
    side = "client" if sent is None else "server"
    return side, opened / 1000, None if sent is None else sent / 1000


class Pending(RuleBasedStateMachine):
    """Times in whole milliseconds. `waiting`: key to (future, connection, opened, due, sent)."""

    world_of: type

    def __init__(self) -> None:
        super().__init__()
        remove_sink(log_event)
        self.events: list[object] = []
        self.sink = self.events.append
        add_sink(self.sink)
        self.world = self.world_of()
        self.timer = ManualTimer(DeadlineHeap())
        self.now = 0
        self.called: list[object] = []  # futures whose callbacks were called
        self.opened = 0

    @initialize(most=MOST)
    def begin(self, most: int | None) -> None:
        self.calls = self.world.module.PendingCalls(self.timer, name="orders", max_pending=most)
        self.most = most
        self.waiting: dict[int, tuple[object, object, int, int | None, int | None]] = {}
        self.remembered: dict[int, tuple[str, int]] = {}  # how and when a call ended
        self.ends: list[tuple[object, object]] = []  # each future and how it must have ended
        self.counts = dict.fromkeys(
            ("opened", "answered", "failed", "timed_out", "cancelled", "late", "unknown"), 0
        )

    def teardown(self) -> None:
        self.world.do(self.calls.close)
        assert wait_until(lambda: self.world.do(lambda: len(self.called) == self.opened))
        assert len({id(future) for future in self.called}) == len(self.called)  # each once
        for future in self.called:
            outcome(future)  # asyncio reports exceptions that were never retrieved
        self.timer.stop()
        self.world.end()
        remove_sink(self.sink)
        add_sink(log_event)

    def ended(
        self, key: int, how: object, count: str, *, remember: str = "", at: int | None = None
    ) -> None:
        self.ends.append((self.waiting.pop(key)[0], how))
        self.counts[count] += 1
        if remember:
            self.remembered[key] = remember, self.now if at is None else at

    @rule(keys=st.sets(KEYS, min_size=1), timeout=TIMEOUTS, connection=CONNECTIONS)
    def open_all(self, keys: set[int], timeout: int | None, connection: str | None) -> None:
        for key in sorted(keys):
            self.open(key, timeout, connection)

    def open(self, key: int, timeout: int | None, connection: str | None) -> None:
        seconds = None if timeout is None else timeout / 1000
        try:
            future = self.world.do(self.calls.open, key, timeout=seconds, connection=connection)
        except DuplicateKey:
            assert key in self.waiting
            return
        except TooManyCalls:
            assert len(self.waiting) == self.most
            return
        assert key not in self.waiting
        assert self.most is None or len(self.waiting) < self.most
        due = None if timeout is None else self.now + max(timeout, 0)
        self.waiting[key] = (future, connection, self.now, due, None)
        self.remembered.pop(key, None)
        self.opened += 1
        self.counts["opened"] += 1
        if timeout is not None and timeout <= 0:
            self.ended(key, timed_out(self.now, None), "timed_out", remember="timed out")
        future.add_done_callback(self.called.append)
        self.world.do(lambda: None)

    @rule(key=KEYS)
    def sent(self, key: int) -> None:
        assert self.calls.sent(key) == (key in self.waiting)
        if key in self.waiting and self.waiting[key][4] is None:
            self.waiting[key] = (*self.waiting[key][:4], self.now)

    @rule(key=KEYS, value=st.integers())
    def received(self, key: int, value: int) -> None:
        self.answer(key, (value,), "answered", self.calls.received, value)

    @rule(key=KEYS)
    def failed(self, key: int) -> None:
        error = ValueError()
        self.answer(key, error, "failed", self.calls.failed, error)

    def answer(self, key, how, count, method, given) -> None:
        self.events.clear()
        assert self.world.do(method, key, given) == (key in self.waiting)
        if key in self.waiting:
            self.ended(key, how, count)
            assert self.events == []
        elif key in self.remembered:
            ending, ended = self.remembered.pop(key)
            late_s = (self.now - ended) / 1000
            assert self.events == [LateResponse("orders", repr(key), ending, late_s)]
            self.counts["late"] += 1
        else:
            assert self.events == [UnmatchedResponse("orders", repr(key))]
            self.counts["unknown"] += 1

    @rule(connection=st.sampled_from("ab"))
    def lost(self, connection: str) -> None:
        error = ConnectionError()
        mine = [key for key, call in self.waiting.items() if call[1] == connection]
        assert self.world.do(self.calls.lost, connection, error) == len(mine)
        for key in mine:
            self.ended(key, error, "failed", remember="lost its connection")

    @precondition(lambda self: self.waiting)
    @rule(which=KEYS)
    def cancel(self, which: int) -> None:
        key = list(self.waiting)[which % len(self.waiting)]
        assert self.world.do(self.waiting[key][0].cancel)
        self.ended(key, CANCELLED, "cancelled", remember="been cancelled")

    @precondition(lambda self: self.ends)
    @rule(which=st.integers(0, 100))
    def cancel_an_ended_one(self, which: int) -> None:
        future, how = self.ends[which % len(self.ends)]
        again = self.world_of is SyncWorld and how == CANCELLED  # asyncio returns False
        assert self.world.do(future.cancel) == again

    @rule(step=st.integers(0, 80))
    def advance(self, step: int) -> None:
        self.now += step
        self.world.do(self.timer.advance, step / 1000)
        for key, (_, _, opened, due, sent) in list(self.waiting.items()):
            if due is not None and due <= self.now:
                how = timed_out(opened, sent)
                self.ended(key, how, "timed_out", remember="timed out", at=due)

    @precondition(lambda self: self.counts["opened"] > 12)
    @rule(error=st.none() | st.just(OSError()), key=KEYS, most=MOST)
    def close(self, error: OSError | None, key: int, most: int | None) -> None:
        """Then there is another table."""
        assert self.world.do(self.calls.close, error) == list(self.waiting)
        for each in list(self.waiting):
            how = CallsClosed if error is None else error
            self.ended(each, how, "failed", remember="been closed")
        assert self.world.do(self.calls.close) == []
        with pytest.raises(CallsClosed):
            self.world.do(self.calls.open, key, timeout=1.0)
        self.received(key, 1)
        self.counts_agree()
        self.every_call_ended_as_expected()
        self.begin(most)

    @invariant()
    def counts_agree(self) -> None:
        stats = self.calls.stats()
        assert {name: getattr(stats, name) for name in self.counts} == self.counts
        assert self.calls.pending == stats.pending == len(self.waiting)
        assert stats.opened == stats.pending + len(self.ends)
        assert self.timer.pending == sum(call[3] is not None for call in self.waiting.values())
        of = {call[1] for call in self.waiting.values()} - {None}
        assert self.calls._by_connection.keys() == of
        assert all(outcome(call[0]) == PENDING for call in self.waiting.values())

    @invariant()
    def every_call_ended_as_expected(self) -> None:
        closed = [outcome(future) for future, how in self.ends if how is CallsClosed]
        assert all(isinstance(error, CallsClosed) for error in closed)
        assert len({id(error) for error in closed}) == len(closed)  # one for each call
        for future, how in self.ends:
            got = outcome(future)
            if isinstance(got, CallTimeout):
                assert (got.side, got.start, got.sent) == how
            elif how is not CallsClosed:
                assert got == how


class PendingOnALoop(Pending):
    """The same for coroutines."""

    world_of = AioWorld


Pending.world_of = SyncWorld

TestPending = Pending.TestCase
TestPendingOnALoop = PendingOnALoop.TestCase
# The table is the same; only the futures differ.
TestPendingOnALoop.settings = settings(max_examples=settings.default.max_examples * 3 // 10)
