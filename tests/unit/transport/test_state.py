"""Which connection serves a call, and when a connection is closed, also at random."""

import grpc
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tenacity import stop_after_attempt, wait_exponential

from rpcwheel.backoff import Backoff
from rpcwheel.durations import NEVER
from rpcwheel.transport.state import (
    SERVER_CODES,
    ActivityStamps,
    ConnectionManager,
    Transport,
)

SECOND = 1_000_000_000


class Clock:
    def __init__(self) -> None:
        self.now_ns = 10 * SECOND

    def __call__(self) -> int:
        return self.now_ns

    def pass_(self, seconds: float) -> None:
        self.now_ns += int(seconds * SECOND)


class Connections(ConnectionManager[Transport]):
    """A manager whose transports have any object as a channel."""

    def __init__(self, first, clock, backoff) -> None:
        super().__init__(Transport(first, clock), clock, backoff)
        self.clock = clock

    def reconnect(self, channel, *args, **options):
        return super().reconnect(Transport(channel, self.clock), *args, **options)

    def expire_overdue(self):
        """Transports whose drain timeout has passed."""
        known = tuple(self.draining_transports)
        overdue = [one for one in known if one.drain_until_ns <= self.clock()]
        return [one for one in overdue if self.expire(one)]


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def connections(clock):
    return Connections("first", clock, Backoff(wait_exponential(multiplier=1, max=60)))


# Activity


def test_a_new_connection_has_no_activity(connections):
    activity = connections.active.activity
    assert (activity.last_read_ns, activity.last_write_ns, activity.last_use_ns) == (
        None,
        None,
        None,
    )


def test_reads_and_writes_are_use(connections, clock):
    activity = connections.active.activity
    activity.saw_write()
    wrote_ns = clock.now_ns
    assert (activity.last_read_ns, activity.last_write_ns) == (None, wrote_ns)
    assert activity.last_use_ns == wrote_ns
    clock.pass_(1)
    activity.saw_read()
    assert (activity.last_read_ns, activity.last_write_ns) == (clock.now_ns, wrote_ns)
    assert activity.last_use_ns == clock.now_ns


def test_reads_on_an_old_connection_do_not_count_for_the_new_one(connections):
    old = connections.begin_call()
    connections.reconnect("second", NEVER)
    old.activity.saw_read()
    assert connections.active.activity.last_read_ns is None


def test_only_a_status_that_no_client_sets_is_a_read(connections, clock):
    made_here = {"CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL", "RESOURCE_EXHAUSTED"}
    made_here |= {"UNAUTHENTICATED", "UNAVAILABLE", "UNKNOWN"}
    assert {code.name for code in grpc.StatusCode} - SERVER_CODES == {"OK", *made_here}
    for code in (None, 5, "NOT_FOUND", *(grpc.StatusCode[name] for name in made_here)):
        connections.active.activity.saw_status(code)
    assert connections.active.activity.last_read_ns is None
    connections.active.activity.saw_status(grpc.StatusCode.NOT_FOUND)
    assert connections.active.activity.last_read_ns == clock.now_ns


def test_an_unserializable_message_is_no_write_and_an_invalid_response_is_a_read():
    now = iter(range(1, 10))
    activity = ActivityStamps(lambda: next(now))
    with pytest.raises(ValueError, match="invalid literal"):
        activity.writing(int)("no number")
    assert activity.last_write_ns is None
    assert (activity.writing(None)(b"a"), activity.last_write_ns) == (b"a", 1)
    with pytest.raises(ValueError, match="invalid literal"):
        activity.reading(int)("no number")
    assert activity.last_read_ns == 2


# Calls


def test_a_connection_without_calls_is_closed_when_it_is_replaced(connections):
    old, over = connections.reconnect("second", NEVER, "why")
    assert (old.channel, over, old.ended, old.reason) == ("first", True, True, "why")
    assert not connections.draining_transports


def test_close_returns_each_open_connection_once(connections):
    connections.begin_call()
    old, _ = connections.reconnect("second", NEVER)
    assert connections.close() == [connections.active, old]
    assert connections.close() == []
    assert connections.drain(0) == ([], [])
    assert connections.closed
    assert connections.active.ended
    assert old.ended


# Backoff


def test_the_backoff_allows_the_first_reconnect(connections):
    assert connections.backoff_left_ns() == 0


