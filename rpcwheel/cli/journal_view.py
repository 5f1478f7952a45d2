"""Output of `rpcwheel journal`: tables, the description of a call, and JSON.

A stored call may have secrets. Its requests and arguments are shown only on request, and values of
metadata whose name looks secret never are.
"""

from __future__ import annotations

import base64
import json
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from rpcwheel.call.failback_policy import is_secret
from rpcwheel.errors import ConfigurationError
from rpcwheel.failback.stored import StoredFunction, decode
from rpcwheel.journal import CallState

from .protobuf_view import numbered_fields
from .top_view import seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rpcwheel.failback.stored import StoredRpc
    from rpcwheel.journal import Depth, StoredCall

STATE_NAMES: Final = {
    CallState.READY: "waiting",
    CallState.BLOCKED: "blocked",
    CallState.TAKEN: "taken",
    CallState.DEAD: "dead",
}

CALL_COLUMNS: Final = (
    "id", "state", "queue", "target", "method", "age", "attempts", "due", "last error",
)  # fmt: skip
COUNTS: Final = ("waiting", "taken", "dead")
DEPTH_COLUMNS: Final = ("queue", "target", *COUNTS, "oldest")

HIDDEN: Final = "***"

MAX_ERROR: Final = 120
"""Characters of an error in a table."""

DUMP_BYTES: Final = 1024
"""Bytes of a request that `show` prints as text."""

ROW_BYTES: Final = 16

DUMP_LINES: Final = 200
MAX_LINE: Final = 500
"""Lines of a request, and characters of a line, that `show` prints if it is decoded."""


# Lists


def call_row(call: StoredCall) -> list[str]:
    """Return the cells of `CALL_COLUMNS`."""
    error = _reason(call)
    return [
        str(call.id),
        STATE_NAMES[call.state],
        call.queue,
        call.target,
        call.method,
        seconds(max(0.0, call.age_s)),
        str(call.attempts),
        _due(call),
        error if len(error) <= MAX_ERROR else f"{error[:MAX_ERROR]}...",
    ]


def _due(call: StoredCall) -> str:
    if call.state in (CallState.TAKEN, CallState.DEAD):
        return ""
    return f"in {seconds(call.due_s)}" if call.due_s > 0 else "now"


def _reason(call: StoredCall) -> str:
    return (
        f"{call.reason}: {call.error}" if call.reason and call.error else call.reason or call.error
    )


def call_as_json(call: StoredCall) -> dict[str, Any]:
    """Return all values of a call except its body."""
    return {
        "id": call.id,
        "state": STATE_NAMES[call.state],
        "queue": call.queue,
        "target": call.target,
        "method": call.method,
        "key": call.key,
        "order_key": call.order_key,
        "age_s": round(call.age_s, 3),
        "attempts": call.attempts,
        "due_s": round(call.due_s, 3),
        "expires_s": round(call.expires_s, 3),
        "error": call.error,
        "reason": call.reason,
        "bytes": len(call.body),
    }


def depth_rows(depths: Sequence[Depth]) -> list[list[str]]:
    """Return the cells of `DEPTH_COLUMNS`, with the sums in the last row."""
    rows = [_depth_row(depth.queue, depth.target, depth_as_json(depth)) for depth in depths]
    return [*rows, _depth_row("total", "", total_of(depths))] if len(rows) > 1 else rows


def _depth_row(queue: str, target: str, counts: dict[str, Any]) -> list[str]:
    numbers = [f"{counts[name]:,}" for name in COUNTS]
    return [queue, target, *numbers, seconds(counts["oldest_s"]) if counts["oldest_s"] else ""]


def depth_as_json(depth: Depth) -> dict[str, Any]:
    """Return the counts of one queue and target."""
    return asdict(depth) | {"oldest_s": round(depth.oldest_s, 3)}


def total_of(depths: Sequence[Depth]) -> dict[str, Any]:
    """Return the sums of all queues and targets, and the age of the oldest call."""
    counts = {name: sum(getattr(depth, name) for depth in depths) for name in COUNTS}
    oldest_s = max((depth.oldest_s for depth in depths), default=0.0)
    return counts | {"oldest_s": round(oldest_s, 3)}


# One call


def described(call: StoredCall, *, with_body: bool) -> dict[str, Any]:
    """Return all values of a call, and what its body consists of.

    Args:
        call: The call.
        with_body: Whether its requests (base64) or arguments are part of it.
    """
    facts = call_as_json(call)
    try:
        body = decode(call.body)
        if isinstance(body, StoredFunction):
            return facts | _described_function(body, with_body=with_body)
        return facts | _described_rpc(body, with_body=with_body)
    except ValueError as error:
        facts["problem"] = f"it cannot be decoded: {error}"
        if with_body:
            facts["body"] = _base64(call.body)
        return facts


