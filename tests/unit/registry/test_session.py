"""A session as only races and bugs of rpcwheel show it; the rest is in tests/contract."""

import asyncio
import gc
import threading
import weakref

import pytest

from fixtures.flaky_backends import POLICY, HangingBackend, flaky_backend, instance
from fixtures.timers import no_new_threads, run_threads
from fixtures.waiting import WAIT_S, aio_wait_until, wait_until
from rpcwheel._concurrency.executor import KeyedExecutor
from rpcwheel.errors import RegistryClosed, RegistryRefused, RegistryUnavailable
from rpcwheel.events import TaskFailed
from rpcwheel.registry import Registry, aio
from rpcwheel.registry.reconciler import Reconciler, RegistrationState
from rpcwheel.registry.session import RegistrySession
from rpcwheel.testing import FlakyBackend
from rpcwheel.timer import WheelTimer


def test_the_worker_runs_again_after_a_bug(backend, timer, events, monkeypatch):
    session = RegistrySession(backend, POLICY, timer=timer)
    with monkeypatch.context() as broken:
        broken.setattr(Reconciler, "next_request", lambda *_: 1 / 0)
        record = session.set_desired(instance(), flush_now=False)
        assert wait_until(lambda: any(isinstance(event, TaskFailed) for event in events))
    assert wait_until(
        lambda: timer.advance(0.1) >= 0 and record.state is RegistrationState.PUBLISHED
    )
    assert session.close().result(WAIT_S)
    assert timer.pending == 0


def test_nothing_begins_while_the_timer_gets_no_thread(backend):
    """Without it no lease would be renewed, and no watch be tried again."""
    with WheelTimer() as timer:
        session = RegistrySession(backend, POLICY, timer=timer)
        begins = [
            lambda: session.set_desired(instance(), flush_now=False),
            lambda: session.remove(instance(), flush_now=False),
            lambda: session.watches.acquire("shop.Orders", "user"),
        ]
        for begin in begins:
            with no_new_threads(), pytest.raises(RuntimeError, match="can't start new thread"):
                begin()
        assert (session.records(), session.watches.watches()) == ((), [])
        assert session.close().result(WAIT_S)


def test_a_closed_session_starts_no_thread(backend):
    with WheelTimer() as timer:
        session = RegistrySession(backend, POLICY, timer=timer)
        assert session.close().result(WAIT_S)
        with no_new_threads(), pytest.raises(RegistryClosed):
            session.set_desired(instance(), flush_now=False)


def test_an_instance_whose_publication_runs_while_the_session_closes_is_withdrawn(timer):
    let_go = threading.Event()
    backend = HangingBackend(flaky_backend(timer).inner, let_go)
    session = RegistrySession(backend, POLICY, timer=timer)
    session.set_desired(instance(), flush_now=False)
    assert wait_until(lambda: backend.is_called)
    ended = session.close()
    let_go.set()
    assert ended.result(WAIT_S)
    assert [method for method, _ in backend.requests] == ["publish", "withdraw"]


class RecordingFiles:
    """Snapshot files that record their calls."""

    def __init__(self):
        self.calls = []

    def load(self, service):
        """There is no file."""

    def keep(self, service, instances, agrees=None):
        self.calls.append("keep")

    def close(self):
        self.calls.append("close")


def test_close_updates_the_snapshot_files_before_it_closes_them(backend, timer, monkeypatch):
    files = RecordingFiles()
    session = RegistrySession(backend, POLICY, timer=timer, snapshots=files)
    watch = session.watches.acquire("shop.Orders", "user")
    assert watch.wait(WAIT_S) is not None
    files.calls.clear()
    # A worker that has begun to run before `submit` returns.
    monkeypatch.setattr(KeyedExecutor, "submit", lambda _, key, job: job())
    assert session.close().result(WAIT_S)
    assert files.calls == ["keep", "close"]


async def test_a_subscription_that_begins_while_the_registry_closes_ends(monkeypatch):
    opened, subscribe = aio.open_registry("memory://"), Registry.subscribe

    def subscribe_before_the_close(*arguments):
        subscription = subscribe(*arguments)
        run_threads(lambda: asyncio.run(opened.close()))
        return subscription

    monkeypatch.setattr(Registry, "subscribe", subscribe_before_the_close)
    async with asyncio.timeout(WAIT_S):
        assert [snapshot async for snapshot in opened.subscribe("shop.Orders")] == []


async def test_a_closed_subscription_is_forgotten():
    async with aio.open_registry("memory://") as opened:
        subscription = opened.subscribe("shop.Orders")
        closed = weakref.ref(subscription)
        subscription.close()
        del subscription
        assert await aio_wait_until(lambda: gc.collect() >= 0 and closed() is None)


class RefusingLookups(FlakyBackend):
    """A backend that loses its records, and whose lookups fail with `error`."""

    error: Exception = RegistryUnavailable("away")

    def renew(self, instances):
        super().renew(instances)
        return {instance.key: "missing" for instance in instances}

    def lookup(self, service):
        self.requests.append(("lookup", (service,)))
        raise self.error


@pytest.mark.parametrize(
    ("error", "lookups"), [(RegistryUnavailable("away"), 1), (RegistryRefused("no"), 3)]
)
def test_the_lookups_for_lost_instances_end_when_the_registry_is_unavailable(
    timer, backend, error, lookups
):
    """Each takes the whole timeout then, and the lease would end meanwhile."""
    losing = RefusingLookups(backend)
    losing.error = error
    session = RegistrySession(losing, POLICY, timer=timer)
    for service in ("a", "b", "c"):
        session.set_desired(instance(service=service), flush_now=False)
    published = RegistrationState.PUBLISHED
    assert wait_until(lambda: {record.state for record in session.records()} == {published})
    losing.requests.clear()
    timer.advance(2.5)
    assert wait_until(lambda: "publish" in [kind for kind, _ in losing.requests])
    assert [kind for kind, _ in losing.requests].count("lookup") == lookups
    assert session.close().result(WAIT_S)
