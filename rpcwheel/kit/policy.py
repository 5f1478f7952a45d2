"""`KitPolicy`, the settings of a kit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Self

from pydantic import BeforeValidator, Field, SecretStr, StrictInt, StrictStr, model_validator

from rpcwheel.call.failback_policy import same_name_problem
from rpcwheel.call.policy import CallPolicy
from rpcwheel.errors import ConfigurationError
from rpcwheel.heartbeat.policy import HeartbeatPolicy
from rpcwheel.idle.policy import IdlePolicy
from rpcwheel.instance import checked_host
from rpcwheel.policy import checked, or_short, path_of
from rpcwheel.registry.policy import RegistryPolicy
from rpcwheel.status.access import LOOPBACK, check_access, checked_token

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta
    from typing import Unpack

    from rpcwheel.call.failback_policy import FailbackPolicy
    from rpcwheel.call.policy import CallSettings
    from rpcwheel.policy import Place

    class KitSettings(CallSettings, total=False):
        """The arguments that `KitPolicy(...)` accepts, which is more than the fields hold."""

        heartbeat: float | timedelta | HeartbeatPolicy | None
        idle: float | timedelta | IdlePolicy | None
        registry_policy: float | timedelta | RegistryPolicy | None
        status_port: int | None
        status_host: str
        status_token: str | SecretStr | None


__all__ = ["PREFIX", "KitPolicy"]

PREFIX: Final = "RPCWHEEL_"
"""How the names of the variables begin that `Kit.from_env` reads."""


def _host(value: object) -> object:
    return checked_host(value) if isinstance(value, str) else value


def _token(value: object) -> object:
    """Check a token without showing it in an error."""
    token = value.get_secret_value() if isinstance(value, SecretStr) else value
    return None if token is None else SecretStr(checked(checked_token, token))


class KitPolicy(CallPolicy):
    """A `CallPolicy`, and settings for connections, servers and registries.

    Example::

        KitPolicy(timeout=2.0, heartbeat=10.0, idle=IdlePolicy(idle_timeout=180.0, max_age=3600.0))
    """

    heartbeat: Annotated[HeartbeatPolicy | None, or_short(HeartbeatPolicy)] = None
    """A `HeartbeatPolicy`, or its `interval` as seconds or a `timedelta`: send heartbeats on the
    channels that the kit makes or intercepts, when they are silent. The dead connection of a
    `ReconnectingChannel` is replaced; that of any other channel is only reported."""

    idle: Annotated[IdlePolicy | None, or_short(IdlePolicy)] = None
    """An `IdlePolicy`, or its `idle_timeout` as seconds or a `timedelta`: close idle connections of
    the kit's servers."""

    registry_policy: Annotated[RegistryPolicy | None, or_short(RegistryPolicy)] = None
    """A `RegistryPolicy`, or its `lease_ttl` as seconds or a `timedelta`, for the registries that
    the kit opens. None: `RegistryPolicy()`."""

    status_port: Annotated[StrictInt, Field(ge=0, le=65535)] | None = None
    """The port at which the kit serves the live view: a page, `/status.json`, and `/metrics`. 0:
    any free port. None: it does not."""

    status_host: Annotated[StrictStr, BeforeValidator(_host)] = LOOPBACK
    """The name or address of this machine at which the live view is served. One that other machines
    can reach needs `status_token`."""

    status_token: Annotated[SecretStr | None, BeforeValidator(_token)] = None
    """What clients of the live view must know, 16 characters or more: they send the header
    `Authorization: Bearer ...`. The live view is not encrypted."""

    if TYPE_CHECKING:

        def __init__(self, **settings: Unpack[KitSettings]) -> None: ...

    @model_validator(mode="after")
    def _check_status_access(self) -> Self:
        if self.status_port is not None:
            check_access(self.status_host, has_token=self.status_token is not None)
        return self


def journal_problems(policy: KitPolicy) -> Iterator[tuple[Place, str]]:
    """Yield the place and the message of each problem of journals. Connects to none.

    A kit and `rpcwheel config check` refuse these.

    Raises:
        ExtraMissing: A package that a journal needs is not installed; the message says which.
    """
    policy_of_queue: dict[str, FailbackPolicy] = {}
    problem_of_url: dict[str, str] = {}
    for pattern, settings in (("*", policy), *policy.methods.items()):
        failback = settings.failback
        if failback is None or failback.journal is None:
            continue
        place: Place = ("failback",) if settings is policy else ("methods", pattern, "failback")
        if failback.journal not in problem_of_url:
            problem_of_url[failback.journal] = _journal_problem(failback.journal)
        if problem_of_url[failback.journal]:
            here: Place = (*place, "journal")
            yield here, f"{path_of(here)}: {problem_of_url[failback.journal]}"
        name = failback.name or pattern
        if policy_of_queue.setdefault(name, failback) != failback:
            yield place, f"{path_of(place)}: {same_name_problem(name)}"


def _journal_problem(url: str) -> str:
    """Return why a journal cannot be opened; "" if it can."""
    from rpcwheel.journal import open_journal_backend

    try:
        open_journal_backend(url).close()
    except ConfigurationError as error:
        return str(error)
    return ""
