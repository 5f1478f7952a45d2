"""What the calls of a client add to metadata, and the result of a failed attempt.

* Calls have a criticality (`call_metadata`).
* Attempts after the first carry the number of previous attempts (gRFC A6, `with_attempt`).
* A failed attempt may carry the pushback of its server (gRFC A6, `pushback_ns`), and the proof that
  the server has refused it before its handler (`result_of`).

The proof is a nonce: a value that no other attempt has. Attempts of a method that is retried but
not idempotent have one. A server that refuses such an attempt returns it (`REFUSED_KEY`). So the
client knows that this server has refused this attempt, and that a handler has not passed on a
refusal which it got from another server.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from rpcwheel._grpc.calls import metadata_of, metadata_tuple, value_of, was_not_sent
from rpcwheel.rpc import (
    CODES,
    CRITICALITY,
    CRITICALITY_KEY,
    NONCE_KEY,
    PUSHBACK_KEY,
    REFUSAL_CODES,
    REFUSED_KEY,
    AttemptResult,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

Metadata: TypeAlias = "tuple[tuple[str, str | bytes], ...]"

ATTEMPTS_KEY: Final = "grpc-previous-rpc-attempts"
"""The number of previous attempts (gRFC A6). gRPC's core removes it if its own retries are enabled,
which is the default."""

RETRY_KEY: Final = "x-retry-attempt"
"""The number of previous attempts, under the key of go-grpc-middleware. gRPC's core keeps it."""

FORBID_NS: Final = -1
"""The pushback of a server that asks for no further attempt."""

MAX_PUSHBACK_DIGITS: Final = 12
"""Longer values are invalid. 10**12 ms are 30 years, and Python refuses to parse thousands of
digits."""


# --- What is sent ---


def new_nonce() -> str:
    """Return a random nonce for an attempt; takes 0.9 µs."""
    return os.urandom(8).hex()


def call_metadata(metadata: Any, label: str | None) -> Any:
    """Return the metadata of a call: with its criticality, and without a nonce of another call.

    A handler may copy the metadata of the call that it serves. A nonce in it would let the client
    of that call take a refusal that the handler passes on for one of this server.

    Args:
        metadata: As given by the caller; it is read more than once. If it has a criticality, that
            counts. Returned as it is if nothing is to be changed.
        label: The criticality of the policy; None for that of the call being served.
    """
    if label is None:
        level = CRITICALITY.get()
        if level is not None:
            label = level.label
    if metadata is not None:
        for pair in metadata:
            if pair[0] == NONCE_KEY:
                return _with_criticality(
                    (other for other in metadata if other[0] != NONCE_KEY), label
                )
    return metadata if label is None else _with_criticality(metadata, label)


def _with_criticality(
    metadata: Iterable[tuple[str, str | bytes]] | None, label: str | None
) -> Metadata:
    pairs = metadata_tuple(metadata)
    if label is None or any(key == CRITICALITY_KEY for key, _ in pairs):
        return pairs
    return (*pairs, (CRITICALITY_KEY, label))


def with_attempt(
    metadata: Iterable[tuple[str, str | bytes]] | None, number: int, nonce: str | None = None
) -> Metadata:
    """Return the metadata of an attempt; from the second on with the number of previous attempts.

    From the second attempt on, values that the caller gave are replaced: a server may pass on the
    metadata of a call that was itself a retry.
    """
    pairs = () if metadata is None else tuple((key, value) for key, value in metadata)
    if nonce is not None:
        pairs = (*pairs, (NONCE_KEY, nonce))
    if number <= 1:
        return pairs
    others = (pair for pair in pairs if pair[0] not in {ATTEMPTS_KEY, RETRY_KEY})
    before = str(number - 1)
    return (*others, (ATTEMPTS_KEY, before), (RETRY_KEY, before))


# --- What a failure says ---


def pushback_ns(trailing: Iterable[tuple[str, str | bytes]] | None) -> int | None:
    """Return how long the server asks to wait before a retry; None if it does not ask.

    `FORBID_NS` if it asks for no retry, by a value that is not a number of milliseconds (gRFC A6):
    negative, invalid, or with more than `MAX_PUSHBACK_DIGITS` digits.
    """
    for key, value in trailing or ():
        if key == PUSHBACK_KEY:
            text = value.decode("ascii", "replace") if isinstance(value, bytes) else str(value)
            is_digits = text.isascii() and text.isdecimal()
            is_valid = is_digits and len(text) <= MAX_PUSHBACK_DIGITS
            return int(text) * 1_000_000 if is_valid else FORBID_NS
    return None


def result_of(
    error: Any, *, committed: bool = False, nonce: str | None = None, server: Any = None
) -> AttemptResult:
    """Return the result of an attempt that failed with `error`.

    The error is a finished call of `grpc`, or an exception of `grpc` or `grpc.aio`. An exception of
    an inner interceptor may have only a code, or no code. `nonce` is that of the attempt; None if
    it had none. `server` is the subchannel of the attempt; None if the channel has only one server.
    """
    code = getattr(value_of(error, "code"), "name", None)
    if code not in CODES:  # it is no status of gRPC, but perhaps a bug: not to be repeated
        return AttemptResult(code="UNKNOWN", error=error, committed=True)
    trailing = metadata_of(error, "trailing_metadata")
    result = AttemptResult(code, error, pushback_ns(trailing), committed)
    if was_not_sent(error):
        return replace(result, not_sent=True)
    if code == "UNIMPLEMENTED" and server is not None:
        gone = server.lacks_service(value_of(error, "details"))
        return replace(result, refused=True, is_proven=True) if gone else result
    if code not in REFUSAL_CODES:
        return result
    echoes = [value for key, value in trailing if key == REFUSED_KEY]
    is_proven = nonce is not None and echoes == [nonce]
    return replace(result, refused=bool(echoes), is_proven=is_proven)


def not_sent_metadata(pushback_ns: int | None) -> Metadata:
    """Return the trailing metadata of an attempt that the client has refused, and not sent.

    The pushback is the time until the next call may be sent; None if that is not known.
    """
    return () if pushback_ns is None else ((PUSHBACK_KEY, str(-(-pushback_ns // 1_000_000))),)
