"""Interceptors that are added to a `grpc.aio` channel after it was made.

The asyncio clients of google-cloud append to four private lists of `grpc.aio.Channel`. gRPC reads
the lists at each call (1.66 to 1.85), so existing stubs use the interceptors too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

from rpcwheel.rpc import Kind

if TYPE_CHECKING:
    import grpc

Interceptors: TypeAlias = dict[Kind, list[Any]]
"""The interceptors of a channel, by the kind of call."""

LISTS: Final = {kind: f"_{kind.name.lower()}_interceptors" for kind in Kind}
"""The names of the lists on a channel."""


def lists_of(channel: grpc.aio.Channel) -> Interceptors:
    """Return the lists of a channel; an empty dict for a channel of another class without lists."""
    return {kind: getattr(channel, name) for kind, name in LISTS.items() if hasattr(channel, name)}


def give_lists(channel: grpc.aio.Channel, lists: Interceptors) -> None:
    """Set the lists of a channel, under the names that gRPC uses."""
    for kind, interceptors in lists.items():
        setattr(channel, LISTS[kind], interceptors)
