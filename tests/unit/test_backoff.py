"""`Backoff`. Its invalid arguments: tests/contract/refusals."""

import copy
import pickle
from bisect import bisect_right
from datetime import timedelta

import pytest
import tenacity
from hypothesis import given
from hypothesis import strategies as st

from rpcwheel.backoff import Backoff, JitteredWait, failed_state
from rpcwheel.durations import NEVER
from rpcwheel.errors import ConfigurationError

S = 1_000_000_000
BOOM = ValueError("boom")


def delay(backoff, attempt=1, elapsed_ns=0):
    return backoff.next_delay_ns(attempt, elapsed_ns=elapsed_ns, error=BOOM)


def test_the_default_is_up_to_five_seconds_without_end():
    backoff = Backoff()
    for attempt in (1, 1_000_000):
        delays = [delay(backoff, attempt, elapsed_ns=10**18) for _ in range(100)]
        assert 2.5 * S <= min(delays) < 2.6 * S
        assert 4.9 * S < max(delays) <= 5 * S


@pytest.mark.parametrize(
    ("wait", "longest_ns"),
    [
        (0.25, S // 4),
        (3, 3 * S),
        (timedelta(minutes=1), 60 * S),
        (JitteredWait(initial=0.5, max=5.0), 4 * S),
        (JitteredWait(initial=0.5, max=3.0), 3 * S),
    ],
)
def test_half_of_a_wait_is_random(wait, longest_ns):
    backoff = Backoff(wait)
    delays = [delay(backoff, 4) for _ in range(1000)]
    assert 0.5 * longest_ns <= min(delays) <= 0.51 * longest_ns
    assert 0.99 * longest_ns <= max(delays) <= longest_ns


def test_waits_without_a_random_part():
    exact = JitteredWait(initial=0.5, max=5.0, multiplier=3.0, jitter=0.0)
    assert [delay(Backoff(exact), n) for n in (1, 2, 3, 10**6)] == [S // 2, 1.5 * S, 4.5 * S, 5 * S]
    assert delay(Backoff(tenacity.wait_fixed(5))) == 5 * S
    assert (delay(Backoff(0)), delay(Backoff(float("inf")))) == (0, NEVER)


@pytest.mark.parametrize("attempt", [1, 3])
@pytest.mark.parametrize("wait", [5.0, JitteredWait(initial=5.0, max=10.0)])
def test_calls_that_failed_together_are_attempted_again_evenly(wait, attempt):
    """No 10 ms have more than twice the mean, whatever the random start is."""
    backoff = Backoff(wait)
    longest_ns = 5 * S if attempt == 1 or wait == 5.0 else 10 * S
    due = sorted(number * 14_000 + delay(backoff, attempt) for number in range(1000))
    assert due[-1] - due[0] > 0.498 * longest_ns
    mean = 1000 * S // 100 / (longest_ns / 2)
    assert max(bisect_right(due, at + S // 100) - index for index, at in enumerate(due)) < 2 * mean


def test_copies_and_forked_processes_have_other_waits(monkeypatch):
    wait = JitteredWait(initial=5.0, max=5.0)
    for other in (copy.deepcopy(wait), pickle.loads(pickle.dumps(wait))):
        assert other == wait
        assert other.delay_ns(1) != wait.delay_ns(1)
    child = copy.copy(wait)
    assert child._fractions is wait._fractions  # as after a fork
    before = wait._fractions._start
    monkeypatch.setattr("os.getpid", lambda: 1)
    child.delay_ns(1)
    assert child._fractions._start != before


def test_stop_after_delay_counts_from_the_start_of_the_first_attempt():
    backoff = Backoff(tenacity.wait_fixed(1), stop=tenacity.stop_after_delay(10))
    assert delay(backoff, 5, elapsed_ns=10 * S - 1_000) == S
    assert delay(backoff, 5, elapsed_ns=10 * S) is None


def test_stop_before_delay_gets_the_next_wait():
    backoff = Backoff(tenacity.wait_fixed(4), stop=tenacity.stop_before_delay(10))
    assert delay(backoff, elapsed_ns=5 * S) == 4 * S
    assert delay(backoff, elapsed_ns=7 * S) is None
    assert delay(Backoff(8.0, stop=tenacity.stop_before_delay(10)), elapsed_ns=7 * S) is None


def test_attempts_end_with_the_first_of_stop_and_max_attempts():
    limits = [(3, 9, 2), (9, 3, 2), (None, 3, 2), (3, None, 2), (1, None, 0)]
    for attempts, stop_after, tries in limits:
        stop = stop_after and tenacity.stop_after_attempt(stop_after)
        backoff = Backoff(1.0, stop=stop, max_attempts=attempts)
        assert [delay(backoff, n) is not None for n in range(1, 5)] == [
            n <= tries for n in range(1, 5)
        ]


def test_the_state_for_tenacity_objects_has_all_its_fields():
    seen = []
    Backoff(lambda state: seen.append(state) or 2.0).next_delay_ns(
        4, elapsed_ns=9 * S, error=BOOM, idle_ns=6 * S
    )
    (state,) = seen
    assert state.attempt_number == 4
    assert state.outcome.failed
    assert state.outcome.exception() is BOOM
    assert state.outcome.attempt_number == 4
    assert state.seconds_since_start == pytest.approx(9.0)
    assert state.idle_for == pytest.approx(6.0)
    assert state.retry_object.statistics == {}
    assert "boom" in repr(state)


def test_without_an_error_the_outcome_is_a_result_of_none():
    state = failed_state(1, elapsed_ns=0, error=None)
    assert not state.outcome.failed
    assert state.outcome.result() is None


@pytest.mark.parametrize(
    ("result", "error", "said"),
    [
        (None, TypeError, "must be seconds"),
        ("1", TypeError, "must be seconds"),
        (True, TypeError, "must be seconds"),
        (float("nan"), ConfigurationError, "is NaN"),
    ],
)
def test_an_invalid_result_of_a_wait_object_is_refused(result, error, said):
    with pytest.raises(error, match=f"the result of the wait object {said}"):
        delay(Backoff(lambda _: result))


@pytest.mark.parametrize("setting", ["wait", "stop"])
def test_coroutine_functions_are_refused(setting):
    class Later:
        async def __call__(self, _):
            return 5

    for later in Later().__call__, Later():
        with pytest.raises(TypeError, match=f"{setting} must be .* a tenacity {setting} object"):
            Backoff(**{setting: later})


def test_the_repr_of_a_backoff_shows_its_settings():
    wait = JitteredWait(initial=1.0, max=2.0)
    assert repr(Backoff(wait, max_attempts=4)) == f"Backoff(wait={wait}, stop=None, max_attempts=4)"
    assert repr(wait) == "JitteredWait(initial=1.0, max=2.0, multiplier=2.0, jitter=0.5)"


@given(
    seconds=st.floats(allow_nan=False),
    attempt=st.integers(1, 10**6),
    elapsed_ns=st.integers(0, 1 << 62),
)
def test_no_wait_object_makes_a_negative_delay(seconds, attempt, elapsed_ns):
    got = Backoff(lambda _: seconds).next_delay_ns(attempt, elapsed_ns=elapsed_ns, error=BOOM)
    assert got is not None
    assert 0 <= got <= NEVER
