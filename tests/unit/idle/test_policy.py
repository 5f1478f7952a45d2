"""The settings of IdlePolicy."""

from datetime import timedelta

from rpcwheel.errors import ConfigurationError
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


REFUSED = [
    ({"idle_timeout": 0}, ConfigurationError, "idle_timeout: it must be a finite time above zero"),
    ({"write_idle": float("inf")}, ConfigurationError, "for no limit give None"),
    (
        {"max_age_grace": -1},
        ConfigurationError,
        "max_age_grace: it must be a finite time of zero or more, not -1",
    ),
    ({"heartbeats": ["Ping"]}, ConfigurationError, "'Ping' names no methods; did you mean"),
    (
        {"action": "goaway"},
        ConfigurationError,
        "action: it must be 'shutdown' or 'report', not 'goaway'",
    ),
    ({"check_interval": 9, "read_idle": 5}, ConfigurationError, "check_interval (9.0) is longer"),
    ({"request_timeout": 0}, ConfigurationError, "request_timeout: it must be a finite time above"),
    ({"idle": 5}, ConfigurationError, "there is no setting 'idle'; "),
    ({"idle_timeout": "3 min"}, TypeError, "idle_timeout"),
    ({"close_streams": "yes"}, TypeError, "close_streams"),
]


def test_refused_settings_are_named_with_what_is_allowed():
    wrong = []
    for settings, error, text in REFUSED:
        try:
            IdlePolicy(**settings)
        except Exception as raised:  # noqa: BLE001 - compared with what is wanted
            if isinstance(raised, error) and text in str(raised):
                continue
            wrong.append((settings, raised))
        else:
            wrong.append((settings, "accepted"))
    assert not wrong


def test_accepted_settings():
    assert IdlePolicy(read_idle=timedelta(minutes=1)).read_idle == timedelta(minutes=1)
    assert IdlePolicy(heartbeats="/shop.Orders/Ping").heartbeats == ("/shop.Orders/Ping",)
    assert IdlePolicy(idle_timeout=None).idle_timeout is None
    assert IdlePolicy(check_interval=100, request_timeout=1).request_timeout == 1
    assert IdlePolicy(max_age=60, max_age_grace=0).max_age_grace == 0
