"""The admission of one method: which attempts wait, and what they give back."""

import asyncio
import gc
import weakref
from concurrent.futures import wait
from contextlib import closing
from datetime import timedelta
from random import Random

import pytest

from fixtures.forks import held_by_another_thread, holds_in_child
from fixtures.timers import cannot_start, run_threads
from fixtures.waiting import WAIT_S, Gate, in_thread, wait_until
from rpcwheel._concurrency import executor
from rpcwheel.admission import (
    BreakerPolicy,
    BreakerState,
    ConcurrencyPolicy,
    ThrottlePolicy,
    circuit,
)
from rpcwheel.admission.breaker import Breaker
from rpcwheel.admission.method import Admitted, NotSent, Reason, Waiting
from rpcwheel.admission.targets import AdmissionSettings, Breakers
from rpcwheel.errors import ConfigurationError
from rpcwheel.events import (
    ExecutorRejected,
    ThrottleBegan,
    add_sink,
    remove_sink,
)
from rpcwheel.limit import RatePolicy
from rpcwheel.timer import ManualTimer

LIMIT = 3

ONE_FAILURE = BreakerPolicy(
    minimum_calls=1, half_open_calls=1, open_duration=5.0, health_check=False
)
"""A breaker that opens at the first failure, and closes at the first success."""


@pytest.fixture
def target(timer):
    """The state of the methods of a target, which the channel of a real call keeps."""
    return Breakers().admission("shop:1", timer)


@pytest.fixture
def breakers():
    """The breakers of methods that all have one policy."""
    return Breakers([ONE_FAILURE])


@pytest.fixture
def call_first(breakers, timer):
    """Makes the state of a method with such a breaker, as its first call does."""
    client = breakers.admission("shop:1", timer)
    return lambda name: client.method(name, AdmissionSettings(breaker=ONE_FAILURE))


def admission_of(timer, *, is_stream=False, **settings):
    client = Breakers().admission("shop:1", timer)
    return client.method("/shop.Orders/Get", AdmissionSettings(**settings), is_stream=is_stream)


class Attempts:
    """Attempts of a method that begin, wait, are canceled and end at random."""

    def __init__(self, admission, timer, random):
        self.admission, self.timer, self.random = admission, timer, random
        self.running, self.waiting, self.ready = [], [], []

    def begin(self):
        result = self.admission.enter(self.random.choice([None, 0.2, 5.0]))
        if isinstance(result, Waiting):
            self.waiting.append(result)
            result.then(lambda: self.ready.append(result))
        self.run(result)

    def run(self, result):
        if isinstance(result, Admitted):
            self.running.append(result)

    def end(self):
        if self.running:
            ended = self.running.pop(self.random.randrange(len(self.running)))
            code = self.random.choice(["OK", "OK", "UNAVAILABLE", "CANCELLED"])
            self.admission.end(ended, code)

    def cancel(self):
        if self.waiting:
            self.random.choice(self.waiting).cancel()

    def take(self):
        if self.ready:
            self.run(self.ready.pop(0).take())

    def advance(self):
        self.timer.advance(self.random.choice([0.01, 0.1, 1.0]))

    def end_all(self):
        while self.running:
            self.end()
        for one in self.waiting:
            one.cancel()


@pytest.mark.parametrize("seed", range(20))
def test_no_more_attempts_run_than_allowed_and_none_keeps_its_permit(timer, seed):
    random = Random(seed)
    admission = admission_of(
        timer,
        breaker=BreakerPolicy(window_calls=5, minimum_calls=5, half_open_calls=2),
        throttle=ThrottlePolicy(max_rejection=0.5),
        concurrency=ConcurrencyPolicy(max_calls=LIMIT, max_wait=1.0),
        rate=RatePolicy(rate=20.0, burst=2, max_wait=0.5),
    )
    attempts = Attempts(admission, timer, random)
    steps = [attempts.begin, attempts.begin, attempts.end, attempts.cancel, attempts.take]
    for _ in range(500):
        random.choice([*steps, attempts.advance])()
        assert len(attempts.running) <= LIMIT
    attempts.end_all()
    status = admission.status()
    assert (status.running, status.waiting) == (0, 0)
    admission.breaker.reset()
    timer.advance(100.0)
    assert isinstance(admission.enter(), Admitted)


