"""What a user may set for registries, and what each setting means."""

from __future__ import annotations

from typing import ClassVar, Final, Self

from pydantic import StrictBool, field_validator, model_validator

from rpcwheel.backoff import Backoff
from rpcwheel.durations import to_ns
from rpcwheel.errors import ConfigurationError
from rpcwheel.policy import Policy, Seconds, Wait, checked

__all__ = ["RegistryPolicy"]

SWITCHES: Final = frozenset({"yes", "no", "on", "off", "true", "false", "none", "null", "0", "1"})
"""Words that mean no file, whatever language they come from."""


class RegistryPolicy(Policy):
    """How long a registry may believe in an instance, and how it is told again."""

    short: ClassVar[str | None] = "lease"

    lease: Seconds = 15.0
    """Seconds after which the registry forgets an instance whose process is gone."""

    renew: Seconds | None = None
    """Seconds between renewals, each of which looks whether all is still there. None: a third of
    the lease."""

    timeout: Seconds = 3.0
    """Seconds that one request to the registry may take."""

    backoff: Wait | None = None
    """How long to wait after a failed request. None: at random up to 0.2 s, then up to twice as
    much each time, at most a third of the lease, or 30 s. There is no limit to the tries."""

    jitter: Seconds | None = None
    """When the registry has forgotten everything, publishing again is spread over so many seconds
    at random, so that a thousand servers don't come at once. None: a third of the lease, at most
    5 s."""

    hold: Seconds | None = None
    """Seconds that instances which vanish are kept, from when the registry was last seen to have
    lost contact, memory or more than half of a service. None: twice the lease."""

    protect: StrictBool = True
    """Whether instances are held at all; False believes the registry, an empty list too."""

    snapshot: StrictBool | str = True
    """The file that serves a start without the registry. True: one for each registry in the user's
    cache directory. False: none."""

    @field_validator("backoff")
    @classmethod
    def _check_backoff(cls, backoff: object) -> object:
        if backoff is not None:
            checked(Backoff, backoff)
        return backoff

    @field_validator("snapshot")
    @classmethod
    def _check_snapshot(cls, snapshot: bool | str) -> bool | str:
        if snapshot == "":
            raise ConfigurationError("it must be a file, True or False, not ''")
        if isinstance(snapshot, str) and snapshot.strip().lower() in SWITCHES:
            raise ConfigurationError(
                f"it must be a file, true or false, not the text {snapshot!r}; write true or false "
                f"without quotes (in Python True or False), and a file of that name './{snapshot}'"
            )
        return snapshot

    @model_validator(mode="after")
    def _renews_in_time(self) -> Self:
        if self.renew is not None and to_ns(self.renew) >= to_ns(self.lease):
            raise ConfigurationError(
                f"renew ({self.renew}) must be less than lease ({self.lease}), or each instance is "
                "forgotten before it is renewed"
            )
        return self
