"""rpcwheel's own interceptors, by the settings that they are measured with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc.aio

import rpcwheel
import rpcwheel.aio
from benchmarks.calls.subjects import TIMEOUT_S
from benchmarks.calls.wire import SERVICE
from rpcwheel import DeadlinePolicy, MethodPolicy, RetryPolicy

TIMEOUT_ALONE: dict[str, Any] = {"timeout": TIMEOUT_S}

WHOLE: dict[str, Any] = {
    "timeout": DeadlinePolicy(timeout=TIMEOUT_S, slow_call_threshold=TIMEOUT_S / 2),
    "retry": RetryPolicy(retry_on={"UNAVAILABLE", "RESOURCE_EXHAUSTED"}, max_attempts=4),
    "methods": {
        f"/{SERVICE}/*": MethodPolicy(idempotent=True),
        "/bench.Audit/*": MethodPolicy(timeout=1.0),
    },
}
"""A deadline, the slow-call event, retries, and policies by method."""

SILENCE = WHOLE | {
    "timeout": DeadlinePolicy(
        timeout=TIMEOUT_S, slow_call_threshold=TIMEOUT_S / 2, message_timeout=TIMEOUT_S / 2
    )
}
"""And an eye on response streams that fall silent."""


def client(settings: dict[str, Any]) -> Sequence[Any]:
    """For a channel of grpc."""
    return rpcwheel.Kit(**settings).client_interceptors()


def aio_client(settings: dict[str, Any]) -> Sequence[Any]:
    """For a channel of grpc.aio."""
    return rpcwheel.aio.Kit(**settings).client_interceptors()


def aio_channel(channel: grpc.aio.Channel) -> grpc.aio.Channel:
    """The channel of grpc.aio, within ours."""
    return rpcwheel.aio.Kit(**WHOLE).intercept_channel(channel)


def server_interceptors(*, aio: bool) -> Sequence[Any]:
    """For a server of either world, with the settings for clients."""
    return (rpcwheel.aio.Kit if aio else rpcwheel.Kit)(**WHOLE).server_interceptors()
