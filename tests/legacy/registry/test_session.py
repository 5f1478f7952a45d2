"""The session over an engine that fails on command: what is wanted comes about, nothing blocks."""

import os
import signal
import subprocess
import sys
import threading
from itertools import pairwise

import pytest

from fixtures.registry_worlds import POLICY, Hanging, flaky, held, instance
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.errors import (
    NotPublished,
    RegistryClosed,
    RegistryRefused,
    RegistryUnavailable,
    TimerStopped,
)
from rpcwheel.observe import InstancePublished, RegistryFailed, RegistryRecovered
from rpcwheel.registry.entry import State
from rpcwheel.registry.session import Session
from rpcwheel.timer import ManualTimer, WheelTimer, shared_timer


@pytest.fixture
def session(provider, timer):
    session = Session(provider, POLICY, timer=timer)
    yield session
    provider.up()
    assert session.close().result(5)
    assert timer.pending == 0


def publish(session, one):
    entry = session.want(one, hasty=False)
    assert session.when(entry, State.PUBLISHED).result(5)
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


def test_what_is_wanted_is_published_and_what_is_dropped_is_gone(session, provider):
    entry = publish(session, instance())
    assert (held(provider), session.up) == (["10.0.0.1:1"], True)
    session.drop(entry, hasty=False)
    assert session.when(entry, State.GONE).result(5)
    assert (held(provider), session.entries()) == ([], ())


def test_an_engine_that_is_down_is_no_error_and_is_told_as_soon_as_it_is_up(
    session, provider, timer, events
):
    provider.down()
    entry = session.want(instance(), hasty=False)
    assert wait_until(lambda: entry.error is not None)
    assert (type(entry.error), session.up) == (RegistryUnavailable, False)
    assert wait_until(lambda: entry.error.__traceback__ is None)  # it may be kept for long
    step_until(session, lambda: len(kinds(events, RegistryFailed)) >= 3)
    provider.up()
    step_until(session, lambda: entry.state is State.PUBLISHED)
    assert held(provider) == ["10.0.0.1:1"]
    assert session._telling.flush(WAIT_S)
    assert len(kinds(events, RegistryRecovered)) == 1


def test_what_was_unregistered_while_the_engine_was_down_never_comes_back(session, provider, timer):
    entry = publish(session, instance())
    provider.lose_answers()
    session.change(entry, {"weight": 7})
    assert wait_until(lambda: entry.error is not None)
    session.drop(entry, hasty=False)
    provider.down()
    timer.advance(5)
    provider.up()
    step_until(session, lambda: entry.state is State.GONE)
    timer.advance(20)
    assert wait_until(lambda: not session._working)
    assert held(provider) == []


@pytest.mark.parametrize("lost", ["forget", "down"])
def test_what_the_engine_has_lost_is_published_again(session, provider, timer, events, lost):
    entry = publish(session, instance())
    getattr(provider, lost)()
    if lost == "down":
        step_until(session, lambda: not held(provider), 0.5)  # the lease ran out
        provider.up()
    passed = step_until(session, lambda: held(provider) and entry.state is State.PUBLISHED)
    assert passed <= 2.2 + 2.0 + 1.0 + 0.5  # renewal, jitter, retry, and we are late ourselves
    assert session._telling.flush(WAIT_S)
    again = [event.again for event in kinds(events, InstancePublished)]
    assert again == ["", "wiped" if lost == "forget" else "lease"]


def test_a_thousand_that_were_lost_come_back_spread_over_the_jitter(provider, timer):
    """In a process of their own each, or as here in one: each has its own chance."""
    session = Session(provider, POLICY.changed(lease=6.0, jitter=5.0), timer=timer)
    entries = [session.want(instance(port), hasty=False) for port in range(1, 1001)]
    assert all(session.when(entry, State.PUBLISHED).result(20) for entry in entries)
    provider.forget()
    step_until(session, lambda: any(entry.state is State.LOST for entry in entries), 0.05)
    per_half_second = []
    before = len(held(provider))
    for _ in range(10):
        for _ in range(10):
            timer.advance(0.05)
            assert wait_until(lambda: rests(session))
        now = len(held(provider))
        per_half_second.append(now - before)
        before = now
    assert before >= 950  # the last ones may be late, as we are
    assert max(per_half_second) < 200, per_half_second  # 100 each if they were even
    assert min(per_half_second[:9]) > 40, per_half_second
    assert session.close().result(5)


