"""One-shot lookups: shared requests, revisions, and which answer is trusted."""

import pytest

from fixtures.flaky_backends import POLICY, instance
from rpcwheel.errors import RegistryClosed, RegistryUnavailable
from rpcwheel.events import InstancesRetained
from rpcwheel.instance import Snapshot
from rpcwheel.registry.lookups import LookupQueue
from rpcwheel.registry.policy import RegistryRules

SECOND = 1_000_000_000
SERVICE = "shop.Orders"
STALE_TIMEOUT_S = 12


class LookupDriver:
    """A lookup queue over an engine of this process, with a clock and a file set by hand."""

    def __init__(self, backend):
        self.now_s = 0
        self.events = []
        self.written = []
        self.queue = LookupQueue(
            backend,
            RegistryRules.from_policy(POLICY),
            self,
            lambda: self.now_s * SECOND,
            lambda *events: self.events.extend(events),
        )

    def keep(self, service, instances):
        assert service == SERVICE
        self.written.append([one.port for one in instances])

    def load(self, service):
        return None

    def look_up(self, service=SERVICE):
        future = self.queue.add(service)
        error = self.queue.carry_out(self.queue.take())
        assert future.exception() is error
        return error or future.result()


@pytest.fixture
def driver(backend):
    return LookupDriver(backend)


def some(*ports):
    return [instance(port) for port in ports]


def ports(snapshot):
    return [one.port for one in snapshot.instances]


def test_waiting_lookups_of_one_service_share_a_request(driver):
    queue = driver.queue
    assert queue.add(SERVICE) is queue.add(SERVICE)
    assert queue.add(None) is queue.add(None)
    first, second = queue.take(), queue.take()
    assert (first[0], second[0], queue.take()) == (SERVICE, None, None)
    assert queue.add(SERVICE) is not first[1]  # its request may have read older data


def test_the_revision_increases_with_each_change(driver, backend):
    backend.publish(some(1))
    first, unchanged = driver.look_up(), driver.look_up()
    backend.publish(some(2))
    changed = driver.look_up()
    assert (first.revision, unchanged, changed.revision) == (1, first, 2)
    assert ports(changed) == [1, 2]


def test_a_lookup_after_close_is_not_reported_as_a_failure(driver, backend):
    backend.close()
    assert isinstance(driver.look_up(), RegistryClosed)
    assert driver.events == []


def test_a_service_that_never_had_instances_is_not_remembered(driver):
    assert driver.look_up("never.Seen") == Snapshot("never.Seen")
    assert driver.queue.last("never.Seen") is None


def test_instances_that_an_engine_has_lost_are_stale_until_the_stale_timeout(driver, backend):
    """Otherwise one process that only looks up would delete the snapshot file."""
    backend.publish(some(1, 2, 3, 4))
    driver.look_up()
    backend.forget()
    stale = driver.look_up()
    assert (ports(stale), stale.source, len(stale.stale)) == ([1, 2, 3, 4], "stale", 4)
    backend.publish(some(1))
    driver.now_s = STALE_TIMEOUT_S - 1
    assert ports(driver.look_up()) == [1, 2, 3, 4]
    driver.now_s = STALE_TIMEOUT_S
    live = driver.look_up()
    assert (ports(live), live.source) == ([1], "live")
    assert driver.written == [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [1]]
    assert [type(event) for event in driver.events] == [InstancesRetained]


def test_an_instance_that_is_missing_after_a_failed_lookup_is_stale(driver, backend):
    backend.publish(some(1, 2, 3, 4))
    driver.look_up()
    backend.down()
    assert isinstance(driver.look_up(), RegistryUnavailable)
    backend.up()
    backend.withdraw(some(1))
    stale = driver.look_up()
    assert (ports(stale), stale.source, len(stale.stale)) == ([1, 2, 3, 4], "stale", 1)


def test_an_answer_older_than_the_stale_timeout_makes_no_instance_stale(driver, backend):
    backend.publish(some(1, 2, 3))
    driver.look_up()
    backend.withdraw(some(1, 2, 3))
    backend.publish(some(4))
    driver.now_s = STALE_TIMEOUT_S + 1
    assert ports(driver.look_up()) == [4]
    backend.withdraw(some(4))
    driver.now_s = 30
    assert ports(driver.look_up()) == []


def test_an_empty_engine_makes_the_instances_of_an_old_answer_stale(driver, backend):
    backend.publish(some(1, 2, 3))
    driver.look_up()
    backend.forget()
    driver.now_s = STALE_TIMEOUT_S + 1
    assert driver.look_up().source == "stale"


def test_the_last_snapshot_of_a_watch_counts_as_an_answer(driver):
    driver.now_s = 10
    known = tuple(some(1, 2, 3))
    driver.queue.remember(Snapshot(SERVICE, known, 7, age_s=2.0))
    last = driver.queue.last(SERVICE)
    assert (last.instances, last.source, last.age_s) == (known, "cache", 2.0)
    assert driver.look_up().source == "stale"  # the engine does not have them
    driver.queue.remember(Snapshot("other"))
    assert driver.queue.last("other") is None


def test_an_empty_last_snapshot_of_a_watch_replaces_an_earlier_answer(driver, backend):
    backend.publish(some(1))
    driver.look_up()
    driver.queue.remember(Snapshot(SERVICE))
    assert ports(driver.queue.last(SERVICE)) == []
    assert driver.look_up().revision == 1


@pytest.mark.parametrize("known", [(), (2, 3)])
def test_the_last_snapshot_of_a_watch_replaces_no_later_answer(driver, backend, known):
    backend.publish(some(1))
    driver.now_s = 10
    driver.look_up()
    driver.now_s = 12
    driver.queue.remember(Snapshot(SERVICE, tuple(some(*known)), age_s=2.5))
    last = driver.queue.last(SERVICE)
    assert (ports(last), last.age_s) == ([1], 2.0)
    driver.queue.remember(Snapshot(SERVICE, tuple(some(*known)), age_s=2.0))
    assert ports(driver.queue.last(SERVICE)) == list(known)
