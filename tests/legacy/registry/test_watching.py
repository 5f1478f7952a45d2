"""Which watches run: by the latest intent, whatever fails."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rpcwheel.durations import NEVER
from rpcwheel.registry.policy import RegistryPolicy
from rpcwheel.registry.rules import RegistryRules
from rpcwheel.registry.watching import Task, Watching

SECOND = 1_000_000_000
FAILED = RuntimeError("no")
RULES = RegistryRules.of(RegistryPolicy(backoff=1.0))


@pytest.fixture
def watching():
    return Watching(RULES)


def test_one_that_is_not_wanted_any_more_when_it_has_begun_is_ended(watching):
    watching.want("shop", "me", 0)
    task = watching.next_task(0)
    watching.want("shop", None, 0)
    watching.done(task, 0, watch="watch", error=None)
    assert watching.next_task(0) == Task("shop", "me", "watch")


def test_one_that_has_failed_and_is_not_wanted_is_forgotten(watching):
    watching.want("shop", "me", 0)
    task = watching.next_task(0)
    watching.want("shop", None, 0)
    assert watching.done(task, 0, error=FAILED) is None
    assert (watching.next_task(0), watching.next_wake_ns()) == (None, NEVER)


SERVICES = st.sampled_from(["a", "b"])


class AtRandom(RuleBasedStateMachine):
    """In the end exactly those watches run that are wanted, and no other was left running."""

    def __init__(self):
        super().__init__()
        self.watching = Watching(RULES)
        self.now_ns = 0
        self.wanted: dict[str, object] = {}
        self.running: set[tuple[str, object]] = set()
        self.task = None
        self.number = 0

    @rule(service=SERVICES)
    def want(self, service):
        self.number += 1
        self.wanted[service] = self.number
        self.watching.want(service, self.number, self.now_ns)

    @rule(service=SERVICES)
    def drop(self, service):
        self.wanted.pop(service, None)
        self.watching.want(service, None, self.now_ns)

    @rule()
    def begin(self):
        if self.task is None:
            self.task = self.watching.next_task(self.now_ns)

    @rule(fails=st.booleans())
    def end(self, fails):
        task, self.task = self.task, None
        if task is None:
            return
        watch = None
        if task.watch is not None:
            self.running.discard(task.watch)
        elif not fails:
            watch = (task.service, task.watcher)
            self.running.add(watch)
        error = FAILED if fails else None
        delay_ns = self.watching.delay_ns(task, FAILED) if fails else 0
        self.watching.done(task, self.now_ns, watch=watch, error=error, delay_ns=delay_ns)

    @rule(seconds=st.integers(0, 3))
    def pass_time(self, seconds):
        self.now_ns += seconds * SECOND

    @invariant()
    def a_service_is_never_watched_twice(self):
        services = [service for service, _ in self.running]
        assert len(services) == len(set(services))

    def teardown(self):
        self.end(fails=False)
        for _ in range(20):
            self.now_ns += SECOND
            self.begin()
            self.end(fails=False)
        assert self.running == set(self.wanted.items())


TestAtRandom = AtRandom.TestCase
TestAtRandom.settings = settings(max_examples=50)
