"""Members come and go, fail and answer, at random, beside a model that is plain to see."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rpcwheel.cluster import ClusterPolicy, ConsistentHash, LeastActive, RoundRobin, WeightedRandom
from rpcwheel.cluster.core import Roster
from rpcwheel.cluster.member import MemberCore, Rules
from rpcwheel.instance import ServiceInstance

SECOND = 1_000_000_000
CALL = ("/m", b"", (("x-user", "7"),))
PORTS = st.integers(1, 5)

INSTANCES = st.builds(
    ServiceInstance,
    service=st.just("s"),
    host=st.just("h"),
    port=PORTS,
    id=st.sampled_from(["", "a", "b"]),
    weight=st.sampled_from([0, 1, 3, 100]),
    zone=st.sampled_from(["", "near", "far"]),
    status=st.sampled_from(["UP", "UP", "DRAINING"]),
    epoch=st.sampled_from(["1", "2"]),
    started_at=st.sampled_from([0.0, 995.0, 2000.0]),
)

PICKERS = [RoundRobin, WeightedRandom, LeastActive, lambda: ConsistentHash("x-user")]


class Members(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.now_ns = 0
        self.told = {}
        self.down = {}  # id -> since
        self.gone = []

    @rule(picker=st.sampled_from(PICKERS), zone=st.sampled_from(["", "near"]), warm=st.booleans())
    def begin(self, picker, zone, warm):
        if hasattr(self, "roster"):
            return
        policy = ClusterPolicy(zone=zone, warmup=10 if warm else None, probe=1)
        rules = Rules.of(policy)
        self.roster = Roster("s", MemberCore, picker(), rules, lambda: self.now_ns)

    def begun(self):
        if not hasattr(self, "roster"):
            self.begin(RoundRobin, "", False)
        return self.roster

    @rule(instances=st.lists(INSTANCES, max_size=6))
    def update(self, instances):
        roster = self.begun()
        before = {one.id: one for one in roster.members}
        old, self.told = self.told, {one.id: one for one in instances}
        change = roster.update(instances, 1000.0)
        same = {
            name
            for name in old.keys() & self.told.keys()
            if (old[name].target, old[name].protocol)
            == (self.told[name].target, self.told[name].protocol)
        }
        after = {one.id: one for one in roster.members}
        assert {name for name in before if after.get(name) is before[name]} == same
        assert set(change.added) == {after[name] for name in after.keys() - same}
        assert set(change.removed) == {before[name] for name in before.keys() - same}
        self.gone += change.removed
        self.down = {name: since for name, since in self.down.items() if name in same}

    @rule(seconds=st.integers(0, 20))
    def time_passes(self, seconds):
        self.now_ns += seconds * SECOND
        self.begun().refresh()

    def any_member(self, number):
        members = self.begun().members
        return members[number % len(members)] if members else None

    @rule(number=st.integers(0, 9))
    def fails(self, number):
        member = self.any_member(number)
        if member is not None:
            assert self.roster.down(member, "x") is (member.id not in self.down)
            self.down.setdefault(member.id, self.now_ns)

    @rule(number=st.integers(0, 9))
    def answers(self, number):
        member = self.any_member(number)
        if member is not None:
            since = self.down.pop(member.id, None)
            away_ns = self.roster.up(member)
            assert away_ns == (None if since is None else self.now_ns - since)

    @rule(number=st.integers(0, 9), calls=st.booleans())
    def is_called(self, number, calls):
        member = self.any_member(number)
        if member is not None:
            member.used = True

    @rule(number=st.integers(0, 9))
    def one_that_is_gone_fails_late(self, number):
        if self.gone:
            member = self.gone[number % len(self.gone)]
            assert not self.roster.down(member, "late")
            assert not self.roster.wants_probe(member, member.spell)

    @invariant()
    def who_is_called_is_the_best_there_is(self):
        if not hasattr(self, "roster"):
            return
        if not self.told:
            assert self.roster.pick is None
            return
        picked = self.roster.pick(*CALL)
        assert self.roster.members.count(picked) == 1
        ranks = {one.id: self.rank(one) for one in self.roster.members}
        assert ranks[picked.id] == min(ranks.values())

    def rank(self, member):
        instance = self.told[member.id]
        if member.id in self.down:
            return 4
        if instance.status == "DRAINING":
            return 3
        if not instance.weight:
            return 2
        zone = self.roster.rules.zone
        return int(bool(zone) and instance.zone != zone)

    @invariant()
    def states_are_what_was_told(self):
        if not hasattr(self, "roster"):
            return
        assert {one.id: one.instance for one in self.roster.members} == self.told
        for one in self.roster.members:
            assert (one.down_ns is not None) is (one.id in self.down)
            assert 1 <= self.roster.weight(one) <= max(1, one.instance.weight)
        assert not set(self.gone) & set(self.roster.members)


TestMembers = Members.TestCase
TestMembers.settings = settings(max_examples=30, stateful_step_count=30)
