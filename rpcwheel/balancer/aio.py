"""The names of `rpcwheel.balancer` for `grpc.aio`."""

from .aio_broadcast import BroadcastChannel
from .aio_channel import BalancedChannel, Subchannel

__all__ = ["BalancedChannel", "BroadcastChannel", "Subchannel"]
