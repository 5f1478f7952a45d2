"""Checks of the arguments of `ReconnectingChannel`, for both worlds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import grpc

from rpcwheel.backoff import Backoff, JitteredWait
from rpcwheel.durations import NEVER, to_ns
from rpcwheel.errors import ConfigurationError, short_repr

if TYPE_CHECKING:
    from rpcwheel.durations import Duration

    Options = list[tuple[str, Any]]

OWN_CONNECTION: Final = ("grpc.use_local_subchannel_pool", 1)
"""Without this option gRPC shares a connection and its backoff between channels to the same target
(measured on grpcio 1.85)."""

DEFAULT_BACKOFF: Final = JitteredWait(initial=1.0, max=60.0)
"""Half of it is random, so that a thousand clients of a failed server do not reconnect together."""


def checked_target(target: object) -> str:
    """Return `target`.

    Raises:
        TypeError: It is not a string.
        ConfigurationError: It is empty.
    """
    if not isinstance(target, str):
        raise TypeError(
            f'target must be a string such as "127.0.0.1:50051", not {short_repr(target)}'
        )
    if not target:
        raise ConfigurationError('target must not be empty; give one such as "127.0.0.1:50051"')
    return target


def checked_credentials(credentials: object) -> None:
    """Raise `TypeError` if these are not channel credentials."""
    if not isinstance(credentials, grpc.ChannelCredentials):
        raise TypeError(
            f"credentials must be grpc.ChannelCredentials, not {credentials!r}; without any "
            "use insecure_channel"
        )


def refuse_both(connect: object, **others: object) -> None:
    """Check that `connect` is not given together with the arguments that it replaces.

    Raises:
        TypeError: An argument is of the wrong type.
        ConfigurationError: Both were given.
    """
    credentials, compression = others["credentials"], others["compression"]
    if credentials is not None and not isinstance(credentials, grpc.ChannelCredentials):
        raise TypeError(f"credentials must be grpc.ChannelCredentials or None, not {credentials!r}")
    if compression is not None and not isinstance(compression, grpc.Compression):
        raise TypeError(f"compression must be a grpc.Compression or None, not {compression!r}")
    if connect is None:
        return
    if not callable(connect):
        raise TypeError(f"connect must be callable as connect(options), not {connect!r}")
    refused = [name for name, value in others.items() if value is not None]
    if refused:
        raise ConfigurationError(
            f"{' and '.join(refused)}: not allowed together with connect; pass it to the channel "
            "that connect creates"
        )


def checked_options(options: object) -> Options:
    """Add the option that gives a channel its own connection. None: no options, as with gRPC.

    Raises:
        TypeError: They are not pairs of a name and a value.
    """
    if options is None:
        options = ()
    if not isinstance(options, (list, tuple)) or not all(map(_is_option, options)):
        raise TypeError(
            'options must be pairs of a name and a value, such as [("grpc.keepalive_time_ms", '
            f"10000)], not {options!r}"
        )
    return [*(pair for pair in options if pair[0] != OWN_CONNECTION[0]), OWN_CONNECTION]


def _is_option(pair: object) -> bool:
    match pair:
        case (str() | bytes(), _):
            return True
    return False


def checked_backoff(wait: Any) -> Backoff:
    """Create a `Backoff`.

    Raises:
        TypeError, ConfigurationError: As `Backoff`, with the name of the argument.
    """
    try:
        return Backoff(wait)
    except (TypeError, ConfigurationError) as error:
        raise type(error)(f"backoff: {error}") from None


def checked_reason(reason: object) -> str:
    """Return `reason`.

    Raises:
        TypeError: It is not a string.
    """
    if not isinstance(reason, str):
        raise TypeError(f"reason must be a string, not {reason!r}")
    return reason


def checked_drain_ns(drain_timeout: Duration | None) -> int:
    """Convert to nanoseconds; None is `NEVER`.

    Raises:
        TypeError: It is not a duration.
        ConfigurationError: It is negative or NaN.
    """
    drain_ns = NEVER if drain_timeout is None else to_ns(drain_timeout, subject="drain_timeout")
    if drain_ns < 0:
        raise ConfigurationError(
            f"drain_timeout must be 0 seconds or more, or None for no limit, not {drain_timeout!r}"
        )
    return drain_ns


def checked_grace(grace: float | None) -> float | None:
    """Return `grace`, the argument of `close` with grpc.aio.

    Raises:
        ConfigurationError: It is negative.
    """
    if grace is not None and grace < 0:
        raise ConfigurationError(f"grace must be 0 seconds or more, or None, not {grace!r}")
    return grace
