"""What is decided about one call: its config, its plan, its answer."""

from datetime import timedelta

import pytest
import tenacity

from rpcwheel.call import DeadlinePolicy, RetryPolicy, config
from rpcwheel.call.config import MethodConfig, MethodConfigs, Outcome, messages_of
from rpcwheel.call.policy import CallPolicy, DefaultResponsePolicy, MethodPolicy
from rpcwheel.durations import NEVER
from rpcwheel.failback import FailbackPolicy

S = 1_000_000_000
RETRY = RetryPolicy(retry_on="UNAVAILABLE", backoff=0)


def rules(**settings):
    return MethodConfig.from_policy(MethodPolicy(**settings))


# --- What a policy means ---


def test_a_policy_without_settings_asks_for_nothing():
    assert (
        rules()
        == MethodConfig()
        == MethodConfig(
            timeout_ns=NEVER,
            message_timeout_ns=NEVER,
            slow_ns=NEVER,
            propagate_deadline=True,
            retry=None,
            default_response=None,
            failback=None,
            excused=None,
        )
    )


def test_times_are_nanoseconds():
    deadline = DeadlinePolicy(
        timeout=2.5, message_timeout=timedelta(seconds=1), slow_call_threshold=0.25
    )
    made = rules(timeout=deadline)
    assert made.timeout_ns == 2_500_000_000
    assert made.message_timeout_ns == S
    assert made.slow_ns == 250_000_000
    assert made.propagate_deadline is True


def test_a_number_is_the_timeout():
    assert rules(timeout=3).timeout_ns == 3 * S


def test_a_deadline_that_is_not_passed_on_is_kept_so():
    assert rules(timeout=DeadlinePolicy(propagate_deadline=False)).propagate_deadline is False


def test_retries_know_whether_the_method_is_idempotent():
    assert rules(retry=RETRY, idempotent=True).retry.idempotent is True
    assert rules(retry=RETRY).retry.idempotent is False


def test_a_retry_of_one_attempt_is_none():
    assert rules(retry=RetryPolicy(retry_on="UNAVAILABLE", max_attempts=1)).retry is None
    assert rules(retry=RetryPolicy(retry_on="UNAVAILABLE", max_attempts=2)).retry.max_attempts == 2


def test_failsafe_and_failback_are_kept():
    default_response = DefaultResponsePolicy(on="UNAVAILABLE", default=b"none")
    failback = FailbackPolicy(retry_on="UNAVAILABLE")
    assert rules(default_response=default_response).default_response is default_response
    assert rules(default_response=default_response).excused is not None
    assert rules(failback=failback).failback is failback
    assert rules(failback=failback).excused is None


@pytest.mark.parametrize(
    ("settings", "recovers"),
    [
        ({}, False),
        ({"timeout": 2}, False),
        ({"idempotent": True}, False),
        ({"retry": RetryPolicy(retry_on="UNAVAILABLE", max_attempts=1)}, False),
        ({"retry": RETRY}, True),
        ({"default_response": DefaultResponsePolicy(on=OSError)}, True),
        ({"failback": FailbackPolicy(retry_on=OSError)}, True),
    ],
)
def test_a_failure_may_be_recovered_from_by_retry_failsafe_or_failback(settings, recovers):
    assert rules(**settings).recovers is recovers


def test_streams_are_watched_for_silence_only_if_they_are_to_be():
    assert not rules(timeout=2).has_message_timeout
    assert rules(timeout=DeadlinePolicy(message_timeout=1)).has_message_timeout


# --- The plan ---


def deadline_of(made, now_ns=S, own_ns=None, left_ns=None):
    return made.deadline_ns(now_ns, own_ns, left_ns)


@pytest.mark.parametrize(
    ("timeout", "own_s", "left_s", "deadline_s"),
    [
        (None, None, None, None),
        (3, None, None, 4),
        (None, 2, None, 3),
        (None, None, 5, 6),
        (3, 2, 5, 3),
        (1, 2, 5, 2),
        (3, 2, 1, 2),
    ],
)
def test_the_deadline_is_the_earliest_of_policy_caller_and_the_call_being_served(
    timeout, own_s, left_s, deadline_s
):
    own_ns = None if own_s is None else own_s * S
    left_ns = None if left_s is None else left_s * S
    expected = NEVER if deadline_s is None else deadline_s * S
    assert deadline_of(rules(timeout=timeout), S, own_ns, left_ns) == expected


