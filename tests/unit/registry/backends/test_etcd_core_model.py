"""Any sequence of events of watches, with a model of etcd that fails, hangs and loses its data."""

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rpcwheel.durations import NEVER
from rpcwheel.registry.backends.etcd_watch_core import (
    CancelWatch,
    CreateWatch,
    EndStream,
    NotifyContactLost,
    NotifyView,
    OpenStream,
    Read,
    SendProbe,
    WatchChange,
    WatchCore,
    WatchResponse,
)
from rpcwheel.registry.cache import changed_ids

SECOND = 1_000_000_000
PROBE_INTERVAL, TIMEOUT, RETRY = 5 * SECOND, 3 * SECOND, 2 * SECOND
SHOP, CART = b"/shop/", b"/cart/"
PUTS = st.tuples(
    st.sampled_from([SHOP, CART]),
    st.sampled_from([b"a", b"b"]),
    st.sampled_from([b"1", b"2", None]),
)
"""A prefix, the rest of the key, and the value, or None to delete it."""


class Etcd:
    """A model of etcd: a store with revisions, and a stream whose responses are received later."""

    def __init__(self) -> None:
        self.wipe()
        self.stream: deque[WatchResponse] | None = None
        self.created: dict[int, bytes] = {}
        self.is_silent = False

    def wipe(self) -> None:
        self.revision = 1
        self.records: dict[bytes, bytes] = {}
        self.stream = None

    def put(self, key: bytes, value: bytes | None) -> None:
        if value is None and key not in self.records:
            return
        self.revision += 1
        if value is None:
            del self.records[key]
        else:
            self.records[key] = value
        for number, prefix in self.created.items():
            if key.startswith(prefix):
                change = WatchChange(key[len(prefix) :].decode(), value, self.revision)
                self._respond(WatchResponse(number, self.revision, changes=(change,)))

    def below(self, prefix: bytes) -> dict[str, bytes]:
        return {
            key[len(prefix) :].decode(): value
            for key, value in self.records.items()
            if key.startswith(prefix)
        }

    def open(self) -> None:
        self.stream, self.created, self.is_silent = deque(), {}, False

    def do(self, action: CreateWatch | CancelWatch | SendProbe) -> None:
        if isinstance(action, CreateWatch):
            self.created[action.number] = action.prefix
            self._respond(WatchResponse(action.number, self.revision, created=True))
        elif isinstance(action, CancelWatch):
            self.created.pop(action.number, None)
            self._respond(WatchResponse(action.number, self.revision, canceled=True))
        else:
            self._respond(WatchResponse(-1, self.revision))

    def _respond(self, response: WatchResponse) -> None:
        if self.stream is not None and not self.is_silent:
            self.stream.append(response)


