"""Which connections are idle, and the next step to close one."""

from datetime import timedelta

import pytest

from rpcwheel.durations import NEVER
from rpcwheel.idle.core import (
    MAX_ATTEMPTS,
    QUIET_NS,
    STATUS_GRACE_NS,
    ConnectionActivity,
    IdleLimit,
    IdleReason,
    Limits,
    PendingClose,
    SocketState,
    Step,
    idle_reason,
    next_step,
)
from rpcwheel.idle.policy import IdlePolicy

S = 1_000_000_000
QUIET = SocketState(unread=0, unsent=0, received_ago_ns=1000 * S)


def limits(**settings) -> Limits:
    return Limits(IdlePolicy(**settings))


def exceeded(activity: ConnectionActivity, at: int, **settings) -> IdleLimit | None:
    reason = idle_reason(activity, limits(**settings), at * S)
    return None if reason is None else reason.limit


# --- Limits --------------------------------------------------------------------------------------


def test_the_check_interval_is_a_third_of_the_shortest_limit():
    assert limits().check_interval_ns == 20 * S
    assert limits(request_timeout=None).check_interval_ns == 60 * S
    assert limits(read_idle=timedelta(seconds=30), max_age=60).check_interval_ns == 10 * S
    assert limits(check_interval=7, request_timeout=1).check_interval_ns == 7 * S
    assert limits(idle_timeout=None, request_timeout=None).check_interval_ns == NEVER


def test_a_connection_is_idle_after_the_limit_and_not_at_it():
    activity = ConnectionActivity(0)
    assert idle_reason(activity, limits(idle_timeout=10), 10 * S) is None
    reason = idle_reason(activity, limits(idle_timeout=10), 10 * S + 1)
    assert reason == IdleReason(IdleLimit.IDLE, 10 * S, 10 * S + 1)
    assert {limit: IdleReason(limit, 10 * S, 11 * S).text for limit in IdleLimit} == {
        IdleLimit.IDLE: "connection idle for 10 s",
        IdleLimit.READ: "nothing read for 10 s",
        IdleLimit.WRITE: "nothing written for 10 s",
        IdleLimit.AGE: "connection open for 10 s",
    }
    assert exceeded(activity, 10**6, idle_timeout=None) is None


def test_max_age_is_exceeded_though_the_connection_is_used():
    activity = ConnectionActivity(0)
    activity.user.begin(60 * S, streams=False)
    assert exceeded(activity, 60, max_age=60) is None
    assert idle_reason(activity, limits(max_age=60), 61 * S).busy
    activity.user.end(61 * S, streams=False)
    assert not idle_reason(activity, limits(max_age=60), 61 * S).busy


def test_max_age_is_spread_over_a_tenth():
    assert exceeded(ConnectionActivity(0, age_jitter=0.5), 63, max_age=60) is None
    assert exceeded(ConnectionActivity(0, age_jitter=0.5), 64, max_age=60) is IdleLimit.AGE
    assert exceeded(ConnectionActivity(0, age_jitter=None), 100, max_age=60) is None


# --- Steps ---------------------------------------------------------------------------------------


class Closing:
    """A connection that exceeds a limit at `at`, and that is to be closed."""

    def __init__(self, activity: ConnectionActivity, at: int, **settings) -> None:
        self.activity = activity
        self.limits = limits(**settings)
        reason = idle_reason(activity, self.limits, at * S)
        assert reason is not None
        self.pending = PendingClose(reason, at * S)

    def step(self, at: int, **state) -> Step:
        socket = QUIET._replace(**state)
        return next_step(self.activity, self.pending, socket, self.limits, at * S)


def idle(**settings) -> Closing:
    return Closing(ConnectionActivity(0), 11, idle_timeout=10, **settings)


def silent_stream(**settings) -> Closing:
    activity = ConnectionActivity(0)
    activity.user.begin(0, streams=True)
    settings = {"idle_timeout": 10} | settings
    return Closing(activity, 11, close_streams=True, **settings)


def too_old(*, busy: bool) -> Closing:
    activity = ConnectionActivity(0)
    if busy:
        activity.user.begin(59 * S, streams=True)
    return Closing(activity, 61, idle_timeout=None, max_age=60, max_age_grace=30)


