"""The version of the installed distribution, which is loaded when it is first used."""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__"]

try:
    __version__ = version("rpcwheel")
except PackageNotFoundError:  # a copy of the source that is not installed
    __version__ = "unknown"
