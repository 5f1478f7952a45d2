"""What a threaded server of grpc knows of the calls it serves and does not show.

Proved on grpcio 1.60 and 1.85; `tests/_grpc/test_serving.py` tells if that changes. Where it is
another's context or server, there is a plainer way, or nothing is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from grpc._cython import cygrpc

if TYPE_CHECKING:
    import grpc

__all__ = ["calls_wait", "end_call", "is_plain"]


def end_call(context: Any, details: str) -> None:  # noqa: ANN401 - grpc's, or one around it
    """End a call that is being served: the client gets UNAVAILABLE and these details.

    Its handler sees what it would see if the client had cancelled. Any thread; waits for nothing. A
    context without grpc's own call is cancelled, which its client takes for CANCELLED.
    """
    call = getattr(getattr(context, "_rpc_event", None), "call", None)
    if call is None:
        context.cancel()
    else:
        call.cancel(cygrpc.StatusCode.unavailable, details)


def is_plain(context: grpc.ServicerContext) -> bool:
    """Whether it is sure that the connection of a call is plaintext. Either world."""
    kinds = context.auth_context().get("transport_security_type", ())
    return list(kinds) == [b"insecure"]


def calls_wait(server: Any) -> bool:  # noqa: ANN401
    """Whether calls that have come in wait for a thread; False if that can't be known."""
    pool = getattr(getattr(server, "_state", None), "thread_pool", None)
    size = getattr(getattr(pool, "_work_queue", None), "qsize", None)
    return size is not None and size() > 0
