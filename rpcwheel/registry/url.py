"""Where a registry is, as one line: `etcd://user:password@10.0.0.1:2379,10.0.0.2:2379/shop.Orders`.

The scheme is that of a backend. Hosts may be several, with a comma. The path is the service, but
for `sqlite`, where it is the file's: `sqlite:///run/shop/registry.db`, and from where the program
runs or from home `sqlite://./registry.db` and `sqlite://~/registry.db` (the service is then
`?service=`). So it is for backends of others that say so (`RegistryBackend.path_is_own`). After `?`
follow the options that all have (`namespace`, `service`, `group`, `version`), and the backend's
own. What is no letter, digit, `.`, `_`, `-` or `~` in a user, a password, a path or an option is
percent-encoded.
"""

from __future__ import annotations

import difflib
import re
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, unquote

from rpcwheel.errors import ConfigurationError
from rpcwheel.instance import checked_host

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["RegistryUrl", "masked_url", "parse_url"]

Hosts = tuple[tuple[str, int | None], ...]

NAMESPACE: Final = "rpcwheel"
GROUP: Final = "rpcwheel.registry"
"""Of the entry points that name others' backends: `scheme = "package.module:Class"`."""

WITH_A_FILE: Final = frozenset({"sqlite"})
"""Schemes whose path is a file's."""

OF_REDIS: Final = frozenset({"redis", "rediss"})
HEADLESS: Final = "headless"
"""Its host is the service."""

WITH_A_SERVICE: Final = OF_REDIS | {
    "memory",
    "etcd",
    "etcds",
    "zookeeper",
    "zookeepers",
    HEADLESS,
}
"""Our schemes whose path is the service; of others' their classes say what it is."""

HERE: Final = frozenset({"", ".", "..", "~"})
"""What stands before the path of a file, where others have hosts."""

FOR_ALL: Final = ("namespace", "service", "group", "version")
"""Options that every scheme has; what they say of clients is no backend's business."""

LARGEST_PORT: Final = 65535

_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.\-]*")
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_WORD: Final = re.compile(r"[\w.\-]+", re.ASCII)
_YES_NO: Final = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


@dataclass(frozen=True, slots=True)
class RegistryUrl:
    """A registry's address, taken apart.

    `str()` gives it without the password and the service; of the options it has the namespace and
    the database, by which two registries of one host differ.
    """

    scheme: str
    hosts: Hosts = ()
    """Host and port; the port is None where it was left out."""
    path: str = ""
    """Of the file, or whatever it is to a backend with `path_is_own`; else ""."""
    service: str = ""
    """What the path, or `?service=`, names; "" if nothing does."""
    user: str = ""
    password: str = field(default="", repr=False)
    namespace: str = NAMESPACE
    """Under which all keys are."""
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What else was given after `?`."""

    def __str__(self) -> str:
        hosts = ",".join(
            (f"[{host}]" if ":" in host else host) + ("" if port is None else f":{port}")
            for host, port in self.hosts
        )
        user = f"{self.user}:***@" if self.password else f"{self.user}@" if self.user else ""
        inside = [] if self.namespace == NAMESPACE else [f"namespace={self.namespace}"]
        database = self.options.get("db", "0")
        inside += [f"db={database}"] if _WORD.fullmatch(database) and database != "0" else []
        asked = f"?{'&'.join(inside)}" if inside else ""
        return f"{self.scheme}://{user}{hosts}{self.path}{asked}"

    def check_options(self, *own: str) -> None:
        """See that all options are those that every scheme has, or `own`.

        Raises:
            ConfigurationError: One is not; it says which there are.
        """
        known = (*FOR_ALL, *own)
        for name in self.options:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                meant = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
                raise ConfigurationError(f"{self}: there is no option {name!r}; {meant}")

    def flag(self, name: str, *, default: bool = False) -> bool:
        """An option that is yes or no; `?tls` alone is yes.

        Raises:
            ConfigurationError: It is neither.
        """
        given = self.options.get(name)
        if given is None:
            return default
        if given and given.lower() not in _YES_NO:
            raise ConfigurationError(f"{self}: {name} must be true or false, not {given!r}")
        return _YES_NO.get(given.lower(), True)

    def seconds(self, name: str, *, default: float) -> float:
        """An option that is a finite time above zero.

        Raises:
            ConfigurationError: It is not.
        """
        given = self.options.get(name)
        try:
            value = default if given is None else float(given)
        except ValueError:
            value = 0.0
        if not 0 < value < float("inf"):
            raise ConfigurationError(
                f"{self}: {name} must be a finite number of seconds above zero, not {given!r}"
            )
        return value


def parse_url(url: str) -> RegistryUrl:
    """Take a registry's URL apart. Whether there is such a scheme, `open_backend` knows.

    Raises:
        ConfigurationError: It makes no sense; it says why, without the password.
        TypeError: It is no string.
    """
    if not isinstance(url, str):
        raise TypeError(f'a registry is named by a URL, such as "memory://", not {url!r}')
    shown = masked_url(url)
    scheme, colon, rest = url.partition("://")
    if not colon or not _SCHEME.fullmatch(scheme):
        raise ConfigurationError(
            f'{shown!r} is no URL of a registry; it begins with a scheme, such as "etcd://" or '
            '"sqlite:///"'
        )
    try:
        return _parsed(scheme, rest)
    except ConfigurationError as error:
        raise ConfigurationError(f"{shown!r}: {error}") from None


def masked_url(url: str) -> str:
    """For errors: without anything in it that may be secret."""
    scheme, slashes, rest = url.partition("//")
    if not slashes:
        scheme, rest = "", url
    _, at, after = rest.rpartition("@")
    return f"{scheme}{slashes}{'***' + at if at else ''}{after.partition('?')[0]}"


def _parsed(scheme: str, rest: str) -> RegistryUrl:
    rest, _, query = rest.partition("?")
    authority, slash, path = rest.partition("/")
    options = _options(query)
    namespace = _a_name("namespace", options.pop("namespace", NAMESPACE))
    user, password, hosts = "", "", Hosts()
    if scheme in WITH_A_FILE:
        path, service = _file(scheme, authority, slash + path), ""
    elif path and _path_is_own(scheme):
        if authority not in HERE:
            user, password, hosts = _authority(authority, path + "?" + query)
            authority = ""
        path, service = _without_zero(authority + slash + unquote(path)), ""
    else:
        user, password, hosts = _authority(authority, path + "?" + query)
        path, service = "", _service(scheme, unquote(path))
    if scheme == HEADLESS:
        service = _host_as_service(hosts, service)
    if "service" in options:
        named = options.pop("service")
        if service not in {"", named}:
            raise ConfigurationError(f"it names two services, {service!r} and {named!r}")
        service = named
    if service:
        _a_name("the service", service)
    return RegistryUrl(scheme, hosts, path, service, user, password, namespace, options)


def _path_is_own(scheme: str) -> bool:
    """Whether a backend of somebody else's says so; loads it."""
    if scheme in WITH_A_SERVICE:
        return False
    for one in entry_points(group=GROUP):
        if one.name == scheme:
            with suppress(Exception):  # `open_backend` tells what is wrong with it
                return bool(getattr(one.load(), "path_is_own", False))
    return False


