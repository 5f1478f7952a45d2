"""The watches of a backend whose engine is asked: nobody is left with what is out of date."""

import os
import signal
import threading
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fixtures.engine_watchers import RecordingWatcher
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.errors import RegistryRefused, RegistryUnavailable
from rpcwheel.observe import ExecutorRejected
from rpcwheel.registry.backend import View
from rpcwheel.registry.backends.polling import PollingWatcher
from rpcwheel.timer import ManualTimer, WheelTimer
from rpcwheel.timer.clock import clock_of

PERIOD = 10.0
RETRY = 4.0
TICK_NS = 10_000_000


class Engine:
    """What it has by service, and whether it answers."""

    def __init__(self) -> None:
        self.records: dict[str, dict[str, bytes]] = {}
        self.error: Exception | None = None
        self.refused: set[str] = set()
        self.reads: list[tuple[str, View | None]] = []
        self.gate: threading.Event | None = None

    def read(self, service: str, known: View | None) -> View:
        self.reads.append((service, known))
        view = View(dict(self.records.get(service, {})))
        if self.gate is not None:
            self.gate.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        if service in self.refused:
            raise RegistryRefused("not for you")
        return known if known is not None and known.records == view.records else view


def followed(engine: Engine, timer: ManualTimer, **options: bool) -> PollingWatcher:
    given = {"anew": False} | options
    return PollingWatcher(engine.read, timer=timer, period_s=PERIOD, retry_s=RETRY, **given)


def quiet(following: PollingWatcher) -> bool:
    """Whether there is nothing to do; waits for it."""
    return wait_until(lambda: not following._running)


@pytest.fixture
def engine():
    """One with two services."""
    engine = Engine()
    engine.records = {"a": {"1": b"x"}, "b": {}}
    return engine


@pytest.fixture
def following(engine, timer):
    """What follows it; in the end nothing is left."""
    following = followed(engine, timer)
    yield following
    following.close()
    assert quiet(following)
    assert timer.pending == 0


def test_a_watch_begins_with_what_there_is_also_if_it_is_nothing(following):
    a, b = RecordingWatcher(), RecordingWatcher()
    following.watch("a", a)
    following.watch("b", b)
    assert a.sees("1")
    assert b.sees()
    assert following.services == {"a", "b"}


def test_a_hint_makes_it_look_at_that_service_only(following, engine):
    a, b = RecordingWatcher(), RecordingWatcher()
    following.watch("a", a)
    following.watch("b", b)
    assert a.sees("1")
    assert b.sees()
    engine.records = {"a": {}, "b": {"2": b""}}
    following.look("a")
    assert a.sees()
    assert quiet(following)
    assert len(b.news) == 1
    following.look("nobody's")
    assert quiet(following)
    assert [service for service, _ in engine.reads].count("nobody's") == 0


@pytest.mark.parametrize("anew", [False, True])
def test_a_change_that_nobody_told_of_is_found_after_the_period(engine, timer, anew):
    following, a = followed(engine, timer, anew=anew), RecordingWatcher()
    following.watch("a", a)
    assert a.sees("1")
    engine.records["a"] = {}
    assert quiet(following)
    timer.advance(0.8 * PERIOD)
    assert quiet(following)
    assert len(a.news) == 1
    timer.advance(0.4 * PERIOD)
    assert a.sees()
    assert quiet(following)
    assert (engine.reads[-1][1] is None) is anew
    following.close()


def test_a_failure_is_a_doubt_once_and_is_tried_again_until_it_ends(following, engine, timer):
    a, b = RecordingWatcher(), RecordingWatcher()
    following.watch("a", a)
    following.watch("b", b)
    assert a.sees("1")
    assert b.sees()
    engine.error = RegistryUnavailable("gone")
    following.look("a")
    for _ in range(8):
        assert quiet(following)
        timer.advance(RETRY)
    assert quiet(following)
    assert len(engine.reads) > 5
    engine.error = None
    timer.advance(RETRY)
    assert a.sees("1")
    assert b.sees()
    assert a.after_doubt == ["gone", {"1"}]
    assert b.after_doubt == ["gone", set()]


def test_after_a_failure_all_that_were_made_doubtful_are_told_soon(engine, timer):
    following = PollingWatcher(engine.read, timer=timer, period_s=1e6, retry_s=RETRY, anew=False)
    a, b = RecordingWatcher(), RecordingWatcher()
    following.watch("a", a)
    following.watch("b", b)
    assert a.sees("1")
    assert b.sees()
    engine.error = RegistryUnavailable("gone")
    following.look("a")
    assert a.doubts()
    assert b.doubts()
    assert quiet(following)
    engine.error = None
    timer.advance(RETRY)
    assert a.sees("1")
    assert b.sees()
    following.close()


def test_the_waits_grow_and_have_an_end(following, engine, timer):
    engine.error = RegistryUnavailable("gone")
    following.watch("a", RecordingWatcher())
    for tries in range(12):
        assert wait_until(lambda: following._retry in following._planned)
        wait_ns = following._retry._timeout.deadline - clock_of(timer)()
        assert wait_ns <= min(RETRY, 0.2 * 2**tries) * 1e9 + TICK_NS
        timer.advance(RETRY)
        assert quiet(following)
    assert len(engine.reads) >= 12


