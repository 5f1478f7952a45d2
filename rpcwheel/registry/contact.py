"""Whether an engine answers, and how long it is left alone after it did not. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rpcwheel.durations import to_seconds
from rpcwheel.errors import RegistryRefused
from rpcwheel.observe.events import RegistryRecovered

if TYPE_CHECKING:
    from .rules import RegistryRules

__all__ = ["Contact"]

SOON_NS: Final = 200_000_000
"""After a failure, for what somebody waits for."""


class Contact:
    """What is known of one engine."""

    __slots__ = (
        "_registry",
        "_rules",
        "error",
        "failed_ns",
        "failures",
        "pause_ns",
        "renewal_pause_ns",
        "since_ns",
        "up",
    )

    def __init__(self, registry: str, rules: RegistryRules) -> None:
        self._registry = registry
        self._rules = rules
        self.up = False
        self.failures = 0
        """In a row."""
        self.failed_ns = 0
        self.since_ns: int | None = None
        """When it did not answer for the first time."""
        self.error: BaseException | None = None
        """Of the last request, if it has failed."""
        self.pause_ns = 0
        """Until when nothing is asked but what a user waits for, and renewals."""
        self.renewal_pause_ns = 0
        """The same of renewals, which can't be put off for as long as a policy may say."""

    def heard(self, now_ns: int) -> list[RegistryRecovered]:
        """It has answered a request; gives what is to be told."""
        self.failures, self.error = 0, None
        self.pause_ns = self.renewal_pause_ns = 0
        return self.seen(now_ns)

    def seen(self, now_ns: int) -> list[RegistryRecovered]:
        """It shows up, but no request was tried: those keep to their pause, or all would come."""
        since_ns, self.since_ns, self.up = self.since_ns, None, True
        if since_ns is None:
            return []
        return [RegistryRecovered(self._registry, to_seconds(now_ns - since_ns))]

    def lost(self, now_ns: int) -> None:
        """It does not answer; tries that are planned go on as they are."""
        self.up = False
        if self.since_ns is None:
            self.since_ns = now_ns

    def delay_ns(self, now_ns: int, error: BaseException) -> int:
        """How long to wait if a request fails now, which is longer each time. Changes nothing."""
        elapsed_ns = 0 if self.since_ns is None else max(0, now_ns - self.since_ns)
        return self._rules.retry_ns(self.failures + 1, elapsed_ns=elapsed_ns, error=error)

    def failed(self, now_ns: int, error: BaseException, delay_ns: int) -> None:
        """A request has failed: so long, nothing is asked."""
        if not isinstance(error, RegistryRefused):
            self.lost(now_ns)
        self.failures += 1
        self.error = error
        self.failed_ns = now_ns
        self.pause_ns = now_ns + delay_ns
        self.renewal_pause_ns = now_ns + min(delay_ns, self._rules.longest_retry_ns)

    def refused_one(self, error: BaseException) -> None:
        """It answers, but does not want one instance: that concerns no other."""
        self.error = error

    def hasten(self) -> None:
        """Somebody waits: let the next try be soon."""
        self.pause_ns = min(self.pause_ns, self.failed_ns + SOON_NS)
