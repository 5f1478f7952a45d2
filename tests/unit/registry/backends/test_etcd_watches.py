"""Watches of etcd over streams that fail, hang and are refused, with a model of etcd."""

import threading
from queue import SimpleQueue

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from fixtures.engine_watchers import CheckedWatcher
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.errors import RegistryRefused, RegistryUnavailable
from rpcwheel.registry.backend import Settings, View
from rpcwheel.registry.backends import etcd_watch as module
from rpcwheel.registry.backends.etcd_client import MAX_OPERATIONS, messages
from rpcwheel.registry.backends.etcd_watch import (
    DATA_LOST,
    FULL_EVERY,
    EtcdWatches,
)
from rpcwheel.registry.url import parse_url
from rpcwheel.timer import ManualTimer

LEASE = 15.0
PERIOD = 1.11 * LEASE / 3
SHOP, CART = "shop", "cart"


class Stream:
    """A stream of the model: a thread answers its requests, as etcd does."""

    def __init__(self, etcd, requests):
        self.etcd = etcd
        self.responses = SimpleQueue()
        self.prefixes = {}
        self.canceled = []
        self.was_dropped = False
        threading.Thread(target=self._answer, args=(requests,), daemon=True).start()

    def _answer(self, requests):
        for request in requests:
            with self.etcd.lock:
                self.etcd.answer(self, request)

    def respond(self, **fields):
        """Send a response with etcd's present revision."""
        fields = {"header": {"revision": self.etcd.revision}} | fields
        if not self.etcd.is_silent:
            self.responses.put(messages().WatchResponse(**fields))

    def __iter__(self):
        for response in iter(self.responses.get, None):
            if isinstance(response, Exception):
                raise response
            yield response

    def cancel(self):
        self.responses.put(None)

    def drop(self):
        self.was_dropped = True
        self.cancel()


class Etcd:
    """Records with revisions, and the client that asks for them."""

    where = "etcd://model"

    def __init__(self):
        self.lock = threading.RLock()
        self.streams = []
        self.is_down = self.is_silent = False
        self.refused, self.refused_by_token, self.unreadable = set(), set(), set()
        self.during_read = []
        self.reads = []
        self.transactions = 0
        self.gate = threading.Event()
        self.gate.set()
        self.wipe()

    def wipe(self):
        self.revision, self.records = 1, {}

    def watch(self, requests):
        if self.is_down:
            raise RegistryUnavailable("down")
        self.refused_by_token = set()
        self.streams.append(Stream(self, requests))
        return self.streams[-1]

    def read(self, services):
        self.reads += services
        self.transactions += 1
        assert self.gate.wait(WAIT_S)
        with self.lock:
            if self.is_down:
                raise RegistryUnavailable("down")
            if not (self.refused | self.unreadable).isdisjoint(services):
                raise RegistryRefused("permission denied")
            if self.during_read:
                self.put(*self.during_read.pop(0))
            views = [View(dict(self.records.get(each, {})), self.revision) for each in services]
            if self.during_read:
                self.put(*self.during_read.pop(0))
        return views

    def answer(self, stream, request):
        create, number = request.create, request.create.watch_id
        if request.HasField("create"):
            service = create.key.decode().strip("/")
            if service in self.refused | self.refused_by_token:
                stream.respond(created=True, canceled=True, cancel_reason="permission denied")
            else:
                stream.prefixes[number] = service
                stream.respond(watch_id=number, created=True)
        elif request.HasField("cancel"):
            stream.canceled.append(stream.prefixes.pop(request.cancel.watch_id))
            stream.respond(watch_id=request.cancel.watch_id, canceled=True)
        else:
            stream.respond()

    def put(self, service, key, value):
        """Put a value; None: delete it."""
        with self.lock:
            records = self.records.setdefault(service, {})
            if value is None and key not in records:
                return
            self.revision += 1
            records[key] = value
            if value is None:
                del records[key]
            kv = {"key": f"/{service}/{key}".encode(), "mod_revision": self.revision}
            event = {"type": int(value is None), "kv": kv | {"value": value or b""}}
            for stream in self.streams[-1:]:
                for number, name in stream.prefixes.items():
                    if name == service:
                        stream.respond(watch_id=number, events=[event])

    def end_stream(self, error=None):
        for stream in self.streams[-1:]:
            stream.responses.put(error)