def test_a_timer_that_is_full_keeps_no_watch_from_going_on(engine, events):
    with WheelTimer(max_pending=1) as timer:
        timer.new_timeout(print, 1000)
        following = PollingWatcher(engine.read, timer=timer, period_s=0.1, retry_s=0.1, anew=True)
        a = RecordingWatcher()
        engine.error = RegistryUnavailable("gone")
        following.watch("a", a)
        assert a.doubts()
        engine.error = None
        assert a.sees("1")
        engine.records["a"] = {}
        assert a.sees()
        assert len(following._watches["a"]) == 1
        following.close()
        assert quiet(following)
    assert wait_until(lambda: len(events) == 2)  # of the period, and of the retry
    assert {type(event) for event in events} == {ExecutorRejected}


def test_a_refusal_of_one_service_does_not_touch_the_others(following, engine, timer):
    a, b = RecordingWatcher(), RecordingWatcher()
    engine.refused = {"b"}
    following.watch("b", b)
    following.watch("a", a)
    assert a.sees("1")
    assert b.doubts()
    assert quiet(following)
    engine.refused = set()
    timer.advance(RETRY)
    assert b.sees()
    assert a.news == [{"1"}]


def test_what_was_read_before_contact_was_lost_is_not_told(following, engine):
    a = RecordingWatcher()
    engine.gate = threading.Event()
    following.watch("a", a)
    assert wait_until(lambda: engine.reads)
    engine.records["a"] = {"new": b""}
    following.lost("wiped")
    gate, engine.gate = engine.gate, None
    gate.set()
    assert a.sees("new")
    assert a.news == ["wiped", {"new"}]
    assert [known for _, known in engine.reads] == [None, None]


def test_a_closed_watch_hears_nothing_and_leaves_no_timeout(following, engine, timer):
    a, other = RecordingWatcher(), RecordingWatcher()
    watch = following.watch("a", a)
    following.watch("a", other)
    assert other.sees("1")
    watch.close()
    watch.close()
    engine.records["a"] = {}
    following.look()
    assert other.sees()
    assert frozenset() not in a.news
    assert quiet(following)
    engine.gate, before = threading.Event(), len(engine.reads)
    last = following.watch("a", RecordingWatcher())
    assert wait_until(lambda: len(engine.reads) > before)
    heard = len(other.news)
    for each in (last, *following._watches["a"]):
        each.close()
    assert timer.pending == 0
    engine.gate.set()
    assert quiet(following)
    assert len(other.news) == heard
    assert timer.pending == 0


def test_a_watcher_may_close_its_own_watch(following):
    class Once(RecordingWatcher):
        def saw(self, view):
            super().saw(view)
            watch.close()

    once = Once()
    watch = following.watch("b", RecordingWatcher())
    watch.close()
    watch = following.watch("a", once)
    assert once.sees("1")
    following.look()
    assert quiet(following)
    assert wait_until(lambda: following.services == frozenset())


def test_a_bug_of_the_engine_ends_one_look_only(following, engine, events):
    a = RecordingWatcher()
    engine.error = ZeroDivisionError("a bug")
    following.watch("a", a)
    assert wait_until(lambda: events)
    assert quiet(following)
    engine.error = None
    following.look()
    assert a.sees("1")


def test_a_forked_child_begins_without_watches(following):
    a = RecordingWatcher()
    following.watch("a", a)
    assert a.sees("1")
    with following._changed:
        child = os.fork()
        if not child:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)  # a child that hangs is one that fails
            there = RecordingWatcher()
            good = following.services == frozenset()
            following.watch("a", there)
            good = good and there.sees("1")
            following.close()
            os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert following.services == {"a"}


class Anything(RuleBasedStateMachine):
    """Whatever happens in whatever order: in the end all see what there is, after any doubt."""

    def __init__(self) -> None:
        super().__init__()
        self.timer = ManualTimer()
        self.engine = Engine()
        self.following = followed(self.engine, self.timer)
        self.open: list[tuple[str, object, RecordingWatcher]] = []
        self.closed: list[tuple[RecordingWatcher, int]] = []

    @rule(service=st.sampled_from("ab"))
    def watch(self, service):
        witness = RecordingWatcher()
        self.open.append((service, self.following.watch(service, witness), witness))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def close(self, data):
        _, watch, witness = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        watch.close()
        self.closed.append((witness, len(witness.news)))

    @rule(service=st.sampled_from("ab"), ids=st.sets(st.sampled_from("xyz")), told=st.booleans())
    def change(self, service, ids, told):
        self.engine.records[service] = dict.fromkeys(ids, b"")
        if told:
            self.following.look(service)

    @rule(error=st.sampled_from([None, RegistryUnavailable("down"), RegistryRefused("no")]))
    def fail(self, error):
        self.engine.error = error

    @rule()
    def lose(self):
        self.following.lost("lost")

    @rule(seconds=st.sampled_from([0.1, 1.0, PERIOD]))
    def wait(self, seconds):
        self.timer.advance(seconds)

    @precondition(lambda self: self.open)
    @rule()
    def settle(self):
        self.engine.error = None
        for _ in range(2):  # the period, and a retry that it may have found
            assert quiet(self.following)
            self.timer.advance(1.2 * PERIOD)
        assert quiet(self.following)
        for service, _, witness in self.open:
            assert witness.news[-1] == set(self.engine.records.get(service, {}))

    @invariant()
    def closed_ones_hear_nothing(self):
        assert all(len(witness.news) == heard for witness, heard in self.closed)

    @invariant()
    def a_doubt_is_told_once(self):
        for _, _, witness in self.open:
            doubts = [isinstance(one, str) for one in tuple(witness.news)]
            assert not any(one and other for one, other in pairwise(doubts))

    def teardown(self):
        self.following.close()
        assert quiet(self.following)
        assert self.timer.pending == 0
        self.timer.stop()


TestAnything = Anything.TestCase
TestAnything.settings = settings(max_examples=50, stateful_step_count=30)
