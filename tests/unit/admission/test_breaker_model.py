"""Random attempts through a circuit breaker, compared with a reference that only has lists.

This makes 6*10^4 steps, in about a minute:

    pytest --hypothesis-profile=explore --timeout=600 tests/unit/admission/test_breaker_model.py
"""

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rpcwheel.admission import BreakerPolicy
from rpcwheel.admission.breaker import Breaker, Transition

MS = 1_000_000
OK, LOST, BROKEN, OTHER = "OK", "UNAVAILABLE", "INTERNAL", "NOT_FOUND"
CANCELED, NO_STATUS = "CANCELLED", ""


class Reference:
    """A circuit breaker in plain lists; times are milliseconds."""

    def __init__(self, policy, random):
        self.policy, self.random, self.openings = policy, random, 0
        self.losses = []
        self.last_failure = ""
        self.become("closed", "")

    def become(self, state, reason):
        self.state, self.reason = state, reason
        self.outcomes, self.running, self.gives_up_at = [], [], None
        if state in {"closed", "forced_open", "disabled"}:
            self.until = None
        if state == "closed":
            self.openings, self.has_worked = 0, True
            self.half_open_timeout = (self.policy.half_open_timeout or 0) * 1000

    def open(self, now, reason):
        """Open for a time that grows; the outcomes are kept."""
        outcomes = self.outcomes
        self.become("open", reason)
        self.outcomes = outcomes
        self.stay_open(now)

    def stay_open(self, now):
        policy = self.policy
        longest = policy.open_duration * policy.open_growth**self.openings
        longest = min(longest, policy.max_open_duration or 2 * policy.open_duration)
        self.openings += 1
        self.until = now + longest * 1000 * (1 - 0.1 * self.random)

    def half_open(self, now):
        self.become("half_open", "the open duration is over")
        self.until = None

    def enter(self, now, attempt):
        if self.state == "half_open":
            good = sum(not (failed or slow) for _, failed, slow in self.outcomes)
            limit = min(1 + good, self.policy.half_open_calls - len(self.outcomes))
            if len(self.running) >= limit:
                self.refused_half_open(now)
                return False
        elif self.state in {"open", "forced_open"}:
            if self.state == "open" and now >= self.until + 3000:  # the timer is lost
                self.half_open(now)
            return False
        self.running.append(attempt)
        return True

    def refused_half_open(self, now):
        """Open if none ends for `half_open_timeout`, as it was at the first refusal."""
        if self.gives_up_at is None:
            self.gives_up_at = now + (self.half_open_timeout or math.inf)
        elif now >= self.gives_up_at:
            self.open(now, "its calls have not ended in time")

    def fork(self):
        """Go on in a forked child, where running attempts are copies."""
        if self.state == "half_open":
            self.running = []

    def was_lost_with_another(self, now, duration):
        """Whether it began before the first loss after which nothing has worked, and ends soon."""
        if not self.losses or now - self.losses[-1] >= (2000 if self.has_worked else 60_000):
            self.losses, self.has_worked = [now], False
            return False
        self.losses.append(now)
        return now - duration < self.losses[0] and now < self.losses[0] + 1000

    def adapt_timeout(self, code, duration):
        if code == OK and 2 * duration > self.half_open_timeout > 0:
            self.half_open_timeout = min(2 * duration, self.policy.half_open_timeout * 10_000)

    def end(self, now, attempt, code, duration, is_stream):
        if not is_stream:
            self.adapt_timeout(code, duration)
        if attempt not in self.running:
            return  # it began in an earlier state
        self.running.remove(attempt)
        self.gives_up_at = None
        failed = code in {LOST, BROKEN}
        self.last_failure = code if failed else self.last_failure
        if self.state == "disabled" or code in {CANCELED, NO_STATUS}:
            return
        if self.state == "closed" and failed:
            if code == LOST and self.was_lost_with_another(now, duration):
                return
        elif self.state == "closed" and (not self.losses or now - duration >= self.losses[0]):
            self.has_worked = True
        limit = self.policy.slow_call
        slow = limit is not None and duration > limit * 1000 and not is_stream
        self.outcomes.append((now, failed, slow))
        self.decide(now)

    def decide(self, now):
        calls, failures, slow = self.counts(now)
        reason = f"{failures} of {calls} calls failed"
        reason += f": {self.last_failure}" if failures else ""
        reason += f", {slow} were slow" if slow else ""
        if self.state == "closed":
            if calls >= self.policy.minimum_calls and self.exceeds(failures, slow, calls):
                self.open(now, reason)
        elif (calls == 1 and failures) or self.exceeds(failures, slow, self.policy.half_open_calls):
            self.open(now, reason)
        elif calls == self.policy.half_open_calls:
            self.become("closed", reason)

    def exceeds(self, failures, slow, calls):
        policy = self.policy
        return failures / calls >= policy.failure_rate or slow / calls >= policy.slow_call_rate

    def counts(self, now):
        outcomes = self.outcomes
        if self.state != "half_open" and self.policy.window is not None:
            slot = self.policy.window * 100  # a tenth, in milliseconds
            outcomes = [each for each in outcomes if now // slot - each[0] // slot < 10]
        elif self.state != "half_open":
            outcomes = outcomes[-(self.policy.window_calls or 50) :]
        failures = sum(failed for _, failed, _ in outcomes)
        return len(outcomes), failures, sum(slow for *_, slow in outcomes)


@st.composite
def policies(draw):
    settings_ = {
        "failure_rate": draw(st.sampled_from([0.01, 0.07, 0.29, 0.5, 0.7, 1.0])),
        "minimum_calls": draw(st.integers(1, 10)),
        "half_open_calls": draw(st.integers(1, 6)),
        "half_open_timeout": draw(st.sampled_from([None, 0.1, 0.7])),
        "open_duration": draw(st.sampled_from([0.1, 1.0])),
        "open_growth": draw(st.sampled_from([1.0, 2.0, 10.0])),
        "max_open_duration": draw(st.sampled_from([None, 1.0, 30.0])),
    }
    if draw(st.booleans()):
        settings_["slow_call"] = 0.1
        settings_["slow_call_rate"] = draw(st.sampled_from([0.1, 0.5, 1.0]))
    if draw(st.booleans()):
        settings_["window"] = draw(st.sampled_from([0.1, 1.0]))
    else:
        settings_["window_calls"] = settings_["minimum_calls"] + draw(st.integers(0, 20))
    return BreakerPolicy(**settings_)


CODES = st.sampled_from([OK, OK, LOST, LOST, BROKEN, BROKEN, OTHER, CANCELED, NO_STATUS])
DURATIONS = st.sampled_from([0, 99, 100, 101, 400, 6000])
ENDS = st.tuples(CODES, DURATIONS, st.booleans())
"""The status of an attempt, how long it has taken, and whether it is a stream."""


class AnyAttempts(RuleBasedStateMachine):
    """One breaker, with attempts that begin and end in any order."""

    @initialize(policy=policies(), random=st.sampled_from([0.0, 0.5, 1.0]))
    def make(self, policy, random):
        self.breaker = Breaker(policy, lambda: random)
        self.reference = Reference(policy, random)
        self.now, self.begun = 10_000, 0
        self.running = []

    def check(self, before, transition):
        """Compare what the breaker has returned with what the reference has become."""
        after = self.reference.state
        if before == after:
            assert transition is None
            return
        assert isinstance(transition, Transition)
        assert (transition.before.value, transition.after.value) == (before, after)
        assert transition.reason == self.reference.reason
        if after == "open":
            assert transition.open_for_ns == self.breaker.half_open_at_ns - self.now * MS
        else:
            assert transition.open_for_ns is None

    def enter(self):
        """Let an attempt begin; returns its number and its token, or None if it is refused."""
        before, self.begun = self.reference.state, self.begun + 1
        token = self.breaker.enter()
        assert (token is not None) is self.reference.enter(self.now, self.begun)
        transition = self.breaker.give_up(self.now * MS) if token is None else None
        self.check(before, transition)
        return None if token is None else (self.begun, token)

    def end(self, attempt, code, duration, is_stream):
        number, token = attempt
        before, recorded = self.reference.state, len(self.reference.outcomes)
        transition = self.breaker.ended(
            token, code, duration * MS, self.now * MS, is_stream=is_stream
        )
        self.reference.end(self.now, number, code, duration, is_stream)
        self.check(before, transition)
        if before == self.reference.state and len(self.reference.outcomes) > recorded:
            window = self.breaker.window
            counts = window.calls, window.failures, window.slow
            assert counts == self.reference.counts(self.now)

    @rule(count=st.integers(1, 4))
    def begin(self, count):
        self.running += filter(None, [self.enter() for _ in range(count)])

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, 9), end=ENDS)
    def end_one(self, number, end):
        self.end(self.running.pop(number % len(self.running)), *end)

    @rule(
        by_hand=st.sampled_from([None] * 12 + ["forced_open", "disabled", "closed"]),
        healthy=st.sampled_from([True, True, False]),
        ends=st.lists(ENDS, min_size=1, max_size=3),
        times=st.integers(1, 8),
        milliseconds=st.sampled_from([0, 0, 9, 10, 100]),
    )
    def run(self, by_hand, healthy, ends, times, milliseconds):
        """Run attempts one after the other, until one is refused, in a state that allows some."""
        if by_hand is not None:
            self.set_by_hand(by_hand)
        elif self.reference.state == "open":
            self.end_open(healthy)
        elif self.reference.state in {"forced_open", "disabled"}:
            self.set_by_hand("closed")
        for end in ends * times:
            attempt = self.enter()
            if attempt is None:
                return
            self.pass_time(milliseconds)
            self.end(attempt, *end)

    @rule(milliseconds=st.sampled_from([1, 9, 10, 49, 100, 1000, 60_000]))
    def pass_time(self, milliseconds):
        self.now += milliseconds

    @precondition(lambda self: self.reference.state == "open")
    @rule(healthy=st.booleans())
    def end_open(self, healthy):
        """Become HALF_OPEN, perhaps after health checks that fail."""
        if not healthy:
            open_for_ns = self.breaker.stay_open(self.breaker.generation, self.now * MS)
            self.reference.stay_open(self.now)
            assert open_for_ns == self.breaker.half_open_at_ns - self.now * MS
        self.reference.half_open(self.now)
        self.check("open", self.breaker.half_open(self.breaker.generation))

    @precondition(lambda self: self.reference.state == "open")
    @rule(milliseconds=st.sampled_from([2999, 3000]))
    def lose_timer(self, milliseconds):
        """The time in OPEN ends late."""
        self.now = max(self.now, round(self.reference.until) + milliseconds)
        self.begin(1)

    @precondition(lambda self: self.reference.state == "half_open")
    @rule(duration=st.sampled_from([None, 99, 400, 6000]), early=st.sampled_from([0, 1]))
    def wait_for_running(self, duration, early):
        """Attempts are refused because others run, until `half_open_timeout` is over, or nearly.

        One of them may succeed before.
        """
        if duration is not None and self.running:
            self.end(self.running.pop(), OK, duration, is_stream=False)
        self.begin(6)
        if self.reference.gives_up_at is not None:  # it was not over yet
            self.now = round(min(self.reference.gives_up_at, self.now + 100_000)) - early
            self.begin(1)

    @precondition(lambda self: self.reference.state == "half_open")
    @rule()
    def fork(self):
        self.breaker.forget_running()
        self.reference.fork()

    def set_by_hand(self, state):
        before = self.reference.state
        if before != state or state == "closed":
            self.reference.become(state, "by hand")
        act = {
            "forced_open": self.breaker.force_open,
            "disabled": self.breaker.disable,
            "closed": self.breaker.reset,
        }[state]
        self.check(before, act())

    @invariant()
    def agrees(self):
        breaker, reference = self.breaker, self.reference
        assert breaker.state.value == reference.state
        assert breaker.half_open_at_ns == (reference.until and round(reference.until * MS))
        for generation in range(breaker.generation + (reference.state != "open")):
            assert breaker.half_open(generation) is None
            assert breaker.stay_open(generation, self.now * MS) is None


TestAnyAttempts = AnyAttempts.TestCase
TestAnyAttempts.settings = settings(
    max_examples=settings.default.max_examples // (3 if settings.default.derandomize else 1),
    stateful_step_count=60,
)
