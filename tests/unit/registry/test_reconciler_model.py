"""The reconciler at random, beside a model that only remembers what was asked for last."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rpcwheel.durations import NEVER
from rpcwheel.errors import RegistryRefused, RegistryUnavailable
from rpcwheel.instance import ServiceInstance
from rpcwheel.registry.policy import RegistryPolicy, RegistryRules
from rpcwheel.registry.reconciler import Reconciler, RegistrationState

SECOND = 1_000_000_000
LEASE = 6 * SECOND
PENDING, PUBLISHED, LOST, WITHDRAWING, GONE = RegistrationState
TRANSITIONS = {
    PENDING: {PUBLISHED, WITHDRAWING, GONE},
    PUBLISHED: {PENDING, LOST, WITHDRAWING},
    LOST: {PUBLISHED, WITHDRAWING},
    WITHDRAWING: {PENDING, GONE},
    GONE: set(),
}
PORTS = st.integers(1, 2)
INTENTS = st.tuples(
    st.sampled_from(["register", "unregister", "let go"]),
    PORTS,
    st.integers(1, 2),
    st.sampled_from(["first", "first", "second"]),
)


def instance(port: int, weight: int = 100, epoch: str = "first") -> ServiceInstance:
    return ServiceInstance(service="shop", host="a", port=port, weight=weight, epoch=epoch)


class Engine:
    """Executes requests later."""

    def __init__(self):
        self.holds: dict = {}
        self.late: list = []  # requests that have failed, and when they take effect at last
        self.wiped: dict = {}

    def carry_out(self, step):
        for one in step.instances:
            held = self.holds.get(one.key)
            if step.kind == "publish":
                self.holds[one.key] = one
            elif held is not None and held.epoch == one.epoch:
                del self.holds[one.key]

    def arrive(self, now_ns):
        due = [one for one in self.late if one[0] <= now_ns]
        self.late = [one for one in self.late if one[0] > now_ns]
        for _, step in due:
            self.carry_out(step)

    def lost(self, step):
        gone = [one for one in step.instances if not self.has(one)]
        return {one.key: self.wiped.get(one.key, "missing") for one in gone}

    def has(self, one):
        held = self.holds.get(one.key)
        return held is not None and held.epoch == one.epoch


class Reconciling(RuleBasedStateMachine):
    """Intentions, failures, wipes and late arrivals in any order; in the end all is as wanted."""

    def __init__(self):
        super().__init__()
        self.now_ns = SECOND
        rules = RegistryRules.from_policy(RegistryPolicy(lease_ttl=6.0))
        self.core = Reconciler("memory://", rules)
        self.engine = Engine()
        self.wanted: dict = {}
        self.entries: list = []
        self.states: dict = {}
        self.closes_at_end = False

    # What is wanted

    @rule()
    def close_at_the_end(self):
        self.closes_at_end = True

    @rule(intent=INTENTS)
    def change_your_mind(self, intent):
        what, port, weight, epoch = intent
        one = instance(port, weight, epoch)
        newest = self.core._records.get(one.key)
        if what == "register":
            self.wanted[one.key] = one
            self.entries.append(self.core.set_desired(one, self.now_ns))
        elif what == "unregister":
            one = self.wanted.pop(one.key, one)
            self.entries.append(self.core.remove(one, self.now_ns))
        else:
            for entry in self.entries:
                if entry.instance.key == one.key:
                    self.core.remove(entry, self.now_ns)
                    if entry is newest:
                        self.wanted.pop(one.key, None)

    # What becomes of it

    @rule(
        outcome=st.sampled_from(["good", "good", "lost", "done", "late", "refused"]),
        meanwhile=st.lists(INTENTS, max_size=2),
        delay=st.integers(0, LEASE),
    )
    def make_the_next_request(self, outcome, meanwhile, delay):
        self.now_ns = max(self.now_ns, min(self.core.next_wake_ns(), self.now_ns + LEASE))
        self.engine.arrive(self.now_ns)
        step = self.begin()
        for intent in meanwhile:
            self.change_your_mind(intent)
        if step is not None:
            self.end(step, outcome, delay)

    def begin(self):
        step = self.core.next_request(self.now_ns)
        assert step is None or self.core.next_request(self.now_ns) is None, "one is under way"
        for entry, _ in () if step is None else step.batch:
            latest = self.wanted.get(entry.instance.key)
            assert (latest is not None) is (step.kind != "withdraw")
            assert step.kind != "publish" or latest in step.instances
        return step

    def end(self, step, outcome, delay):
        error = {"good": None, "refused": RegistryRefused("no")}
        error = error.get(outcome, RegistryUnavailable("away"))
        lost = None
        if step.kind == "renew":
            lost = self.engine.lost(step)
        elif outcome in {"good", "done"}:
            self.engine.carry_out(step)
        elif outcome == "late":
            self.engine.late.append((self.now_ns + delay, step))
        delay_ns = self.core.delay_ns(step, self.now_ns, error) if error else 0
        lost = None if error else lost
        self.core.done(step, self.now_ns, error=error, delay_ns=delay_ns, lost=lost)

    # What happens to the engine

    @rule(why=st.sampled_from(["lease", "session", "wiped"]))
    def forget(self, why):
        self.engine.wiped = dict.fromkeys(self.engine.holds, why)
        self.engine.holds.clear()

    @rule(port=PORTS)
    def delete(self, port):
        self.engine.holds.pop(instance(port).key, None)

    @rule(seconds=st.floats(0, 4))
    def pass_time(self, seconds):
        self.now_ns += int(seconds * SECOND)
        self.engine.arrive(self.now_ns)

    # What is always true

    @invariant()
    def states_follow_each_other_as_they_may(self):
        for entry in self.entries:
            before = self.states.get(entry, PENDING)
            after = entry.state
            between = TRANSITIONS[before] | {
                x for one in TRANSITIONS[before] for x in TRANSITIONS[one]
            }
            assert after is before or after in between, (before, after)
            self.states[entry] = after

    @invariant()
    def what_is_wanted_is_known_by_its_latest_form(self):
        known = {e.instance.key: e.instance for e in self.core.records() if e.wanted}
        assert known == self.wanted

    @invariant()
    def there_is_always_a_next_look_while_something_is_wanted(self):
        if self.wanted:
            assert self.core.next_wake_ns() < NEVER

    def teardown(self):
        """Once nothing fails any more, all is as wanted; within lease, retry and jitter.

        After `close`, nothing is wanted, and no late request is expected.
        """
        if self.closes_at_end:
            self.engine.late.clear()
            self.wanted.clear()
            self.core.close(self.now_ns)
        end_ns = self.now_ns + 4 * LEASE
        while self.core.next_wake_ns() <= end_ns:
            self.now_ns = max(self.now_ns, self.core.next_wake_ns())
            self.engine.arrive(self.now_ns)
            step = self.begin()
            if step is not None:
                self.end(step, "good", 0)
        self.engine.arrive(end_ns)
        assert self.engine.holds == self.wanted
        for entry in self.entries:
            newest = self.core._records.get(entry.instance.key) is entry
            wanted = newest and entry.wanted
            assert entry.state is (PUBLISHED if wanted else GONE)


TestReconciling = Reconciling.TestCase
TestReconciling.settings = settings(max_examples=80, stateful_step_count=25)