def test_attempts_wait_in_the_order_in_which_they_began(timer):
    admission = admission_of(timer, concurrency=ConcurrencyPolicy(max_calls=1, max_wait=1.0))
    first, order = admission.enter(), []
    for number in range(3):
        waiting = admission.enter()
        waiting.then(lambda number=number, waiting=waiting: order.append((number, waiting.take())))
    admission.end(first, "OK")
    for _ in range(2):
        admission.end(order[-1][1], "OK")
    assert [number for number, _ in order] == [0, 1, 2]


def test_places_of_a_closed_loop_are_given_to_others_when_the_limit_is_reached(timer):
    admission = admission_of(timer, concurrency=ConcurrencyPolicy(max_calls=2, max_wait=1.0))
    loop = asyncio.new_event_loop()
    ended, lost, not_taken = (admission.enter(loop=loop) for _ in range(3))
    admission.end(ended, "OK")
    waiting = admission.enter()
    loop.close()
    running = [admission.enter(), waiting.take()]
    assert [type(each) for each in running] == [Admitted, Admitted]
    admission.end(lost, "OK")
    not_taken.cancel()
    assert admission.status().running == 2


def test_an_event_loop_is_kept_no_longer_than_its_attempts(timer):
    admission = admission_of(timer, concurrency=ConcurrencyPolicy(max_calls=1))
    with closing(asyncio.new_event_loop()) as loop:
        admission.end(admission.enter(loop=loop), "OK")
    kept = weakref.ref(loop)
    del loop
    gc.collect()
    assert kept() is None


def test_an_attempt_that_an_open_breaker_refuses_leaves_no_place_of_its_loop(timer):
    limit = ConcurrencyPolicy(max_calls=1, max_wait=1.0)
    admission = admission_of(timer, breaker=ONE_FAILURE, concurrency=limit)
    with closing(asyncio.new_event_loop()) as loop:
        running, waiting = admission.enter(), admission.enter(loop=loop)
        admission.end(running, "UNAVAILABLE")
    assert waiting.take().reason is Reason.BREAKER
    admission.breaker.reset()
    assert [type(admission.enter()) for _ in range(2)] == [Admitted, Waiting]


def test_a_finalizer_ends_an_attempt_while_closed_loops_are_looked_for(timer):
    class Loop(asyncio.SelectorEventLoop):
        def is_closed(self):
            if dropped:
                admission.end(dropped.pop(), "CANCELLED")
            return super().is_closed()

    admission = admission_of(timer, concurrency=ConcurrencyPolicy(max_calls=2))
    with closing(Loop()) as first, closing(Loop()) as second:
        dropped = []
        admission.enter(loop=first)
        dropped.append(admission.enter(loop=second))
        assert isinstance(admission.enter(), Admitted)


@pytest.mark.parametrize("rate", [None, RatePolicy(rate=1.0, max_wait=10.0)], ids=str)
def test_the_deadline_of_an_attempt_ends_its_wait(timer, rate):
    concurrency = ConcurrencyPolicy(max_calls=1, max_wait=10.0)
    admission = admission_of(timer, rate=rate, concurrency=concurrency)
    admission.enter()
    waiting = admission.enter(2.0)
    timer.advance(1.0)
    timer.advance(1.0)
    assert waiting.has_ended
    assert waiting.take() == NotSent(Reason.DEADLINE)
    assert admission.enter(0.0) == NotSent(Reason.DEADLINE)


def test_a_token_is_not_reserved_past_the_deadline(timer):
    admission = admission_of(timer, rate=RatePolicy(rate=1.0, max_wait=10.0))
    assert isinstance(admission.enter(), Admitted)
    assert admission.enter(0.5) == NotSent(Reason.RATE)
    assert isinstance(admission.enter(1.5), Waiting)


def test_an_attempt_that_finds_no_place_takes_no_token(timer):
    rate = RatePolicy(rate=1.0, burst=2)
    admission = admission_of(timer, rate=rate, concurrency=ConcurrencyPolicy(max_calls=1))
    running = admission.enter()
    assert admission.enter() == NotSent(Reason.CONCURRENCY)
    admission.end(running, "OK")
    assert isinstance(admission.enter(), Admitted)


