"""Watches of backends that are polled: every watcher gets the present records in the end."""

import threading
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fixtures.engine_watchers import CheckedWatcher, RecordingWatcher
from fixtures.forks import holds_in_child
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.errors import RegistryRefused, RegistryUnavailable
from rpcwheel.registry.backend import View
from rpcwheel.registry.backends.polling import FIRST_RETRY_S, PollingWatcher
from rpcwheel.registry.cache import changed_ids
from rpcwheel.registry.url import parse_url
from rpcwheel.timer import ManualTimer
from rpcwheel.timer.manual import clock_of

URL = parse_url("memory://")
PERIOD = 10.0
RETRY = 4.0
TICK_NS = 10_000_000


class Engine:
    """Records by service, and an engine's ways to fail. `read` says what changed."""

    def __init__(self) -> None:
        self.records: dict[str, dict[str, bytes]] = {}
        self.error: Exception | None = None
        self.refused: set[str] = set()
        self.reads: list[tuple[str, View | None]] = []
        self.checked: dict[str, dict[str, bytes]] = {}
        self.gate: threading.Event | None = None

    def read(self, service: str, known: View | None) -> View:
        self.reads.append((service, known))
        records = dict(self.records.get(service, {}))
        if self.gate is not None:
            self.gate.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        if service in self.refused:
            raise RegistryRefused("no rights")
        return View(records, changed=None if known is None else changed_ids(known.records, records))

    def has_changed(self) -> bool:
        """Whether records have changed since the last time."""
        if self.error is not None:
            raise self.error
        before, self.checked = self.checked, dict(self.records)
        return before != self.checked


def polling_of(engine: Engine, timer: ManualTimer, **options: object) -> PollingWatcher:
    return PollingWatcher(URL, engine.read, timer=timer, period_s=PERIOD, retry_s=RETRY, **options)


def wait_until_quiet(polling: PollingWatcher) -> bool:
    return wait_until(lambda: not polling._running)


@pytest.fixture
def engine():
    """An engine with two services."""
    engine = Engine()
    engine.records = {"a": {"1": b"x"}, "b": {}}
    return engine


@pytest.fixture
def polling(engine, timer):
    """Closed in the end, when no timeout may be left."""
    polling = polling_of(engine, timer)
    yield polling
    polling.close()
    assert wait_until_quiet(polling)
    assert timer.pending == 0


@pytest.fixture
def new_watcher():
    """Make a watcher; in the end, all that it got must have been correct."""
    watchers = []

    def new_watcher():
        watchers.append(CheckedWatcher())
        return watchers[-1]

    yield new_watcher
    assert not any(watcher.wrong for watcher in watchers)


@pytest.fixture
def watch(polling, new_watcher):
    """Start a watch, and wait for its first view."""

    def watch(service, *ids):
        watcher = new_watcher()
        polling.watch(service, watcher)
        assert watcher.sees(*ids)
        assert wait_until_quiet(polling)
        return watcher

    return watch


def test_a_requested_read_is_of_that_service_only(polling, engine, watch):
    a, b = watch("a", "1"), watch("b")
    engine.records = {"a": {}, "b": {"2": b""}}
    polling.request_read("a")
    assert a.sees()
    assert wait_until_quiet(polling)
    assert len(b.news) == 1
    polling.request_read("unwatched")
    assert wait_until_quiet(polling)
    assert [service for service, _ in engine.reads].count("unwatched") == 0


@pytest.mark.parametrize("full_every", [1, 2])
def test_a_change_without_a_hint_is_found_after_the_period(engine, timer, full_every):
    polling, a = polling_of(engine, timer, full_every=full_every), RecordingWatcher()
    polling.watch("a", a)
    assert a.sees("1")
    engine.records["a"] = {}
    assert wait_until_quiet(polling)
    timer.advance(0.8 * PERIOD)
    assert wait_until_quiet(polling)
    assert len(a.news) == 1
    timer.advance(0.4 * PERIOD)
    assert a.sees()
    assert wait_until_quiet(polling)
    assert (engine.reads[-1][1] is None) is (full_every == 1)
    timer.advance(1.2 * PERIOD)
    assert wait_until(lambda: len(engine.reads) == 3)
    assert engine.reads[-1][1] is None
    polling.close()