def test_the_backoff_grows_while_connections_are_silent(connections, clock):
    waits = []
    for number in range(2, 8):
        connections.reconnect(number, NEVER)
        waits.append(connections.backoff_left_ns() / SECOND)
        clock.now_ns += connections.backoff_left_ns()
        assert connections.backoff_left_ns() == 0
    assert waits == [2, 4, 8, 16, 32, 60]


def test_a_connection_that_worked_resets_the_backoff(connections, clock):
    for number in range(2, 6):
        connections.reconnect(number, NEVER)
    assert connections.backoff_left_ns() > 10 * SECOND
    connections.active.activity.saw_read()
    assert connections.backoff_left_ns() == 0
    connections.reconnect(6, NEVER)
    assert connections.backoff_left_ns() == SECOND


def test_writes_do_not_reset_the_backoff(connections):
    connections.reconnect("second", NEVER)
    connections.active.activity.saw_write()
    assert connections.backoff_left_ns() > 0


def test_a_backoff_that_stops_forbids_reconnects(clock):
    connections = Connections("first", clock, Backoff(1.0, stop_after_attempt(3)))
    for number in (2, 3):
        assert connections.backoff_left_ns() == 0
        connections.reconnect(number, NEVER)
        clock.pass_(1)
    clock.pass_(1e6)
    assert connections.backoff_left_ns() > 0


def test_the_backoff_stops_growing_before_wait_objects_overflow(clock):
    asked = []

    def wait(state):
        asked.append(state.attempt_number)
        return 0

    connections = Connections("first", clock, Backoff(wait))
    for number in range(2, 100):
        connections.reconnect(number, NEVER)
    assert (asked[0], asked[-1], max(asked)) == (2, 64, 64)


def test_a_wait_object_that_raises_changes_nothing(clock):
    def wait(_):
        raise KeyError("the user's")

    connections = Connections("first", clock, Backoff(wait))
    with pytest.raises(KeyError):
        connections.reconnect("second", NEVER)
    assert (
        connections.active.channel,
        connections.active.ended,
        connections.backoff_left_ns(),
    ) == ("first", False, 0)


def test_next_backoff_can_be_computed_before_the_reconnect(connections):
    connections.reconnect("second", NEVER, "why", backoff_ns=5 * SECOND)
    assert connections.backoff_left_ns() == 5 * SECOND


def test_a_request_to_connect_is_passed_on_until_a_connection_worked(connections):
    old = connections.active
    old.connection_wanted = True
    connections.reconnect("second", NEVER)
    assert (old.connection_wanted, connections.active.connection_wanted) == (True, True)
    old = connections.active
    old.activity.saw_read()
    connections.reconnect("third", NEVER)
    assert (old.connection_wanted, connections.active.connection_wanted) == (False, False)


# Drained


def test_a_drain_ends_when_the_last_call_has_ended(connections):
    calls = [connections.begin_call(), connections.begin_call()]
    connections.drain(NEVER, "why")
    assert (connections.drained, connections.open_transports) == (False, [calls[0]])
    assert [connections.end_call(transport) for transport in calls] == [False, True]
    assert (connections.drained, connections.calls) == (True, 0)


def test_a_drain_waits_for_calls_on_replaced_connections(connections):
    old = connections.begin_call()
    connections.reconnect("second", NEVER)
    over, _ = connections.drain(NEVER)
    assert [transport.channel for transport in over] == ["second"]
    assert not connections.drained
    assert connections.end_call(old)
    assert connections.drained


def test_a_second_drain_can_only_shorten_the_timeout(connections):
    transport = connections.begin_call()
    connections.drain(5 * SECOND, "first")
    assert connections.drain(9 * SECOND, "second") == ([], [])
    assert connections.drain(SECOND, "third") == ([], [transport])
    assert transport.end_details == "channel drained: first"
    assert connections.drain(0) == ([transport], [])


def test_a_drain_does_not_extend_the_timeout_of_a_replaced_connection(connections):
    connections.begin_call()
    old, _ = connections.reconnect("second", SECOND, "dead")
    connections.begin_call()
    assert connections.drain(5 * SECOND)[1] == [connections.active]
    assert (old.drain_until_ns, old.end_details) == (11 * SECOND, "connection replaced: dead")


# At random


