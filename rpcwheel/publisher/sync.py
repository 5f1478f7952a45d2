"""The public names for threads."""

from .publisher import Publisher

__all__ = ["Publisher"]
