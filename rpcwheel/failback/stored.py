"""The bytes in which a call is stored in a journal.

They begin with a byte for the version of the format and four for the length of the header. The
header is JSON. The serialized requests follow; their sizes are in the header. A call can so be made
without its generated classes, also by a later release of the program.

A later version of rpcwheel may add keys to the header. If older ones must not read the result, it
changes the version.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final, Self

from rpcwheel.rpc import Kind

VERSION: Final = 1
FUNCTION: Final = "function"

BROKEN: Final = (
    struct.error, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError,
)  # fmt: skip
"""What bytes that are damaged, or were never those of a call, can raise."""

_HEAD: Final = struct.Struct(">BI")


@dataclass(frozen=True, slots=True)
class StoredRpc:
    """A gRPC call: all that is needed to make it, except the target and the method."""

    kind: Kind
    requests: tuple[bytes, ...] = field(repr=False)
    metadata: tuple[tuple[str, str | bytes], ...] = field(default=(), repr=False)
    """Without the idempotency key, and without credentials."""
    timeout_s: float = 60.0
    """The timeout of each attempt."""
    wait_for_ready: bool | None = None
    trace: dict[str, str] = field(default_factory=dict)
    """The trace context of the caller; see `rpcwheel.telemetry.tracing.carrier`."""
    retry_on: frozenset[str] = frozenset()
    """The status codes that the policy's `retry_on` names."""

    def encoded(self) -> bytes:
        """Return the bytes to be stored."""
        header = {
            "kind": self.kind.name.lower(),
            "metadata": [[key, _to_json(value)] for key, value in self.metadata],
            "timeout": self.timeout_s,
            "wait_for_ready": self.wait_for_ready,
            "trace": self.trace,
            "retry_on": sorted(self.retry_on),
            "sizes": [len(request) for request in self.requests],
        }
        return _encoded(header, *self.requests)

    @classmethod
    def of_header(cls, header: dict[str, Any], rest: bytes) -> Self:
        """Read a decoded header and the requests that follow it."""
        sizes: list[int] = header["sizes"]
        ends = list(accumulate(sizes))
        requests = [rest[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        kind = Kind[header["kind"].upper()]
        if list(map(len, requests)) != sizes or sum(sizes) != len(rest):
            raise ValueError("its requests are incomplete")
        if len(requests) != 1 and not kind.streams_requests:
            raise ValueError(f"it has {len(requests)} requests")
        metadata = tuple((str(key), _of_json(value)) for key, value in header["metadata"])
        timeout_s, wait = float(header["timeout"]), header["wait_for_ready"]
        if not 0 < timeout_s < math.inf:
            raise ValueError(f"its timeout is {timeout_s}")
        wait = None if wait is None else bool(wait)
        retry_on = frozenset(map(str, header["retry_on"]))
        return cls(kind, tuple(requests), metadata, timeout_s, wait, _trace_of(header), retry_on)


@dataclass(frozen=True, slots=True)
class StoredFunction:
    """A call of a function that is registered by its name."""

    arguments: bytes = field(repr=False)
    """JSON: positional and keyword arguments."""
    trace: dict[str, str] = field(default_factory=dict)
    """The trace context; see `StoredRpc`."""

    def encoded(self) -> bytes:
        """Return the bytes to be stored."""
        return _encoded({"kind": FUNCTION, "trace": self.trace}, self.arguments)


def decode(body: bytes) -> StoredRpc | StoredFunction:
    """Read a stored call.

    Raises:
        ValueError: It cannot be read; the message says why.
    """
    if body[:1] and body[0] != VERSION:
        raise ValueError(
            f"it was stored in format {body[0]}, and this rpcwheel reads format {VERSION}: "
            "deliver it with the version that has stored it"
        )
    try:
        _, length = _HEAD.unpack_from(body)
        end = _HEAD.size + length
        header = json.loads(body[_HEAD.size : end])
        if header["kind"] == FUNCTION:
            return StoredFunction(body[end:], _trace_of(header))
        return StoredRpc.of_header(header, body[end:])
    except BROKEN as error:
        raise ValueError(f"its bytes are damaged: {type(error).__name__}: {error}") from error


def _trace_of(header: dict[str, Any]) -> dict[str, str]:
    return {str(name): str(value) for name, value in header["trace"].items()}


def _encoded(header: dict[str, Any], *parts: bytes) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    return b"".join((_HEAD.pack(VERSION, len(text)), text, *parts))


def _to_json(value: str | bytes) -> str | list[str]:
    return value if isinstance(value, str) else [base64.b64encode(value).decode()]


def _of_json(value: str | list[str]) -> str | bytes:
    return value if isinstance(value, str) else base64.b64decode(value[0], validate=True)
