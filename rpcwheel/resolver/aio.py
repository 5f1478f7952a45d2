"""The public names for coroutines."""

from .aio_channel import insecure_channel, secure_channel

__all__ = ["insecure_channel", "secure_channel"]
