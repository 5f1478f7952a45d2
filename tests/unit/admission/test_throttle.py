"""The throttle: compared with a list of all attempts, and with simulated servers."""

import heapq
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rpcwheel.admission import ThrottlePolicy
from rpcwheel.admission.throttle import Throttle

S = 1_000_000_000
FAILURE = "UNAVAILABLE"


class AnyAttempts(RuleBasedStateMachine):
    """A reference that has the slot of each attempt, and whether the server has accepted it."""

    @initialize(
        multiplier=st.sampled_from([1.1, 2.0, 3.5]),
        max_rejection=st.sampled_from([0.5, 0.98, 1.0]),
        minimum=st.sampled_from([1, 3, 10]),
        owed=st.sampled_from([0.0, 0.7]),
    )
    def make(self, multiplier, max_rejection, minimum, owed):
        self.multiplier, self.max_rejection, self.owed = multiplier, max_rejection, owed
        self.minimum = minimum
        policy = ThrottlePolicy(
            multiplier=multiplier, max_rejection=max_rejection, minimum_calls=minimum, window=1.0
        )
        self.throttle = Throttle(policy, lambda: owed)
        self.now_ns = 1000 * S
        self.attempts = []

    def rejection(self):
        oldest = self.now_ns // (S // 10) - 9
        self.attempts = [each for each in self.attempts if each[0] >= oldest]
        recent = [accepted for _, accepted in self.attempts]
        if len(recent) < self.minimum:
            return 0.0
        requests = len(recent) if any(recent) else 2 * len(recent)
        share = (requests - self.multiplier * sum(recent)) / (requests + 1)
        return max(0.0, min(share, self.max_rejection))

    def record(self, accepted):
        self.attempts.append((self.now_ns // (S // 10), accepted))

    @rule(tenths=st.sampled_from([0.3, 1, 4, 9, 10, 100]))
    def pass_time(self, tenths):
        self.now_ns += int(tenths * S / 10)

    @rule(number=st.integers(1, 20), code=st.sampled_from(["OK", "NOT_FOUND", FAILURE]))
    def end(self, number, code):
        for _ in range(number):
            self.throttle.ended(self.now_ns, code, self.now_ns)
            self.record(code != FAILURE)

    @rule(code=st.sampled_from(["CANCELLED", ""]))
    def cancel(self, code):
        self.throttle.ended(self.now_ns, code, self.now_ns)

    @rule(number=st.integers(1, 20))
    def ask(self, number):
        for _ in range(number):
            self.owed += self.rejection()
            refused = self.owed >= 1.0
            assert self.throttle.refuses(self.now_ns) is refused
            if refused:
                self.owed -= 1.0
                self.record(False)

    @invariant()
    def agrees(self):
        assert self.throttle.rejection(self.now_ns) == self.rejection()


TestAnyAttempts = AnyAttempts.TestCase
TestAnyAttempts.settings = settings(max_examples=settings.default.max_examples // 3)


class Client:
    """A client with a throttle that makes calls at random times, and the server that it calls."""

    def __init__(self, seed, **policy):
        self._random = random.Random(seed)
        self._throttle = Throttle(ThrottlePolicy(**policy), self._random.random)
        self._now_ns = 1000 * S
        self._running = []

    def offer(self, rate, *, seconds, accepted=None):
        """Make calls, of which the server accepts a number in each second; None: all.

        Returns whether each was sent, with its time.
        """
        began_ns = self._now_ns
        next_ns, sent = began_ns, []
        while True:
            self._now_ns += int(self._random.expovariate(rate) * S)
            if self._now_ns > began_ns + seconds * S:
                return sent
            while self._running and self._running[0][0] <= self._now_ns:
                self._throttle.ended(*heapq.heappop(self._running))
            is_sent = not self._throttle.refuses(self._now_ns)
            sent.append(((self._now_ns - began_ns) / S, is_sent))
            if is_sent:
                ok = accepted is None or (accepted > 0 and self._now_ns >= next_ns)
                if ok and accepted:
                    next_ns = max(next_ns + S // accepted, self._now_ns - S // 10)
                code = "OK" if ok else FAILURE
                at_ns = self._now_ns + (50 if ok else 1) * S // 1000
                heapq.heappush(self._running, (at_ns, code, self._now_ns))


def share(sent):
    return sum(is_sent for _, is_sent in sent) / len(sent)


@pytest.mark.parametrize("multiplier", [1.5, 2.0])
def test_an_overloaded_server_gets_about_multiplier_times_what_it_accepts(multiplier):
    client = Client(seed=1, multiplier=multiplier)
    client.offer(300, seconds=5, accepted=100)
    sent = client.offer(300, seconds=20, accepted=100)
    assert 300 * share(sent) == pytest.approx(multiplier * 100, rel=0.1)


def test_a_server_that_refuses_less_than_half_gets_all_attempts():
    client = Client(seed=1)
    client.offer(140, seconds=1, accepted=100)
    assert share(client.offer(140, seconds=20, accepted=100)) == 1.0


def test_a_server_that_is_down_for_30_seconds_gets_few_attempts_and_after_4_seconds_all():
    outages = []
    for seed in range(8):
        client = Client(seed)
        client.offer(56, seconds=10)
        outages += client.offer(56, seconds=30, accepted=0)
        after = client.offer(56, seconds=10)
        assert share([each for each in after if each[0] >= 4.0]) == 1.0
    assert share(outages) <= 0.04


def test_a_server_that_accepts_nothing_gets_one_attempt_in_two_windows():
    client = Client(seed=1, window=1.0, max_rejection=1.0)
    client.offer(100, seconds=5, accepted=0)
    sent = client.offer(100, seconds=100, accepted=0)
    assert 100 * 100 * share(sent) == pytest.approx(50, rel=0.1)


def test_the_first_failures_of_a_call_do_not_throttle_its_own_retries():
    throttle = Throttle(ThrottlePolicy(), lambda: 0.99)
    for second in range(20):
        for _ in range(2):
            throttle.ended(second * S, FAILURE, second * S)
            assert not throttle.refuses(second * S)


def test_attempts_that_have_lost_the_same_connection_count_as_one():
    throttle = Throttle(ThrottlePolicy(), lambda: 0.99)
    for number in range(100):
        throttle.ended(10 * S + number, FAILURE, 9 * S)
    assert not any(throttle.refuses(10 * S + 500) for _ in range(1000))
    for number in range(100):  # attempts that begin later count
        throttle.ended(11 * S + number, FAILURE, 10 * S + number)
    assert throttle.refuses(11 * S + 100)


def test_an_outage_of_which_only_attempts_in_flight_are_known_throttles_nothing():
    throttle = Throttle(ThrottlePolicy(), lambda: 0.99)
    assert not any(throttle.refuses(0) for _ in range(1000))
