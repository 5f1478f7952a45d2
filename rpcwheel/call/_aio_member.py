"""What all calls of one method have in common, on an event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rpcwheel._grpc.aio_relay import relay_of
from rpcwheel.durations import NEVER

if TYPE_CHECKING:
    from rpcwheel.rpc import Kind
    from rpcwheel.timer import Timeout

    from .config import ClientState

    State = ClientState

__all__ = ["Listening", "Member", "State"]


class Member:
    """One method of one client: what all its calls have in common."""

    __slots__ = (
        "answers",
        "config",
        "keep_bytes",
        "keeps",
        "kind",
        "method",
        "plain",
        "relay",
        "state",
    )

    def __init__(self, state: State, method: str, kind: Kind) -> None:
        self.state = state
        self.method = method
        self.kind = kind
        self.relay = relay_of(kind)
        """What the caller of a call holds; made with its tries."""
        config = self.config = state.configs.of(method)
        self.answers = config.failback is not None or config.default_response is not None
        """Whether a failure may be answered otherwise."""
        watched = config.slow_ns != NEVER
        listened = kind.streams_responses and config.message_timeout_ns != NEVER
        self.plain = not (self.answers or config.retry or watched or listened)
        """Whether there is nothing but a timeout, so that the try itself can go to the caller."""
        self.keeps = config.resends
        """Whether a request may be sent again."""
        self.keep_bytes = config.keep_bytes if kind.streams_requests else None
        """How much is kept of a request stream; None where it is never sent again."""


class Listening:
    """Somebody waits for a message."""

    __slots__ = ("over", "timeout")

    def __init__(self) -> None:
        self.over = False
        self.timeout: Timeout | None = None

    def cancel(self) -> None:
        """It has come, or nobody waits any more."""
        self.over = True
        if self.timeout is not None:
            self.timeout.cancel()
