"""The public API as type checkers see it. Never run; `make types` reads it."""

from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Literal, assert_type

import grpc
import grpc.aio

import rpcwheel
from rpcwheel import (
    AsyncWheelTimer,
    FailbackPolicy,
    WheelTimer,
    shared_timer,
    with_breaker,
    with_failback,
)
from rpcwheel import aio as rpcwheel_aio
from rpcwheel.admission import BreakerState
from rpcwheel.call import Deadline, DeadlinePolicy, RetryPolicy, current_deadline, deadline_scope
from rpcwheel.errors import CallTimeout
from rpcwheel.events import Event, FailbackGaveUp, add_sink
from rpcwheel.failback import FailbackInvoker, QueueEntry
from rpcwheel.options import Finding, channel_options, check_options, server_options
from rpcwheel.pending import CallFuture, PendingCalls, PendingStats
from rpcwheel.pending import aio as deadline_aio
from rpcwheel.timer import HashedWheel, ManualTimer, PeriodicTask, Timeout, TimerStats
from rpcwheel.transport import ReconnectingChannel


def the_timer() -> None:
    with WheelTimer(HashedWheel(tick=0.1, slots=512), executor=ThreadPoolExecutor()) as timer:
        assert_type(timer, WheelTimer)
        timeout = timer.new_timeout(lambda timeout: print(timeout.deadline), timedelta(seconds=2))
        assert_type(timeout, Timeout)
        assert_type(timeout.reschedule(3.0), bool)
        assert_type(timeout.cancel(), bool)
        assert_type(timer.stats(), TimerStats)
        assert_type(timer.stop(), list[Timeout])
    assert_type(shared_timer(), WheelTimer)
    assert_type(ManualTimer().advance(1), int)
    assert_type(PeriodicTask(timer, 5.0, print).start(), PeriodicTask)


def events() -> None:
    def sink(event: Event) -> None:
        if isinstance(event, FailbackGaveUp):
            assert_type(event.waited_s, float)

    def sink_of_anything(event: object) -> None: ...

    add_sink(sink)
    add_sink(sink_of_anything)
    add_sink(sink_of_text)  # type: ignore[arg-type]


def sink_of_text(event: str) -> None: ...


async def the_timer_on_a_loop() -> None:
    async with AsyncWheelTimer(max_pending=10) as timer:
        assert_type(timer, AsyncWheelTimer)
        assert_type(await timer.aclose(), list[Timeout])


@with_failback(retry_on=grpc.StatusCode.UNAVAILABLE)
def push(line: str, *, urgent: bool = False) -> bytes:
    return line.encode() if urgent else b""


@with_failback(retry_on={ConnectionError}, default=0)
async def count(line: str) -> int:
    return len(line)


async def failback() -> None:
    assert_type(push("a", urgent=True), bytes | None)
    push(1)  # type: ignore[arg-type]
    assert_type(push.failback.pending, int)
    assert_type(push.failback.entries(), list[QueueEntry])
    assert_type(await count("a"), int)
    assert_type(count.failback.entries()[0].next_attempt_s, float | None)
    await count.failback.close(drain_timeout=1.0)
    assert_type(FailbackInvoker(FailbackPolicy(retry_on=OSError)).flush(1.0), bool)
    assert_type(
        await rpcwheel.failback.aio.FailbackInvoker(FailbackPolicy(retry_on=OSError)).flush(1.0),
        bool,
    )


class Prices:
    @with_breaker(failures=ConnectionError, open_duration=timedelta(seconds=5))
    def price(self, item: str, *, day: int = 0) -> float:
        return float(item) + day

    @with_breaker()
    async def newest(self, item: str) -> float:
        return float(item)


async def breakers_of_functions() -> None:
    prices = Prices()
    assert_type(prices.price("a", day=1), float)
    assert_type(await prices.newest("a"), float)
    assert_type(prices.price.breaker.state, BreakerState)
    assert_type(Prices.price(prices, "a"), float)
    Prices.price.breaker.reset()
    prices.price(1)  # type: ignore[arg-type]
    prices.price()  # type: ignore[call-arg]
    with_breaker(per="method")  # type: ignore[call-arg]


def deadlines() -> None:
    assert_type(Deadline.after(timedelta(seconds=2)), Deadline)
    assert_type(current_deadline(), Deadline | None)
    with deadline_scope(2.0) as deadline:
        assert_type(deadline, Deadline)
        assert_type(deadline.remaining(), float)
        assert_type(deadline.expired(), bool)
    assert_type(DeadlinePolicy(timeout=2.0), DeadlinePolicy)
    assert_type(RetryPolicy(retry_on={"UNAVAILABLE"}, max_attempts=4), RetryPolicy)


