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
OLD = "grpc.keepalive_timeout_ms"
RECONNECT = "grpc.min_reconnect_backoff_ms"
IDLE = "grpc.client_idle_timeout_ms"
MAX_IDLE = "grpc.max_connection_idle_ms"

GOOD = [(TIME, 10_000), (PING_TIMEOUT, 5_000), (WITHOUT_CALLS, 1), (WITHOUT_DATA, 0)]
GOOD_SERVER = [(FLOOR, 5_000), (WITHOUT_CALLS, 1)]
LAZY = [(PING_TIMEOUT, 5_000), (WITHOUT_DATA, 0)]


def found(channel=(), server=()):
    """Severity, side and option of all findings."""
    return [(one.severity, one.side, one.option) for one in check_options(channel, server)]


CASES = {
    # Options that fit
    "nothing": ((), (), []),
    "keepalive that is permitted": (GOOD, GOOD_SERVER, []),
    "the default preset, for any server": (channel_options(), None, []),
    "two presets": (channel_options(preset="lan"), server_options(preset="wan"), []),
    "a patient channel, for any server": ([(TIME, 330_000), *LAZY], None, []),
    # Keepalive that is refused
    "any server refuses pings": (GOOD, None, [("error", TIME), ("error", WITHOUT_CALLS)]),
    "just above the floor": ([(TIME, 5_100), *GOOD[1:]], GOOD_SERVER, [("warning", TIME)]),
    "no pings without calls": (GOOD, [(FLOOR, 5_000)], [("error", WITHOUT_CALLS)]),
    "none are sent": ([GOOD[0], *LAZY], [(FLOOR, 5_000)], []),
    "a server without strikes": (GOOD, [(STRIKES, 0)], []),
    "below a second": (
        [(TIME, 500), *GOOD[1:]],
        [(FLOOR, 900), (WITHOUT_CALLS, 1)],
        [("note", TIME)],
    ),
    # What does nothing
    "an old name": ([(TIME, 330_000), (WITHOUT_DATA, 0), (OLD, 5_000)], (), [("error", OLD)]),
    "an old and a new name": (
        [(TIME, 330_000), (WITHOUT_DATA, 0), (OLD, 5_000), (PING_TIMEOUT, 5_000)],
        (),
        [("note", OLD)],
    ),
    "an old name on a server": ((), [(OLD, 5_000)], [("error", OLD)]),
    "both on a server": ((), [(OLD, 5_000), (PING_TIMEOUT, 5_000)], [("note", OLD)]),
    "a name like no other": ([("my.own.number", 1)], (), [("warning", "my.own.number")]),
    "strings": ([("grpc.service_config", "{}"), ("grpc.primary_user_agent", b"shop")], (), []),
    "a string for a number": ([(WITHOUT_CALLS, "yes")], (), [("error", WITHOUT_CALLS)]),
    "two equal names": ([*GOOD, (TIME, 1_000)], GOOD_SERVER, [("warning", TIME)]),
    "a name in bytes": ([(TIME.encode(), 10_000), *GOOD[1:]], GOOD_SERVER, []),
    # What is hardly meant so
    "a short backoff": ([("grpc.initial_reconnect_backoff_ms", 50)], (), []),
    "permit without keepalive": ([(WITHOUT_CALLS, 1)], (), [("warning", WITHOUT_CALLS)]),
    "few pings by default": (GOOD[:3], GOOD_SERVER, [("warning", TIME)]),
    "few pings": ([*GOOD[:3], (WITHOUT_DATA, 5)], GOOD_SERVER, [("warning", WITHOUT_DATA)]),
    "a short time to connect": ([(RECONNECT, 50)], (), [("warning", RECONNECT)]),
    "time to connect": ([(RECONNECT, 5_000)], (), []),
    "idle before a ping": ([*GOOD, (IDLE, 9_000)], GOOD_SERVER, [("warning", IDLE)]),
    "idle without pings": ([GOOD[0], *LAZY, (IDLE, 9_000)], GOOD_SERVER, []),
    # Good to know
    "no ping timeout": ([GOOD[0], *GOOD[2:]], GOOD_SERVER, [("note", TIME)]),
    "a server pings in calls": ((), [(TIME, 10_000), (PING_TIMEOUT, 5_000)], [("note", TIME)]),
    "a server closes idle ones": ((), [(MAX_IDLE, 60_000)], [("note", MAX_IDLE)]),
    "a server closes idle ones, pings": (
        GOOD,
        [*GOOD_SERVER, (MAX_IDLE, 60_000)],
        [("note", MAX_IDLE), ("note", WITHOUT_CALLS)],
    ),
}
"""Options of a channel and of a server, and the severity and option of each finding."""


@pytest.mark.parametrize(("channel", "server", "expected"), CASES.values(), ids=CASES)
def test_check_options_finds(channel, server, expected):
    findings = check_options(channel, server)
    assert [(one.severity, one.option) for one in findings] == expected
    on_channel = {option[0] for option in channel}
    for one in findings:
        assert one.side == ("channel" if one.option in on_channel else "server")


def test_str_of_a_finding_has_problem_and_remedy():
    (finding,) = check_options([("grpc.keepalive_time", 10)])
    assert isinstance(finding, Finding)
    assert str(finding) == (
        "error: channel, grpc.keepalive_time: gRPC (grpcio 1.85.1) has no such option and ignores "
        "it; give grpc.keepalive_time_ms instead"
    )


def test_pings_more_often_than_the_server_permits_end_the_connection():
    (finding,) = check_options(GOOD, [(FLOOR, 20_000), (WITHOUT_CALLS, 1)])
    assert (finding.severity, finding.side, finding.option) == ("error", "channel", TIME)
    assert "every 10 s, the server permits one in 20 s" in finding.problem
    assert "GOAWAY too_many_pings after 4 pings, 40 s" in finding.problem
    assert f"('{FLOOR}', 9000)" in finding.remedy
    assert "after 7 pings" in check_options(GOOD, [(STRIKES, 5)])[0].problem
    assert "300 s" in check_options([(TIME, 299_999), *GOOD[1:]], None)[0].problem


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


def test_an_option_that_is_not_a_pair_is_an_error():
    for option in ["grpc.census", ("grpc.census",), ("grpc.census", 1, 2), 5]:
        assert found([option]) == [("error", "channel", repr(option))]


def test_times_that_are_hardly_meant_are_a_warning():
    (finding,) = check_options((), [("grpc.max_connection_age_ms", 30)])
    assert (finding.severity, finding.remedy) == ("warning", "if 30 s were meant, give 30000")
    (finding,) = check_options([(TIME, 0), *GOOD[1:]], [(FLOOR, 500), (WITHOUT_CALLS, 1)])
    assert (finding.severity, finding.option) == ("warning", TIME)
    assert "pings every second" in finding.problem


def test_findings_are_sorted_by_severity_and_unique():
    bad = [GOOD[0], GOOD[2], ("grpc.nope_ms", 1), ("grpc.nope_ms", 1)]
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