def watches_of(etcd, timer, timeout_s=30.0):
    return EtcdWatches(
        etcd,
        parse_url("etcd://10.0.0.1"),
        Settings(LEASE, timeout_s, timer),
        prefix_of=lambda service: f"/{service}/".encode(),
        read=etcd.read,
    )


@pytest.fixture
def etcd():
    return Etcd()


@pytest.fixture
def watches(etcd, timer):
    watches = watches_of(etcd, timer)
    yield watches
    watches.close()
    assert timer.pending == 0


def wait_until_quiet(watches):
    return wait_until(lambda: not watches._polling._running)


def watching(watches, service=SHOP):
    """Return a watcher that has got a view."""
    watches.watch(service, watcher := CheckedWatcher())
    assert wait_until(lambda: watcher.views)
    return watcher


def test_changes_during_the_first_read_are_neither_missed_nor_applied_twice(etcd, watches):
    etcd.put(SHOP, "a", b"1")
    etcd.during_read = [(SHOP, "a", b"2"), (SHOP, "b", b"3")]  # before and after the read itself
    watcher = watching(watches)
    assert watcher.sees("a", "b")
    assert [dict(view.records) for view in watcher.views] == [
        {"a": b"2"},
        {"a": b"2", "b": b"3"},
    ]
    assert watcher.views[1].changed == {"b"}
    assert watcher.views[1].revision == etcd.revision


def test_an_event_from_before_the_read_is_ignored(etcd, watches):
    etcd.put(SHOP, "a", b"1")
    etcd.put(SHOP, "a", b"2")
    watcher = watching(watches)
    (number,) = etcd.streams[0].prefixes
    event = {"kv": {"key": b"/shop/a", "value": b"1", "mod_revision": 2}}
    etcd.streams[0].respond(watch_id=number, events=[event])
    etcd.put(SHOP, "b", b"1")
    assert watcher.sees("a", "b")
    assert all(view.records["a"] == b"2" for view in watcher.views)


def test_a_record_that_is_changed_and_deleted_at_once_is_seen_before(etcd, watches):
    """It may be DRAINING."""
    etcd.put(SHOP, "a", b"UP")
    etcd.put(SHOP, "b", b"UP")
    watcher = watching(watches)
    etcd.gate.clear()  # the worker has to wait
    watches.watch(CART, CheckedWatcher())
    assert wait_until(lambda: CART in etcd.reads)
    for key in "ab":
        etcd.put(SHOP, key, b"DRAINING")
    etcd.put(SHOP, "c", b"UP")
    for key in "ab":
        etcd.put(SHOP, key, None)
    assert wait_until(lambda: watches._last_revision == etcd.revision)
    etcd.gate.set()
    assert watcher.sees("c")
    assert [sorted(view.records.items()) for view in watcher.views[1:]] == [
        [("a", b"DRAINING"), ("b", b"DRAINING"), ("c", b"UP")],
        [("c", b"UP")],
    ]


def test_a_change_is_applied_without_a_read(etcd, watches):
    watcher = watching(watches)
    etcd.put(SHOP, "a", b"1")
    assert watcher.sees("a")
    etcd.put(SHOP, "a", None)
    assert watcher.sees()
    assert etcd.reads == [SHOP]


@pytest.fixture
def busy_worker(etcd, watches):
    """Have the worker wait for a read until `etcd.gate` is set."""
    etcd.gate.clear()
    watches.watch(CART, CheckedWatcher())
    assert wait_until(lambda: CART in etcd.reads)


