"""The registry of `rpcwheel.aio`: what differs from the blocking one."""

import asyncio
import threading

import pytest

from fixtures.flaky_backends import POLICY, HangingBackend, flaky_backend, instance, published_ids
from fixtures.waiting import WAIT_S, aio_wait_until, wait_until
from rpcwheel.errors import NotPublished, RegistryClosed, RegistryUnavailable
from rpcwheel.events import CallbackFailed
from rpcwheel.registry.aio import Registry


@pytest.fixture
async def registry(backend, timer):
    async with Registry(backend, registry_policy=POLICY.replace(snapshot=False)) as registry:
        yield registry
        backend.up()
    assert timer.pending == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_registered_instance_can_be_looked_up_changed_and_withdrawn(registry):
    registration = await registry.register(instance(), wait=WAIT_S)
    assert (registration.state, registry.registrations) == ("PUBLISHED", (registration,))
    registration.update(weight=7)
    assert await registration.wait_published(WAIT_S)
    assert (await registry.lookup("shop.Orders")).instances == (instance(weight=7),)
    assert await registry.services() == ["shop.Orders"]
    await registration.unregister(wait=WAIT_S)
    assert registration.state == "GONE"
    assert (await registry.lookup("shop.Orders")).instances == ()


async def test_an_unavailable_engine_is_an_error_only_for_callers_that_wait(registry, backend):
    backend.down()
    registration = await registry.register(instance())
    await aio_wait_until(lambda: registration.error)
    with pytest.raises(NotPublished, match=r"within 0\.02 s") as raised:
        await registry.register(instance(), wait=0.02)
    assert isinstance(raised.value.__cause__, RegistryUnavailable)
    assert await registration.wait_published(0) is False
    with pytest.raises(RegistryUnavailable, match="not withdrawn"):
        await registration.unregister(wait=0.02)
    await registration.unregister()


async def test_a_failing_lookup_returns_the_last_answer_or_raises(registry, backend):
    await registry.register(instance(), wait=WAIT_S)
    await registry.lookup("shop.Orders")
    backend.down()
    assert (await registry.lookup("shop.Orders")).source == "cache"
    with pytest.raises(RegistryUnavailable):
        await registry.lookup("never.Seen")
    with pytest.raises(RegistryUnavailable):
        await registry.services()


async def test_a_lookup_raises_after_its_wait(registry, backend):
    backend.freeze()
    with pytest.raises(RegistryUnavailable, match=r"within 0\.02 s"):
        await registry.lookup("never.Seen", wait=0.02)


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


@pytest.mark.parametrize("kind", ["plain", "coroutine"])
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

    async with registry.subscribe("shop.Orders", plain if kind == "plain" else awaits) as following:
        assert (await following.wait(WAIT_S)).instances == ()
        for port in range(1, 6):
            await registry.register(instance(port), wait=WAIT_S)
        await aio_wait_until(lambda: snapshots and len(snapshots[-1].instances) == 5)


async def test_a_listener_that_raises_is_an_event_and_is_called_again(registry, events):
    calls = []

    async def listener(snapshot):
        calls.append(snapshot)
        raise ZeroDivisionError

    async with registry.subscribe("shop.Orders", listener):
        await aio_wait_until(lambda: calls)
        await registry.register(instance(), wait=WAIT_S)
        await aio_wait_until(lambda: len(calls) >= 2)
        await aio_wait_until(lambda: any(isinstance(event, CallbackFailed) for event in events))


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
    failed = lambda: [one for one in events if isinstance(one, CallbackFailed)]  # noqa: E731
    await aio_wait_until(lambda: len(failed()) >= 3)
    assert isinstance(failed()[0].error, asyncio.CancelledError)
    with_it.close()


async def test_an_awaitable_returned_by_a_listener_is_awaited(registry):
    shown = []

    class Listener:
        """An object that is called as a coroutine function is."""

        async def __call__(self, snapshot):
            await asyncio.sleep(0)
            shown.append(len(snapshot.instances))

    listener = Listener()

    def wrapper(snapshot):
        return listener(snapshot)

    with_it = registry.subscribe("shop.Orders", wrapper)
    for port in (1, 2):
        await registry.register(instance(port), wait=WAIT_S)
        await aio_wait_until(lambda: shown and shown[-1] == port)  # noqa: B023
    with_it.close()


async def test_a_listener_may_close_its_own_subscription(registry):
    ended = []

    async def listener(_):
        subscription.close()
        await asyncio.sleep(0)
        ended.append(True)

    subscription = registry.subscribe("shop.Orders", listener)
    await aio_wait_until(lambda: ended)


async def test_snapshots_can_be_iterated_until_the_subscription_is_closed(registry):
    seen = []

    async def follow():
        async for snapshot in subscription:
            seen.append([one.port for one in snapshot.instances])  # noqa: PERF401 - looked at below

    subscription = registry.subscribe("shop.Orders")
    task = asyncio.create_task(follow())
    await aio_wait_until(lambda: seen == [[]])
    await registry.register(instance(), wait=WAIT_S)
    await aio_wait_until(lambda: seen == [[], [1]])
    subscription.close()
    await task


async def test_a_wait_without_a_snapshot_in_time_is_an_error(registry, backend):
    backend.freeze()
    subscription = registry.subscribe("shop.Orders")
    assert subscription.snapshot is None
    with pytest.raises(NotPublished, match="nothing is known"):
        await subscription.wait(0.02)
    subscription.close()
    with pytest.raises(NotPublished):
        await subscription.wait(WAIT_S)


async def test_close_withdraws_ends_iterations_and_refuses_later_calls(backend, timer):
    registry = Registry(backend, registry_policy=POLICY.replace(snapshot=False))
    await registry.register(instance(), wait=WAIT_S)
    subscription = registry.subscribe("shop.Orders")
    iterated = asyncio.create_task(anext(subscription.__aiter__()))
    await iterated

    async def follow():
        return [snapshot async for snapshot in subscription]

    task = asyncio.create_task(follow())
    await asyncio.sleep(0)
    await registry.close(WAIT_S)
    await registry.close(WAIT_S)
    await task
    assert (published_ids(backend), timer.pending) == ([], 0)
    for late in (
        registry.register(instance()),
        registry.lookup("shop.Orders"),
        registry.services(),
    ):
        with pytest.raises(RegistryClosed):
            await late


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


async def test_a_subscription_may_be_closed_from_any_thread(registry):
    subscription = registry.subscribe("shop.Orders")
    task = asyncio.create_task(_all(subscription))
    await subscription.wait(WAIT_S)
    await asyncio.to_thread(subscription.close)
    await task


async def _all(subscription):
    return [snapshot async for snapshot in subscription]


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
