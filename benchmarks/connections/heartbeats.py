"""The cost of heartbeats of a thousand idle channels.

Each channel is used once, so that it has a connection. Then the heartbeats begin, all at the same
time. After one and a half intervals the next ones are measured: the CPU time of this process, its
threads, and the times at which the server got heartbeats.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import grpc.aio
from grpc._cython import cygrpc

from benchmarks.calls.scale import Row, World
from benchmarks.calls.wire import PAYLOAD, UNARY_UNARY
from benchmarks.connections.channels import CHECK, aio_watched, watched
from benchmarks.connections.far import Far
from benchmarks.connections.scale import Scale
from benchmarks.connections.subjects import (
    HEARTBEATS,
    KEEPALIVE,
    NO_INTERCEPTOR,
    OURS,
    SPREAD,
    UNWATCHED,
)
from rpcwheel.heartbeat import HeartbeatManager
from rpcwheel.heartbeat.aio import HeartbeatManager as AioHeartbeatManager

TENTHS = 10
TASKS = Path("/proc/self/task")
SAMPLES_AN_INTERVAL = 20
TRIALS = 10
SKIPPED = 1.5  # intervals; with 1, punctual heartbeats would be counted at both ends
MISSES = 3  # intervals of silence, after which a connection is dead

Sent = Callable[[], int]
"""How many heartbeats this process has sent so far, where it can be known."""


def measure(world: World, subject: str, scale: Scale) -> list[Row]:
    """One row, of one subject."""
    with Far("aio", NO_INTERCEPTOR) as far:
        if world == "sync":
            values = _sync(subject, far, scale)
        else:
            values = asyncio.run(_aio(subject, far, scale))
    return [Row("client", world, HEARTBEATS, subject, values)]


def _sync(subject: str, far: Far, scale: Scale) -> dict[str, float]:
    target, interval_s = far.targets[NO_INTERCEPTOR], scale.interval_s
    with ExitStack() as stack:
        channels: list[Any] = []
        used: list[float] = []
        for _ in range(scale.channels):
            made = watched(subject, target, interval_s, MISSES * interval_s)
            channels.append(stack.enter_context(made))
            made.unary_unary(UNARY_UNARY)(PAYLOAD)
            used.append(time.monotonic())
        sent = _nothing
        if subject == OURS:
            manager = stack.enter_context(HeartbeatManager(interval=interval_s))
            beats = [manager.attach(channel) for channel in channels]
            sent = lambda: sum(beat.sent for beat in beats)  # noqa: E731
        elif subject == KEEPALIVE:
            sent = _pings
        elif subject != UNWATCHED:
            stack.callback(_ask_each(channels, interval_s, spread=subject == SPREAD["sync"]))
        expected = expected_of(subject, scale, used)
        return _window(far, scale, sent, own_threads=0) | {"expected": expected}


def _ask_each(
    channels: list[grpc.Channel], interval_s: float, *, spread: bool
) -> Callable[[], None]:
    """Start a thread for each channel that asks once an interval; gives what ends them."""
    over = threading.Event()

    def ask(channel: grpc.Channel) -> None:
        check = channel.unary_unary(CHECK)
        over.wait(interval_s * random.random() * spread)
        while not over.wait(interval_s):
            check(b"", timeout=interval_s)

    threads = [threading.Thread(target=ask, args=(channel,)) for channel in channels]
    for thread in threads:
        thread.start()

    def end() -> None:
        over.set()
        for thread in threads:
            thread.join()

    return end


async def _aio(subject: str, far: Far, scale: Scale) -> dict[str, float]:
    target, interval_s = far.targets[NO_INTERCEPTOR], scale.interval_s
    async with AsyncExitStack() as stack:
        channels: list[Any] = []
        used: list[float] = []
        for _ in range(scale.channels):
            made = aio_watched(subject, target, interval_s, MISSES * interval_s)
            channels.append(await stack.enter_async_context(made))
            await made.unary_unary(UNARY_UNARY)(PAYLOAD)
            used.append(time.monotonic())
        sent = _nothing
        if subject == OURS:
            manager = await stack.enter_async_context(AioHeartbeatManager(interval=interval_s))
            beats = [manager.attach(channel) for channel in channels]
            sent = lambda: sum(beat.sent for beat in beats)  # noqa: E731
        elif subject == KEEPALIVE:
            sent = _pings
        elif subject != UNWATCHED:
            spread = subject == SPREAD["aio"]
            asking = (_aio_ask(channel, interval_s, spread=spread) for channel in channels)
            tasks = [asyncio.create_task(each) for each in asking]
            stack.callback(lambda: [task.cancel() for task in tasks])
        expected = expected_of(subject, scale, used)
        values = await asyncio.to_thread(_window, far, scale, sent, own_threads=1)
        return values | {"expected": expected}


async def _aio_ask(channel: grpc.aio.Channel, interval_s: float, *, spread: bool) -> None:
    check = channel.unary_unary(CHECK)
    await asyncio.sleep(interval_s * random.random() * spread)
    while True:
        await asyncio.sleep(interval_s)
        await check(b"", timeout=interval_s)


def expected_of(subject: str, scale: Scale, used: Sequence[float]) -> float:
    """How many heartbeats an interval brings on average, within those that are measured.

    Ours are late by a random share: the first, an interval after each was used, of an interval,
    the later ones of a third of it.
    """
    if subject == UNWATCHED:
        return 0.0
    if subject != OURS:
        return float(scale.channels)
    share, count, now = random.Random(1).random, 0, time.monotonic()
    for at_s in used * TRIALS:
        at = 1 + share() - (now - at_s) / scale.interval_s
        while at < SKIPPED + scale.intervals:
            count += at >= SKIPPED
            at += 1 + share() / 3
    return count / TRIALS / scale.intervals


def _nothing() -> int:
    return 0


def _counted(sent: Sent) -> tuple[int, float]:
    """How many, and when: to count them takes a while too."""
    began = time.monotonic()
    count = sent()
    return count, (began + time.monotonic()) / 2


def _window(far: Far, scale: Scale, sent: Sent, *, own_threads: int) -> dict[str, float]:
    """What happens in some intervals after the first one; `own_threads` are this one's doing."""
    time.sleep(SKIPPED * scale.interval_s)
    sent_before, threads = _counted(sent), []
    cpu_ns, began_ns = time.process_time_ns(), time.monotonic_ns()
    for _ in range(scale.intervals * SAMPLES_AN_INTERVAL):
        time.sleep(scale.interval_s / SAMPLES_AN_INTERVAL)
        threads.append(len(list(TASKS.iterdir())) - own_threads)
    ended_ns, cpu_ns = time.monotonic_ns(), time.process_time_ns() - cpu_ns
    sent_after = _counted(sent)
    arrived_ns = [at_ns for at_ns in far.ask("beats") if began_ns <= at_ns < ended_ns]
    wall_ns = ended_ns - began_ns
    intervals = wall_ns / 1e9 / scale.interval_s
    arrived = len(arrived_ns) / intervals
    sent_s = sent_after[1] - sent_before[1]
    sent_here = (sent_after[0] - sent_before[0]) * scale.interval_s / sent_s
    values = {
        "cpu_percent": 100 * cpu_ns / wall_ns,
        "threads": float(median(threads)),
        "most_threads": float(max(threads)),
        "sent": sent_here or arrived,
        "arrived": arrived,
        "interval_s": scale.interval_s,
        "channels": float(scale.channels),
    }
    return values | _tenths([at_ns - began_ns for at_ns in arrived_ns], scale.interval_s)


