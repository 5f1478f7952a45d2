"""The public names for coroutines."""

from .aio_publisher import Publisher
from .aio_registry import Registration, Registry, Subscription, open_registry
from .aio_resolved_channel import insecure_channel, secure_channel

__all__ = [
    "Publisher",
    "Registration",
    "Registry",
    "Subscription",
    "insecure_channel",
    "open_registry",
    "secure_channel",
]
