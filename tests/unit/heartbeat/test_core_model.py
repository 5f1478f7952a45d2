"""Random sequences of events on a connection, compared with a simple model of the rules."""

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fixtures.heartbeat_driver import Driver
from rpcwheel.durations import NEVER
from rpcwheel.events import ConnectionDead, HeartbeatMissed
from rpcwheel.heartbeat.core import MAX_IN_FLIGHT, MISSES_UNTIL_DEAD
from rpcwheel.heartbeat.rules import HeartbeatState, Reconnect, Send, StateChanged

MS = 10**6
_S, CLOSED = HeartbeatState, HeartbeatState.CLOSED
TRANSITIONS = {
    _S.OFF: {CLOSED},
    _S.UNUSED: {CLOSED, _S.ALIVE, _S.PROBING},
    _S.ALIVE: {CLOSED, _S.PROBING, _S.UNUSED},
    _S.PROBING: {CLOSED, _S.ALIVE, _S.SUSPECT},
    _S.SUSPECT: {CLOSED, _S.ALIVE, _S.DEAD, _S.UNUSED},
    _S.DEAD: {CLOSED, _S.ALIVE},
    CLOSED: set(),
}
"""For each state the states that may follow it."""
NOT_ANSWERING = {HeartbeatState.SUSPECT, HeartbeatState.DEAD}


