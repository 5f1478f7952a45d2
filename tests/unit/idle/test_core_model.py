"""Random uses of a connection, compared with a model that remembers everything."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rpcwheel.idle.core import (
    ConnectionActivity,
    IdleLimit,
    IdleReason,
    Limits,
    PendingClose,
    SocketState,
    Step,
    idle_reason,
    next_step,
)
from rpcwheel.idle.policy import IdlePolicy

MS = 1_000_000
CHECK = 10
LIMIT = st.integers(CHECK, 60) | st.none()
POLICIES = {
    "idle": LIMIT,
    "read": LIMIT,
    "write": LIMIT,
    "streams": st.booleans(),
    "heartbeats": st.booleans(),
}


class Connection(RuleBasedStateMachine):
    """Times in whole milliseconds. A decision to close is followed by a step on it, later."""

    @initialize(**POLICIES)
    def connect(self, idle, read, write, streams, heartbeats) -> None:
        self.now = 1
        self.activity = ConnectionActivity(self.now * MS)
        self.happened: list[tuple[int, str, bool]] = [(self.now, "both", True)]  # when, way, user's
        self.open: list[tuple[bool, bool]] = []  # streams, the user's
        self.policy = IdlePolicy(
            idle_timeout=idle and idle / 1000,
            read_idle=read and read / 1000,
            write_idle=write and write / 1000,
            check_interval=CHECK / 1000,
            close_streams=streams,
            count_heartbeats=heartbeats,
        )
        self.limits = Limits(self.policy)
        self.pending: PendingClose | None = None

    def use(self, users: bool):
        return self.activity.user if users else self.activity.heartbeats

    @rule(streams=st.booleans(), users=st.booleans())
    def begin(self, streams: bool, users: bool) -> None:
        self.use(users).begin(self.now * MS, streams=streams)
        self.open.append((streams, users))
        self.happened.append((self.now, "both", users))

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 9), way=st.sampled_from(["in", "out"]))
    def message(self, which: int, way: str) -> None:
        users = self.open[which % len(self.open)][1]
        getattr(self.use(users), {"in": "note_read", "out": "note_write"}[way])(self.now * MS)
        self.happened.append((self.now, way, users))

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 9))
    def end(self, which: int) -> None:
        streams, users = self.open.pop(which % len(self.open))
        self.use(users).end(self.now * MS, streams=streams)
        self.happened.append((self.now, "both", users))

    @rule(step=st.integers(1, 40))
    def advance(self, step: int) -> None:
        self.now += step

    @precondition(lambda self: self.pending is None)
    @rule(
        begun=st.lists(st.tuples(st.booleans(), st.booleans()), max_size=2),
        step=st.integers(CHECK, 100),
        way=st.sampled_from([None, "in", "out"]),
    )
    def decide(self, begun: list[tuple[bool, bool]], step: int, way: str | None) -> None:
        """Calls begin. All end that keep the connection open; silent streams go on.

        Later the connection is looked at, and then perhaps used at once.
        """
        for streams, users in begun:
            self.begin(streams, users)
        for number in reversed(range(len(self.open))):
            if self.keeps_open(*self.open[number]):
                self.end(number)
        self.advance(step)
        reason = self.reason()
        if reason is not None:
            self.pending = PendingClose(reason, self.now * MS)
            self.decided_at = len(self.happened)
            if self.open and way is not None:
                self.message(0, way)

    @precondition(lambda self: self.pending is not None)
    @rule(unread=st.booleans(), policy=st.fixed_dictionaries(POLICIES))
    def act(self, unread: bool, policy: dict[str, Any]) -> None:
        """The next step is taken; after the last one there is another connection."""
        step = self.step(unread)
        if step in (Step.SHUTDOWN, Step.END_CALLS):
            assert not any(self.counts(users) and not streams for streams, users in self.open)
        if step is Step.END_CALLS:
            for streams, users in self.open:
                self.use(users).end(None, streams=streams)
            self.open.clear()
        elif step is Step.SHUTDOWN:
            self.connect(**policy)
        elif step is Step.KEEP_USED:
            self.pending = None

    def reason(self) -> IdleReason | None:
        return idle_reason(self.activity, self.limits, self.now * MS)

    def step(self, unread: bool) -> Step:
        socket = SocketState(int(unread), 0, 1000 * MS)
        return next_step(self.activity, self.pending, socket, self.limits, self.now * MS)

    @invariant()
    def a_connection_is_idle_as_the_model_is(self) -> None:
        reason = self.reason()
        assert (reason and reason.limit) is self.exceeded()

    @invariant()
    def the_next_step_is_that_of_the_model(self) -> None:
        if self.pending is None:
            return
        ways = {IdleLimit.READ: ("in", "both"), IdleLimit.WRITE: ("out", "both")}.get(
            self.pending.reason.limit, ("in", "out", "both")
        )
        since = self.happened[self.decided_at :]
        is_used = any(way in ways for _, way, users in since if self.counts(users))
        quiet = Step.END_CALLS if self.open else Step.SHUTDOWN
        assert self.step(unread=True) is (Step.KEEP_USED if is_used else Step.WAIT)
        assert self.step(unread=False) is (Step.KEEP_USED if is_used else quiet)

    # The model

    def counts(self, users: bool) -> bool:
        return users or self.policy.count_heartbeats

    def keeps_open(self, streams: bool, users: bool) -> bool:
        return self.counts(users) and not (streams and self.policy.close_streams)

    def exceeded(self) -> IdleLimit | None:
        for streams, users in self.open:
            if self.keeps_open(streams, users):
                return None
        limits = {
            IdleLimit.IDLE: (("in", "out", "both"), self.policy.idle_timeout),
            IdleLimit.READ: (("in", "both"), self.policy.read_idle),
            IdleLimit.WRITE: (("out", "both"), self.policy.write_idle),
        }
        for kind, (ways, limit) in limits.items():
            last = max(at for at, way, users in self.happened if way in ways and self.counts(users))
            if limit is not None and self.now - last > round(limit * 1000):
                return kind
        return None


TestConnection = Connection.TestCase
TestConnection.settings = settings(max_examples=settings.default.max_examples * 2 // 5)
