"""A pool of subchannels under random changes, compared with a simple model."""

import time
from types import SimpleNamespace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

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
)
from rpcwheel.balancer import (
    LeastRequest,
    RingHash,
    RoundRobin,
    WeightedRandom,
    WeightedRoundRobin,
    subchannel,
    subchannels,
)
from rpcwheel.events import emit
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


class Pool(RuleBasedStateMachine):
    @initialize(
        picker=st.sampled_from(PICKERS),
        zone=st.sampled_from(["", "near"]),
        slow_start=st.sampled_from([None, 10]),
        self_preservation=st.sampled_from([True, True, True, False]),
        of_registry=st.sampled_from([True, True, False]),
        instances=st.lists(INSTANCES, min_size=3, max_size=6),
    )
    def begin(self, picker, of_registry, instances, **policy):
        self.clock = Clock()
        clock = SimpleNamespace(
            monotonic_ns=lambda: self.clock.now_ns, time=lambda: self.clock.now_ns / 1e9
        )
        subchannels.time = subchannel.time = clock
        self.pool = FakePool(self.clock, picker(), None, outlier_ejection=3, **policy)
        self.events = []
        subchannels.emit = self.events.append
        self.pool.preservation.grace_ns = GRACE_S * SECOND if of_registry else None
        self.published, self.unhealthy, self.removed = {}, set(), []
        self.stale, self.changed_ns = set(), 0
        self.lost = {}  # by id: when, and the instance
        self.update(instances)

    def teardown(self):
        subchannels.time = subchannel.time = time
        subchannels.emit = emit

    def any_of(self, number):
        known = self.pool.subchannels
        return known[number % len(known)] if known else None

    @rule(left=st.sets(st.integers(0, 5)), withdrawn=st.sets(st.integers(0, 5)))
    def lose_instances(self, left, withdrawn):
        """Instances leave: they withdraw, or the registry loses them."""
        known = list(self.published.values())
        self.update(
            [
                one
                for number, one in enumerate(known)
                if number in left and one.id not in self.stale
            ],
            {one.id for number, one in enumerate(known) if number not in withdrawn},
        )

    @rule(instances=st.lists(INSTANCES, min_size=3, max_size=6))
    def update(self, instances, expired=()):
        before = {one.id: one for one in self.pool.subchannels}
        published = {one.id: one for one in instances}
        self.pool.drained.clear()
        self.events.clear()
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
        assert {(after[name].instance.port, 0.0) for name in newly} <= {*self.pool.checks}
        self.set_stale({*stale})
        same = {
            name
            for name in before.keys() & published.keys()
            if place(self.published[name]) == place(published[name])
        }
        assert {name for name in before if after.get(name) is before[name]} == same
        removed = [before[name] for name in before.keys() - same]
        assert sorted(self.pool.drained) == sorted(one.instance.port for one in removed)
        self.removed += removed
        self.published = published
        self.unhealthy &= same

    def set_stale(self, names):
        if names != self.stale:
            self.stale, self.changed_ns = names, self.clock.now_ns

    def note_removed(self, one):
        assert one.instance.port in self.pool.drained
        self.removed.append(one)
        del self.published[one.id]
        self.unhealthy.discard(one.id)

    @rule(number=NUMBERS)
    def remove_if_stale(self, number):
        one = self.any_of(number)
        if one is not None and one.stale:
            self.pool.remove_stale(one)
            self.note_removed(one)
            self.set_stale(self.stale - {one.id})

    @rule()
    def expire_stale(self):
        few = 2 * len(self.stale) <= len(self.published)
        since_s = (self.clock.now_ns - self.changed_ns) / SECOND
        stale = [one for one in self.pool.subchannels if one.stale]
        self.pool.expire_stale()
        if self.pool.preservation.grace_ns is not None and few and since_s >= GRACE_S:
            for one in stale:
                self.note_removed(one)
            self.set_stale(set())

    @rule(seconds=st.integers(0, 20))
    def time_passes(self, seconds):
        self.clock.pass_(seconds)

    @rule(number=NUMBERS, state=st.sampled_from([IDLE, CONNECTING, READY, READY, FAILING]))
    def change_state(self, number, state):
        one = self.any_of(number)
        if one is not None:
            one.connection = one.connection or FakeConnection()
            one.connection.state = state

    @rule(number=NUMBERS, healthy=st.booleans())
    def mark(self, number, healthy):
        one = self.any_of(number)
        if one is not None and healthy:
            self.pool.checker.mark_healthy(one)
            self.unhealthy.discard(one.id)
        elif one is not None:
            self.pool.checker.mark_unhealthy(one, "x")
            self.unhealthy.add(one.id)

    @rule(number=NUMBERS, code=st.sampled_from(["UNAVAILABLE", "NOT_FOUND"]), times=NUMBERS)
    def end_calls(self, number, code, times):
        one = self.any_of(number)
        if one is not None:
            for _ in range(times):
                self.pool.checker.failed(one, code)
            if one.ejected:
                self.unhealthy.add(one.id)

    @rule(number=NUMBERS)
    def use_a_removed_one(self, number):
        if self.removed:
            one = self.removed[number % len(self.removed)]
            self.pool.checker.mark_unhealthy(one, "late")
            self.pool.checker.failed(one, "UNAVAILABLE")
            self.pool.remove_stale(one)
            assert not self.pool.checker.wants_check(one, one.health.generation)

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
        if one.id in self.unhealthy:
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
            assert one.healthy is (one.id not in self.unhealthy)
            assert not one.removed
            assert not (one.ejected and one.healthy)
        assert not set(self.removed) & set(pool.subchannels)
        assert all(one.removed for one in self.removed)
        chosen, weights = pool.router.untagged.chosen
        for one, weight in zip(chosen, weights, strict=True):
            assert 1 <= weight <= max(1, one.instance.weight)


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=50, stateful_step_count=30)
