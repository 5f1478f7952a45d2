"""A registry as users have it: what they are given, told and refused."""

import gc
import threading
import time
import warnings

import pytest

from fixtures.registry_worlds import POLICY, Hanging, flaky, held, instance
from fixtures.waiting import wait_until
from rpcwheel.errors import (
    ConfigurationError,
    NotPublished,
    RegistryClosed,
    RegistryRefused,
    RegistryUnavailable,
)
from rpcwheel.observe import ListenerFailed
from rpcwheel.registry import FailbackRegistry, RegistryPolicy, open_registry


@pytest.fixture
def registry(provider, timer):
    with FailbackRegistry(provider, policy=POLICY.changed(snapshot=False)) as registry:
        yield registry
        provider.up()
    assert timer.pending == 0


def test_what_is_registered_can_be_looked_up_changed_and_withdrawn(registry):
    registration = registry.register(instance(), wait=5)
    assert (registration.state, registration.error) == ("PUBLISHED", None)
    assert registry.lookup("shop.Orders").instances == (instance(),)
    registration.update(weight=7, status="DRAINING", metadata={"zone": "a"}, group="g")
    assert registration.wait_published(5)
    found = registry.lookup("shop.Orders").instances[0]
    assert (found.weight, found.status, found.metadata, found.group) == (
        7,
        "DRAINING",
        {"zone": "a"},
        "g",
    )
    assert registry.services() == ["shop.Orders"]
    registration.unregister(wait=5)
    assert (registration.state, registry.lookup("shop.Orders").instances) == ("GONE", ())


def test_the_same_key_again_is_the_same_registration(registry):
    first = registry.register(instance())
    assert registry.register(instance(weight=3), wait=5) is first
    assert (registry.registrations, first.instance.weight) == ((first,), 3)


def test_registered_again_after_its_end_it_is_another_registration(registry):
    first = registry.register(instance(), wait=5)
    registry.unregister(first, wait=5)
    second = registry.register(instance(), wait=5)
    first.unregister(wait=5)
    assert (first.state, second.state) == ("GONE", "PUBLISHED")


def test_an_instance_that_was_looked_up_can_be_withdrawn_by_anybody(registry, provider, timer):
    registry.register(instance(), wait=5)
    with FailbackRegistry(flaky(timer, str(provider.url).partition("//")[2])) as other:
        other.unregister(other.lookup("shop.Orders").instances[0], wait=5)
        assert other.lookup("shop.Orders").instances == ()
        assert not other.registrations


def test_an_engine_that_is_down_is_an_error_only_for_who_waits(registry, provider):
    provider.down("the cable is cut")
    registration = registry.register(instance())
    assert wait_until(lambda: registration.error)
    with pytest.raises(NotPublished, match=r"not published at memory://.* within 0.05 s") as raised:
        registry.register(instance(), wait=0.05)
    assert isinstance(raised.value.__cause__, RegistryUnavailable)
    assert (registration.state, registry.up) == ("PENDING", False)
    with pytest.raises(RegistryUnavailable, match="not withdrawn") as raised:
        registration.unregister(wait=0.05)
    assert isinstance(raised.value.__cause__, RegistryUnavailable)
    assert registration.state == "WITHDRAWING"


# Lookup


def test_a_lookup_that_fails_gives_what_was_known_last_or_raises_but_never_an_empty_list(
    registry, provider
):
    registry.register(instance(), wait=5)
    live = registry.lookup("shop.Orders")
    for fails, error in ((provider.down, RegistryUnavailable), (provider.refuse, RegistryRefused)):
        fails()
        last = registry.lookup("shop.Orders")
        assert (last.instances, last.source) == (live.instances, "cache")
        for asks in (lambda: registry.lookup("never.Seen"), registry.services):
            with pytest.raises(error):
                asks()


def test_a_lookup_waits_no_longer_than_it_is_told(timer):
    provider = flaky(timer, timeout_s=0.2)
    with FailbackRegistry(provider) as registry:
        registry.register(instance(), wait=5)
        registry.lookup("shop.Orders")
        provider.freeze()
        assert registry.lookup("shop.Orders", wait=0.01).source == "cache"
        with pytest.raises(RegistryUnavailable, match=r"within 0\.01 s"):
            registry.lookup("never.Seen", wait=0.01)
        provider.up()


