"""Which request is made when: each rule by itself; at random in test_reconciler_model.py."""

import pytest
from tenacity import wait_fixed

from rpcwheel.durations import NEVER
from rpcwheel.errors import InstanceIdConflict, RegistryRefused, RegistryUnavailable
from rpcwheel.events import (
    InstancePublished,
    InstanceWithdrawn,
    RegistryFailed,
    RegistryRecovered,
)
from rpcwheel.instance import ServiceInstance
from rpcwheel.registry.policy import RegistryPolicy, RegistryRules
from rpcwheel.registry.reconciler import MAX_BATCH, Reconciler, RegistrationState

SECOND = 1_000_000_000
PENDING, PUBLISHED, LOST, WITHDRAWING, GONE = RegistrationState
UNAVAILABLE = RegistryUnavailable("away")
REFUSED = RegistryRefused("no")


def instance(port=1, **others) -> ServiceInstance:
    return ServiceInstance(**{"service": "shop", "host": "a", "port": port, "epoch": "e"} | others)


class ReconcilerDriver:
    """A `Reconciler`, its time, and the results that its requests get."""

    def __init__(self, *, random_fraction=lambda: 0.5, **policy):
        self.now_ns = 100 * SECOND
        rules = RegistryRules.from_policy(
            RegistryPolicy(**{"lease_ttl": 6.0, "backoff": wait_fixed(1)} | policy)
        )
        self.core = Reconciler("memory://", rules, random_fraction)

    def set_desired(self, one=None):
        return self.core.set_desired(one or instance(), self.now_ns)

    def remove(self, what):
        return self.core.remove(what, self.now_ns)

    def next_request(self):
        return self.core.next_request(self.now_ns)

    def finish(self, request, **result):
        if error := result.get("error"):
            result["delay_ns"] = self.core.delay_ns(request, self.now_ns, error)
        return self.core.done(request, self.now_ns, **result)

    def run_next(self, **result):
        request = self.next_request()
        return request.kind, [one.id for one in request.instances], self.finish(request, **result)

    def publish(self):
        record = self.set_desired()
        self.run_next()
        return record

    def advance(self):
        """Let time pass until the reconciler wants to be woken; returns the seconds."""
        before_ns, self.now_ns = self.now_ns, max(self.now_ns, self.core.next_wake_ns())
        return (self.now_ns - before_ns) / SECOND


@pytest.fixture
def driver():
    return ReconcilerDriver()


def test_a_request_has_at_most_max_batch_instances(driver):
    for port in range(1, MAX_BATCH + 3):
        driver.set_desired(instance(port))
    assert [len(driver.run_next()[1]) for _ in range(2)] == [MAX_BATCH, 2]


def test_an_instance_that_was_never_sent_is_gone_without_a_request(driver):
    record = driver.set_desired()
    driver.remove(record)
    assert (record.state, driver.next_request(), driver.core.records()) == (GONE, None, ())


def test_a_published_instance_is_withdrawn_once(driver):
    record = driver.publish()
    driver.remove(record)
    assert record.state is WITHDRAWING
    assert driver.run_next() == (
        "withdraw",
        ["a:1"],
        [InstanceWithdrawn("memory://", "shop", "a:1")],
    )
    assert (record.state, driver.remove(record)) == (GONE, record)
    driver.advance()  # to the renewal that was planned
    assert (driver.next_request(), driver.core.next_wake_ns()) == (None, NEVER)


# Failures


def test_a_failed_request_is_made_again_without_limit(driver):
    record = driver.set_desired()
    for failures in range(1, 51):
        kind, _, events = driver.run_next(error=UNAVAILABLE)
        assert events == [RegistryFailed("memory://", kind, UNAVAILABLE, 1.0)]
        assert driver.core.health.failures == failures
        assert (record.error, driver.core.health.up, driver.advance()) == (UNAVAILABLE, False, 1.0)
    events = driver.run_next()[2]
    assert events[0] == RegistryRecovered("memory://", 50.0)
    assert (driver.core.health.failures, driver.core.health.error) == (0, None)
    assert (record.state, record.error, driver.core.health.up) == (PUBLISHED, None, True)


