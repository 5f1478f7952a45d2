"""The built-in backends. Each module is loaded when a URL names its scheme; see `open_backend`."""

from __future__ import annotations

import importlib
from contextlib import suppress
from typing import TYPE_CHECKING

from rpcwheel.errors import ConfigurationError, ExtraMissing
from rpcwheel.registry import backend
from rpcwheel.registry.backend import RegistryBackend
from rpcwheel.registry.url import (
    BACKENDS,
    GROUP,
    RegistryUrl,
    nearest_scheme,
    other_backends,
    parse_url,
)

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from rpcwheel.registry.backend import Settings

__all__ = ["check_scheme", "open_backend"]


def open_backend(url: str | RegistryUrl, settings: Settings) -> RegistryBackend:
    """Make the backend that the URL's scheme names. Does not connect.

    The built-in ones take precedence over the entry points `rpcwheel.registry`.

    Raises:
        ConfigurationError: No backend has this scheme, or the URL is not valid for it.
        ExtraMissing: A package that the backend needs is not installed, or too old.
        TypeError: The URL is not a string.
    """
    url = url if isinstance(url, RegistryUrl) else parse_url(url)
    try:
        backend_class = _load(url)
        if not (isinstance(backend_class, type) and issubclass(backend_class, RegistryBackend)):
            raise ConfigurationError(
                f"{url}: what the entry point {url.scheme!r} of {GROUP} names is no "
                f"rpcwheel.registry.RegistryBackend, but {backend_class!r}"
            )
        return backend_class(url, settings)
    except ExtraMissing:
        raise
    except ImportError as error:
        _, extra = BACKENDS.get(url.scheme, ("", ""))
        advice = f"pip install 'rpcwheel[{extra}]'" if extra else "install what brings it"
        needed = (
            f"the package {error.name!r}, which is not here"
            if isinstance(error, ModuleNotFoundError)
            else f"another version of a package ({error})"
        )
        raise ExtraMissing(f"{url.scheme}:// needs {needed}: {advice}") from error


def check_url_writable(url: RegistryUrl) -> None:
    """Check that instances can be published in the registry of a URL.

    Raises:
        ConfigurationError: Its backend is for reading only, or can't be loaded.
    """
    with suppress(ModuleNotFoundError):  # reported when it is opened
        backend.check_writable(_load(url), url)


def _load(url: RegistryUrl) -> object:
    if url.scheme in BACKENDS:
        module, _, name = BACKENDS[url.scheme][0].partition(":")
        return getattr(importlib.import_module(f".{module}", __name__), name)
    entry_point = _entry_point(url)
    try:
        return entry_point.load()
    except ModuleNotFoundError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"{url}: the backend {entry_point.value} could not be loaded: {error!r}"
        ) from error


def check_scheme(url: RegistryUrl) -> None:
    """Check that some backend has the URL's scheme. Loads nothing.

    Raises:
        ConfigurationError: None has it. The message names the nearest scheme.
    """
    if url.scheme not in BACKENDS:
        _entry_point(url)


def _entry_point(url: RegistryUrl) -> EntryPoint:
    others = other_backends()
    if url.scheme not in others:
        near = nearest_scheme(url.scheme)
        meant = f"did you mean {near}://? " if near else ""
        schemes = ", ".join(f"{name}://" for name in sorted({*BACKENDS, *others}))
        raise ConfigurationError(
            f"{url}: no registry has the scheme {url.scheme!r}; {meant}there are {schemes}"
        )
    return others[url.scheme]
