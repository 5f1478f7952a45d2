"""The criticality of the call being served, and how a server reads it from metadata.

A server interceptor sets `CRITICALITY` for each call that it serves. `metadata.call_metadata` is
the client's side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rpcwheel.events import CriticalityUnknown, emit
from rpcwheel.rpc import CRITICALITY, CRITICALITY_KEY, criticality_named

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rpcwheel.rpc import Criticality

UNKNOWN: Final = "it names no criticality"
BINARY: Final = "it is not a text"
REPEATED: Final = "the call has several"

MAX_REPORTED: Final = 1024
"""Methods and reasons that were reported. Clients can send any method name."""

MAX_VALUE: Final = 100
"""Characters of a value in an event."""

_REPORTED: Final[set[tuple[str, str]]] = set()


def current_criticality() -> Criticality | None:
    """Return the criticality of the call being served; None if its client has not set one.

    Like `current_deadline()`, it is stored in a context variable: tasks that a handler creates
    inherit it, a thread only if it runs in a copy of the context. Calls that are made meanwhile
    have the same criticality, unless a policy or `call_options` sets another one.
    """
    return CRITICALITY.get()


def read_criticality(
    metadata: Sequence[tuple[str, str | bytes]] | None, method: str
) -> Criticality | None:
    """Return the criticality in the metadata of a call that a server has received.

    Never raises for what a client has sent. If the metadata has no valid value, or several, returns
    None and emits `CriticalityUnknown`, once for each method and reason.
    """
    for pair in metadata or ():  # runs for each call; gRPC's pairs take longer to unpack
        if pair[0] == CRITICALITY_KEY:
            return _criticality_in(metadata or (), method)
    return None


def _criticality_in(metadata: Sequence[tuple[str, str | bytes]], method: str) -> Criticality | None:
    """Return the criticality in metadata that has at least one value."""
    values = [value for key, value in metadata if key == CRITICALITY_KEY]
    value = values[0]
    if len(values) > 1:
        _report(method, REPEATED, ", ".join(map(_text, values)))
    elif isinstance(value, bytes):
        _report(method, BINARY, _text(value))
    else:
        level = criticality_named(value)
        if level is None:
            _report(method, UNKNOWN, value)
        return level
    return None


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("ascii", "backslashreplace")


def _report(method: str, reason: str, value: str) -> None:
    if (method, reason) in _REPORTED:
        return
    if len(_REPORTED) >= MAX_REPORTED:
        _REPORTED.clear()
    _REPORTED.add((method, reason))
    emit(CriticalityUnknown(method, value[:MAX_VALUE], reason))
