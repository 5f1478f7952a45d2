"""The names of `rpcwheel.balancer` for `grpc`. Loaded by kits, see `Kit._load`."""

from .broadcast import BroadcastChannel
from .channel import BalancedChannel, Subchannel

__all__ = ["BalancedChannel", "BroadcastChannel", "Subchannel"]