class Model(RuleBasedStateMachine):
    """A model: the connection of each call, and the expected end of each connection."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.connections = Connections(1, self.clock, Backoff(0))
        self.calls: list[object] = []  # the connection of each call in flight
        self.open = {1: self.connections.active}
        self.until: dict[int, int] = {}  # when their drain timeout passes
        self.ended: list[int] = []
        self.active = 1
        self.shut = False

    def end(self, transport) -> None:
        self.ended.append(transport.channel)
        del self.open[transport.channel]
        self.until.pop(transport.channel, None)

    def on(self, number: int) -> int:
        return sum(transport.channel == number for transport in self.calls)

    @rule()
    def begin(self) -> None:
        if not self.shut:
            transport = self.connections.begin_call()
            assert transport.channel == self.active
            self.calls.append(transport)

    @rule(which=st.integers(0, 20))
    def finish(self, which: int) -> None:
        if self.calls:
            transport = self.calls.pop(which % len(self.calls))
            last = transport.channel in self.until and not self.on(transport.channel)
            assert self.connections.end_call(transport) == last
            if last:
                self.end(transport)

    @rule(drain=st.sampled_from([0, 1, 3, NEVER]))
    def reconnect(self, drain: int) -> None:
        if self.shut:
            return
        old, over = self.connections.reconnect(self.active + 1, drain)
        assert old is self.open[self.active]
        assert over == (drain == 0 or not self.on(self.active))
        if over:
            self.end(old)
        else:
            self.until[self.active] = NEVER if drain == NEVER else self.clock.now_ns + drain
        self.active += 1
        self.open[self.active] = self.connections.active

    @rule(step=st.integers(0, 3))
    def wait(self, step: int) -> None:
        self.clock.now_ns += step
        over = self.connections.expire_overdue()
        due = [number for number, until in self.until.items() if until <= self.clock.now_ns]
        assert [transport.channel for transport in over] == due
        for transport in over:
            self.end(transport)

    @rule(which=st.integers(0, 20))
    def expire(self, which: int) -> None:
        transport = self.open.get(which)
        drains = which in self.until
        if transport is not None:
            assert self.connections.expire(transport) == drains
            if drains:
                self.end(transport)

    @rule(often=st.integers(0, 9))
    def close(self, often: int) -> None:
        if often:
            return  # so that more happens
        connections = self.connections.close()
        assert {transport.channel for transport in connections} == (
            set() if self.shut else set(self.open)
        )
        self.shut = True
        for transport in connections:
            self.end(transport)

    @invariant()
    def each_call_is_on_one_connection(self) -> None:
        connections = {id(transport): transport for transport in self.calls}.values()
        assert all(transport.calls == self.on(transport.channel) for transport in connections)
        assert self.connections.calls == len(self.calls)

    @invariant()
    def each_connection_ends_once_and_only_then_takes_nothing(self) -> None:
        assert len(set(self.ended)) == len(self.ended)
        assert not any(transport.ended for transport in self.open.values())
        assert all(transport.ended for transport in self.calls if transport.channel in self.ended)
        assert {transport.channel for transport in self.connections.draining_transports} == set(
            self.until
        )


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=50)


class Draining(RuleBasedStateMachine):
    """Random sequences: each transport is closed once, and not while calls may continue on it."""

    def __init__(self):
        super().__init__()
        self.clock = Clock()
        self.connections = Connections(1, self.clock, Backoff(0))
        self.calls = []
        self.closed = []

    def end(self, connections):
        assert not {transport.number for transport in connections} & set(self.closed)
        self.closed += [transport.number for transport in connections]

    @rule()
    def call(self):
        if self.connections.accepts_calls:
            self.calls.append(self.connections.begin_call())

    @rule(number=st.integers(0, 9))
    def call_ends(self, number):
        if self.calls:
            transport = self.calls.pop(number % len(self.calls))
            self.end([transport] if self.connections.end_call(transport) else [])

    @rule(drain=st.sampled_from([0, SECOND, NEVER]))
    def reconnect(self, drain):
        if self.connections.accepts_calls:
            old, over = self.connections.reconnect(self.connections.active.number + 1, drain)
            self.end([old] if over else [])

    @rule(limit=st.sampled_from([0, SECOND, NEVER]))
    def drain(self, limit):
        self.end(self.connections.drain(limit)[0])

    @rule(seconds=st.integers(0, 2))
    def time_passes(self, seconds):
        self.clock.now_ns += seconds * SECOND
        self.end(self.connections.expire_overdue())

    @invariant()
    def it_is_drained_when_all_are_closed(self):
        numbers = set(range(1, self.connections.active.number + 1))
        assert self.connections.drained is (set(self.closed) == numbers)
        assert self.connections.calls == len(self.calls)
        if self.connections.drained:
            assert self.connections.draining
            assert self.connections.close() == []


TestDraining = Draining.TestCase
TestDraining.settings = settings(max_examples=50)
