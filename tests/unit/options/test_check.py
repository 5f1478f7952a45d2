"""What `check_options` finds. That gRPC does so: tests/interop/grpcio/test_canaries_options.py."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from rpcwheel.options import Finding, channel_options, check_options, server_options
from rpcwheel.options.names import KNOWN

TIME = "grpc.keepalive_time_ms"
PING_TIMEOUT = "grpc.http2.ping_timeout_ms"
FLOOR = "grpc.http2.min_ping_interval_without_data_ms"
WITHOUT_CALLS = "grpc.keepalive_permit_without_calls"
WITHOUT_DATA = "grpc.http2.max_pings_without_data"
STRIKES = "grpc.http2.max_ping_strikes"

GOOD = [(TIME, 10_000), (PING_TIMEOUT, 5_000), (WITHOUT_CALLS, 1), (WITHOUT_DATA, 0)]
GOOD_SERVER = [(FLOOR, 5_000), (WITHOUT_CALLS, 1)]


def found(channel=(), server=()):
    """Severity, side and option of all findings."""
    return [(one.severity, one.side, one.option) for one in check_options(channel, server)]


def without(options, *names):
    return [option for option in options if option[0] not in names]


def test_options_that_fit_give_no_finding():
    assert check_options() == []
    assert check_options(GOOD, GOOD_SERVER) == []
    assert check_options(channel_options(), None) == []
    assert check_options(channel_options(preset="lan"), server_options(preset="wan")) == []


def test_str_of_a_finding_has_problem_and_remedy():
    (finding,) = check_options([("grpc.keepalive_time", 10)])
    assert isinstance(finding, Finding)
    assert str(finding) == (
        "error: channel, grpc.keepalive_time: gRPC (grpcio 1.85.1) has no such option and ignores "
        "it; give grpc.keepalive_time_ms instead"
    )


# Keepalive that is refused


def test_pings_more_often_than_the_server_permits_end_the_connection():
    (finding,) = check_options(GOOD, [(FLOOR, 20_000), (WITHOUT_CALLS, 1)])
    assert (finding.severity, finding.side, finding.option) == ("error", "channel", TIME)
    assert "every 10 s, the server permits one in 20 s" in finding.problem
    assert "GOAWAY too_many_pings after 4 pings, 40 s" in finding.problem
    assert f"('{FLOOR}', 9000)" in finding.remedy


def test_without_server_options_the_defaults_of_grpc_are_assumed():
    assert [one.option for one in check_options(GOOD, None)] == [TIME, WITHOUT_CALLS]
    patient = [(TIME, 330_000), *without(GOOD, TIME, WITHOUT_CALLS)]
    assert check_options(patient, None) == []
    assert "300 s" in check_options([(TIME, 299_999), *GOOD[1:]], None)[0].problem


def test_a_keepalive_just_above_the_floor_is_a_warning():
    just = [(TIME, 5_100), *GOOD[1:]]
    assert found(just, GOOD_SERVER) == [("warning", "channel", TIME)]


def test_pings_without_calls_have_to_be_permitted_too():
    assert found(GOOD, [(FLOOR, 5_000)]) == [("error", "channel", WITHOUT_CALLS)]
    assert found(without(GOOD, WITHOUT_CALLS), [(FLOOR, 5_000)]) == []


def test_a_server_without_strikes_refuses_nothing():
    assert found(GOOD, [(STRIKES, 0)]) == []
    (finding, _) = check_options(GOOD, [(STRIKES, 5)])
    assert "after 7 pings" in finding.problem


def test_a_keepalive_below_a_second_counts_as_a_second():
    fast = [(TIME, 500), *GOOD[1:]]
    assert found(fast, [(FLOOR, 900), (WITHOUT_CALLS, 1)]) == [("note", "channel", TIME)]


# What does nothing


@pytest.mark.parametrize("side", ["channel", "server"])
def test_keepalive_timeout_ms_alone_does_nothing(side):
    old = "grpc.keepalive_timeout_ms"
    quiet = {"channel": [(TIME, 330_000), (WITHOUT_DATA, 0)], "server": []}[side]
    assert found(**{side: [*quiet, (old, 5_000)]}) == [("error", side, old)]
    both = [*quiet, (old, 5_000), (PING_TIMEOUT, 5_000)]
    assert found(**{side: both}) == [("note", side, old)]


def test_an_unknown_name_is_an_error_with_a_suggestion():
    for name, meant in [
        ("grpc.http2.min_recv_ping_interval_without_data_ms", FLOOR),
        ("grpc.http2.min_time_between_pings_ms", TIME),
        ("grpc.keepalive_time", TIME),
        ("grpc.keepalive_permit_without_call", WITHOUT_CALLS),
        ("keepalive_time_ms", TIME),
        ("grpc.max_receive_message_lenght", "grpc.max_receive_message_length"),
    ]:
        (finding,) = check_options((), [(name, 10_000)])
        assert (finding.severity, finding.option) == ("error", name)
        assert meant in finding.remedy


def test_an_unknown_name_without_a_similar_one_is_a_warning():
    assert found([("my.own.number", 1)]) == [("warning", "channel", "my.own.number")]


def test_an_option_of_the_other_side_is_an_error():
    for side, option in [
        ("channel", (FLOOR, 5_000)),
        ("channel", ("grpc.max_connection_idle_ms", 5_000)),
        ("server", ("grpc.max_reconnect_backoff_ms", 5_000)),
        ("server", ("grpc.use_local_subchannel_pool", 1)),
    ]:
        assert found(**{side: [option]}) == [("error", side, option[0])]


def test_a_value_of_another_type_is_an_error():
    for value, said in [
        (10.0, "ignores 10.0"),
        ("10000", "ignores '10000'"),
        (None, "raises for None"),
        (1 << 31, "raises for 2147483648"),
        (True, "reads True as 1 ms"),
    ]:
        (finding,) = check_options((), [(FLOOR, value)])
        assert finding.severity == "error"
        assert said in finding.problem
        assert (
            found(GOOD, [(FLOOR, value), (WITHOUT_CALLS, 1)])[0][2] == FLOOR
        )  # it counts as not given


def test_options_that_take_strings_are_accepted():
    assert found([("grpc.service_config", "{}"), ("grpc.primary_user_agent", b"shop")]) == []
    assert found([(WITHOUT_CALLS, "yes")]) == [("error", "channel", WITHOUT_CALLS)]


def test_an_option_that_is_not_a_pair_is_an_error():
    for option in ["grpc.census", ("grpc.census",), ("grpc.census", 1, 2), 5]:
        assert found([option]) == [("error", "channel", repr(option))]


def test_the_second_of_two_equal_names_is_a_warning():
    twice = [*GOOD, (TIME, 1_000)]
    assert found(twice, GOOD_SERVER) == [("warning", "channel", TIME)]


def test_a_name_in_bytes_is_the_same_name():
    assert found([(b"grpc.keepalive_time_ms", 10_000)], GOOD_SERVER) == found(
        [(TIME, 10_000)], GOOD_SERVER
    )


# What is hardly meant so


def test_a_few_milliseconds_are_a_warning():
    (finding,) = check_options((), [("grpc.max_connection_age_ms", 30)])
    assert (finding.severity, finding.remedy) == ("warning", "if 30 s were meant, give 30000")
    assert found([("grpc.initial_reconnect_backoff_ms", 50)]) == []


def test_a_keepalive_of_zero_is_a_warning():
    (finding,) = check_options([(TIME, 0), *GOOD[1:]], [(FLOOR, 500), (WITHOUT_CALLS, 1)])
    assert (finding.severity, finding.option) == ("warning", TIME)
    assert "pings every second" in finding.problem


def test_permit_without_calls_without_keepalive_is_a_warning():
    assert found([(WITHOUT_CALLS, 1)]) == [("warning", "channel", WITHOUT_CALLS)]


def test_a_limit_of_pings_without_data_is_a_warning():
    assert found(without(GOOD, WITHOUT_DATA), GOOD_SERVER) == [("warning", "channel", TIME)]
    five = [*without(GOOD, WITHOUT_DATA), (WITHOUT_DATA, 5)]
    assert found(five, GOOD_SERVER) == [("warning", "channel", WITHOUT_DATA)]


def test_a_short_min_reconnect_backoff_is_a_warning():
    short = [("grpc.min_reconnect_backoff_ms", 50)]
    assert found(short) == [("warning", "channel", "grpc.min_reconnect_backoff_ms")]
    assert found([("grpc.min_reconnect_backoff_ms", 5_000)]) == []


def test_a_client_idle_timeout_below_keepalive_is_a_warning():
    idle = ("grpc.client_idle_timeout_ms", 9_000)
    assert found([*GOOD, idle], GOOD_SERVER) == [("warning", "channel", idle[0])]
    assert found([*without(GOOD, WITHOUT_CALLS), idle], GOOD_SERVER) == []


# Good to know


def test_keepalive_without_ping_timeout_is_a_note():
    assert found(without(GOOD, PING_TIMEOUT), GOOD_SERVER) == [("note", "channel", TIME)]


def test_server_keepalive_without_calls_off_is_a_note():
    server = [(TIME, 10_000), (PING_TIMEOUT, 5_000)]
    assert found((), server) == [("note", "server", TIME)]


def test_max_connection_idle_is_a_note():
    idle = ("grpc.max_connection_idle_ms", 60_000)
    assert found((), [idle]) == [("note", "server", idle[0])]
    assert found(GOOD, [*GOOD_SERVER, idle]) == [
        ("note", "server", idle[0]),
        ("note", "channel", WITHOUT_CALLS),
    ]


# All of it


def test_findings_are_sorted_by_severity_and_unique():
    bad = [*without(GOOD, WITHOUT_DATA, PING_TIMEOUT), ("grpc.nope_ms", 1), ("grpc.nope_ms", 1)]
    severities = [one.severity for one in check_options(bad, None)]
    assert severities == sorted(severities, key=["error", "warning", "note"].index)
    assert len(set(check_options(bad, None))) == len(severities)


@given(
    some.lists(
        some.tuples(
            some.sampled_from(sorted(KNOWN)) | some.text(max_size=9) | some.binary(max_size=3),
            some.integers() | some.booleans() | some.text(max_size=3) | some.none() | some.floats(),
        )
    ),
    some.lists(
        some.tuples(some.sampled_from(sorted(KNOWN)), some.integers(-(2**31), 2**31 - 1))
    ) | some.none(),
)  # fmt: skip
@settings(max_examples=60)
def test_any_list_of_options_is_checked_without_an_exception(channel, server):
    for finding in check_options(channel, server):
        assert finding.problem
        assert finding.remedy
