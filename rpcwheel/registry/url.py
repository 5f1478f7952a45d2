"""Registry URLs, such as `etcd://user:password@10.0.0.1:2379,10.0.0.2:2379/shop.Orders`.

* The scheme selects the backend.
* Several hosts are separated by commas.
* The path is the service. With `sqlite` it is the file: `sqlite:///run/shop/registry.db`, relative
  to the working directory `sqlite://./registry.db`, in the home directory `sqlite://~/registry.db`.
  Other backends may claim the path too (`RegistryBackend.path_is_own`). Their service is given by
  `?service=`.
* Options follow after `?`: those of all backends (`namespace`, `service`, `group`, `version`), and
  the backend's own.
* In a user, a password, a path or an option, characters other than letters, digits, `.`, `_`, `-`
  and `~` are percent-encoded.
"""

from __future__ import annotations

import difflib
import re
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, quote, unquote

from rpcwheel.errors import ConfigurationError, masked_url
from rpcwheel.instance import LARGEST_PORT, NAME, checked_host

if TYPE_CHECKING:
    from collections.abc import Mapping
    from importlib.metadata import EntryPoint

Hosts = tuple[tuple[str, int | None], ...]

NAMESPACE: Final = "rpcwheel"
GROUP: Final = "rpcwheel.registry"
"""The group of the entry points of other packages' backends: `scheme = "package.module:Class"`."""

BACKENDS: Final = {
    "memory": ("memory:MemoryBackend", ""),
    "sqlite": ("sqlite:SqliteBackend", ""),
    "etcd": ("etcd:EtcdBackend", "etcd"),
    "etcds": ("etcd:EtcdBackend", "etcd"),
    "zookeeper": ("zookeeper:ZookeeperBackend", "zookeeper"),
    "zookeepers": ("zookeeper:ZookeeperBackend", "zookeeper"),
    "dubbo+zookeeper": ("dubbo:DubboBackend", "zookeeper"),
    "dubbo+zookeepers": ("dubbo:DubboBackend", "zookeeper"),
    "redis": ("redis:RedisBackend", "redis"),
    "rediss": ("redis:RedisBackend", "redis"),
    "headless": ("headless:HeadlessBackend", "dns"),
}
"""By built-in scheme: the module in the package `backends` with its class, and the extra to
install."""

FILE_SCHEMES: Final = frozenset({"sqlite"})
"""Built-in schemes whose path is a file. That of the others is the service."""

REDIS_SCHEMES: Final = frozenset({"redis", "rediss"})
HEADLESS: Final = "headless"
"""The scheme whose host is the service."""

DUBBO_SCHEMES: Final = frozenset({"dubbo+zookeeper", "dubbo+zookeepers"})
"""Schemes of Dubbo's own format in ZooKeeper."""

FILE_PREFIXES: Final = frozenset({"", ".", "..", "~"})
"""What may stand before the path of a file, in place of the hosts."""

COMMON_OPTIONS: Final = ("namespace", "service", "group", "version")
"""Options of every scheme. Backends ignore all of them but the namespace."""

PARTS: Final = {"db": "0", "root": "dubbo"}
"""Options that select a part of an engine, as the namespace does, and their defaults."""

TLS_SCHEMES: Final = frozenset({"etcds", "zookeepers", "dubbo+zookeepers", "rediss"})
"""Schemes of connections with TLS."""

TLS_OPTIONS: Final = ("tls", "ca", "cert", "key")
"""Options of every engine with TLS."""

_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.\-]*")
_WORD: Final = re.compile(r"[\w.\-]+", re.ASCII)
_YES_NO: Final = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


