"""The registry of `rpcwheel.aio`: listeners on the loop, iteration, and canceled callers.

`test_registry.py` has the rules of both worlds.
"""

import asyncio
import threading

import pytest

from fixtures.flaky_backends import POLICY, HangingBackend, flaky_backend, instance
from fixtures.waiting import WAIT_S, aio_wait_until, wait_until
from rpcwheel.events import CallbackFailed
from rpcwheel.registry.aio import Registry


@pytest.fixture
async def registry(backend, timer):
    async with Registry(backend, registry_policy=POLICY.replace(snapshot=False)) as registry:
        yield registry
        backend.up()
    assert timer.pending == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_canceled_caller_does_not_affect_others(registry, backend):
    backend.freeze()
    asks = [asyncio.create_task(registry.lookup("shop.Orders", wait=WAIT_S)) for _ in range(2)]
    waits = asyncio.create_task(registry.register(instance(), wait=WAIT_S))
    await aio_wait_until(lambda: backend.requests)
    asks[0].cancel()
    waits.cancel()
    backend.up()
    assert (await asks[1]).source == "live"
    assert await registry.registrations[0].wait_published(WAIT_S)
    for task in (asks[0], waits):
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("kind", ["plain", "coroutine", "awaitable"])
async def test_a_listener_runs_on_the_loop_one_call_at_a_time(registry, kind):
    snapshots, running, loop_thread = [], [], threading.current_thread()

    async def awaits(snapshot):
        assert not running
        running.append(snapshot)
        await asyncio.sleep(0.001)
        running.clear()
        snapshots.append(snapshot)

    def plain(snapshot):
        assert threading.current_thread() is loop_thread
        snapshots.append(snapshot)

    def returns_an_awaitable(snapshot):
        return awaits(snapshot)

    listener = {"plain": plain, "coroutine": awaits, "awaitable": returns_an_awaitable}[kind]
    async with registry.subscribe("shop.Orders", listener) as following:
        assert (await following.wait(WAIT_S)).instances == ()
        for port in range(1, 6):
            await registry.register(instance(port), wait=WAIT_S)
        await aio_wait_until(lambda: snapshots and len(snapshots[-1].instances) == 5)


async def test_a_listener_that_raises_cancelled_error_is_called_again(registry, events):
    shown = []

    async def listener(snapshot):
        shown.append(len(snapshot.instances))
        refresh = asyncio.ensure_future(asyncio.sleep(60))
        refresh.cancel()
        await refresh

    with_it = registry.subscribe("shop.Orders", listener)
    for port in (1, 2, 3):
        await registry.register(instance(port), wait=WAIT_S)
        await aio_wait_until(lambda: shown and shown[-1] == port)  # noqa: B023
    failed = lambda: events.of(CallbackFailed)  # noqa: E731
    await aio_wait_until(lambda: len(failed()) >= 3)
    assert isinstance(failed()[0].error, asyncio.CancelledError)
    with_it.close()


async def test_a_listener_is_canceled_when_its_subscription_is_closed(registry):
    running, canceled = [], []

    async def listener(snapshot):
        running.append(snapshot)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            canceled.append(snapshot)
            raise

    subscription = registry.subscribe("shop.Orders", listener)
    await aio_wait_until(lambda: running)
    subscription.close()
    await aio_wait_until(lambda: canceled)


async def test_a_listener_may_close_its_own_subscription(registry):
    ended = []

    async def listener(_):
        subscription.close()
        await asyncio.sleep(0)
        ended.append(True)

    subscription = registry.subscribe("shop.Orders", listener)
    await aio_wait_until(lambda: ended)


@pytest.mark.parametrize(
    "end", ["the subscription", "the subscription in a thread", "the registry"]
)
async def test_snapshots_can_be_iterated_until_the_subscription_is_closed(registry, end):
    seen = []

    async def follow():
        async for snapshot in subscription:
            seen.append([one.port for one in snapshot.instances])  # noqa: PERF401 - looked at below

    subscription = registry.subscribe("shop.Orders")
    task = asyncio.create_task(follow())
    await aio_wait_until(lambda: seen == [[]])
    await registry.register(instance(), wait=WAIT_S)
    await aio_wait_until(lambda: seen == [[], [1]])
    match end:
        case "the subscription":
            subscription.close()
        case "the registry":
            await registry.close(WAIT_S)
        case _:
            await asyncio.to_thread(subscription.close)
    await task


async def test_close_does_not_wait_after_a_canceled_close(timer):
    let_go = threading.Event()
    backend = HangingBackend(flaky_backend(timer).inner, let_go)
    registry = Registry(backend)
    await registry.register(instance())
    await aio_wait_until(lambda: backend.is_called)
    closing = asyncio.create_task(registry.close(600))
    await aio_wait_until(lambda: registry.closed)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await registry.close(600)
    assert not let_go.is_set()
    let_go.set()
    await aio_wait_until(lambda: timer.pending == 0)


def test_a_registry_outlives_its_loop(backend):
    async def begin():
        registry = Registry(backend, registry_policy=POLICY.replace(snapshot=False))
        backend.freeze()
        subscription = registry.subscribe("shop.Orders", lambda _: None)
        waits = asyncio.create_task(registry.register(instance(), wait=WAIT_S))
        await aio_wait_until(lambda: registry.registrations)
        waits.cancel()
        return registry, subscription

    registry, subscription = asyncio.run(begin())
    backend.up()
    assert wait_until(lambda: registry.registrations[0].state == "PUBLISHED")
    subscription.close()
    asyncio.run(registry.close())


def test_subscribe_needs_a_running_loop(backend):
    registry = Registry(backend, registry_policy=POLICY.replace(snapshot=False))
    with pytest.raises(RuntimeError, match="no running event loop"):
        registry.subscribe("shop.Orders")
    assert backend.requests == []
    asyncio.run(registry.close())
