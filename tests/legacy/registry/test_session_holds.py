"""What must not hold up renewals: questions, sinks, strategies, timers that end."""

import sys
import threading

from tenacity.wait import wait_base

from fixtures.registry_worlds import POLICY, flaky, instance
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.observe import RegistryFailed
from rpcwheel.registry.reconciler import State
from rpcwheel.registry.session import Session

FAST = POLICY.changed(renew=0.05)


def count(backend, method):
    return sum(name == method for name, _ in backend.requests)


def published(session, one):
    entry = session.set_desired(one, flush_now=False)
    assert session.when(entry, State.PUBLISHED).result(WAIT_S)
    return entry


class Strategy(wait_base):
    """Hangs, or raises."""

    def __init__(self, act):
        self.act = act

    def __call__(self, retry_state):
        return self.act() or 0.02


def test_a_strategy_that_hangs_holds_up_no_caller():
    hangs, goes_on = threading.Event(), threading.Event()
    strategy = Strategy(lambda: hangs.set() or (goes_on.wait(WAIT_S) and 0))
    backend = flaky(None)
    session = Session(backend, POLICY.changed(backoff=strategy))
    backend.down()
    entry = session.set_desired(instance(), flush_now=False)
    assert hangs.wait(WAIT_S)
    watch = session.watches.acquire("shop.Orders", "me")
    for _ in range(20):
        session.set_desired(instance(2), flush_now=False)
        assert session.records()
        session.watches.release(watch, "another")
    backend.up()
    goes_on.set()
    assert session.when(entry, State.PUBLISHED).result(WAIT_S)
    assert session.close().result(WAIT_S)


def test_a_strategy_that_ends_the_thread_does_not_end_the_session():
    backend = flaky(None)
    session = Session(backend, FAST.changed(backoff=Strategy(lambda: sys.exit(3))))
    published(session, instance())
    backend.down()
    entry = session.set_desired(instance(2), flush_now=False)
    assert wait_until(lambda: entry.error is not None)
    backend.up()
    session.look_up("shop.Orders").result(WAIT_S)
    assert session.when(entry, State.PUBLISHED).result(WAIT_S)
    assert session.close().result(WAIT_S)


def test_a_bug_of_ours_is_told_and_the_work_goes_on(monkeypatch):
    backend = flaky(None)
    session = Session(backend, POLICY)
    monkeypatch.setattr("rpcwheel.registry.session.BUG_RETRY_NS", 1_000_000)
    with monkeypatch.context() as broken:
        broken.setattr(session, "_take", lambda: 1 / 0)
        entry = session.set_desired(instance(), flush_now=False)
        assert wait_until(lambda: not session._working)
    assert session.when(entry, State.PUBLISHED).result(WAIT_S)
    assert session.close().result(WAIT_S)


def test_what_fails_after_the_end_is_told_to_nobody(events):
    backend = flaky(None)
    session = Session(backend, POLICY)
    published(session, instance())
    backend.freeze()
    over = session.close()
    assert wait_until(lambda: session._reconciler._under_way is not None)
    session.abandon()
    assert over.result(WAIT_S)
    told = len(events)
    assert wait_until(lambda: session._reconciler._under_way is None)
    assert session._notifications.wait(WAIT_S)
    assert not [one for one in events[told:] if isinstance(one, RegistryFailed)]