def test_no_attempt_begins_together_with_one_that_waits_behind_a_canceled_one(timer):
    admission = admission_of(timer, rate=RatePolicy(rate=1.0, burst=1, max_wait=5.0))
    admission.enter()
    began = []

    def wait(name):
        attempt = admission.enter()
        attempt.then(lambda: began.append((timer.now, name)))
        return attempt

    canceled, _, last = [wait(name) for name in ("canceled", "second", "last")]
    canceled.cancel()
    wait("newcomer")
    last.cancel()
    timer.advance(4.0)
    assert began == [(2.0, "second"), (4.0, "newcomer")]
    wait("next").cancel()
    wait("in place of the next")
    timer.advance(1.0)
    assert began[2:] == [(5.0, "in place of the next")]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"concurrency": ConcurrencyPolicy(max_calls=1, max_wait=10.0)}, Reason.CONCURRENCY),
        (
            {
                "rate": RatePolicy(rate=1.0, max_wait=10.0),
                "concurrency": ConcurrencyPolicy(max_calls=2),
            },
            Reason.RATE,
        ),
    ],
    ids=["concurrency", "rate"],
)
@pytest.mark.parametrize("others", [0, 1])
def test_without_a_timer_no_attempt_waits(timer, settings, reason, others):
    admission = admission_of(timer, **settings)
    admission.enter()
    waiting = [admission.enter() for _ in range(others)]
    timer.stop()
    for _ in range(2):
        assert admission.enter() == NotSent(reason)
    for other in waiting:
        assert not other.has_ended
        other.check_timer()
        assert other.take() == NotSent(reason)
    status = admission.status()
    assert (status.running, status.waiting) == (1, 0)


def test_methods_share_the_state_of_a_policy_per_target(target):
    settings = AdmissionSettings(concurrency=ConcurrencyPolicy(max_calls=1, per="target"))
    first, second = (target.method(f"/shop.Orders/{name}", settings) for name in ("Get", "Put"))
    admitted = first.enter()
    assert second.enter() == NotSent(Reason.CONCURRENCY)
    equal = AdmissionSettings(concurrency=ConcurrencyPolicy(max_calls=1, per="target"))
    assert isinstance(target.method("/shop.Stock/Get", equal).enter(), Admitted)
    first.end(admitted, "OK")
    assert isinstance(second.enter(), Admitted)


def test_a_throttled_attempt_asks_to_wait_for_a_window(timer):
    admission = admission_of(timer, throttle=ThrottlePolicy(window=2.0, max_rejection=1.0))
    for _ in range(1000):
        admission.end(Admitted(0), "UNAVAILABLE")
    result = next(one for one in iter(admission.enter, None) if isinstance(one, NotSent))
    assert result.pushback_ns == 2e9


def test_a_forked_child_reports_its_own_throttling(timer, events):
    settings = AdmissionSettings(throttle=ThrottlePolicy(window=60.0, max_rejection=1.0))
    target = Breakers().admission("forked:1", timer)
    admission = target.method("/shop.Orders/Get", settings)
    for _ in range(1000):
        admission.end(Admitted(0), "UNAVAILABLE")
    throttled(admission)

    def reports():
        events.clear()
        throttled(admission)
        return wait_until(lambda: ThrottleBegan in map(type, events))

    assert holds_in_child(reports)


def throttled(admission):
    """Begin attempts until one is throttled."""
    results = iter(admission.enter, None)
    assert next(one for one in results if isinstance(one, NotSent)).reason is Reason.THROTTLE


def test_an_attempt_of_an_open_breaker_asks_to_wait_until_it_is_half_open(timer):
    admission = admission_of(timer, breaker=BreakerPolicy(open_duration=1.0, minimum_calls=1))
    admission.end(admission.enter(), "UNAVAILABLE")
    assert 0.9e9 <= admission.enter().pushback_ns <= 1e9


def test_an_attempt_that_waits_for_a_token_goes_on_if_the_timer_is_late():
    class LateTimer(ManualTimer):
        def new_timeout(self, task, delay, *args):
            return super().new_timeout(task, delay + 100.0, *args)

    with LateTimer() as timer:
        admission = admission_of(timer, rate=RatePolicy(rate=1.0, max_wait=10.0))
        admission.enter()
        waiting = admission.enter()
        timer.advance(1.5)
        waiting.check_timer()
        assert not waiting.has_ended
        timer.advance(0.5)
        waiting.check_timer()
        assert isinstance(waiting.take(), Admitted)


