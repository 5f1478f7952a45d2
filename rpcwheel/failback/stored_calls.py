"""Makes the gRPC calls of a journal through a channel of `grpc`. They consist of bytes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from rpcwheel._grpc.calls import Details
from rpcwheel._grpc.counted import counted_multicallable
from rpcwheel.call.config import MAX_METHODS
from rpcwheel.call.idempotency import IDEMPOTENCY_KEY
from rpcwheel.call.sync_call import Delivery

from .stored import StoredRpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import grpc

    from rpcwheel._grpc.calls import AnyCall
    from rpcwheel.call.client_state import ChannelCalls
    from rpcwheel.journal.backend import StoredCall
    from rpcwheel.rpc import Kind
    from rpcwheel.telemetry.call_counts import CallCounts

    from .stored import StoredFunction


class StoredCalls:
    """A `MakeCall` for the calls of one channel, which exists as long as this object."""

    def __init__(
        self,
        channel: grpc.Channel,
        counts: CallCounts | None,
        metadata: Callable[[], Iterable[tuple[str, str | bytes]]] | None = None,
        admitted: Callable[[Kind, str, Any], Any] | None = None,
        channel_calls: ChannelCalls | None = None,
    ) -> None:
        """Begin without a call.

        Args:
            channel: The channel.
            counts: Where attempts are counted; None if metrics are off.
            metadata: Returns metadata for the next attempt of a call, such as credentials. It
                replaces stored metadata of the same names. If the call cannot be made now, it
                raises LookupError.
            admitted: Returns, for a multicallable of a kind and a method, one that sends attempts
                only if the policies of the channel allow it; None if they allow all.
            channel_calls: The calls of the channel, with which deliveries do not end; None if it
                has no policies.
        """
        self._channel = channel
        self._admitted = admitted
        self._channel_calls = channel_calls
        self._counts = counts
        self._metadata = metadata
        self._multicallables: dict[tuple[Kind, str], Any] = {}

    def __call__(
        self, call: StoredCall, body: StoredRpc | StoredFunction
    ) -> tuple[Delivery, tuple[bytes, ...], dict[str, Any]]:
        """Return the delivery of a call, and its requests.

        Raises:
            LookupError: Of `metadata`; the call can be made later.
            ValueError: It is the call of a function; it can never be made.
        """
        if not isinstance(body, StoredRpc):
            raise ValueError("it is the call of a function, and its queue is one of a channel")  # noqa: TRY004 - it is data
        start = partial(_start_stored, self._multicallable(body.kind, call.method), body.kind)
        metadata = body.metadata
        if self._metadata is not None:
            added = tuple(self._metadata())
            names = {key for key, _ in added}
            metadata = (*(pair for pair in metadata if pair[0] not in names), *added)
        metadata = (*metadata, (IDEMPOTENCY_KEY, call.key))
        details = Details(call.method, body.timeout_s, metadata, None, body.wait_for_ready, None)
        attempts, channel_calls = call.attempts, self._channel_calls
        delivery = Delivery(
            call.method, body.kind, start, details, attempts, channel_calls=channel_calls
        )
        return delivery, body.requests, {}

    def _multicallable(self, kind: Kind, method: str) -> Any:
        cached = self._multicallables.get((kind, method))
        if cached is not None:
            return cached
        multicallable = getattr(self._channel, kind.name.lower())(method)
        if self._counts is not None:
            multicallable = counted_multicallable(
                kind, multicallable, self._counts.attempts.method(method, kind.grpc_type)
            )
        if self._admitted is not None:
            multicallable = self._admitted(kind, method, multicallable)
        if len(self._multicallables) >= MAX_METHODS:
            self._multicallables.clear()
        self._multicallables[kind, method] = multicallable
        return multicallable


def _start_stored(below: Any, kind: Kind, details: Details, request: Any) -> AnyCall:
    return (below if kind.streams_responses else below.future)(request, *details[1:])
