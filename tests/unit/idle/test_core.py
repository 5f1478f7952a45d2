"""Which connection is idle, and what is done about it next."""

import pytest

from rpcwheel.durations import NEVER
from rpcwheel.idle.core import (
    LATE_NS,
    QUIET_NS,
    TRIES,
    Look,
    Mark,
    Reason,
    Seen,
    Step,
    judge,
    step,
)
from rpcwheel.idle.limits import Limits
from rpcwheel.idle.policy import IdlePolicy

S = 1_000_000_000
QUIET = Look(unread=0, unsent=0, received_ago_ns=1000 * S)


def limits(**settings) -> Limits:
    return Limits.from_policy(IdlePolicy(**settings))


def seen(at=0, **settings) -> Seen:
    return Seen(at, **settings)


def reason(one: Seen, at: int, **settings) -> Reason | None:
    due = judge(one, limits(**settings), at * S)
    return None if due is None else due.reason


# Limits


def test_without_limits_nothing_is_looked_at():
    assert limits(idle_timeout=None).check_ns == NEVER
    assert reason(seen(), 10**6, idle_timeout=None) is None


# Idle


def test_a_connection_is_idle_after_the_limit_and_not_at_it():
    assert judge(seen(), limits(idle_timeout=10), 10 * S) is None
    due = judge(seen(), limits(idle_timeout=10), 10 * S + 1)
    assert (due.reason, due.idle_ns) == (Reason.IDLE, 10 * S + 1)
    assert due.text == "connection idle for 10 s"


def test_what_was_read_and_what_was_written_keep_it_open():
    one = seen()
    one.user.begin(1 * S, streams=False)
    one.user.wrote(5 * S)
    one.user.end(5 * S, streams=False)
    assert reason(one, 15, idle_timeout=10) is None
    assert reason(one, 16, idle_timeout=10) is Reason.IDLE


def test_a_call_in_flight_is_not_idle_however_long_it_takes():
    one = seen()
    one.user.begin(1 * S, streams=False)
    assert reason(one, 10**6, idle_timeout=1, read_idle=1, write_idle=1, close_streams=True) is None


def test_the_end_of_a_call_begins_all_the_limits_anew():
    one = seen()
    one.user.begin(1 * S, streams=False)
    one.user.end(100 * S, streams=False)
    limited = {"idle_timeout": 10, "read_idle": 10, "write_idle": 10}
    assert reason(one, 110, **limited) is None
    assert reason(one, 111, **limited) is Reason.IDLE


def test_a_silent_stream_is_idle_only_if_the_policy_says_so():
    one = seen()
    one.user.begin(0, streams=True)
    assert reason(one, 100, idle_timeout=10) is None
    assert reason(one, 100, idle_timeout=10, close_streams=True) is Reason.IDLE


def test_a_stream_that_goes_one_way_only_is_not_all_idle():
    for way in ("read", "wrote"):
        one = seen()
        one.user.begin(0, streams=True)
        getattr(one.user, way)(95 * S)
        assert reason(one, 100, idle_timeout=10, close_streams=True) is None, way


def test_read_idle_and_write_idle_look_one_way_each():
    one = seen()
    one.user.begin(0, streams=True)
    one.user.wrote(95 * S)
    streams = {"idle_timeout": None, "close_streams": True}
    assert reason(one, 100, read_idle=10, **streams) is Reason.READ
    assert reason(one, 100, write_idle=10, **streams) is None
    other = seen()
    other.user.begin(0, streams=True)
    other.user.read(95 * S)
    assert reason(other, 100, write_idle=10, **streams) is Reason.WRITE
    assert reason(other, 100, read_idle=10, **streams) is None


def test_heartbeats_keep_nothing_open_unless_asked():
    one = seen()
    one.beats.begin(95 * S, streams=True)
    assert reason(one, 100, idle_timeout=10) is Reason.IDLE
    assert reason(one, 200, idle_timeout=10, count_heartbeats=True) is None  # its stream is open
    one.beats.end(95 * S, streams=True)
    assert reason(one, 100, idle_timeout=10, count_heartbeats=True) is None
    assert reason(one, 106, idle_timeout=10, count_heartbeats=True) is Reason.IDLE


# Age