def test_after_a_failure_new_instances_wait_for_the_backoff_unless_a_caller_waits(driver):
    driver.set_desired()
    driver.run_next(error=UNAVAILABLE)
    driver.set_desired(instance(2))
    assert driver.next_request() is None
    driver.core.health.shorten_pause()
    assert driver.advance() == 0.2


def test_a_withdrawal_after_a_failed_publication_is_made_again_a_lease_later(driver):
    """The request that failed may take effect in between: it lies in a frozen engine's buffers."""
    record = driver.set_desired()
    driver.run_next(error=UNAVAILABLE)
    driver.remove(record)
    assert driver.advance() == 1.0
    driver.run_next()
    assert (record.state, driver.core.records()) == (GONE, ())
    assert driver.advance() == 5.0
    assert driver.run_next() == ("withdraw", ["a:1"], [])
    assert driver.core.next_wake_ns() == NEVER


# Whether the registry answers


def test_a_registry_that_refuses_is_up(driver):
    driver.publish()
    driver.advance()
    driver.run_next(error=REFUSED)
    health = driver.core.health
    assert (health.up, health.since_ns, health.error) == (True, None, REFUSED)
    assert health.pause_ns > driver.now_ns


def test_a_sign_of_life_does_not_end_the_pause(driver):
    """Or the requests of all processes would come at once when their watches are back."""
    driver.set_desired()
    driver.run_next(error=UNAVAILABLE)
    assert driver.core.health.up is False
    driver.now_ns += SECOND // 2
    assert driver.core.health.answered(driver.now_ns) == [RegistryRecovered("memory://", 0.5)]
    assert driver.core.health.answered(driver.now_ns) == []
    assert (driver.core.health.up, driver.advance()) == (True, 0.5)


def test_contact_lost_by_a_watch_pauses_no_requests(driver):
    driver.publish()
    for _ in range(2):
        driver.core.health.contact_lost(driver.now_ns)
        driver.now_ns += SECOND
    assert driver.core.health.up is False
    driver.set_desired(instance(2))
    assert driver.run_next()[2][0] == RegistryRecovered("memory://", 2.0)


# Renewals


def test_renewals_are_a_third_of_a_lease_apart_give_or_take_a_tenth():
    for chance, seconds in ((0.0, 1.8), (0.5, 2.0), (1.0, 2.2)):
        driver = ReconcilerDriver(random_fraction=lambda chance=chance: chance)
        driver.publish()
        assert [(round(driver.advance(), 3), driver.run_next()[0]) for _ in range(3)] == [
            (seconds, "renew")
        ] * 3


def test_an_instance_whose_change_is_refused_is_renewed_unchanged(driver):
    record = driver.publish()
    driver.set_desired(instance(weight=7))
    kinds = []
    for _ in range(8):
        request = driver.next_request()
        driver.finish(request, error=REFUSED if request.kind == "publish" else None)
        kinds.append(request.kind)
        driver.advance()
    assert {"publish", "renew"} == set(kinds)
    assert record.state is PENDING


def test_a_publication_after_a_loss_during_a_change_has_the_reason(driver):
    driver.publish()
    record = driver.set_desired(instance(weight=7))
    for _ in range(2):
        driver.run_next(error=REFUSED)
        driver.advance()
    assert driver.run_next(lost={record.instance.key: "wiped"})[0] == "renew"
    assert record.state is PENDING
    events = driver.run_next()[2]
    assert events == [InstancePublished("memory://", "shop", "a:1", "wiped", 2.0)]


def test_a_lost_instance_is_published_again_at_once_or_within_the_jitter():
    for why, seconds in (("missing", 0.0), ("lease", 1.0), ("session", 1.0), ("wiped", 1.0)):
        driver = ReconcilerDriver()
        record = driver.publish()
        driver.advance()
        driver.run_next(lost={record.instance.key: why})
        assert (record.state, driver.advance()) == (LOST, seconds)
        events = driver.run_next()[2]
        assert events == [InstancePublished("memory://", "shop", "a:1", why, 2.0 + seconds)]
        assert record.state is PUBLISHED


