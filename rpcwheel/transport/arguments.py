"""Checks of the arguments of both channels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import grpc
from tenacity import wait_random_exponential

from rpcwheel.backoff import Backoff
from rpcwheel.durations import NEVER, to_ns
from rpcwheel.errors import ConfigurationError

if TYPE_CHECKING:
    from rpcwheel.durations import Duration

    Options = list[tuple[str, Any]]

__all__ = [
    "DEFAULT_BACKOFF",
    "checked_backoff",
    "checked_credentials",
    "checked_drain_ns",
    "checked_options",
    "checked_reason",
    "checked_target",
    "refuse_both",
]

OWN_CONNECTION: Final = ("grpc.use_local_subchannel_pool", 1)
"""Without it gRPC gives a new channel the connection, and the backoff, of another one to the same
target (measured on grpcio 1.85)."""

DEFAULT_BACKOFF: Final = wait_random_exponential(multiplier=1, max=60)
"""Full jitter: a thousand clients of a server that is down do not reconnect at once."""


def checked_target(target: object) -> str:
    """Give it back.

    Raises:
        TypeError, ConfigurationError: It is no string, or an empty one.
    """
    if not isinstance(target, str):
        raise TypeError(f'target must be a string such as "127.0.0.1:50051", not {target!r}')
    if not target:
        raise ConfigurationError('target must not be empty; give one such as "127.0.0.1:50051"')
    return target


def checked_credentials(credentials: object) -> None:
    """Raise `TypeError` if these are no credentials of a channel."""
    if not isinstance(credentials, grpc.ChannelCredentials):
        raise TypeError(
            f"credentials must be grpc.ChannelCredentials, not {credentials!r}; without any use "
            "insecure_channel"
        )


def refuse_both(connect: object, **others: object) -> None:
    """Check that `connect` is not given beside what it takes the place of.

    Raises:
        TypeError: One is of a wrong type.
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
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise ConfigurationError(
            f"{' and '.join(given)}: not together with connect, which makes the channel; give it "
            "there"
        )


def checked_options(options: object) -> Options:
    """Add the option that gives a channel a connection of its own. None is none, as with gRPC.

    Raises:
        TypeError: They are no pairs.
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
    """Make a `Backoff` of it.

    Raises:
        TypeError, ConfigurationError: As `Backoff`, with the argument's name.
    """
    try:
        return Backoff(wait)
    except (TypeError, ConfigurationError) as error:
        raise type(error)(f"backoff: {error}") from None


def checked_reason(reason: object) -> str:
    """Give it back.

    Raises:
        TypeError: It is no string.
    """
    if not isinstance(reason, str):
        raise TypeError(f"reason must be a string, not {reason!r}")
    return reason


def checked_drain_ns(drain_timeout: Duration | None) -> int:
    """How long calls in flight may go on, in nanoseconds: `NEVER` for None.

    Raises:
        TypeError, ConfigurationError: It is no length of time, or negative.
    """
    drain_ns = NEVER if drain_timeout is None else to_ns(drain_timeout, what="drain_timeout")
    if drain_ns < 0:
        raise ConfigurationError(
            "drain_timeout must be 0 seconds or more, or None for as long as it takes, not "
            f"{drain_timeout!r}"
        )
    return drain_ns
