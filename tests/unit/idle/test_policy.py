"""The settings of IdlePolicy."""

from datetime import timedelta

from rpcwheel.idle import IdlePolicy


def test_defaults():
    policy = IdlePolicy()
    assert policy.idle_timeout == 180.0
    assert (policy.read_idle, policy.write_idle, policy.max_age) == (None, None, None)
    assert policy.request_timeout == 60.0
    assert (policy.max_age_grace, policy.check_interval) == (30.0, None)
    assert (policy.close_streams, policy.count_heartbeats) == (False, False)
    assert policy.heartbeats == ("/grpc.health.v1.Health/*",)
    assert policy.action == "shutdown"


def test_accepted_settings():
    assert IdlePolicy(read_idle=timedelta(minutes=1)).read_idle == timedelta(minutes=1)
    assert IdlePolicy(heartbeats="/shop.Orders/Ping").heartbeats == ("/shop.Orders/Ping",)
    assert IdlePolicy(idle_timeout=None).idle_timeout is None
    assert IdlePolicy(check_interval=100, request_timeout=1).request_timeout == 1
    assert IdlePolicy(max_age=60, max_age_grace=0).max_age_grace == 0