def test_lost_instances_are_spread_over_the_jitter():
    chances = iter([0.5, 0.5, 0.2, 0.8])  # of two renewals and two instances
    driver = ReconcilerDriver(jitter=5.0, random_fraction=chances.__next__)
    records = [driver.set_desired(instance(port)) for port in (1, 2)]
    driver.run_next()
    driver.advance()
    assert driver.run_next(lost={record.instance.key: "wiped" for record in records})[0] == "renew"
    assert [record.due_ns - driver.now_ns for record in records] == [SECOND, 4 * SECOND]


def test_an_id_conflict_is_an_event_and_its_backoff_grows_to_two_leases(driver):
    record = driver.publish()
    waits = []
    for _ in range(5):
        driver.advance()
        (failure,) = driver.run_next(lost={record.instance.key: "taken"})[2]
        assert (failure.request, type(failure.error)) == ("renew", InstanceIdConflict)
        assert "shop/a:1: another process publishes under this id" in str(record.error)
        waits.append(failure.delay_s)
        while (request := driver.next_request()) is None:
            driver.advance()
        assert driver.finish(request) == [
            InstancePublished("memory://", "shop", "a:1", "taken", 2.0 + failure.delay_s)
        ]
        assert record.error is None
    assert waits == [0.0, 4.0, 8.0, 12.0, 12.0]  # two leases at most
    driver.now_ns += 100 * SECOND  # without another conflict
    (failure,) = driver.run_next(lost={record.instance.key: "taken"})[2]
    assert failure.delay_s == 0.0


def test_a_lost_instance_that_is_changed_is_published_at_once(driver):
    record = driver.publish()
    driver.advance()
    driver.run_next(lost={record.instance.key: "wiped"})
    driver.set_desired(instance(weight=7))
    assert (record.state, driver.advance()) == (LOST, 0.0)


def test_failing_renewals_take_turns_with_other_requests(driver):
    driver.publish()
    driver.advance()
    driver.run_next(error=UNAVAILABLE)
    driver.set_desired(instance(2))
    driver.advance()
    assert [driver.run_next()[0], driver.run_next()[0]] == ["publish", "renew"]


# Refusals


@pytest.mark.parametrize("error", [REFUSED, TypeError("a backend of the user's")])
def test_a_refused_instance_of_a_batch_is_isolated(driver, error):
    good, bad = [instance(port) for port in range(1, 8)], instance(9)
    records = [driver.set_desired(one) for one in (*good[:3], bad, *good[3:])]
    for _ in range(40):
        driver.advance()
        request = driver.next_request()
        refused = request.kind == "publish" and bad in request.instances
        driver.finish(request, error=error if refused else None)
    states = {record.instance.id: record.state for record in records}
    assert states.pop("a:9") is PENDING
    assert set(states.values()) == {PUBLISHED}


def test_a_refused_instance_waits_while_the_others_are_published(driver):
    driver.set_desired()
    events = driver.run_next(error=REFUSED)[2]
    assert (events[0].delay_s, driver.core.health.error) == (1.0, REFUSED)
    driver.set_desired(instance(2))
    assert driver.run_next()[:2] == ("publish", ["a:2"])
    assert (driver.advance(), driver.run_next()[1]) == (1.0, ["a:1"])


def test_a_refused_publication_is_not_repeated_a_lease_later(driver):
    record = driver.set_desired()
    driver.run_next(error=REFUSED)
    driver.advance()
    driver.run_next()
    assert record.doubt_ns == 0
    assert driver.advance() == 2.0  # the renewal


def test_a_request_that_failed_before_an_instance_was_gone_is_in_doubt_when_it_is_back(driver):
    gone = driver.set_desired()
    driver.run_next(error=UNAVAILABLE)
    driver.remove(gone)
    driver.advance()
    assert driver.run_next()[0] == "withdraw"
    assert driver.publish().doubt_ns == gone.doubt_ns > driver.now_ns


