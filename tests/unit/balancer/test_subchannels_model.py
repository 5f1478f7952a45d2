"""A pool of subchannels under random changes, compared with a simple model."""

import time
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fixtures.subchannel_pools import (
    CALL,
    CONNECTING,
    FAILING,
    IDLE,
    READY,
    SECOND,
    Clock,
    FakeConnection,
    FakePool,
    at,
)
from rpcwheel.balancer import (
    LeastRequest,
    RingHash,
    RoundRobin,
    WeightedRandom,
    WeightedRoundRobin,
    health,
    subchannel,
    subchannels,
)
from rpcwheel.balancer.policy import OutlierEjectionPolicy
from rpcwheel.events import SubchannelHealthy, SubchannelUnhealthy, emit
from rpcwheel.instance import ServiceInstance

INSTANCES = st.builds(
    ServiceInstance,
    service=st.just("s"),
    host=st.sampled_from("hi"),
    port=st.integers(1, 3),
    id=st.sampled_from(["", "a", "b"]),
    weight=st.sampled_from([0, 1, 3, 100]),
    zone=st.sampled_from(["", "near", "far"]),
    status=st.sampled_from(["UP", "UP", "DRAINING"]),
    epoch=st.sampled_from(["1", "2"]),
    protocol=st.sampled_from(["grpc", "grpc", "grpcs"]),
    started_at=st.sampled_from([0.0, 995.0, 2000.0]),
)
PICKERS = [RoundRobin, WeightedRoundRobin, WeightedRandom, LeastRequest, lambda: RingHash("x-user")]


def place(instance):
    return instance.target, instance.protocol


NUMBERS = st.integers(0, 9)
GRACE_S = 10

OUTLIER_POLICIES = st.builds(
    OutlierEjectionPolicy,
    consecutive_failures=st.sampled_from([None, None, 1, 3, 5]),
    failure_percentage=st.sampled_from([50, 75, None]),
    min_calls=st.sampled_from([4, 10]),
    interval=st.sampled_from([5, 30]),
    max_ejection_time=st.sampled_from([25, 300]),
    max_ejection_percent=st.sampled_from([100, 70, 50, 20]),
)
STATUSES = {
    "F": "UNAVAILABLE",
    "D": "DEADLINE_EXCEEDED",
    "A": "NOT_FOUND",
    "I": "INTERNAL",
    "C": "CANCELLED",
    "N": "",
    "S": "OK",
}
CALLS = st.sampled_from(
    ["", "S", "S", "SSSS", "F", "D", "FCF", "FFA", "FFFS", "FSSSS", "FNF", "FFI"]
)
"""Calls of a subchannel, which are repeated; a letter is the status of a call."""
ROUNDS = st.tuples(
    st.sampled_from([True, True, False]),
    st.lists(CALLS, min_size=6, max_size=6),
    st.integers(2, 12),
    st.sampled_from([0, 1, 3]),
)
"""The arguments of `Pool.run_calls`."""


class Calls:
    """What the calls of a subchannel have shown since it last became healthy."""

    def __init__(self, recovered_ns=0, ejections=0):
        self.failed, self.interval, self.interval_ns = [], [], recovered_ns
        self.recovered_ns, self.ejections = recovered_ns, ejections
        self.reason, self.unhealthy_ns, self.ejected = "", None, False

    def end(self, failed):
        self.failed.append(failed)
        self.interval.append(failed)

    @property
    def failures_in_a_row(self):
        return [*reversed(self.failed), False].index(False)

    @property
    def share_of_failures(self):
        """An average of about the last 16 calls; more after several failures in a row."""
        share = 0.0
        for failed in self.failed:
            share += (failed - share) / 16
            if share < 0.001:
                share = 0.0
        return max(share, self.failures_in_a_row / (self.failures_in_a_row + 2))


