"""Status codes, kinds of calls and results of attempts."""

import grpc
import pytest

from rpcwheel.rpc import (
    CODES,
    Criticality,
    Kind,
    checked_code,
    checked_criticality,
)


def test_the_codes_are_those_of_grpc_that_are_errors():
    assert {code.name for code in grpc.StatusCode} == CODES | {"OK"}


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


# --- Names of codes, as users write them ---


def test_a_status_code_is_given_by_name_or_as_grpc_enum():
    for code in CODES:
        assert checked_code(code) == code
        assert checked_code(grpc.StatusCode[code]) == code


# --- Criticality ---


def test_a_more_critical_level_is_greater_and_each_is_true():
    assert sorted(Criticality, reverse=True) == list(Criticality)
    assert max(Criticality) is Criticality.CRITICAL_PLUS
    assert all(Criticality)


def test_the_text_of_a_criticality_is_its_label():
    level = Criticality.SHEDDABLE_PLUS
    assert str(level) == f"{level}" == level.label == "sheddable_plus"


@pytest.mark.parametrize("level", Criticality)
def test_a_criticality_is_given_as_enum_or_by_name_in_any_case(level):
    names = (level.name, level.label, level.label.title(), level.name.replace("_", "-"))
    for given in (level, *names):
        assert checked_criticality(given) is level
