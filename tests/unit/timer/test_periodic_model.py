"""A model-based test of `PeriodicTask`."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rpcwheel.timer import DeadlineHeap, ManualTimer, PeriodicTask

MS = 1_000_000


class Periodic(RuleBasedStateMachine):
    """Times are milliseconds; `due` is the time of the next run, `None` if there is none."""

    @initialize(interval=st.integers(1, 50), initial=st.none() | st.integers(-5, 60))
    def make(self, interval: int, initial: int | None) -> None:
        self.timer = ManualTimer(DeadlineHeap())
        self.errors: list[BaseException] = []
        self.timer._on_error = lambda timeout, error: self.errors.append(error)
        self.interval = interval
        self.first = interval if initial is None else max(initial, 0)
        given = None if initial is None else initial / 1000
        self.task = PeriodicTask(self.timer, interval / 1000, self.run, initial_delay=given)
        self.now = 0
        self.due: int | None = None
        self.state = "idle"
        self.script: list[object] = []
        self.ran: list[int] = []
        self.raised = 0

    def run(self) -> object:
        assert self.task.state == "running"
        now = self.timer._timer_state.manual_ns // MS
        self.ran.append(now)
        kind, value = self.script.pop(0) if self.script else ("fine", None)
        if kind == "cancel":
            assert self.task.cancel()
        elif kind == "raise":
            raise ValueError(value)
        elif kind == "slow":
            self.timer._timer_state.manual_ns += min(value, self.target - now) * MS
        elif kind == "answer":
            return value / 1000
        return None

    def teardown(self) -> None:
        if hasattr(self, "timer"):
            self.timer.stop()

    @rule()
    def start(self) -> None:
        self.task.start()
        if self.state == "idle":
            self.state, self.due = "armed", self.now + self.first

    @rule()
    def cancel(self) -> None:
        assert self.task.cancel() == (self.state != "cancelled")
        self.state, self.due = "cancelled", None

    @rule(
        step=st.integers(0, 300),
        script=st.lists(
            st.tuples(st.just("raise"), st.just("boom"))
            | st.tuples(st.just("slow"), st.integers(0, 150))
            | st.tuples(st.just("answer"), st.integers(-5, 80))
            | st.tuples(st.sampled_from(["fine", "fine", "fine", "cancel"]), st.none()),
            max_size=6,
        ),
    )
    def advance(self, step: int, script: list[object]) -> None:
        self.script = list(script)
        self.target = self.now + step
        self.ran.clear()
        expected = self.expect(list(script))
        self.timer.advance(step / 1000)
        self.now = self.target
        assert self.ran == expected
        assert len(self.errors) == self.raised

    def expect(self, script: list[object]) -> list[int]:
        runs = []
        while self.due is not None and self.due <= self.target:
            now = self.due
            runs.append(now)
            kind, value = script.pop(0) if script else ("fine", None)
            self.raised += kind == "raise"
            if kind == "slow":
                now += min(value, self.target - now)
            if kind == "cancel":
                self.state, self.due = "cancelled", None
            elif kind == "answer":
                self.due = now + max(value, 0)
            else:
                self.due += self.interval
                if self.due <= now:
                    self.due = now + self.interval
        return runs

    @invariant()
    def agrees(self) -> None:
        assert self.task.state == self.state
        assert self.timer.pending == (self.due is not None)
        if self.due is not None:
            assert self.task._timeout._deadline_ns == self.due * MS
        self.timer._timer_state.queue.check()


TestPeriodic = Periodic.TestCase
TestPeriodic.settings = settings(max_examples=60, stateful_step_count=30)
