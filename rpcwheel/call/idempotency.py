"""Idempotency keys: by which a server recognizes a second attempt of a stored call.

A call that may be stored in a journal has a key in its metadata from its first attempt on. It is
the same in all attempts, also in other processes.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

from rpcwheel.errors import short_repr

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

IDEMPOTENCY_KEY: Final = "idempotency-key"
"""The metadata entry with the key. The name is that of the HTTP header (IETF draft
`draft-ietf-httpapi-idempotency-key-header`)."""

_KEY: Final[ContextVar[str | None]] = ContextVar("rpcwheel_idempotency_key", default=None)


def new_key() -> str:
    """Make an idempotency key: 32 hexadecimal digits that increase with time, as in UUIDv7."""
    return f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(10)}"


def idempotency_key() -> str | None:
    """Get the key of the call whose attempt is running, in a function with a journal.

    It is the same in all attempts, also in other processes. Send it with the calls that the
    function makes, so that servers recognize a second attempt::

        stub.Push(event, metadata=[("idempotency-key", idempotency_key())])

    Returns:
        None outside of a function that is decorated by `with_failback(journal=...)`.
    """
    return _KEY.get()


@contextlib.contextmanager
def with_idempotency_key(key: str) -> Iterator[None]:
    """Set the result of `idempotency_key` inside."""
    token = _KEY.set(key)
    try:
        yield
    finally:
        _KEY.reset(token)


def set_idempotency_key(key: str) -> None:
    """Set the result of `idempotency_key` for the rest of this context."""
    _KEY.set(key)


def key_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | None:
    """Return the idempotency key in the metadata of a call; None if it has none."""
    values = (value for name, value in metadata or () if name.lower() == IDEMPOTENCY_KEY)
    key = next(values, None)
    return key.decode(errors="replace") if isinstance(key, bytes) else key


def with_key(
    metadata: Iterable[tuple[str, str | bytes]] | None,
) -> tuple[tuple[str, str | bytes], ...]:
    """Return metadata with an idempotency key: a new one, unless there is one that is not empty."""
    pairs = tuple(
        (name, value) for name, value in metadata or () if value or name.lower() != IDEMPOTENCY_KEY
    )
    return pairs if key_of(pairs) else (*pairs, (IDEMPOTENCY_KEY, new_key()))


def checked_order_key(key: object) -> str | None:
    """Return an order key as text.

    Raises:
        TypeError: It is neither a string, an integer nor None.
        ValueError: It has lone surrogates or NUL, which engines cannot store.
    """
    if key is None:
        return None
    if isinstance(key, str):
        if "\0" in key:
            raise ValueError(f"order_key must have no NUL: {short_repr(key)}")
        key.encode()
        return key
    if isinstance(key, int) and not isinstance(key, bool):
        return str(key)
    raise TypeError(f"order_key must give a str, an int or None, not {short_repr(key)}")