def test_a_check_decides_about_periodic_reads_but_for_the_full_ones(engine, timer):
    answers = iter([False, True, RegistryUnavailable("gone")])

    def check():
        answer = next(answers)
        if isinstance(answer, Exception):
            engine.error = answer
            raise answer
        if answer:
            polling.request_read()

    polling, a = polling_of(engine, timer, full_every=4, check=check), RecordingWatcher()
    polling.watch("a", a)
    assert a.sees("1")
    reads = []
    for _ in range(4):
        assert wait_until_quiet(polling)
        reads.append(len(engine.reads))
        timer.advance(1.1 * PERIOD)
        assert wait_until_quiet(polling)
        engine.error = None
    assert reads[:3] == [1, 1, 2]  # the first one of the watch
    assert a.sees("1")
    assert a.after_doubt == ["gone", {"1"}]
    polling.close()


def test_the_delay_after_a_failed_read_grows_up_to_its_limit(polling, engine, timer):
    engine.error = RegistryUnavailable("gone")
    polling.watch("a", RecordingWatcher())
    for failures in range(12):
        assert wait_until_quiet(polling)
        assert polling._failures == failures + 1
        delay_ns = polling._retry_ns - clock_of(timer)()
        assert delay_ns <= min(RETRY, FIRST_RETRY_S * 2**failures) * 1e9 + TICK_NS
        polling._period_ns += 10**12  # no periodic reads
        # No longer: the read is on another thread, and may fail again before the end of `advance`.
        timer.advance((delay_ns + TICK_NS) / 1e9)


def test_after_a_failed_read_all_services_are_read_in_full(polling, engine, watch):
    watch("a", "1")
    watch("b")
    engine.error = RegistryUnavailable("gone")
    polling.report_contact_lost("gone")
    assert wait_until_quiet(polling)
    engine.error, engine.reads = None, []
    polling.request_read()  # before the retry, as when the connection is back
    assert wait_until_quiet(polling)
    assert engine.reads == [("a", None), ("b", None)]


def test_a_refusal_of_one_service_does_not_affect_others(
    polling, engine, timer, watch, new_watcher
):
    b = new_watcher()
    engine.refused = {"b"}
    polling.watch("b", b)
    a = watch("a", "1")
    assert b.doubts()
    assert wait_until_quiet(polling)
    engine.refused = set()
    timer.advance(RETRY)
    assert b.sees()
    assert a.news == [{"1"}]


def test_a_view_read_before_contact_was_lost_is_dropped(polling, engine, new_watcher):
    a = new_watcher()
    engine.gate = threading.Event()
    polling.watch("a", a)
    assert wait_until(lambda: engine.reads)
    engine.records["a"] = {"new": b""}
    polling.report_contact_lost("wiped")
    gate, engine.gate = engine.gate, None
    gate.set()
    assert a.sees("new")
    assert a.news == ["wiped", {"new"}]
    assert [known for _, known in engine.reads] == [None, None]


def test_a_watch_that_is_closed_during_a_read_is_not_called_and_leaves_no_timeout(
    polling, engine, timer
):
    engine.gate = threading.Event()
    watch = polling.watch("a", watcher := RecordingWatcher())
    assert wait_until(lambda: engine.reads)
    watch.close()
    watch.close()
    assert timer.pending == 0
    engine.gate.set()
    assert wait_until_quiet(polling)
    assert (watcher.news, timer.pending) == ([], 0)


def test_the_view_of_a_service_that_is_not_watched_any_more_is_dropped(polling, engine):
    for _ in range(2):
        watch = polling.watch("a", watcher := RecordingWatcher())
        assert watcher.sees("1")
        watch.close()
        assert wait_until_quiet(polling)
    assert [known for _, known in engine.reads] == [None, None]