def _described_function(body: StoredFunction, *, with_body: bool) -> dict[str, Any]:
    arguments = json.loads(body.arguments)  # a ValueError: it cannot be decoded
    facts: dict[str, Any] = {"kind": "function", "sizes": [len(body.arguments)]}
    return facts | ({"arguments": arguments} if with_body else {})


def _described_rpc(body: StoredRpc, *, with_body: bool) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "kind": body.kind.name.lower(),
        "timeout_s": body.timeout_s,
        "wait_for_ready": body.wait_for_ready,
        "metadata": [[key, _shown(key, value)] for key, value in body.metadata],
        "sizes": [len(request) for request in body.requests],
    }
    return facts | ({"requests": list(map(_base64, body.requests))} if with_body else {})


def _shown(key: str, value: str | bytes) -> str:
    if is_secret(key):
        return HIDDEN
    return _base64(value) if isinstance(value, bytes) else value


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def description(
    call: StoredCall,
    *,
    with_body: bool,
    decode_request: Callable[[bytes], list[str]] = numbered_fields,
) -> Iterator[str]:
    """Return the lines of `show`.

    Args:
        call: The call.
        with_body: Whether its requests or arguments are shown.
        decode_request: Returns the lines of a request; if it raises ValueError, they are bytes.
    """
    facts = described(call, with_body=with_body)
    yield _line("id", str(call.id))
    yield _line("state", STATE_NAMES[call.state])
    for name in ("queue", "target", "method", "key"):
        yield _line(name, str(facts[name]))
    if call.order_key is not None:
        yield _line("order key", call.order_key)
    yield _line("stored", f"{seconds(max(0.0, call.age_s))} ago")
    yield _line("attempts", str(call.attempts))
    if call.state is not CallState.DEAD:
        yield _line("due", _due(call) or "an attempt is running, or begins soon")
        yield _line("expires", f"in {seconds(call.expires_s)}" if call.expires_s > 0 else "now")
    yield _line("last error", call.error)
    if call.reason:
        yield _line("given up", call.reason)
    yield from _header(call, facts)
    if with_body:
        yield from _body(call, facts, decode_request)


def _header(call: StoredCall, facts: dict[str, Any]) -> Iterator[str]:
    if "problem" in facts:
        yield _line("body", f"{len(call.body):,} bytes; {facts['problem']}")
        return
    yield _line("kind", facts["kind"])
    if facts["kind"] == "function":
        yield _line("arguments", f"{facts['sizes'][0]:,} bytes")
        return
    yield _line("timeout", f"{seconds(facts['timeout_s'])} for each attempt")
    if facts["wait_for_ready"] is not None:
        yield _line("wait for ready", "yes" if facts["wait_for_ready"] else "no")
    for key, value in facts["metadata"]:
        yield _line("metadata", f"{key}={value}")
    sizes = [f"{size:,}" for size in islice(facts["sizes"], 20)]
    more = ", ..." if len(facts["sizes"]) > len(sizes) else ""
    yield _line("requests", f"{len(facts['sizes']):,} ({', '.join(sizes)}{more} bytes)")


def _body(
    call: StoredCall, facts: dict[str, Any], decode_request: Callable[[bytes], list[str]]
) -> Iterator[str]:
    if "arguments" in facts:
        yield from json.dumps(facts["arguments"], indent=2).splitlines()
        return
    if "requests" not in facts:
        yield from _dump(call.body)
        return
    parts = [base64.b64decode(request) for request in facts["requests"]]
    for number, part in enumerate(parts, start=1):
        if len(parts) > 1:
            yield f"request {number}"
        try:
            lines = decode_request(part)
        except ConfigurationError:  # a ValueError, of the descriptor set
            raise
        except ValueError:
            yield from _dump(part)
            continue
        yield from (line[:MAX_LINE] for line in lines[:DUMP_LINES])
        if len(lines) > DUMP_LINES:
            yield f"... and {len(lines) - DUMP_LINES:,} more lines; --json shows all"


def _dump(data: bytes) -> Iterator[str]:
    for start in range(0, min(len(data), DUMP_BYTES), ROW_BYTES):
        row = data[start : start + ROW_BYTES]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)  # noqa: PLR2004 - ASCII
        yield f"{start:08x}  {row.hex(' '):<{3 * ROW_BYTES}} {text}"
    if len(data) > DUMP_BYTES:
        yield f"... and {len(data) - DUMP_BYTES:,} more bytes; --json shows all"


def _line(name: str, value: str) -> str:
    return f"{name:<16}{value}".rstrip()
