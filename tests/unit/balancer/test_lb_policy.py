"""Values of `lb_policy=`, and what the errors suggest."""

import pytest

from rpcwheel.balancer.lb_policy import checked_lb_policy
from rpcwheel.balancer.pickers import (
    LeastRequest,
    Picker,
    RoundRobin,
    WeightedRandom,
    WeightedRoundRobin,
)
from rpcwheel.balancer.ring_hash import RingHash
from rpcwheel.errors import ConfigurationError


def test_each_name_stands_for_a_picker():
    names = {
        "round_robin": RoundRobin,
        "weighted_round_robin": WeightedRoundRobin,
        "weighted_random": WeightedRandom,
        "least_request": LeastRequest,
        "ring_hash:x-user": RingHash,
    }
    assert {name: type(checked_lb_policy(name)) for name in names} == names


def test_a_picker_of_the_user_is_returned():
    class First(Picker):
        def prepare(self, subchannels, weights):
            return lambda *_: subchannels[0]

    first = First()
    assert checked_lb_policy(first) is first
    assert repr(first) == "First()"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("round-robin", "there is no 'round-robin'; did you mean 'round_robin'?"),
        ("Weighted_Round_Robbin", "did you mean 'weighted_round_robin'?"),
        ("nonsense", "there are round_robin, .*, least_request, ring_hash:HEADER"),
        ("ring_hash", "did you mean 'ring_hash:HEADER'"),
        ("round_robin:x", "did you mean 'round_robin'?"),
        ("ring_hash: x", "name of a metadata header"),
        ("least_active", "did you mean 'least_request'?"),
        ("consistent_hash:x-user", "did you mean 'ring_hash:x-user'"),
    ],
)
def test_a_name_that_does_not_exist_is_refused_with_a_suggestion(value, message):
    with pytest.raises(ConfigurationError, match=message):
        checked_lb_policy(value)


@pytest.mark.parametrize("value", [None, 5, RoundRobin])
def test_a_value_of_another_type_is_refused(value):
    with pytest.raises(TypeError, match=r"lb_policy must be a name or a Picker"):
        checked_lb_policy(value)
