"""Whether a registry answers, and how long it is left alone after a failure."""

from tenacity import wait_fixed

from rpcwheel.errors import RegistryRefused, RegistryUnavailable
from rpcwheel.events import RegistryRecovered
from rpcwheel.registry.policy import RegistryPolicy, RegistryRules
from rpcwheel.registry.reconciler import BackendHealth

SECOND = 1_000_000_000
AWAY = RegistryUnavailable("away")


def health():
    return BackendHealth(
        "memory://", RegistryRules.from_policy(RegistryPolicy(backoff=wait_fixed(2)))
    )


def fail(one, now_ns, error=AWAY):
    delay_ns = one.delay_ns(now_ns, error)
    one.request_failed(now_ns, error, delay_ns)
    return delay_ns


def test_failures_pause_requests_and_an_answer_ends_the_pause_with_an_event():
    one = health()
    assert fail(one, SECOND) == 2 * SECOND
    assert one.pause_ns == 3 * SECOND
    assert (one.up, one.error) == (False, AWAY)
    fail(one, 3 * SECOND)
    assert one.failures == 2
    assert one.request_succeeded(5 * SECOND) == [RegistryRecovered("memory://", 4.0)]
    assert (one.up, one.error, one.pause_ns, one.failures) == (True, None, 0, 0)


def test_a_registry_that_refuses_is_up():
    one = health()
    assert one.up is False
    assert (one.request_succeeded(0), one.up) == ([], True)
    fail(one, SECOND, RegistryRefused("no"))
    assert (one.up, one.since_ns, one.pause_ns) == (True, None, 3 * SECOND)


def test_a_sign_of_life_does_not_end_the_pause():
    """Or the requests of all processes would come at once when their watches are back."""
    one = health()
    fail(one, 0)
    assert one.answered(SECOND) == [RegistryRecovered("memory://", 1.0)]
    assert (one.up, one.pause_ns, one.failures) == (True, 2 * SECOND, 1)
    assert one.answered(SECOND) == []


def test_contact_lost_by_a_watch_pauses_no_requests():
    one = health()
    one.contact_lost(SECOND)
    one.contact_lost(2 * SECOND)
    assert (one.up, one.since_ns, one.pause_ns) == (False, SECOND, 0)
