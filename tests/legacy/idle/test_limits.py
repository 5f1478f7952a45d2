"""The settings of a policy in numbers."""

from rpcwheel.durations import NEVER
from rpcwheel.idle.limits import Limits
from rpcwheel.idle.policy import IdlePolicy

S = 1_000_000_000


def limits(**settings) -> Limits:
    return Limits.from_policy(IdlePolicy(**settings))


def test_the_check_is_a_third_of_the_shortest_limit():
    assert limits().check_ns == 60 * S
    assert limits(idle_timeout=90, read_idle=30, max_age=60).check_ns == 10 * S
    assert limits(check=7).check_ns == 7 * S


def test_no_limit_is_never():
    found = limits(idle_timeout=None)
    assert {found.idle_ns, found.read_ns, found.write_ns, found.age_ns, found.check_ns} == {NEVER}


def test_how_to_close_is_two_answers():
    found = [limits(close=how) for how in ("shutdown", "goaway", "report")]
    assert [(one.goaway, one.report) for one in found] == [
        (False, False),
        (True, False),
        (False, True),
    ]
