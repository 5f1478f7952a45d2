"""Status codes, kinds of calls and results of attempts."""

from functools import partial

import grpc
import pytest

from fixtures.refusals import not_refused_so
from rpcwheel.errors import ConfigurationError
from rpcwheel.rpc import CODES, DEADLINE, AttemptResult, Kind, NextAttempt, Stop, checked_code


def test_the_codes_are_those_of_grpc_that_are_errors():
    assert {code.name for code in grpc.StatusCode} == CODES | {"OK"}


def test_there_is_no_served_deadline_by_default():
    assert DEADLINE.get() is None


@pytest.mark.parametrize(
    ("kind", "requests", "responses"),
    [
        (Kind.UNARY_UNARY, False, False),
        (Kind.UNARY_STREAM, False, True),
        (Kind.STREAM_UNARY, True, False),
        (Kind.STREAM_STREAM, True, True),
    ],
)
def test_a_kind_says_which_sides_stream(kind, requests, responses):
    assert kind.streams_requests is requests
    assert kind.streams_responses is responses
    assert Kind((requests, responses)) is kind


def test_default_values_of_an_attempt_result():
    assert AttemptResult("OK") == AttemptResult("OK", error=None, pushback_ns=None, committed=False)


@pytest.mark.parametrize(
    ("word", "name"),
    [
        (AttemptResult("OK"), "code"),
        (NextAttempt(1, 0, 5), "number"),
        (Stop("over"), "reason"),
    ],
)
def test_decisions_are_frozen(word, name):
    with pytest.raises(AttributeError):
        setattr(word, name, None)
    assert not hasattr(word, "__dict__")


# --- Names of codes, as users write them ---


def test_a_status_code_is_given_by_name_or_as_grpc_enum():
    for code in CODES:
        assert checked_code(code, subject="`on`") == code
        assert checked_code(grpc.StatusCode[code], subject="`on`") == code


def test_what_names_no_error_is_refused_with_a_suggestion():
    no_error = "retry names the status code OK, which is not an error"
    codes = "not a gRPC status code; there are ABORTED, ALREADY"
    no_code = "retry must name status codes, such as 'UNAVAILABLE', not"
    wrong_types = (14, None, True, ["UNAVAILABLE"], b"UNAVAILABLE", Kind.UNARY_UNARY)
    rows = [
        ("OK", ConfigurationError, no_error),
        (grpc.StatusCode.OK, ConfigurationError, no_error),
        ("UNAVAILBLE", ConfigurationError, "retry names 'UNAVAILBLE'"),
        ("UNAVAILBLE", ConfigurationError, "did you mean 'UNAVAILABLE'"),
        ("unavailable", ConfigurationError, "did you mean 'UNAVAILABLE'"),
        ("FLAKY", ConfigurationError, codes),
        *((value, TypeError, no_code) for value in wrong_types),
    ]
    rows = [(partial(checked_code, code, subject="retry"), *rest) for code, *rest in rows]
    assert not_refused_so(rows) == []