class Connection(RuleBasedStateMachine):
    """Calls, silence, answers, misses, reconnects and ends in any order."""

    @initialize(
        interval=st.integers(1, 50),
        more=st.integers(0, 100),
        reconnect=st.booleans(),
        silent_from_start=st.booleans(),
        seed=st.integers(0, 9),
    )
    def begin(self, interval, more, reconnect, silent_from_start, seed):
        jitter = random.Random(seed).random
        self.driver = Driver(
            jitter=jitter,
            silent_from_start=silent_from_start,
            interval=interval / 1000,
            timeout=(2 * interval + more) / 1000,
            reconnect=reconnect,
        )
        self.reads, self.writes = [], []  # of this connection, heartbeats included
        self.silent_from_start = silent_from_start
        # Silence counts from here if nothing was read.
        self.since = 0 if silent_from_start else None
        self.observed_read = -1
        self.silent_misses = 0  # misses in a row that count
        self.stalled = 0  # how long this process stalled
        self.in_flight, self.awaiting_answer = set(), False
        self.missed_at = NEVER
        self.reconnecting = False  # a reconnect is in progress
        self.is_new = self.requested = False  # reasons for a heartbeat now
        self.sent = self.answered = 0
        self.last_sent = -NEVER
        self.chain = self.driver.state
        self.reports_seen = 0

    # Rules

    @rule(ms=st.integers(1, 200) | st.integers(1, 5))
    def advance(self, ms):
        self.advance_ns(ms * MS)

    def advance_ns(self, ns):
        until = self.driver.now + ns
        for _ in range(1000):
            at = self.driver.next_at()
            if at > until:
                break
            self.driver.now = max(self.driver.now, at)
            self.step()
        else:
            raise AssertionError("the core never rests")
        self.driver.now = until
        self.observe()

    @rule(ms=st.integers(1, 1000))
    def stall(self, ms):
        driver, planned = self.driver, self.driver.next_at()
        planned = max(planned, driver.now)
        driver.now += ms * MS
        if driver.now - planned > driver.rules.grace_ns:
            self.silent_misses, self.missed_at = 0, driver.now + driver.rules.tick_ns
            self.stalled += driver.now - planned
        self.step()
        self.observe()

    def step(self):
        """Take a step and check it."""
        driver, unused = self.driver, self.driver.state is HeartbeatState.UNUSED
        step = driver.step()
        if driver.state is HeartbeatState.UNUSED and (not unused or driver.core.silence.since_ns):
            self.check_unused()
        if self.awaiting_answer and driver.now >= self.missed_at and not self.reconnecting:
            self.awaiting_answer = False
            self.silent_misses += 1
        if isinstance(step, Send):
            self.check_send(step)
        elif isinstance(step, Reconnect):
            assert driver.rules.reconnect
            assert self.silence() > driver.rules.timeout_ns + self.stalled
            assert self.silent_misses >= MISSES_UNTIL_DEAD
            self.silent_misses = MISSES_UNTIL_DEAD - 1
            self.reconnecting = True

    def check_unused(self):
        """An idle channel has become unused."""
        if self.driver.core.silence.since_ns != (
            self.driver.now if self.silent_from_start else None
        ):
            return  # it was unused before
        self.reads, self.writes, self.observed_read = [], [], -1
        self.since = self.driver.now if self.silent_from_start else None
        self.silent_misses, self.stalled, self.in_flight = 0, 0, set()

    def check_send(self, step):
        driver, rules = self.driver, self.driver.rules
        assert not self.awaiting_answer
        assert not self.reconnecting
        assert driver.state is not CLOSED
        assert (
            not driver.idle or self.is_new or self.requested or driver.state is HeartbeatState.DEAD
        )
        self.check_send_is_due()
        assert step.timeout_ns == rules.timeout_ns
        self.sent += 1
        assert step.number == self.sent
        self.in_flight = {*sorted(self.in_flight)[: MAX_IN_FLIGHT - 1], self.sent}
        self.awaiting_answer, self.last_sent = True, driver.now
        self.missed_at = driver.now + rules.tick_ns
        self.writes.append(driver.now)
        self.since = driver.now if self.since is None and not self.reads else self.since
        self.is_new = self.requested = False

    def check_send_is_due(self):
        rules, now = self.driver.rules, self.driver.now
        if self.is_new or self.requested:
            return
        if self.driver.state in NOT_ANSWERING:
            assert now >= self.last_sent + rules.tick_ns
            return
        written = self.writes[-1] if self.writes else self.since
        assert self.silence() > rules.interval_ns or now - written > rules.interval_ns

    def silence(self):
        return self.driver.now - (self.reads[-1] if self.reads else self.since)

    @rule(read=st.booleans())
    def call(self, read):
        self.driver.wrote()
        self.writes.append(self.driver.now)
        if read:
            self.driver.read()
            self.reads.append(self.driver.now)
        self.observe()

    def observe(self):
        """Let the core observe the activity, and update the model."""
        self.driver.next_at()
        if self.since is None and not self.reads and self.writes:
            self.since = self.writes[0]
        if self.reads and self.reads[-1] > self.observed_read:
            self.silent_misses, self.is_new, self.awaiting_answer, self.stalled = 0, False, False, 0
            self.observed_read = self.reads[-1]
        if self.driver.state is not CLOSED and self.reconnecting:
            self.reconnecting = self.driver.confirm_dead()

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def answer(self, data):
        number = data.draw(st.sampled_from(sorted(self.in_flight)))
        driver = self.driver
        assert driver.core.record_answer(driver.now, number, rtt_ns=0, serving=None)
        driver.activity.last_read_ns = driver.now
        self.in_flight = {later for later in self.in_flight if later > number}
        self.answered += 1
        self.reads.append(driver.now)
        self.silent_misses, self.awaiting_answer, self.is_new, self.stalled = 0, False, False, 0
        self.observed_read = driver.now
        self.observe()

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), is_silence=st.booleans())
    def fail(self, data, is_silence):
        number = data.draw(st.sampled_from(sorted(self.in_flight)))
        core = self.driver.core
        assert core.record_miss(self.driver.now, number, "UNAVAILABLE", is_silence=is_silence)
        self.in_flight.discard(number)
        if not is_silence:
            self.silent_misses = 0
        if number == self.sent and self.awaiting_answer:
            self.awaiting_answer = False
            self.silent_misses += is_silence

    @rule(back=st.integers(0, 3))
    def late_results_change_nothing(self, back):
        core, number = self.driver.core, self.sent - back
        if number not in self.in_flight:
            assert not core.record_answer(self.driver.now, number, rtt_ns=0, serving=None)
            assert not core.record_miss(self.driver.now, number, "UNAVAILABLE")

    @precondition(lambda self: self.reconnecting)
    @rule(done=st.booleans())
    def reconnect_ends(self, done):
        """If it is refused, the next one follows after the next heartbeat that is missed."""
        self.reconnecting = False
        if done:
            self.replace(by_heartbeat=True)
        else:
            self.driver.core.reconnect_refused()
            self.advance_ns(self.driver.rules.tick_ns + self.driver.rules.grace_ns)
            assert self.reconnecting

    @precondition(lambda self: self.driver.state not in {CLOSED, HeartbeatState.DEAD})
    @rule(refusals=st.integers(0, 3))
    def fall_silent(self, refusals):
        """A used connection gets no more answers until it is dead, and is perhaps not replaced."""
        self.driver.idle = False
        self.call(read=False)
        for _ in range(4):
            self.advance_ns(self.driver.rules.timeout_ns + self.driver.rules.grace_ns)
        assert self.driver.state is HeartbeatState.DEAD
        assert self.reconnecting is self.driver.rules.reconnect
        for _ in range(refusals if self.reconnecting else 0):
            self.reconnect_ends(done=False)

    @precondition(lambda self: self.driver.state is not CLOSED)
    @rule()
    def user_reconnects(self):
        self.reconnecting = False
        self.replace(by_heartbeat=False)

    def replace(self, *, by_heartbeat):
        self.driver.replace_connection(by_heartbeat=by_heartbeat)
        known = self.reads or self.since is not None
        self.reads, self.writes, self.observed_read = [], [], -1
        self.in_flight, self.awaiting_answer, self.silent_misses, self.stalled = set(), False, 0, 0
        if self.driver.state is not HeartbeatState.UNUSED:
            self.is_new = True
        self.since = self.driver.now if known else None

    @rule(idle=st.booleans())
    def set_idle(self, idle):
        self.driver.idle = idle

    @rule()
    def request(self):
        wanted = self.driver.core.request()
        assert wanted is (
            self.driver.state is not CLOSED and not self.awaiting_answer and not self.reconnecting
        )
        self.requested = self.requested or wanted

    @rule(really=st.integers(0, 9))
    def close(self, really):
        if really == 0:
            self.driver.core.close()
            self.in_flight, self.awaiting_answer, self.reconnecting = set(), False, False

    # Invariants

    @invariant()
    def states_follow_the_transitions(self):
        for report in self.driver.reports[self.reports_seen :]:
            match report:
                case StateChanged(old, new):
                    assert old is self.chain
                    assert new in TRANSITIONS[old]
                    self.chain = new
                case HeartbeatMissed(misses=misses, silent_s=silent_s):
                    assert misses > 0
                    assert silent_s >= 0
                case ConnectionDead(misses=misses, silent_s=silent_s):
                    assert silent_s * 1e9 > self.driver.rules.timeout_ns
                    assert misses > 0
        self.reports_seen = len(self.driver.reports)
        assert self.chain is self.driver.state

    @invariant()
    def counts_agree_and_nothing_is_late(self):
        core, rules, now = self.driver.core, self.driver.rules, self.driver.now
        assert (core.sent, core.answered) == (self.sent, self.answered)
        assert (core.in_flight, core.awaiting_answer) == (self.in_flight, self.awaiting_answer)
        if self.driver.state is CLOSED or self.reconnecting:
            assert self.driver.next_at() == NEVER
            return
        assert self.driver.next_at() <= now + 3 * rules.timeout_ns
        if self.requested:
            assert self.driver.next_at() <= now
        if core.state is HeartbeatState.ALIVE and not core.awaiting_answer and not self.driver.idle:
            assert self.silence() <= rules.interval_ns + max(rules.max_jitter_ns, rules.tick_ns) + 2


TestConnection = Connection.TestCase
TestConnection.settings = settings(max_examples=settings.default.max_examples // 5)