def test_a_forked_child_begins_without_watches(polling, watch):
    watch("a", "1")

    def begins_without_watches():
        watcher = RecordingWatcher()
        assert polling.services == frozenset()
        polling.watch("a", watcher)
        assert watcher.sees("1")
        polling.close()
        return True

    with polling._lock:
        assert holds_in_child(begins_without_watches)
    assert polling.services == {"a"}


SERVICES = st.sampled_from("ab")


class AnyOrder(RuleBasedStateMachine):
    """Random changes, failures and closes: in the end all watchers have the present records."""

    @initialize(full_every=st.integers(1, 3), checks=st.booleans())
    def begin(self, full_every, checks):
        self.timer = ManualTimer()
        self.engine = Engine()
        self.full_every = full_every
        check = self.check if checks else None
        self.polling = polling_of(self.engine, self.timer, full_every=full_every, check=check)
        self.open: list[tuple[str, object, CheckedWatcher]] = []
        self.closed: list[tuple[CheckedWatcher, int]] = []

    def check(self):
        if self.engine.has_changed():
            self.polling.request_read()

    @rule(service=SERVICES)
    def watch(self, service):
        watcher = CheckedWatcher()
        self.open.append((service, self.polling.watch(service, watcher), watcher))

    @precondition(lambda self: self.open)
    @rule(number=st.integers(0, 7))
    def close(self, number):
        _, watch, watcher = self.open.pop(number % len(self.open))
        watch.close()
        calls = len(watcher.news)
        assert wait_until_quiet(self.polling)
        assert len(watcher.news) <= calls + 1  # one call may have been running
        self.closed.append((watcher, len(watcher.news)))

    @precondition(lambda self: self.open)
    @rule(service=SERVICES, ids=st.sets(st.sampled_from("xyz")), requested=st.booleans())
    def change(self, service, ids, requested):
        """If the engine works, a requested read has its effect at once."""
        self.engine.records[service] = dict.fromkeys(ids, b"")
        if requested:
            assert wait_until_quiet(self.polling)  # or a read that fails would replace this one
            self.polling.request_read(service)
            if self.engine.error is None and service not in self.engine.refused:
                self.has_seen_present_records({service})

    @precondition(lambda self: self.open)
    @rule(
        error=st.sampled_from(
            [None, RegistryUnavailable("down"), RegistryRefused("no"), ZeroDivisionError("a bug")]
        ),
        refused=st.sets(SERVICES),
    )
    def fail(self, error, refused):
        """Also recovers."""
        self.engine.error, self.engine.refused = error, refused
        self.polling.request_read()

    @precondition(lambda self: self.open)
    @rule()
    def lose_contact(self):
        self.polling.report_contact_lost("lost")

    @rule(seconds=st.sampled_from([0.1, RETRY, 1.2 * PERIOD]))
    def wait(self, seconds):
        self.timer.advance(seconds)

    @precondition(lambda self: self.open)
    @rule()
    def settle(self):
        self.engine.error, self.engine.refused = None, set()
        for _ in range(self.full_every + 1):  # a full period, and a retry
            assert wait_until_quiet(self.polling)
            self.timer.advance(1.2 * PERIOD)
        self.has_seen_present_records({"a", "b"})

    def has_seen_present_records(self, services):
        assert wait_until_quiet(self.polling)
        for service, _, watcher in self.open:
            if service in services:
                assert watcher.news[-1] == set(self.engine.records.get(service, {}))

    @invariant()
    def closed_watches_are_not_called(self):
        assert all(len(watcher.news) == calls for watcher, calls in self.closed)

    @invariant()
    def a_loss_is_reported_once(self):
        for _, _, watcher in self.open:
            losses = [isinstance(one, str) for one in tuple(watcher.news)]
            assert not any(one and other for one, other in pairwise(losses))

    @invariant()
    def views_say_what_has_changed(self):
        watchers = [watcher for _, _, watcher in self.open]
        watchers += [watcher for watcher, _ in self.closed]
        assert not any(watcher.wrong for watcher in watchers)

    def teardown(self):
        self.polling.close()
        assert wait_until_quiet(self.polling)
        self.views_say_what_has_changed()
        assert self.timer.pending == 0
        self.timer.stop()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=50, stateful_step_count=30)
