"""Calls through `grpc`: the channels of the subjects, and the bursts that are timed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import repeat
from typing import Any

import grpc

from benchmarks._clock import Cost, Stopwatch
from benchmarks.calls import own, rivals
from benchmarks.calls.scale import BOTH, REQUESTS, RESPONSES, UNARY, Row, Scale
from benchmarks.calls.server_process import ServerProcess
from benchmarks.calls.subjects import (
    BARE,
    GRPC_INTERCEPTOR,
    KIT_CHANNEL,
    KIT_INTERCEPT,
    KIT_INTERCEPTORS,
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

CHANNELS: dict[str, Callable[[str], grpc.Channel]] = {
    BARE: grpc.insecure_channel,
    NOOP: lambda target: _channel(target, rivals.NoOp()),
    NOOP_TIMEOUT: lambda target: _channel(target, rivals.NoOp()),
    KIT_TIMEOUT: lambda target: _channel(target, *own.client(own.TIMEOUT_ALONE)),
    KIT_INTERCEPTORS: lambda target: _channel(target, *own.client(own.WHOLE)),
    KIT_INTERCEPT: own.intercept_channel,
    KIT_CHANNEL: own.channel,
    KIT_SILENCE: lambda target: _channel(target, *own.client(own.SILENCE)),
    GRPC_INTERCEPTOR: lambda target: _channel(target, rivals.grpc_interceptor_client()),
    OTEL: lambda target: rivals.otel_channel(grpc.insecure_channel(target)),
}


def _channel(target: str, *interceptors: Any) -> grpc.Channel:
    return grpc.intercept_channel(grpc.insecure_channel(target), *interceptors)


def measure(scale: Scale) -> list[Row]:
    """A row for each kind of call and each subject, with the client's cost."""
    rows = []
    with ServerProcess("aio", BARE) as server, ExitStack() as stack:
        channels = {}
        for name in subjects("client", "sync"):
            channels[name] = CHANNELS[name](server.targets[BARE])
            stack.callback(channels[name].close)
        for what in measures("client"):
            bursts = {
                name: partial(timed, LOOPS[what](channels[name], scale, timeout), scale.units(what))
                for name, timeout in callers("client", "sync", what)
            }
            taken = take_turns(bursts, rounds=scale.turns(what), warm_up=scale.warm_up)
            rows += taken.rows("client", "sync", what)
    return rows


def timed(work: Callable[[], None], units: int) -> Cost:
    """The cost of the work, for each of its units."""
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
"""Make the work of one burst, for each kind of call."""