def pending_calls(error: CallTimeout) -> None:
    with PendingCalls(ManualTimer(), name="orders", max_pending=10) as calls:
        assert_type(calls, PendingCalls[Any])
        future: CallFuture[bytes] = calls.open(7, timeout=timedelta(seconds=2), connection="a")
        assert_type(future.result(1.0), bytes)
        assert_type(future.exception(), BaseException | None)
        assert_type(future.cancel(), bool)
        future.add_done_callback(print)
        assert_type(calls.sent(7), bool)
        assert_type(calls.received(7, b"answer"), bool)
        assert_type(calls.failed(7, OSError()), bool)
        assert_type(calls.lost("a", OSError()), int)
        assert_type(calls.pending, int)
        assert_type(calls.stats(), PendingStats)
        assert_type(calls.close(), list[Hashable])
        calls.open(7)  # type: ignore[call-arg]
        calls.open([], timeout=None)  # type: ignore[arg-type]
    lines = PendingCalls[str](name="lines")
    assert_type(lines.open(7, timeout=2.0), CallFuture[str])
    lines.received(7, b"answer")  # type: ignore[arg-type]
    assert_type(error.side, Literal["client", "server"])
    assert_type(error.sent, float | None)


async def pending_calls_on_a_loop() -> None:
    async with deadline_aio.PendingCalls() as calls:
        assert_type(calls, deadline_aio.PendingCalls[Any])
        future: deadline_aio.CallFuture[bytes] = calls.open(7, timeout=None)
        assert_type(await future, bytes)
        assert_type(future.cancel("enough"), bool)
        assert_type(calls.received(7, b"answer"), bool)
        assert_type(calls.close(OSError()), list[Hashable])
    lines = deadline_aio.PendingCalls[str](name="lines")
    assert_type(await lines.open(7, timeout=2.0), str)


def options() -> None:
    assert_type(
        channel_options(preset="lan", keepalive=timedelta(seconds=5)), list[tuple[str, int]]
    )
    assert_type(server_options(permit_every=2), list[tuple[str, int]])
    channel_options(preset="moon")  # type: ignore[arg-type]
    found = check_options(channel=[("grpc.keepalive_time_ms", 10_000)], server=None)
    assert_type(found, list[Finding])
    assert_type(found[0].severity, Literal["error", "warning", "note"])


def registries(server: grpc.Server, mine: rpcwheel.registry.Registry) -> None:
    url, credentials = "etcd://127.0.0.1:2379/shop.Orders", grpc.ssl_channel_credentials()
    assert_type(rpcwheel.insecure_channel(url, lb_policy="least_request"), grpc.Channel)
    assert_type(rpcwheel.insecure_channel("shop.Orders", registry=mine), grpc.Channel)
    assert_type(rpcwheel.secure_channel("orders:50051", credentials, [], None), grpc.Channel)
    assert_type(ReconnectingChannel("orders:50051").number, int)
    with rpcwheel.open_registry(
        "memory://", registry_policy=rpcwheel.RegistryPolicy(lease_ttl=5)
    ) as registry:
        assert_type(registry, rpcwheel.registry.Registry)
        instance = rpcwheel.registry.ServiceInstance(
            service="shop.Orders", host="10.0.0.7", port=50051
        )
        assert_type(registry.register(instance, wait=5.0), rpcwheel.registry.Registration)
        assert_type(registry.lookup("shop.Orders"), rpcwheel.registry.Snapshot)
        assert_type(registry.subscribe("shop.Orders", print), rpcwheel.registry.Subscription)
    with rpcwheel.Publisher(server, [registry, "memory://"], "shop.Orders", port=1) as published:
        assert_type(published, rpcwheel.Publisher)
        assert_type(published.wait_published(5.0), bool)
        assert_type(published.instances, tuple[rpcwheel.registry.ServiceInstance, ...])
    rpcwheel.insecure_channel(7)  # type: ignore[arg-type]


async def registries_on_a_loop(server: grpc.aio.Server) -> None:
    channel = rpcwheel_aio.insecure_channel("memory://a/shop.Orders", [], None, [])
    assert_type(channel, grpc.aio.Channel)
    with_tls = rpcwheel_aio.secure_channel("orders:50051", grpc.ssl_channel_credentials())
    assert_type(with_tls, grpc.aio.Channel)
    async with rpcwheel_aio.open_registry("memory://") as registry:
        assert_type(await registry.lookup("shop.Orders"), rpcwheel.registry.Snapshot)
    async with rpcwheel_aio.Publisher(server, registry, "shop.Orders", port=1) as published:
        assert_type(await published.wait_published(5.0), bool)
