"""Any story of a connection, beside a naive model that remembers everything and knows the rules."""

import random

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fixtures.heartbeat_driver import Driver
from rpcwheel.durations import NEVER
from rpcwheel.heartbeat.core import ENOUGH, MOST
from rpcwheel.heartbeat.rules import (
    TRANSITIONS,
    Changed,
    Died,
    HeartbeatState,
    Missed,
    Reconnect,
    Send,
)

MS = 10**6
ENDED = {HeartbeatState.WITHDRAWN, HeartbeatState.CLOSED}
TROUBLED = {HeartbeatState.SUSPECT, HeartbeatState.DEAD}


class Story(RuleBasedStateMachine):
    """Calls, silence, answers, misses, replacements and ends in any order."""

    @initialize(
        interval=st.integers(1, 50),
        more=st.integers(0, 100),
        reconnect=st.booleans(),
        begun=st.booleans(),
        seed=st.integers(0, 9),
    )
    def begin(self, interval, more, reconnect, begun, seed):
        share = random.Random(seed).random
        self.driver = Driver(
            share=share,
            begun=begun,
            interval=interval / 1000,
            timeout=(2 * interval + more) / 1000,
            reconnect=reconnect,
        )
        self.reads, self.writes = [], []  # of this connection, heartbeats too
        self.begun = begun
        self.since = 0 if begun else None  # silence counts from here, if nothing was read
        self.condemning = 0  # misses in a row that count
        self.excused = 0  # while we stood still
        self.on_way, self.waiting = set(), False
        self.missed_at = NEVER
        self.pending = False  # a replacement
        self.urgent = self.forced = False  # as the connection is new; as somebody asks
        self.sent = self.answered = 0
        self.last_sent = -NEVER
        self.chain = self.driver.state
        self.facts = 0

    # What happens

    @rule(ms=st.integers(1, 200) | st.integers(1, 5))
    def time_passes(self, ms):
        until = self.driver.now + ms * MS
        for _ in range(1000):
            at = self.driver.next_at()
            if at > until:
                break
            self.driver.now = max(self.driver.now, at)
            self.look()
        else:
            raise AssertionError("it does something all the time")
        self.driver.now = until
        self.hear()

    @rule(ms=st.integers(1, 1000))
    def we_stand_still(self, ms):
        driver, planned = self.driver, self.driver.next_at()
        planned = max(planned, driver.now)
        driver.now += ms * MS
        if driver.now - planned > driver.rules.grace_ns:
            self.condemning, self.missed_at = 0, driver.now + driver.rules.tick_ns
            self.excused += driver.now - planned
        self.look()
        self.hear()

    def look(self):
        """Take a step; see that it is right."""
        driver, unused = self.driver, self.driver.state is HeartbeatState.UNUSED
        step = driver.step()
        if driver.state is HeartbeatState.UNUSED and (not unused or driver.core._since_ns):
            self.forgets()
        if self.waiting and driver.now >= self.missed_at and not self.pending:
            self.waiting = False
            self.condemning += 1
        if isinstance(step, Send):
            self.sends(step)
        elif isinstance(step, Reconnect):
            assert driver.rules.reconnect
            assert self.silence() > driver.rules.timeout_ns + self.excused
            assert self.condemning >= ENOUGH
            self.condemning = ENOUGH - 1
            self.pending = True

    def forgets(self):
        """What was heard of a connection that is no more."""
        if self.driver.core._since_ns != (self.driver.now if self.begun else None):
            return  # nothing is forgotten: it is not used yet
        self.reads, self.writes, self.heard = [], [], -1
        self.since = self.driver.now if self.begun else None
        self.condemning, self.excused, self.on_way = 0, 0, set()

    def sends(self, step):
        driver, rules = self.driver, self.driver.rules
        assert not self.waiting
        assert not self.pending
        assert driver.state not in ENDED
        assert not driver.idle or self.urgent or self.forced or driver.state is HeartbeatState.DEAD
        self.allowed_to_send()
        assert step.limit_ns == rules.timeout_ns
        self.sent += 1
        assert step.number == self.sent
        self.on_way = {*sorted(self.on_way)[: MOST - 1], self.sent}
        self.waiting, self.last_sent = True, driver.now
        self.missed_at = driver.now + rules.tick_ns
        self.writes.append(driver.now)
        self.since = driver.now if self.since is None and not self.reads else self.since
        self.urgent = self.forced = False

    def allowed_to_send(self):
        rules, now = self.driver.rules, self.driver.now
        if self.urgent or self.forced:
            return
        if self.driver.state in TROUBLED:
            assert now >= self.last_sent + rules.tick_ns
            return
        written = self.writes[-1] if self.writes else self.since
        assert self.silence() > rules.interval_ns or now - written > rules.interval_ns

    def silence(self):
        return self.driver.now - (self.reads[-1] if self.reads else self.since)

    @rule(read=st.booleans())
    def a_call(self, read):
        self.driver.wrote()
        self.writes.append(self.driver.now)
        if read:
            self.driver.read()
            self.reads.append(self.driver.now)
        self.hear()

    def hear(self):
        """Let the core look, and do what follows from what was read."""
        self.driver.next_at()
        if self.since is None and not self.reads and self.writes:
            self.since = self.writes[0]
        if self.reads and self.reads[-1] > self.last_heard():
            self.condemning, self.urgent, self.waiting, self.excused = 0, False, False, 0
            self.heard = self.reads[-1]
        if self.driver.state not in ENDED and self.pending:
            self.pending = self.driver.confirm()

    heard = -1

    def last_heard(self):
        return self.heard

    @precondition(lambda self: self.on_way)
    @rule(data=st.data())
    def a_heartbeat_is_answered(self, data):
        number = data.draw(st.sampled_from(sorted(self.on_way)))
        driver = self.driver
        assert driver.core.heard(driver.now, number, rtt_ns=0, serving=None)
        driver.read_at = driver.now
        self.on_way = {later for later in self.on_way if later > number}
        self.answered += 1
        self.reads.append(driver.now)
        self.condemning, self.waiting, self.urgent, self.heard = 0, False, False, driver.now
        self.excused = 0
        self.hear()

    @precondition(lambda self: self.on_way)
    @rule(data=st.data(), condemning=st.booleans())
    def a_heartbeat_fails(self, data, condemning):
        number = data.draw(st.sampled_from(sorted(self.on_way)))
        core = self.driver.core
        assert core.missed(self.driver.now, number, "UNAVAILABLE", condemning=condemning)
        self.on_way.discard(number)
        if not condemning:
            self.condemning = 0
        if number == self.sent and self.waiting:
            self.waiting = False
            self.condemning += condemning

    @rule(back=st.integers(0, 3))
    def what_ended_before_changes_nothing(self, back):
        core, number = self.driver.core, self.sent - back
        if number not in self.on_way:
            assert not core.heard(self.driver.now, number, rtt_ns=0, serving=None)
            assert not core.missed(self.driver.now, number, "UNAVAILABLE")

    @precondition(lambda self: self.pending)
    @rule(done=st.booleans())
    def the_replacement_ends(self, done):
        self.pending = False
        if done:
            self.renew(by_us=True)
        else:
            self.driver.core.refused()

    @precondition(lambda self: self.driver.state not in ENDED)
    @rule()
    def others_replace(self):
        self.pending = False
        self.renew(by_us=False)

    def renew(self, *, by_us):
        self.driver.renew(by_us=by_us)
        known = self.reads or self.since is not None
        self.reads, self.writes, self.heard = [], [], -1
        self.on_way, self.waiting, self.condemning, self.excused = set(), False, 0, 0
        if self.driver.state is not HeartbeatState.UNUSED:
            self.urgent = True
        self.since = self.driver.now if known else None

    @rule(idle=st.booleans())
    def the_connection_comes_or_goes(self, idle):
        self.driver.idle = idle

    @rule()
    def somebody_asks(self):
        wanted = self.driver.core.beat()
        assert wanted is (self.driver.state not in ENDED and not self.waiting and not self.pending)
        self.forced = self.forced or wanted

    @rule(which=st.sampled_from(["withdraw", "close"]), really=st.integers(0, 9))
    def it_ends(self, which, really):
        if really == 0:
            getattr(self.driver.core, which)()
            self.on_way, self.waiting, self.pending = set(), False, False

    # What is always true

    @invariant()
    def states_follow_each_other_as_the_table_says(self):
        if not hasattr(self, "driver"):
            return
        for fact in self.driver.told[self.facts :]:
            match fact:
                case Changed(old, new):
                    assert old is self.chain
                    assert new in TRANSITIONS[old]
                    self.chain = new
                case Missed(misses, silent_ns, _):
                    assert misses > 0
                    assert silent_ns >= 0
                case Died(silent_ns, misses):
                    assert silent_ns > self.driver.rules.timeout_ns
                    assert misses > 0
        self.facts = len(self.driver.told)
        assert self.chain is self.driver.state

    @invariant()
    def the_counts_are_right_and_nothing_is_late(self):
        if not hasattr(self, "driver"):
            return
        core, rules, now = self.driver.core, self.driver.rules, self.driver.now
        assert (core.sent, core.answered) == (self.sent, self.answered)
        assert (core.on_way, core.waiting) == (self.on_way, self.waiting)
        if self.driver.state in ENDED or self.pending:
            assert self.driver.next_at() == NEVER
            return
        assert self.driver.next_at() <= now + 3 * rules.timeout_ns
        if self.forced:
            assert self.driver.next_at() <= now
        if core.state is HeartbeatState.ALIVE and not core.waiting and not self.driver.idle:
            assert self.silence() <= rules.interval_ns + max(rules.spread_ns, rules.tick_ns) + 2


TestStory = Story.TestCase