def test_attempts_that_wait_are_refused_at_once_when_the_breaker_opens(timer):
    concurrency = ConcurrencyPolicy(max_calls=2, max_wait=30.0)
    admission = admission_of(timer, breaker=ONE_FAILURE, concurrency=concurrency)
    first, second = admission.enter(), admission.enter()
    waiting = [admission.enter() for _ in range(5)]
    admission.end(first, "UNAVAILABLE")
    results = [attempt.take() for attempt in waiting]
    assert {result.reason for result in results} == {Reason.BREAKER}
    assert all(4.5e9 <= result.pushback_ns <= 5e9 for result in results)
    admission.end(second, "UNAVAILABLE")
    status = admission.status()
    assert (status.running, status.waiting) == (0, 0)
    assert [(each.reason, each.calls) for each in status.not_sent] == [("breaker", 5)]


@pytest.mark.parametrize("settings", [{}, {"concurrency": ConcurrencyPolicy(max_calls=1)}], ids=str)
def test_an_attempt_that_waits_for_a_token_is_refused_if_the_breaker_is_open_then(timer, settings):
    rate = RatePolicy(rate=1.0, max_wait=10.0)
    admission = admission_of(timer, breaker=ONE_FAILURE, rate=rate, **settings)
    admission.end(admission.enter(), "OK")
    waiting = admission.enter()
    admission.breaker.force_open()
    timer.advance(1.0)
    assert waiting.take() == NotSent(Reason.FORCED)
    assert admission.status().running in (None, 0)


def test_an_attempt_that_has_waited_counts_in_the_state_in_which_it_is_sent(timer):
    concurrency = ConcurrencyPolicy(max_calls=2, max_wait=30.0)
    admission = admission_of(timer, breaker=ONE_FAILURE, concurrency=concurrency)
    running = [admission.enter(), admission.enter()]
    probe, other = admission.enter(), admission.enter()
    for change in (admission.breaker.force_open, admission.breaker.reset):
        change()
    half_open_now(admission, timer)
    for attempt in running:
        admission.end(attempt, "OK")
    assert other.take().reason is Reason.BREAKER  # HALF_OPEN sends one attempt at a time
    admission.end(probe.take(), "OK")
    assert admission.breaker.state is BreakerState.CLOSED


def half_open_now(admission, timer):
    """Open the breaker by an attempt of another channel, and let its open duration pass."""
    breaker = admission.breaker
    breaker.ended(breaker.enter(0), "UNAVAILABLE", 0, admission.now_ns())
    timer.advance(5.0)
    assert breaker.state is BreakerState.HALF_OPEN


def test_an_attempt_that_is_canceled_as_its_token_comes_is_no_probe(timer):
    rate = RatePolicy(rate=1.0, max_wait=10.0)
    admission = admission_of(timer, breaker=ONE_FAILURE, rate=rate)
    admission.end(admission.enter(), "OK")
    canceled = admission.enter()
    admission.breaker.force_open()
    admission.breaker.reset()
    half_open_now(admission, timer)
    canceled.cancel()
    admission.token_came(canceled)
    timer.advance(5.0)
    assert isinstance(admission.enter(), Admitted)


def half_open(timer, *, is_stream, failed_after=0.0, **settings):
    breaker = ONE_FAILURE.replace(slow_call=0.1)
    admission = admission_of(timer, is_stream=is_stream, breaker=breaker, **settings)
    failed = admission.enter()
    timer.advance(failed_after)
    admission.end(failed, "UNAVAILABLE")
    timer.advance(5.0)
    return admission


def test_an_attempt_that_a_later_policy_refuses_is_no_probe(timer):
    admission = half_open(timer, is_stream=False, rate=RatePolicy(rate=0.1))
    assert admission.enter() == NotSent(Reason.RATE)
    timer.advance(5.0)
    assert isinstance(admission.enter(), Admitted)


