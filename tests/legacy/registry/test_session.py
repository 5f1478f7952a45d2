"""The session over an engine that fails on command: what is wanted comes about, nothing blocks."""

import os
import signal
import threading

import pytest

from fixtures.registry_worlds import POLICY, Hanging, flaky, held, instance
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.errors import (
    RegistryClosed,
)
from rpcwheel.registry.reconciler import State
from rpcwheel.registry.session import Session


@pytest.fixture
def session(backend, timer):
    session = Session(backend, POLICY, timer=timer)
    yield session
    backend.up()
    assert session.close().result(WAIT_S)
    assert timer.pending == 0


def publish(session, one):
    entry = session.set_desired(one, flush_now=False)
    assert session.when(entry, State.PUBLISHED).result(WAIT_S)
    return entry


def kinds(events, kind):
    return [event for event in events if isinstance(event, kind)]


def rests(session):
    """Whether it has nothing to do, and has set itself an alarm."""
    with session._lock:
        return not session._working and session._alarm._timeout is not None


def step_until(session, look, seconds=0.1):
    """Let time pass until it comes true, but none while the session works; gives how much."""
    timer = session._alarm._timer
    start = timer.now
    while not look():
        assert timer.now < start + 60
        timer.advance(seconds)
        assert wait_until(lambda: look() or rests(session))
    return timer.now - start


def test_a_thousand_that_were_lost_come_back_spread_over_the_jitter(backend, timer):
    """In a process of their own each, or as here in one: each has its own chance."""
    session = Session(backend, POLICY.changed(lease_ttl=6.0, jitter=5.0), timer=timer)
    entries = [session.set_desired(instance(port), flush_now=False) for port in range(1, 1001)]
    assert all(session.when(entry, State.PUBLISHED).result(WAIT_S) for entry in entries)
    backend.forget()
    step_until(session, lambda: any(entry.state is State.LOST for entry in entries), 0.05)
    per_half_second = []
    before = len(held(backend))
    for _ in range(10):
        for _ in range(10):
            timer.advance(0.05)
            assert wait_until(lambda: rests(session))
        now = len(held(backend))
        per_half_second.append(now - before)
        before = now
    assert before >= 950  # the last ones may be late, as we are
    assert max(per_half_second) < 200, per_half_second  # 100 each if they were even
    assert min(per_half_second[:9]) > 40, per_half_second
    assert session.close().result(WAIT_S)


def test_requests_are_made_one_at_a_time_and_never_on_the_timers_thread(timer):
    threads, running = set(), []

    class Watched(type(flaky(timer))):
        def _ask(self, method, what, done):
            running.append(method)
            assert len(running) == 1
            threads.add(threading.current_thread().name)
            answer = super()._ask(method, what, done)
            running.remove(method)
            return answer

    session = Session(Watched(flaky(timer).inner), POLICY, timer=timer)
    for port in range(1, 30):
        session.set_desired(instance(port), flush_now=False)
        session.look_up("shop.Orders")
        timer.advance(0.5)
    assert session.close().result(WAIT_S)
    assert all(name.startswith("rpcwheel-worker") for name in threads)


def test_whoever_waits_hears_that_it_is_not_wanted_any_more(session, backend):
    backend.down()
    entry = session.set_desired(instance(), flush_now=False)
    published = session.when(entry, State.PUBLISHED)
    assert wait_until(lambda: entry.error is not None)  # it was tried
    session.remove(entry, flush_now=False)
    gone = session.when(entry, State.GONE)
    assert published.result(WAIT_S) is False
    session.set_desired(instance(), flush_now=False)
    assert gone.result(WAIT_S) is False


# Questions


def test_what_somebody_waits_for_is_tried_soon(session, backend, timer):
    backend.down()
    entry = session.set_desired(instance(), flush_now=False)
    assert wait_until(lambda: entry.error is not None and not session._working)
    backend.up()
    session.set_desired(instance(2), flush_now=True)
    timer.advance(0.15)
    assert held(backend) == []
    timer.advance(0.1)
    assert session.when(entry, State.PUBLISHED).result(WAIT_S)


# The end


def test_a_request_that_hangs_keeps_nobody_from_closing(timer):
    let_go = threading.Event()
    backend = Hanging(flaky(timer).inner, let_go)
    session = Session(backend, POLICY, timer=timer)
    session.set_desired(instance(), flush_now=False)
    assert wait_until(lambda: backend.hanging)
    asked = session.look_up("shop.Orders")
    over = session.close()
    with pytest.raises(RegistryClosed):
        asked.result(WAIT_S)
    with pytest.raises(TimeoutError):
        over.result(0.05)
    session.abandon()
    assert over.result(WAIT_S)
    let_go.set()
    assert wait_until(lambda: not session._working or session._reconciler._under_way is None)
    assert (held(backend), timer.pending) == ([], 0)


# Timers


# Processes

FORGOTTEN = """
import sys, threading
from rpcwheel.registry.backends import open_backend
from rpcwheel.registry.backend import Settings
from rpcwheel.registry.sync import Registry
from rpcwheel.instance import ServiceInstance
from rpcwheel.testing import FlakyBackend
backend = FlakyBackend(open_backend("memory://", Settings(5.0, 60.0)))
registry = Registry(backend)
one = ServiceInstance(service="shop", host="a", port=1)
registry.register(one, wait=5)
if sys.argv[1] == "frozen":
    backend.freeze()
    registry.unregister(one)
registry.subscribe("shop")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_in_a_forked_child_it_is_closed_and_hangs_nowhere(session, backend):
    entry = publish(session, instance())
    locked, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with session._lock:
            locked.set()
            let_go.wait(WAIT_S)

    holder = threading.Thread(target=hold, daemon=True)
    holder.start()
    assert locked.wait(WAIT_S)
    child = os.fork()
    if not child:
        signal.alarm(20)
        try:
            session.set_desired(instance(2), flush_now=False)
        except RegistryClosed:
            done = session.close().result(0) and not session.when(entry, State.GONE).result(0)
            os._exit(0 if done else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    let_go.set()
    holder.join(WAIT_S)
    assert held(backend) == ["10.0.0.1:1"]