def test_a_live_answer_that_is_empty_is_true(registry):
    snapshot = registry.lookup("never.Seen")
    assert (snapshot.instances, snapshot.source) == ((), "live")


def test_what_an_earlier_run_has_seen_answers_a_start_without_the_engine(timer, tmp_path):
    policy = POLICY.changed(snapshot=str(tmp_path / "seen.json"))
    first = flaky(timer)
    with FailbackRegistry(first, policy=policy) as registry:
        registry.register(instance(), wait=5)
        registry.lookup("shop.Orders")
    second = flaky(timer)
    second.down()
    with FailbackRegistry(second, policy=policy) as registry:
        found = registry.lookup("shop.Orders")
        assert ([one.port for one in found.instances], found.source) == ([1], "cache")


# Subscriptions


def test_a_subscriber_is_told_what_is_known_and_each_change(registry):
    told = []
    with registry.subscribe("shop.Orders", told.append) as subscription:
        assert subscription.wait(5).instances == ()
        registry.register(instance(), wait=5)
        assert wait_until(lambda: told and told[-1].instances == (instance(),))
        assert subscription.snapshot.instances == registry.lookup("shop.Orders").instances


def test_one_watch_serves_all_subscribers_of_a_service_until_the_last_has_gone(registry, provider):
    subscriptions = [registry.subscribe("shop.Orders") for _ in range(3)]
    assert subscriptions[0].wait(5) == subscriptions[2].wait(5)
    assert [method for method, _ in provider.requests] == ["watch"]
    for subscription in subscriptions[:2]:
        registry.unsubscribe(subscription)
    registry.register(instance(), wait=5)
    assert wait_until(lambda: subscriptions[2].snapshot.instances)
    subscriptions[2].close()
    subscriptions[2].close()
    told = []
    with registry.subscribe("shop.Orders", told.append) as again:
        assert again.wait(5).instances == (instance(),)


def test_a_listener_that_raises_is_told_and_goes_on_being_called(registry, events):
    calls = []

    def listener(snapshot):
        calls.append(snapshot)
        raise ZeroDivisionError

    with registry.subscribe("shop.Orders", listener):
        assert wait_until(lambda: calls)
        registry.register(instance(), wait=5)
        assert wait_until(lambda: len(calls) == 2)
        assert wait_until(lambda: any(isinstance(event, ListenerFailed) for event in events))


def test_nothing_known_in_time_is_an_error(registry, provider):
    provider.freeze()
    with registry.subscribe("shop.Orders") as subscription:
        assert subscription.snapshot is None
        with pytest.raises(NotPublished, match="nothing is known"):
            subscription.wait(0.02)
    with pytest.raises(NotPublished):
        subscription.wait(5)


# The end


def test_closing_withdraws_ends_subscriptions_and_refuses_what_comes_later(provider, timer):
    registry = FailbackRegistry(provider, policy=POLICY.changed(snapshot=False))
    registration = registry.register(instance(), wait=5)
    subscription = registry.subscribe("shop.Orders", lambda _: None)
    registry.close()
    registry.close()
    assert (registration.state, registry.closed, held(provider)) == ("GONE", True, [])
    assert timer.pending == 0
    for late in (
        lambda: registry.register(instance()),
        lambda: registry.unregister(instance()),
        lambda: registry.lookup("shop.Orders"),
        lambda: registry.subscribe("shop.Orders"),
        lambda: registration.update(weight=1),
        registry.services,
    ):
        with pytest.raises(RegistryClosed, match="was closed"):
            late()
    registration.unregister()
    subscription.close()
    assert registration.wait_published() is False


@pytest.mark.parametrize("engine", ["down", "freeze"])
def test_closing_returns_in_time_whatever_the_engine_does(timer, engine):
    provider = flaky(timer, timeout_s=20)
    registry = FailbackRegistry(provider)
    registry.register(instance(), wait=5)
    registry.subscribe("shop.Orders").wait(5)
    getattr(provider, engine)()
    started = time.monotonic()
    registry.close(0.1)
    assert time.monotonic() - started < 10
    assert wait_until(lambda: timer.pending == 0)


