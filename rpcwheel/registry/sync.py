"""The public names for threads."""

from .registry import Registration, Registry, Subscription, open_registry

__all__ = [
    "Registration",
    "Registry",
    "Subscription",
    "open_registry",
]
