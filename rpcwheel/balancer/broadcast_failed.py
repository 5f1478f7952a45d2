"""What broadcasts of both worlds have in common: their error, and how servers are named."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from rpcwheel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["BroadcastFailed", "UnaryOnly", "checked_broadcast", "distinct_names"]


class BroadcastFailed(grpc.RpcError):
    """A broadcast failed on one server at least; the others have carried it out.

    Its code and metadata are those of the first error, in the order of the keys of `errors`.
    """

    def __init__(
        self, method: str, responses: Mapping[str, Any], errors: Mapping[str, grpc.RpcError]
    ) -> None:
        """Make it.

        Args:
            method: The method's full name.
            responses: By server, with the keys that `BroadcastChannel` uses.
            errors: By server; one at least.
        """
        grpc.RpcError.__init__(self)
        self.method = method
        self.responses = dict(responses)
        """By server, with the keys that `BroadcastChannel` uses."""
        self.errors = dict(errors)
        """By server, with the same keys."""
        self._first: Any = self.errors[min(self.errors)]

    def code(self) -> grpc.StatusCode:
        """The status code of the first error."""
        code: grpc.StatusCode = self._first.code()
        return code

    def details(self) -> str:
        """How many servers failed, and the status of each."""
        return str(self)

    def initial_metadata(self) -> Any:
        """Of the first error."""
        return self._first.initial_metadata()

    def trailing_metadata(self) -> Any:
        """Of the first error."""
        return self._first.trailing_metadata()

    def __str__(self) -> str:
        errors: dict[str, Any] = dict(sorted(self.errors.items()))
        texts = [f"{name}: {error.code().name} {error.details()}" for name, error in errors.items()]
        count = len(self.errors) + len(self.responses)
        return f"{self.method}: {len(self.errors)} of {count} servers failed: {'; '.join(texts)}"

    def __repr__(self) -> str:
        return f"BroadcastFailed({str(self)!r})"


def distinct_names(names: Iterable[str]) -> list[str]:
    """Return the names in their order; the second of the same name is `"name #2"`, and so on."""
    counts: dict[str, int] = {}
    distinct = []
    for name in names:
        counts[name] = number = counts.get(name, 0) + 1
        distinct.append(name if number == 1 else f"{name} #{number}")
    return distinct


class UnaryOnly:
    """Refuses streams when they are called: stubs make multicallables for all their methods."""

    def _refuse(self, method: str, *_: Any, **__: Any) -> Any:
        """Make a multicallable that refuses to be called: only unary calls are broadcast."""
        return partial(_refuse, f"{method} streams; a BroadcastChannel is for unary calls")

    unary_stream = stream_unary = stream_stream = _refuse


def _refuse(text: str, *_: Any, **__: Any) -> NoReturn:
    raise ConfigurationError(text)


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
