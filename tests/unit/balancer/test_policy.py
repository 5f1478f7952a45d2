"""The settings of a balanced channel: defaults, bounds, conversion."""

from rpcwheel import BalancerPolicy
from rpcwheel.backoff import Backoff
from rpcwheel.balancer import OutlierEjectionPolicy
from rpcwheel.balancer.lb_policy import checked_lb_policy
from rpcwheel.balancer.pickers import (
    LeastRequest,
    Picker,
    RoundRobin,
    WeightedRandom,
    WeightedRoundRobin,
)
from rpcwheel.balancer.policy import DEFAULT_HEALTH_CHECK_BACKOFF
from rpcwheel.balancer.ring_hash import RingHash
from rpcwheel.balancer.subchannels import subchannel_options

SECOND = 1_000_000_000


def test_a_number_for_outlier_ejection_is_that_of_consecutive_failures():
    policy = BalancerPolicy(outlier_ejection=3)
    assert policy.outlier_ejection == OutlierEjectionPolicy(consecutive_failures=3)


def test_health_checks_back_off_from_half_a_second_to_ten():
    backoff = Backoff(DEFAULT_HEALTH_CHECK_BACKOFF)
    delays = [backoff.next_delay_ns(1, elapsed_ns=0, error=None) for _ in range(200)]
    assert max(delays) <= SECOND // 2
    assert len(set(delays)) > 1
    late = [backoff.next_delay_ns(64, elapsed_ns=0, error=None) for _ in range(200)]
    assert 5 * SECOND < max(late) <= 10 * SECOND


def test_subchannels_reconnect_every_three_seconds_unless_an_option_says_otherwise():
    name = "grpc.max_reconnect_backoff_ms"
    assert dict(subchannel_options([]))[name] == 3_000
    assert dict(subchannel_options([(name, 50)]))[name] == 50


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
