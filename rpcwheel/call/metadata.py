"""Metadata of rpcwheel's own in the calls of a client: criticality and nonces.

An attempt of a method that is retried but not idempotent has a nonce: a value that no other attempt
has. A server that refuses the attempt before its handler returns it (`REFUSED_KEY`). So the client
knows that this server has refused this attempt, and that a handler has not passed on a refusal
which it got from another server.
"""

from __future__ import annotations

import itertools
import os
import secrets
from typing import TYPE_CHECKING, Any

from rpcwheel._grpc.calls import metadata_tuple
from rpcwheel.rpc import CRITICALITY, CRITICALITY_KEY, NONCE_KEY

if TYPE_CHECKING:
    from collections.abc import Iterable


class _Nonces:
    """Makes nonces: a random prefix of the process, and a number. Any thread may use it."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Choose a new prefix; a forked child would repeat the nonces of its parent."""
        self._prefix = secrets.token_hex(8)
        self._numbers = itertools.count(1)

    def new(self) -> str:
        return f"{self._prefix}-{next(self._numbers):x}"


_NONCES = _Nonces()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_NONCES.begin)


def new_nonce() -> str:
    """Return a nonce for an attempt; takes 0.2 µs."""
    return _NONCES.new()


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
) -> tuple[tuple[str, str | bytes], ...]:
    pairs = metadata_tuple(metadata)
    if label is None or any(key == CRITICALITY_KEY for key, _ in pairs):
        return pairs
    return (*pairs, (CRITICALITY_KEY, label))
