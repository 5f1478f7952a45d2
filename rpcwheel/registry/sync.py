"""The public names for threads."""

from .publisher import Publisher
from .registry import Registration, Registry, Subscription, open_registry
from .resolved_channel import insecure_channel, secure_channel

__all__ = [
    "Publisher",
    "Registration",
    "Registry",
    "Subscription",
    "insecure_channel",
    "open_registry",
    "secure_channel",
]
