"""The names for threads: the registry (`face.py`), and what stands on it."""

from .face import FailbackRegistry, Registration, Registry, Subscription, open_registry
from .named import channel
from .publisher import Publisher

__all__ = [
    "FailbackRegistry",
    "Publisher",
    "Registration",
    "Registry",
    "Subscription",
    "channel",
    "open_registry",
]
