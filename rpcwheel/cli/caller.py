"""The demo's client: the decorated call, as a user writes it, and what each caller saw."""

from __future__ import annotations

import os
import time
from typing import Self

import grpc
import tenacity

from rpcwheel.cli.audit_pb2 import Event, Receipt
from rpcwheel.cli.audit_pb2_grpc import AuditStub
from rpcwheel.cli.checks import Answer, Call, Counts, When
from rpcwheel.errors import RpcWheelError
from rpcwheel.failback import with_failback

__all__ = ["Caller"]

DEADLINE = 5.0
"""Seconds for each attempt; none comes near it: a dead server on this machine refuses at once."""

RECONNECT_WITHIN_MS = 300
"""gRPC's own pause between two attempts to connect; by default it grows to two minutes."""

CHANNEL_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", RECONNECT_WITHIN_MS),
    ("grpc.enable_retries", 0),  # one layer of retries is enough to look at
]

WAIT = tenacity.wait_exponential(multiplier=0.1, max=0.4) + tenacity.wait_random(0, 0.1)
"""0.1, 0.2, 0.4, 0.4, ... seconds between the retries of a call, plus up to 0.1 of jitter."""


class Caller:
    """Calls the server through failback, on one channel that lives through every outage.

    `call` may be used from several threads at once.

    Args:
        target: Where the server listens.
        max_pending: How many failed calls may wait.
    """

    def __init__(self, target: str, *, max_pending: int) -> None:
        self._channel = grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
        stub = AuditStub(self._channel)

        @with_failback(
            retry_on=grpc.StatusCode.UNAVAILABLE,
            max_attempts=None,
            backoff=WAIT,
            default=None,
            max_pending=max_pending,
            name="demo",
        )
        def push(event: Event) -> Receipt:
            return stub.Push(event, timeout=DEADLINE)

        self._push = push

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._push.failback.close(drain_timeout=0.0)
        self._channel.close()

    @property
    def pending(self) -> int:
        """How many failed calls wait for their delivery."""
        return self._push.failback.pending

    def counts(self) -> Counts:
        """Ask failback what it has counted."""
        stats = self._push.failback.stats()
        return Counts(stats.queued_total, stats.redelivered, stats.attempts)

    def call(self, event_id: int, when: When) -> Call:
        """Make one call, and then write into the request, as a caller who uses it again would."""
        event = Event(
            id=event_id,
            text=f"order {event_id}: 12,50 \N{EURO SIGN} \N{CHECK MARK} 注文 \N{ROCKET}",
            payload=os.urandom(64),
            at_unix_ns=time.time_ns(),
        )
        request, error = event.SerializeToString(), ""
        began = time.monotonic()
        try:
            answer = Answer.QUEUED if self._push(event) is None else Answer.SERVER
        except (grpc.RpcError, RpcWheelError) as refusal:
            answer, error = Answer.ERROR, f"event {event_id}: {refusal}"
        ended = time.monotonic()
        event.text, event.payload = "written by the caller after the call", b""
        return Call(event_id, request, event.SerializeToString(), when, answer, began, ended, error)
