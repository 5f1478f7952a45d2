"""What a server does with a call, taken apart and put together again: handlers and their behaviors.

grpc keeps a user's function (the "behavior") in a handler, under the name of the call's kind, and
reads two more things off the function itself by `hasattr`: `experimental_non_blocking` (a stream
whose answers are pushed, with a third argument) and `experimental_thread_pool`. A wrapper without
them turns `Health.Watch` into a blocked thread for each watcher. Proved on grpcio 1.60 and 1.85.
"""

from __future__ import annotations

import time
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, Final

import grpc

from rpcwheel.rpc import Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    Behavior = Callable[..., Any]

__all__ = ["LATE", "behavior_of", "is_pushing", "kind_of", "late_s", "time_left", "with_behavior"]

LATE: Final = "its deadline passed before the server could begin"
"""The details of a call that is refused because nobody waits for its answer any more."""

READ_BY_GRPC: Final = ("experimental_non_blocking", "experimental_thread_pool")

FOR_EVER_S: Final = 4e9
"""More seconds than this are no deadline: the threaded server says 9.2e18, aio says None."""


def kind_of(handler: Any) -> Kind:
    """Which of the four kinds of call it handles."""
    return Kind((bool(handler.request_streaming), bool(handler.response_streaming)))


def behavior_of(handler: Any) -> Behavior | None:
    """The function that does the work; None in a handler that was made wrongly."""
    behavior: Behavior | None = getattr(handler, kind_of(handler).name.lower(), None)
    return behavior


def with_behavior(handler: Any, behavior: Behavior) -> grpc.RpcMethodHandler:
    """A handler of the same kind and (de)serializers, with another behavior.

    The new one is made to look like the one it stands for, in all that grpc and others read off it.
    """
    kind = kind_of(handler).name.lower()
    original = getattr(handler, kind)
    update_wrapper(behavior, original)
    for name in READ_BY_GRPC:  # of an object they may come from its class, which is not copied
        if hasattr(original, name):
            setattr(behavior, name, getattr(original, name))
    make: Callable[..., grpc.RpcMethodHandler] = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(behavior, handler.request_deserializer, handler.response_serializer)


def is_pushing(behavior: Behavior) -> bool:
    """Whether a threaded server calls it with a third argument, to push its answers into."""
    return bool(getattr(behavior, "experimental_non_blocking", False))


def time_left(context: Any) -> float | None:
    """Seconds that are left for the call being served; 0 if none, None if it has no deadline."""
    left: float | None = context.time_remaining()
    return None if left is None or left > FOR_EVER_S else left


def late_s(context: Any) -> float:
    """How long ago the call's deadline passed; 0.0 where that can't be told.

    `time_remaining()` stops at zero. grpc's own context knows more, grpc.aio's does not show it.
    """
    event = getattr(context, "_rpc_event", None)
    return 0.0 if event is None else max(0.0, time.time() - event.call_details.deadline)
