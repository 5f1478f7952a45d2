"""The order of a server's way up and down, and where its callers come in: as decisions."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rpcwheel.errors import ConfigurationError
from rpcwheel.registry.lifecycle import (
    DOWN,
    HURRY_NS,
    UP,
    LifecycleLimits,
    Phase,
    PortBinding,
    ServerLifecycle,
    Step,
    door,
)

SECOND = 1_000_000_000
RULES = LifecycleLimits(lame_duck_ns=SECOND, grace_ns=10 * SECOND)


@pytest.fixture
def core():
    return ServerLifecycle(RULES)


def carried_out(core: ServerLifecycle, until: Step | None = None) -> list[Step]:
    """Carry out what there is, but not `until`, which is left under way."""
    steps = []
    while (step := core.step(0)) is not None:
        steps.append(step)
        if step is until:
            break
        core.done()
    return steps


def serving(core: ServerLifecycle, *, running: bool = False) -> ServerLifecycle:
    core.begin(running=running)
    carried_out(core)
    return core


# The order


def test_a_server_is_published_only_once_it_serves_and_is_healthy(core):
    assert core.begin(running=False)
    assert carried_out(core) == [Step.START, Step.LOOK, Step.HEALTHY, Step.PUBLISH]
    assert core.phase is Phase.SERVING


def test_a_server_is_withdrawn_before_it_stops(core):
    serving(core)
    assert core.stop("SIGTERM")
    assert carried_out(core) == [
        Step.WITHDRAW,
        Step.NOT_SERVING,
        Step.WAIT,
        Step.STOP,
        Step.CLOSE,
    ]
    assert (core.phase, core.reason) == (Phase.CLOSED, "SIGTERM")


def test_one_step_is_under_way_at_a_time(core):
    core.begin(running=False)
    assert core.step(0) is Step.START
    assert core.step(0) is None
    core.done()
    assert core.step(0) is Step.LOOK


def test_it_begins_once(core):
    assert core.begin(running=False)
    assert not core.begin(running=False)
    carried_out(core)
    core.stop("a")
    carried_out(core)
    assert not core.begin(running=False)


def test_whoever_asks_first_has_it_carried_out_unless_somebody_is_at_it(core):
    core.begin(running=False)
    core.step(0)
    assert not core.stop("while it starts")
    core.done()
    other = serving(ServerLifecycle(RULES))
    assert other.stop("first")
    assert not other.stop("second")
    assert other.reason == "first"
    carried_out(other)
    assert not other.stop("after the end")


def test_an_end_that_is_asked_for_on_the_way_up_undoes_what_was_begun(core):
    core.begin(running=False)
    assert carried_out(core, until=Step.START) == [Step.START]
    core.stop("SIGTERM")
    core.done()
    assert carried_out(core) == [Step.STOP, Step.CLOSE]


def test_what_never_began_is_only_closed(core):
    assert core.stop("never mind")
    assert carried_out(core) == [Step.CLOSE]
    assert core.phase is Phase.CLOSED


def test_a_step_that_fails_has_undone_what_was_begun_at_once():
    for step, undone in (
        (Step.START, [Step.STOP, Step.CLOSE]),
        (Step.LOOK, [Step.STOP, Step.CLOSE]),
        (Step.HEALTHY, [Step.NOT_SERVING, Step.STOP, Step.CLOSE]),
        (Step.PUBLISH, [Step.WITHDRAW, Step.NOT_SERVING, Step.WAIT, Step.STOP, Step.CLOSE]),
    ):
        core = ServerLifecycle(RULES)
        core.begin(running=False)
        carried_out(core, until=step)
        core.failed("no")
        core.done()
        assert core.is_hurried
        assert carried_out(core) == undone
        assert core.reason == "no"


def test_a_server_that_ran_before_is_left_running_if_it_could_not_be_published(core):
    core.begin(running=True)
    carried_out(core, until=Step.LOOK)
    core.failed("no")
    core.done()
    assert carried_out(core) == [Step.CLOSE]


def test_a_server_that_ran_before_is_stopped_at_the_end_all_the_same(core):
    serving(core, running=True).stop("enough")
    assert Step.STOP in carried_out(core)


def test_a_server_with_which_nothing_can_be_done_any_more_is_left_as_it_is(core):
    serving(core).stop("enough")
    carried_out(core, until=Step.WAIT)
    core.abandon()
    core.done()
    assert carried_out(core) == [Step.CLOSE]


# How long


def test_each_step_has_its_time_which_a_stop_without_grace_shortens():
    for step, seconds, hurried_ns in (
        (Step.WITHDRAW, 2, HURRY_NS),
        (Step.WAIT, 1, 0),
        (Step.STOP, 10, 0),
        (Step.CLOSE, 2, HURRY_NS),
    ):
        core = serving(ServerLifecycle(RULES))
        core.stop("enough")
        carried_out(core, until=step)
        assert core.left_ns(0) == seconds * SECOND
        assert core.left_ns(SECOND // 2) == seconds * SECOND - SECOND // 2
        assert core.left_ns(60 * SECOND) == 0
        core.stop("at once", 0)
        assert core.is_hurried
        assert core.left_ns(0) == hurried_ns


def test_of_several_graces_the_smallest_counts(core):
    serving(core).stop("a", 5 * SECOND)
    core.stop("b", 20 * SECOND)
    core.stop("c", 3 * SECOND)
    carried_out(core, until=Step.STOP)
    assert core.left_ns(0) == 3 * SECOND
    assert not core.is_hurried


class AnyOrder(RuleBasedStateMachine):
    """Steps are done, fail, and ends are asked for, at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.core = ServerLifecycle(RULES)
        self.taken: list[Step] = []
        self.must_drive = False

    @rule(running=st.booleans())
    def begin(self, running):
        self.must_drive |= self.core.begin(running=running)

    @rule(grace=st.none() | st.integers(0, 20 * SECOND))
    def stop(self, grace):
        self.must_drive |= self.core.stop("asked", grace)

    @precondition(lambda self: self.core.under_way is None)
    @rule()
    def step(self):
        step = self.core.step(0)
        if step is None:
            self.must_drive = False
        else:
            assert self.must_drive, "somebody was to be told to carry this out"
            self.taken.append(step)

    @precondition(lambda self: self.core.under_way is not None)
    @rule(fails=st.booleans())
    def done(self, fails):
        if fails and self.core.under_way in UP:
            self.core.failed("no")
        self.core.done()

    @invariant()
    def steps_go_up_then_down_each_once(self):
        up = [step for step in self.taken if step in UP]
        down = [step for step in self.taken if step in DOWN]
        assert self.taken == up + down
        assert up == list(UP[: len(up)])
        assert down == sorted(set(down), key=DOWN.index)

    @invariant()
    def what_was_published_is_withdrawn_before_it_stops(self):
        if Step.STOP in self.taken and Step.PUBLISH in self.taken:
            assert self.taken.index(Step.WITHDRAW) < self.taken.index(Step.STOP)

    @invariant()
    def it_is_over_once_it_was_closed(self):
        closed = Step.CLOSE in self.taken and self.core.under_way is None
        assert (self.core.phase is Phase.CLOSED) == closed