def test_a_breaker_without_a_timer_is_half_open_at_once(timer):
    admission = admission_of(timer, breaker=ONE_FAILURE)
    timer.stop()
    admission.end(admission.enter(), "UNAVAILABLE")
    assert admission.breaker.state is BreakerState.HALF_OPEN


@pytest.mark.parametrize(
    "settings", [{"open_growth": 1e308}, {"open_duration": timedelta.max}], ids=str
)
def test_a_time_in_open_that_is_too_long_for_any_clock_ends_no_attempt_with_an_error(
    timer, settings
):
    breaker = BreakerPolicy(minimum_calls=1, health_check=False, **settings)
    admission = admission_of(timer, breaker=breaker)
    admission.end(admission.enter(), "UNAVAILABLE")
    assert admission.breaker.state is BreakerState.OPEN
    assert admission.enter().pushback_ns > 0


def test_a_breaker_is_a_problem_until_it_lets_calls_through(timer):
    admission = half_open(timer, is_stream=False)
    assert (admission.status().breaker, admission.status().problem) == ("half_open", "")
    admission.end(admission.enter(), "UNAVAILABLE")
    open_ = "the circuit breaker is open"
    assert (admission.status().breaker, admission.status().problem) == ("open", open_)
    admission.breaker.force_open()
    assert admission.status().problem == "the circuit breaker is forced open"


@pytest.mark.parametrize("throttle", [None, ThrottlePolicy(window=60.0)], ids=["breaker", "both"])
def test_a_stream_that_runs_for_a_second_proves_that_the_server_works(timer, throttle):
    admission = half_open(timer, is_stream=True, failed_after=4.0, throttle=throttle)
    stream = admission.enter()
    assert admission.enter().reason is Reason.BREAKER
    timer.advance(1.0)
    assert admission.breaker.state is BreakerState.CLOSED
    admission.end(stream, "UNAVAILABLE")  # of the state before
    assert admission.breaker.state is BreakerState.CLOSED
    assert timer.pending == 0


def test_a_lost_server_counts_once_after_the_breaker_has_closed(timer):
    admission = admission_of(timer, breaker=ONE_FAILURE.replace(minimum_calls=2))
    for code in ("UNAVAILABLE", "UNAVAILABLE", "OK"):
        admission.end(admission.enter(), code)
        timer.advance(5.0)
    attempts = [admission.enter() for _ in range(9)]
    timer.advance(1.0)
    for attempt in attempts:
        admission.end(attempt, "UNAVAILABLE")
    assert admission.breaker.state is BreakerState.CLOSED


def test_a_stream_that_has_waited_proves_it_too(timer):
    rate = RatePolicy(rate=0.1, burst=1, max_wait=10.0)
    admission = half_open(timer, is_stream=True, rate=rate)
    stream = admission.enter()
    assert isinstance(stream, Waiting)
    timer.advance(5.0)
    assert isinstance(stream.take(), Admitted)
    timer.advance(1.0)
    assert admission.breaker.state is BreakerState.CLOSED


def test_a_stream_that_ends_within_a_second_counts_when_it_ends(timer):
    admission = half_open(timer, is_stream=True)
    admission.end(admission.enter(), "UNAVAILABLE")
    assert admission.breaker.state is BreakerState.OPEN
    assert timer.pending == 1


def test_a_stream_is_never_slow(timer):
    admission = half_open(timer, is_stream=False)
    call = admission.enter()
    timer.advance(0.2)
    admission.end(call, "OK")
    assert admission.breaker.state is BreakerState.OPEN
    timer.advance(10.0)
    admission = half_open(timer, is_stream=True)
    stream = admission.enter()
    timer.advance(0.2)
    admission.end(stream, "OK")
    assert admission.breaker.state is BreakerState.CLOSED


def run_streams(method, timer, code, seconds, number):
    """Let streams run one after the other; returns how many of them were sent."""
    sent = 0
    for _ in range(number):
        entered = method.enter()
        timer.advance(seconds)
        if isinstance(entered, Admitted):
            sent += 1
            method.end(entered, code)
    return sent


@pytest.mark.parametrize("seconds", [0.5, 2.0, 5.0])
def test_streams_that_fail_late_are_throttled(timer, seconds):
    """They are not accepted by the server: a proxy cannot reach it."""
    method = admission_of(timer, is_stream=True, throttle=ThrottlePolicy(window=60.0))
    assert run_streams(method, timer, "UNAVAILABLE", seconds, 200) < 80


