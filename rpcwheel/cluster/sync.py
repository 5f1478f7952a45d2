"""The channel of many members, and calls on several of them at once, for threads."""

from ._channel import ClusterChannel
from ._forking import BroadcastInvoker, ForkingInvoker

__all__ = ["BroadcastInvoker", "ClusterChannel", "ForkingInvoker"]