@pytest.mark.usefixtures("busy_worker")
def test_services_that_are_watched_together_are_read_together(etcd, watches):
    watchers = {f"shop-{n}": CheckedWatcher() for n in range(2 * MAX_OPERATIONS)}
    for service, watcher in watchers.items():
        etcd.put(service, service, b"1")
        watches.watch(service, watcher)
    etcd.gate.set()
    for service, watcher in watchers.items():
        assert watcher.sees(service)
    assert etcd.transactions == 1 + 2
    etcd.end_stream()
    for service, watcher in watchers.items():
        assert watcher.doubts()
        assert watcher.sees(service)
        etcd.put(service, "new", b"1")
        assert watcher.sees(service, "new")
    assert etcd.transactions == 3 + 3


@pytest.mark.usefixtures("busy_worker")
def test_a_service_that_cannot_be_read_affects_none_that_is_read_with_it(etcd, watches):
    watches.watch(SHOP, watcher := CheckedWatcher())
    watches.watch("other", other := CheckedWatcher())
    etcd.unreadable.add("other")
    etcd.gate.set()
    assert watcher.sees()
    assert other.doubts("permission denied")
    assert not watcher.after_doubt


def watch_two(etcd, watches, job):
    """Return a watcher of "other". The job runs after it was read with SHOP, before it is seen."""

    class Busy(CheckedWatcher):
        def on_view(self, view):
            job()
            super().on_view(view)

    watches.watch(SHOP, first := Busy())
    watches.watch("other", other := CheckedWatcher())
    etcd.gate.set()
    assert first.sees()
    return other


@pytest.mark.usefixtures("busy_worker")
def test_a_change_of_records_that_were_read_with_those_of_another_service_is_seen(etcd, watches):
    def change():
        etcd.put("other", "a", b"1")
        assert wait_until(lambda: watches._last_revision == etcd.revision)

    other = watch_two(etcd, watches, change)
    assert other.sees("a")
    assert etcd.transactions == 2


@pytest.mark.usefixtures("busy_worker")
def test_records_that_were_read_before_their_watch_has_ended_are_read_again(etcd, watches):
    def end_watch():
        number = next(n for n, name in etcd.streams[0].prefixes.items() if name == "other")
        del etcd.streams[0].prefixes[number]
        etcd.records["other"] = {"a": b"1"}
        etcd.streams[0].respond(watch_id=number, canceled=True)
        assert wait_until(lambda: "other" not in watches._stream.by_service)

    other = watch_two(etcd, watches, end_watch)
    assert other.sees("a")
    assert len(other.views) == 1


def test_a_probe_without_a_response_ends_the_stream_and_its_connection(etcd, timer):
    watches = watches_of(etcd, timer, timeout_s=6.0)
    watcher = watching(watches)
    timer.advance(PERIOD)  # with a response
    assert wait_until_quiet(watches)
    assert wait_until(lambda: watches._stream.probed_ns is None)
    etcd.is_silent = True
    timer.advance(PERIOD)
    assert wait_until_quiet(watches)
    timer.advance(PERIOD)  # less than the timeout later
    assert wait_until_quiet(watches)
    assert not etcd.streams[0].was_dropped
    etcd.is_silent = False
    timer.advance(PERIOD)
    assert watcher.doubts("etcd://model: no answer in 6 s")
    assert etcd.streams[0].was_dropped
    assert watcher.sees()
    watches.close()


def test_a_watch_that_is_not_confirmed_ends_the_stream_and_its_connection(etcd, timer):
    watches = watches_of(etcd, timer, timeout_s=0.01)
    etcd.is_silent = True
    watches.watch(SHOP, watcher := CheckedWatcher())
    assert watcher.doubts("no answer in 0.01 s")
    assert etcd.streams[0].was_dropped
    watches.close()


def test_a_refused_watch_is_created_again_later_and_affects_no_other(etcd, watches, timer):
    etcd.refused.add(SHOP)
    watches.watch(SHOP, refused := CheckedWatcher())
    assert refused.doubts("permission denied")
    watcher = watching(watches, CART)
    etcd.put(CART, "a", b"1")
    assert watcher.sees("a")
    etcd.refused.clear()
    timer.advance(PERIOD)
    assert refused.sees()
    assert not watcher.after_doubt
    assert len(etcd.streams) == 1


