"""What a call is made with, in a class that can be changed; and metadata in one form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import grpc

if TYPE_CHECKING:
    from collections.abc import Iterable

    Metadata = tuple[tuple[str, str | bytes], ...]

__all__ = ["AioDetails", "Details", "details_of", "details_with", "metadata_of", "with_attempt"]

ATTEMPTS_KEY: Final = "grpc-previous-rpc-attempts"
"""How a server learns that a call is a retry (gRFC A6). Where gRPC's own retries are on, as they
are by default, its core takes it away."""

RETRY_KEY: Final = "x-retry-attempt"
"""How it learns that in any case: what go-grpc-middleware's retries send."""


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


def details_of(given: Any) -> Details:
    """Make ours of any call details; attributes that are missing are None, as grpc takes them."""
    fields: Any = (getattr(given, name, None) for name in Details._fields)
    return Details(*fields)


def details_with(given: Any, timeout: float | None) -> Details:
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


def metadata_of(given: Iterable[tuple[str, str | bytes]] | None) -> Metadata:
    """Metadata as a tuple of pairs, from None, a list, a tuple or `grpc.aio.Metadata`."""
    return () if given is None else tuple((key, value) for key, value in given)


def with_attempt(given: Iterable[tuple[str, str | bytes]] | None, number: int) -> Metadata:
    """The metadata of the `number`-th try: from the second on it says how many went before.

    That of the caller gives way: a server that hands on what it got may itself have been retried.
    """
    pairs = metadata_of(given)
    if number <= 1:
        return pairs
    others = (pair for pair in pairs if pair[0] not in {ATTEMPTS_KEY, RETRY_KEY})
    before = str(number - 1)
    return (*others, (ATTEMPTS_KEY, before), (RETRY_KEY, before))
