"""rpcwheel's interceptors and channels, with the settings that they are measured with."""

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
"""A deadline, the watch for slow calls, retries, and policies by method."""

SILENCE = WHOLE | {
    "timeout": DeadlinePolicy(
        timeout=TIMEOUT_S, slow_call_threshold=TIMEOUT_S / 2, message_timeout=TIMEOUT_S / 2
    )
}
"""The same, and the watch for response streams that stall."""


def client(settings: dict[str, Any]) -> Sequence[Any]:
    """Interceptors for a channel of grpc."""
    return rpcwheel.Kit(**settings).client_interceptors()


def aio_client(settings: dict[str, Any]) -> Sequence[Any]:
    """Interceptors for a channel of grpc.aio."""
    return rpcwheel.aio.Kit(**settings).client_interceptors()


def intercept_channel(target: str) -> grpc.Channel:
    """A channel of grpc with the policies in front."""
    return rpcwheel.Kit(**WHOLE).intercept_channel(grpc.insecure_channel(target))


def intercept_aio_channel(target: str) -> grpc.aio.Channel:
    """A channel of grpc.aio with the policies in front."""
    return rpcwheel.aio.Kit(**WHOLE).intercept_channel(grpc.aio.insecure_channel(target))


def channel(target: str) -> grpc.Channel:
    """A reconnecting channel with the policies in front."""
    return rpcwheel.Kit(**WHOLE).channel(target)


def aio_channel(target: str) -> grpc.aio.Channel:
    """The same for grpc.aio."""
    return rpcwheel.aio.Kit(**WHOLE).channel(target)


def server_interceptors(*, aio: bool) -> Sequence[Any]:
    """Interceptors for a server of either world, with the settings of the clients."""
    return (rpcwheel.aio.Kit if aio else rpcwheel.Kit)(**WHOLE).server_interceptors()
