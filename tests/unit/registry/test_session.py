"""A session as only races and bugs of rpcwheel show it; the rest is in tests/contract."""

from fixtures.flaky_backends import POLICY, instance
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel._concurrency.executor import KeyedExecutor
from rpcwheel.events import TaskFailed
from rpcwheel.registry.reconciler import Reconciler, RegistrationState
from rpcwheel.registry.session import RegistrySession


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
