"""What a user may set for the idle connections of a server."""

import re
from datetime import timedelta

import pytest

from rpcwheel.errors import ConfigurationError
from rpcwheel.idle import IdlePolicy


def test_the_defaults():
    policy = IdlePolicy()
    assert policy.idle_timeout == 180.0
    assert (policy.read_idle, policy.write_idle, policy.max_age) == (None, None, None)
    assert (policy.max_age_grace, policy.check, policy.goaway_grace) == (30.0, None, 5.0)
    assert (policy.close_streams, policy.count_heartbeats) == (False, False)
    assert policy.heartbeats == ("/grpc.health.v1.Health/*",)
    assert policy.close == "shutdown"


def test_a_time_may_be_a_timedelta():
    assert IdlePolicy(read_idle=timedelta(minutes=1)).read_idle == timedelta(minutes=1)


def test_one_pattern_may_be_given_without_a_tuple():
    assert IdlePolicy(heartbeats="/shop.Orders/Ping").heartbeats == ("/shop.Orders/Ping",)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"idle_timeout": 0}, "idle_timeout: it must be a finite time above zero"),
        ({"write_idle": float("inf")}, "for no limit leave it out, or give None"),
        ({"max_age_grace": -1}, "max_age_grace: it must be a finite time of zero or more, not -1"),
        ({"heartbeats": ["Ping"]}, "'Ping' names no methods; did you mean '/Ping/*'?"),
        ({"close": "rst"}, "close: Input should be 'shutdown', 'goaway' or 'report', not 'rst'"),
        ({"check": 10, "read_idle": 5}, "check (10.0) is longer than read_idle (5.0)"),
        ({"idle": 5}, "there is no setting 'idle'; "),
    ],
)
def test_what_can_not_be_is_refused_with_what_is_allowed(settings, said):
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        IdlePolicy(**settings)


@pytest.mark.parametrize("settings", [{"idle_timeout": "3 min"}, {"close_streams": "yes"}])
def test_what_is_of_another_type_is_a_type_error(settings):
    with pytest.raises(TypeError):
        IdlePolicy(**settings)


def test_there_may_be_no_limit_at_all():
    assert IdlePolicy(idle_timeout=None).idle_timeout is None


def test_a_grace_may_be_nothing():
    assert IdlePolicy(max_age=60, max_age_grace=0).max_age_grace == 0