TestAnyOrder = AnyOrder.TestCase


# The door


def found(port=50051, **given) -> PortBinding:
    usual = {"listening": (), "running": False, "elsewhere": False, "answered": False}
    return door(port, **usual | given)


def test_a_port_at_which_this_process_listens_is_the_door():
    assert found(listening={50051}) is PortBinding.HERE
    assert found(listening={50051}, running=True, elsewhere=True) is PortBinding.HERE


def test_a_port_at_which_nobody_listens_is_bound_if_the_server_can_be():
    assert found() is PortBinding.BIND
    assert found(listening={9090}) is PortBinding.BIND
    assert found(0) is PortBinding.BIND


def test_a_server_that_runs_can_be_given_no_port():
    for listening in (set(), {50052}):
        with pytest.raises(ConfigurationError, match=r"port is 50051.*the server runs already"):
            found(listening=listening, running=True)
    with pytest.raises(ConfigurationError):
        found(0, running=True, elsewhere=True)


def test_a_port_of_somebody_in_front_is_left_to_him():
    assert found(answered=True, listening={50052}) is PortBinding.OUTSIDE
    assert found(answered=True, running=True) is PortBinding.OUTSIDE
    assert found(elsewhere=True, running=True) is PortBinding.OUTSIDE
    assert found(elsewhere=True, listening={50052}) is PortBinding.OUTSIDE


def test_a_mapped_port_of_a_server_that_has_none_is_bound():
    assert found(elsewhere=True) is PortBinding.BIND


def test_who_answers_at_the_port_of_a_process_that_listens_nowhere_is_not_in_front_of_it():
    """It is the server that this one replaces, which goes soon."""
    assert found(answered=True) is PortBinding.BIND
    assert found(answered=True, elsewhere=True) is PortBinding.BIND
