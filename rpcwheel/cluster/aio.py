"""The channel of many members, and calls on several of them at once, for `grpc.aio`."""

from ._aio_channel import ClusterChannel
from ._aio_forking import BroadcastInvoker, ForkingInvoker

__all__ = ["BroadcastInvoker", "ClusterChannel", "ForkingInvoker"]
