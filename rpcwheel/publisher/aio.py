"""The public names for coroutines."""

from .aio_publisher import Publisher

__all__ = ["Publisher"]