def test_a_connection_that_is_too_old_is_closed_though_it_is_used():
    one = seen()
    one.user.begin(59 * S, streams=False)
    one.user.end(60 * S, streams=False)
    assert reason(one, 60, max_age=60) is None
    assert reason(one, 61, max_age=60) is Reason.AGE


def test_what_is_open_on_one_that_is_too_old_has_its_grace():
    one = seen()
    one.user.begin(59 * S, streams=True)
    aged = {"max_age": 60, "max_age_grace": 30, "idle_timeout": None}
    mark, found = marked(one, 61, **aged)
    assert mark.due.waits
    assert step(one, mark, QUIET, found, 61 * S) is Step.WAIT_LONG
    one.user.begin(80 * S, streams=False)  # that it is used makes it no younger
    assert step(one, mark, QUIET, found, 90 * S) is Step.WAIT_LONG
    assert step(one, mark, QUIET, found, 91 * S) is Step.END_CALLS


def test_one_that_is_too_old_goes_as_soon_as_nothing_is_open():
    one = seen()
    one.user.begin(59 * S, streams=False)
    mark, found = marked(one, 61, max_age=60)
    one.user.end(70 * S, streams=False)
    just_now = QUIET._replace(received_ago_ns=0)
    assert step(one, mark, just_now, found, 70 * S) is Step.WAIT
    assert step(one, mark, QUIET, found, 70 * S) is Step.SHUTDOWN


def test_the_grace_begins_when_the_age_is_noticed_however_late_that_is():
    one = seen()
    one.user.begin(59 * S, streams=False)
    mark, found = marked(one, 120, max_age=60, max_age_grace=30)
    assert step(one, mark, QUIET, found, 149 * S) is Step.WAIT_LONG
    assert step(one, mark, QUIET, found, 150 * S) is Step.END_CALLS


@pytest.mark.parametrize(("close", "busy"), [("shutdown", True), ("goaway", False)])
def test_the_client_of_one_that_is_too_old_is_asked_to_leave_if_it_can_be(close, busy):
    one = seen()
    one.plain = True
    if busy:
        one.user.begin(59 * S, streams=False)
    mark, found = marked(one, 61, max_age=60, max_age_grace=30, close=close)
    just_now = Look(unread=1, unsent=0, received_ago_ns=0)
    assert step(one, mark, just_now, found, 61 * S) is Step.GOAWAY
    one.plain = False  # under TLS it can't be
    assert step(one, mark, just_now, found, 61 * S) is (Step.WAIT_LONG if busy else Step.WAIT)


def test_a_share_of_a_tenth_keeps_those_apart_that_came_together():
    one = seen(share=0.5)
    assert reason(one, 63, max_age=60) is None
    assert reason(one, 64, max_age=60) is Reason.AGE


# Steps


def marked(one: Seen, at: int, **settings) -> tuple[Mark, Limits]:
    found = limits(**settings)
    due = judge(one, found, at * S)
    assert due is not None
    return Mark(due, one.moves(found, due.reason), at * S), found


def test_one_that_is_idle_and_quiet_is_shut():
    one = seen()
    mark, found = marked(one, 11, idle_timeout=10)
    assert step(one, mark, QUIET, found, 11 * S) is Step.SHUTDOWN


def test_a_call_that_began_since_the_decision_keeps_it():
    one = seen()
    mark, found = marked(one, 11, idle_timeout=10)
    one.user.begin(11 * S, streams=False)
    assert step(one, mark, QUIET, found, 11 * S) is Step.KEEP_USED
    one.user.end(11 * S, streams=False)
    assert step(one, mark, QUIET, found, 11 * S) is Step.KEEP_USED


def test_a_message_since_the_decision_keeps_it():
    for way in ("read", "wrote"):
        one = seen()
        one.user.begin(0, streams=True)
        mark, found = marked(one, 11, idle_timeout=10, close_streams=True)
        getattr(one.user, way)(11 * S)
        assert step(one, mark, QUIET, found, 11 * S) is Step.KEEP_USED, way


def test_a_heartbeat_since_the_decision_keeps_it_only_if_heartbeats_count():
    for count, then in ((False, Step.END_CALLS), (True, Step.KEEP_USED)):
        one = seen()
        mark, found = marked(one, 11, idle_timeout=10, count_heartbeats=count)
        one.beats.begin(11 * S, streams=False)
        assert step(one, mark, QUIET, found, 11 * S) is then