def test_instances_of_many_processes_come_back_spread_over_the_jitter(timer):
    """Each process has a registry of its own; here they share one engine."""
    sessions = [Session(flaky(timer, "thousand"), POLICY, timer=timer) for _ in range(200)]
    entries = [one.want(instance(port), hasty=False) for port, one in enumerate(sessions, 1)]
    assert all(
        one.when(entry, State.PUBLISHED).result(20)
        for one, entry in zip(sessions, entries, strict=True)
    )
    sessions[0]._provider.forget()
    for one, entry in zip(sessions, entries, strict=True):
        one._provider._gone = {
            entry.instance.key
        }  # each hears that it was wiped, not only the first
    counts = []
    for _ in range(50):
        timer.advance(0.1)
        assert wait_until(lambda: all(rests(one) for one in sessions))
        counts.append(len(held(sessions[0]._provider)))
        if counts[-1] == 200:
            break
    steps = [after - before for before, after in pairwise(counts)]
    assert counts[-1] == 200
    assert max(steps) < 40, steps
    for future in [one.close() for one in sessions]:
        assert future.result(10)


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
        session.want(instance(port), hasty=False)
        session.look_up("shop.Orders")
        timer.advance(0.5)
    assert session.close().result(5)
    assert all(name.startswith("rpcwheel-worker") for name in threads)


def test_a_provider_that_raises_what_it_should_not_is_told_and_tried_again(
    session, provider, timer, events, monkeypatch
):
    monkeypatch.setattr(provider, "publish", lambda _: 1 / 0)
    entry = session.want(instance(), hasty=False)
    assert wait_until(lambda: isinstance(entry.error, ZeroDivisionError))
    monkeypatch.undo()
    step_until(session, lambda: entry.state is State.PUBLISHED)
    assert session._telling.flush(WAIT_S)
    assert kinds(events, RegistryFailed)[0].request == "publish"


def test_whoever_waits_hears_that_it_is_not_wanted_any_more(session, provider):
    provider.down()
    entry = session.want(instance(), hasty=False)
    published = session.when(entry, State.PUBLISHED)
    assert wait_until(lambda: entry.error is not None)  # it was tried
    session.drop(entry, hasty=False)
    gone = session.when(entry, State.GONE)
    assert published.result(5) is False
    session.want(instance(), hasty=False)
    assert gone.result(5) is False


def test_what_is_unregistered_can_not_be_changed(session):
    entry = publish(session, instance())
    session.drop(entry, hasty=False)
    with pytest.raises(NotPublished, match="register it again"):
        session.change(entry, {"weight": 1})


# Questions


def test_a_question_is_answered_while_the_session_waits_after_a_failure(session, provider, timer):
    provider.down()
    session.want(instance(), hasty=False)
    assert wait_until(lambda: provider.requests)
    with pytest.raises(RegistryUnavailable):
        session.look_up("shop.Orders").result(5)
    provider.up()
    assert session.look_up("shop.Orders").result(5).source == "live"
    assert wait_until(lambda: held(provider))  # and what had waited need wait no more


def test_what_was_heard_last_answers_while_the_engine_does_not(session, provider, timer):
    publish(session, instance())
    live = session.look_up("shop.Orders").result(5)
    timer.advance(1)
    last = session.last("shop.Orders", RegistryUnavailable("away"))
    assert (last.instances, last.source, last.age_s) == (live.instances, "cache", 1.0)
    for error in (RegistryRefused("no"), RegistryUnavailable("away")):
        with pytest.raises(type(error)):
            session.last("never.Seen", error)


def test_what_somebody_waits_for_is_tried_soon(session, provider, timer):
    provider.down()
    entry = session.want(instance(), hasty=False)
    assert wait_until(lambda: entry.error is not None and not session._working)
    provider.up()
    session.want(instance(2), hasty=True)
    timer.advance(0.15)
    assert held(provider) == []
    timer.advance(0.1)
    assert session.when(entry, State.PUBLISHED).result(5)


# The end


def test_closing_withdraws_and_leaves_nothing(provider, timer):
    session = Session(provider, POLICY, timer=timer)
    entries = [publish(session, instance(port)) for port in range(1, 4)]
    waiting = session.when(entries[0], State.PUBLISHED)
    assert session.close().result(5)
    assert (held(provider), timer.pending, waiting.result(0)) == ([], 0, True)
    assert {entry.state for entry in entries} == {State.GONE}
    assert sorted(provider.requests[-1][1]) == ["10.0.0.1:1", "10.0.0.1:2", "10.0.0.1:3"]
    assert session.close().result(0)
    with pytest.raises(RegistryClosed, match="open another"):
        session.want(instance(), hasty=False)