class Watching(RuleBasedStateMachine):
    """In the end each watcher has got the records that etcd has."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.etcd = Etcd()
        self.core = WatchCore(
            probe_interval_ns=PROBE_INTERVAL,
            timeout_ns=TIMEOUT,
            reread_interval_ns=10**6 * SECOND,
            max_retry_ns=RETRY,
            uniform=lambda low, high: (low + high) / 2,
        )
        self.count = 0
        self.prefixes: dict[int, bytes] = {}
        self.seen: dict[int, dict[str, bytes] | None] = {}
        self.contact_lost: set[int] = set()
        self.pending_read: Read | None = None
        self.to_open = self.ending = False

    def act(self, actions) -> None:
        for action in actions:
            match action:
                case OpenStream():
                    assert self.etcd.stream is None or self.ending
                    assert not self.to_open
                    self.to_open = True
                case CreateWatch() | CancelWatch() | SendProbe():
                    self.etcd.do(action)
                case Read():
                    assert self.pending_read is None
                    self.pending_read = action
                case EndStream(unresponsive):
                    assert self.prefixes or not unresponsive
                    self.ending = True
                case NotifyView(number, records, _, changed):
                    if changed is not None:
                        assert changed_ids(self.seen[number], records) <= changed
                    self.seen[number] = dict(records)
                    self.contact_lost.discard(number)
                case NotifyContactLost(number, _):
                    self.contact_lost.add(number)

    @rule(prefix=st.sampled_from([SHOP, CART]))
    def add(self, prefix) -> None:
        self.count += 1
        self.prefixes[self.count] = prefix
        self.seen[self.count] = None
        self.act(self.core.add(self.count, prefix, self.now))

    @precondition(lambda self: self.prefixes)
    @rule(data=st.data())
    def remove(self, data) -> None:
        number = data.draw(st.sampled_from(sorted(self.prefixes)))
        del self.prefixes[number], self.seen[number]
        self.contact_lost.discard(number)
        self.act(self.core.remove(number))

    @rule(put=PUTS)
    def change(self, put) -> None:
        self.put(*put)

    def put(self, prefix, name, value) -> None:
        self.etcd.put(prefix + name, value)

    @rule(seconds=st.integers(0, 20))
    def wait(self, seconds) -> None:
        self.now += seconds * SECOND
        self.act(self.core.tick(self.now))

    @precondition(lambda self: self.to_open)
    @rule(works=st.booleans())
    def open(self, works) -> None:
        self.to_open = False
        if works:
            self.etcd.open()
            self.act(self.core.opened(self.now))
        else:
            self.act(self.core.ended("refused", self.now))

    @precondition(lambda self: self.etcd.stream and self.pending_read is None and not self.ending)
    @rule()
    def receive(self) -> None:
        self.act(self.core.received(self.etcd.stream.popleft(), self.now))

    @precondition(lambda self: self.pending_read is not None)
    @rule()
    def finish_read(self) -> None:
        request, self.pending_read = self.pending_read, None
        found = {number: self.etcd.below(prefix) for number, prefix in request.prefixes.items()}
        self.act(self.core.read(found, self.etcd.revision, self.now))

    @precondition(lambda self: self.etcd.stream is not None)
    @rule(wipes=st.booleans())
    def cut(self, wipes) -> None:
        if wipes:
            self.etcd.wipe()
        self.etcd.stream = None
        self.etcd.created = {}
        self.pending_read, self.ending = None, False
        self.act(self.core.ended("cut", self.now))

    @precondition(lambda self: self.ending)
    @rule()
    def end(self) -> None:
        self.cut(wipes=False)

    @rule(really=st.integers(0, 4))
    def become_silent(self, really) -> None:
        """Seldom, because no change arrives afterwards."""
        self.etcd.is_silent = self.etcd.is_silent or really == 0

    @rule(puts=st.lists(PUTS, min_size=1, max_size=4))
    def change_after_reads(self, puts) -> None:
        """All watches are created and read; then records change, and watchers get the changes."""
        self.settle()
        for put in puts:
            self.put(*put)
        self.settle()

    @rule(steps=st.integers(1, 12))
    def flow(self, steps) -> None:
        """Let everything work; time passes when no event is left."""
        for _ in range(steps):
            if self.pending_read is not None:
                self.finish_read()
            elif self.ending:
                self.end()
            elif self.to_open:
                self.open(works=True)
            elif self.etcd.stream:
                self.receive()
            elif self.core.next_wake_ns == NEVER or self.settled:
                break
            else:
                self.now = max(self.now, self.core.next_wake_ns)
                self.act(self.core.tick(self.now))

    @invariant()
    def something_is_going_to_happen(self) -> None:
        """A core with watches always waits for an event or for a time."""
        if self.prefixes and self.core.next_wake_ns == NEVER:
            assert self.to_open or self.pending_read or self.ending

    @invariant()
    def etcd_has_the_watches_of_the_core(self) -> None:
        if self.etcd.stream is not None and not self.ending:
            assert self.etcd.created.keys() == self.prefixes.keys()

    def teardown(self) -> None:
        self.settle()

    def settle(self) -> None:
        """Let everything work again: then all watchers get what etcd has."""
        self.flow(200)
        assert self.settled, (self.seen, self.contact_lost, self.etcd.records)

    @property
    def settled(self) -> bool:
        return not self.contact_lost and all(
            self.seen[number] == self.etcd.below(prefix) for number, prefix in self.prefixes.items()
        )


TestWatching = Watching.TestCase
TestWatching.settings = settings(max_examples=settings.default.max_examples // 2)
