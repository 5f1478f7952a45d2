"""The channels of the subjects, in both worlds."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio

from benchmarks.calls import rivals
from benchmarks.connections.subjects import (
    BARE,
    DOCUMENTED,
    KEEPALIVE,
    NOOP,
    OURS,
    WORKING,
)
from rpcwheel.transport import ReconnectingChannel
from rpcwheel.transport.aio import ReconnectingChannel as AioReconnectingChannel

Options = list[tuple[str, Any]]

OWN_CONNECTION: Options = [("grpc.use_local_subchannel_pool", 1)]
"""Else channels to one target share a connection."""

CHECK = "/grpc.health.v1.Health/Check"


def pings(interval_s: float, timeout_s: float, *, working: bool = True) -> Options:
    """Give the options of gRPC's keepalive: as documented, and the one that works on top.

    In grpcio 1.85 `keepalive_timeout_ms` is not what ends a connection whose peer is frozen.
    """
    options: Options = [
        ("grpc.keepalive_time_ms", round(interval_s * 1e3)),
        ("grpc.keepalive_timeout_ms", round(timeout_s * 1e3)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    return options + [("grpc.http2.ping_timeout_ms", round(timeout_s * 1e3))] * working


def options_of(subject: str, interval_s: float, dead_s: float) -> Options:
    """What a subject's channel is made with, each with a connection of its own."""
    if subject in (KEEPALIVE, WORKING, DOCUMENTED):
        found_after_s = max(dead_s - interval_s, 0.001)
        keepalive = pings(interval_s, found_after_s, working=subject != DOCUMENTED)
        return OWN_CONNECTION + keepalive
    return OWN_CONNECTION


def bare(target: str, options: Options | None = None) -> grpc.Channel:
    """A channel of grpc's."""
    return grpc.insecure_channel(target, options=OWN_CONNECTION if options is None else options)


def aio_bare(
    target: str,
    options: Options | None = None,
    interceptors: Any = None,
) -> grpc.aio.Channel:
    """A channel of grpc.aio's."""
    options = OWN_CONNECTION if options is None else options
    return grpc.aio.insecure_channel(target, options=options, interceptors=interceptors)


def watched(subject: str, target: str, interval_s: float, dead_s: float) -> grpc.Channel:
    """The channel of a subject whose peer may fall silent."""
    if subject == OURS:
        return ReconnectingChannel(target)
    return bare(target, options_of(subject, interval_s, dead_s))


def aio_watched(subject: str, target: str, interval_s: float, dead_s: float) -> grpc.aio.Channel:
    """The same of grpc.aio."""
    if subject == OURS:
        return AioReconnectingChannel(target)
    return aio_bare(target, options_of(subject, interval_s, dead_s))


def caller(subject: str, target: str) -> grpc.Channel:
    """The channel through which a subject's calls are made."""
    if subject == NOOP:
        return grpc.intercept_channel(bare(target), rivals.NoOp())
    return bare(target) if subject == BARE else ReconnectingChannel(target)


def aio_caller(subject: str, target: str) -> grpc.aio.Channel:
    """The same of grpc.aio."""
    if subject == NOOP:
        return aio_bare(target, interceptors=[make() for make in rivals.AIO_NOOPS])
    return aio_bare(target) if subject == BARE else AioReconnectingChannel(target)
