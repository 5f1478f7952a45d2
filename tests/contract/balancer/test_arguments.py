"""Which arguments the channels of both worlds refuse, and with which message."""

import grpc
import pytest

from fixtures.balanced_channels import BALANCER, instance
from rpcwheel.balancer import BalancerPolicy
from rpcwheel.errors import ConfigurationError

REFUSED = [
    ({"name": ""}, ConfigurationError, r"name.*shop\.Orders"),
    ({"name": 5}, TypeError, r"name.*shop\.Orders"),
    ({"lb_policy": "nonsense"}, ConfigurationError, "lb_policy"),
    ({"lb_policy": 5}, TypeError, "lb_policy"),
    ({"instances": ["10.0.0.7:50051"]}, TypeError, r"ServiceInstance, not '10\.0\.0\.7"),
    ({"balancer_policy": {"drain_timeout": 5}}, TypeError, "must be a BalancerPolicy"),
    ({"balancer_policy": BalancerPolicy(health_check_backoff="often")}, TypeError, "wait"),
    ({"on_subchannel": 5}, TypeError, "on_subchannel must be callable"),
    ({"on_removed": 5}, TypeError, "on_removed must be callable"),
    ({"connect": 5}, TypeError, "connect"),
    ({"options": 5}, TypeError, "options"),
    ({"options": {"a": 1}}, TypeError, "options must be pairs"),
    ({"credentials": "secret"}, TypeError, "credentials"),
    ({"timer": 5}, TypeError, "timer"),
    (
        {"connect": print, "compression": grpc.Compression.Gzip},
        ConfigurationError,
        "compression: not allowed together with connect",
    ),
]


REFUSED_IN_AIO = [
    ({"interceptors": [5]}, TypeError, "interceptors must be"),
    (
        {"connect": print, "interceptors": ()},
        ConfigurationError,
        "not allowed together with connect",
    ),
]


def test_wrong_arguments_are_refused(world):
    make = BALANCER[world.name].BalancedChannel
    for given, error, message in REFUSED + (REFUSED_IN_AIO if world.name == "aio" else []):
        with pytest.raises(error, match=message):
            make(**{"name": "test.Shop"} | given)


def test_a_wrong_update_or_grace_changes_nothing(world, open_balanced):
    channel = open_balanced(1)
    before = channel.subchannels
    with pytest.raises(TypeError, match="ServiceInstance"):
        world.do(channel.update, [instance(2), None])
    if world.name == "aio":
        with pytest.raises(ConfigurationError, match="grace must be 0 seconds or more"):
            world.do(channel.close, -1)
    assert (channel.subchannels, channel.closed) == (before, False)
