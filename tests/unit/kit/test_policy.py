"""`KitPolicy`: a `CallPolicy` with settings of connections."""

from datetime import timedelta

from rpcwheel import CallPolicy, HeartbeatPolicy, IdlePolicy, RegistryPolicy
from rpcwheel.kit import KitPolicy


def test_a_number_stands_for_the_interval_the_idle_timeout_and_the_lease():
    for short in (10, 10.0, timedelta(seconds=10)):
        policy = KitPolicy(heartbeat=short, idle=short, registry_policy=short)
        assert policy.heartbeat == HeartbeatPolicy(interval=short)
        assert policy.idle == IdlePolicy(idle_timeout=short)
        assert policy.registry_policy == RegistryPolicy(lease_ttl=short)


def test_a_dict_stands_for_a_policy():
    policy = KitPolicy(heartbeat={"interval": 5, "timeout": 20}, idle={"action": "report"})
    assert policy.heartbeat == HeartbeatPolicy(interval=5, timeout=20)
    assert policy.idle == IdlePolicy(action="report")


def test_policy_for_has_no_settings_of_connections():
    policy = KitPolicy(timeout=2.0, heartbeat=10.0)
    assert policy.policy_for("/shop.Orders/Get") == CallPolicy(timeout=2.0).policy_for(
        "/shop.Orders/Get"
    )