def test_closing_returns_in_time_even_if_the_provider_hangs_for_good(timer):
    let_go = threading.Event()
    provider = Hanging(flaky(timer).inner, let_go)
    registry = FailbackRegistry(provider)
    registry.register(instance())
    assert wait_until(lambda: provider.hanging)
    started = time.monotonic()
    registry.close(0.1)
    assert time.monotonic() - started < 10
    let_go.set()
    assert wait_until(lambda: timer.pending == 0)


def test_one_that_is_dropped_unclosed_says_so(timer):
    provider = flaky(timer)
    registry = FailbackRegistry(provider)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        del registry
        gc.collect()
    assert any("was dropped and not closed" in str(one.message) for one in said)
    provider.close()


# Arguments


def test_a_url_or_a_provider_is_wanted_and_contacts_nobody():
    with open_registry("memory://somewhere", policy=RegistryPolicy(lease=1)) as registry:
        assert (registry.url, registry.up, registry.policy.lease) == (
            "memory://somewhere",
            False,
            1,
        )
        assert repr(registry) == "<FailbackRegistry memory://somewhere: down, 0 registered>"
    with pytest.raises(TypeError, match="a URL such as"):
        open_registry(5)
    with pytest.raises(TypeError, match="RegistryPolicy"):
        open_registry("memory://", policy=3)
    with pytest.raises(TypeError, match="timer"):
        open_registry("memory://", timer=3)
    with pytest.raises(ConfigurationError, match="scheme"):
        open_registry("nowhere://")


def test_a_provider_of_ones_own_brings_its_lease_or_has_the_policys(provider):
    with FailbackRegistry(provider) as registry:
        assert (registry.policy.lease, registry.policy.timeout) == (6.0, 1.0)
    with pytest.raises(ConfigurationError, match="for a lease of 6 s, the policy has 15 s"):
        FailbackRegistry(provider, policy=RegistryPolicy())


@pytest.mark.parametrize(
    ("ask", "error", "said"),
    [
        (lambda r: r.register("shop"), TypeError, "ServiceInstance"),
        (lambda r: r.register(instance(), wait=-1), ConfigurationError, "0 or more"),
        (lambda r: r.register(instance(), wait="1"), TypeError, "seconds"),
        (lambda r: r.unregister("shop"), TypeError, "ServiceInstance or a Registration"),
        (lambda r: r.lookup(""), ConfigurationError, "name"),
        (lambda r: r.lookup(None), TypeError, "str"),
        (lambda r: r.lookup("shop.Orders", wait=float("nan")), ConfigurationError, "NaN"),
        (lambda r: r.subscribe("a/b"), ConfigurationError, "name"),
        (lambda r: r.subscribe("shop.Orders", 5), TypeError, "listener"),
        (lambda r: r.close(0), ConfigurationError, "above zero"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(registry, ask, error, said):
    with pytest.raises(error, match=said):
        ask(registry)
    assert registry.registrations == ()


def test_a_change_that_makes_no_sense_changes_nothing(registry):
    registration = registry.register(instance(), wait=5)
    with pytest.raises(ConfigurationError, match="weight"):
        registration.update(weight=-1)
    with pytest.raises(ConfigurationError, match="no setting"):
        registration.update(wait=1)
    for fixed in ("service", "id", "epoch"):
        with pytest.raises(ConfigurationError, match=f"{fixed} can't be changed"):
            registration.update(**{fixed: "other"})
    assert registration.instance == instance()


def test_a_registration_of_another_registry_is_refused(registry):
    with open_registry("memory://elsewhere") as other:
        registration = other.register(instance(), wait=5)
        with pytest.raises(ConfigurationError, match="another registry"):
            registry.unregister(registration)


def test_a_wait_without_end_is_one(registry):
    registration = registry.register(instance(), wait=float("inf"))
    assert registration.wait_published(float("inf"))
    assert registration.wait_published()