def test_closing_over_an_engine_that_is_down_takes_no_time(provider, timer):
    session = Session(provider, POLICY, timer=timer)
    entry = publish(session, instance())
    provider.down()
    session.drop(entry, hasty=False)
    waiting = session.when(entry, State.GONE)
    assert session.close().result(5)
    assert (waiting.result(0), timer.pending) == (False, 0)
    assert set(provider.requests[1:]) == {("withdraw", ("10.0.0.1:1",))}


def test_a_request_that_hangs_keeps_nobody_from_closing(timer):
    let_go = threading.Event()
    provider = Hanging(flaky(timer).inner, let_go)
    session = Session(provider, POLICY, timer=timer)
    session.want(instance(), hasty=False)
    assert wait_until(lambda: provider.hanging)
    asked = session.look_up("shop.Orders")
    over = session.close()
    with pytest.raises(RegistryClosed):
        asked.result(5)
    with pytest.raises(TimeoutError):
        over.result(0.05)
    session.abandon()
    assert over.result(5)
    let_go.set()
    assert wait_until(lambda: not session._working or session._core._flight is None)
    assert (held(provider), timer.pending) == ([], 0)


def test_what_is_published_after_all_while_it_closes_is_withdrawn(timer):
    let_go = threading.Event()
    provider = Hanging(flaky(timer).inner, let_go)
    session = Session(provider, POLICY, timer=timer)
    session.want(instance(), hasty=False)
    assert wait_until(lambda: provider.hanging)
    over = session.close()
    let_go.set()
    assert over.result(5)
    assert held(provider) == []
    assert [method for method, _ in provider.requests] == ["publish", "withdraw"]


# Timers


def test_a_timer_that_was_stopped_is_replaced_by_the_shared_one(events):
    with WheelTimer() as own:
        provider = flaky(None)
        session = Session(provider, POLICY.changed(retry=0.02), timer=own)
    provider.down()
    entry = session.want(instance(), hasty=False)
    assert wait_until(lambda: len(provider.requests) > 2)
    provider.up()
    assert session.when(entry, State.PUBLISHED).result(5)
    assert session.close().result(5)
    assert (
        sum(isinstance(event.error, TimerStopped) for event in kinds(events, RegistryFailed)) == 1
    )
    assert shared_timer().pending == 0


def test_a_manual_timer_that_was_stopped_is_told_and_hurts_nothing(events):
    timer = ManualTimer()
    provider = flaky(None)
    session = Session(provider, POLICY, timer=timer)
    timer.stop()
    publish(session, instance())
    assert wait_until(lambda: kinds(events, RegistryFailed))
    assert session.close().result(5)


# Processes

FORGOTTEN = """
import sys, threading
from rpcwheel.registry.providers import open_provider
from rpcwheel.registry.provider import Settings
from rpcwheel.registry.sync import FailbackRegistry
from rpcwheel.instance import ServiceInstance
from rpcwheel.testing import FlakyProvider
provider = FlakyProvider(open_provider("memory://", Settings(5.0, 60.0)))
registry = FailbackRegistry(provider)
one = ServiceInstance(service="shop", host="a", port=1)
registry.register(one, wait=5)
if sys.argv[1] == "frozen":
    provider.freeze()
    registry.unregister(one)
registry.subscribe("shop")
"""


@pytest.mark.parametrize("engine", ["well", "frozen"])
def test_a_registry_that_is_forgotten_open_does_not_keep_the_program_from_ending(engine):
    run = subprocess.run(
        [sys.executable, "-c", FORGOTTEN, engine],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_in_a_forked_child_it_is_closed_and_hangs_nowhere(session, provider):
    entry = publish(session, instance())
    locked, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with session._lock:
            locked.set()
            let_go.wait(20)

    holder = threading.Thread(target=hold, daemon=True)
    holder.start()
    assert locked.wait(5)
    child = os.fork()
    if not child:
        signal.alarm(20)
        try:
            session.want(instance(2), hasty=False)
        except RegistryClosed:
            done = session.close().result(0) and not session.when(entry, State.GONE).result(0)
            os._exit(0 if done else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    let_go.set()
    holder.join(5)
    assert held(provider) == ["10.0.0.1:1"]
