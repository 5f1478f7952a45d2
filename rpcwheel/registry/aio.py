"""The public names for coroutines."""

from .aio_registry import Registration, Registry, Subscription, open_registry

__all__ = [
    "Registration",
    "Registry",
    "Subscription",
    "open_registry",
]
