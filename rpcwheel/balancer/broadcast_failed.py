"""The part that the broadcasts of both worlds have in common: their error, and names of servers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from rpcwheel.errors import ConfigurationError, safe_repr

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class BroadcastFailed(grpc.RpcError):
    """A broadcast failed on at least one server; `responses` has the responses of the others.

    Its code and metadata are those of the first error, in the order of the names in `errors`.
    """

    def __init__(
        self, method: str, responses: Mapping[str, Any], errors: Mapping[str, grpc.RpcError]
    ) -> None:
        """Make the error.

        Args:
            method: The full name of the method.
            responses: The responses by the name of the server.
            errors: The errors by the name of the server; at least one.
        """
        grpc.RpcError.__init__(self)
        self.method = method
        self.responses = dict(responses)
        """The responses by the name of the server; see `BroadcastChannel`."""
        self.errors = dict(errors)
        """The errors by the name of the server."""
        self._first: Any = self.errors[min(self.errors)]

    def code(self) -> grpc.StatusCode:
        """Return the status code of the first error."""
        code: grpc.StatusCode = self._first.code()
        return code

    def details(self) -> str:
        """Return how many servers failed, and the status of each."""
        return str(self)

    def initial_metadata(self) -> Any:
        """Return the initial metadata of the first error."""
        return self._first.initial_metadata()

    def trailing_metadata(self) -> Any:
        """Return the trailing metadata of the first error."""
        return self._first.trailing_metadata()

    def __str__(self) -> str:
        errors: dict[str, Any] = dict(sorted(self.errors.items()))
        texts = [f"{name}: {error.code().name} {error.details()}" for name, error in errors.items()]
        count = len(self.errors) + len(self.responses)
        return f"{self.method}: {len(self.errors)} of {count} servers failed: {'; '.join(texts)}"

    @safe_repr
    def __repr__(self) -> str:
        return f"BroadcastFailed({str(self)!r})"


def distinct_names(names: Iterable[str]) -> list[str]:
    """Return the names in their order; the second `"name"` becomes `"name #2"`, and so on."""
    counts: dict[str, int] = {}
    distinct = []
    for name in names:
        counts[name] = number = counts.get(name, 0) + 1
        distinct.append(name if number == 1 else f"{name} #{number}")
    return distinct


class UnaryOnly:
    """Refuses calls with streams. Not their multicallables: stubs make those for all methods."""

    def _refuse(self, method: str, *_: Any, **__: Any) -> Any:
        """Make a multicallable whose calls are refused."""
        return partial(_refuse, f"{method} is a stream; a BroadcastChannel is for unary calls")

    unary_stream = stream_unary = stream_stream = _refuse


def _refuse(text: str, *_: Any, **__: Any) -> NoReturn:
    raise ConfigurationError(text)


def checked_broadcast(
    channel: Any, balanced: type[Any], plain: type[Any], names: tuple[str, str]
) -> Any:
    """Check the argument of a `BroadcastChannel`.

    Args:
        channel: The argument.
        balanced: The `BalancedChannel` of this world.
        plain: The class of channels of this world.
        names: The modules of this world and of the other one, for errors.

    Returns:
        A balanced channel, or a tuple of channels.

    Raises:
        TypeError: The argument is neither.
        ConfigurationError: There are no channels.
    """
    if isinstance(channel, balanced):
        return channel
    if isinstance(channel, (list, tuple)) and all(
        isinstance(element, plain) for element in channel
    ):
        if not channel:
            raise ConfigurationError("channel must not be an empty list")
        return tuple(channel)
    here, other = names
    hint = f"for other channels use {other}.BroadcastChannel"
    if isinstance(channel, plain):
        hint = (
            "interceptors hide the subchannels of a channel, so apply them to the result: "
            "kit.intercept_channel(BroadcastChannel(channel))"
        )
    raise TypeError(
        f"channel must be a {here}.BalancedChannel, or a list of channels, not {channel!r}; {hint}"
    )