def _tenths(ages_ns: list[int], interval_s: float) -> dict[str, float]:
    """Which share of them came in each tenth of the interval."""
    counts = [0] * TENTHS
    for age_ns in ages_ns:
        counts[int(age_ns / 1e9 % interval_s / interval_s * TENTHS) % TENTHS] += 1
    return {f"tenth_{at}": count / len(ages_ns) for at, count in enumerate(counts) if ages_ns}


def _pings() -> int:
    """The keepalive pings of all connections of this process, as channelz counts them."""
    count, start = 0, 0
    while True:
        page = json.loads(cygrpc.channelz_get_top_channels(start))
        channels = page.get("channel", ())
        for channel in channels:
            start = int(channel["ref"]["channelId"]) + 1
            for ref in channel.get("subchannelRef", ()):
                count += _pings_of(int(ref["subchannelId"]))
        if page.get("end") or not channels:
            return count


def _pings_of(subchannel: int) -> int:
    sockets = json.loads(cygrpc.channelz_get_subchannel(subchannel))["subchannel"]
    count = 0
    for ref in sockets.get("socketRef", ()):
        socket = json.loads(cygrpc.channelz_get_socket(int(ref["socketId"])))["socket"]
        count += int(socket["data"].get("keepAlivesSent", 0))
    return count