def test_bytes_that_just_came_are_waited_for_and_keep_it_if_they_go_on():
    for look in (QUIET._replace(unread=1), QUIET._replace(received_ago_ns=QUIET_NS - 1)):
        one = seen()
        mark, found = marked(one, 11, idle_timeout=10)
        assert step(one, mark, look, found, 11 * S) is Step.WAIT
        mark.tries = TRIES
        assert step(one, mark, look, found, 11 * S) is Step.KEEP_BUSY


def test_bytes_that_never_are_a_message_do_not_keep_a_stream_that_is_not_read():
    """Each message that is written has the client say that there is room for more."""
    one = seen()
    one.user.begin(0, streams=True)
    mark, found = marked(one, 11, idle_timeout=None, read_idle=10, close_streams=True)
    busy = Look(unread=0, unsent=0, received_ago_ns=0)
    assert step(one, mark, busy, found, 11 * S) is Step.WAIT
    mark.tries = TRIES
    assert step(one, mark, busy, found, 11 * S) is Step.END_CALLS
    mark.ended_ns = 11 * S
    assert step(one, mark, busy, found, 11 * S) is Step.SHUTDOWN


def test_a_call_that_waits_keeps_one_that_others_have_used_since_it_came():
    """Its bytes are the last that came, and older than the end of the call before it."""
    one = seen()
    one.user.begin(1 * S, streams=False)
    one.user.end(5 * S, streams=False)
    mark, found = marked(one, 16, idle_timeout=10)
    look = QUIET._replace(coming_ago_ns=14 * S, received_ago_ns=14 * S)
    assert step(one, mark, look, found, 16 * S) is Step.WAIT
    mark.tries = TRIES
    assert step(one, mark, look, found, 16 * S) is Step.KEEP_DOUBTFUL


def test_what_came_before_the_oldest_call_that_is_on_its_way_keeps_nothing():
    one = seen()
    mark, found = marked(one, 25, idle_timeout=10)
    for came_s in (0, 5, 1000):
        for ago_ns, then in ((LATE_NS - 1, Step.WAIT), (LATE_NS, Step.SHUTDOWN)):
            look = QUIET._replace(coming_ago_ns=came_s * S, received_ago_ns=came_s * S + ago_ns)
            assert step(one, mark, look, found, 25 * S) is then, (came_s, ago_ns)


def test_bytes_that_the_server_may_not_have_seen_are_waited_for():
    one = seen()
    mark, found = marked(one, 11, idle_timeout=10)
    for ago_ns, then in ((5 * S - 1, Step.WAIT), (5 * S, Step.SHUTDOWN)):
        look = QUIET._replace(seen_ago_ns=5 * S, received_ago_ns=ago_ns)
        assert step(one, mark, look, found, 11 * S) is then


def test_calls_that_may_be_anywhere_hold_one_that_was_asked_to_leave():
    one = seen()
    one.plain = True
    mark, found = marked(one, 11, idle_timeout=10, close="goaway", goaway_grace=5)
    mark.left_ns = 11 * S
    crossed = QUIET._replace(received_ago_ns=9 * S)  # it was sent before the client heard
    assert step(one, mark, crossed._replace(coming_ago_ns=9 * S), found, 20 * S) is Step.WAIT_LONG
    assert step(one, mark, crossed, found, 20 * S) is Step.SHUTDOWN
    just_now = QUIET._replace(unread=1)
    assert step(one, mark, just_now, found, 20 * S) is Step.WAIT


@pytest.mark.parametrize(
    ("limit", "other", "way"), [("read_idle", "wrote", "read"), ("write_idle", "read", "wrote")]
)
def test_only_what_the_limit_is_about_keeps_a_stream_that_is_busy_the_other_way(limit, other, way):
    one = seen()
    one.user.begin(0, streams=True)
    mark, found = marked(one, 11, idle_timeout=None, close_streams=True, **{limit: 10})
    getattr(one.user, other)(11 * S)
    assert step(one, mark, QUIET, found, 11 * S) is Step.END_CALLS
    getattr(one.user, way)(11 * S)
    assert step(one, mark, QUIET, found, 11 * S) is Step.KEEP_USED


