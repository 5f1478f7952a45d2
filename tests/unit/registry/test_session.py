"""What only a bug of rpcwheel could do to a session; the rest is in tests/contract."""

from fixtures.flaky_backends import POLICY, instance
from fixtures.waiting import WAIT_S, wait_until
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