def _service(scheme: str, path: str) -> str:
    """The service that a path names."""
    if scheme in OF_REDIS and path.isdecimal():
        raise ConfigurationError(
            f"the path is the name of the service; the number of the database is ?db={path}"
        )
    if path and scheme not in WITH_A_SERVICE and not _NAME.fullmatch(path):
        raise ConfigurationError(
            f"the path {path!r} is no name of a service; if it is the engine's, its backend says "
            f"path_is_own = True, and is named by an entry point of the group {GROUP}"
        )
    return path


def _host_as_service(hosts: Hosts, path: str) -> str:
    if path:
        raise ConfigurationError(
            "headless:// takes no path: its host is the service, headless://shop-orders.default:50051"
        )
    return hosts[0][0] if hosts else ""


def _options(query: str) -> dict[str, str]:
    given = parse_qsl(query, keep_blank_values=True)
    options = dict(given)
    if len(options) < len(given):
        twice = sorted({name for name, _ in given if [one for one, _ in given].count(name) > 1})
        raise ConfigurationError(f"{', '.join(twice)}: given twice")
    return options


def _a_name(what: str, value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ConfigurationError(
            f"{what} must be a name of letters, digits, '.', '_' and '-', not {value!r}"
        )
    return value


def _file(scheme: str, authority: str, path: str) -> str:
    if authority not in HERE:
        raise ConfigurationError(
            f"{scheme} takes a file of this machine, after three slashes: {scheme}:///run/shop.db; "
            f"for one beside the program {scheme}://./shop.db"
        )
    path = unquote(path)
    if path in {"", "/"} or path.endswith("/"):
        raise ConfigurationError(f"the name of the file is missing: {scheme}:///run/shop.db")
    return authority + re.sub(r"^//+", "/", _without_zero(path))


def _without_zero(path: str) -> str:
    if "\0" in path:
        raise ConfigurationError("the name of the file has a zero character in it")
    return path


def _authority(authority: str, after: str) -> tuple[str, str, Hosts]:
    """User, password and hosts; `after` is what follows."""
    if "@" in after and "@" not in authority:
        raise ConfigurationError("a '/' or '?' in a user or a password is written %2F or %3F")
    credentials, at, hosts = authority.rpartition("@")
    user, _, password = credentials.partition(":")
    if "@" in credentials or ":" in password or (at and not user and not password):
        raise ConfigurationError(
            "before '@' stands user:password; a '@' or ':' in them is written %40 or %3A"
        )
    found = tuple(_host(one) for one in hosts.split(",")) if hosts else ()
    return unquote(user), unquote(password), found


def _host(given: str) -> tuple[str, int | None]:
    host, colon, port = given.rpartition(":")
    if not colon or given.endswith("]"):
        host, colon, port = given, "", ""
    checked = None
    if ":" not in host or host.startswith("["):
        with suppress(ConfigurationError):
            checked = checked_host(host)
    if checked is None:
        raise ConfigurationError(
            f"{given!r} is no host and port, such as 10.0.0.1:2379, shop.example:2379 or [::1]:2379"
        )
    if colon and not (port.isascii() and port.isdigit() and 0 < int(port) <= LARGEST_PORT):
        raise ConfigurationError(f"{given!r}: a port is a number from 1 to {LARGEST_PORT}")
    return checked, int(port) if colon else None