class Pool(RuleBasedStateMachine):
    @initialize(
        picker=st.sampled_from(PICKERS),
        zone=st.sampled_from(["", "near"]),
        slow_start=st.sampled_from([None, 10]),
        self_preservation=st.sampled_from([True] * 5 + [False]),
        outlier_ejection=st.sampled_from([True, True, False]).flatmap(
            lambda ejects: OUTLIER_POLICIES if ejects else st.none()
        ),
        of_registry=st.sampled_from([True] * 4 + [False]),
        instances=st.lists(INSTANCES, min_size=3, max_size=6),
    )
    def begin(self, picker, of_registry, instances, **policy):
        self.clock = Clock()
        clock = SimpleNamespace(
            monotonic_ns=lambda: self.clock.now_ns, time=lambda: self.clock.now_ns / 1e9
        )
        subchannels.time = subchannel.time = clock
        self.pool = FakePool(self.clock, picker(), None, **policy)
        self.events = []
        subchannels.emit = health.emit = self.events.append
        self.pool.preservation.grace_ns = GRACE_S * SECOND if of_registry else None
        self.published, self.calls, self.removed = {}, {}, []
        self.stale, self.changed_ns = set(), 0
        self.lost = {}  # by id: when, and the instance
        self.update(instances)

    def teardown(self):
        subchannels.time = subchannel.time = time
        subchannels.emit = health.emit = emit

    def any_of(self, number):
        return self.pool.subchannels[number % len(self.pool.subchannels)]

    @rule(
        lost=st.sampled_from([{0}, {0, 1}, {0, 1, 2}]) | st.sets(st.integers(0, 5)),
        withdrawn=st.sets(st.integers(0, 5), max_size=1),
        early_ns=st.sampled_from([None, 0, 1]),
    )
    def lose_instances(self, lost, withdrawn, early_ns):
        """Instances leave: they withdraw, or the registry loses them, perhaps until they expire."""
        known = list(self.published.values())
        self.update(
            [
                one
                for number, one in enumerate(known)
                if number not in lost | withdrawn and one.id not in self.stale
            ],
            {one.id for number, one in enumerate(known) if number not in withdrawn},
        )
        if early_ns is not None:
            self.expire_stale(early_ns)

    @rule(instances=st.lists(INSTANCES, min_size=3, max_size=6))
    def update(self, instances, expired=()):
        before = {one.id: one for one in self.pool.subchannels}
        published = {one.id: one for one in instances}
        for seen in (self.pool.drained, self.pool.checks, self.events):
            seen.clear()
        self.pool.update(instances, expired=expired)
        after = {one.id: one for one in self.pool.subchannels}
        oldest_ns = self.clock.now_ns - 60_000_000_000
        lost = {
            name: (since_ns, one)
            for name, (since_ns, one) in self.lost.items()
            if name not in published and since_ns > oldest_ns
        }
        kept = {name: one for name, one in self.published.items() if one.status != "DRAINING"}
        last = {name: one for name, (_, one) in lost.items()} | kept
        stale = {}
        if not published and last and self.pool.policy.self_preservation:
            stale, lost = last, {}
        elif self.pool.policy.self_preservation and self.pool.preservation.grace_ns is not None:
            left = (self.stale | {*expired}) - published.keys()
            stale = {name: one for name, one in kept.items() if name in left}
        published |= stale
        gone = {name: one for name, one in kept.items() if name not in published}
        self.lost = lost | {name: (self.clock.now_ns, one) for name, one in gone.items()}
        newly = stale.keys() - self.stale
        assert {name for event in self.events for name in event.subchannels} == newly
        self.set_stale({*stale})
        same = {
            name
            for name in before.keys() & published.keys()
            if place(self.published[name]) == place(published[name])
        }
        assert {name for name in before if after.get(name) is before[name]} == same
        renewed = {
            name
            for name in same
            if self.calls[name].reason and self.published[name].epoch != published[name].epoch
        }
        checked = sorted(after[name].instance.port for name in newly | renewed)
        assert sorted(self.pool.checks) == [(port, 0.0) for port in checked]
        removed = [before[name] for name in before.keys() - same]
        connected = (one.instance.port for one in removed if one.connection is not None)
        assert sorted(self.pool.drained) == sorted(connected)
        self.removed += removed
        self.published = published
        self.calls = {name: self.calls[name] if name in same else Calls() for name in published}

    def set_stale(self, names):
        if names != self.stale:
            self.stale, self.changed_ns = names, self.clock.now_ns

    def note_removed(self, one):
        assert (one.instance.port in self.pool.drained) == (one.connection is not None)
        self.removed.append(one)
        del self.published[one.id], self.calls[one.id]

    @precondition(lambda self: self.stale)
    @rule(number=NUMBERS)
    def remove_stale(self, number):
        stale = [one for one in self.pool.subchannels if one.stale]
        one = stale[number % len(stale)]
        self.pool.remove_stale(one)
        self.note_removed(one)
        self.set_stale(self.stale - {one.id})

    def expire_stale(self, early_ns):
        due_ns = self.changed_ns + GRACE_S * SECOND - early_ns
        self.clock.now_ns = max(self.clock.now_ns, due_ns)
        few = 2 * len(self.stale) <= len(self.published)
        since_s = (self.clock.now_ns - self.changed_ns) / SECOND
        stale = [one for one in self.pool.subchannels if one.stale]
        is_due = self.pool.preservation.grace_ns is not None and few and since_s >= GRACE_S
        assert self.pool.expire_stale() is is_due
        if is_due:
            for one in stale:
                self.note_removed(one)
            self.set_stale(set())

    @rule(seconds=st.integers(0, 20))
    def time_passes(self, seconds):
        self.clock.pass_(seconds)

    @precondition(lambda self: self.published)
    @rule(number=NUMBERS, state=st.sampled_from([IDLE, CONNECTING, READY, FAILING]))
    def change_state(self, number, state):
        self.set_state(self.any_of(number), state)

    def set_state(self, one, state):
        one.connection = one.connection or FakeConnection()
        one.connection.state = state

    @precondition(lambda self: self.published)
    @rule(number=NUMBERS)
    def mark_unhealthy(self, number):
        one = self.any_of(number)
        self.events.clear()
        self.pool.checks.clear()
        self.pool.checker.mark_unhealthy(one, "by hand")
        reason = "" if self.calls[one.id].reason else "by hand"
        self.check_unhealthy(one, reason)
        assert self.pool.checks == ([(one.instance.port, None)] if reason else [])

    def check_unhealthy(self, one, reason):
        """It has just become unhealthy for this reason; "": it has not."""
        happened = [SubchannelUnhealthy("shop.Orders", one.id, reason)] if reason else []
        assert self.events == happened
        if reason:
            calls = self.calls[one.id]
            calls.reason, calls.unhealthy_ns = reason, self.clock.now_ns

    @precondition(lambda self: self.published)
    @rule(number=NUMBERS)
    def mark_healthy(self, number):
        self.become_healthy(self.any_of(number))

    def become_healthy(self, one):
        calls, now_ns = self.calls[one.id], self.clock.now_ns
        port, was_stale = one.instance.port, one.id in self.stale
        self.events.clear()
        self.pool.checks = [(port, 7.0)]
        self.pool.checker.mark_healthy(one)
        if calls.reason:
            assert self.pool.checks == ([(port, None)] if was_stale else [])
            after_s = (now_ns - calls.unhealthy_ns) / SECOND
            assert self.events == [SubchannelHealthy("shop.Orders", one.id, after_s)]
            self.calls[one.id] = Calls(now_ns, calls.ejections)
        else:
            assert self.pool.checks == [(port, 7.0)]
            assert self.events == []

    @precondition(lambda self: self.published)
    @rule(rounds=ROUNDS)
    def run_calls(self, rounds):
        """Rounds of calls, the same ones of a subchannel in each, perhaps after a recovery."""
        recovers, calls, times, pause_s = rounds
        if recovers:
            for one in self.pool.subchannels:
                self.set_state(one, READY)
                self.become_healthy(one)
            self.a_pick_is_ready_and_of_the_best_level()
        for _ in range(times):
            for one, statuses in zip(self.pool.subchannels, calls, strict=False):
                for status in statuses:
                    self.end_call(one, STATUSES[status])
            self.clock.pass_(pause_s)

    def end_call(self, one, status):
        calls, policy, now_ns = self.calls[one.id], self.pool.policy, self.clock.now_ns
        self.events.clear()
        self.pool.checks.clear()
        if status == "OK":
            one.succeeded()
        else:
            self.pool.checker.failed(one, status)
        failures = ""
        if status in {"OK", "NOT_FOUND", "INTERNAL"}:
            calls.end(failed=False)
        elif (
            status in {"UNAVAILABLE", "DEADLINE_EXCEEDED"}
            and one.state is READY
            and policy.outlier_ejection is not None
        ):
            if now_ns - calls.interval_ns >= policy.outlier_ejection.interval * SECOND:
                calls.interval, calls.interval_ns = [], now_ns
            calls.end(failed=True)
            failures = self.failures_that_eject(one, calls, policy.outlier_ejection)
        self.check_unhealthy(one, f"{failures} calls failed: {status}" if failures else "")
        if failures:
            self.check_ejected(one, calls, policy.outlier_ejection)

    def failures_that_eject(self, one, calls, policy):
        in_a_row, failed, total = calls.failures_in_a_row, sum(calls.interval), len(calls.interval)
        if policy.consecutive_failures is not None and in_a_row >= policy.consecutive_failures:
            failures = f"{in_a_row}"
        elif policy.failure_percentage is not None and total >= policy.min_calls:
            failures = f"{failed} of {total}"
            if failed / total < policy.failure_percentage / 100:
                return ""
        else:
            return ""
        ejected = sum(other.ejected for other in self.calls.values()) + 1
        if calls.reason or ejected / len(self.calls) > policy.max_ejection_percent / 100:
            return ""
        others = [self.calls[other.id] for other in self.used() if other is not one]
        shares = sorted(other.share_of_failures for other in others if not other.ejected)
        usual = shares[(len(shares) - 1) // 4] if shares else 0.0  # that of the best quarter
        by_chance = usual**in_a_row > 1e-8
        is_twice = total >= policy.min_calls and failed >= 2 * usual * total
        return "" if by_chance and not is_twice else failures

    def check_ejected(self, one, calls, policy):
        """The time grows with each ejection, unless the last one was long ago."""
        if self.clock.now_ns - calls.recovered_ns >= policy.max_ejection_time * SECOND:
            calls.ejections = 0
        calls.ejected = True
        calls.ejections += 1
        ejected_s = min(calls.ejections * policy.base_ejection_time, policy.max_ejection_time)
        assert self.pool.checks[-1] == (one.instance.port, ejected_s)

    def used(self):
        """The subchannels that get calls."""
        sees_all = self.pool.router.untagged.connects_when_picked
        usable = [
            one
            for one in self.pool.subchannels
            if one.state is READY or (sees_all and one.state is not FAILING)
        ]
        best = min(map(self.level, usable), default=None)
        return [one for one in usable if one.state is READY and self.level(one) == best]

    @rule(number=NUMBERS)
    def use_a_removed_one(self, number):
        if self.removed:
            one = self.removed[number % len(self.removed)]
            self.pool.checker.mark_unhealthy(one, "late")
            self.pool.checker.failed(one, "UNAVAILABLE")
            self.pool.remove_stale(one)
            assert not self.pool.checker.wants_check(one)

    @invariant()
    def a_pick_is_ready_and_of_the_best_level(self):
        self.clock.pass_(0.1)  # states are read again
        picked = self.pool.pick(*CALL)
        ready = {one.id: self.level(one) for one in self.pool.subchannels if one.state is READY}
        if picked is not None:
            assert self.pool.subchannels.count(picked) == 1
            assert picked.state is READY
            if not self.pool.router.untagged.connects_when_picked:
                assert ready[picked.id] == min(ready.values())
        elif ready:
            # it may wait for the owner of a key
            assert self.pool.router.untagged.connects_when_picked

    def level(self, one):
        instance = self.published[one.id]
        if self.calls[one.id].reason:
            return 4
        if instance.status == "DRAINING":
            return 3
        if not instance.weight:
            return 2
        zone = self.pool.policy.zone
        return int(bool(zone) and instance.zone != zone)

    @invariant()
    def subchannels_are_as_published(self):
        pool = self.pool
        assert {one.id: one.instance for one in pool.subchannels} == self.published
        assert [one.id for one in pool.subchannels] == sorted(self.published)
        assert {one.id for one in pool.subchannels if one.stale} == self.stale
        for one in pool.subchannels:
            calls = self.calls[one.id]
            assert (one.unhealthy_reason, one.ejected) == (calls.reason, calls.ejected)
            assert one.healthy is not bool(calls.reason)
            assert not one.removed
        assert not set(self.removed) & set(pool.subchannels)
        assert all(one.removed for one in self.removed)
        chosen, weights = pool.router.untagged.chosen
        for one, weight in zip(chosen, weights, strict=True):
            assert 1 <= weight <= max(1, one.instance.weight)


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=45, stateful_step_count=30)


@given(
    count=st.integers(2, 6),
    policy=OUTLIER_POLICIES,
    rounds=st.lists(ROUNDS, min_size=3, max_size=8),
)
@settings(max_examples=50)
def test_outliers_are_ejected(count, policy, rounds):
    pool, instances = Pool(), [at(port) for port in range(1, count + 1)]
    pool.begin(RoundRobin, of_registry=True, instances=instances, outlier_ejection=policy)
    try:
        for each in rounds:
            pool.run_calls(each)
            pool.subchannels_are_as_published()
    finally:
        pool.teardown()
