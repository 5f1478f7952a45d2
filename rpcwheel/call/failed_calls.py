"""How failed calls are handed to failback, and the responses that replace failures.

Shared by `sync_call` and `aio_call`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from rpcwheel._grpc.calls import FailureStatus, copy_of
from rpcwheel.durations import NEVER, to_ns, to_seconds
from rpcwheel.telemetry import components

from .idempotency import checked_order_key, key_of, new_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rpcwheel._grpc.calls import Details
    from rpcwheel.durations import Duration
    from rpcwheel.rpc import Kind

    from .config import MethodConfig
    from .failback_policy import FailbackPolicy
    from .keeper import ChannelKeeper, KeptDelivery
    from .policy import CallPolicy

ANSWER_KEY: Final = "rpcwheel-answer"
"""The key in the trailing metadata of a response that is not from a server; see
`response_status`."""

READ_TIMEOUT_S: Final = 1.0
"""How long to read the rest of a request stream before failback queues the call."""

LATE_READ_S: Final = 0.02
"""The same at the deadline: enough for requests that exist already, such as those of a list."""


def read_timeout_s(left_s: float | None) -> float:
    """Return how long to read the rest of a request stream.

    The deadline of the call is `left_s` later; None: it has no deadline.
    """
    return READ_TIMEOUT_S if left_s is None else min(READ_TIMEOUT_S, max(LATE_READ_S, left_s))


DELIVERY_TIMEOUT_S: Final = 60.0
"""The timeout of one delivery if neither the caller nor the policy sets one."""


@dataclass(frozen=True, slots=True)
class FailedRpc:
    """A gRPC call whose first attempt has failed, to be stored in a journal."""

    method: str
    kind: Kind
    requests: tuple[bytes, ...] = field(repr=False)
    metadata: tuple[tuple[str, str | bytes], ...] = field(repr=False)
    """Without the idempotency key, and without credentials."""
    timeout_s: float
    """The timeout of each delivery."""
    wait_for_ready: bool | None
    target: str
    key: str
    """The idempotency key, which its first attempt had too."""
    order_key: str | None


class FailedCallQueue(Protocol):
    """Delivers failed calls in the background; a `FailbackInvoker` of the same world."""

    def enqueue(self, error: Any, function: Callable[..., object], /, *requests: Any) -> str | None:
        """Queue a failed call; None if the policy does not apply to its failure."""

    def enqueue_rpc(self, error: Any, failed: FailedRpc) -> Any:
        """Store a failed call in the journal; returns the same, with `grpc.aio` an awaitable."""


class ChannelKey:
    """A key for the channel of a client. Queued calls hold it in place of the channel."""


class ClientFailback:
    """Hands the failed calls of one client to failback. Any thread may use it."""

    def __init__(
        self, policy: CallPolicy, queue_of: Callable[[FailbackPolicy, str], FailedCallQueue]
    ) -> None:
        """Begin without a channel; the arguments are those of `ClientState`."""
        policies = [
            (settings.failback, pattern)
            for pattern, settings in (("*", policy), *policy.methods.items())
            if settings.failback is not None
        ]
        for each, pattern in policies:
            components.expect_queue(each.name or pattern)
        self.queues_calls = bool(policies)
        """Whether it may queue calls, without `call_options`."""
        self.journaled = [(each, pattern) for each, pattern in policies if each.journal is not None]
        """The policies with a journal, each with its pattern."""
        self.queue_of = queue_of
        self.target: str | None = None
        """The target of the channel, for calls that are stored."""
        self.key = ChannelKey()
        """The key under which failback paces the calls that it queues in memory."""
        self.routes: object = None
        """Delivers stored calls through the channel, as long as this object exists."""
        self.keeper: ChannelKeeper | None = None
        """Counts the queued calls of the channel, if the kit has made it."""

    def enqueue(
        self,
        policy: FailbackPolicy,
        config: MethodConfig,
        error: BaseException,
        delivery: KeptDelivery,
        *requests: object,
    ) -> str | None:
        """Queue a failed call; see `FailedCallQueue.enqueue`.

        The connections of the kit's channel are kept while the call is queued.
        """
        if self.keeper is not None and not delivery.keep(self.keeper):
            error.add_note(f"{delivery.label}: not queued by failback, as its channel was closed")
            return None
        outcome = None
        try:
            queue = self.queue_of(policy, config.queue)
            outcome = queue.enqueue(error, delivery, *requests)
        finally:
            if outcome != "queued":
                delivery.release_channel()
        return outcome

    def failed_rpc(
        self,
        policy: FailbackPolicy,
        kind: Kind,
        details: Details,
        requests: Iterable[Any],
        serialize: Callable[[Any], bytes] | None,
    ) -> FailedRpc:
        """Serialize a failed call, to be stored in the journal of a policy.

        `details` have the timeout of its deliveries. `requests` are all of the call; without a
        serializer they are bytes.

        Raises:
            Exception: A request cannot be serialized, or the user's `order_key` has raised.
        """
        messages = list(requests)
        order_key: Any = policy.order_key
        if callable(order_key):
            order_key = order_key(messages[0]) if messages else None
        elif order_key is not None:
            values = {key.lower(): value for key, value in details.metadata or ()}
            order_key = values.get(order_key.lower())
        return FailedRpc(
            method=details.method,
            kind=kind,
            requests=tuple(messages if serialize is None else map(serialize, messages)),
            metadata=queued_metadata(details.metadata, policy),
            timeout_s=DELIVERY_TIMEOUT_S if details.timeout is None else details.timeout,
            wait_for_ready=details.wait_for_ready,
            target=policy.target or self.target or "",
            key=key_of(details.metadata) or new_key(),
            order_key=checked_order_key(order_key),
        )


def default_messages(default: Any) -> Sequence[Any]:
    """Return the messages of a response stream from a default response.

    None is an empty stream. A list or tuple has the messages. Any other value is one message.
    """
    if default is None:
        return ()
    return default if isinstance(default, (list, tuple)) else (default,)


def response_status(outcome: str | None, error: BaseException) -> dict[str, Any]:
    """Return the details and the metadata of a response of a policy, as keyword arguments.

    `outcome` is what failback did with the call, "queued" or "dropped"; None if the response is
    that of a `DefaultResponsePolicy`.
    """
    code, details, initial, trailing = FailureStatus.of(error)
    if outcome is None:
        source, did = "default-response", "default response"
    else:
        source = "failback" if outcome == "queued" else f"failback-{outcome}"
        did = f"{outcome} by failback"
    return {
        "details": f"{did} after {code.name}: {details}",
        "initial": initial,
        "trailing": (*trailing, (ANSWER_KEY, source)),
    }


def delivery_timeout(own: Duration | None, config: MethodConfig) -> float:
    """Return the timeout of one delivery in seconds: the caller's, or else the policy's.

    A timeout of the caller that is infinite or has passed does not count.
    """
    for limit_ns in (NEVER if own is None else to_ns(own), config.timeout_ns):
        if 0 < limit_ns < NEVER:
            return to_seconds(limit_ns)
    return DELIVERY_TIMEOUT_S


def queued_metadata(
    metadata: Iterable[tuple[str, str | bytes]] | None, policy: FailbackPolicy
) -> tuple[tuple[str, str | bytes], ...]:
    """Return the metadata that deliveries are sent with."""
    return tuple((key, value) for key, value in metadata or () if policy.keeps(key))


def queued_request(request: Any) -> Any:
    """Return a request for a failback queue, which stores protobuf messages as bytes itself."""
    return request if hasattr(request, "SerializeToString") else copy_of(request)
