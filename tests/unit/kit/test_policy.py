"""The settings of connections beside those of calls."""

from datetime import timedelta

import pytest

from rpcwheel import CallPolicy, ConfigurationError, HeartbeatPolicy, IdlePolicy, RegistryPolicy
from rpcwheel.kit import KitPolicy

OWN = {"heartbeat", "idle", "registry"}


def test_it_is_a_policy_of_calls_with_three_more_settings():
    assert issubclass(KitPolicy, CallPolicy)
    assert set(KitPolicy.model_fields) - set(CallPolicy.model_fields) == OWN
    assert {getattr(KitPolicy(), name) for name in OWN} == {None}


def test_a_plain_number_is_the_interval_the_idle_timeout_and_the_lease():
    for short in (10, 10.0, timedelta(seconds=10)):
        policy = KitPolicy(heartbeat=short, idle=short, registry=short)
        assert policy.heartbeat == HeartbeatPolicy(interval=short)
        assert policy.idle == IdlePolicy(idle_timeout=short)
        assert policy.registry == RegistryPolicy(lease_ttl=short)


def test_a_table_is_as_good_as_a_policy():
    policy = KitPolicy(heartbeat={"interval": 5, "timeout": 20}, idle={"close": "report"})
    assert policy.heartbeat == HeartbeatPolicy(interval=5, timeout=20)
    assert policy.idle == IdlePolicy(close="report")


def test_what_is_wrong_is_said_with_its_place():
    with pytest.raises(ConfigurationError, match=r"heartbeat: timeout .* twice interval"):
        KitPolicy(heartbeat={"interval": 5, "timeout": 6})
    with pytest.raises(ConfigurationError, match=r"idle: .* above zero"):
        KitPolicy(idle=0)
    with pytest.raises(TypeError, match="heartbeat"):
        KitPolicy(heartbeat="10")


def test_what_holds_for_a_method_is_as_without_them():
    policy = KitPolicy(timeout=2.0, heartbeat=10.0)
    assert policy.policy_for("/shop.Orders/Get") == CallPolicy(timeout=2.0).policy_for(
        "/shop.Orders/Get"
    )
