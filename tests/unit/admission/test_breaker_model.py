"""Random attempts through a circuit breaker, compared with a reference that only has lists.

This makes 10^5 steps, in about a minute:

    pytest --hypothesis-profile=explore --timeout=600 tests/unit/admission/test_breaker_model.py
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rpcwheel.admission import BreakerPolicy
from rpcwheel.admission.breaker import Breaker, Transition

MS = 1_000_000
OK, FAILURE, OTHER, CANCELED, NO_STATUS = "OK", "UNAVAILABLE", "NOT_FOUND", "CANCELLED", ""


class Reference:
    """A circuit breaker in plain lists; times are milliseconds."""

    def __init__(self, policy, random):
        self.policy, self.random, self.openings = policy, random, 0
        self.losses = []
        self.become("closed")

    def become(self, state):
        self.state, self.outcomes, self.running, self.since = state, [], [], None
        if state in {"closed", "forced_open", "disabled"}:
            self.until = None
        if state == "closed":
            self.openings, self.has_worked = 0, True
            self.half_open_timeout = (self.policy.half_open_timeout or 0) * 1000

    def open(self, now):
        """Open for a time that grows; the outcomes are kept."""
        outcomes = self.outcomes
        self.become("open")
        self.outcomes = outcomes
        self.stay_open(now)

    def stay_open(self, now):
        policy = self.policy
        longest = policy.open_duration * policy.open_growth**self.openings
        longest = min(longest, policy.max_open_duration or 2 * policy.open_duration)
        self.openings += 1
        self.until = now + longest * 1000 * (1 - 0.1 * self.random)

    def half_open(self, now):
        self.become("half_open")
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
        timeout = self.half_open_timeout
        if self.since is None:
            self.since = now
        elif timeout and now - self.since >= timeout:
            self.open(now)

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

    def end(self, now, attempt, code, duration):
        self.adapt_timeout(code, duration)
        if attempt not in self.running:
            return  # it began in an earlier state
        self.running.remove(attempt)
        self.since = None
        if self.state == "disabled" or code in {CANCELED, NO_STATUS}:
            return
        if self.state == "closed" and code == FAILURE:
            if self.was_lost_with_another(now, duration):
                return
        elif self.state == "closed" and (not self.losses or now - duration >= self.losses[0]):
            self.has_worked = True
        limit = self.policy.slow_call
        slow = limit is not None and duration > limit * 1000
        self.outcomes.append((now, code == FAILURE, slow))
        calls, failures, slow = self.counts(now)
        if self.state == "closed":
            if calls >= self.policy.minimum_calls and self.exceeds(failures, slow, calls):
                self.open(now)
        elif (calls == 1 and failures) or self.exceeds(failures, slow, self.policy.half_open_calls):
            self.open(now)
        elif calls == self.policy.half_open_calls:
            self.become("closed")

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
        "half_open_timeout": draw(st.sampled_from([None, 0.05, 1.0])),
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


CODES = st.sampled_from([OK, OK, OK, FAILURE, FAILURE, OTHER, CANCELED, NO_STATUS])
DURATIONS = st.sampled_from([0, 99, 100, 101, 5000])


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
        assert transition.reason
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

    def end(self, attempt, code, duration):
        number, token = attempt
        before = self.reference.state
        transition = self.breaker.ended(token, code, duration * MS, self.now * MS)
        was_counted = number in self.reference.running and code not in {CANCELED, NO_STATUS}
        self.reference.end(self.now, number, code, duration)
        self.check(before, transition)
        if was_counted and before == self.reference.state != "disabled":
            window = self.breaker.window
            counts = window.calls, window.failures, window.slow
            assert counts == self.reference.counts(self.now)

    @rule()
    def begin(self):
        if attempt := self.enter():
            self.running.append(attempt)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), code=CODES, duration=DURATIONS)
    def end_one(self, data, code, duration):
        index = data.draw(st.integers(0, len(self.running) - 1))
        self.end(self.running.pop(index), code, duration)

    @rule(number=st.integers(1, 12), code=CODES, duration=DURATIONS)
    def run(self, number, code, duration):
        """Run attempts one after the other."""
        for _ in range(number):
            if attempt := self.enter():
                self.end(attempt, code, duration)

    @rule(milliseconds=st.sampled_from([1, 9, 10, 49, 100, 1000, 60_000]))
    def pass_time(self, milliseconds):
        self.now += milliseconds

    @rule()
    def end_open(self):
        before = self.reference.state
        if before == "open":
            self.reference.half_open(self.now)
        self.check(before, self.breaker.half_open(self.now * MS))

    @rule()
    def fail_health_check(self):
        open_for_ns = self.breaker.stay_open(self.now * MS)
        if self.reference.state == "open":
            self.reference.stay_open(self.now)
            assert open_for_ns == self.breaker.half_open_at_ns - self.now * MS
        else:
            assert open_for_ns is None

    @rule(
        state=st.sampled_from(["forced_open", "disabled", *["closed"] * 4]),
        is_set=st.sampled_from([True] + [False] * 9),
    )
    def set_by_hand(self, state, is_set):
        """Set a state, seldom unless the breaker is in one that ends by hand only."""
        before = self.reference.state
        if not is_set and before not in {"forced_open", "disabled"}:
            return
        if before != state or state == "closed":
            self.reference.become(state)
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


TestAnyAttempts = AnyAttempts.TestCase
TestAnyAttempts.settings = settings(
    max_examples=settings.default.max_examples // (3 if settings.default.derandomize else 1),
    stateful_step_count=130,
)