@pytest.mark.parametrize("error", [UNAVAILABLE, REFUSED])
def test_a_long_backoff_does_not_delay_renewals_beyond_the_lease(error):
    driver = ReconcilerDriver(backoff=60.0)
    driver.publish()
    driver.advance()
    assert driver.run_next(error=error)[0] == "renew"
    assert (driver.advance(), driver.run_next()[0]) == (2.0, "renew")
    driver.set_desired(instance(2))
    driver.run_next(error=UNAVAILABLE)
    assert (driver.advance(), driver.run_next()[0]) == (2.0, "renew")
    assert driver.run_next()[:2] == ("publish", ["a:2"])  # it answers again


# Instances of another process


@pytest.mark.parametrize("is_published", [True, False])
def test_unregistering_an_earlier_epoch_leaves_the_one_that_replaces_it(driver, is_published):
    ours = driver.publish() if is_published else driver.set_desired()
    theirs = driver.remove(instance(epoch="before"))
    assert (theirs.state, theirs.wanted, ours.wanted) == (GONE, False, True)
    if not is_published:
        driver.run_next()
    assert (ours.state, driver.next_request()) == (PUBLISHED, None)
    assert driver.core.records() == (ours,)


def test_unregistering_a_replaced_epoch_of_this_process_withdraws_its_successor(driver):
    before = driver.publish()
    ours = driver.set_desired(instance(epoch="later"))
    assert driver.remove(before.instance) is ours  # it was sent, and may be there still
    assert ours.wanted is False


def test_an_earlier_epoch_is_withdrawn_together_with_the_own_one(driver):
    ours = driver.publish()
    driver.remove(ours)
    request = driver.next_request()
    assert driver.remove(instance(epoch="before")) is ours
    driver.finish(request)
    assert ours.state is WITHDRAWING
    request = driver.next_request()
    assert sorted(one.epoch for one in request.instances) == ["before", "e"]
    driver.finish(request)
    assert (ours.state, driver.next_request()) == (GONE, None)


# The end


def test_close_withdraws_all_at_once_during_a_backoff(driver):
    driver.publish()
    failed = driver.set_desired(instance(2))
    driver.run_next(error=UNAVAILABLE)
    never_sent = driver.set_desired(instance(3))
    driver.core.close(driver.now_ns)
    assert never_sent.state is GONE
    assert driver.run_next()[:2] == ("withdraw", ["a:1", "a:2"])
    assert (failed.state, driver.next_request(), driver.core.next_wake_ns()) == (GONE, None, NEVER)


def test_close_withdraws_a_refused_instance_at_once(driver):
    record = driver.publish()
    driver.remove(record)
    driver.run_next(error=REFUSED)
    driver.core.close(driver.now_ns)
    assert driver.run_next()[:2] == ("withdraw", ["a:1"])


def test_close_withdraws_what_was_removed_before(driver):
    record = driver.publish()
    driver.remove(record)
    driver.now_ns += SECOND  # its request has not been made yet
    driver.core.close(driver.now_ns)
    assert driver.run_next()[:2] == ("withdraw", ["a:1"])


def test_close_attempts_a_failing_withdrawal_twice(driver):
    record = driver.publish()
    driver.core.close(driver.now_ns)
    assert driver.run_next(error=UNAVAILABLE)[2][0].delay_s is not None
    assert driver.run_next(error=UNAVAILABLE)[2][0].delay_s is None
    assert driver.next_request() is None
    assert (record.state, record.error) == (WITHDRAWING, UNAVAILABLE)


def test_close_withdraws_an_instance_whose_publication_is_under_way(driver):
    driver.set_desired()
    request = driver.next_request()
    driver.core.close(driver.now_ns)
    driver.finish(request)
    assert driver.run_next()[0] == "withdraw"
    assert driver.core.next_wake_ns() == NEVER


def test_a_failure_after_giving_up_is_no_event(driver):
    driver.publish()
    driver.core.close(driver.now_ns)
    request = driver.next_request()
    driver.core.give_up()
    assert driver.finish(request, error=UNAVAILABLE) == []