def test_streams_that_go_on_let_others_be_sent(timer):
    method = admission_of(timer, is_stream=True, throttle=ThrottlePolicy(window=10.0))
    run_streams(method, timer, "UNAVAILABLE", 0.1, 100)
    assert method.status().rejection > 0.9
    for _ in range(1000):
        entered = method.enter()  # goes on, if it is sent
        timer.advance(0.05)
    assert isinstance(entered, Admitted)
    assert method.status().rejection == 0.0


@pytest.mark.parametrize("throttle", [None, ThrottlePolicy()], ids=["breaker", "and throttle"])
def test_streams_that_are_lost_with_one_server_after_another_are_sent_again(timer, throttle):
    """None of them has ended: they go on until their server is restarted."""
    method = admission_of(timer, is_stream=True, breaker=BreakerPolicy(), throttle=throttle)
    timer.advance(100.0)
    for _ in range(5):
        streams = [method.enter() for _ in range(200)]
        assert all(isinstance(stream, Admitted) for stream in streams)
        timer.advance(20.0)
        for number, stream in enumerate(streams):
            timer.advance(0.001 if number < 2 else 0.0)
            method.end(stream, "UNAVAILABLE")
    assert method.breaker.state is BreakerState.CLOSED


def test_a_stream_that_has_counted_for_the_throttle_counts_for_the_breaker_when_it_ends(timer):
    policy = BreakerPolicy(window_calls=10, minimum_calls=10)
    method = admission_of(
        timer,
        is_stream=True,
        breaker=policy,
        throttle=ThrottlePolicy(window=60.0, multiplier=100.0),
    )
    run_streams(method, timer, "UNAVAILABLE", 0.1, 1)
    run_streams(method, timer, "INTERNAL", 3.0, 9)
    assert method.breaker.state is BreakerState.OPEN


def test_a_health_check_of_an_earlier_outage_decides_nothing(timer):
    admission = half_open(timer, is_stream=False)
    breaker, results = admission.breaker, []
    admission.end(admission.enter(), "UNAVAILABLE")
    breaker.check_health = results.append
    timer.advance(10.0)
    assert wait_until(lambda: results)
    breaker.reset()
    admission.end(admission.enter(), "UNAVAILABLE")
    results[0](True)
    assert breaker.state is BreakerState.OPEN


def test_methods_that_share_a_breaker_have_one_row_for_it(timer):
    breaker = BreakerPolicy(minimum_calls=1, per="target")
    settings = AdmissionSettings(breaker=breaker)
    client = Breakers([breaker]).admission("shop:1", timer)
    for name in ("Get", "Put"):
        client.method(f"/shop.Orders/{name}", settings)
    rows = {row.method: row.breaker for row in client.status()}
    assert rows == {"/shop.Orders/Get": "", "/shop.Orders/Put": "", "*": "closed"}


@pytest.mark.parametrize(
    ("policies", "problem"),
    [([], "no circuit breaker"), ([BreakerPolicy(per="target")], 'per="target"')],
)
def test_a_change_by_hand_that_no_breaker_can_match_is_refused(policies, problem):
    with pytest.raises(ConfigurationError, match=problem):
        Breakers(policies).force_open("/shop.Orders/*")


def test_what_is_set_by_hand_applies_to_breakers_that_are_made_later(breakers, call_first):
    breakers.force_open("/shop.Orders/Get")
    breakers.disable("/shop.*/*")
    breakers.force_open("/shop.Stock/*")
    breakers.reset("/shop.Stock/Get")
    methods = ("/shop.Orders/Get", "/shop.Stock/Put", "/shop.Stock/Get", "/bank.Bills/Get")
    states = [call_first(name).breaker.state.value for name in methods]
    assert states == ["disabled", "forced_open", "closed", "closed"]
    breakers.reset()
    assert {one.state.value for one in breakers} == {"closed"}


