"""Random operations in both worlds, compared with a model of one dictionary."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fixtures.pending_worlds import CANCELLED, PENDING, AioWorld, SyncWorld, outcome
from fixtures.waiting import wait_until
from rpcwheel.errors import CallsClosed, CallTimeout, DuplicateKey
from rpcwheel.events import add_sink, log_event, remove_sink
from rpcwheel.timer import DeadlineHeap, ManualTimer

KEYS = st.integers(0, 4)
CONNECTIONS = st.sampled_from([None, "a", "b"])


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
        self.world = self.world_of()
        self.timer = ManualTimer(DeadlineHeap())
        self.calls = self.world.module.PendingCalls(self.timer)
        self.now = 0
        self.closed = False
        self.waiting: dict[int, tuple[object, object, int, int | None, int | None]] = {}
        self.remembered: set[int] = set()
        self.ends: list[tuple[object, object]] = []  # each future and how it must have ended
        self.called: list[object] = []  # futures whose callbacks were called
        self.counts = dict.fromkeys(
            ("opened", "answered", "failed", "timed_out", "cancelled", "late", "unknown"), 0
        )

    def teardown(self) -> None:
        self.world.do(self.calls.close)
        assert wait_until(lambda: self.world.do(lambda: len(self.called) == self.counts["opened"]))
        assert len({id(future) for future in self.called}) == len(self.called)  # each once
        for future in self.called:
            outcome(future)  # asyncio reports exceptions that were never retrieved
        self.timer.stop()
        self.world.end()
        add_sink(log_event)

    def ended(self, key: int, how: object, count: str, *, remember: bool) -> None:
        self.ends.append((self.waiting.pop(key)[0], how))
        self.counts[count] += 1
        if remember:
            self.remembered.add(key)

    @rule(key=KEYS, timeout=st.none() | st.integers(-1, 60), connection=CONNECTIONS)
    def open(self, key: int, timeout: int | None, connection: str | None) -> None:
        seconds = None if timeout is None else timeout / 1000
        try:
            future = self.world.do(self.calls.open, key, timeout=seconds, connection=connection)
        except CallsClosed:
            assert self.closed
            return
        except DuplicateKey:
            assert key in self.waiting
            return
        assert not self.closed
        assert key not in self.waiting
        due = None if timeout is None else self.now + max(timeout, 0)
        self.waiting[key] = (future, connection, self.now, due, None)
        self.remembered.discard(key)
        self.counts["opened"] += 1
        if timeout is not None and timeout <= 0:
            self.ended(key, timed_out(self.now, None), "timed_out", remember=True)
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
        assert self.world.do(method, key, given) == (key in self.waiting)
        if key in self.waiting:
            self.ended(key, how, count, remember=False)
        else:
            self.counts["late" if key in self.remembered else "unknown"] += 1
            self.remembered.discard(key)

    @rule(connection=st.sampled_from(["a", "b", "c"]))
    def lost(self, connection: str) -> None:
        error = ConnectionError()
        mine = [key for key, call in self.waiting.items() if call[1] == connection]
        assert self.world.do(self.calls.lost, connection, error) == len(mine)
        for key in mine:
            self.ended(key, error, "failed", remember=True)

    @rule(key=KEYS)
    def cancel(self, key: int) -> None:
        if key in self.waiting:
            assert self.world.do(self.waiting[key][0].cancel)
            self.ended(key, CANCELLED, "cancelled", remember=True)

    @rule(which=st.integers(0, 100))
    def cancel_an_ended_one(self, which: int) -> None:
        if self.ends:
            future, how = self.ends[which % len(self.ends)]
            again = self.world_of is SyncWorld and how == CANCELLED  # asyncio returns False
            assert self.world.do(future.cancel) == again

    @rule(step=st.integers(0, 80))
    def advance(self, step: int) -> None:
        self.now += step
        self.world.do(self.timer.advance, step / 1000)
        for key, (_, _, opened, due, sent) in list(self.waiting.items()):
            if due is not None and due <= self.now:
                self.ended(key, timed_out(opened, sent), "timed_out", remember=True)

    @rule(error=st.none() | st.just(OSError()), really=st.integers(0, 5))
    def close(self, error: OSError | None, really: int) -> None:
        if really:
            return
        assert self.world.do(self.calls.close, error) == list(self.waiting)
        self.closed = True
        for key in list(self.waiting):
            self.ended(key, CallsClosed if error is None else error, "failed", remember=True)

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
