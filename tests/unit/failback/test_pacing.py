"""When attempts begin, with a simulated server in manual time."""

import heapq
import random
from collections import Counter, deque

import hypothesis.strategies as st
import pytest
from hypothesis import given

from rpcwheel.durations import NEVER
from rpcwheel.failback.pacing import FAILING_LIMIT, FIRST_WINDOW, MAX_WINDOW, Outcome, Pacing

S = 1_000_000_000
TIMEOUT_S = 2.0


def always(value):
    return lambda _now_s: value


def until(end_s, before, after):
    return lambda now_s: before if now_s < end_s else after


class Server:
    """Executes the calls of several clients in their order; each client has its pacing.

    It executes calls that have reached their timeout too, as a server of `grpc` may.
    """

    def __init__(
        self,
        clients=1,
        *,
        threads=lambda _: 16,
        service_s=lambda _: 0.2,
        up=lambda _: True,
        outcome=lambda _: Outcome.DELIVERED,
    ):
        self._threads, self._service_s, self._up = threads, service_s, up
        self._outcome = outcome
        self._pacings = [Pacing() for _ in range(clients)]
        self._left = 0
        self._busy = 0
        self._queue = deque()
        self._events = []
        self._number = 0
        self._now_ns = 0
        self.began_s = []
        self.delivered_s = []
        self.failed = 0

    def deliver(self, calls, until_s=1e9):
        """Let the clients deliver calls, to the end or for so long; return the time of the last."""
        self._left += calls
        for pacing in self._pacings:
            self._begin(pacing)
        while self._events and self._events[0][0] <= until_s * S:
            self._now_ns, _, step, *arguments = heapq.heappop(self._events)
            step(*arguments)
        return self.delivered_s[-1]

    def per_s(self, begin_s, end_s):
        """The deliveries a second within a time."""
        return sum(begin_s <= at_s < end_s for at_s in self.delivered_s) / (end_s - begin_s)

    def _at(self, delay_s, step, *arguments):
        self._number += 1
        at_ns = self._now_ns + round(delay_s * S)
        heapq.heappush(self._events, (at_ns, self._number, step, *arguments))

    def _begin(self, pacing):
        while self._left and (at_ns := pacing.next_ns(self._now_ns)) < NEVER:
            if at_ns > self._now_ns:
                self._at((at_ns - self._now_ns) / S, self._begin, pacing)
                return
            pacing.began(self._now_ns, round(TIMEOUT_S * S))
            self._left -= 1
            self.began_s.append(self._now_ns / S)
            call = [pacing, self._now_ns]
            if not self._up(self._now_ns / S):
                self._at(0.001, self._end, call, Outcome.BUSY)
                continue
            self._queue.append(call)
            self._at(TIMEOUT_S, self._end, call, Outcome.BUSY)
            self._execute()

    def _execute(self):
        now_s = self._now_ns / S
        while self._queue and self._busy < self._threads(now_s):
            self._busy += 1
            jitter = 0.98 + self._number % 5 / 100
            self._at(self._service_s(now_s) * jitter, self._executed, self._queue.popleft())

    def _executed(self, call):
        self._busy -= 1
        self._end(call, self._outcome(self._now_ns / S))
        self._execute()

    def _end(self, call, outcome):
        if not call:
            return
        pacing, began_ns = call
        call.clear()
        pacing.ended(began_ns, self._now_ns, outcome)
        if outcome is Outcome.DELIVERED:
            self.delivered_s.append(self._now_ns / S)
        else:
            self.failed += 1
            self._left += 1
        self._begin(pacing)


@pytest.mark.parametrize(
    ("clients", "threads", "service_s", "calls"),
    [
        (1, 16, 0.2, 1000),
        (2, 16, 0.2, 2000),
        (4, 16, 0.2, 4000),
        (1, 100, 0.2, 10_000),
        (1, 100, 0.02, 20_000),
        (1, 4, 0.001, 20_000),
        (1, 2, 0.2, 300),
    ],
    ids=str,
)
def test_a_healthy_server_is_fully_used_and_not_overloaded(clients, threads, service_s, calls):
    server = Server(clients, threads=always(threads), service_s=always(service_s))
    took_s = server.deliver(calls)
    assert len(server.delivered_s) == calls
    assert calls / took_s >= 0.85 * threads / service_s
    assert server.failed <= 0.02 * calls


def test_calls_of_very_different_lengths_do_not_look_like_an_overload():
    rng = random.Random(1)
    server = Server(service_s=lambda _: 0.8 if rng.random() < 0.25 else 0.01)
    assert 2000 / server.deliver(2000) >= 0.85 * 16 / 0.2075
    assert server.failed <= 40


def test_calls_that_take_up_to_two_thirds_of_their_timeout_hardly_reach_it():
    rng = random.Random(1)
    service_s = lambda _: 1.4 if rng.random() < 0.5 else 0.6  # noqa: E731
    server = Server(threads=always(8), service_s=service_s)
    server.deliver(100_000, until_s=500)
    assert server.failed <= 0.04 * len(server.delivered_s)