@dataclass(frozen=True, slots=True)
class RegistryUrl:
    """A parsed registry URL.

    `str()` is a URL without the password and the service, except if the path of another package's
    backend has an `@`. Of the options it keeps the namespace and `PARTS`, in which two registries
    on one host differ.
    """

    scheme: str
    hosts: Hosts = ()
    """Pairs of host and port; the port is None if it was left out."""
    path: str = ""
    """The file, or the path of a backend with `path_is_own`; otherwise ""."""
    service: str = ""
    """The service that the path or `?service=` names; "" if none is named."""
    user: str = ""
    password: str = field(default="", repr=False)
    namespace: str = NAMESPACE
    """The prefix of all keys in the engine."""
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    """All other options."""

    def __str__(self) -> str:
        hosts = ",".join(
            (f"[{host}]" if ":" in host else host) + ("" if port is None else f":{port}")
            for host, port in self.hosts
        )
        login = quote(self.user, safe="", errors="replace") + (":***" if self.password else "")
        user = f"{login}@" if login else ""
        path = self.path.replace("%", "%25").replace("?", "%3F")
        inside = [] if self.namespace == NAMESPACE else [f"namespace={self.namespace}"]
        for name, default in PARTS.items():
            part = self.options.get(name, default)
            inside += [f"{name}={part}"] if _WORD.fullmatch(part) and part != default else []
        asked = f"?{'&'.join(inside)}" if inside else ""
        return f"{self.scheme}://{user}{hosts}{path}{asked}"

    def check_options(self, *own: str) -> None:
        """Check that there are no options but the common ones and `own`.

        Raises:
            ConfigurationError: An option is unknown. The message names the nearest, or all.
        """
        allowed = (*COMMON_OPTIONS, *own)
        for name in self.options:
            if name not in allowed:
                near = difflib.get_close_matches(name, allowed, n=1)
                meant = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(allowed)}"
                raise ConfigurationError(f"{self}: there is no option {name!r}; {meant}")

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Read an option that is true or false. Without a value (`?tls`) it is true.

        Raises:
            ConfigurationError: The value is neither.
        """
        text = self.options.get(name)
        if text is None:
            return default
        if text and text.lower() not in _YES_NO:
            raise ConfigurationError(f"{self}: {name} must be true or false, not {text!r}")
        return _YES_NO.get(text.lower(), True)

    def tls_options(self) -> Mapping[str, str] | None:
        """Return the options that have those of TLS; None without TLS.

        Raises:
            ConfigurationError: The options contradict each other, or the scheme.
        """
        has_tls = self.scheme in TLS_SCHEMES
        if self.flag("tls", default=has_tls):
            return self.options
        if has_tls:
            plain = self.scheme.removesuffix("s")
            raise ConfigurationError(f"{self}: {self.scheme}:// uses TLS; without it {plain}://")
        names = [name for name in (*TLS_OPTIONS[1:], "server_name") if name in self.options]
        if names:
            raise ConfigurationError(f"{self}: {', '.join(names)}: for TLS only; add tls=true")
        return None

    def seconds(self, name: str, *, default: float) -> float:
        """Read an option that is a number of seconds.

        Raises:
            ConfigurationError: It is not a finite number above zero.
        """
        text = self.options.get(name)
        try:
            value = default if text is None else float(text)
        except ValueError:
            value = 0.0
        if not 0 < value < float("inf"):
            raise ConfigurationError(
                f"{self}: {name} must be a finite number of seconds above zero, not {text!r}"
            )
        return value


def parse_url(url: str) -> RegistryUrl:
    """Parse the URL of a registry. Any scheme is accepted: `open_backend` refuses unknown ones.

    Raises:
        ConfigurationError: The URL is malformed. The message never contains the password.
        TypeError: `url` is not a string.
    """
    if not isinstance(url, str):
        raise TypeError(f'a registry is named by a URL, such as "memory://", not {url!r}')
    shown = masked_url(url)
    scheme, colon, rest = url.partition("://")
    if not colon or not _SCHEME.fullmatch(scheme):
        raise ConfigurationError(
            f"{shown!r} is not the URL of a registry; it begins with a scheme, such as "
            '"etcd://" or "sqlite:///"'
        )
    try:
        return _parse(scheme, rest)
    except ConfigurationError as error:
        # What follows a misspelled scheme was read by the wrong rules: `sqlit:///run/shop.db`.
        near = nearest_scheme(scheme)
        unknown = f"no registry has the scheme {scheme!r}; did you mean {near}://?"
        raise ConfigurationError(f"{shown!r}: {unknown if near else error}") from None


def _parse(scheme: str, rest: str) -> RegistryUrl:
    rest, _, query = rest.partition("?")
    authority, slash, path = rest.partition("/")
    options = _options(query)
    namespace = _a_name("namespace", options.pop("namespace", NAMESPACE))
    user, password = "", ""
    hosts: Hosts = ()
    if scheme in FILE_SCHEMES:
        path, service = _file(scheme, authority, slash + path), ""
    elif path and _path_is_own(scheme):
        if authority not in FILE_PREFIXES:
            user, password, hosts = _authority(authority, path + "?" + query)
            authority = ""
        path, service = _without_nul(authority + slash + unquote(path)), ""
    else:
        user, password, hosts = _authority(authority, path + "?" + query)
        path, service = "", _service(scheme, unquote(path))
    if scheme == HEADLESS:
        service = _host_as_service(hosts, service)
    if "service" in options:
        named = options.pop("service")
        if service not in {"", named}:
            raise ConfigurationError(f"it names two services, {service!r} and {named!r}; give one")
        service = named
    if service:
        _a_name("the service", service)
    return RegistryUrl(scheme, hosts, path, service, user, password, namespace, options)


def other_backends() -> dict[str, EntryPoint]:
    """Return the backends of other packages, by their scheme."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def nearest_scheme(scheme: str) -> str:
    """Return the known scheme nearest to an unknown one; "" if it is known, or resembles none."""
    schemes = sorted({*BACKENDS, *other_backends()})
    near = [] if scheme in schemes else difflib.get_close_matches(scheme, schemes, n=1)
    return near[0] if near else ""


