"""What it costs a server to know its connections: per call, per look at all, per closing."""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from statistics import median

import grpc

from benchmarks.calls.scale import UNARY as KIND
from benchmarks.calls.scale import Row, World
from benchmarks.calls.servers import burst
from benchmarks.calls.sync_client import LOOPS
from benchmarks.calls.turns import take_turns
from benchmarks.calls.wire import PAYLOAD, UNARY_UNARY
from benchmarks.connections.channels import bare
from benchmarks.connections.far import LONG_S, Far
from benchmarks.connections.scale import Scale
from benchmarks.connections.subjects import (
    CLOSING,
    DETECTOR,
    LOOK,
    NOOP,
    PSUTIL,
    ROUND,
    SERVERS,
    SERVING,
    has_psutil,
)

TIMEOUT_S = 10.0


def measure(world: World, scale: Scale) -> list[Row]:
    """What the interceptors cost a unary call, by the CPU time of the server."""
    with Far(world, *SERVERS) as far, ExitStack() as stack:
        make = LOOPS[KIND]
        bursts = {}
        for name in SERVERS:
            channel = stack.enter_context(bare(far.targets[name]))
            bursts[name] = partial(burst, far, make(channel, scale, None), scale.calls)
        taken = take_turns(bursts, rounds=scale.rounds, warm_up=scale.warm_up)
    return [Row("server", world, SERVING, name, taken.values(name, NOOP)) for name in bursts]


def measure_rounds(world: World, scale: Scale) -> list[Row]:
    """The cost of a check of all connections, and of one that closes half of them."""
    with Far(world, DETECTOR) as far, ExitStack() as stack:
        target = far.targets[DETECTOR]
        channels = [stack.enter_context(bare(target)) for _ in range(scale.connections)]
        _use(channels)
        answers_by_name = {LOOK: [far.ask(["look", DETECTOR]) for _ in range(scale.looks)]}
        if has_psutil():
            answers_by_name[PSUTIL] = [far.ask("psutil") for _ in range(scale.looks)]
        answers_by_name[CLOSING] = [
            _close_half(far, channels, scale.idle_s) for _ in range(scale.closings)
        ]
    return [
        Row(
            "server",
            world,
            ROUND,
            name,
            {key: median(each[key] for each in answers) for key in answers[0]},
        )
        for name, answers in answers_by_name.items()
    ]


def _close_half(far: Far, channels: list[grpc.Channel], idle_s: float) -> dict[str, float]:
    """Have the first half of them closed by a check, and use them again."""
    half = len(channels) // 2
    _use(channels[:half])
    time.sleep(idle_s)
    _use(channels[half:])
    before = far.ask(["state", DETECTOR])["descriptors"]
    far.ask(["idle", DETECTOR, idle_s])
    began = time.monotonic()
    looked: dict[str, float] = far.ask(["look", DETECTOR])
    far.ask(["idle", DETECTOR, LONG_S])
    while (closed := before - far.ask(["state", DETECTOR])["descriptors"]) < half:
        if time.monotonic() - began > TIMEOUT_S:
            break
        time.sleep(0.01)
    gone_ms = 1e3 * (time.monotonic() - began)
    _use(channels[:half])
    return looked | {"closed": closed, "gone_ms": gone_ms}


def _use(channels: list[grpc.Channel]) -> None:
    """Make a call on each."""
    for channel in channels:
        channel.unary_unary(UNARY_UNARY)(PAYLOAD, wait_for_ready=True)
