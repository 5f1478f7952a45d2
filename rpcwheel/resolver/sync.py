"""The public names for threads."""

from .channel import insecure_channel, secure_channel

__all__ = ["insecure_channel", "secure_channel"]