def _path_is_own(scheme: str) -> bool:
    """Whether the backend of another package claims the path. Loads its class."""
    if scheme not in BACKENDS and (entry := other_backends().get(scheme)):
        with suppress(Exception):  # `open_backend` reports the error
            return bool(getattr(entry.load(), "path_is_own", False))
    return False


def _service(scheme: str, path: str) -> str:
    if scheme in REDIS_SCHEMES and path.isdecimal():
        raise ConfigurationError(
            f"the path is the name of the service; the number of the database is ?db={path}"
        )
    if path and scheme not in BACKENDS and not NAME.fullmatch(path):
        raise ConfigurationError(
            f"the path {path!r} is not a valid service name; if the backend of {scheme}:// uses "
            "the path itself, its class must set path_is_own = True and be named by an entry point "
            f"of the group {GROUP}"
        )
    return path


def _host_as_service(hosts: Hosts, path: str) -> str:
    if path:
        raise ConfigurationError(
            "headless:// takes no path: its host is the service, headless://shop-orders.default:50051"
        )
    return hosts[0][0] if hosts else ""


def _options(query: str) -> dict[str, str]:
    pairs = parse_qsl(query, keep_blank_values=True)
    options = dict(pairs)
    if len(options) < len(pairs):
        twice = sorted({name for name, _ in pairs if [key for key, _ in pairs].count(name) > 1})
        raise ConfigurationError(f"{', '.join(twice)}: given twice")
    return options


def _a_name(label: str, value: str) -> str:
    if not NAME.fullmatch(value):
        raise ConfigurationError(
            f"{label} must be a name of letters, digits, '.', '_' and '-', not {value!r}"
        )
    return value


def _file(scheme: str, authority: str, path: str) -> str:
    if authority not in FILE_PREFIXES:
        raise ConfigurationError(
            f"{scheme} takes a file of this machine, after three slashes: {scheme}:///run/shop.db; "
            f"for one beside the program {scheme}://./shop.db"
        )
    path = unquote(path)
    if path in {"", "/"} or path.endswith("/"):
        raise ConfigurationError(f"the name of the file is missing: {scheme}:///run/shop.db")
    return authority + re.sub(r"^//+", "/", _without_nul(path))


def _without_nul(path: str) -> str:
    if "\0" in path:
        raise ConfigurationError("the name of the file contains a null character")
    return path


def _authority(authority: str, after: str) -> tuple[str, str, Hosts]:
    """Parse user, password and hosts. `after` is the rest of the URL, for the error message."""
    if "@" in after and "@" not in authority:
        raise ConfigurationError(
            "a '/' or '?' in a user or a password is written %2F or %3F, and a '@' in an option %40"
        )
    credentials, at, hosts = authority.rpartition("@")
    user, _, password = credentials.partition(":")
    if "@" in credentials or ":" in password or (at and not user and not password):
        raise ConfigurationError(
            "before '@' stands user:password; a '@' or ':' in them is written %40 or %3A"
        )
    addresses = tuple(_host(host) for host in hosts.split(",")) if hosts else ()
    return unquote(user), unquote(password), addresses


def _host(text: str) -> tuple[str, int | None]:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, colon, port = text, "", ""
    checked = None
    if ":" not in host or host.startswith("["):
        with suppress(ConfigurationError):
            checked = checked_host(host)
    if checked is None:
        raise ConfigurationError(
            f"{text!r} is no host and port, such as 10.0.0.1:2379, shop.example:2379 or [::1]:2379"
        )
    if colon and not (port.isascii() and port.isdigit() and 0 < int(port) <= LARGEST_PORT):
        raise ConfigurationError(f"{text!r}: a port is a number from 1 to {LARGEST_PORT}")
    return checked, int(port) if colon else None
