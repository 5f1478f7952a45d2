"""Random facts about the attempts of a call, compared with a reference for each of both plans.

Times are whole milliseconds in the reference.
"""

import runpy
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from rpcwheel.call import HedgingPolicy, RetryPolicy
from rpcwheel.call.attempts import TRANSITIONS, Attempts, Fact, State, Wait
from rpcwheel.call.budget import RetryBudget
from rpcwheel.call.config import MethodConfig
from rpcwheel.call.policy import MethodPolicy
from rpcwheel.durations import NEVER
from rpcwheel.rpc import AttemptResult, NextAttempt, Stop

MS = 1_000_000
RETRYABLE, FATAL, REFUSED = "UNAVAILABLE", "INTERNAL", "RESOURCE_EXHAUSTED"
ENDS = [
    *[(RETRYABLE, False, False)] * 5,
    (FATAL, False, False),
    (REFUSED, False, False),  # by a handler
    *[(REFUSED, True, False), (REFUSED, True, True)] * 2,
]
"""How an attempt fails: its code, whether a server has refused it, and whether that is proven."""

MAX_PUSHBACK = 50
FAILURES = st.tuples(
    st.sampled_from(ENDS),
    st.sampled_from([None, None, -1, 0, 7, MAX_PUSHBACK, MAX_PUSHBACK + 1]),
    st.sampled_from([False] * 6 + [True]),
    st.booleans(),
)
"""How an attempt fails, its pushback, whether it is committed, and whether another server is ready,
which only counts after a refusal."""


class Reference:
    """What the attempts of a call do, in plain numbers."""

    def __init__(self, hedged, idempotent, most, wait, deadline, tokens):
        self.hedged, self.most, self.wait, self.deadline = hedged, most, wait, deadline
        self.idempotent = idempotent
        self.tokens = tokens
        self.made = self.running = 1
        self.undecided = 0
        self.planned = None
        self.stopped = self.closed = self.over = False
        if hedged:
            self.plan(wait)

    def plan(self, at):
        """Plan a hedge, unless there may be no more."""
        more = not self.closed and self.made < self.most
        self.planned = at if more and (self.deadline is None or at < self.deadline) else None

    def close(self):
        self.closed, self.planned = True, None

    def decided(self, now, end, pushback, committed, other):
        """An attempt has failed, and what follows is decided."""
        self.undecided -= 1
        code, refused, proven = end
        if refused and other and (pushback is None or pushback >= 0):
            pushback = 0  # another server gets the next attempt
        forbidden = pushback is not None and not 0 <= pushback <= MAX_PUSHBACK
        may_have_run = not (self.idempotent or proven)
        if not (code == RETRYABLE or refused) or may_have_run:
            self.stopped = True
        elif self.hedged:
            if forbidden:
                self.close()
            else:
                self.plan(now + (pushback or 0))
        else:
            at = now + (self.wait if pushback is None else pushback)
            late = self.deadline is not None and at >= self.deadline
            if committed or forbidden or late or self.made >= self.most or not self.take():
                self.stopped = True
            else:
                self.planned = at

    def take(self):
        allowed = self.tokens is None or self.tokens > 0
        if allowed and self.tokens is not None:
            self.tokens -= 1
        return allowed

    def next(self, now, can_resend):
        """The number of an attempt that is made now, the time to wait for, "stop" or None."""
        if self.over:
            return None
        due = self.planned is not None and self.planned <= now
        if due and not can_resend:
            self.stopped = True
        if due and not self.stopped and (not self.hedged or self.take()):
            self.made += 1
            self.running += 1
            self.planned = None
            if self.hedged:
                self.plan(now + self.wait)
            return "attempt", self.made
        if due and not self.stopped:
            self.planned = None
        if self.planned is not None and not self.stopped:
            return "wait", self.planned
        if (self.running or self.undecided) and not self.stopped:
            return None
        self.over = True
        return "stop"

    @property
    def waits(self):
        return not (self.over or self.running or self.undecided or self.planned is None)


CALLS = {
    "hedged": st.booleans(),
    "idempotent": st.booleans(),
    "most": st.integers(2, 5),
    "wait": st.integers(0, 30),
    "deadline": st.none() | st.integers(1, 120),
    "tokens": st.sampled_from([None, None, 0, 1, 3]),
}


