"""Random lives of a connection, beside a model that remembers everything."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from rpcwheel.idle.core import Look, Mark, Reason, Seen, Step, judge, step
from rpcwheel.idle.limits import Limits
from rpcwheel.idle.policy import IdlePolicy

MS = 1_000_000
CHECK = 10
LIMIT = st.none() | st.integers(CHECK, 60)


class Life(RuleBasedStateMachine):
    """Times in whole milliseconds. A round is a decision and, `lag` later, the step on it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.seen = Seen(0)
        self.happened: list[tuple[int, str, bool]] = [(0, "both", True)]  # when, way, the user's
        self.open: list[tuple[bool, bool]] = []  # streams, the user's
        self.policy = IdlePolicy(idle_timeout=0.03, check=CHECK / 1000)
        self.limits = Limits.from_policy(self.policy)
        self.mark: Mark | None = None

    def use(self, users: bool):
        return self.seen.user if users else self.seen.beats

    @rule(idle=LIMIT, read=LIMIT, write=LIMIT, streams=st.booleans(), beats=st.booleans())
    def change(self, idle, read, write, streams, beats) -> None:
        self.policy = IdlePolicy(
            idle_timeout=idle and idle / 1000,
            read_idle=read and read / 1000,
            write_idle=write and write / 1000,
            check=CHECK / 1000,
            close_streams=streams,
            count_heartbeats=beats,
        )
        self.limits = Limits.from_policy(self.policy)
        self.mark = None

    @rule(streams=st.booleans(), users=st.booleans())
    def begin(self, streams: bool, users: bool) -> None:
        self.use(users).begin(self.now * MS, streams=streams)
        self.open.append((streams, users))
        self.happened.append((self.now, "call", users))

    @rule(which=st.integers(0, 9), way=st.sampled_from(["in", "out"]))
    def message(self, which: int, way: str) -> None:
        if self.open:
            users = self.open[which % len(self.open)][1]
            getattr(self.use(users), {"in": "read", "out": "wrote"}[way])(self.now * MS)
            self.happened.append((self.now, way, users))

    @rule(which=st.integers(0, 9))
    def end(self, which: int) -> None:
        if self.open:
            streams, users = self.open.pop(which % len(self.open))
            self.use(users).end(self.now * MS, streams=streams)
            self.happened.append((self.now, "both", users))

    @rule(step=st.integers(1, 40))
    def advance(self, step: int) -> None:
        self.now += step

    @rule()
    def decide(self) -> None:
        due = judge(self.seen, self.limits, self.now * MS)
        assert (due is not None) == self.is_idle()
        if self.mark is None and due is not None:
            self.mark = Mark(due, self.seen.moves(self.limits, due.reason), self.now * MS)
            self.marked_at = len(self.happened)

    @rule(unread=st.booleans())
    def act(self, unread: bool) -> None:
        if self.mark is None:
            return
        look = Look(int(unread), 0, 1000 * MS)
        did = step(self.seen, self.mark, look, self.limits, self.now * MS)
        since = self.happened[self.marked_at :]
        matters = {Reason.READ: "in", Reason.WRITE: "out"}.get(self.mark.due.reason)
        if any(
            way in (matters, "call") if matters else way != "both"
            for _, way, users in since
            if self.counts(users)
        ):
            assert did is Step.KEEP_USED
        elif unread:
            assert did is Step.WAIT
        else:
            assert did is (Step.END_CALLS if self.open else Step.SHUTDOWN)
        if did in (Step.SHUTDOWN, Step.END_CALLS):
            assert not any(self.counts(users) and not streams for streams, users in self.open)
        if did is Step.SHUTDOWN:
            self.__init__()  # another connection
        elif did is Step.KEEP_USED:
            self.mark = None

    # The model

    def counts(self, users: bool) -> bool:
        return users or self.policy.count_heartbeats

    def is_idle(self) -> bool:
        for streams, users in self.open:
            if self.counts(users) and not (streams and self.policy.close_streams):
                return False
        limits = {
            ("in", "out", "both", "call"): self.policy.idle_timeout,
            ("in", "both", "call"): self.policy.read_idle,
            ("out", "both"): self.policy.write_idle,
        }
        for ways, limit in limits.items():
            last = max(at for at, way, users in self.happened if way in ways and self.counts(users))
            if limit is not None and self.now - last > round(limit * 1000):
                return True
        return False


TestLife = Life.TestCase
