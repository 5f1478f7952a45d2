"""Opens the backend of a journal."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rpcwheel.errors import ExtraMissing
from rpcwheel.timer.manual import wall_clock_of

from .url import BACKENDS, JournalUrl, other_backends, parse_journal_url

if TYPE_CHECKING:
    from rpcwheel.timer.api import Timer

    from .backend import JournalBackend


def open_journal_backend(
    url: str | JournalUrl, *, create: bool = True, timer: Timer | None = None
) -> JournalBackend:
    """Make the backend of a journal. Does not connect yet.

    Args:
        url: The URL.
        create: Whether the first request creates the journal if it does not exist. If not, it
            raises `JournalRefused`.
        timer: A `ManualTimer`, for tests: its time is that of a journal in SQLite.

    Raises:
        ConfigurationError: The URL is not valid.
        ExtraMissing: A package is not installed; the message says which.
    """
    parsed = url if isinstance(url, JournalUrl) else parse_journal_url(url)
    backend: Any
    if parsed.scheme in BACKENDS:
        module, name, extra = BACKENDS[parsed.scheme]
        try:
            backend = getattr(import_module(f"{__package__}.{module}"), name)
        except ImportError as error:
            if not extra or (error.name or "").startswith("rpcwheel"):
                raise
            reason = str(error).partition("\n")[0]  # psycopg without libpq lists its attempts
            raise ExtraMissing(
                f"{parsed} needs a package that cannot be imported ({reason}): "
                f"pip install 'rpcwheel[{extra}]'"
            ) from error
    else:
        backend = next(
            entry_point for entry_point in other_backends() if entry_point.name == parsed.scheme
        ).load()
    journal_backend: JournalBackend = backend(parsed)
    journal_backend.creates = create
    if journal_backend.clock is not None:
        journal_backend.clock = wall_clock_of(timer)
    return journal_backend