@pytest.mark.parametrize(
    ("limit", "other", "way"),
    [("read_idle", "note_write", "note_read"), ("write_idle", "note_read", "note_write")],
)
def test_only_messages_in_the_direction_of_the_limit_keep_the_connection(limit, other, way):
    closing = silent_stream(idle_timeout=None, **{limit: 10})
    getattr(closing.activity.user, other)(11 * S)
    assert closing.step(11) is Step.END_CALLS
    getattr(closing.activity.user, way)(11 * S)
    assert closing.step(11) is Step.KEEP_USED


@pytest.mark.parametrize(
    "state",
    [
        {"unread": 1},
        {"received_ago_ns": QUIET_NS - 1},
        {"received_ago_ns": 5 * S - 1, "unaccounted_ns": 5 * S},
    ],
)
def test_bytes_that_may_be_a_call_are_waited_for_and_then_keep_the_connection(state):
    for closing in (idle(), silent_stream()):
        assert closing.step(11, **state) is Step.WAIT
        closing.pending.attempts = MAX_ATTEMPTS
        assert closing.step(11, **state) is Step.KEEP_BUSY


def test_bytes_before_all_calls_were_accounted_for_do_not_keep_the_connection():
    assert idle().step(11, received_ago_ns=5 * S, unaccounted_ns=5 * S) is Step.SHUTDOWN


def test_window_updates_do_not_keep_a_stream_that_is_only_written():
    closing = silent_stream(idle_timeout=None, read_idle=10)
    assert closing.step(11, received_ago_ns=0) is Step.WAIT
    closing.pending.attempts = MAX_ATTEMPTS
    unknown = {"received_ago_ns": 0, "has_unknown_calls": True}
    assert closing.step(11, **unknown) is Step.KEEP_BUSY
    assert closing.step(11, received_ago_ns=0) is Step.END_CALLS
    closing.pending.ended_ns = 11 * S
    assert closing.step(11, received_ago_ns=0) is Step.SHUTDOWN


def test_streams_end_before_the_shutdown_if_bytes_arrived_until_the_last_attempt():
    closing = silent_stream()
    assert closing.step(11, received_ago_ns=0) is Step.WAIT
    closing.pending.attempts = MAX_ATTEMPTS
    assert closing.step(12) is Step.END_CALLS
    closing.pending.note_step(Step.END_CALLS, closing.limits, 12 * S)
    assert closing.step(13) is Step.SHUTDOWN


def test_a_connection_that_is_too_old_is_shut_down_when_its_last_call_has_ended():
    closing = too_old(busy=True)
    assert closing.step(61) is Step.WAIT_LONG
    closing.activity.user.begin(80 * S, streams=False)  # use makes it no younger
    closing.activity.user.end(80 * S, streams=False)
    assert closing.step(90) is Step.WAIT_LONG
    closing.activity.user.end(90 * S, streams=True)
    assert closing.step(90, received_ago_ns=0) is Step.WAIT
    assert closing.step(90, received_ago_ns=0, has_unknown_calls=True) is Step.WAIT_LONG
    assert closing.step(90) is Step.SHUTDOWN


def test_after_max_age_grace_calls_end_and_the_connection_is_shut_down_whatever_arrives():
    closing = too_old(busy=True)
    closing.activity.user.note_read(91 * S)
    assert closing.step(90, unread=1) is Step.WAIT_LONG
    assert closing.step(91, unread=1) is Step.END_CALLS
    closing.pending.note_step(Step.WAIT_LONG, closing.limits, 90 * S)
    assert (closing.pending.attempts, closing.pending.next_ns) == (1, 91 * S)
    closing.pending.note_step(Step.END_CALLS, closing.limits, 91 * S)
    assert closing.pending.next_ns == 91 * S + STATUS_GRACE_NS
    closing.activity.user.begin(91 * S, streams=False)
    assert closing.step(91, unread=1, unsent=1) is Step.WAIT
    assert closing.step(91, unread=1) is Step.SHUTDOWN
    assert closing.step(92, unread=1, unsent=1) is Step.SHUTDOWN