def test_bytes_that_just_came_keep_streams_from_being_ended():
    one = seen()
    one.user.begin(0, streams=True)
    mark, found = marked(one, 11, idle_timeout=10, close_streams=True)
    look = QUIET._replace(unread=1)
    assert step(one, mark, look, found, 11 * S) is Step.WAIT


def test_streams_are_ended_first_and_their_status_is_let_out():
    one = seen()
    one.user.begin(0, streams=True)
    mark, found = marked(one, 11, idle_timeout=10, close_streams=True)
    assert step(one, mark, QUIET, found, 11 * S) is Step.END_CALLS
    one.user.end(11 * S, streams=True)
    unsent = QUIET._replace(unsent=1)
    assert step(one, mark, unsent, found, 11 * S) is Step.WAIT
    assert step(one, mark, QUIET, found, 11 * S) is Step.SHUTDOWN
    mark.tries = TRIES  # the client takes nothing any more
    assert step(one, mark, unsent, found, 11 * S) is Step.SHUTDOWN


def test_what_can_not_be_known_keeps_one_on_which_anything_came_in():
    one = seen()
    mark, found = marked(one, 11, idle_timeout=10)
    look = QUIET._replace(received_ago_ns=5 * S, hidden_ago_ns=5 * S)
    assert step(one, mark, look, found, 11 * S) is Step.KEEP_DOUBTFUL
    silent = QUIET._replace(hidden_ago_ns=5 * S)
    assert step(one, mark, silent, found, 11 * S) is Step.SHUTDOWN
    before = look._replace(hidden_ago_ns=12 * S)  # since then it was used by a known call
    assert step(one, mark, before, found, 11 * S) is Step.SHUTDOWN


def test_a_client_in_plaintext_is_asked_to_leave_and_shut_when_it_does_not():
    one = seen()
    one.plain = True
    mark, found = marked(one, 11, idle_timeout=10, close="goaway", goaway_grace=5)
    assert step(one, mark, QUIET._replace(unsent=1), found, 11 * S) is Step.WAIT
    assert step(one, mark, QUIET, found, 11 * S) is Step.GOAWAY
    mark.left_ns = 11 * S
    one.user.begin(11 * S, streams=False)  # it was on its way
    assert step(one, mark, QUIET, found, 100 * S) is Step.WAIT_LONG
    one.user.end(12 * S, streams=False)
    assert step(one, mark, QUIET, found, 15 * S) is Step.WAIT_LONG
    assert step(one, mark, QUIET, found, 16 * S) is Step.SHUTDOWN


def test_a_client_that_may_speak_tls_is_not_asked():
    one = seen()
    mark, found = marked(one, 11, idle_timeout=10, close="goaway")
    assert step(one, mark, QUIET, found, 11 * S) is Step.SHUTDOWN


def test_one_that_is_too_old_is_ended_at_the_end_of_its_grace_whatever_comes():
    one = seen()
    one.user.begin(0, streams=True)
    mark, found = marked(one, 61, max_age=60, max_age_grace=30)
    one.user.read(91 * S)
    busy = Look(unread=1, unsent=0, received_ago_ns=0)
    assert step(one, mark, busy, found, 91 * S) is Step.END_CALLS
    mark.ended_ns = 91 * S
    one.user.begin(91 * S, streams=False)  # one of many that never end
    assert step(one, mark, busy._replace(unsent=1), found, 91 * S) is Step.WAIT
    assert step(one, mark, busy, found, 91 * S) is Step.SHUTDOWN
    assert step(one, mark, busy._replace(unsent=1), found, 92 * S) is Step.SHUTDOWN


def test_one_that_was_asked_to_leave_is_ended_at_the_end_of_its_grace():
    one = seen()
    one.plain = True
    one.user.begin(0, streams=True)
    mark, found = marked(one, 61, max_age=60, max_age_grace=30, close="goaway")
    assert step(one, mark, QUIET, found, 61 * S) is Step.GOAWAY
    mark.left_ns = 61 * S
    assert step(one, mark, QUIET, found, 90 * S) is Step.WAIT_LONG
    assert step(one, mark, QUIET, found, 91 * S) is Step.END_CALLS
    mark.ended_ns = 91 * S
    assert step(one, mark, QUIET, found, 91 * S) is Step.SHUTDOWN