def test_a_watch_is_created_on_another_stream_if_only_the_token_is_invalid(etcd, watches, timer):
    watcher = watching(watches, CART)
    etcd.refused_by_token.add(SHOP)
    watches.watch(SHOP, other := CheckedWatcher())
    assert other.doubts("a token is no longer valid: permission denied")
    assert wait_until(lambda: (timer.advance(0.2), other.has_seen() and watcher.has_seen())[1])
    assert len(etcd.streams) == 2


def test_a_watch_that_etcd_ends_is_created_again(etcd, watches):
    watcher = watching(watches)
    (number,) = etcd.streams[0].prefixes
    etcd.streams[0].prefixes.clear()
    etcd.records[SHOP] = {"a": b"1"}
    etcd.streams[0].respond(watch_id=number, canceled=True, cancel_reason="it was compacted")
    assert watcher.sees("a")
    etcd.put(SHOP, "b", b"1")
    assert watcher.sees("a", "b")
    assert len(etcd.streams) == 1


def test_a_watch_that_nobody_needs_is_canceled_at_its_next_change(etcd, watches):
    watch = watches.watch(SHOP, gone := CheckedWatcher())
    watcher = watching(watches, CART)
    watch.close()
    calls = len(gone.news)
    etcd.put(SHOP, "a", b"1")
    assert wait_until(lambda: etcd.streams[0].canceled == [SHOP])
    etcd.put(SHOP, "b", b"1")
    etcd.put(CART, "a", b"1")
    assert watcher.sees("a")
    assert len(gone.news) == calls
    again = watching(watches)
    assert again.sees("a", "b")
    etcd.put(SHOP, "c", b"1")
    assert again.sees("a", "b", "c")


def test_a_lower_revision_is_lost_data(etcd, watches, timer):
    watcher, other = watching(watches), watching(watches, CART)
    etcd.put(SHOP, "a", b"1")
    assert watcher.sees("a")
    etcd.wipe()
    timer.advance(PERIOD)  # the probe has a response with the lower revision
    for each in (watcher, other):
        assert each.doubts(DATA_LOST)
        assert each.sees()
    etcd.put(SHOP, "b", b"1")
    assert watcher.sees("b")
    assert etcd.reads.count(SHOP) == 3  # the read that has shown it, and one after the report


def test_a_response_of_a_lagging_member_causes_a_read_without_a_loss_of_contact(etcd, watches):
    etcd.put(SHOP, "a", b"1")
    watcher = watching(watches)
    etcd.streams[0].respond(header={"revision": 1})
    assert wait_until(lambda: etcd.reads == [SHOP, SHOP])
    assert wait_until_quiet(watches)
    assert not watcher.after_doubt


def test_everything_is_read_again_from_time_to_time(etcd, watches, timer):
    watcher = watching(watches)
    etcd.records[SHOP] = {"a": b"1"}  # of which etcd has not sent an event
    for _ in range(FULL_EVERY):
        assert wait_until_quiet(watches)
        timer.advance(PERIOD)
    assert watcher.sees("a")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (None, "etcd://model: etcd has ended the stream"),
        (RegistryUnavailable("etcd://model: reset"), "etcd://model: reset"),
        (ZeroDivisionError("a bug"), "etcd://model: ZeroDivisionError('a bug')"),
    ],
)
def test_contact_is_lost_with_the_stream_and_another_one_is_opened(etcd, watches, error, reason):
    watcher = watching(watches)
    etcd.put(SHOP, "a", b"1")
    assert watcher.sees("a")
    etcd.end_stream(error)
    assert watcher.doubts()
    assert watcher.sees("a")
    assert watcher.after_doubt[0] == reason
    etcd.put(SHOP, "b", b"1")
    assert watcher.sees("a", "b")