def test_a_breaker_that_is_made_while_another_thread_resets_all_is_reset(
    breakers, call_first, monkeypatch
):
    gate = Gate()

    def change(each, by_hand):
        if by_hand is Breaker.force_open:
            gate()
        return original(each, by_hand)

    original = circuit.CircuitBreaker.change
    monkeypatch.setattr(circuit.CircuitBreaker, "change", change)
    breakers.force_open()
    making = in_thread(call_first, "/shop.Orders/Get")
    assert gate.entered.wait(WAIT_S)
    resetting = in_thread(breakers.reset)
    wait([resetting], 0.1)  # it has to wait; a shorter time could only hide that it does not
    gate.opened.set()
    making.result(WAIT_S)
    resetting.result(WAIT_S)
    assert [each.state for each in breakers] == [BreakerState.CLOSED]


def test_changes_by_hand_are_reported_in_their_order(breakers, call_first, monkeypatch):
    reported, gate = [], Gate()

    def report(each, transition):
        if transition.after is BreakerState.FORCED_OPEN:
            gate()
        reported.append(transition.after)

    call_first("/shop.Orders/Get")
    monkeypatch.setattr(circuit.CircuitBreaker, "report", report)
    forcing = in_thread(breakers.force_open)
    assert gate.entered.wait(WAIT_S)
    breakers.reset()
    gate.opened.set()
    forcing.result(WAIT_S)
    assert reported == [BreakerState.FORCED_OPEN, BreakerState.CLOSED]


def test_a_change_by_hand_that_is_reported_late_ends_no_timeout_of_a_later_state(timer):
    breaker = admission_of(timer, breaker=ONE_FAILURE).breaker
    breaker.force_open()
    transition = breaker.change(Breaker.reset)
    breaker.ended(breaker.enter(0), "UNAVAILABLE", 0, 0)
    breaker.report(transition)
    timer.advance(5.0)
    assert breaker.state is BreakerState.HALF_OPEN


def test_a_timeout_that_is_made_late_ends_no_timeout_of_a_later_state(timer):
    class Interrupting:
        """The first timeout is made while another thread resets the breaker and opens it again."""

        def new_timeout(self, *args):
            breaker._timer = timer
            timeout = timer.new_timeout(*args)
            breaker.reset()
            fail()
            return timeout

    def fail():
        breaker.ended(breaker.enter(0), "UNAVAILABLE", 0, 0)

    breaker = admission_of(timer, breaker=ONE_FAILURE).breaker
    breaker._timer = Interrupting()
    fail()
    timer.advance(5.0)
    assert breaker.state is BreakerState.HALF_OPEN


def test_a_breaker_starts_its_timeout_without_its_lock(timer):
    class Starting:
        """A garbage collection in the thread that a timer starts may end a call of the breaker."""

        def new_timeout(self, *args):
            in_thread(breaker.ended, token, "CANCELLED", 0, 0).result(WAIT_S)
            ended.append(True)
            return timer.new_timeout(*args)

    ended, breaker = [], admission_of(timer, breaker=ONE_FAILURE).breaker
    breaker._timer, token = Starting(), breaker.enter(0)
    breaker.ended(breaker.enter(0), "UNAVAILABLE", 0, 0)
    assert ended == [True]


@pytest.mark.parametrize("is_new", [False, True], ids=["known", "new"])
def test_sinks_run_without_the_lock_of_all_breakers_if_no_thread_can_be_started(
    breakers, call_first, monkeypatch, is_new
):
    has_ended = []

    def list_on_another_thread(event):
        if isinstance(event, ExecutorRejected):
            run_threads(lambda: len(breakers))
            has_ended.append(True)

    if is_new:
        breakers.force_open()
    else:
        call_first("/shop.Orders/Get")
    monkeypatch.setattr(circuit, "EXECUTOR", executor.KeyedExecutor())
    monkeypatch.setattr(executor._Thread, "start", cannot_start)
    add_sink(list_on_another_thread)
    try:
        if is_new:
            call_first("/shop.Orders/Get")
        else:
            breakers.force_open()
    finally:
        remove_sink(list_on_another_thread)
    assert has_ended == [True]


@pytest.mark.usefixtures("frequent_thread_switches")
def test_a_channel_is_found_for_a_health_check_while_others_open_and_close(target):
    class Channel:
        def check_health(self, done):
            return False

    channels = [Channel() for _ in range(1000)]
    results = []

    def open_and_close():
        for _ in range(20):
            for channel in channels:
                target.add_channel(channel)
            for channel in channels:
                target.remove_channel(channel)

    opening = in_thread(open_and_close)
    while not opening.done():
        target.check_health(results.append)
    opening.result()
    assert set(results) <= {True}