def test_without_propagation_the_call_being_served_limits_nothing():
    made = rules(timeout=DeadlinePolicy(timeout=9, propagate_deadline=False))
    assert deadline_of(made, S, 5 * S, 1 * S) == 6 * S
    assert deadline_of(made, S, None, -5 * S) == 10 * S


@pytest.mark.parametrize(("own_ns", "left_ns"), [(None, 0), (None, -S), (0, None), (-1, 5 * S)])
def test_the_deadline_of_a_call_that_comes_too_late_has_passed(own_ns, left_ns):
    assert deadline_of(rules(timeout=9), S, own_ns, left_ns) <= S


# --- The answer ---


def answer(made, error, attempts=1, elapsed_ns=0):
    return made.outcome(error, attempts=attempts, elapsed_ns=elapsed_ns)


def test_a_failure_is_raised_where_nothing_else_is_said():
    assert answer(rules(), OSError()) is Outcome.FAIL
    assert answer(rules(retry=RETRY), OSError()) is Outcome.FAIL


def test_failsafe_excuses_what_it_names_and_nothing_else():
    made = rules(default_response=DefaultResponsePolicy(on=ConnectionError))
    assert answer(made, ConnectionError()) is Outcome.DEFAULT_RESPONSE
    assert answer(made, ConnectionResetError()) is Outcome.DEFAULT_RESPONSE
    assert answer(made, OSError()) is Outcome.FAIL
    assert answer(made, KeyboardInterrupt()) is Outcome.FAIL


def test_failsafes_strategies_see_how_often_and_how_long_it_was_tried():
    seen = []

    class Look(tenacity.retry_base):
        def __call__(self, state):
            seen.append((state.attempt_number, state.outcome_timestamp, state.outcome.exception()))
            return True

    error = OSError()
    made = rules(default_response=DefaultResponsePolicy(on=Look()))
    assert answer(made, error, attempts=3, elapsed_ns=2 * S) is Outcome.DEFAULT_RESPONSE
    assert seen == [(3, 2.0, error)]


def test_what_a_predicate_of_failsafe_raises_comes_out():
    made = rules(default_response=DefaultResponsePolicy(on=lambda _: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        answer(made, OSError())


def test_failback_is_asked_itself_whatever_the_error():
    made = rules(failback=FailbackPolicy(retry_on=ConnectionError))
    assert answer(made, ConnectionError()) is Outcome.ENQUEUE
    assert answer(made, OSError()) is Outcome.ENQUEUE


# --- The book ---


def test_each_method_has_its_own_rules_made_once():
    book = MethodConfigs(
        CallPolicy(timeout=2.0, methods={"/shop.Orders/Get": MethodPolicy(timeout=1.0)})
    )
    assert book.config_for("/shop.Orders/Get").timeout_ns == S
    assert book.config_for("/shop.Orders/Push").timeout_ns == 2 * S
    assert book.config_for("/shop.Orders/Get") is book.config_for("/shop.Orders/Get")


def test_a_strategy_is_the_same_object_for_all_calls_of_a_method():
    book = MethodConfigs(CallPolicy(retry=RETRY))
    assert book.config_for("/a/B").retry.backoff is book.config_for("/a/B").retry.backoff


@pytest.mark.parametrize(
    ("default", "messages"),
    [
        (None, []),
        ([], []),
        ([b"a", b"b"], [b"a", b"b"]),
        ((b"a",), [b"a"]),
        (b"abc", [b"abc"]),
        ("abc", ["abc"]),
        (7, [7]),
    ],
)
def test_a_default_for_a_stream_is_its_messages_or_one_message(default, messages):
    assert list(messages_of(default)) == messages


def test_rules_are_kept_for_a_bounded_number_of_methods(monkeypatch):
    monkeypatch.setattr(config, "MOST_METHODS", 3)
    book = MethodConfigs(CallPolicy(timeout=2.0))
    for number in range(10):
        assert book.config_for(f"/made.Up/{number}").timeout_ns == 2_000_000_000
        assert len(book._configs) <= 3
