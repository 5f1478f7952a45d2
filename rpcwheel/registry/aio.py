"""The names for coroutines: the registry (`aio_face.py`), and what stands on it."""

from .aio_face import FailbackRegistry, Registration, Registry, Subscription, open_registry
from .aio_named import channel
from .aio_publisher import Publisher

__all__ = [
    "FailbackRegistry",
    "Publisher",
    "Registration",
    "Registry",
    "Subscription",
    "channel",
    "open_registry",
]
