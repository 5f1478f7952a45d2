"""The URLs of journals, such as `sqlite:///var/lib/shop/failback.db?durability=power`.

The scheme selects the backend. Options follow after `?`; all backends have `lease` and `timeout`.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from rpcwheel.errors import ConfigurationError, masked_url

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from importlib.metadata import EntryPoint
    from urllib.parse import SplitResult

__all__ = ["JournalUrl", "parse_journal_url"]

GROUP: Final = "rpcwheel.journal"
"""The group of the entry points of other packages' backends: `scheme = "package.module:Class"`."""

BACKENDS: Final = {
    "sqlite": ("sqlite", "SqliteJournal", ""),
    "postgresql": ("postgresql", "PostgresqlJournal", "postgresql"),
    "postgres": ("postgresql", "PostgresqlJournal", "postgresql"),
    "redis": ("redis", "RedisJournal", "redis"),
    "rediss": ("redis", "RedisJournal", "redis"),
}
"""By scheme: the module, the class, and the extra that it needs."""

LOCATION_OPTIONS: Final = {
    "schema": "rpcwheel",
    "namespace": "rpcwheel-journal",
    "db": "0",
    **dict.fromkeys(("host", "hostaddr", "port", "dbname", "service"), ""),
}
"""The options that say where the calls are, with their defaults. The others say how they are read
and stored."""

DEFAULT_LEASE_S: Final = 15.0
DEFAULT_TIMEOUT_S: Final = 5.0
LONGEST_S: Final = 3600.0

_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.\-]*")


@dataclass(frozen=True, slots=True)
class JournalUrl:
    """A parsed URL. `str()` leaves out the password and the options."""

    text: str = field(repr=False)
    """The URL itself, with the password."""
    scheme: str
    parts: SplitResult = field(repr=False)
    options: Mapping[str, str] = field(repr=False)
    """All but `lease` and `timeout`."""
    lease_s: float = DEFAULT_LEASE_S
    """Seconds after which the calls of a worker that has died are taken by others."""
    timeout_s: float = DEFAULT_TIMEOUT_S
    """Seconds that the caller of a failed call waits at most until its call is stored."""

    def __str__(self) -> str:
        return masked_url(self.text)

    @property
    def path(self) -> str:
        """The path, decoded. A file is `sqlite:///var/lib/x.db`, `sqlite://./x.db` or `~/x.db`."""
        authority = self.parts.netloc if self.parts.netloc in {".", "..", "~"} else ""
        return authority + unquote(self.parts.path)

    @property
    def location(self) -> str:
        """Where the calls are, for messages: without the password, with the options that say so."""
        pairs = (
            (name, self.options.get(name, default)) for name, default in LOCATION_OPTIONS.items()
        )
        options = urlencode([pair for pair in pairs if pair[1] != LOCATION_OPTIONS[pair[0]]])
        shown = str(self).replace("postgres://", "postgresql://", 1)
        return f"{shown}?{options}" if options else shown

    def is_same_location(self, other: JournalUrl) -> bool:
        """Whether the calls of both URLs are in one journal, whatever their users and passwords."""
        return self._identity == other._identity

    @property
    def _identity(self) -> tuple[object, ...]:
        """What says where the calls are. Not for messages: a malformed URL has its password in it.

        `location` does not tell two URLs apart that have an "@" in an option.
        """
        options = [self.options.get(name, default) for name, default in LOCATION_OPTIONS.items()]
        scheme = "postgresql" if self.scheme == "postgres" else self.scheme
        return scheme, self.parts.netloc.rpartition("@")[2], self.parts.path, options

    def check_options(self, *own: str) -> None:
        """Check that there are no options but `lease`, `timeout` and `own`.

        Raises:
            ConfigurationError: An option is unknown. The message names the nearest, or all.
        """
        names = ("lease", "timeout", *own)
        for name in self.options:
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1)
                meant = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
                raise ConfigurationError(f"{self}: there is no option {name!r}; {meant}")

    def choice(self, name: str, *allowed: str) -> str:
        """Read an option that has one of a few values; the first is the default.

        Raises:
            ConfigurationError: The value is another one.
        """
        value = self.options.get(name, allowed[0])
        if value not in allowed:
            shown = " or ".join(map(repr, allowed))
            raise ConfigurationError(f"{self}: {name} must be {shown}, not {value!r}")
        return value


def parse_journal_url(url: object) -> JournalUrl:
    """Parse the URL of a journal. Imports and connects nothing.

    Raises:
        ConfigurationError: It is malformed, or no backend has its scheme. The message never
            contains the password.
        TypeError: `url` is not a string.
    """
    if not isinstance(url, str):
        raise TypeError(f'a journal is named by a URL, such as "sqlite:///x.db", not {url!r}')
    shown = masked_url(url)
    scheme, colon, _ = url.partition("://")
    if not colon or not _SCHEME.fullmatch(scheme):
        raise ConfigurationError(
            f'{shown!r} is not the URL of a journal, such as "sqlite:///var/lib/shop/failback.db"'
        )
    schemes = (
        [*BACKENDS] if scheme in BACKENDS else [*BACKENDS, *(e.name for e in other_backends())]
    )
    if scheme not in schemes:
        near = difflib.get_close_matches(scheme, schemes, n=1)
        meant = f"did you mean {near[0]}://?" if near else f"there are {', '.join(schemes)}"
        raise ConfigurationError(f"{shown!r}: no journal has the scheme {scheme!r}; {meant}")
    try:
        parts = urlsplit(url, allow_fragments=False)  # a file or a password may have a "#"
        pairs = parse_qsl(parts.query, keep_blank_values=True)
    except ValueError as error:
        raise ConfigurationError(f"{shown!r}: {error}") from None
    options = dict(pairs)
    if any("@" in name for name in options):  # of a password; its other part was read as the host
        raise ConfigurationError(f"{shown}: in a password, write %3F for ?, and %40 for @")
    if len(options) < len(pairs):
        raise ConfigurationError(f"{shown!r}: an option is given twice")
    lease_s = _seconds(shown, "lease", options, DEFAULT_LEASE_S, least=1.0)
    timeout_s = _seconds(shown, "timeout", options, DEFAULT_TIMEOUT_S, least=0.1)
    return JournalUrl(url, scheme, parts, options, lease_s, timeout_s)


def _seconds(
    shown: str, name: str, options: dict[str, str], default_s: float, *, least: float
) -> float:
    """Take an option out of `options`: from `least` seconds to an hour."""
    value = options.pop(name, None)
    if value is None:
        return default_s
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not least <= seconds <= LONGEST_S:
        raise ConfigurationError(
            f"{shown!r}: {name} must be from {least:g} to {LONGEST_S:g} seconds, not {value!r}"
        )
    return seconds


def other_backends() -> Iterable[EntryPoint]:
    """Return the backends of other packages, by their scheme."""
    from importlib.metadata import entry_points  # 15 ms, and rarely needed

    return entry_points(group=GROUP)
