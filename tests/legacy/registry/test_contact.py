"""Whether an engine answers, and how long it is left alone."""

from rpcwheel.errors import RegistryRefused, RegistryUnavailable
from rpcwheel.observe import RegistryRecovered
from rpcwheel.registry.policy import RegistryPolicy, RegistryRules
from rpcwheel.registry.reconciler import BackendHealth

SECOND = 1_000_000_000
AWAY = RegistryUnavailable("away")


def contact():
    return BackendHealth("memory://", RegistryRules.of(RegistryPolicy(backoff=2.0)))


def fail(one, now_ns, error=AWAY):
    delay_ns = one.delay_ns(now_ns, error)
    one.failed(now_ns, error, delay_ns)
    return delay_ns


def test_it_is_not_up_before_it_has_answered():
    one = contact()
    assert one.up is False
    assert (one.heard(0), one.up) == ([], True)


def test_after_a_failure_it_is_left_alone_and_told_of_when_it_is_back():
    one = contact()
    assert fail(one, SECOND) == 2 * SECOND
    assert one.pause_ns == 3 * SECOND
    assert (one.up, one.error) == (False, AWAY)
    fail(one, 3 * SECOND)
    assert one.failures == 2
    assert one.heard(5 * SECOND) == [RegistryRecovered("memory://", 4.0)]
    assert (one.up, one.error, one.pause_ns, one.failures) == (True, None, 0, 0)


def test_an_engine_that_refuses_answers():
    one = contact()
    one.heard(0)
    fail(one, SECOND, RegistryRefused("no"))
    assert (one.up, one.since_ns, one.pause_ns) == (True, None, 3 * SECOND)


def test_one_that_shows_up_is_up_but_what_is_planned_keeps_to_its_pause():
    """Or everybody's requests would come at once when the watches do."""
    one = contact()
    fail(one, 0)
    assert one.seen(SECOND) == [RegistryRecovered("memory://", 1.0)]
    assert (one.up, one.pause_ns, one.failures) == (True, 2 * SECOND, 1)
    assert one.seen(SECOND) == []


def test_somebody_who_waits_makes_the_next_try_come_soon_but_not_at_once():
    one = contact()
    fail(one, SECOND)
    one.hasten()
    one.hasten()
    assert one.pause_ns == SECOND + SECOND // 5


def test_contact_that_was_lost_without_a_request_pauses_nothing():
    one = contact()
    one.lost(SECOND)
    one.lost(2 * SECOND)
    assert (one.up, one.since_ns, one.pause_ns) == (False, SECOND, 0)
