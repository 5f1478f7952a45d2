"""The names of `rpcwheel.balancer` for `grpc`."""

from .broadcast import BroadcastChannel
from .channel import BalancedChannel, Subchannel

__all__ = ["BalancedChannel", "BroadcastChannel", "Subchannel"]
