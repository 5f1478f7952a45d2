"""Arguments of both worlds' balanced channels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rpcwheel.errors import ConfigurationError
from rpcwheel.transport.arguments import checked_options

if TYPE_CHECKING:
    import grpc

__all__ = ["checked_broadcast", "checked_callback", "protocol_for", "subchannel_options"]

MAX_RECONNECT_BACKOFF: Final = ("grpc.max_reconnect_backoff_ms", 3_000)
"""gRPC's default lets a server that was away for long wait up to two minutes for its calls."""


def subchannel_options(options: object) -> list[tuple[str, Any]]:
    """The options of each subchannel's connection.

    Raises:
        TypeError: They are no pairs.
    """
    checked = checked_options(options)
    given = {name for name, _ in checked}
    return checked if MAX_RECONNECT_BACKOFF[0] in given else [*checked, MAX_RECONNECT_BACKOFF]


def checked_callback(callback: Any, name: str) -> Any:
    """Return it.

    Raises:
        TypeError: It is neither None nor callable.
    """
    if callback is not None and not callable(callback):
        raise TypeError(f"{name} must be callable as {name}(subchannel), not {callback!r}")
    return callback


def protocol_for(connect: object, credentials: grpc.ChannelCredentials | None) -> str | None:
    """Which instances a channel may use; None: all, as the user's `connect` decides how."""
    if connect is not None:
        return None
    return "grpc" if credentials is None else "grpcs"


def checked_broadcast(
    channel: Any, balanced: type[Any], plain: type[Any], names: tuple[str, str]
) -> Any:
    """Return what a `BroadcastChannel` is made of: a balanced channel, or a tuple of channels.

    Args:
        channel: What the user gave.
        balanced: The `BalancedChannel` of this world.
        plain: The channels of this world.
        names: Of the modules of this world and of the other one, for errors.

    Raises:
        TypeError: It is neither.
        ConfigurationError: There are no channels.
    """
    if isinstance(channel, balanced):
        return channel
    if isinstance(channel, (list, tuple)) and all(isinstance(one, plain) for one in channel):
        if not channel:
            raise ConfigurationError("channel must not be an empty list")
        return tuple(channel)
    here, other = names
    hint = f"for channels of the other kind there is {other}.BroadcastChannel"
    if isinstance(channel, plain):
        hint = (
            "interceptors hide the subchannels of a channel, so put them in front: "
            "kit.intercept_channel(BroadcastChannel(channel))"
        )
    raise TypeError(
        f"channel must be a {here}.BalancedChannel, or a list of channels, not {channel!r}; {hint}"
    )
