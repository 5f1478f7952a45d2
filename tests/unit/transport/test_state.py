"""Which connection serves a call, and when a connection is closed, also at random."""

from datetime import timedelta

import grpc
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tenacity import stop_after_attempt, wait_exponential

from rpcwheel.backoff import Backoff
from rpcwheel.durations import NEVER
from rpcwheel.transport.arguments import checked_drain_ns
from rpcwheel.transport.state import SERVER_CODES, ActivityStamps, Transport, Transports

SECOND = 1_000_000_000


class Clock:
    def __init__(self) -> None:
        self.now_ns = 10 * SECOND

    def __call__(self) -> int:
        return self.now_ns

    def pass_(self, seconds: float) -> None:
        self.now_ns += int(seconds * SECOND)


class Connections(Transports[Transport]):
    """A manager whose transports have any object as a channel."""

    def __init__(self, first, clock, backoff) -> None:
        super().__init__(Transport(first, clock), clock, backoff)
        self.clock = clock

    def reconnect(self, channel, drain_ns, reason="", backoff_ns=None):
        backoff_ns = self.next_backoff_ns() if backoff_ns is None else backoff_ns
        return super().reconnect(Transport(channel, self.clock), drain_ns, reason, backoff_ns)

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


def test_reads_and_writes_are_use(connections, clock):
    activity = connections.active.activity
    assert (activity.last_read_ns, activity.last_write_ns, activity.last_use_ns) == (None,) * 3
    activity.saw_write()
    wrote_ns = clock.now_ns
    assert (activity.last_read_ns, activity.last_write_ns) == (None, wrote_ns)
    assert activity.last_use_ns == wrote_ns
    clock.pass_(1)
    activity.saw_read()
    assert (activity.last_read_ns, activity.last_write_ns) == (clock.now_ns, wrote_ns)
    assert activity.last_use_ns == clock.now_ns


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


# Backoff


def test_the_backoff_grows_while_connections_are_silent_and_begins_anew_after_a_read(
    connections, clock
):
    waits = []
    assert connections.backoff_left_ns() == 0
    for number in range(2, 8):
        connections.reconnect(number, NEVER)
        connections.active.activity.saw_write()  # no proof that it works
        waits.append(connections.backoff_left_ns() / SECOND)
        clock.now_ns += connections.backoff_left_ns()
        assert connections.backoff_left_ns() == 0
    assert waits == [2, 4, 8, 16, 32, 60]
    connections.reconnect(8, NEVER)
    connections.active.activity.saw_read()  # it works
    assert connections.backoff_left_ns() == 0
    connections.reconnect(9, NEVER)
    assert connections.backoff_left_ns() == SECOND


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


def test_drain_timeout_is_in_seconds_and_none_is_no_limit():
    values = {
        None: NEVER,
        float("inf"): NEVER,
        0: 0,
        1.5: 1_500_000_000,
        timedelta(seconds=2): 2_000_000_000,
    }
    assert {drain: checked_drain_ns(drain) for drain in values} == values


# At random


class Model(RuleBasedStateMachine):
    """A model: the connection of each call, and when each connection is to end."""

    def __init__(self):
        super().__init__()
        self.clock = Clock()
        self.connections = Connections(1, self.clock, Backoff(0))
        self.calls = []
        self.open = {1: self.connections.active}
        self.until = {}  # when the drain timeout of a connection passes; none for the active one
        self.details = {}  # the status of its calls
        self.active = 1
        self.draining = self.closed = False

    def end(self, *transports):
        """These, and only these, are closed now."""
        for transport in transports:
            del self.open[transport.channel]
            self.until.pop(transport.channel, None)
            assert transport.ended
            assert transport.end_details == self.details[transport.channel]
        assert not any(transport.ended for transport in self.open.values())

    def on(self, number):
        return sum(transport.channel == number for transport in self.calls)

    def due_after(self, seconds):
        return NEVER if seconds == NEVER else self.clock.now_ns + seconds

    @rule()
    def begin(self):
        accepts = not self.draining and not self.closed
        assert self.connections.accepts_calls is accepts
        if accepts:
            self.calls.append(self.connections.begin_call())
            assert self.calls[-1] is self.open[self.active]

    @rule(which=st.integers(0, 20))
    def finish(self, which):
        if self.calls:
            transport = self.calls.pop(which % len(self.calls))
            last = transport.channel in self.until and not self.on(transport.channel)
            assert self.connections.end_call(transport) == last
            self.end(*[transport] * last)

    @rule(drain=st.sampled_from([0, 1, 3, NEVER]))
    def reconnect(self, drain):
        if self.connections.accepts_calls:
            over = drain == 0 or not self.on(self.active)
            old = self.open[self.active]
            self.details[self.active] = f"connection replaced: {drain}"
            self.until[self.active] = self.due_after(drain)
            assert self.connections.reconnect(self.active + 1, drain, f"{drain}") == (old, over)
            self.active += 1
            self.open[self.active] = self.connections.active
            self.end(*[old] * over)

    @rule(drain=st.sampled_from([0, 1, 3, NEVER]))
    def drain(self, drain):
        due, before = self.due_after(drain), dict(self.until)
        if not self.closed and not self.draining:
            self.draining = True
            self.until[self.active] = NEVER
            self.details[self.active] = f"channel drained: {drain}"
        self.until = {number: min(until, due) for number, until in self.until.items()}
        ended = [
            transport
            for number, transport in self.open.items()
            if number in self.until and (drain == 0 or not self.on(number))
        ]
        shorter = [
            transport
            for number, transport in self.open.items()
            if transport not in ended and self.until.get(number, NEVER) < before.get(number, NEVER)
        ]
        over, timed = self.connections.drain(drain, f"{drain}")
        assert (by_number(over), by_number(timed)) == (by_number(ended), by_number(shorter))
        self.end(*ended)

    @rule(step=st.integers(0, 3))
    def wait(self, step):
        self.clock.now_ns += step
        due = [number for number, until in self.until.items() if until <= self.clock.now_ns]
        over = self.connections.expire_overdue()
        assert [transport.channel for transport in by_number(over)] == sorted(due)
        self.end(*over)

    @rule(which=st.integers(0, 20))
    def expire(self, which):
        transport = self.open.get(which)
        if transport is not None:
            drains = which in self.until
            assert self.connections.expire(transport) == drains
            self.end(*[transport] * drains)

    @rule(often=st.integers(0, 9))
    def close(self, often):
        if not often:  # rarely, so that more happens
            over = self.connections.close()
            assert by_number(over) == by_number(self.open.values())
            self.closed = True
            self.open.clear()
            self.until.clear()
            assert all(transport.ended for transport in over)

    @invariant()
    def calls_and_connections_are_those_of_the_model(self):
        for transport in self.calls:
            assert transport.calls == self.on(transport.channel)
        connections = self.connections
        assert connections.calls == len(self.calls)
        assert connections.drained is (self.draining and not self.until)
        if not self.closed:
            assert by_number(connections.open_transports) == by_number(self.open.values())
        draining = [transport.channel for transport in connections.draining_transports]
        assert sorted(draining) == sorted(self.until)


def by_number(transports):
    return sorted(transports, key=lambda transport: transport.channel)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=100)