@pytest.mark.parametrize(
    ("change", "per_s"),
    [
        ({"threads": until(10, 160, 16)}, 80),
        ({"threads": until(10, 16, 160)}, 800),
        ({"service_s": until(10, 0.2, 0.6)}, 16 / 0.6),
        ({"service_s": until(10, 0.6, 0.1)}, 160),
    ],
    ids=["ten servers to one", "one server to ten", "slower", "faster"],
)
def test_the_window_follows_a_change_of_the_server(change, per_s):
    server = Server(**change)
    server.deliver(100_000, until_s=90)
    assert server.per_s(50, 90) >= 0.85 * per_s
    assert server.failed <= 0.02 * len(server.delivered_s)


def test_the_window_grows_by_a_quarter_in_each_round_without_a_higher_latency():
    server = Server(threads=until(10, 16, 256))
    server.deliver(100_000, until_s=16)
    assert server.per_s(15, 16) >= 0.85 * 256 / 0.2  # an eighth would reach half of it


@pytest.mark.parametrize(
    ("outcome", "share", "least"),
    [
        (Outcome.BUSY, 0.01, 0.95),
        (Outcome.BUSY, 0.1, 0.75),
        (Outcome.FAILED, 0.01, 0.95),
        (Outcome.FAILED, 0.1, 0.75),
        (Outcome.REFUSED, 0.02, 0.9),
    ],
    ids=str,
)
def test_calls_that_fail_whatever_the_window_is_hardly_slow_the_others(outcome, share, least):
    """One of ten servers is down, or some calls can not be delivered."""
    rng = random.Random(1)
    server = Server(outcome=lambda _: outcome if rng.random() < share else Outcome.DELIVERED)
    server.deliver(100_000, until_s=30)
    assert server.per_s(5, 30) >= least * 16 / 0.2


@pytest.mark.parametrize("threads", [16, 128])
def test_attempts_that_fail_at_once_hardly_slow_the_others(threads):
    """Most of a round has failed before the first of its calls is delivered."""
    rng = random.Random(1)
    server = Server(threads=always(threads), up=lambda _: rng.random() >= 0.1)
    server.deliver(100_000, until_s=30)
    assert server.per_s(5, 30) >= 0.75 * threads / 0.2


def test_failures_count_although_their_attempts_are_not_measured():
    pacing = Pacing()
    for _ in range(FIRST_WINDOW):
        pacing.began(0)
    for _ in range(FIRST_WINDOW - 1):
        pacing.ended(0, 1, Outcome.DELIVERED)
    for now_ns in range(2, 9):  # one of the first hangs, and the next ones fail
        pacing.began(now_ns)
        pacing.ended(now_ns, now_ns, Outcome.BUSY)
    assert pacing.window == FIRST_WINDOW // 2


def test_calls_that_take_half_of_their_timeout_do_not_wait_for_others():
    server = Server(threads=always(8), service_s=always(TIMEOUT_S / 2))
    server.deliver(100_000, until_s=60)
    assert server.per_s(5, 60) >= 0.75 * 8 / (TIMEOUT_S / 2)
    assert server.failed <= 0.3 * len(server.delivered_s)


def test_a_server_that_is_down_gets_ten_attempts_a_second_and_all_when_it_is_back():
    server = Server(up=lambda now_s: not 5 <= now_s < 15)
    server.deliver(2000, until_s=20)
    per_second = Counter(int(at_s) for at_s in server.began_s)
    assert [per_second[second] for second in range(6, 15)] == [FAILING_LIMIT] * 9
    assert per_second[15] <= 80  # not flooded
    assert server.per_s(17, 20) >= 0.85 * 80


def test_only_the_first_attempts_of_a_round_are_measured():
    pacing, ms = Pacing(), S // 1000
    for _ in range(FIRST_WINDOW):
        pacing.began(0)
    for number in (1, 2):  # one of the first ends, and a later one begins and ends at once
        pacing.ended(0, number * ms, Outcome.DELIVERED)
        pacing.began(number * ms)
        pacing.ended(number * ms, number * ms, Outcome.DELIVERED)
    pacing.ended(0, 3 * ms, Outcome.DELIVERED)
    for _ in range(FIRST_WINDOW - 1):
        pacing.began(3 * ms)
    assert pacing.next_ns(3 * ms) == NEVER  # otherwise the window would not grow
    assert pacing.window == FIRST_WINDOW
    pacing.ended(0, 4 * ms, Outcome.DELIVERED)
    assert pacing.window == 2 * FIRST_WINDOW