def test_no_view_is_read_between_the_end_of_a_stream_and_the_loss_of_contact(
    etcd, watches, timer, monkeypatch
):
    watcher = watching(watches)
    monkeypatch.setattr(module.RANDOM, "uniform", lambda _, longest: longest)
    monkeypatch.setattr(module, "FIRST_RETRY_S", WAIT_S)
    etcd.end_stream()
    assert wait_until(lambda: watches._stream.end_reason)
    timer.advance(PERIOD)
    assert wait_until_quiet(watches)
    assert len(etcd.streams) == len(watcher.news) == 1


def test_a_thread_that_cannot_be_started_is_a_loss_of_contact(etcd, watches, timer, monkeypatch):
    def refuse(thread):
        if thread.name == "rpcwheel-etcd-watch":
            raise RuntimeError("can't start new thread")
        start(thread)

    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", refuse)
    watches.watch(SHOP, watcher := CheckedWatcher())
    assert watcher.doubts("can't start new thread")
    monkeypatch.undo()
    timer.advance(PERIOD)
    assert watcher.sees()


SERVICES = st.sampled_from([SHOP, CART])
PUTS = st.tuples(SERVICES, st.sampled_from("ab"), st.sampled_from([b"1", b"2", None]))


class Watching(RuleBasedStateMachine):
    """Watches of services whose records change, and of an etcd that fails in between.

    Each watcher gets the records that etcd has.
    """

    def __init__(self):
        super().__init__()
        self.etcd, self.timer = Etcd(), ManualTimer()
        self.watches = watches_of(self.etcd, self.timer, timeout_s=0.05)
        self.open = []

    @rule(service=SERVICES)
    def add(self, service):
        watcher = CheckedWatcher()
        self.open.append((service, self.watches.watch(service, watcher), watcher))

    @precondition(lambda self: self.open)
    @rule(number=st.integers(0, 7))
    def remove(self, number):
        _, watch, _ = self.open.pop(number % len(self.open))
        watch.close()

    @rule(put=PUTS, during_read=st.booleans())
    def change(self, put, during_read):
        if during_read:
            self.etcd.during_read.append(put)
        else:
            self.etcd.put(*put)

    @rule(down=st.booleans(), wipes=st.booleans(), silent=st.booleans())
    def fail(self, down, wipes, silent):
        if wipes:
            self.etcd.wipe()
        self.etcd.is_down, self.etcd.is_silent = down, silent
        self.etcd.end_stream()

    @rule(refused=st.sets(SERVICES))
    def refuse(self, refused):
        self.etcd.refused = refused

    @rule(seconds=st.sampled_from([0.1, PERIOD]))
    def wait(self, seconds):
        self.timer.advance(seconds)

    @rule(puts=st.lists(PUTS, min_size=1, max_size=4))
    def change_after_all_is_seen(self, puts):
        self.settle()
        for put in puts:
            self.etcd.put(*put)
        assert wait_until(lambda: self.is_settled)  # by the events of etcd alone

    @property
    def is_settled(self):
        return not self.etcd.during_read and all(
            watcher.views and watcher.has_seen(*self.etcd.records.get(service, {}))
            and watcher.views[-1].records == self.etcd.records.get(service, {})
            for service, _, watcher in self.open
        )  # fmt: skip

    def settle(self):
        """Let everything work again: then all watchers get what etcd has."""
        self.etcd.is_down = self.etcd.is_silent = False
        self.etcd.refused = set()
        self.etcd.during_read = []
        assert wait_until(lambda: (self.timer.advance(PERIOD), self.is_settled)[1])
        assert not any(watcher.wrong for _, _, watcher in self.open)

    def teardown(self):
        self.settle()
        self.watches.close()
        assert wait_until_quiet(self.watches)
        assert self.timer.pending == 0
        self.timer.stop()


TestWatching = Watching.TestCase
TestWatching.settings = settings(max_examples=30, stateful_step_count=20)
