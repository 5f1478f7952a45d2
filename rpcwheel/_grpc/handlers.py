"""Handlers of a server, and how the user's function in a handler is replaced.

A handler of grpc holds the user's function, the "behavior", in an attribute with the name of the
kind of call. grpc also reads two attributes of the behavior itself: `experimental_non_blocking`
(responses are pushed through a callback, the third argument) and `experimental_thread_pool`. A
wrapper must have both attributes; without the first, each watcher of `Health.Watch` blocks a
thread. Verified on grpcio 1.60 and 1.85.
"""

from __future__ import annotations

import gc
import time
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, Final

import grpc

from rpcwheel.rpc import Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    Behavior = Callable[..., Any]

DEADLINE_PASSED: Final = "its deadline passed before the server could begin"
"""The details of a call that is refused because its deadline has passed."""

READ_BY_GRPC: Final = ("experimental_non_blocking", "experimental_thread_pool")

DEADLINE_TOLERANCE_S: Final = 0.01
"""If a call ends before its behavior with less time left than this, it counts as ended by its
deadline, although the client has canceled it: at the deadline the client cancels too, and its clock
may be ahead."""

NO_DEADLINE_S: Final = 4e9
"""A longer time remaining means no deadline: it is 9.2e18 s in a threaded server, None in aio."""


def kind_of(handler: Any) -> Kind:
    """Return the kind of call that a handler serves."""
    return Kind((bool(handler.request_streaming), bool(handler.response_streaming)))


def behavior_of(handler: Any) -> Behavior | None:
    """Return the user's function in a handler; None if the handler has none."""
    behavior: Behavior | None = getattr(handler, kind_of(handler).name.lower(), None)
    return behavior


def with_behavior(handler: Any, behavior: Behavior) -> grpc.RpcMethodHandler:
    """Make a handler of the same kind and with the same serializers, with another behavior.

    The new behavior gets the name and the attributes of the old one.
    """
    kind = kind_of(handler).name.lower()
    original = getattr(handler, kind)
    update_wrapper(behavior, original)
    for name in READ_BY_GRPC:  # may be in the class of the behavior
        if hasattr(original, name):
            setattr(behavior, name, getattr(original, name))
    make: Callable[..., grpc.RpcMethodHandler] = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(behavior, handler.request_deserializer, handler.response_serializer)


def is_pushing(behavior: Behavior) -> bool:
    """Whether a threaded server passes a third argument, through which responses are pushed."""
    return bool(getattr(behavior, "experimental_non_blocking", False))


def time_left(context: Any) -> float | None:
    """Return the seconds until the deadline of the call being served; None without a deadline."""
    left: float | None = context.time_remaining()
    return None if left is None or left > NO_DEADLINE_S else left


def late_s(context: Any) -> float:
    """Return how long ago the deadline of a call passed; 0.0 if that is not known.

    `time_remaining()` is never negative. The context of grpc has the deadline, that of grpc.aio
    does not show it.
    """
    event = getattr(context, "_rpc_event", None)
    return 0.0 if event is None else max(0.0, time.time() - event.call_details.deadline)


def context_with_code(context: object) -> object:
    """Return a context of a call with the method `code()`.

    The context that grpc.aio (1.66 to 1.85) passes to a blocking behavior does not have it. It
    refers to one that does, and does not show it.
    """
    if hasattr(context, "code"):
        return context
    inner = (referent for referent in gc.get_referents(context) if hasattr(referent, "set_code"))
    return next(inner, context)
