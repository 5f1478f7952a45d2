"""Interceptors that are added to a `grpc.aio` channel after it was made, or by patches.

Two libraries do so:

* OpenTelemetry's instrumentation replaces `grpc.aio.insecure_channel` and `secure_channel`.
* The asyncio clients of google-cloud append to four private lists of `grpc.aio.Channel`. gRPC reads
  the lists at each call (1.66 to 1.85), so existing stubs use the interceptors too.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import grpc
from grpc.aio import _channel

from rpcwheel.rpc import Kind

Interceptors: TypeAlias = dict[Kind, list[Any]]
"""The interceptors of a channel, by the kind of call."""

LISTS: Final = {kind: f"_{kind.name.lower()}_interceptors" for kind in Kind}
"""The names of the lists on a channel."""

MAKERS: Final = ("insecure_channel", "secure_channel")


def lists_of(channel: grpc.aio.Channel) -> Interceptors:
    """Return the lists of a channel; an empty dict for a channel of another class without lists."""
    return {kind: getattr(channel, name) for kind, name in LISTS.items() if hasattr(channel, name)}


def give_lists(channel: grpc.aio.Channel, lists: Interceptors) -> None:
    """Set the lists of a channel, under the names that gRPC uses."""
    for kind, interceptors in lists.items():
        setattr(channel, LISTS[kind], interceptors)


def is_patched() -> bool:
    """Whether gRPC's functions that make channels are patched, and so may add interceptors."""
    return any(getattr(grpc.aio, name) is not getattr(_channel, name) for name in MAKERS)
