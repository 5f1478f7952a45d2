"""Unary calls that no thread of grpcio's waits for: who begins one has it read where it likes.

A future of grpcio's starts a thread that reads its answer, unless one runs for its channel already.
Where each of many channels has a call now and then, that thread is most of what a call costs. What
a blocking call of grpcio's does in one step is done here in two, so that many are begun first and
then read by one thread, by which time most have been answered.

Who forks with gRPC's fork support (`GRPC_ENABLE_FORK_SUPPORT=1`) has futures: gRPC stops its own
threads for the moment of the fork, but cannot stop those of others that wait for an answer, and
then the child crashes (1.85).

It is cygrpc's `segregated_call`, as `_UnaryUnaryMultiCallable._blocking` uses it (proved on 1.60
and 1.85; `tests/legacy/_grpc/test_unspun.py` will tell).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import grpc
from grpc._cython import cygrpc

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["UnspunCall", "begin_unspun"]

FORKS: Final = bool(getattr(cygrpc, "_GRPC_ENABLE_FORK_SUPPORT", True))
"""Whether gRPC's fork support is on, as it reads it from the environment when it is imported."""

NAMES: Final[dict[int, str]] = {code.value[0]: code.name for code in grpc.StatusCode}


class UnspunCall:
    """A call that runs. Whoever closes its channel ends it, read or not."""

    __slots__ = ("_call", "_done")

    def __init__(self, call: Any) -> None:
        self._call = call
        self._done = False

    def read(self) -> tuple[str, bytes | None]:
        """Wait until it has ended. Once, by one thread.

        Returns:
            The name of its status, and the response if there is one.
        """
        code, response = "UNKNOWN", None
        for operation in self._call.next_event().batch_operations:
            kind = operation.type()
            if kind == cygrpc.OperationType.receive_message:
                response = operation.message()
            elif kind == cygrpc.OperationType.receive_status_on_client:
                code = NAMES.get(operation.code(), code)
        self._done = True
        return code, response

    def done(self) -> bool:
        """Whether it was read."""
        return self._done

    def cancel(self) -> None:
        """End it with CANCELLED, if it has not ended. Never waits."""
        self._call.cancel(cygrpc.StatusCode.cancelled, "given up")


def begin_unspun(
    channel: Any,
    method: str,
    request: bytes,
    *,
    timeout: float,
    metadata: Sequence[tuple[str, str]],
) -> UnspunCall | None:
    """Begin a call of bytes. Never waits.

    Args:
        channel: Of grpc's make.
        method: In full.
        request: Serialised.
        timeout: Seconds.
        metadata: To send.

    Returns:
        None, and nothing has begun, if the channel is of another make or has interceptors, and
        where gRPC's fork support is on.

    Raises:
        ValueError: The channel is closed; in the words of grpc.
    """
    if FORKS or type(channel).__module__ != "grpc._channel":
        return None
    operations = (
        cygrpc.SendInitialMetadataOperation(metadata, 0),
        cygrpc.SendMessageOperation(request, 0),
        cygrpc.SendCloseFromClientOperation(0),
        cygrpc.ReceiveInitialMetadataOperation(0),
        cygrpc.ReceiveMessageOperation(0),
        cygrpc.ReceiveStatusOnClientOperation(0),
    )
    call = channel._channel.segregated_call(  # noqa: SLF001 - as grpcio's own blocking call does
        cygrpc.PropagationConstants.GRPC_PROPAGATE_DEFAULTS,
        method.encode(),
        None,  # the host
        time.time() + timeout,
        None,  # the metadata: cygrpc takes it with the operation
        None,  # credentials of this call
        ((operations, None),),
    )
    return UnspunCall(call)