class AnyCall(RuleBasedStateMachine):
    """Calls one after the other, to each of which anything may happen in any order."""

    @initialize(**CALLS)
    def begin(self, hedged, idempotent, most, wait, deadline, tokens):
        idempotent = idempotent or hedged
        common = {
            "max_attempts": most,
            "max_pushback": MAX_PUSHBACK / 1000,
            "retry_budget": None,
        }
        policy = (
            MethodPolicy(idempotent=True, hedging=HedgingPolicy(delay=wait / 1000, **common))
            if hedged
            else MethodPolicy(
                idempotent=idempotent,
                retry=RetryPolicy(retry_on=RETRYABLE, backoff=lambda _: wait / 1000, **common),
            )
        )
        config = MethodConfig.from_policy(policy)
        self.deadline_ns = NEVER if deadline is None else deadline * MS
        budget = None if tokens is None else RetryBudget(0.0, tokens)
        self.attempts = Attempts("/a/B", config, 0, self.deadline_ns, budget, hedged=hedged)
        self.reference = Reference(hedged, idempotent, most, wait, deadline, tokens)
        self.failed = []
        self.now = 0
        self.before = State.RUNNING

    @precondition(lambda self: self.reference.over)
    @rule(**CALLS)
    def begin_another(self, **call):
        """Most calls are over soon."""
        self.begin(**call)

    @property
    def runs(self):
        return self.reference.running and not self.reference.over

    @rule(ms=st.integers(1, 40))
    def pass_time(self, ms):
        self.now += ms

    @precondition(lambda self: self.runs)
    @rule(failure=FAILURES)
    def attempt_fails(self, failure):
        end, pushback, committed, other = failure
        self.attempts.failed()
        self.reference.running -= 1
        self.reference.undecided += 1
        self.failed.append((end, pushback, committed, end[1] and other))

    @precondition(lambda self: self.runs)
    @rule(
        failures=st.lists(FAILURES, min_size=1, max_size=4),
        ms=st.integers(0, 40),
        can_resend=st.sampled_from([True] * 5 + [False]),
    )
    def attempts_fail(self, failures, ms, can_resend):
        """Attempts fail one after the other; those that are due later are waited for."""
        for failure in failures:
            if not self.runs:
                return
            self.attempt_fails(failure)
            self.decide(can_resend, len(self.failed) - 1)
            self.the_state_is_that_of_the_reference()
            self.now = max(self.now + ms, self.reference.planned or 0)
            self.go_on(can_resend)

    @precondition(lambda self: self.failed)
    @rule(can_resend=st.sampled_from([True] * 5 + [False]), number=st.integers(0, 9))
    def decide(self, can_resend, number):
        facts = self.failed.pop(number % len(self.failed))
        (code, refused, proven), pushback, committed, other = facts
        pushback_ns = None if pushback is None else pushback * MS
        result = AttemptResult(code, None, pushback_ns, committed, refused, proven, other)
        self.attempts.decided(self.attempts.decide(self.now * MS, result))
        self.reference.decided(self.now, *facts)
        self.go_on(can_resend)

    @rule(can_resend=st.sampled_from([True] * 5 + [False]))
    def go_on(self, can_resend):
        """A timer has fired, perhaps too early, too late or twice."""
        while True:
            if not self.reference.hedged and self.failed:
                return  # gRPC reports the end of an attempt once, and its decision follows
            step = self.attempts.next(self.now * MS, can_resend=can_resend)
            expected = self.reference.next(self.now, can_resend)
            match step:
                case NextAttempt():
                    assert expected == ("attempt", step.number)
                    assert step.at_ns <= self.now * MS
                    assert step.deadline_ns == self.deadline_ns
                case Wait(at_ns):
                    assert expected == ("wait", at_ns // MS)
                    state = State.RUNNING if self.reference.running else State.WAITING
                    assert self.attempts.state is state
                case Stop():
                    assert expected == "stop"
                case None:
                    assert expected is None
            if not isinstance(step, NextAttempt):
                return

    @rule(what=st.sampled_from([None] * 9 + ["timer", "channel", "end"]))
    def end(self, what):
        """Seldom the timer is stopped, or the channel is closed, or the call ends.

        It ends because an attempt has succeeded, its caller has canceled it, or its policies are
        done.
        """
        match what:
            case "timer":
                self.stop_timer()
            case "channel":
                self.close_channel()
            case "end":
                self.end_call()

    def stop_timer(self):
        if not (self.reference.hedged or self.reference.waits):
            return
        self.attempts.timer_stopped()
        if self.reference.hedged:
            self.reference.close()
        else:
            self.reference.stopped = True
        self.go_on(can_resend=True)

    def close_channel(self):
        waits = self.attempts.state is State.WAITING
        assert self.attempts.channel_closed() == waits
        if self.reference.hedged:
            self.reference.close()
        if waits:
            self.end_call()

    def end_call(self):
        self.attempts.ended()
        self.reference.over = True
        assert self.attempts.state is State.ENDED
        assert self.attempts.next(self.now * MS) is None

    @invariant()
    def the_state_is_that_of_the_reference(self):
        reference, state = self.reference, self.attempts.state
        assert self.attempts.number == reference.made
        assert self.attempts.is_over == reference.over
        planned = None if reference.over else reference.planned
        assert self.attempts.next_ns == (NEVER if planned is None else planned * MS)
        if not reference.over:
            assert (state is State.RUNNING) == (reference.running > 0)
        if state is State.WAITING:
            assert not reference.running

    @invariant()
    def a_call_that_is_over_stays_so(self):
        if self.before in {State.ENDING, State.ENDED}:
            assert self.attempts.state in {self.before, State.ENDED}
        self.before = self.attempts.state


TestAnyCall = AnyCall.TestCase


@given(st.fixed_dictionaries(CALLS), st.lists(FAILURES, min_size=2, max_size=5), st.integers(0, 9))
def test_attempts_that_fail_one_after_the_other(call, failures, ms):
    """Few of the runs above have several."""
    any_call = AnyCall()
    any_call.begin(**call)
    any_call.attempts_fail(failures, ms, can_resend=True)


def test_every_state_is_reached_and_every_call_can_end():
    reached = {state for facts in TRANSITIONS.values() for state in facts.values()}
    assert reached == set(State)
    for state in set(State) - {State.ENDED}:
        assert TRANSITIONS[state][Fact.END] is State.ENDED
    assert TRANSITIONS[State.ENDED] == {}


def test_the_table_in_the_architecture_is_current():
    script = runpy.run_path(str(Path(__file__).parents[3] / "docs/transitions.py"))
    assert script["PAGE"].read_text("utf-8") == script["page"](), "run docs/transitions.py"
