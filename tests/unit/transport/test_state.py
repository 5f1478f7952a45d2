"""Which connection serves a call, and when a connection is closed, also at random."""

from datetime import timedelta
from unittest.mock import Mock

import grpc
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tenacity import stop_after_attempt

from rpcwheel.backoff import Backoff
from rpcwheel.durations import NEVER
from rpcwheel.transport.arguments import checked_drain_ns
from rpcwheel.transport.state import SERVER_CODES, ActivityStamps, Transport, Transports

SECOND = 1_000_000_000
DRAINS = st.sampled_from([0, 1, 3, NEVER])
ATTEMPTS = 5


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

    def reconnect(self, channel, drain_ns, reason=""):
        new, backoff_ns = Transport(channel, self.clock), self.next_backoff_ns()
        return super().reconnect(new, drain_ns, reason, backoff_ns)

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
    return Connections("first", clock, Backoff(0))


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
    wait = Mock(side_effect=KeyError("the user's"))
    connections = Connections("first", clock, Backoff(wait))
    with pytest.raises(KeyError):
        connections.reconnect("second", NEVER)
    assert (
        connections.active.channel,
        connections.active.ended,
        connections.backoff_left_ns(),
    ) == ("first", False, 0)


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
    """A model: the connection of each call, and when each connection is to end. Times in ns."""

    @initialize()
    def connect(self):
        self.clock = Clock()
        backoff = Backoff(lambda state: state.attempt_number, stop_after_attempt(ATTEMPTS))
        self.connections = Connections(1, self.clock, backoff)
        self.calls = []
        self.open = {1: self.connections.active}
        self.until = {}  # when the drain timeout of a connection passes; none for the active one
        self.details = {}  # the status of its calls
        self.active = 1
        self.draining = False
        self.unanswered = 0  # connections in a row that were replaced before they were read
        self.not_before = 0  # when the backoff is over
        self.is_read = self.is_wanted = False  # of the active one

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

    def due_after(self, drain):
        return NEVER if drain == NEVER else self.clock.now_ns + drain

    @precondition(lambda self: not self.draining)
    @rule()
    def begin(self):
        self.calls.append(self.connections.begin_call())
        assert self.calls[-1] is self.open[self.active]

    @precondition(lambda self: self.calls)
    @rule(which=st.integers(0, 20))
    def finish(self, which):
        transport = self.calls.pop(which % len(self.calls))
        last = transport.channel in self.until and not self.on(transport.channel)
        assert self.connections.end_call(transport) == last
        self.end(*[transport] * last)

    @precondition(lambda self: not self.draining)
    @rule(is_read=st.booleans())
    def use(self, is_read):
        activity = self.open[self.active].activity
        if is_read:
            activity.saw_read()
            self.is_read = True
        else:
            activity.saw_write()  # no proof that it works

    @precondition(lambda self: not self.draining)
    @rule()
    def want_connection(self):
        self.open[self.active].connection_wanted = self.is_wanted = True

    @precondition(lambda self: not self.draining)
    @rule(drain=DRAINS)
    def reconnect(self, drain):
        """The backoff grows with each connection that was never read."""
        over = drain == 0 or not self.on(self.active)
        old = self.open[self.active]
        self.details[self.active] = f"connection replaced: {drain}"
        self.until[self.active] = self.due_after(drain)
        self.unanswered = 0 if self.is_read else self.unanswered + 1
        attempt = self.unanswered + 1
        backoff_ns = NEVER if attempt >= ATTEMPTS else attempt * SECOND
        self.not_before = NEVER if backoff_ns == NEVER else self.clock.now_ns + backoff_ns
        assert self.connections.reconnect(self.active + 1, drain, f"{drain}") == (old, over)
        self.active += 1
        self.open[self.active] = self.connections.active
        self.is_wanted = self.is_wanted and not self.is_read
        assert old.connection_wanted == self.is_wanted
        self.is_read = False
        self.end(*[old] * over)

    @rule(drain=DRAINS)
    def drain(self, drain):
        due, before = self.due_after(drain), dict(self.until)
        if not self.draining:
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

    @rule(step=st.sampled_from([1, 2, 3, SECOND, 2 * SECOND]))
    def wait(self, step):
        self.clock.now_ns += step
        due = [number for number, until in self.until.items() if until <= self.clock.now_ns]
        over = self.connections.expire_overdue()
        assert [transport.channel for transport in by_number(over)] == sorted(due)
        self.end(*over)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 20))
    def expire(self, which):
        transport = list(self.open.values())[which % len(self.open)]
        drains = transport.channel in self.until
        assert self.connections.expire(transport) == drains
        self.end(*[transport] * drains)

    @precondition(lambda self: self.active > 3 or self.draining or self.calls)
    @rule()
    def close(self):
        """The calls end later. Then there is another channel."""
        over = self.connections.close()
        assert by_number(over) == by_number(self.open.values())
        assert all(transport.ended for transport in over)
        assert self.connections.close() == []
        assert self.connections.drain(0) == ([], [])
        assert not self.connections.accepts_calls
        assert self.connections.draining_transports == []
        assert not any(self.connections.expire(transport) for transport in over)
        assert not any(self.connections.end_call(transport) for transport in self.calls)
        assert self.connections.calls == 0
        self.connect()

    @invariant()
    def calls_and_connections_are_those_of_the_model(self):
        for transport in self.calls:
            assert transport.calls == self.on(transport.channel)
        connections = self.connections
        assert connections.calls == len(self.calls)
        assert connections.accepts_calls is not self.draining
        assert connections.drained is (self.draining and not self.until)
        assert by_number(connections.open_transports) == by_number(self.open.values())
        draining = [transport.channel for transport in connections.draining_transports]
        assert sorted(draining) == sorted(self.until)

    @invariant()
    def the_backoff_and_the_wish_to_connect_are_those_of_the_model(self):
        left_ns = max(0, self.not_before - self.clock.now_ns)
        assert self.connections.backoff_left_ns() == (0 if self.is_read else left_ns)
        assert self.connections.active.connection_wanted is self.is_wanted
        assert self.connections.active.number == self.active


def by_number(transports):
    return sorted(transports, key=lambda transport: transport.channel)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=100)
