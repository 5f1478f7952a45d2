"""What a call is made with, in a class that can be changed; and metadata in one form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import grpc

if TYPE_CHECKING:
    from collections.abc import Iterable

    Metadata = tuple[tuple[str, str | bytes], ...]

__all__ = ["AioDetails", "Details", "aio_details", "details_of", "details_with", "metadata_of"]

ATTEMPTS_KEY = "grpc-previous-rpc-attempts"
"""How a server learns that a call is a retry (gRFC A6)."""


class Details(
    NamedTuple(
        "_Details",
        [
            ("method", str),
            ("timeout", "float | None"),
            ("metadata", "Metadata | None"),
            ("credentials", "grpc.CallCredentials | None"),
            ("wait_for_ready", "bool | None"),
            ("compression", "grpc.Compression | None"),
        ],
    ),
    grpc.ClientCallDetails,
):
    """`grpc`'s call details; `_replace` makes a changed copy."""


def details_of(given: Any) -> Details:  # noqa: ANN401 - whatever an outer interceptor made
    """Make ours of any call details; attributes that are missing are None, as grpc takes them."""
    fields: Any = (getattr(given, name, None) for name in Details._fields)
    return Details(*fields)


def details_with(given: Any, timeout: float | None) -> Details:  # noqa: ANN401
    """The same with another timeout. In one go where nothing is missing: it runs for every call."""
    try:
        return Details(
            given.method,
            timeout,
            given.metadata,
            given.credentials,
            given.wait_for_ready,
            given.compression,
        )
    except AttributeError:
        return details_of(given)._replace(timeout=timeout)


class AioDetails(grpc.aio.ClientCallDetails):
    """`grpc.aio`'s call details, a namedtuple too."""


def aio_details(given: Any) -> AioDetails:  # noqa: ANN401
    """Make ours of any call details of grpc.aio."""
    return AioDetails(*(getattr(given, name, None) for name in AioDetails._fields))


def metadata_of(given: Iterable[tuple[str, str | bytes]] | None) -> Metadata:
    """Metadata as a tuple of pairs, from None, a list, a tuple or `grpc.aio.Metadata`."""
    return () if given is None else tuple((key, value) for key, value in given)


def with_attempt(given: Iterable[tuple[str, str | bytes]] | None, number: int) -> Metadata:
    """The metadata of the `number`-th try: from the second on it says how many went before."""
    pairs = metadata_of(given)
    return pairs if number <= 1 else (*pairs, (ATTEMPTS_KEY, str(number - 1)))
