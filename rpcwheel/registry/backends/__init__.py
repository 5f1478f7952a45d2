"""The engines, each in a file of its own, loaded when a URL names it; see `open_backend`."""

from __future__ import annotations

import difflib
import importlib
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Final

from rpcwheel.errors import ConfigurationError, ExtraMissing
from rpcwheel.registry.backend import RegistryBackend
from rpcwheel.registry.url import GROUP, RegistryUrl, parse_url

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from rpcwheel.registry.backend import Settings

__all__ = ["check_scheme", "open_backend"]

_HERE: Final = "rpcwheel.registry.backends"
OURS: Final = {
    "memory": f"{_HERE}.memory:MemoryBackend",
    "sqlite": f"{_HERE}.sqlite:SqliteBackend",
    "etcd": f"{_HERE}.etcd:EtcdBackend",
    "etcds": f"{_HERE}.etcd:EtcdBackend",
    "zookeeper": f"{_HERE}.zookeeper:ZookeeperBackend",
    "zookeepers": f"{_HERE}.zookeeper:ZookeeperBackend",
    "redis": f"{_HERE}.redis:RedisBackend",
    "rediss": f"{_HERE}.redis:RedisBackend",
    "headless": f"{_HERE}.headless:HeadlessBackend",
}
EXTRAS: Final = {
    "etcd": "etcd",
    "etcds": "etcd",
    "zookeeper": "zookeeper",
    "zookeepers": "zookeeper",
    "redis": "redis",
    "rediss": "redis",
    "headless": "dns",
}
"""What to install, by scheme."""


def open_backend(url: str | RegistryUrl, settings: Settings) -> RegistryBackend:
    """Make the backend that the URL's scheme names; contacts nobody.

    Ours first, then those of the entry points `rpcwheel.registry`.

    Raises:
        ConfigurationError: No engine has this scheme, or the URL makes no sense for it.
        ExtraMissing: A package that the engine needs is not installed.
        TypeError: The URL is no string.
    """
    told = url if isinstance(url, RegistryUrl) else parse_url(url)
    kind = _loaded(told)
    try:
        return kind(told, settings)
    except ModuleNotFoundError as error:
        raise _missing(told, error) from error


def _loaded(url: RegistryUrl) -> type[RegistryBackend]:
    """The class for a scheme."""
    if url.scheme in OURS:
        module, _, name = OURS[url.scheme].partition(":")
        try:
            kind = getattr(importlib.import_module(module), name)
        except ModuleNotFoundError as error:
            raise _missing(url, error) from error
    else:
        kind = _of_entry_point(url)
    if not (isinstance(kind, type) and issubclass(kind, RegistryBackend)):
        raise ConfigurationError(
            f"{url}: what the entry point {url.scheme!r} of {GROUP} names is no "
            f"rpcwheel.registry.RegistryBackend, but {kind!r}"
        )
    return kind


def check_scheme(url: RegistryUrl) -> None:
    """See that some engine has the URL's scheme; loads nothing.

    Raises:
        ConfigurationError: None has; it names the nearest.
    """
    if url.scheme not in OURS:
        _entry_point(url)


def _entry_point(url: RegistryUrl) -> EntryPoint:
    found: dict[str, EntryPoint] = {one.name: one for one in entry_points(group=GROUP)}
    if url.scheme not in found:
        known = sorted({*OURS, *found})
        near = difflib.get_close_matches(url.scheme, known, n=1)
        meant = f"did you mean {near[0]}://? " if near else ""
        raise ConfigurationError(
            f"{url}: no registry has the scheme {url.scheme!r}; {meant}there are "
            f"{', '.join(f'{name}://' for name in known)}"
        )
    return found[url.scheme]


def _of_entry_point(url: RegistryUrl) -> object:
    found = _entry_point(url)
    try:
        return found.load()
    except ModuleNotFoundError as error:
        raise _missing(url, error) from error
    except Exception as error:
        raise ConfigurationError(
            f"{url}: the backend {found.value} could not be loaded: {error!r}"
        ) from error


def _missing(url: RegistryUrl, error: ModuleNotFoundError) -> Exception:
    extra = EXTRAS.get(url.scheme)
    cure = f"pip install 'rpcwheel[{extra}]'" if extra else "install what brings it"
    return ExtraMissing(
        f"{url.scheme}:// needs the package {error.name!r}, which is not here: {cure}"
    )
