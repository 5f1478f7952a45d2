"""Settings of a kit from a service config of gRPC, which gRPC in all languages reads.

The format is the JSON form of `grpc/service_config/service_config.proto`, with the rules of gRFC A2
(names) and gRFC A6 (retries and hedging). A config that gRPC refuses is refused. A warning names
the parts that are not applied, such as `loadBalancingConfig`, so that Go and Java can read the same
file.

In gRPC only the most specific entry applies to a method, as a whole, but policies are inherited
setting by setting. Therefore each entry sets everything that a service config can set, to None
where it has no value.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictStr,
    ValidationError,
    model_validator,
)
from pydantic.alias_generators import to_camel

from rpcwheel.backoff import JitteredWait
from rpcwheel.call.policy import HedgingPolicy, MethodPolicy, RetryPolicy, RetryThrottling
from rpcwheel.errors import ConfigurationError, short_repr
from rpcwheel.policy import messages_of, path_of, refusal
from rpcwheel.rpc import CODES, STATUS_CODES

from .config import checked_tree, read_text
from .policy import KitPolicy

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_ATTEMPTS: Final = 5
"""A higher `maxAttempts` counts as this (gRFC A6)."""

MAX_DURATION_S: Final = 315_576_000_000
"""The longest duration of protobuf: 10,000 years."""

DURATION: Final = re.compile(r"\d{1,12}(\.\d{1,9})?s", re.ASCII)
SERVICE: Final = re.compile(r"[\w.-]+", re.ASCII)
METHOD: Final = re.compile(r"\w+", re.ASCII)


def _not_bool(value: object) -> object:
    if isinstance(value, bool):  # which pydantic takes for 1 or 0
        raise ConfigurationError(f"it must be a number, not {value!r}")
    return value


def _seconds(value: object) -> float:
    if not isinstance(value, str) or not DURATION.fullmatch(value):
        raise ConfigurationError(
            f'it must be a duration in seconds, such as "1.5s", not {short_repr(value)}'
        )
    seconds = float(value[:-1])
    if seconds > MAX_DURATION_S:
        raise ConfigurationError(f"it must be not more than {MAX_DURATION_S:,} s, not {value!r}")
    return seconds


def _code(value: object) -> str:
    """Return the name of a status code, which is given by name, in any case, or by number."""
    name = value.upper() if isinstance(value, str) else None
    if type(value) is int and 0 <= value < len(STATUS_CODES):
        name = STATUS_CODES[value]
    if name not in CODES:
        raise ConfigurationError(
            "it must be a status code other than OK, by name or number, such as "
            f'"UNAVAILABLE" or 14, not {short_repr(value)}'
        )
    return name


Integer = Annotated[int, BeforeValidator(_not_bool)]
Number = Annotated[float, BeforeValidator(_not_bool)]
Delay = Annotated[float, BeforeValidator(_seconds)]
Duration = Annotated[float, BeforeValidator(_seconds), Field(gt=0)]
Code = Annotated[str, BeforeValidator(_code)]


class _Part(BaseModel):
    """A part of a service config. Unknown keys are in `model_extra`."""

    model_config = ConfigDict(alias_generator=to_camel, extra="allow", frozen=True)


class _Name(_Part):
    service: StrictStr = ""
    method: StrictStr = ""

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.model_extra:  # a misspelled method would mean all methods of the service
            raise ConfigurationError(
                f"a name has no {', '.join(map(repr, self.model_extra))}; it has service and method"
            )
        if self.method and not self.service:
            raise ConfigurationError("a method needs a service; `{}` names all methods")
        for value, form in ((self.service, SERVICE), (self.method, METHOD)):
            if value and not form.fullmatch(value):
                raise ConfigurationError(
                    f"{short_repr(value)} is not a valid name, such as "
                    '{"service": "shop.Orders", "method": "Get"}; patterns are not allowed'
                )
        return self

    @property
    def pattern(self) -> str:
        """The pattern of `methods` for this name."""
        if not self.service:
            return "*"
        return f"/{self.service}/{self.method or '*'}"


class _Retry(_Part):
    max_attempts: Annotated[Integer, Field(ge=2)]
    initial_backoff: Duration
    max_backoff: Duration
    backoff_multiplier: Annotated[Number, Field(gt=0, allow_inf_nan=False)]
    retryable_status_codes: Annotated[list[Code], Field(min_length=1)]

    def policy(self, throttling: RetryThrottling | None) -> RetryPolicy:
        return RetryPolicy(
            retry_on=self.retryable_status_codes,
            max_attempts=min(self.max_attempts, MAX_ATTEMPTS),
            backoff=JitteredWait(  # from 0.8 to 1.2 of the wait, as in gRFC A6
                initial=1.2 * self.initial_backoff,
                max=1.2 * self.max_backoff,
                multiplier=self.backoff_multiplier,
                jitter=0.4 / 1.2,
            ),
            retry_budget=throttling,
        )


class _Hedging(_Part):
    max_attempts: Annotated[Integer, Field(ge=2)]
    hedging_delay: Delay = 0.0
    non_fatal_status_codes: list[Code] = []

    def policy(self, throttling: RetryThrottling | None) -> HedgingPolicy:
        return HedgingPolicy(
            delay=self.hedging_delay,
            max_attempts=min(self.max_attempts, MAX_ATTEMPTS),
            non_fatal_codes=self.non_fatal_status_codes,
            retry_budget=throttling,
        )


class _Throttling(_Part):
    max_tokens: Annotated[Integer, Field(gt=0, le=1000)]
    token_ratio: Annotated[Number, Field(ge=0.001, allow_inf_nan=False)]


class _MethodConfig(_Part):
    name: list[_Name] = []
    timeout: Duration | None = None
    wait_for_ready: StrictBool | None = None
    retry_policy: _Retry | None = None
    hedging_policy: _Hedging | None = None

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.retry_policy is not None and self.hedging_policy is not None:
            raise ConfigurationError("only one of retryPolicy and hedgingPolicy may be given")
        return self

    def settings(self, throttling: RetryThrottling | None) -> dict[str, Any]:
        """Everything that a service config can set; None for what this entry does not set."""
        retry, hedging = self.retry_policy, self.hedging_policy
        return {
            "timeout": self.timeout,
            "wait_for_ready": self.wait_for_ready,
            "retry": retry and retry.policy(throttling),
            "hedging": hedging and hedging.policy(throttling),
            "idempotent": retry is not None or hedging is not None,
        }


class _ServiceConfig(_Part):
    method_config: list[_MethodConfig] = []
    retry_throttling: _Throttling | None = None

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        seen: set[str] = set()
        for number, entry in enumerate(self.method_config):
            for name in entry.name:
                if name.pattern in seen:
                    place = path_of(("methodConfig", number, "name"))
                    raise ConfigurationError(
                        f"{place}: {name.pattern!r} has an entry already; each name may be given "
                        "once (gRFC A2)"
                    )
                seen.add(name.pattern)
        return self

    def policy(self) -> KitPolicy:
        throttling = None
        if (throttle := self.retry_throttling) is not None:
            throttling = RetryThrottling(
                max_tokens=throttle.max_tokens, token_ratio=throttle.token_ratio
            )
        general: dict[str, Any] = {}
        methods: dict[str, MethodPolicy] = {}
        for entry in self.method_config:
            settings = entry.settings(throttling)
            for name in entry.name:
                if name.pattern == "*":
                    general = settings
                else:
                    methods[name.pattern] = MethodPolicy(**settings)
        return KitPolicy(**general, methods=methods)


def policy_from_service_config(config: str | Mapping[str, Any] | os.PathLike[str]) -> KitPolicy:
    """Make a policy from a service config of gRPC.

    Args:
        config: The JSON text, the mapping that it stands for, or the path of a file (a
            `pathlib.Path`, not a string).

    Raises:
        ConfigurationError: It can't be read, or gRPC would refuse it.
        TypeError: It is of another type.
    """
    where, tree = _read(config)
    tree = _without_null(checked_tree(tree, where))
    try:
        parsed = _ServiceConfig.model_validate(tree)
        policy = parsed.policy()
    except ValidationError as error:
        messages = (f"{where}: {text}" for _, text in messages_of(error, _ServiceConfig))
        raise refusal(messages, error.error_count()) from None
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error}") from None
    ignored = ", ".join(_unknown(parsed, ()))
    if ignored:
        warnings.warn(
            f"{where}: rpcwheel does not apply {ignored}; gRPC may apply it, if the channel gets "
            "it as its option 'grpc.service_config', without the timeouts and retries",
            stacklevel=3,  # of the caller of `Kit.from_service_config`
        )
    return policy


def _read(config: object) -> tuple[str, dict[str, Any]]:
    """Return the name of a config for messages, and its content."""
    if isinstance(config, Mapping):
        return "service config", dict(config)
    if isinstance(config, str):
        where, text = "service config", config
        hint = "; for a file give a pathlib.Path"
    elif isinstance(config, os.PathLike):
        where, hint = os.fspath(config), ""
        text = read_text(Path(config))
    else:
        raise TypeError(
            "a service config must be JSON text, a mapping or a pathlib.Path, "
            f"not {short_repr(config)}"
        )
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{where}: not valid JSON: {error}{hint}") from None
    if not isinstance(tree, dict):
        raise ConfigurationError(
            f'{where}: it must be an object, such as {{"methodConfig": [...]}}, '
            f"not {short_repr(tree)}"
        )
    return where, tree


def _without_null(value: Any) -> Any:
    """Return the value without nulls, which mean the same as keys that are not given."""
    if isinstance(value, dict):
        return {name: _without_null(part) for name, part in value.items() if part is not None}
    if isinstance(value, (list, tuple)):
        return [_without_null(part) for part in value]
    return value


def _unknown(part: _Part, place: tuple[str | int, ...]) -> Iterator[str]:
    """Yield the places of all unknown keys."""
    for name in part.model_extra or ():
        yield path_of((*place, name))
    for name in type(part).model_fields:
        value, here = getattr(part, name), (*place, to_camel(name))
        if isinstance(value, _Part):
            yield from _unknown(value, here)
        elif isinstance(value, list):
            for number, inner in enumerate(value):
                if isinstance(inner, _Part):
                    yield from _unknown(inner, (*here, number))
