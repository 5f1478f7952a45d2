"""Calls through `grpc`: the channels of the subjects, and the bursts that are timed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import repeat

import grpc

from benchmarks.calls import own, rivals
from benchmarks.calls.far import FarSide
from benchmarks.calls.scale import BOTH, REQUESTS, RESPONSES, UNARY, Row, Scale
from benchmarks.calls.subjects import (
    BARE,
    GRPC_INTERCEPTOR,
    KIT,
    KIT_SILENCE,
    KIT_TIMEOUT,
    NOOP,
    NOOP_TIMEOUT,
    OTEL,
    callers,
    measures,
    subjects,
)
from benchmarks.calls.turns import take_turns
from benchmarks.calls.wire import PAYLOAD, STREAM_STREAM, STREAM_UNARY, UNARY_STREAM, UNARY_UNARY
from benchmarks.timer.clock import Cost, Stopwatch

CHANNELS: dict[str, Callable[[grpc.Channel], grpc.Channel]] = {
    BARE: lambda channel: channel,
    NOOP: lambda channel: grpc.intercept_channel(channel, rivals.NoOp()),
    NOOP_TIMEOUT: lambda channel: grpc.intercept_channel(channel, rivals.NoOp()),
    KIT_TIMEOUT: lambda channel: grpc.intercept_channel(channel, *own.client(own.TIMEOUT_ALONE)),
    KIT: lambda channel: grpc.intercept_channel(channel, *own.client(own.WHOLE)),
    KIT_SILENCE: lambda channel: grpc.intercept_channel(channel, *own.client(own.SILENCE)),
    GRPC_INTERCEPTOR: lambda channel: grpc.intercept_channel(
        channel, rivals.grpc_interceptor_client()
    ),
    OTEL: rivals.otel_channel,
}


def measure(scale: Scale) -> list[Row]:
    """A row for each kind of call and each subject, by the client's cost."""
    rows = []
    with FarSide("aio", BARE) as far, ExitStack() as stack:
        channels = {}
        for name in subjects("client", "sync"):
            channel = stack.enter_context(grpc.insecure_channel(far.targets[BARE]))
            channels[name] = CHANNELS[name](channel)
        for what in measures("client"):
            bursts = {
                name: partial(timed, LOOPS[what](channels[name], scale, timeout), scale.units(what))
                for name, timeout in callers("client", "sync", what)
            }
            taken = take_turns(bursts, rounds=scale.turns(what), warm_up=scale.warm_up)
            rows += taken.rows("client", "sync", what)
    return rows


def timed(work: Callable[[], None], units: int) -> Cost:
    """What the work took, for each of its units."""
    watch = Stopwatch()
    work()
    return watch.per(units)


def _unary(channel: grpc.Channel, scale: Scale, timeout: float | None) -> Callable[[], None]:
    call = channel.unary_unary(UNARY_UNARY)

    def work() -> None:
        for _ in repeat(None, scale.calls):
            call(PAYLOAD, timeout=timeout)

    return work


def _responses(channel: grpc.Channel, scale: Scale, timeout: float | None) -> Callable[[], None]:
    call, request = channel.unary_stream(UNARY_STREAM), str(scale.messages).encode()

    def work() -> None:
        for _ in repeat(None, scale.streams):
            for _response in call(request, timeout=timeout):
                pass

    return work


def _requests(channel: grpc.Channel, scale: Scale, timeout: float | None) -> Callable[[], None]:
    call = channel.stream_unary(STREAM_UNARY)

    def work() -> None:
        for _ in repeat(None, scale.streams):
            call(repeat(PAYLOAD, scale.messages), timeout=timeout)

    return work


def _both(channel: grpc.Channel, scale: Scale, timeout: float | None) -> Callable[[], None]:
    call = channel.stream_stream(STREAM_STREAM)

    def work() -> None:
        for _ in repeat(None, scale.streams):
            for _response in call(repeat(PAYLOAD, scale.messages), timeout=timeout):
                pass

    return work


LOOPS = {UNARY: _unary, RESPONSES: _responses, REQUESTS: _requests, BOTH: _both}
"""What makes a burst of calls of each kind."""