def test_attempts_that_fail_are_spaced_evenly_after_the_first_ten():
    pacing, now_ns, began_ns = Pacing(), 0, []
    while len(began_ns) < 3 * FAILING_LIMIT:
        now_ns = max(now_ns, pacing.next_ns(now_ns))
        pacing.began(now_ns)
        pacing.ended(now_ns, now_ns, Outcome.BUSY)
        began_ns.append(now_ns)
    evenly = [number * S // FAILING_LIMIT for number in range(1, 2 * FAILING_LIMIT + 1)]
    assert began_ns == [0] * FAILING_LIMIT + evenly


def test_a_rate_spaces_attempts_evenly():
    pacing, now_ns, began_ns = Pacing(rate=4, max_in_flight=9), 0, []
    while len(began_ns) < 5:
        now_ns = max(now_ns, pacing.next_ns(now_ns))
        pacing.began(now_ns)
        began_ns.append(now_ns)
    assert began_ns == [number * S // 4 for number in range(5)]
    assert pacing.capacity(2 * S) == 5 + 8 + 1
    assert pacing.capacity(S // 2) == 5 + 2 + 1


def test_a_rate_is_kept_if_each_attempt_begins_late():
    pacing, now_ns = Pacing(rate=1000), 0
    for _ in range(1000):
        now_ns = max(now_ns, pacing.next_ns(now_ns) + S // 2000)
        pacing.began(now_ns)
        pacing.ended(now_ns, now_ns, Outcome.DELIVERED)
    assert 0.99 * S <= now_ns <= 1.01 * S


@pytest.mark.parametrize("outcome", list(Outcome))
def test_max_in_flight_is_fixed(outcome):
    pacing = Pacing(max_in_flight=3)
    for now_ns in range(0, 100 * S, S):
        for _ in range(3):
            assert pacing.next_ns(now_ns) <= now_ns
            pacing.began(now_ns)
        assert pacing.next_ns(now_ns) == NEVER
        for _ in range(3):
            pacing.ended(now_ns, now_ns + S // 2, outcome)


@pytest.mark.parametrize(
    ("outcome", "least"),
    [(Outcome.REFUSED, 1), (Outcome.BUSY, 1), (Outcome.FAILED, FAILING_LIMIT)],
    ids=str,
)
def test_failures_halve_the_window_down_to_its_least_and_a_pause_sets_it_anew(outcome, least):
    pacing = Pacing()
    for _ in range(4000):
        if pacing.next_ns(0) < NEVER:
            pacing.began(0)
        else:
            pacing.ended(0, 0, Outcome.DELIVERED)
    assert (pacing.window, pacing.capacity(S)) == (256, 512)
    for _ in range(pacing.in_flight):
        pacing.ended(0, 0, Outcome.UNKNOWN)
    for now_ns in range(0, 40 * S, S):
        pacing.began(now_ns)
        pacing.ended(now_ns, now_ns, outcome)
    assert pacing.window == least
    pacing.began(now_ns + 10 * S)
    assert pacing.window == FIRST_WINDOW


@pytest.mark.parametrize(("rate", "rest_s"), [(None, 10), (0.05, 20)])
def test_a_pacing_is_new_again_after_a_pause_that_the_rate_allows(rate, rest_s):
    pacing = Pacing(rate)
    pacing.began(100 * S)
    assert not pacing.is_new(200 * S)  # the attempt runs
    pacing.ended(100 * S, 100 * S, Outcome.DELIVERED)
    assert not pacing.is_new((100 + rest_s) * S - 1)
    assert pacing.is_new((100 + rest_s) * S)


def test_failures_of_attempts_that_ran_together_halve_the_window_once():
    pacing = Pacing()
    for _ in range(FIRST_WINDOW):
        pacing.began(0)
    for now_ns in range(1, FIRST_WINDOW + 1):
        pacing.ended(0, now_ns, Outcome.REFUSED)
    assert pacing.window == FIRST_WINDOW // 2


def test_an_attempt_that_says_nothing_changes_nothing():
    pacing = Pacing()
    for now_ns in range(0, 100 * S, S):
        pacing.began(now_ns)
        pacing.ended(now_ns, now_ns + S, Outcome.UNKNOWN)
    assert (pacing.window, pacing.in_flight) == (FIRST_WINDOW, 0)


@given(
    st.lists(
        st.tuples(st.integers(0, 20 * S), st.sampled_from([None, *Outcome]), st.integers(0, 300)),
        max_size=300,
    )
)
def test_in_any_order_of_facts_the_window_is_kept_and_attempts_can_begin(facts):
    pacing, now_ns, running = Pacing(), 0, []
    for later_ns, outcome, place in facts:
        now_ns += later_ns
        if outcome is None:
            while pacing.next_ns(now_ns) <= now_ns:
                pacing.began(now_ns)
                running.append(now_ns)
        elif running:
            pacing.ended(running.pop(place % len(running)), now_ns, outcome)
        assert 1 <= pacing.window <= MAX_WINDOW
        assert pacing.in_flight == len(running) <= MAX_WINDOW
        if not running:
            assert pacing.next_ns(now_ns) <= now_ns + S
        assert pacing.capacity(S) > 0
