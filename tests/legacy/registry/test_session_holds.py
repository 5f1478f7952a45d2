"""What must not hold up renewals: questions, sinks, strategies, timers that end."""

import sys
import threading
import time

import pytest
from tenacity.wait import wait_base

from fixtures.registry_worlds import POLICY, flaky, held, instance
from fixtures.waiting import wait_until
from rpcwheel.errors import RegistryUnavailable
from rpcwheel.observe import RegistryFailed, add_sink, remove_sink
from rpcwheel.registry.entry import State
from rpcwheel.registry.session import Session
from rpcwheel.timer import WheelTimer

FAST = POLICY.changed(renew=0.05)


def count(provider, method):
    return sum(name == method for name, _ in provider.requests)


def published(session, one):
    entry = session.want(one, hasty=False)
    assert session.when(entry, State.PUBLISHED).result(5)
    return entry


def test_questions_that_never_end_hold_up_no_renewal_and_no_publishing():
    class Slow(type(flaky(None))):
        def lookup(self, service):
            time.sleep(0.002)
            return super().lookup(service)

    session = Session(Slow(flaky(None).inner), FAST)
    provider, ends = session._provider, threading.Event()

    def ask(number):
        while not ends.is_set():
            session.look_up(f"service-{number}").result(20)

    askers = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(4)]
    for asker in askers:
        asker.start()
    try:
        assert wait_until(lambda: count(provider, "lookup") > 10)
        published(session, instance())
        assert wait_until(lambda: count(provider, "renew") > 3)
    finally:
        ends.set()
        for asker in askers:
            asker.join(20)
    assert session.close().result(5)


def test_a_sink_that_hangs_holds_up_no_renewal_and_no_end():
    hangs, goes_on = threading.Event(), threading.Event()

    def hang(_):
        hangs.set()
        goes_on.wait(60)

    provider = flaky(None)
    session = Session(provider, FAST)
    add_sink(hang)
    try:
        published(session, instance())
        assert hangs.wait(20)
        with pytest.raises(RegistryUnavailable):
            session.look_up(provider.down() or "shop.Orders").result(5)
        provider.up()
        renewed = count(provider, "renew")
        assert wait_until(lambda: count(provider, "renew") > renewed + 3)
        assert session.close().result(5)
        assert held(provider) == []
    finally:
        remove_sink(hang)
        goes_on.set()


class Strategy(wait_base):
    """Hangs, or raises."""

    def __init__(self, act):
        self.act = act

    def __call__(self, retry_state):
        return self.act() or 0.02


def test_a_strategy_that_hangs_holds_up_no_caller():
    hangs, goes_on = threading.Event(), threading.Event()
    strategy = Strategy(lambda: hangs.set() or (goes_on.wait(60) and 0))
    provider = flaky(None)
    session = Session(provider, POLICY.changed(retry=strategy))
    provider.down()
    entry = session.want(instance(), hasty=False)
    assert hangs.wait(20)
    session.following.follow("shop.Orders", lambda directory: directory)
    for _ in range(20):
        session.want(instance(2), hasty=False)
        assert session.entries()
        session.following.unfollow("shop.Orders", object())
    provider.up()
    goes_on.set()
    assert session.when(entry, State.PUBLISHED).result(20)
    assert session.close().result(5)


def test_a_strategy_that_ends_the_thread_does_not_end_the_session():
    provider = flaky(None)
    session = Session(provider, FAST.changed(retry=Strategy(lambda: sys.exit(3))))
    published(session, instance())
    provider.down()
    entry = session.want(instance(2), hasty=False)
    assert wait_until(lambda: entry.error is not None)
    provider.up()
    session.look_up("shop.Orders").result(5)
    assert session.when(entry, State.PUBLISHED).result(20)
    assert session.close().result(5)


def test_a_timer_that_is_stopped_while_the_renewal_waits_there_ends_no_renewal():
    own, provider = WheelTimer(), flaky(None)
    session = Session(provider, POLICY.changed(renew=0.3), timer=own)
    published(session, instance())
    own.stop()
    assert wait_until(lambda: count(provider, "renew") > 3)
    assert session.close().result(5)


def test_a_bug_of_ours_is_told_and_the_work_goes_on(monkeypatch):
    provider = flaky(None)
    session = Session(provider, POLICY)
    monkeypatch.setattr("rpcwheel.registry.session.AGAIN_NS", 1_000_000)
    with monkeypatch.context() as broken:
        broken.setattr(session, "_take", lambda: 1 / 0)
        entry = session.want(instance(), hasty=False)
        assert wait_until(lambda: not session._working)
    assert session.when(entry, State.PUBLISHED).result(20)
    assert session.close().result(5)


def test_what_fails_after_the_end_is_told_to_nobody(events):
    provider = flaky(None)
    session = Session(provider, POLICY)
    published(session, instance())
    provider.freeze()
    over = session.close()
    assert wait_until(lambda: session._core._flight is not None)
    session.abandon()
    assert over.result(5)
    told = len(events)
    assert wait_until(lambda: session._core._flight is None)
    assert session._telling.flush(20)
    assert not [one for one in events[told:] if isinstance(one, RegistryFailed)]
