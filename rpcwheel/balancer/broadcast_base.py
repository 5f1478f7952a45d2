"""The part that the broadcasts of both worlds have in common: their error, and names of servers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

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


class BroadcastBase:
    """The part of a `BroadcastChannel` that `grpc` and `grpc.aio` have in common.

    Refuses calls with streams, but not their multicallables: stubs make those for all methods.
    """

    _modules: ClassVar[tuple[str, str]]
    """The modules of this API and of the other one, for errors."""
    _balanced_class: ClassVar[type[Any]]
    _plain_class: ClassVar[type[Any]]
    """The class of channels of gRPC."""

    def __init__(self, channel: Any) -> None:
        """Make the channel. Closing it does not close the given channels.

        Args:
            channel: A `BalancedChannel`, or a list of channels, one for each server.

        Raises:
            TypeError, ConfigurationError: `channel` is neither.
        """
        self._channel = self._checked(channel)

    def _checked(self, channel: Any) -> Any:
        """Return the balanced channel, or a tuple of channels."""
        if isinstance(channel, self._balanced_class):
            return channel
        if isinstance(channel, (list, tuple)) and all(
            isinstance(element, self._plain_class) for element in channel
        ):
            if not channel:
                raise ConfigurationError("channel must not be an empty list")
            return tuple(channel)
        here, other = self._modules
        hint = f"for other channels use {other}.BroadcastChannel"
        if isinstance(channel, self._plain_class):
            hint = (
                "interceptors hide the subchannels of a channel, so apply them to the result: "
                "kit.intercept_channel(BroadcastChannel(channel))"
            )
        raise TypeError(
            f"channel must be a {here}.BalancedChannel, or a list of channels, not {channel!r}; "
            f"{hint}"
        )

    def _balanced(self, use: str) -> Any:
        """Return the `BalancedChannel`.

        Raises:
            ConfigurationError: It was made of several channels.
        """
        if isinstance(self._channel, tuple):
            raise ConfigurationError(f"each of the channels has its own state; {use}")
        return self._channel

    def _refuse(self, method: str, *_: Any, **__: Any) -> Any:
        """Make a multicallable whose calls are refused."""
        return partial(_refuse, f"{method} is a stream; a BroadcastChannel is for unary calls")

    unary_stream = stream_unary = stream_stream = _refuse


def _refuse(text: str, *_: Any, **__: Any) -> NoReturn:
    raise ConfigurationError(text)
