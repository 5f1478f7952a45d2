"""Values of `lb_policy=`, and what the errors suggest."""

from rpcwheel.balancer.lb_policy import checked_lb_policy
from rpcwheel.balancer.pickers import (
    LeastRequest,
    Picker,
    RoundRobin,
    WeightedRandom,
    WeightedRoundRobin,
)
from rpcwheel.balancer.ring_hash import RingHash


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