@pytest.mark.usefixtures("frequent_thread_switches")
def test_breakers_are_listed_while_methods_are_called_for_the_first_time(breakers, call_first):
    names = [f"/shop.Orders/Get{number}" for number in range(2000)]

    def call_all():
        for name in names:
            call_first(name)

    calling = in_thread(call_all)
    while not calling.done():
        list(breakers)
    calling.result()
    assert len(breakers) == len(names)


@pytest.mark.parametrize(
    ("max_calls", "is_stream", "sent"),
    [("adaptive", False, 20), ("adaptive", True, 99), (3, True, 3)],
)
def test_an_adaptive_concurrency_limit_does_not_apply_to_streams(timer, max_calls, is_stream, sent):
    concurrency = ConcurrencyPolicy(max_calls=max_calls)
    admission = admission_of(timer, is_stream=is_stream, concurrency=concurrency)
    results = [admission.enter() for _ in range(99)]
    assert sum(isinstance(result, Admitted) for result in results) == sent


def test_a_forked_child_waits_for_no_lock_that_a_thread_of_its_parent_holds(timer):
    breakers, limit = Breakers([ONE_FAILURE]), ConcurrencyPolicy(max_calls=1)
    target = breakers.admission("shop:1", timer)
    admission = target.method("/shop.Orders/Get", AdmissionSettings(None, ONE_FAILURE, limit))

    def goes_on():
        breakers.disable()
        breakers.reset()
        admission.end(admission.enter(), "UNAVAILABLE")
        return admission.breaker.state is BreakerState.OPEN and target.status()

    with held_by_another_thread(breakers._lock, target.lock, admission.breaker._lock):
        assert holds_in_child(goes_on)


def test_a_forked_child_has_none_of_the_attempts_that_its_parent_runs_or_lets_wait(target):
    limit = ConcurrencyPolicy(max_calls=1, max_wait=60.0)
    admission = target.method("/shop.Orders/Get", AdmissionSettings(concurrency=limit))
    running, waiting = admission.enter(), admission.enter()

    def has_its_own():
        assert (admission.status().running, admission.status().waiting) == (0, 0)
        admission.end(running, "OK")  # as the thread does that has called fork
        own = admission.enter()
        return isinstance(own, Admitted) and isinstance(admission.enter(), Waiting)

    assert holds_in_child(has_its_own)
    admission.end(running, "OK")
    assert isinstance(waiting.take(), Admitted)


def test_a_forked_child_has_no_places_of_the_event_loops_of_its_parent(target):
    limit = ConcurrencyPolicy(max_calls=1, max_wait=60.0)
    admission = target.method("/shop.Orders/Get", AdmissionSettings(concurrency=limit))
    with closing(asyncio.new_event_loop()) as loop:
        running = admission.enter(loop=loop)

        def has_its_own():
            own = admission.enter()
            admission.end(running, "OK")
            return isinstance(own, Admitted) and isinstance(admission.enter(), Waiting)

        assert holds_in_child(has_its_own)


def test_a_forked_child_sends_trials_of_its_own(target, timer):
    admission = target.method("/shop.Orders/Get", AdmissionSettings(breaker=ONE_FAILURE))
    admission.end(admission.enter(), "UNAVAILABLE")
    timer.advance(10.0)
    trial = admission.enter()

    def closes():
        admission.end(trial, "UNAVAILABLE")  # a copy, which does not count
        admission.end(admission.enter(), "OK")
        return admission.breaker.state is BreakerState.CLOSED

    assert holds_in_child(closes)
    admission.end(trial, "OK")
    assert admission.breaker.state is BreakerState.CLOSED


def test_a_forked_child_counts_no_attempt_that_its_parent_has_not_sent(target):
    settings = AdmissionSettings(concurrency=ConcurrencyPolicy(max_calls=1))
    admission = target.method("/shop.Orders/Get", settings)
    assert isinstance([admission.enter(), admission.enter()][1], NotSent)
    assert admission.status().not_sent
    assert holds_in_child(lambda: not admission.status().not_sent)
