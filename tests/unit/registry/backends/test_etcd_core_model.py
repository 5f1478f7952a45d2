"""Any story of watches, beside an etcd of a few lines that fails, hangs and forgets."""

from collections import deque

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rpcwheel.durations import NEVER
from rpcwheel.registry.backends.etcd_watch_core import (
    Break,
    Cancel,
    Change,
    Create,
    Heard,
    Look,
    Open,
    Probe,
    Saw,
    Suspect,
    WatchCore,
)

SECOND = 1_000_000_000
STEP, TIMEOUT, RETRY = 5 * SECOND, 3 * SECOND, 2 * SECOND
SHOP, CART = b"/shop/", b"/cart/"


class Etcd:
    """What etcd is to a watch: a store with revisions, and a stream that is read later."""

    def __init__(self) -> None:
        self.wipe()
        self.stream: deque[Heard] | None = None
        self.created: dict[int, bytes] = {}
        self.mute = False

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
                change = Change(key, value, self.revision)
                self._say(Heard(number, self.revision, changes=(change,)))

    def below(self, prefix: bytes) -> dict[bytes, bytes]:
        return {key: value for key, value in self.records.items() if key.startswith(prefix)}

    def open(self) -> None:
        self.stream, self.created, self.mute = deque(), {}, False

    def do(self, action: Create | Cancel | Probe) -> None:
        if isinstance(action, Create):
            self.created[action.number] = action.prefix
            self._say(Heard(action.number, self.revision, created=True))
        elif isinstance(action, Cancel):
            self.created.pop(action.number, None)
            self._say(Heard(action.number, self.revision, canceled=True))
        else:
            self._say(Heard(-1, self.revision))

    def _say(self, told: Heard) -> None:
        if self.stream is not None and not self.mute:
            self.stream.append(told)


class Watching(RuleBasedStateMachine):
    """Whatever happens, in the end each watcher has seen what there is, and never time go back."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.etcd = Etcd()
        self.core = WatchCore(
            step_ns=STEP,
            timeout_ns=TIMEOUT,
            relook_ns=10**6 * SECOND,
            retry_ns=RETRY,
            uniform=lambda low, high: (low + high) / 2,
        )
        self.count = 0
        self.prefixes: dict[int, bytes] = {}
        self.seen: dict[int, dict[bytes, bytes] | None] = {}
        self.doubtful: set[int] = set()
        self.look: Look | None = None
        self.to_open = self.breaking = False

    def act(self, actions) -> None:
        for action in actions:
            match action:
                case Open():
                    assert self.etcd.stream is None or self.breaking
                    self.to_open = True
                case Create() | Cancel() | Probe():
                    self.etcd.do(action)
                case Look():
                    assert self.look is None
                    self.look = action
                case Break():
                    self.breaking = True
                case Saw(number, records, _):
                    self.seen[number] = dict(records)
                    self.doubtful.discard(number)
                case Suspect(number, _):
                    assert number not in self.doubtful
                    self.doubtful.add(number)

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
        self.doubtful.discard(number)
        self.act(self.core.remove(number))

    @rule(prefix=st.sampled_from([SHOP, CART]), value=st.sampled_from([b"1", b"2", None]))
    def put(self, prefix, value) -> None:
        self.etcd.put(prefix + b"a", value)

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

    @precondition(lambda self: self.etcd.stream and self.look is None and not self.breaking)
    @rule()
    def hear(self) -> None:
        self.act(self.core.heard(self.etcd.stream.popleft(), self.now))

    @precondition(lambda self: self.look is not None)
    @rule()
    def answer(self) -> None:
        look, self.look = self.look, None
        found = {number: self.etcd.below(prefix) for number, prefix in look.prefixes.items()}
        self.act(self.core.looked(found, self.etcd.revision, self.now))

    @precondition(lambda self: self.etcd.stream is not None)
    @rule(wipes=st.booleans())
    def cut(self, wipes) -> None:
        if wipes:
            self.etcd.wipe()
        self.etcd.stream = None
        self.etcd.created = {}
        self.look, self.breaking = None, False
        self.act(self.core.ended("cut", self.now))

    @precondition(lambda self: self.breaking)
    @rule()
    def end(self) -> None:
        self.cut(wipes=False)

    @rule()
    def fall_silent(self) -> None:
        self.etcd.mute = True

    @rule(steps=st.integers(1, 12))
    def flow(self, steps) -> None:
        """Everything works, and time passes where nothing else can happen."""
        for _ in range(steps):
            if self.look is not None:
                self.answer()
            elif self.breaking:
                self.end()
            elif self.to_open:
                self.open(works=True)
            elif self.etcd.stream:
                self.hear()
            elif self.core.next_wake_ns == NEVER or self.settled:
                break
            else:
                self.now = max(self.now, self.core.next_wake_ns)
                self.act(self.core.tick(self.now))

    @invariant()
    def something_is_going_to_happen(self) -> None:
        """A core with watches always waits for an event that comes, or for a time."""
        if self.prefixes and self.core.next_wake_ns == NEVER:
            assert self.to_open or self.look or self.breaking

    def teardown(self) -> None:
        """Let everything work again: soon all have seen what there is, and trust it."""
        self.flow(200)
        assert self.settled, (self.seen, self.doubtful, self.etcd.records)

    @property
    def settled(self) -> bool:
        return not self.doubtful and all(
            self.seen[number] == self.etcd.below(prefix) for number, prefix in self.prefixes.items()
        )


TestWatching = Watching.TestCase
